"""What users hand over, as a stream of batches: loaders, datasets, pairs of arrays, mappings like Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from posthoc.errors import DataError

__all__ = ["TARGET_KEYS", "Batch", "as_tensor", "iterate", "move", "read_batch"]

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
    if isinstance(data, Mapping) or is_array(data) or is_arrays(data):
        yield from cut(data, batch_size)
    elif isinstance(data, Iterable):
        yield from data
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        # A generator of its own: a DataLoader without one draws a seed from the global generator.
        yield from torch.utils.data.DataLoader(data, batch_size=batch_size, generator=torch.Generator())
    else:
        raise DataError(
            "Expected a DataLoader, a pair of arrays (x, y), a mapping of arrays or posthoc.Outputs, "
            f"got {type(data).__name__}."
        )


def cut(data: Any, size: int) -> Iterator[Any]:
    """Consecutive rows of arrays that belong together."""
    if isinstance(data, Mapping):
        data = {k: np.asarray(v) if is_numbers(v) else v for k, v in data.items()}
    elif not is_array(data):
        data = tuple(np.asarray(a) if is_numbers(a) else a for a in data)
    arrays = list(data.values()) if isinstance(data, Mapping) else [data] if is_array(data) else list(data)
    lengths = {len(a) for a in arrays if is_array(a) and np.ndim(a)}
    if len(lengths) != 1:
        raise DataError(f"Expected arrays with as many rows each, got {sorted(lengths) or 'none'}.")
    for start in range(0, lengths.pop(), size):
        rows = slice(start, start + size)
        if isinstance(data, Mapping):
            yield {k: v[rows] if is_array(v) and np.ndim(v) else v for k, v in data.items()}
        elif is_array(data):
            yield data[rows]
        else:
            yield tuple(a[rows] for a in arrays)


def is_array(data: Any) -> bool:
    return isinstance(data, Tensor | np.ndarray)


def is_arrays(data: Any) -> bool:
    """Whether data is a tuple (or list) of arrays, the targets perhaps a list of numbers, and not a list of batches."""
    if not isinstance(data, tuple | list) or len(data) < 2:
        return False
    return is_array(data[0]) and all(is_array(a) or is_numbers(a) for a in data)


def is_numbers(data: Any) -> bool:
    return isinstance(data, list) and bool(data) and isinstance(data[0], int | float)


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


def as_tensor(value: Any) -> Tensor:
    """A tensor from an array, a list or a number; unsigned integers, which torch hardly supports, become int64."""
    if isinstance(value, Tensor):
        return value
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise DataError(f"Expected numbers, got an array of {array.dtype}.")
    if array.dtype.kind == "u":
        array = array.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(array).copy())
