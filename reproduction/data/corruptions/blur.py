"""Blur: out of focus, through frosted glass, moved sideways, moved forwards."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from reproduction.data.corruptions.draws import Draws
from reproduction.data.corruptions.filters import bell, enlarged, smoothed, streaked, whole

__all__ = ["defocus_blur", "glass_blur", "motion_blur", "zoom_blur"]


def defocus_blur(images: Tensor, draws: Draws, radius: float, softness: float) -> Tensor:
    """Every point becomes a disk of this radius, in pixels, with soft edges."""
    kernel = disk(radius, softness)
    padded = F.pad(images, 4 * (len(kernel) // 2,), mode="reflect")
    return F.conv2d(padded, kernel.expand(3, 1, -1, -1), groups=3)


def disk(radius: float, softness: float) -> Tensor:  # (side, side), summing to 1
    """The pixels of a disk, each spread over its eight neighbours by a Gaussian of this standard deviation."""
    reach = math.ceil(radius)
    squares = torch.arange(-reach, reach + 1).square()
    inside = (squares[:, None] + squares <= radius**2).double()
    spread = bell(torch.arange(-1, 2), softness)
    return F.conv2d((inside / inside.sum())[None, None], torch.outer(spread, spread)[None, None], padding=2)[0, 0]


def glass_blur(images: Tensor, draws: Draws, sigma: float, times: int) -> Tensor:
    """Smoothed; then, so many times, each pixel becomes the one above it, left of it, both or stays; smoothed again.
    The authors mean to exchange two pixels, but the way they write it in numpy copies one onto the other; as they go
    from the last pixel to the first, it copies what was there before, so all can be done at once."""
    n, channels, height, width = images.shape
    images = whole(smoothed(images, sigma, truncate=4.0, mirrored=False))
    for _ in range(times):
        up, left = draws.uniform(0.0, 1.0, 2, height, width).lt(0.5).long().unbind(1)
        up[:, :2], up[:, :, :2], left[:, :2], left[:, :, :2] = 0, 0, 0, 0  # the first two rows and columns stay
        places = (torch.arange(height)[:, None] - up) * width + torch.arange(width) - left
        places = places.reshape(n, 1, -1).expand(-1, channels, -1)
        images = images.flatten(2).gather(2, places).view_as(images)
    return smoothed(images, sigma, truncate=4.0, mirrored=False)


def motion_blur(images: Tensor, draws: Draws, radius: int, sigma: float) -> Tensor:
    """Dragged along a direction within 45° of the horizontal."""
    return streaked(images, radius, sigma, draws.uniform(-45.0, 45.0))


def zoom_blur(images: Tensor, draws: Draws, most: float) -> Tensor:
    """The mean of the image, once more than the rest, and of it enlarged by 0, 1, 2, … %."""
    factors = np.arange(1.0, most, 0.01).tolist()
    return (images + sum(enlarged(images, factor) for factor in factors)) / (len(factors) + 1)
