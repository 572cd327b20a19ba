"""Changed views of images, for when a network has seen all there is: it has not memorised these."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc.collect.loaders import as_tensor, is_array, iterate
from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError, OptionError

__all__ = ["Augmented", "random_crops"]

AREA, RATIO = (0.5, 1.0), 4.0 / 3.0
"""The share of an image that a crop shows, and how much wider than high, or higher than wide, it may be."""


def random_crops(images: Tensor, generator: torch.Generator) -> Tensor:  # (N, channels, height, width)
    """A part of each image, at random, enlarged to the size of the whole."""
    n = len(images)
    area, aspect, across, down = torch.rand(4, n, generator=generator)
    area, aspect = AREA[0] + (AREA[1] - AREA[0]) * area, torch.exp((2.0 * aspect - 1.0) * math.log(RATIO))
    width, height = (area * aspect).sqrt().clamp_max(1.0), (area / aspect).sqrt().clamp_max(1.0)
    transform = torch.zeros(n, 2, 3)
    transform[:, 0, 0], transform[:, 1, 1] = width, height
    transform[:, 0, 2], transform[:, 1, 2] = (2.0 * across - 1.0) * (1.0 - width), (2.0 * down - 1.0) * (1.0 - height)
    grid = F.affine_grid(transform.to(images), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)


class Augmented:
    """Data as they were given, with every batch of images changed: by `random_crops`, or by a function of your own from
    a batch of images to another."""

    def __init__(self, data: Any, augment: str | Callable[[Tensor], Tensor], *, size: int = 256, seed: int = 0) -> None:
        if isinstance(data, Outputs):
            raise DataError("augment= changes images before the network sees them: give images, not its outputs.")
        if not callable(augment) and augment != "crops":
            raise OptionError(f'Expected augment="crops" or a function of a batch of images, got {augment!r}.')
        self.data, self.size = data, size
        generator = torch.Generator().manual_seed(seed)
        self.change: Callable[[Tensor], Tensor] = (
            augment if callable(augment) else lambda images: random_crops(images, generator)
        )

    def __iter__(self) -> Iterator[Any]:
        for batch in iterate(self.data, self.size):
            if isinstance(batch, Mapping):
                yield self._changed_values(dict(batch))
            elif isinstance(batch, tuple | list):
                first = self._changed_values(dict(batch[0])) if isinstance(batch[0], Mapping) else self._view(batch[0])
                yield (first, *batch[1:])
            else:
                yield self._view(batch)

    def _changed_values(self, batch: dict[str, Any]) -> dict[str, Any]:
        names = [name for name, value in batch.items() if is_array(value) and value.ndim == 4]
        if len(names) != 1:
            raise DataError(f"Expected one batch of images among {', '.join(batch)}, found {len(names)}.")
        return {**batch, names[0]: self._view(batch[names[0]])}

    def _view(self, images: Any) -> Tensor:
        if not is_array(images) or images.ndim != 4:
            found = f"shape {tuple(images.shape)}" if is_array(images) else f"a {type(images).__name__}"
            raise DataError(f"Expected images of shape (N, channels, height, width) to augment, got {found}.")
        images = as_tensor(images)
        if not images.is_floating_point():
            raise DataError(f"Expected images as real numbers, as the network takes them, got {images.dtype}.")
        return self.change(images)
