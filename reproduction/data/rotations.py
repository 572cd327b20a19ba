"""Rotated images: what a network has seen, turned further and further from how it saw it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc.errors import DataError, OptionError

__all__ = ["ROTATIONS", "rotated"]

ROTATIONS = tuple(range(0, 181, 10))
"""The angles, in degrees, by which the paper rotates the test images."""
CHUNK = 1024
"""Images turned at a time."""


def rotated(images: Tensor, degrees: float) -> Tensor:  # (N, 3, H, W), of bytes or real numbers
    """The images turned about their centre, counter-clockwise: of the same size and type, interpolated linearly, and
    zero where nothing was. Zero is black, so turn images before they are standardised."""
    if images.ndim != 4 or not (images.dtype == torch.uint8 or images.is_floating_point()):
        raise DataError(
            "Expected images of shape (N, channels, height, width), as bytes or real numbers, to rotate, "
            f"got {images.dtype} of shape {tuple(images.shape)}."
        )
    if not math.isfinite(degrees):
        raise OptionError(f"Expected degrees to be a finite number, got {degrees!r}.")
    if degrees % 360 == 0 or not images.numel():
        return images.clone()
    precise = images.dtype if images.dtype in (torch.float32, torch.float64) else torch.float32
    grid = grid_of(degrees, *images.shape[-2:]).to(images.device, precise)
    result = torch.empty_like(images)
    for old, new in zip(images.split(CHUNK), result.split(CHUNK), strict=True):
        turned = F.grid_sample(old.to(precise), grid.expand(len(old), -1, -1, -1), align_corners=False)
        new.copy_(turned if images.is_floating_point() else turned.round())
    return result


def grid_of(degrees: float, height: int, width: int) -> Tensor:  # (1, H, W, 2)
    """Where in the old image each pixel of the new one is: x and y, from -1 at one edge to 1 at the other."""
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    back = [[cosine, -sine * height / width, 0.0], [sine * width / height, cosine, 0.0]]
    return F.affine_grid(torch.tensor([back], dtype=torch.float64), [1, 1, height, width], align_corners=False)
