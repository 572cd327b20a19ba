"""What users hand over, as a stream of batches: loaders, datasets, pairs of arrays, mappings like Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from posthoc.collect.arrays import arrays, as_tensor, cut, is_array, is_arrays, is_list, is_numbers
from posthoc.errors import DataError

__all__ = ["TARGET_KEYS", "Batch", "iterate", "move", "read_batch"]

TARGET_KEYS = ("labels", "label", "targets", "target", "y")


class Batch(NamedTuple):
    """How to call the predictor once, and what was true."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any | None


def read_batch(batch: Any) -> Batch:
    """(x, y), (x₁, x₂, …, y), a mapping with its labels under a usual name, or inputs alone."""
    if isinstance(batch, Mapping):
        kwargs = dict(batch)
        found = [key for key in TARGET_KEYS if key in kwargs]
        return Batch((), kwargs, kwargs.pop(found[0]) if found else None)
    if isinstance(batch, tuple | list):
        if not batch:
            raise DataError("Expected batches (x, y), mappings or tensors, got an empty sequence.")
        *args, target = batch if len(batch) > 1 else [batch[0], None]
        if len(args) == 1 and isinstance(args[0], Mapping):  # (mapping, y)
            return Batch((), dict(args[0]), target)
        return Batch(tuple(args), {}, target)
    return Batch((batch,), {}, None)


def iterate(data: Any, batch_size: int) -> Iterator[Any]:
    """The batches in data: arrays are cut into rows of `batch_size`, datasets are loaded, loaders pass through."""
    data = arrays(data)
    if is_arrays(data):
        yield from cut(data, batch_size)
    elif is_dataset(data):
        # A generator of its own: a DataLoader without one draws a seed from the global generator.
        yield from DataLoader(data, batch_size=batch_size, collate_fn=collate, generator=torch.Generator())
    elif isinstance(data, Iterable):
        yield from stream(data, batch_size)
    else:
        raise DataError(
            "Expected a DataLoader, a pair of arrays (x, y), a mapping of arrays or posthoc.Outputs, "
            f"got {type(data).__name__}."
        )


def is_dataset(data: Any) -> bool:
    """Whether data have rows by number. Many that have can be iterated too, and lists of batches can be both."""
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or isinstance(data, list | tuple):
        return False
    if isinstance(data, Dataset) or not isinstance(data, Iterable):
        return not isinstance(data, IterableDataset)
    return len(data) > 0 and is_row(data[0])  # type: ignore[arg-type, index]


def has_columns(data: Any) -> bool:
    """Whether data are a dataset of Hugging Face's, whose items are rows."""
    return hasattr(data, "column_names")


def stream(data: Iterable[Any], size: int) -> Iterator[Any]:
    """The batches of a loader, a list or a generator; an iterable dataset's rows, in batches."""
    items = iter(data)
    for first in items:
        everything = chain([first], items)
        if has_columns(data) or (isinstance(data, IterableDataset) and gives_rows(first)):
            while rows := list(islice(everything, size)):
                yield collate(rows)
        elif is_row(first):
            raise DataError(
                "Expected batches, got single rows, whose target is one number: put the data into a DataLoader, which "
                "makes batches of them."
            )
        else:
            yield from everything


def is_row(item: Any) -> bool:
    """Whether an item is surely one row and no batch: its target is one number, or longer or shorter than its input."""
    batch = read_batch(item)
    inputs, target = shapes([*batch.args, *batch.kwargs.values()]), shapes([batch.target])
    if not target or any(len(shape) > 1 and shape[0] == 1 for shape in inputs):
        return False
    return not target[0] or (bool(inputs) and all(len(shape) == 1 and shape[:1] != target[0][:1] for shape in inputs))


def gives_rows(first: Any) -> bool:
    """Whether an iterable dataset, which may give rows or batches, gives rows, as far as its first item tells."""
    batch = read_batch(first)
    found = shapes([*batch.args, *batch.kwargs.values(), batch.target])
    if any(not shape for shape in found) or len({shape[0] for shape in found}) > 1:
        return True
    if all(len(shape) < 2 for shape in found):
        raise DataError(
            "Expected to see from the first item whether this iterable dataset gives rows or batches, got shapes "
            f"{found}, which could be either: put it into a DataLoader (batches: with batch_size=None)."
        )
    return False


def shapes(values: list[Any]) -> list[tuple[int, ...]]:
    """Of those that are numbers or arrays."""
    return [shape(value) for value in values if is_array(value) or is_numbers(value)]


def shape(value: Any) -> tuple[int, ...]:
    if is_array(value):
        return tuple(value.shape)
    return (len(value), *(shape(value[0]) if len(value) else ())) if is_list(value) else ()


def collate(rows: list[Any]) -> Any:
    """Rows as a batch; lists of numbers are taken for arrays, and real ones are left to be cast for the model."""
    first = rows[0]
    try:
        if isinstance(first, tuple | list):
            columns = [column(list(values)) for values in zip(*rows, strict=True)]
            return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
        return column(rows)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise DataError(
            f"Expected rows of numbers that can be stacked to a batch, got others ({error}): put the data into a "
            "DataLoader with a collate_fn that makes batches of them."
        ) from error


def column(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return {name: column([value[name] for value in values]) for name in first}
    if isinstance(first, list | tuple) and not is_numbers(first):
        return tuple(column(list(each)) for each in zip(*values, strict=True))
    if isinstance(first, list | tuple) or (isinstance(first, np.ndarray) and first.dtype.kind == "f"):
        return np.stack([np.asarray(value) for value in values])
    return default_collate(values)


def move(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """A batch with every tensor in it on the device; NumPy arrays become tensors, real ones of the model's dtype."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, np.ndarray):
        tensor = as_tensor(value)
        return tensor.to(device, dtype if tensor.is_floating_point() else None)
    if isinstance(value, Mapping):
        return {k: move(v, device, dtype) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move(v, device, dtype) for v in value))
    if isinstance(value, tuple | list):
        return type(value)(move(v, device, dtype) for v in value)
    if hasattr(value, "to") and callable(value.to):
        return value.to(device)
    return value
