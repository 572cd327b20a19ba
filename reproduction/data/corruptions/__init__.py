"""Corrupted images: the fifteen kinds of CIFAR-10-C in five severities, computed from clean images.

Kinds and parameters are those of Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common
Corruptions and Perturbations" (2019), as in `make_cifar_c.py` of their repository hendrycks/robustness. The parameters
for CIFAR-10 are milder than those for ImageNet. The random numbers differ from theirs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from posthoc.errors import DataError, FileError, OptionError
from posthoc.validation import choice, integer
from reproduction.data.corruptions import kinds
from reproduction.data.corruptions.filters import Draws, to_bytes
from reproduction.data.corruptions.frost import frost_photographs

__all__ = ["CORRUPTIONS", "SEVERITIES", "available_corruptions", "corrupted"]

SIZE = 32
"""Rows and columns of an image, for which the parameters are meant."""
CHUNK = 500
"""Images corrupted at a time."""
KINDS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[Any, ...], ...]]] = {
    "gaussian_noise": (kinds.gaussian_noise, ((0.04,), (0.06,), (0.08,), (0.09,), (0.10,))),
    "shot_noise": (kinds.shot_noise, ((500,), (250,), (100,), (75,), (50,))),
    "impulse_noise": (kinds.impulse_noise, ((0.01,), (0.02,), (0.03,), (0.05,), (0.07,))),
    "defocus_blur": (kinds.defocus_blur, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))),
    "glass_blur": (kinds.glass_blur, ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))),
    "motion_blur": (kinds.motion_blur, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))),
    "zoom_blur": (kinds.zoom_blur, ((1.06,), (1.11,), (1.16,), (1.21,), (1.26,))),
    "snow": (
        kinds.snow,
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
    ),
    "frost": (kinds.frost, ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))),
    "fog": (kinds.fog, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))),
    "brightness": (kinds.brightness, ((0.05,), (0.1,), (0.15,), (0.2,), (0.3,))),
    "contrast": (kinds.contrast, ((0.75,), (0.5,), (0.4,), (0.3,), (0.15,))),
    "elastic_transform": (
        kinds.elastic_transform,
        ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    ),
    "pixelate": (kinds.pixelate, ((0.95,), (0.9,), (0.85,), (0.75,), (0.65,))),
    "jpeg_compression": (kinds.jpeg_compression, ((80,), (65,), (58,), (50,), (40,))),
}
"""The function of each kind, and its parameters at each severity."""
CORRUPTIONS = tuple(KINDS)
SEVERITIES = (1, 2, 3, 4, 5)


def corrupted(
    images: Tensor,
    kind: str,
    severity: int,
    *,
    seed: int = 0,
    start: int = 0,
    data_dir: str | os.PathLike[str] | None = None,
) -> Tensor:
    """Corrupts images.

    Args:
        images: (N, 3, 32, 32) in uint8, on the CPU.
        kind: One of `CORRUPTIONS`.
        severity: From 1 to 5.
        seed: Seeds the random numbers, together with each image's number.
        start: The number of the first image, so that batches give the same result as one call.
        data_dir: The folder with data, of which `frost` needs the photographs.
    """
    if images.dtype != torch.uint8 or images.shape[1:] != (3, SIZE, SIZE) or images.device.type != "cpu":
        raise DataError(
            f"Expected images of uint8 and shape (N, 3, {SIZE}, {SIZE}) on the CPU to corrupt, got {images.dtype} of "
            f"{tuple(images.shape)} on {images.device}."
        )
    choice("kind", kind, CORRUPTIONS)
    severity = integer("severity", severity, SEVERITIES[0])
    if severity > SEVERITIES[-1]:
        raise OptionError(f"Expected severity to be an integer of at most {SEVERITIES[-1]}, got {severity}.")
    seed, start = integer("seed", seed, 0), integer("start", start, 0)
    function, parameters = KINDS[kind]
    if kind == "frost":
        function = partial(function, photographs=frost_photographs(data_dir))
    result = torch.empty_like(images)
    for first in range(0, len(images), CHUNK):
        part = images[first : first + CHUNK]
        draws = Draws(seed, range(start + first, start + first + len(part)))
        result[first : first + CHUNK] = to_bytes(function(part.double(), draws, *parameters[severity - 1]))
    return result


def available_corruptions(data_dir: str | os.PathLike[str] | None = None) -> tuple[tuple[str, ...], dict[str, str]]:
    """The kinds that can be computed here, and for each other kind the reason why not."""
    try:
        frost_photographs(data_dir)
    except FileError as error:
        return tuple(kind for kind in CORRUPTIONS if kind != "frost"), {"frost": str(error)}
    return CORRUPTIONS, {}
