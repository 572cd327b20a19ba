"""Checks at the door: targets that fit the outputs, values that are numbers."""

from __future__ import annotations

import math
import reprlib
from operator import index
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from posthoc.errors import DataError, OptionError

__all__ = [
    "as_numbers",
    "as_rows",
    "choice",
    "class_labels",
    "integer",
    "known_device",
    "number",
    "regression_targets",
    "require_finite",
]


def regression_targets(y: Any, mean: Tensor) -> Tensor:
    """y as a tensor of the mean's shape; (N,) and (N, 1) are taken for each other, nothing else is broadcast."""
    y = as_targets(y, mean)
    if y.is_complex() or y.dtype == torch.bool:
        raise DataError(f"Expected real numbers as regression targets, got {y.dtype}.")
    if y.shape != mean.shape:
        one_column = y.numel() == mean.numel() == len(mean) and y.shape[:1] == mean.shape[:1]
        if not one_column:
            raise DataError(
                f"Expected targets of the network's output shape {tuple(mean.shape)}, got {tuple(y.shape)}: "
                "reshape the targets (they are not broadcast)."
            )
        y = y.reshape(mean.shape)
    require_finite(y, "targets")
    return y


def class_labels(y: Any, mean: Tensor) -> Tensor:  # (N,) of int64
    """y as class indices that fit the logits."""
    y = as_targets(y, mean)
    n, classes = mean.shape
    if y.shape == mean.shape:
        raise DataError(
            f"Expected one class label a row, shape ({n},), got {tuple(y.shape)}. These look one-hot: use y.argmax(-1)."
        )
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise DataError(
            f"Expected integer class labels from 0 to {classes - 1}, got {y.dtype}: convert them with .long(); "
            'for real-valued targets use likelihood="regression" (--task regression).'
        )
    if y.shape == (n, 1):
        y = y.squeeze(1)
    if y.shape != (n,):
        raise DataError(f"Expected one class label a row, shape ({n},), got {tuple(y.shape)}.")
    y = y.long()
    if n and (int(y.min()) < 0 or int(y.max()) >= classes):
        wrong = int(((y < 0) | (y >= classes)).nonzero()[0])
        raise DataError(
            f"Expected class labels from 0 to {classes - 1} (the network has {classes} outputs), "
            f"got {int(y[wrong])} in row {wrong}." + (" Do they start at 1?" if int(y.min()) == 1 else "")
        )
    return y


def as_targets(y: Any, mean: Tensor) -> Tensor:
    found = as_numbers(y)
    if found is None:
        raise DataError(f"Expected targets to be numbers, one row a point, got {reprlib.repr(y)}.")
    return found.to(mean.device)


def as_numbers(values: Any, dtype: torch.dtype | None = None) -> Tensor | None:
    """Values as a tensor, or None where they are no numbers."""
    try:
        return torch.as_tensor(values, dtype=dtype)
    except (TypeError, ValueError, RuntimeError):
        return None


def require_finite(values: Tensor, name: str, *, first_row: int = 0) -> None:
    """Refuses NaN and infinity, saying where; `first_row` is the number of the first row in the whole data."""
    if not values.is_floating_point():
        return
    finite = values.isfinite()
    if not bool(finite.all()):
        wrong = (~finite).nonzero()[0].tolist()
        raise DataError(
            f"Expected finite {name}, got {float(values[tuple(wrong)])} in row {first_row + wrong[0]} "
            f"({int((~finite).sum())} such values). Remove those rows, or find what made them."
        )


def as_rows(rows: Any, length: int) -> Any:
    """An index that keeps the row axis: a single number becomes a slice of one row.

    Raises:
        IndexError: The number is not that of a row.
    """
    try:
        row = index(rows)
    except TypeError:
        return rows
    if not -length <= row < length:
        raise IndexError(f"Expected a row from 0 to {length - 1}, got {row}.")
    return slice(row, row + 1 or None)


def integer(name: str, value: Any, least: int) -> int:
    """An option that is a whole number of at least so much, as an int."""
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise OptionError(f"Expected {name} to be an integer of at least {least}, got {value!r}.")
    return number


def number(value: Any) -> float:
    """A value as a real number, or NaN where it is none."""
    try:
        return float(value) if isinstance(value, SupportsFloat) else math.nan
    except (TypeError, ValueError, RuntimeError):  # several of them, say
        return math.nan


def choice(name: str, value: Any, options: tuple[str, ...]) -> None:
    """Refuses a value that is none of the options."""
    if value not in options:
        raise OptionError(f"Expected {name} to be one of {', '.join(map(repr, options))}, got {value!r}.")


def known_device(device: str | torch.device | None) -> torch.device | None:
    """A device that is there, or an error before any work."""
    try:
        found = torch.device(device) if device is not None else None
    except RuntimeError as error:
        raise OptionError(f"Expected a device such as cpu, cuda or cuda:1, got {device!r}.") from error
    if found is not None and found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise OptionError(
            f"Expected a device that is there, got {device}: torch sees {torch.cuda.device_count()} GPUs."
        )
    return found
