"""A folder of outputs: one `.npy` file for each array, mapped instead of read, and a manifest, `outputs.json`.

`OutputsWriter` appends rows batch by batch. Rows count once the manifest says so, and they are on the disk before it
does. A run that was killed goes on after the last row that counts.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import re
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import torch
from torch import Tensor

from posthoc.collect.loaders import Array, array_of, listed
from posthoc.collect.outputs import NAMES, Outputs
from posthoc.errors import DataError, FileError
from posthoc.io import OUTPUTS_MANIFEST as MANIFEST
from posthoc.io import atomic_path, lock, parsing, require_regular, require_writable, sync_folder, writing

LOCK = ".lock"
FORMAT = "posthoc-outputs"
VERSION = 1
DAMAGED = "The folder was changed or damaged: make it again, with force=True."

COMMIT_SECONDS = 5.0
"""How long appended rows may wait until they count: the most that a killed run loses."""


def row_type(array: Array) -> np.dtype[Any]:
    """The dtype and shape of one row of an array."""
    return np.dtype((array.dtype, array.shape[1:]))


def header(row: np.dtype[Any], rows: int) -> bytes:
    """The header of a `.npy` file of so many rows; its length does not depend on their number."""
    buffer = io.BytesIO()
    entries = {"descr": row.base.str, "fortran_order": False, "shape": (rows, *row.shape)}
    np.lib.format.write_array_header_1_0(buffer, entries)
    return buffer.getvalue()


def file_size(row: np.dtype[Any], rows: int) -> int:
    """The size of a `.npy` file of so many rows."""
    return len(header(row, 0)) + rows * row.itemsize


def require_array(file: BinaryIO, path: Path, row: np.dtype[Any], rows: int, *, complete: bool) -> None:
    """Refuses a file other than a `.npy` file of so many such rows; until it is complete it may say 0 and be longer."""
    start, size, expected = file.read(len(header(row, 0))), os.fstat(file.fileno()).st_size, file_size(row, rows)
    headers = [header(row, rows)] if complete else [header(row, rows), header(row, 0)]
    if start not in headers or size < expected or (complete and size > expected):
        found = f"{start[10:].strip()!r} and {size} bytes. {DAMAGED}"
        raise FileError(f"Expected a .npy file of {rows} rows of {row} ({expected} bytes) in {path}, found {found}")


@dataclass(frozen=True)
class Manifest:
    """The content of `outputs.json`: for each array, the dtype and shape of one row."""

    rows: int
    complete: bool
    identity: dict[str, Any]
    arrays: dict[str, np.dtype[Any]]

    def write(self, folder: Path) -> Self:
        """Replaces the manifest in the folder, whole or not at all, and waits for the disk; returns the manifest."""
        arrays = {name: {"dtype": row.base.name, "width": row.shape} for name, row in self.arrays.items()}
        document = {"format": FORMAT, "version": VERSION, **vars(self), "arrays": arrays}
        with atomic_path(folder / MANIFEST) as temporary, temporary.open("w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(folder)
        return self

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a folder."""
        document = read_document(folder)
        if (version := document.get("version")) != VERSION:
            raise FileError(f"Expected format version {VERSION}, found {version} in {folder}. {DAMAGED}")
        with parsing(folder, "rows, identity and arrays"):
            arrays = {name: document["arrays"][name] for name in NAMES if name in document["arrays"]}
            types = {name: np.dtype((each["dtype"], tuple(each["width"]))) for name, each in arrays.items()}
            return cls(int(document["rows"]), bool(document["complete"]), dict(document["identity"]), types)


def read_document(folder: Path) -> dict[str, Any]:
    """Reads `outputs.json`, of any version, and refuses one of another origin."""
    path = folder / MANIFEST
    if not path.exists():
        raise FileError(f"Expected a folder written by posthoc, found {folder} without {MANIFEST}: check the path.")
    require_regular(path)
    with parsing(path, "JSON written by posthoc"):
        document = json.loads(path.read_bytes())
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FileError(f"Expected {MANIFEST} written by posthoc, found one of another origin: {path}.")
    return document


def open_folder(folder: Path) -> Outputs:
    """Maps a finished folder; nothing but the headers is read."""
    manifest = Manifest.read(folder)
    if not manifest.complete:
        advice = "Run the collection again: it goes on from there."
        raise FileError(f"Expected a finished folder, found {manifest.rows} rows so far in {folder}. {advice}")
    if not manifest.rows or "outputs" not in manifest.arrays:
        raise FileError(f"Expected at least one row of outputs in {folder}, found none. {DAMAGED}")
    parts = {name: mapped(folder / f"{name}.npy", row, manifest.rows) for name, row in manifest.arrays.items()}
    return Outputs.trusted(**parts)


def mapped(path: Path, row: np.dtype[Any], rows: int) -> Tensor:
    """A tensor on the file itself: pages are read when they are used, and changes stay in memory."""
    if not path.exists():
        raise FileError(f"Expected {path}, found no such file. {DAMAGED}")
    require_regular(path)
    with path.open("rb") as file:
        require_array(file, path, row, rows, complete=True)
        return torch.from_numpy(np.frombuffer(copy_on_write(file), row, offset=file.tell()))


def copy_on_write(file: BinaryIO) -> mmap.mmap:
    """Maps a file into memory; changes of the memory do not reach the file."""
    if sys.platform != "linux":
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    # Without this flag, which later versions of Python have a name for, Linux refuses files larger than the memory.
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    return mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE | no_reserve, mmap.PROT_READ | mmap.PROT_WRITE)


class OutputsWriter:
    """Writes `Outputs` to a folder batch by batch, going on where an earlier run ended.

    Left without `finish`, also by an exception, the folder keeps its rows and stays unfinished.

    Args:
        folder: A new or empty folder, or one of outputs.
        identity: A JSON mapping of all that the rows depend on. A folder of another identity is refused.
        force: Whether to start a folder over, whatever outputs it holds.

    Attributes:
        rows: The number of rows so far, those of an earlier run included.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with OutputsWriter(folder, identity={"network": "abc"}) as writer:
        ...     for start in range(writer.rows, 30, 10):
        ...         writer.append(Outputs(torch.zeros(10, 2)))
        ...     writer.finish()
        >>> len(open_folder(Path(folder)))
        30
    """

    def __init__(self, folder: str | os.PathLike[str], *, identity: Mapping[str, Any], force: bool = False) -> None:
        self.folder = Path(folder)
        self._files: dict[str, BinaryIO] = {}
        wanted = json.loads(json.dumps(dict(identity), sort_keys=True))  # as it is when it is read back
        with ExitStack() as stack, writing(self.folder, "Make it writable, or choose another folder."):
            if self.folder.is_dir():
                require_ours(self.folder)
            else:
                require_writable(self.folder).mkdir(exist_ok=True)
            stack.enter_context(lock(self.folder / LOCK))
            self._manifest = begin(self.folder, wanted, force=force)
            self.rows, self._types = self._manifest.rows, self._manifest.arrays
            self._open_files(stack)
            self._stack = stack.pop_all()
        self._open = True
        self._committed_at = time.monotonic()

    def append(self, outputs: Outputs) -> None:
        """Adds rows with the same arrays, dtypes and widths as those before; they count a few seconds later."""
        self._require_open()
        arrays = arrays_of(outputs)
        if not len(outputs):
            return
        types = {name: row_type(array) for name, array in arrays.items()}
        if types != (self._types or types):
            raise DataError(f"Expected {described(self._types)}, as in the rows before, got {described(types)}.")
        with self._writing():
            if not self._types:
                self._types = types
                self._open_files(self._stack)
                sync_folder(self.folder)
            for name, array in arrays.items():
                write_at(self._files[name], file_size(types[name], self.rows), np.ascontiguousarray(array).data)
            self.rows += len(outputs)
            if time.monotonic() - self._committed_at >= COMMIT_SECONDS:
                self._commit()

    def finish(self) -> None:
        """Marks the folder complete, so that it can be opened, and closes it for writing."""
        self._require_open()
        if not self.rows:
            raise DataError(f"Expected at least one row to finish {self.folder} with, got none: append some first.")
        with self._writing():
            self._commit()  # the headers are changed once all rows count: a run that goes on needs to know them
            for name, file in self._files.items():
                write_at(file, 0, header(self._types[name], self.rows))
            self._commit(complete=True)
        self._open = False
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._open:
            self._open = False
            first_error = suppress(FileError) if error is not None else nullcontext()
            with self._stack, first_error, self._writing():
                self._commit()

    def _open_files(self, stack: ExitStack) -> None:
        for name, row in self._types.items():
            path = self.folder / f"{name}.npy"
            file = self._files[name] = stack.enter_context(path.open("r+b" if self.rows else "w+b", buffering=0))
            if self.rows:
                require_array(file, path, row, self.rows, complete=False)
            write_at(file, 0, header(row, 0))

    def _commit(self, *, complete: bool = False) -> None:
        """Waits until all rows are on the disk, and records that they count."""
        if self.rows > self._manifest.rows or complete:
            for name, file in self._files.items():
                file.truncate(file_size(self._types[name], self.rows))
                os.fsync(file.fileno())
            self._manifest = Manifest(self.rows, complete, self._manifest.identity, self._types).write(self.folder)
        self._committed_at = time.monotonic()

    def _require_open(self) -> None:
        if not self._open:
            raise FileError(f"Expected a folder open for writing, but {self.folder} was finished or left.")

    def _writing(self) -> AbstractContextManager[None]:
        safe = self._manifest.rows
        return writing(self.folder, f"Its first {safe} rows are safe: make room for more, then run again to go on.")


def write_at(file: BinaryIO, position: int, data: bytes | memoryview) -> None:
    """Writes all of the data: a full disk takes a part of them before it fails."""
    file.seek(position)
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[file.write(rest) :]


def arrays_of(outputs: Outputs) -> dict[str, Array]:
    """The arrays to write, by name."""
    if not isinstance(outputs, Outputs):
        raise DataError(f"Expected posthoc.Outputs to write, got {type(outputs).__name__}.")
    return {name: array_of(part, name) for name, part in outputs.parts().items()}


def require_ours(folder: Path) -> None:
    """Refuses a folder that holds anything but outputs."""
    if (folder / MANIFEST).exists():
        read_document(folder)
    elif others := [n for n in sorted(os.listdir(folder)) if n != LOCK and not n.startswith(f".{MANIFEST}.")]:
        raise FileError(f"Expected an empty folder, or one of outputs, found {folder} with {listed(others, 5)} in it.")


def begin(folder: Path, identity: dict[str, Any], *, force: bool) -> Manifest:
    """The manifest to go on from; arrays that it does not list are removed."""
    manifest = Manifest.read(folder) if (folder / MANIFEST).exists() and not force else None
    if manifest is None or not manifest.rows:  # a run that failed before its first row leaves nothing to go on with
        manifest = Manifest(0, False, identity, {}).write(folder)
    require_same(folder, manifest.identity, identity)
    if manifest.complete:
        advice = "Open it with open_outputs, or start over with --force (force=True)."
        raise FileError(f"Expected a folder to go on with, found {manifest.rows} rows complete in {folder}. {advice}")
    for name in set(NAMES) - manifest.arrays.keys():
        (folder / f"{name}.npy").unlink(missing_ok=True)  # not truncated: the file may be mapped
    return manifest


def require_same(folder: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Refuses a folder of another network, layer or data, and says what differs, with the start of each digest."""
    values = {key: (there.get(key, "nothing"), here.get(key, "nothing")) for key in sorted({**there, **here})}
    differing = {key: f"{key}: {a!r} there, {b!r} now" for key, (a, b) in values.items() if a != b}
    if differing:
        found = "made with other weights or layers" if [*differing] == ["network"] else "of something else"
        shown = re.sub("[0-9a-f]{64}", lambda digest: digest[0][:8], "; ".join(differing.values()))
        advice = "Collect elsewhere, or start over with --force (force=True)."
        raise FileError(f"Expected to go on with the outputs in {folder}, found them {found} ({shown}). {advice}")


def described(types: Mapping[str, np.dtype[Any]]) -> str:
    """The names, types and shapes of arrays in words, for errors."""
    return ", ".join(f"{name} of {row.base} of shape {row.shape}" for name, row in types.items())
