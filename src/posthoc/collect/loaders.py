"""Data as users have them, as a stream of batches: arrays, tables, mappings, datasets, loaders, iterables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from itertools import islice
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from posthoc.errors import DataError

Array = np.ndarray[Any, Any]

TEXT_ADVICE = "map the classes to integers from 0 (their places in the sorted list of names, say)"

TARGET_KEYS = ("labels", "label", "targets", "target", "y")
"""Keys under which mappings hold their targets, in order of preference."""


class Batch(NamedTuple):
    """The arguments of one call of a network, and the targets."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any | None


def read_batch(batch: Any) -> Batch:
    """Takes a batch apart: (x, y), (x₁, x₂, …, y), a mapping with its targets under a usual key, or inputs alone."""
    if isinstance(batch, Mapping):
        kwargs = dict(batch)
        found = [key for key in TARGET_KEYS if key in kwargs]
        return Batch((), kwargs, kwargs.pop(found[0]) if found else None)
    if isinstance(batch, tuple | list):
        if not batch:
            raise DataError("Expected batches (x, y), mappings or tensors, got an empty sequence.")
        *args, target = batch if len(batch) > 1 else [*batch, None]
        if len(args) == 1 and isinstance(args[0], Mapping):  # (mapping, y)
            return Batch((), dict(args[0]), target)
        return Batch(tuple(args), {}, target)
    return Batch((batch,), {}, None)


# Batches.


def iterate(data: Any, batch_size: int) -> Iterator[Any]:
    """Yields the batches of data.

    Args:
        data: Arrays, which are cut into rows of `batch_size`; a dataset, which is loaded; or batches, as a loader, a
            list or a generator has them.
        batch_size: Number of rows in a batch, where the data are not in batches yet.

    Example:
        >>> [len(x) for x, y in iterate((torch.zeros(5, 2), torch.zeros(5)), batch_size=2)]
        [2, 2, 1]
    """
    data = arrays(data)
    if is_arrays(data):
        for start in range(0, row_count(data), batch_size):
            yield take(data, slice(start, start + batch_size))
    elif is_dataset(data):
        # With a generator of its own: a DataLoader without one draws a seed from the global generator.
        yield from DataLoader(data, batch_size=batch_size, collate_fn=collate, generator=torch.Generator())
    elif is_list(data) and len(data) and is_numbers(data):
        raise DataError("Expected arrays or batches, got a list of numbers: give np.asarray(data, dtype=np.float32).")
    elif isinstance(data, Iterable):
        yield from stream(data, batch_size)
    else:
        raise DataError(f"Expected a DataLoader, a pair of arrays (x, y) or Outputs, got {type(data).__name__}.")


def is_dataset(data: Any) -> bool:
    """Whether data have rows by number. Many that have can be iterated too, and lists of batches can be both."""
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or isinstance(data, list | tuple):
        return False
    if isinstance(data, Dataset) or not isinstance(data, Iterable):
        return not isinstance(data, IterableDataset)
    return len(data) > 0 and is_row(data[0])  # type: ignore[arg-type, index]


def stream(data: Iterable[Any], size: int) -> Iterator[Any]:
    """Yields the batches of a loader, a list or a generator; of Hugging Face's rows it makes batches."""
    items = iter(data)
    if hasattr(data, "column_names"):  # a dataset of Hugging Face, whose items are rows
        while rows := list(islice(items, size)):
            yield collate(rows)
    for number, item in enumerate(items):
        if not number and (is_row(item) or isinstance(data, IterableDataset)):
            advice = "put the data into a DataLoader, with batch_size=None if they are batches already."
            raise DataError(f"Expected batches, got single rows, or a dataset that may hold either: {advice}")
        yield item


def is_row(item: Any) -> bool:
    """Whether an item must be one row: its target is one number, or longer or shorter than its input."""
    batch = read_batch(item)
    inputs, target = shapes([*batch.args, *batch.kwargs.values()]), shapes([batch.target])
    if not target or any(len(shape) > 1 and shape[0] == 1 for shape in inputs):
        return False
    return not target[0] or (bool(inputs) and all(len(shape) == 1 and shape[:1] != target[0][:1] for shape in inputs))


def shapes(values: list[Any]) -> list[tuple[int, ...]]:
    """The shapes of those values that are arrays or lists of numbers."""
    return [np.shape(value) for value in values if is_array(value) or is_numbers(value)]


def collate(rows: list[Any]) -> Any:
    """Stacks rows to a batch. Lists of numbers become NumPy arrays, whose real numbers are cast for the network."""
    try:
        if isinstance(rows[0], tuple | list):
            return tuple(collate_column(list(values)) for values in zip(*rows, strict=True))
        return collate_column(rows)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        advice = "use a DataLoader with a collate_fn"
        raise DataError(f"Expected rows of numbers that can be stacked, got others ({error}): {advice}.") from error


def collate_column(values: list[Any]) -> Any:
    """Stacks the values of one column of rows."""
    first = values[0]
    if isinstance(first, Mapping):
        return {name: collate_column([value[name] for value in values]) for name in first}
    if isinstance(first, list | tuple) and not is_numbers(first):
        return tuple(collate_column(list(each)) for each in zip(*values, strict=True))
    if isinstance(first, list | tuple) or (isinstance(first, np.ndarray) and first.dtype.kind == "f"):
        return np.stack([np.asarray(value) for value in values])
    return default_collate(values)


# Tensors in batches.


def change_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """Applies a function to all tensors and arrays in nested containers, and to containers that know `.to(device)`."""
    if isinstance(value, Tensor | np.ndarray):
        return change(value)
    if isinstance(value, tuple | list):
        changed = [change_tensors(each, change) for each in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    if isinstance(value, Mapping):
        return {name: change_tensors(each, change) for name, each in value.items()}
    return change(value) if callable(getattr(value, "to", None)) else value


def tensors_of(batch: Batch) -> list[Tensor]:
    """All tensors among the arguments of a batch."""
    return [value for value in leaves((batch.args, batch.kwargs)) if isinstance(value, Tensor)]


def leaves(value: Any) -> list[Any]:
    """What `change_tensors` applies its function to."""
    found: list[Any] = []
    change_tensors(value, found.append)
    return found


def copied(batch: Batch) -> Batch:
    """The batch with tensors of its own, for a network that may work in place or is run several times."""
    args, kwargs = change_tensors(batch[:2], lambda value: value.clone() if isinstance(value, Tensor) else value)
    return Batch(args, kwargs, batch.target)


def move(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Tensors on a device; NumPy arrays become tensors, of `dtype` if they have real numbers."""

    def to_device(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            value = as_tensor(value)
            return value.to(device, dtype if value.is_floating_point() else None)
        return value.to(device)

    return change_tensors(value, to_device)


# Arrays that belong together, one row a point: an array, (x, y), a mapping, (mapping, y).


def arrays(data: Any) -> Any:
    """Converts tables and lists of numbers in data to arrays; what is no arrays at all is returned as it is."""
    if is_table(data):
        return as_array(data)
    if isinstance(data, Mapping):
        # A tuple among the values is an option, such as the size of images.
        fit = {name for name, v in data.items() if is_table(v) or (isinstance(v, list) and is_numbers(v))}
        return {name: as_array(value) if name in fit else value for name, value in data.items()}
    if not isinstance(data, tuple | list) or len(data) < 2:
        return data
    first, *others = data
    unfit = [type(other).__name__ for other in others if not stands_for_array(other)]
    if isinstance(first, Mapping):
        return data if unfit else (arrays(first), *map(as_array, others))
    if not is_array(first) and not is_table(first) and not (isinstance(data, tuple) and is_numbers(first)):
        return data
    if isinstance(data, list):
        return data if unfit else list(map(as_array, data))
    if unfit:
        found = f"a {unfit[0]} beside an array: convert it, or give batches"
        raise DataError(f"Expected a pair (x, y) of arrays, tables or lists of numbers, got {found}.")
    return tuple(map(as_array, data))


def is_arrays(data: Any) -> bool:
    """Whether data are arrays that belong together, as `arrays` returns them."""
    return is_array(data) or isinstance(data, Mapping) or is_pair(data)


def is_pair(data: Any) -> bool:
    """Whether data are several arrays, the last one perhaps the targets, and not a list of batches."""
    several = isinstance(data, tuple | list) and len(data) > 1
    return several and isinstance(data[0], Tensor | np.ndarray | Mapping) and all(map(is_array, data[1:]))


def is_array(data: Any) -> bool:
    """Whether data are a NumPy array or a tensor."""
    return isinstance(data, Tensor | np.ndarray)


def is_table(data: Any) -> bool:
    """Whether data are a data frame, a series or the like, and not `Outputs`."""
    convertible = hasattr(data, "__array__") and hasattr(data, "__len__") and hasattr(data, "__getitem__")
    return convertible and not is_array(data) and not isinstance(data, type) and not is_dataclass(data)


def is_numbers(data: Any) -> bool:
    """Whether data are a number, or a sequence of numbers, or of such sequences."""
    if is_list(data):
        return not len(data) or is_numbers(data[0])
    return isinstance(data, Number | np.generic) or (is_array(data) and data.ndim == 0)


def is_list(data: Any) -> bool:
    """Whether data are a sequence other than a string."""
    return isinstance(data, Sequence) and not isinstance(data, str | bytes)


def stands_for_array(data: Any) -> bool:
    """Whether data are an array, a table, or a list of numbers or arrays."""
    return is_array(data) or is_table(data) or (is_list(data) and (is_numbers(data) or is_array(data[0])))


def as_array(data: Any) -> Any:
    """Converts what stands for an array to one; anything else is returned as it is."""
    if is_array(data) or not stands_for_array(data):
        return data
    try:
        if is_list(data) and len(data) and isinstance(data[0], Tensor):
            return torch.stack(list(data))
        array = np.asarray(data if is_table(data) else list(data))
        # Columns of several types, or with room for missing values, come as objects.
        return np.asarray(array.tolist()) if array.dtype == object else array
    except (RuntimeError, ValueError) as error:
        raise DataError(f"Expected rows of one length, got some of others ({error}): pad them.") from error


def as_tensor(value: Any, *, copy: bool = True) -> Tensor:
    """Converts an array, a list or a number to a tensor; unsigned integers, which torch hardly supports, to int64."""
    if isinstance(value, Tensor):
        return value
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise DataError(f"Expected numbers, got an array of {array.dtype}.")
    if array.dtype.kind == "u":
        if array.size and array.max() > np.iinfo(np.int64).max:
            raise DataError(f"Expected whole numbers below 2^63, got {array.max()}: convert them to real numbers.")
        array = array.astype(np.int64)
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    return torch.from_numpy(array.copy() if copy or not array.flags.writeable else array)


def tensor_of(array: Array, name: str) -> Tensor:
    """An array that was read from a file as a tensor, without a copy where possible; half precision becomes float32."""
    if array.dtype.kind in "US":
        raise DataError(f"Expected numbers as {name}, got text ({array.dtype}): {TEXT_ADVICE}.")
    tensor = as_tensor(array, copy=False)
    return tensor.float() if tensor.dtype == torch.float16 else tensor


def array_of(tensor: Tensor, name: str) -> Array:
    """A tensor as an array to write to a file; bfloat16, which NumPy lacks, becomes float32."""
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        raise DataError(f"Expected real numbers as {name}, got {tensor.dtype}.")
    if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        tensor = tensor.float()
    return tensor.contiguous().numpy()


def listed(names: Collection[str], most: int = 40) -> str:
    """Names for a message, the first of very many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(islice(names, most)) or "none") + more


def row_count(data: Any) -> int:
    """The number of rows of arrays that belong together."""
    lengths = {len(value) for value in leaves(data) if is_array(value) and value.ndim}
    if len(lengths) != 1:
        raise DataError(f"Expected arrays with as many rows each, got {sorted(lengths) or 'none'}.")
    return lengths.pop()


def take(data: Any, rows: slice | Tensor) -> Any:
    """Takes rows of arrays that belong together; values that are no arrays apply to all rows."""

    def taken(value: Any) -> Any:
        if isinstance(value, Tensor) and isinstance(rows, Tensor):
            return value[rows.to(value.device)]
        return value[rows if isinstance(rows, slice) else rows.numpy()]

    return change_tensors(data, lambda value: taken(value) if is_array(value) and value.ndim else value)


def with_targets(data: Any, targets: Any) -> Any:
    """The pair of data and targets, where targets are given apart."""
    if targets is None:
        return data
    if not stands_for_array(targets):
        advice = "validation data are val=..."
        raise DataError(f"Expected targets as an array beside the inputs, got a {type(targets).__name__}: {advice}.")
    if isinstance(data, tuple) or not (stands_for_array(data) or isinstance(data, Mapping)):
        raise DataError(f"Expected targets inside the {type(data).__name__}, got them beside it: fit(data) is enough.")
    return data, targets
