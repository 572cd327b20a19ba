"""Parts of the corruptions: random numbers per image, smoothing, streaks, enlargement, resampling."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Draws", "enlarged", "gaussian_weights", "resampled", "smoothed", "streaked", "to_bytes"]


class Draws:
    """Random numbers for a batch of images.

    Each image has a generator of its own, seeded by the seed and the image's number. An image therefore gets the same
    numbers in any batch and at every severity.
    """

    def __init__(self, seed: int, numbers: range) -> None:
        self.generators = [np.random.default_rng((seed, number)) for number in numbers]

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:  # (N, *shape)
        return stacked(generator.uniform(low, high, shape) for generator in self.generators)

    def normal(self, mean: float, spread: float, *shape: int) -> Tensor:  # (N, *shape)
        return stacked(generator.normal(mean, spread, shape) for generator in self.generators)

    def poisson(self, rates: Tensor) -> Tensor:  # (N, ...), as the rates
        pairs = zip(self.generators, rates.numpy(), strict=True)
        return stacked(generator.poisson(rate) for generator, rate in pairs)


def stacked(arrays: Iterable[Any]) -> Tensor:
    return torch.from_numpy(np.stack(list(arrays)).astype(np.float64))


def to_bytes(values: Tensor) -> Tensor:
    """Values truncated to whole numbers from 0 to 255, as in the original code; 1e-6 absorbs rounding errors."""
    return (values + 1e-6).clamp(0.0, 255.0).floor()


def gaussian_weights(distances: Tensor, sigma: float) -> Tensor:
    """Weights of a Gaussian at these distances from its center, which sum to 1."""
    weights = torch.exp(-0.5 * (distances.double() / sigma).square())
    return weights / weights.sum()


def smoothed(fields: Tensor, sigma: float, *, truncate: float, mirrored: bool) -> Tensor:  # (..., H, W)
    """Convolution with a Gaussian truncated after `truncate` standard deviations.

    Beyond the edge the field is mirrored, or continued with the value at the edge.
    """
    rows, columns = (smoothing_matrix(size, sigma, truncate, mirrored) for size in fields.shape[-2:])
    return rows @ fields @ columns.mT


def smoothing_matrix(size: int, sigma: float, truncate: float, mirrored: bool) -> Tensor:  # (size, size)
    radius = int(truncate * sigma + 0.5)
    if radius == 0:
        return torch.eye(size, dtype=torch.float64)
    offsets = torch.arange(-radius, radius + 1)
    places = torch.arange(size)[:, None] + offsets
    if mirrored:  # d c b a | a b c d | d c b a
        places = places % (2 * size)
        places = torch.minimum(places, 2 * size - 1 - places)
    else:
        places = places.clamp(0, size - 1)
    return torch.zeros(size, size, dtype=torch.float64).scatter_add(
        1, places, gaussian_weights(offsets, sigma).expand(size, -1)
    )


def streaked(
    images: Tensor,  # (N, C, H, W)
    radius: int,
    sigma: float,
    degrees: Tensor,  # (N,)
) -> Tensor:
    """Each image blurred along its own direction by half a Gaussian, as ImageMagick's MotionBlurImage does it.

    The pixels of a line are weighted; beyond the edge the image continues with the value at the edge.
    """
    n, channels, height, width = images.shape
    steps = torch.arange(2 * radius + 1)
    radians = torch.deg2rad(degrees)[:, None]
    across, down = (torch.ceil(steps * part - 0.5).long() for part in (radians.cos(), radians.sin()))  # (N, steps)
    result, flat = torch.zeros_like(images), images.flatten(2)
    for step, weight in zip(steps.tolist(), gaussian_weights(steps, sigma).tolist(), strict=True):
        rows = (torch.arange(height) + down[:, step, None]).clamp(0, height - 1)  # (N, H)
        columns = (torch.arange(width) + across[:, step, None]).clamp(0, width - 1)  # (N, W)
        places = (rows[:, :, None] * width + columns[:, None, :]).reshape(n, 1, -1).expand(-1, channels, -1)
        result += weight * flat.gather(2, places).view_as(images)
    return result


def enlarged(images: Tensor, factor: float) -> Tensor:  # (N, C, S, S), the same size
    """The center of each image, enlarged by a factor."""
    size = images.shape[-1]
    part = math.ceil(size / factor)
    margin = (size - part) // 2
    center = images[..., margin : margin + part, margin : margin + part]
    larger = F.interpolate(center, size=2 * (round(part * factor),), mode="bilinear", align_corners=True)
    margin = (larger.shape[-1] - size) // 2
    return larger[..., margin : margin + size, margin : margin + size]


def resampled(images: Tensor, rows: Tensor, columns: Tensor, *, edge_twice: bool) -> Tensor:  # (N, C, S, S); (N, S, S)
    """The images at these coordinates, in pixels, with bilinear interpolation.

    Beyond the edge they are mirrored, with the edge pixel twice (b a | a b) or once (b | a b).
    """
    size = images.shape[-1]
    places = torch.stack([columns, rows], dim=-1)
    # grid_sample mirrors at the outer border of a pixel or at its center, and scales coordinates accordingly.
    grid = (2.0 * places + 1.0) / size - 1.0 if edge_twice else 2.0 * places / (size - 1) - 1.0
    return F.grid_sample(images, grid, padding_mode="reflection", align_corners=not edge_twice)
