"""The fifteen kinds of corruption; each function maps images from 0 to 255, (N, 3, S, S) in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from io import BytesIO

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from reproduction.data.corruptions.filters import (
    Draws,
    enlarged,
    gaussian_weights,
    resampled,
    smoothed,
    streaked,
    to_bytes,
)

__all__ = [
    "brightness",
    "contrast",
    "defocus_blur",
    "elastic_transform",
    "fog",
    "frost",
    "gaussian_noise",
    "glass_blur",
    "impulse_noise",
    "jpeg_compression",
    "motion_blur",
    "pixelate",
    "shot_noise",
    "snow",
    "zoom_blur",
]

LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in the gray of a color."""
ROUGHNESS = 100.0
"""The amplitude of the first random heights of a landscape of fog."""


def gaussian_noise(images: Tensor, draws: Draws, spread: float) -> Tensor:
    """Gaussian noise of this standard deviation, where white is 1."""
    return images + 255.0 * draws.normal(0.0, spread, *images.shape[1:])


def shot_noise(images: Tensor, draws: Draws, photons: float) -> Tensor:
    """Poisson noise, with this mean number of photons at the brightest value."""
    return draws.poisson(images / 255.0 * photons) * (255.0 / photons)


def impulse_noise(images: Tensor, draws: Draws, share: float) -> Tensor:
    """A share of the values, each one color of a pixel, becomes 255 or 0."""
    chance = draws.uniform(0.0, 1.0, *images.shape[1:])
    return torch.where(chance < share / 2, 255.0, torch.where(chance < share, 0.0, images))


def defocus_blur(images: Tensor, draws: Draws, radius: float, softness: float) -> Tensor:
    """Convolution with a disk of this radius, in pixels, with soft edges."""
    kernel = disk(radius, softness)
    padded = F.pad(images, 4 * (len(kernel) // 2,), mode="reflect")
    return F.conv2d(padded, kernel.expand(3, 1, -1, -1), groups=3)


def disk(radius: float, softness: float) -> Tensor:  # (side, side), summing to 1
    """A disk of pixels, smoothed over the eight neighbors by a Gaussian of this standard deviation."""
    reach = math.ceil(radius)
    squares = torch.arange(-reach, reach + 1).square()
    inside = (squares[:, None] + squares <= radius**2).double()
    spread = gaussian_weights(torch.arange(-1, 2), softness)
    return F.conv2d((inside / inside.sum())[None, None], torch.outer(spread, spread)[None, None], padding=2)[0, 0]


def glass_blur(images: Tensor, draws: Draws, sigma: float, times: int) -> Tensor:
    """Smoothing, then `times` random displacements of each pixel by at most one up and left, then smoothing.

    The original code means to exchange two pixels, but its NumPy assignment copies one onto the other. It goes from the
    last pixel to the first and therefore copies the values from before, so that one gather does the same.
    """
    n, channels, height, width = images.shape
    images = to_bytes(smoothed(images, sigma, truncate=4.0, mirrored=False))
    for _ in range(times):
        up, left = draws.uniform(0.0, 1.0, 2, height, width).lt(0.5).long().unbind(1)
        up[:, :2], up[:, :, :2], left[:, :2], left[:, :, :2] = (
            0,
            0,
            0,
            0,
        )  # the first rows and columns stay
        places = (torch.arange(height)[:, None] - up) * width + torch.arange(width) - left
        places = places.reshape(n, 1, -1).expand(-1, channels, -1)
        images = images.flatten(2).gather(2, places).view_as(images)
    return smoothed(images, sigma, truncate=4.0, mirrored=False)


def motion_blur(images: Tensor, draws: Draws, radius: int, sigma: float) -> Tensor:
    """Motion along a direction within 45° of the horizontal."""
    return streaked(images, radius, sigma, draws.uniform(-45.0, 45.0))


def zoom_blur(images: Tensor, draws: Draws, most: float) -> Tensor:
    """The mean of the image and of its enlargements by 0, 1, 2, … %; the image counts twice."""
    factors = np.arange(1.0, most, 0.01).tolist()
    return (images + sum(enlarged(images, factor) for factor in factors)) / (len(factors) + 1)


def snow(
    images: Tensor,
    draws: Draws,
    mean: float,
    spread: float,
    flake: float,
    threshold: float,
    radius: int,
    sigma: float,
    kept: float,
) -> Tensor:
    """Noise, enlarged to flakes, cut off below a threshold and blurred downwards, over a whitened image."""
    flakes = enlarged(draws.normal(mean, spread, 1, *images.shape[2:]), flake)
    flakes = to_bytes(255.0 * torch.where(flakes < threshold, 0.0, flakes))
    flakes = to_bytes(streaked(flakes, radius, sigma, draws.uniform(-135.0, -45.0)))
    gray = torch.einsum("nchw,c->nhw", images, torch.tensor(LUMA, dtype=images.dtype))[:, None]
    whitened = torch.maximum(images, 1.5 * gray + 127.5)
    return kept * images + (1.0 - kept) * whitened + flakes + flakes.flip(-2, -1)


def frost(images: Tensor, draws: Draws, kept: float, ice: float, photographs: list[Tensor]) -> Tensor:
    """A random piece of a random photograph of frost, (3, height, width) in uint8, over each image."""
    side = images.shape[-1]
    pieces = []
    for generator in draws.generators:
        photograph = photographs[generator.integers(len(photographs))]
        top, left = (int(generator.integers(length - side)) for length in photograph.shape[1:])
        pieces.append(photograph[:, top : top + side, left : left + side])
    return kept * images + ice * torch.stack(pieces)


def fog(images: Tensor, draws: Draws, density: float, decay: float) -> Tensor:
    """A layer of fog of varying density, darkened so that white stays white."""
    brightest = images.amax((1, 2, 3), keepdim=True)
    heights = landscape(draws.uniform(-1.0, 1.0, *images.shape[2:]), decay)[:, None]
    return (images + 255.0 * density * heights) * brightest / (brightest + 255.0 * density)


def landscape(chance: Tensor, decay: float) -> Tensor:  # (N, S, S), S a power of two; heights from 0 to 1
    """A periodic fractal landscape by the diamond–square algorithm, from one random number a pixel.

    Each step doubles the resolution: first the centers of the squares, then the centers of their sides become the mean
    of four neighbors plus a random number.
    """
    heights, step, rough = torch.zeros_like(chance), chance.shape[-1], ROUGHNESS
    while step >= 2:
        half = step // 2
        for row, column, neighbors in (
            (half, half, ((-half, -half), (-half, half), (half, -half), (half, half))),
            (0, half, ((-half, 0), (half, 0), (0, -half), (0, half))),
            (half, 0, ((-half, 0), (half, 0), (0, -half), (0, half))),
        ):
            total = sum(heights.roll((-down, -across), (1, 2)) for down, across in neighbors)
            mean = (total / 4 + rough**2 * chance)[:, row::step, column::step]
            heights[:, row::step, column::step] = mean
        step, rough = half, rough / decay
    heights -= heights.amin((1, 2), keepdim=True)
    return heights / heights.amax((1, 2), keepdim=True)


def brightness(images: Tensor, draws: Draws, more: float) -> Tensor:
    """A larger V in HSV: hue and saturation stay, so all colors of a pixel grow by one factor; black becomes gray."""
    value = images.amax(1, keepdim=True)
    brighter = (value + 255.0 * more).clamp_max(255.0)
    return torch.where(value > 0, images * brighter / value.clamp_min(1.0), brighter)


def contrast(images: Tensor, draws: Draws, kept: float) -> Tensor:
    """Differences from the mean color of each image, multiplied by `kept`."""
    means = images.mean((2, 3), keepdim=True)
    return (images - means) * kept + means


def elastic_transform(images: Tensor, draws: Draws, bend: float, sigma: float, shift: float) -> Tensor:
    """A random affine map of three points, then smooth random displacements; lengths in widths of an image."""
    size = images.shape[-1]
    affine = affine_map(size, size * shift * draws.uniform(-1.0, 1.0, 3, 2))
    places = torch.cartesian_prod(torch.arange(size), torch.arange(size)).double()  # rows and columns
    rows, columns = (places @ affine[:, :2] + affine[:, 2:]).view(-1, size, size, 2).unbind(-1)
    images = resampled(images, rows, columns, edge_twice=False)
    chance = draws.uniform(-1.0, 1.0, 2, size, size)
    displacement = size * bend * smoothed(chance, size * sigma, truncate=3.0, mirrored=True)
    rows, columns = (places.T.view(2, size, size) + displacement).unbind(1)
    return resampled(images, rows, columns, edge_twice=True)


def affine_map(size: int, shifts: Tensor) -> Tensor:  # (N, 3, 2), both
    """The affine map, as matrix over offset, from three shifted points back to where they were."""
    middle, side = size // 2, size // 3
    points = torch.tensor([[side, side], [-side, side], [-side, -side]], dtype=torch.float64) + middle
    moved = points + shifts
    ones = torch.ones(len(shifts), 3, 1, dtype=torch.float64)
    return torch.linalg.solve(torch.cat([moved, ones], 2), points.expand_as(moved))


def pixelate(images: Tensor, draws: Draws, scale: float) -> Tensor:
    """Reduced and enlarged again with box filters."""
    size, box = images.shape[-1], Image.Resampling.BOX
    small = int(size * scale)
    return map_pictures(images, lambda picture: picture.resize((small, small), box).resize((size, size), box))


def jpeg_compression(images: Tensor, draws: Draws, quality: int) -> Tensor:
    """Compression as JPEG of this quality, in percent."""

    def compressed(picture: Image.Image) -> Image.Image:
        file = BytesIO()
        picture.save(file, "JPEG", quality=quality)
        return Image.open(file, formats=("JPEG",))

    return map_pictures(images, compressed)


def map_pictures(images: Tensor, change: Callable[[Image.Image], Image.Image]) -> Tensor:
    pictures = images.byte().permute(0, 2, 3, 1).contiguous().numpy()
    changed = np.stack([np.asarray(change(Image.fromarray(picture))) for picture in pictures])
    return torch.from_numpy(changed).permute(0, 3, 1, 2)
