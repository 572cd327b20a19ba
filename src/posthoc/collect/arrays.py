"""Arrays that belong together, one row a point: an array, (x, y), a mapping, (mapping, y). Tables and lists of numbers
stand for arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posthoc.errors import DataError

__all__ = [
    "arrays",
    "as_tensor",
    "cut",
    "is_array",
    "is_arrays",
    "is_list",
    "is_numbers",
    "is_pair",
    "row_count",
    "take",
]


def arrays(data: Any) -> Any:
    """Data with tables, lists of numbers and the like as arrays. What is no arrays at all, such as a loader or a list
    of batches, is returned as it is."""
    if is_table(data):
        return as_array(data)
    if isinstance(data, Mapping):
        return {name: as_array(value) if is_rows(value) else value for name, value in data.items()}
    if not isinstance(data, tuple | list) or len(data) < 2:
        return data
    first, *others = data
    if isinstance(first, Mapping):
        pair = all(map(stands_for_array, others))  # and not another batch
        return (arrays(first), *map(as_array, others)) if pair else data
    if not is_array(first) and not is_table(first) and not (isinstance(data, tuple) and is_numbers(first)):
        return data
    if isinstance(data, list):
        return list(map(as_array, data)) if all(map(stands_for_array, others)) else data
    if wrong := [type(other).__name__ for other in others if not stands_for_array(other) and not is_listed(other)]:
        raise DataError(
            f"Expected a pair (x, y) of arrays, tables or lists of numbers, got a {wrong[0]} beside an array: convert "
            "it, or give batches, as a list or a DataLoader."
        )
    return tuple(map(as_array, data))


def is_arrays(data: Any) -> bool:
    """Whether data are arrays that belong together, as `arrays` gives them."""
    return is_array(data) or isinstance(data, Mapping) or is_pair(data)


def is_pair(data: Any) -> bool:
    """Whether data are several arrays, the last one perhaps the targets, and not a list of batches."""
    if not isinstance(data, tuple | list) or len(data) < 2:
        return False
    return (is_array(data[0]) or isinstance(data[0], Mapping)) and all(map(is_array, data[1:]))


def is_array(data: Any) -> bool:
    """Whether data are an array, of NumPy or PyTorch."""
    return isinstance(data, Tensor | np.ndarray)


def is_table(data: Any) -> bool:
    """Whether data become an array when NumPy asks: a data frame, a series."""
    asks = hasattr(data, "__array__") and hasattr(data, "__len__") and hasattr(data, "__getitem__")
    return asks and not is_array(data) and not isinstance(data, type) and not is_dataclass(data)  # such as Outputs


def is_numbers(data: Any) -> bool:
    """Whether data are a list (or tuple, or column) of numbers, or of lists of them."""
    while is_list(data):
        if not len(data):
            return True
        data = data[0]
    return is_number(data)


def is_number(data: Any) -> bool:
    return isinstance(data, Number | np.generic) or (is_array(data) and data.ndim == 0)


def is_list(data: Any) -> bool:
    """Whether data are a list, a tuple or the like, and no text."""
    return isinstance(data, Sequence) and not isinstance(data, str | bytes)


def is_listed(data: Any) -> bool:
    """Whether data are a list of arrays, one a row."""
    return is_list(data) and len(data) > 0 and is_array(data[0])


def stands_for_array(data: Any) -> bool:
    return is_array(data) or is_table(data) or (is_list(data) and is_numbers(data))


def is_rows(data: Any) -> bool:
    """Whether a value of a mapping has a row a point; a tuple is an option, such as the size of images."""
    return stands_for_array(data) and not isinstance(data, tuple)


def as_array(data: Any) -> Any:
    """An array from what stands for one; anything else as it is."""
    if is_array(data) or not (is_table(data) or is_list(data)):
        return data
    try:
        if is_table(data):
            array = np.asarray(data)
            # Columns of several types, or with room for missing values, come as objects.
            return np.asarray(array.tolist()) if array.dtype == object else array
        if len(data) and isinstance(data[0], Tensor):
            return torch.stack(list(data))
        return np.asarray(list(data))
    except (RuntimeError, ValueError) as error:
        raise DataError(f"Expected rows of one length, got some of others ({error}): pad them.") from error


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


def row_count(data: Any) -> int:
    """How many rows arrays have that belong together."""
    lengths = {len(array) for array in parts(data) if array.ndim}
    if len(lengths) != 1:
        raise DataError(f"Expected arrays with as many rows each, got {sorted(lengths) or 'none'}.")
    return lengths.pop()


def parts(data: Any) -> Iterator[Any]:
    if is_array(data):
        yield data
    elif isinstance(data, Mapping):
        yield from filter(is_array, data.values())
    else:
        for part in data:
            yield from parts(part)


def take(data: Any, rows: slice | Tensor) -> Any:
    """Some rows of arrays that belong together; what is no array is the same for all rows."""
    if isinstance(data, Mapping):
        return {name: take(value, rows) for name, value in data.items()}
    if isinstance(data, tuple | list):
        return tuple(take(part, rows) for part in data)
    if not is_array(data) or not data.ndim:
        return data
    if isinstance(rows, slice):
        return data[rows]
    return data[rows.to(data.device) if isinstance(data, Tensor) else rows.numpy()]


def cut(data: Any, size: int) -> Iterator[Any]:
    """Consecutive rows of arrays that belong together."""
    for start in range(0, row_count(data), size):
        yield take(data, slice(start, start + size))
