"""Collecting to a folder: a predictor run once over data of any size, in one pass that goes on where it was killed."""

from __future__ import annotations

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
from posthoc.io import StrPath
from posthoc.progress import progress_bar
from posthoc.validation import integer

Span = tuple[int, int]
"""The first row of a batch and the first one after it."""


def collect_to_folder(
    backbone: Backbone,
    data: Any,
    folder: StrPath,
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

    A run that was killed goes on where it ended when it is started again, and leaves the bytes that an uninterrupted
    one would have.

    Args:
        backbone: The predictor.
        data: Rows by number (`len` and `[]`, as a PyTorch dataset), or an iterable with `skip(rows)`; their order must
            be fixed.
        folder: A new or empty folder, or one that an earlier run began.
        identity: All that tells the rows from others, the data above all; the network's fingerprint and layer are
            added where they are not in it. A folder of another identity is refused.
        collate: Makes a batch of some rows: (x, y), a mapping, or inputs alone.
        inputs: Whether the flattened inputs are stored as well.
        batch_size: The number of rows in a batch.
        workers: The number of processes that read the data; with 0 this one does.
        force: Whether to start over a folder of another identity.
        progress: Whether to show a bar; by default on a terminal.
    """
    integer("batch_size", batch_size, 1)
    integer("workers", workers, 0)
    layer = f"input of {backbone.layer}" if backbone.takes_input else backbone.layer
    network = identity["network"] if "network" in identity else fingerprint(backbone.module)
    identity = {"layer": layer, "inputs": inputs, **identity, "network": network}
    total = len(data) if hasattr(data, "__len__") else None  # else only going through them would tell

    def parts(start: int) -> Generator[Outputs]:
        loader: DataLoader[Any] = DataLoader(
            SpanReader(data, collate),
            batch_size=None,
            sampler=spans(start, total, batch_size),
            collate_fn=as_it_is,
            num_workers=workers if hasattr(data, "__getitem__") else min(workers, 1),  # a stream has one reader
            pin_memory=backbone.device is not None and backbone.device.type == "cuda",
            generator=torch.Generator(),  # a DataLoader without one draws a seed from the global generator
        )
        with backbone.reading(features=True, inputs=inputs) as read:
            for outputs in read(until_end(loader)):
                yield join([outputs]).to(torch.device("cpu"))

    return write_to_folder(parts, folder, identity=identity, total=total, force=force, progress=progress)


def write_to_folder(
    parts: Callable[[int], Generator[Outputs]],
    folder: StrPath,
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


def spans(start: int, total: int | None, size: int) -> Iterator[Span]:
    """Batches from a row on, without end where the number of rows is not known."""
    for first in range(start, total, size) if total is not None else count(start, size):
        yield first, first + size if total is None else min(first + size, total)


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


def until_end(batches: Iterable[Any]) -> Iterator[Any]:
    """Yields the batches of a `SpanReader` up to its end, and raises the error that it returned."""
    for batch in batches:
        if batch is None:
            return
        if isinstance(batch, PosthocError):
            raise batch
        yield batch


def as_it_is(batch: Any) -> Any:
    """Returns the batch."""
    return batch
