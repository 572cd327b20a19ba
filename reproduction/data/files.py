"""Files of the data sets: in the user's folder, or downloaded once with pooch and kept in the cache."""

from __future__ import annotations

import os
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pooch
import requests

from posthoc.errors import FileError

__all__ = ["DataFolder", "RemoteFile", "StandIn", "cache_folder", "fetch", "read_arrays", "read_members"]

RETRIES = 2
"""Further attempts after a download that failed."""
BROKEN = (EOFError, OSError, ValueError, zlib.error, tarfile.TarError, zipfile.BadZipFile)
"""What reading a damaged file raises."""


class UnavailableError(FileError):
    """Data or the weights of a network are not on this machine and cannot be downloaded."""


@dataclass(frozen=True)
class RemoteFile:
    """A file to download.

    Attributes:
        url: Its address.
        filename: Its name on the disk.
        checksum: The published one, such as `"md5:03b5..."`. None: the SHA-256 of the first download is kept beside
            the file and checked on every later use.
    """

    url: str
    filename: str
    checksum: str | None = None


@dataclass(frozen=True)
class StandIn:
    """A package that can replace the original file, and the command that downloads it."""

    filename: str
    command: str


def cache_folder() -> Path:
    """The folder of downloads and of cached results: `POSTHOC_CACHE`, or posthoc's folder in the user's cache."""
    return Path(os.environ.get("POSTHOC_CACHE") or pooch.os_cache("posthoc")).expanduser()


class DataFolder:
    """The files of one data set.

    Args:
        name: The name of its subfolder, in the user's data and in the cache.
        data_dir: The folder with the user's data. None: the one that `POSTHOC_DATA` names, if it is set.

    Raises:
        FileError: The folder with data does not exist.
    """

    def __init__(self, name: str, data_dir: str | os.PathLike[str] | None) -> None:
        self.name, self.cache = name, cache_folder() / name
        parent = data_dir if data_dir is not None else os.environ.get("POSTHOC_DATA") or None
        self.own = Path(parent).expanduser() / name if parent is not None else None
        if self.own is not None and not self.own.parent.is_dir():
            raise FileError(
                f"Expected a folder with data, found none at {self.own.parent}: "
                "name another with data_dir (--data-dir) or POSTHOC_DATA."
            )

    def find(self, *patterns: str) -> list[Path]:
        """The user's files that match the first pattern that has any match, sorted."""
        matches = (sorted(filter(Path.is_file, self.own.glob(p))) for p in patterns) if self.own is not None else ()
        return next(filter(None, matches), [])

    def get(self, remote: RemoteFile, stand_in: StandIn | None = None) -> Path:
        """The user's own file, unchecked; else the one in the cache, downloaded if needed.

        Raises:
            FileError: The file cannot be had. A note names the folder to put it into, and the stand-in.
        """
        if own := self.find(remote.filename):
            return own[0]
        try:
            return fetch(remote, self.cache)
        except FileError as error:
            instead = f" (or {stand_in.filename}, which stands in for it: {stand_in.command})" if stand_in else ""
            error.add_note(
                f"posthoc: to avoid this download, put {remote.filename}{instead} into the subfolder {self.name} of "
                "the folder that data_dir (--data-dir) or POSTHOC_DATA names."
            )
            raise


def fetch(remote: RemoteFile, folder: str | os.PathLike[str]) -> Path:
    """Downloads a file unless the folder has it with the right checksum.

    Raises:
        UnavailableError: The download failed.
        FileError: The downloaded file has another checksum, or the folder cannot be written.
    """
    record = Path(folder) / f"{remote.filename}.sha256"
    checksum = remote.checksum or (record.read_text().strip() if record.is_file() else None)
    downloads = pooch.create(
        folder, "", registry={remote.filename: checksum}, urls={remote.filename: remote.url}, retry_if_failed=RETRIES
    )
    try:
        path = Path(downloads.fetch(remote.filename, progressbar=sys.stderr.isatty()))
        if checksum is None:
            record.write_text(f"sha256:{pooch.file_hash(str(path))}\n")
    except requests.RequestException as error:
        reason = f"Expected to download {remote.filename} from {remote.url}, found that it cannot: {error}"
        raise UnavailableError(reason[:800]) from error
    except ValueError as error:
        raise FileError(
            f"Expected {remote.filename} with checksum {checksum}, found another at {remote.url}: it was damaged, or "
            f"replaced by another version. ({error})"[:800]
        ) from error
    except OSError as error:
        raise FileError(f"Expected to write {remote.filename} into {folder}, found that it cannot: {error}.") from error
    return path


def read_members(source: Path, names: Sequence[str]) -> list[bytes]:
    """The contents of files, from an archive without unpacking it, or from the folder of `source`.

    Args:
        source: A tar or zip archive, of which files in any folder are found; or a file whose siblings are read.
        names: Names of files, without folders.
    """
    try:
        if source.name.endswith((".tar.gz", ".tgz")):
            with tarfile.open(source) as archive:
                entries = {Path(entry.name).name: entry for entry in archive if entry.isfile()}
                files = [archive.extractfile(entries[name]) for name in names]
                return [file.read() for file in files if file is not None]
        if source.suffix == ".zip":
            return [unzip(source, name) for name in names]
        return [source.with_name(name).read_bytes() for name in names]
    except (FileNotFoundError, KeyError) as error:
        wanted = ", ".join(names)
        raise FileError(f"Expected {wanted} in {source}, found not all of them ({error}): add them.") from error
    except BROKEN as error:
        raise FileError(
            f"Expected a whole archive, found something else in {source} ({error}): download it again."
        ) from error


def unzip(archive: Path | BytesIO, name: str) -> bytes:
    """One file of a zip archive."""
    with zipfile.ZipFile(archive) as file:
        return file.read(name)


def read_arrays(path: Path, *names: str) -> list[np.ndarray[Any, Any]]:
    """Arrays of an `.npz` file by their names; pickled objects are refused."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return [file[name] for name in names]
    except (KeyError, *BROKEN) as error:
        raise FileError(f"Expected arrays {', '.join(names)} in {path}, found otherwise ({error}).") from error
