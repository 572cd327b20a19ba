"""Files in archives, read where they are: nothing is unpacked, so nothing can be written where it should not be."""

from __future__ import annotations

import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from posthoc.errors import FileError

__all__ = ["Read", "opened", "unzipped"]

Read = Callable[[str], bytes]
"""The bytes of a file by its name."""


@contextmanager
def opened(path: Path) -> Iterator[Read]:
    """Reads files by their names: out of a tar archive, in whichever folder of it they are, or from beside a file."""
    if not path.name.endswith((".tar.gz", ".tgz")):
        yield lambda name: whole(path.with_name(name))
        return
    try:
        with tarfile.open(path) as archive:
            members = {Path(member.name).name: member for member in archive if member.isfile()}

            def read(name: str) -> bytes:
                file = archive.extractfile(members[name]) if name in members else None
                if file is None:
                    raise FileError(f"Expected {name} in {path}, found none: is it the right archive?")
                return file.read()

            yield read
    except FileError:
        raise
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise FileError(
            f"Expected a whole tar archive, found something else in {path} ({error}): download it again."
        ) from error


def whole(path: Path) -> bytes:
    if not path.is_file():
        raise FileError(f"Expected {path.name} in {path.parent}, found none: add it.")
    return path.read_bytes()


def unzipped(data: bytes, name: str, source: Path) -> bytes:
    """A file of a zip archive."""
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            return archive.read(name)
    except (zipfile.BadZipFile, KeyError, zlib.error) as error:
        raise FileError(f"Expected {name} zipped in {source}, found otherwise ({error}): download it again.") from error
