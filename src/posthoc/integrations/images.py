"""Images, read by Pillow: one by one, and a folder of them."""

from __future__ import annotations

import io
import os
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from posthoc.errors import DataError
from posthoc.integrations.digests import listing_digest, walk
from posthoc.optional import require

__all__ = ["ImageFolder", "read_image"]

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


def read_image(content: bytes | str | os.PathLike[str], name: str) -> Any:
    """An image in colour, from its file or its bytes; `name` is how to call it if it cannot be read."""
    library = require("PIL.Image", "images", "Reading images")
    source: BinaryIO | str | os.PathLike[str] = io.BytesIO(content) if isinstance(content, bytes) else content
    try:
        with library.open(source) as image:
            return image.convert("RGB")
    # Pillow's errors have no base of their own: a damaged file fails as its format's reader does.
    except (OSError, ValueError, SyntaxError, EOFError, library.DecompressionBombError) as error:
        raise DataError(
            f"Expected an image that can be read, found that {name} cannot be ({error}). Repair or remove it, and "
            "collect again with --force."
        ) from error


class ImageFolder:
    """A folder of images in the order of their names: in one sub-folder a class, in the order of the folders' names,
    or all in the folder itself and without targets."""

    costly = True

    def __init__(self, folder: Path) -> None:
        require("PIL.Image", "images", "Reading images")
        self.folder = folder
        with os.scandir(folder) as entries:
            classes = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
        found = [(name, size) for name, size in walk(folder) if Path(name).suffix.lower() in SUFFIXES]
        if not found:
            raise DataError(
                f"Expected images ({', '.join(SUFFIXES)}) in {folder}, or in one sub-folder a class, found none."
            )
        loose = [name for name, _ in found if "/" not in name]
        if loose and len(loose) < len(found):
            raise DataError(
                f"Expected images either in {folder} itself or in one sub-folder a class, found both ({loose[0]} and "
                f"{len(found) - len(loose)} below): move one or the other."
            )
        self.labels = {name: number for number, name in enumerate(classes)} if not loose else {}
        # Bytes in one array: a million strings would be copied into every worker.
        self.names = np.array([os.fsencode(name) for name, _ in found])
        # Classes too, since one without images counts when they are numbered.
        listing = chain(((f"{name}/", 0) for name in self.labels), found)
        self.identity = {"kind": "images", "rows": len(found), "digest": listing_digest(listing)}

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, row: int) -> tuple[Any, int | None]:
        name = os.fsdecode(self.names[row])
        path = self.folder / name
        return read_image(path, str(path)), self.labels.get(name.partition("/")[0])
