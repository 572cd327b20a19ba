"""Rotated images."""

from __future__ import annotations

import math

import pytest
import torch

from posthoc.errors import DataError, OptionError
from reproduction.data import images as image_module
from reproduction.data.images import rotate


def some_images(n=5, size=8):
    return torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def directly(image, degrees):
    """One color of one image, pixel by pixel: each new pixel looks back to where it came from."""
    height, width = image.shape
    angle, result = math.radians(degrees), torch.zeros(height, width, dtype=torch.float64)
    for row in range(height):
        for column in range(width):
            right, up = column - (width - 1) / 2, (height - 1) / 2 - row
            x = math.cos(angle) * right + math.sin(angle) * up + (width - 1) / 2
            y = (height - 1) / 2 - (math.cos(angle) * up - math.sin(angle) * right)
            for r in (math.floor(y), math.floor(y) + 1):
                for c in (math.floor(x), math.floor(x) + 1):
                    if 0 <= r < height and 0 <= c < width:
                        result[row, column] += (1 - abs(y - r)) * (1 - abs(x - c)) * float(image[r, c])
    return result


@pytest.mark.parametrize("degrees", [10, 45, 130, -33.5, 400])
@pytest.mark.parametrize("shape", [(8, 8), (5, 9)])
def test_against_a_computation_pixel_by_pixel(degrees, shape):
    images = torch.rand(2, 3, *shape, dtype=torch.float64)
    result = rotate(images, degrees)
    for n, color in ((0, 0), (1, 2)):
        torch.testing.assert_close(result[n, color], directly(images[n, color], degrees))


@pytest.mark.parametrize("quarters", [1, 2, 3, -1])
def test_quarter_turns_are_counter_clockwise_and_lose_nothing(quarters):
    images = some_images()
    assert torch.equal(rotate(images, 90.0 * quarters), torch.rot90(images, quarters, (2, 3)))
    real = images / 255.0
    torch.testing.assert_close(rotate(real, 90.0 * quarters), torch.rot90(real, quarters, (2, 3)))


@pytest.mark.parametrize("degrees", [0, 360, -720.0])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
def test_nothing_changes_without_a_turn(degrees, dtype):
    images = (some_images() / 255.0).to(dtype) if dtype.is_floating_point else some_images()
    result = rotate(images, degrees)
    assert torch.equal(result, images)
    assert result.dtype == dtype
    assert result.data_ptr() != images.data_ptr()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_types_are_kept_and_bytes_rounded(dtype):
    images = some_images()
    exact = torch.stack([directly(images[0, color], 20) for color in range(3)])
    result = rotate(images.to(dtype), 20)[0]
    assert result.dtype == dtype
    assert (result.double() - exact).abs().max() < {torch.uint8: 0.501, torch.bfloat16: 0.51}.get(dtype, 0.07)


def test_chunks_make_no_difference(monkeypatch):
    together = rotate(some_images(), 70)
    monkeypatch.setattr(image_module, "CHUNK", 2)
    assert torch.equal(rotate(some_images(), 70), together)


@pytest.mark.parametrize("images", [torch.zeros(3, 8, 8), torch.zeros(1, 3, 8, 8, dtype=torch.int64)])
def test_what_are_no_images_is_refused(images):
    with pytest.raises(DataError, match=r"as bytes or real numbers, to rotate, got torch\.\w+ of shape"):
        rotate(images, 10)


@pytest.mark.parametrize("degrees", [math.nan, math.inf])
def test_angles_are_numbers(degrees):
    with pytest.raises(OptionError, match="degrees to be a finite number"):
        rotate(some_images(), degrees)
