"""Checks of arguments: targets that fit the outputs, numbers, options."""

from __future__ import annotations

import math
import reprlib
from operator import index
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from posthoc.errors import DataError, OptionError


def regression_targets(y: Any, mean: Tensor) -> Tensor:
    """Targets as a tensor of the mean's shape; (N,) and (N, 1) are taken for each other, nothing else is broadcast.

    Raises:
        DataError: They are no real numbers, have another shape, or are not finite.
    """
    y = as_targets(y, mean)
    if y.is_complex() or y.dtype == torch.bool:
        raise DataError(f"Expected real numbers as regression targets, got {y.dtype}.")
    if y.numel() == mean.numel() == len(mean) and y.shape[:1] == mean.shape[:1]:
        y = y.reshape(mean.shape)
    if y.shape != mean.shape:
        shapes = f"output shape {tuple(mean.shape)}, got {tuple(y.shape)}"
        raise DataError(f"Expected targets of the network's {shapes}: reshape the targets (they are not broadcast).")
    require_finite(y, "targets")
    return y


def class_labels(y: Any, mean: Tensor) -> Tensor:
    """Labels as class indices that fit logits (N, C), (N,) of int64.

    Raises:
        DataError: They are no integers, have another shape, or are not from 0 to C - 1.
    """
    y = as_targets(y, mean)
    n, classes = mean.shape
    if y.shape not in ((n,), (n, 1)):
        advice = ". These look one-hot: use y.argmax(-1)" if y.shape == mean.shape else ""
        raise DataError(f"Expected one class label a row, shape ({n},), got {tuple(y.shape)}{advice}.")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        advice = 'use .long(), or likelihood="regression" (--task regression)'
        raise DataError(f"Expected integer class labels from 0 to {classes - 1}, got {y.dtype}: {advice}.")
    y = y.reshape(n).long()
    if n and (int(y.min()) < 0 or int(y.max()) >= classes):
        wrong = int(((y < 0) | (y >= classes)).nonzero()[0])
        got = f"{int(y[wrong])} in row {wrong}." + (" Do they start at 1?" if int(y.min()) == 1 else "")
        raise DataError(f"Expected class labels from 0 to {classes - 1} (the network has {classes} outputs), got {got}")
    return y


def as_targets(y: Any, mean: Tensor) -> Tensor:
    """Targets as a tensor on the device of the mean; raises `DataError` for anything but numbers."""
    targets = as_numbers(y)
    if targets is None:
        raise DataError(f"Expected targets to be numbers, one row a point, got {reprlib.repr(y)}.")
    return targets.to(mean.device)


def as_numbers(values: Any, dtype: torch.dtype | None = None) -> Tensor | None:
    """Values as a tensor, or None if they are no numbers."""
    try:
        return torch.as_tensor(values, dtype=dtype)
    except (TypeError, ValueError, RuntimeError):
        return None


def require_finite(values: Tensor, name: str, *, first_row: int = 0) -> None:
    """Raises `DataError` for NaN and infinity; the message calls the values `name` and counts rows from `first_row`."""
    if not values.is_floating_point() or math.isfinite(values.sum()):  # which takes a third of the time
        return
    finite = values.isfinite()
    if not bool(finite.all()):
        wrong = (~finite).nonzero()[0].tolist()
        got = f"{float(values[tuple(wrong)])} in row {first_row + wrong[0]} ({int((~finite).sum())} such values)"
        advice = "Remove those rows, or find what made them."
        if name == "outputs" and bool(values[~finite].isneginf().all()):
            advice = 'Logarithms of probabilities of 0? Give the probabilities, with outputs_are="probs".'
        raise DataError(f"Expected finite {name}, got {got}. {advice}")


def integer(name: str, value: Any, least: int) -> int:
    """An option as an int of at least `least`; raises `OptionError` for other values."""
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise OptionError(f"Expected {name} to be an integer of at least {least}, got {reprlib.repr(value)}.")
    return number


def number(value: Any) -> float:
    """A value as a real number, or NaN if it is none."""
    try:
        return float(value) if isinstance(value, SupportsFloat) else math.nan
    except (TypeError, ValueError, RuntimeError):  # an array of several numbers
        return math.nan


def choice(name: str, value: Any, options: tuple[str, ...]) -> None:
    """Raises `OptionError` for a value that is none of the options."""
    if value not in options:
        raise OptionError(f"Expected {name} to be one of {', '.join(map(repr, options))}, got {reprlib.repr(value)}.")


def known_device(device: str | torch.device | None) -> torch.device | None:
    """A device as `torch.device`; raises `OptionError` if this machine does not have it."""
    if device is None:
        return None
    try:
        known = torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"Expected a device such as cpu, cuda or cuda:1, got {device!r}.") from error
    if known.type == "cuda" and (known.index or 0) >= (count := torch.cuda.device_count()):
        raise OptionError(f"Expected a device that is there, got {device}: torch sees {count} GPUs.")
    return known
