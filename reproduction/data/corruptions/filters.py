"""What several corruptions are made of: smoothing, streaks, enlargement, bent coordinates."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["bell", "enlarged", "resampled", "smoothed", "streaked", "whole"]


def whole(values: Tensor) -> Tensor:
    """Values as bytes can have them: cut off, not rounded, as the authors' are. What rounding left a hair below a whole
    number counts as that number."""
    return (values + 1e-6).clamp(0.0, 255.0).floor()


def bell(distances: Tensor, sigma: float) -> Tensor:
    """The weights of a Gaussian at these distances from its middle, summing to 1."""
    weights = torch.exp(-0.5 * (distances.double() / sigma).square())
    return weights / weights.sum()


def smoothed(fields: Tensor, sigma: float, *, truncate: float, mirrored: bool) -> Tensor:  # (..., H, W)
    """Convolved with a Gaussian, cut off after `truncate` standard deviations. Beyond the edge, the field is mirrored,
    or goes on as it ended."""
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
    return torch.zeros(size, size, dtype=torch.float64).scatter_add(1, places, bell(offsets, sigma).expand(size, -1))


def streaked(
    images: Tensor,  # (N, C, H, W)
    radius: int,
    sigma: float,
    degrees: Tensor,  # (N,)
) -> Tensor:
    """Each image dragged along a direction of its own, as ImageMagick's MotionBlurImage does: one half of a Gaussian,
    over whole pixels of a line; beyond the edge the image goes on as it ended."""
    n, channels, height, width = images.shape
    steps = torch.arange(2 * radius + 1)
    radians = torch.deg2rad(degrees)[:, None]
    across, down = (torch.ceil(steps * part - 0.5).long() for part in (radians.cos(), radians.sin()))  # (N, steps)
    result, flat = torch.zeros_like(images), images.flatten(2)
    for step, weight in zip(steps.tolist(), bell(steps, sigma).tolist(), strict=True):
        rows = (torch.arange(height) + down[:, step, None]).clamp(0, height - 1)  # (N, H)
        columns = (torch.arange(width) + across[:, step, None]).clamp(0, width - 1)  # (N, W)
        places = (rows[:, :, None] * width + columns[:, None, :]).reshape(n, 1, -1).expand(-1, channels, -1)
        result += weight * flat.gather(2, places).view_as(images)
    return result


def enlarged(images: Tensor, factor: float) -> Tensor:  # (N, C, S, S), the same size
    """The middle of each image, enlarged so many times."""
    size = images.shape[-1]
    part = math.ceil(size / factor)
    margin = (size - part) // 2
    middle = images[..., margin : margin + part, margin : margin + part]
    larger = F.interpolate(middle, size=2 * (round(part * factor),), mode="bilinear", align_corners=True)
    margin = (larger.shape[-1] - size) // 2
    return larger[..., margin : margin + size, margin : margin + size]


def resampled(images: Tensor, rows: Tensor, columns: Tensor, *, edge_twice: bool) -> Tensor:  # (N, C, S, S); (N, S, S)
    """The images at these coordinates, in pixels, interpolated linearly. Beyond the edge they are mirrored, with the
    pixel at the edge twice (b a | a b) or once (b | a b)."""
    size = images.shape[-1]
    places = torch.stack([columns, rows], dim=-1)
    # grid_sample mirrors at the outer side of a pixel or at its middle, and counts coordinates accordingly.
    grid = (2.0 * places + 1.0) / size - 1.0 if edge_twice else 2.0 * places / (size - 1) - 1.0
    return F.grid_sample(images, grid, padding_mode="reflection", align_corners=not edge_twice)
