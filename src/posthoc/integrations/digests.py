"""Digests of files and folders, which say whether they are the same; times and places do not count."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["file_digest", "listing_digest", "walk"]


def file_digest(*paths: Path) -> str:
    """The SHA-256 of one file's bytes, or of the digests of several."""
    digests = []
    for path in paths:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


def walk(folder: str | os.PathLike[str], prefix: str = "") -> Iterator[tuple[str, int]]:
    """The files in a folder and those below it, as relative names in a fixed order, with their sizes. Hidden ones are
    left out."""
    with os.scandir(folder) as entries:
        visible = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in visible:
        name = f"{prefix}{entry.name}"
        if entry.is_dir():
            yield from walk(entry.path, f"{name}/")
        else:
            yield name, entry.stat().st_size


def listing_digest(files: Iterator[tuple[str, int]]) -> str:
    """A digest of names and sizes: quick, and enough to tell one collection of files from another."""
    digest = hashlib.sha256()
    for name, size in files:
        digest.update(os.fsencode(f"{name}\0{size}\0"))
    return digest.hexdigest()
