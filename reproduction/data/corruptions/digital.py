"""What happens to files: less contrast, bent, coarser, compressed."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from posthoc.errors import MissingExtraError
from reproduction.data.corruptions.draws import Draws
from reproduction.data.corruptions.filters import resampled, smoothed

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["contrast", "elastic_transform", "jpeg_compression", "pixelate", "require_pillow"]


def contrast(images: Tensor, draws: Draws, kept: float) -> Tensor:
    """So much of what tells each pixel from the mean colour of its image."""
    means = images.mean((2, 3), keepdim=True)
    return (images - means) * kept + means


def elastic_transform(images: Tensor, draws: Draws, bend: float, sigma: float, shift: float) -> Tensor:
    """An affine map that moves three points at random, then smooth random displacements; lengths are in widths of an
    image."""
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
    """The affine map, as matrix over offset, back from the points moved by these shifts to where they were."""
    middle, side = size // 2, size // 3
    points = torch.tensor([[side, side], [-side, side], [-side, -side]], dtype=torch.float64) + middle
    moved = points + shifts
    ones = torch.ones(len(shifts), 3, 1, dtype=torch.float64)
    return torch.linalg.solve(torch.cat([moved, ones], 2), points.expand_as(moved))


def pixelate(images: Tensor, draws: Draws, scale: float) -> Tensor:
    """Made smaller and large again, every pixel the mean of those it covers."""
    require_pillow("pixelate")
    from PIL.Image import Resampling

    size = images.shape[-1]
    small = int(size * scale)
    return each_picture(images, lambda p: p.resize((small, small), Resampling.BOX).resize((size, size), Resampling.BOX))


def jpeg_compression(images: Tensor, draws: Draws, quality: int) -> Tensor:
    """Written as JPEG, of this quality in per cent, and read again."""
    require_pillow("jpeg_compression")
    from PIL.Image import open as open_picture

    def compressed(picture: Image) -> Image:
        file = BytesIO()
        picture.save(file, "JPEG", quality=quality)
        return open_picture(file, formats=("JPEG",))

    return each_picture(images, compressed)


def each_picture(images: Tensor, change: Callable[[Image], Image]) -> Tensor:
    from PIL.Image import fromarray

    pictures = images.byte().permute(0, 2, 3, 1).contiguous().numpy()
    changed = np.stack([np.asarray(change(fromarray(picture))) for picture in pictures])
    return torch.from_numpy(changed).permute(0, 3, 1, 2)


def require_pillow(kind: str) -> None:
    """Refuses a kind of corruption that Pillow is missing for."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("pillow", "images", f"The corruption {kind}") from error
