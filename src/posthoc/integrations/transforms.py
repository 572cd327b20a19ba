"""Batches for a predictor, made of rows of data. An input is an image (Pillow's), numbers (an array) or text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate

from posthoc.collect.loaders import as_tensor
from posthoc.errors import DataError

__all__ = ["Collate", "Each", "Plain", "Transform", "kind_of", "require_kind"]


class Transform(Protocol):
    """Makes a batch of a list of inputs."""

    @property
    def description(self) -> str:
        """A text that differs between transforms; it is stored with the outputs."""

    def __call__(self, inputs: list[Any]) -> Any: ...


@dataclass(frozen=True)
class Collate:
    """Makes a batch of rows (input, target), where the target may be None.

    Args:
        transform: Makes a batch of the inputs.
        dtype: What real numbers are converted to; None leaves them as they are.
    """

    transform: Transform
    dtype: torch.dtype | None = None

    def __call__(self, rows: list[tuple[Any, Any]]) -> Any:
        inputs, targets = zip(*rows, strict=True)
        batch = self._cast(self.transform(list(inputs)))
        return batch if targets[0] is None else (batch, as_tensor(np.asarray(targets)))

    def _cast(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return {name: self._cast(value) for name, value in batch.items()}
        # Tensors are passed between processes in shared memory, arrays are not.
        tensor = as_tensor(batch) if isinstance(batch, np.ndarray) else batch
        is_real = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        return tensor.to(self.dtype) if is_real and self.dtype is not None else tensor


@dataclass(frozen=True)
class Plain:
    """Leaves numbers as they are, and turns images into numbers in [0, 1], channels first."""

    description: str = "none"

    def __call__(self, inputs: list[Any]) -> Any:
        kind = kind_of(inputs[0])
        if kind == "text":
            raise DataError("Expected images or numbers, got text, which must be made into numbers: use --transform.")
        arrays = [pixels(value) for value in inputs] if kind == "an image" else inputs
        if len(shapes := {array.shape for array in arrays}) > 1:
            raise DataError(f"Expected inputs of one shape, got {sorted(shapes)}: bring them to one with --transform.")
        return np.stack(arrays)


@dataclass(frozen=True)
class Each:
    """Applies a function, such as a torchvision transform, to each input and stacks the results.

    Args:
        function: Makes a tensor of one input.
        description: See `Transform`.
        takes: The only kind of input that the function accepts, as `kind_of` names it; None for any.
    """

    function: Callable[[Any], Any]
    description: str
    takes: str | None = None

    def __call__(self, inputs: list[Any]) -> Any:
        require_kind(inputs, self.takes)
        return default_collate([self.function(value) for value in inputs])


def require_kind(inputs: list[Any], kind: str | None) -> None:
    """Raise a `DataError` unless the inputs are of this kind."""
    if kind is not None and (found := kind_of(inputs[0])) != kind:
        advice = "name another column with --input-column, or a transform with --transform."
        raise DataError(f"Expected {kind} a row for this predictor, got {found}: {advice}")


def kind_of(value: Any) -> str:
    """The kind of an input, in words."""
    return "text" if isinstance(value, str) else "numbers" if isinstance(value, np.ndarray) else "an image"


def pixels(image: Any) -> np.ndarray[Any, Any]:  # (C, H, W)
    return np.asarray(image, np.float32).transpose(2, 0, 1) / 255.0
