"""Files of other libraries: errors of reading them, and digests that tell them apart."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from posthoc.errors import FileError, PosthocError


@contextmanager
def expecting(what: str, kind: type[PosthocError] = FileError) -> Iterator[None]:
    """Raise the error of a library as one of this package, in one line."""
    try:
        yield
    except PosthocError:
        raise
    except Exception as error:  # libraries' errors have no common base
        reason = " ".join(str(error.__cause__ or error).split())
        raise kind(f"Expected {what}, found none: {reason:.500}") from error


def file_digest(*paths: Path) -> str:
    """The SHA-256 of the bytes of one file, or of the digests of several."""
    digests = []
    for path in paths:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


def walk(folder: str | os.PathLike[str], prefix: str = "") -> Iterator[tuple[str, int]]:
    """The relative names and sizes of the files in a folder and below it, in a fixed order, without hidden ones."""
    with os.scandir(folder) as entries:
        visible = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in visible:
        name = f"{prefix}{entry.name}"
        if entry.is_dir():
            yield from walk(entry.path, f"{name}/")
        else:
            yield name, entry.stat().st_size


def listing_digest(files: Iterable[tuple[str, int]]) -> str:
    """A digest of names and sizes: quick, and enough to tell one collection of files from another."""
    digest = hashlib.sha256()
    for name, size in files:
        digest.update(os.fsencode(f"{name}\0{size}\0"))
    return digest.hexdigest()
