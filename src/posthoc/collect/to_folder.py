"""Collecting to a folder: a predictor run once over data of any size, in one pass that goes on where it was killed."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from posthoc.collect.fingerprint import fingerprint
from posthoc.collect.network import Backbone
from posthoc.collect.outputs import Outputs, join
from posthoc.errors import DataError, PosthocError
from posthoc.progress import progress_bar
from posthoc.validation import integer

__all__ = ["Span", "SpanReader", "collect_to_folder", "row_count", "spans", "write_to_folder"]

Span = tuple[int, int]
"""The first row of a batch and the first one after it."""


def collect_to_folder(
    backbone: Backbone,
    data: Any,
    folder: str | os.PathLike[str],
    *,
    identity: Mapping[str, Any],
    collate: Callable[[list[Any]], Any] = default_collate,
    inputs: bool = False,
    batch_size: int = 64,
    workers: int = 0,
    force: bool = False,
    progress: bool | None = None,
) -> Outputs:
    """Runs the predictor over the data into a folder, and opens it: `Outputs` mapped from the disk.

    data: rows by number (`len` and `[]`, as a PyTorch dataset), or an iterable with `skip(rows)`; their order must be
        fixed. `collate` makes a batch of some rows: (x, y), a mapping, or inputs alone.
    identity: all that tells the rows from others, the data above all; the network's fingerprint and layer are added
        where they are not in it. A folder of another identity is refused, unless `force` starts it over.
    inputs: whether the flattened inputs are stored as well.
    workers: how many processes read the data; with 0 this one does.
    progress: whether to show a bar; by default on a terminal.

    A run that was killed goes on where it ended when it is started again, and leaves the bytes that an uninterrupted
    one would have.
    """
    integer("batch_size", batch_size, 1)
    integer("workers", workers, 0)
    layer = f"input of {backbone.layer}" if backbone.takes_input else backbone.layer
    whole = {"layer": layer, "inputs": inputs, **identity}
    if "network" not in whole:
        whole["network"] = fingerprint(backbone.module)

    def parts(start: int) -> Generator[Outputs]:
        batches = read_batches(data, spans(start, row_count(data), batch_size), collate, workers, backbone)
        with backbone.reading(features=True, inputs=inputs) as read:
            for batch in batches:
                yield join([read(batch)]).to(torch.device("cpu"))

    return write_to_folder(parts, folder, identity=whole, total=row_count(data), force=force, progress=progress)


def write_to_folder(
    parts: Callable[[int], Generator[Outputs]],
    folder: str | os.PathLike[str],
    *,
    identity: Mapping[str, Any],
    total: int | None,
    force: bool = False,
    progress: bool | None = None,
) -> Outputs:
    """Writes the outputs that `parts(first_row)` yields from the first row that is not in the folder yet."""
    from posthoc.collect import OutputsWriter, open_outputs

    with OutputsWriter(folder, identity=identity, force=force) as writer:
        # Closed whatever happens: suspended parts would keep the network in eval mode.
        bar = progress_bar("collecting", total, writer.rows, unit="rows", enabled=progress)
        with closing(parts(writer.rows)) as stream, bar as report:
            for part in stream:
                writer.append(part)
                report(writer.rows)
        if total is not None and writer.rows != total:
            raise DataError(f"Expected {total} rows of outputs, got {writer.rows}: one for every row of the data.")
        writer.finish()
    return open_outputs(folder)


def row_count(data: Any) -> int | None:
    """How many rows there are, or None where only going through them would tell."""
    return len(data) if hasattr(data, "__len__") else None


def spans(start: int, total: int | None, size: int) -> Iterator[Span]:
    """Batches from a row on, without end where the number of rows is not known."""
    for first in range(start, total, size) if total is not None else count(start, size):
        yield first, first + size if total is None else min(first + size, total)


def read_batches(
    data: Any, wanted: Iterable[Span], collate: Callable[[list[Any]], Any], workers: int, backbone: Backbone
) -> Iterator[Any]:
    """The batches in order, read ahead by the workers."""
    streamed = not hasattr(data, "__getitem__")
    loader: DataLoader[Any] = DataLoader(
        SpanReader(data, collate),
        batch_size=None,
        sampler=wanted,
        collate_fn=as_it_is,
        num_workers=min(workers, 1) if streamed else workers,  # more would go through the same stream again
        pin_memory=backbone.device is not None and backbone.device.type == "cuda",
        generator=torch.Generator(),  # a DataLoader without one draws a seed from the global generator
    )
    for batch in loader:
        if isinstance(batch, PosthocError):
            raise batch
        if batch is None:
            return
        yield batch


class SpanReader(Dataset[Any]):
    """Batches by their spans; None for one beyond the end. An error of ours is returned, not raised: out of a worker it
    would come as text with a traceback in it."""

    def __init__(self, data: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.data, self.collate = data, collate
        self.stream: Iterator[Any] | None = None

    def __getitem__(self, span: Span) -> Any:
        try:
            rows = self._rows(*span)
            return self.collate(rows) if rows else None
        except PosthocError as error:
            return error

    def _rows(self, start: int, stop: int) -> list[Any]:
        if hasattr(self.data, "__getitems__"):
            return list(self.data.__getitems__(list(range(start, stop))))
        if hasattr(self.data, "__getitem__"):
            return [self.data[row] for row in range(start, stop)]
        if self.stream is None:
            self.stream = iter(self.data.skip(start))
        return list(islice(self.stream, stop - start))


def as_it_is(batch: Any) -> Any:
    return batch
