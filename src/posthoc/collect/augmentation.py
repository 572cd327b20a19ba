"""Changed views of images, for when a network has seen all there is: it has not memorized these."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc.collect.loaders import as_tensor, change_tensors, is_array, iterate, leaves
from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError, OptionError

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
    """Data whose images are changed in every batch: by `random_crops`, or by a function of your own from a batch of
    images to another. What is no image stays as it is."""

    def __init__(self, data: Any, augment: str | Callable[[Tensor], Tensor], *, size: int = 256, seed: int = 0) -> None:
        if isinstance(data, Outputs):
            raise DataError("augment= changes images before the network sees them: give images, not its outputs.")
        if not callable(augment) and augment != "crops":
            raise OptionError(f'Expected augment="crops" or a function of a batch of images, got {augment!r}.')
        self.data, self.size, self.augment = data, size, augment
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[Any]:
        for batch in iterate(self.data, self.size):
            if (number := sum(map(is_images, leaves(batch)))) != 1:
                shape = "(N, channels, height, width) in every batch to augment"
                raise DataError(f"Expected one array of images of shape {shape}, got {number}.")
            yield change_tensors(batch, lambda value: self._changed(as_tensor(value)) if is_images(value) else value)

    def _changed(self, images: Tensor) -> Tensor:
        if not images.is_floating_point():
            raise DataError(f"Expected images as real numbers, as the network takes them, got {images.dtype}.")
        return self.augment(images) if callable(self.augment) else random_crops(images, self.generator)


def is_images(value: Any) -> bool:
    """Whether a value is an array of images, (N, channels, height, width)."""
    return is_array(value) and value.ndim == 4
