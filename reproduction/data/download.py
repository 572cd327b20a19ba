"""Files from elsewhere: downloaded once, gone on with after an interruption, checked, and whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path

from posthoc.errors import FileError, UnavailableError
from posthoc.io import atomic_path, lock, require_folder, sync_folder, writing
from posthoc.progress import progress_bar

__all__ = ["Remote", "Shelf", "StandIn", "cache_folder", "fetch"]

ATTEMPTS = 3
"""How often a download that breaks off is gone on with before giving up."""
PAUSE = 1.0
"""Seconds before the second attempt; twice as long before each later one."""
TIMEOUT = 60.0
"""Seconds without a byte after which a connection counts as broken."""
PIECE = 2**18
"""Bytes read at a time."""
RECORDED = "sha256"
"""The checksum that is written down at a first download."""
TO_GO_ON = ("ETag", "Last-Modified")
"""Headers that tell one version of a remote file from another."""


@dataclass(frozen=True)
class Remote:
    """A file on the network. `checksum` is the published one, as "sha256:…"; without one, what came at the first
    download is written down, and every later use is checked against it."""

    url: str
    filename: str
    checksum: str | None = None


@dataclass(frozen=True)
class StandIn:
    """A package whose file may lie in the user's folder in place of the original, and the command that gets it."""

    filename: str
    command: str


def cache_folder() -> Path:
    """Where downloads are kept: POSTHOC_CACHE, or the user's cache folder."""
    named = os.environ.get("POSTHOC_CACHE")
    if named:
        return Path(named).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "posthoc"


class Shelf:
    """Where the files of one data set are: in its folder of the user's data (`data_dir`, or POSTHOC_DATA), or in its
    folder of the cache, which has what was downloaded."""

    def __init__(self, name: str, data_dir: str | os.PathLike[str] | None) -> None:
        self.name, self.cache = name, cache_folder() / name
        given = data_dir if data_dir is not None else os.environ.get("POSTHOC_DATA") or None
        self.own = Path(given).expanduser() / name if given is not None else None
        if self.own is not None and not self.own.parent.is_dir():
            raise FileError(
                f"Expected a folder with data, found none at {self.own.parent}: "
                "name another with data_dir (--data-dir) or POSTHOC_DATA."
            )

    def find(self, *patterns: str) -> list[Path]:
        """The user's own files that match the first of these names or patterns of which there are any."""
        for pattern in patterns if self.own is not None else ():
            assert self.own is not None
            if found := sorted(path for path in self.own.glob(pattern) if path.is_file()):
                return found
        return []

    def get(self, remote: Remote, or_else: StandIn | None = None) -> Path:
        """The user's own file, as it is; or one of the cache, checked, and downloaded if need be. Where it cannot be
        had, the error names what would do instead."""
        if found := self.find(remote.filename):
            return found[0]
        try:
            return fetch(remote, self.cache)
        except FileError as error:
            instead = f" (or {or_else.filename}, which stands in for it: {or_else.command})" if or_else else ""
            error.add_note(
                f"posthoc: to do without this download, put {remote.filename}{instead} into the folder {self.name} of "
                "one that you name with data_dir (--data-dir) or POSTHOC_DATA."
            )
            raise


def fetch(remote: Remote, folder: str | os.PathLike[str]) -> Path:
    """The file in this folder: as it is there if its checksum is right, else downloaded. What an interrupted download
    left is gone on with, if the server can and has the same file still."""
    target = Path(folder) / remote.filename
    if not target.is_file():
        bring(remote, target)
    check(target, remote.checksum or recorded(target), f"remove {target} to download it again")
    return target


def bring(remote: Remote, target: Path) -> None:
    """Downloads beside the target and moves it there, whole and checked."""
    folder, part = require_folder(target.parent), target.with_name(f"{target.name}.part")
    with lock(folder / f".{target.name}.lock"):
        if target.is_file():  # another has just brought it
            return
        with writing(target, f"Make room; {part} will be gone on with."):
            download(remote, part)
        try:
            check(part, remote.checksum, f"the file at {remote.url} is not the one that was meant, or was damaged")
        except FileError:
            forget(part)
            raise
        with atomic_path(beside(target)) as note:
            note.write_text(f"{RECORDED}:{digest(part, RECORDED)}\n")
        os.replace(part, target)
        beside(part).unlink(missing_ok=True)
        sync_folder(folder)


def beside(path: Path) -> Path:
    """Where what must be known about a file is written: the checksum of a whole one, the version of a part."""
    return path.with_name(f"{path.name}.{'version' if path.suffix == '.part' else RECORDED}")


def recorded(target: Path) -> str | None:
    note = beside(target)
    return note.read_text().strip() if note.is_file() else None


def forget(part: Path) -> None:
    part.unlink(missing_ok=True)
    beside(part).unlink(missing_ok=True)


def check(path: Path, checksum: str | None, then: str) -> None:
    """Refuses a file that has another checksum than this one, if there is one."""
    if checksum is None:
        return
    kind, _, expected = checksum.partition(":")
    found = digest(path, kind)
    if found != expected:
        raise FileError(
            f"Expected {path.name.removesuffix('.part')} with {kind} {expected}, found one with {found}: {then}."
        )


def digest(path: Path, kind: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()


def download(remote: Remote, part: Path) -> None:
    """Brings the part to its full length, in several attempts if need be."""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE * 2 ** (attempt - 1))
        try:
            if take(remote, part):
                return
            reason = "the connection ended too early"
        except urllib.error.HTTPError as error:
            reason = f"HTTP {error.code} {error.reason}"
            if error.code == 416 and error.headers.get("Content-Range") == f"bytes */{size_of(part)}":
                return  # there is no rest: it was cut off when all was there
            if error.code == 416:
                forget(part)
            elif error.code < 500:
                break
        except urllib.error.URLError as error:
            reason = str(error.reason)
        except (TimeoutError, ConnectionError, HTTPException) as error:
            reason = str(error) or type(error).__name__
    kept = f" {size_of(part)} bytes are kept and will be gone on with." if size_of(part) else ""
    raise UnavailableError(
        f"Expected to download {remote.filename} from {remote.url}, found that it cannot: {reason}.{kept}"
    )


def take(remote: Remote, part: Path) -> bool:
    """One attempt: whether the part is whole now."""
    request = urllib.request.Request(remote.url, headers={"User-Agent": "posthoc", "Accept-Encoding": "identity"})
    version, done = known_version(part), size_of(part)
    if done and version is not None:
        request.add_header("Range", f"bytes={done}-")
        request.add_header("If-Range", version)  # another version is sent whole
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        goes_on = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {done}-")
        if response.status == 206 and not goes_on:
            raise HTTPException(f"asked for the bytes from {done}, got {response.headers.get('Content-Range')}")
        done = done if goes_on else 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length is not None else None
        if not goes_on:
            forget(part)
            write_version(part, response)
        with part.open("ab") as file, progress_bar(remote.filename, total, done, unit="bytes") as report:
            for piece in pieces(response):
                file.write(piece)
                done += len(piece)
                report(done)
            file.flush()
            os.fsync(file.fileno())
    return total is None or done == total


def pieces(response: HTTPResponse) -> Iterator[bytes]:
    try:
        while piece := response.read(PIECE):
            yield piece
    except OSError as error:  # of the network, which is to be told from the disk's
        raise ConnectionError(str(error) or type(error).__name__) from error


def size_of(part: Path) -> int:
    return part.stat().st_size if part.is_file() else 0


def known_version(part: Path) -> str | None:
    """What the server called the version that the part is of; without it, nothing can be added to the part."""
    try:
        version = json.loads(beside(part).read_text())
    except (OSError, ValueError):
        return None
    return version if isinstance(version, str) else None


def write_version(part: Path, response: HTTPResponse) -> None:
    named = (response.headers.get(header) for header in TO_GO_ON)
    version = next((v for v in named if v is not None and not v.startswith("W/")), None)  # weak ones do not promise it
    if version is not None:
        beside(part).write_text(json.dumps(version))
