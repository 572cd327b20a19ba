"""Batches for a predictor, made of rows of data. An input is an image (Pillow's), numbers (an array) or text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from posthoc.collect.loaders import as_tensor, change_tensors
from posthoc.errors import DataError


@dataclass(frozen=True)
class Transform:
    """Makes a batch of a list of inputs."""

    function: Callable[[list[Any]], Any]
    description: str  # differs between transforms; it is stored with the outputs
    takes: str | None = None  # the only kind of input that the function accepts, as `kind_of` names it

    def __call__(self, inputs: list[Any]) -> Any:
        if self.takes is not None and (kind := kind_of(inputs[0])) != self.takes:
            advice = "name another column with --input-column, or a transform with --transform."
            raise DataError(f"Expected {self.takes} a row for this predictor, got {kind}: {advice}")
        return self.function(inputs)


@dataclass(frozen=True)
class Collate:
    """Makes a batch of rows (input, target), where the target may be None."""

    transform: Transform
    dtype: torch.dtype | None = None  # what real numbers are converted to; None leaves them as they are

    def __call__(self, rows: list[tuple[Any, Any]]) -> Any:
        inputs, targets = zip(*rows, strict=True)
        batch = change_tensors(self.transform(list(inputs)), self._cast)
        return batch if targets[0] is None else (batch, as_tensor(np.asarray(targets)))

    def _cast(self, value: Any) -> Tensor:
        tensor = as_tensor(value)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def for_each(function: Callable[[Any], Any], description: str, takes: str | None = None) -> Transform:
    """A `Transform` that applies a function, such as torchvision's transforms, to each input and stacks the results."""
    return Transform(partial(apply_to_each, function), description, takes)


def apply_to_each(function: Callable[[Any], Any], inputs: list[Any]) -> Any:
    """A batch of the function's values of the inputs."""
    return default_collate([function(value) for value in inputs])


def stack(inputs: list[Any]) -> np.ndarray[Any, Any]:
    """Numbers as they are, images as numbers in [0, 1], channels first."""
    kind = kind_of(inputs[0])
    if kind == "text":
        raise DataError("Expected images or numbers, got text, which must be made into numbers: use --transform.")
    if kind == "an image":
        inputs = [np.asarray(image, np.float32).transpose(2, 0, 1) / 255.0 for image in inputs]  # (C, H, W)
    if len(shapes := {array.shape for array in inputs}) > 1:
        raise DataError(f"Expected inputs of one shape, got {sorted(shapes)}: bring them to one with --transform.")
    return np.stack(inputs)


PLAIN = Transform(stack, "none")
"""What is used where a predictor has no transform of its own."""


def kind_of(value: Any) -> str:
    """The kind of an input, in words."""
    return "text" if isinstance(value, str) else "numbers" if isinstance(value, np.ndarray) else "an image"
