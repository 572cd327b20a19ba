"""Weather: snow, frost, fog, brightness."""

from __future__ import annotations

import torch
from torch import Tensor

from reproduction.data.corruptions.draws import Draws
from reproduction.data.corruptions.filters import enlarged, streaked, whole

__all__ = ["brightness", "fog", "frost", "snow"]

LUMA = (0.299, 0.587, 0.114)
"""How much red, green and blue make of the grey of a colour."""
ROUGHNESS = 100.0
"""How far chance moves the first heights of a landscape of fog."""


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
    """Noise, enlarged to flakes, cut off below the threshold and dragged down; over an image with some of its colours
    whitened."""
    flakes = enlarged(draws.normal(mean, spread, 1, *images.shape[2:]), flake)
    flakes = whole(255.0 * torch.where(flakes < threshold, 0.0, flakes))
    flakes = whole(streaked(flakes, radius, sigma, draws.uniform(-135.0, -45.0)))
    grey = torch.einsum("nchw,c->nhw", images, torch.tensor(LUMA, dtype=images.dtype))[:, None]
    whitened = torch.maximum(images, 1.5 * grey + 127.5)
    return kept * images + (1.0 - kept) * whitened + flakes + flakes.flip(-2, -1)


def frost(images: Tensor, draws: Draws, kept: float, ice: float, photographs: list[Tensor]) -> Tensor:
    """Over each image, a piece of one of the photographs of frost, which are of bytes, (3, height, width)."""
    side = images.shape[-1]
    pieces = []
    for generator in draws.generators:
        photograph = photographs[generator.integers(len(photographs))]
        top, left = (int(generator.integers(length - side)) for length in photograph.shape[1:])
        pieces.append(photograph[:, top : top + side, left : left + side])
    return kept * images + ice * torch.stack(pieces)


def fog(images: Tensor, draws: Draws, density: float, decay: float) -> Tensor:
    """A layer of fog, denser here than there, and the whole darkened so that white stays white."""
    brightest = images.amax((1, 2, 3), keepdim=True)
    heights = landscape(draws.uniform(-1.0, 1.0, *images.shape[2:]), decay)[:, None]
    return (images + 255.0 * density * heights) * brightest / (brightest + 255.0 * density)


def landscape(chance: Tensor, decay: float) -> Tensor:  # (N, S, S), S a power of two; heights from 0 to 1
    """A fractal landscape without edges by the diamond–square algorithm, from one random number a place: from a grid of
    known heights to one twice as fine, first the middles of its squares, then those of their sides, each the mean of
    four neighbours and some chance."""
    heights, step, rough = torch.zeros_like(chance), chance.shape[-1], ROUGHNESS
    while step >= 2:
        half = step // 2
        for row, column, neighbours in (
            (half, half, ((-half, -half), (-half, half), (half, -half), (half, half))),
            (0, half, ((-half, 0), (half, 0), (0, -half), (0, half))),
            (half, 0, ((-half, 0), (half, 0), (0, -half), (0, half))),
        ):
            total = sum(heights.roll((-down, -across), (1, 2)) for down, across in neighbours)
            mean = (total / 4 + rough**2 * chance)[:, row::step, column::step]
            heights[:, row::step, column::step] = mean
        step, rough = half, rough / decay
    heights -= heights.amin((1, 2), keepdim=True)
    return heights / heights.amax((1, 2), keepdim=True)


def brightness(images: Tensor, draws: Draws, more: float) -> Tensor:
    """More of V in HSV: as hue and saturation stay, all colours of a pixel grow by one factor; black becomes grey."""
    value = images.amax(1, keepdim=True)
    brighter = (value + 255.0 * more).clamp_max(255.0)
    return torch.where(value > 0, images * brighter / value.clamp_min(1.0), brighter)
