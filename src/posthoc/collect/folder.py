"""A folder of outputs: one `.npy` file for each array, mapped instead of read, and a manifest, `outputs.json`.

`OutputsWriter` appends rows batch by batch. Rows count once the manifest says so, and they are on the disk before it
does. A run that was killed goes on after the last row that counts.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import os
import reprlib
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import torch
from torch import Tensor

from posthoc.collect.loaders import array_of
from posthoc.collect.outputs import NAMES, Outputs
from posthoc.errors import DataError, FileError, OptionError
from posthoc.io import atomic_path, lock, require_regular, require_writable, sync_folder, writing
from posthoc.validation import require_finite

__all__ = ["MANIFEST", "ArraySpec", "Manifest", "OutputsWriter", "array_path", "is_outputs_folder", "open_folder"]

Array = np.ndarray[Any, Any]

MANIFEST = "outputs.json"
LOCK = ".lock"
FORMAT = "posthoc-outputs"
VERSION = 1
DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "bool")
DAMAGED = "The folder was changed or damaged: make it again, with force=True."
LONGEST_MANIFEST = 2**24
"""The largest size of a manifest in bytes."""

COMMIT_SECONDS = 5.0
"""How long appended rows may wait until they count: the most that a killed run loses."""


@dataclass(frozen=True)
class ArraySpec:
    """The dtype of an array and the shape of one of its rows."""

    dtype: str
    width: tuple[int, ...]  # the shape of one row

    @classmethod
    def of(cls, array: Array) -> ArraySpec:
        return cls(array.dtype.name, array.shape[1:])

    @property
    def row_bytes(self) -> int:
        """The size of a row."""
        return math.prod(self.width) * np.dtype(self.dtype).itemsize

    def header(self, rows: int) -> bytes:
        """The header of a `.npy` file of so many rows; its length does not depend on their number."""
        buffer = io.BytesIO()
        described = {"descr": np.dtype(self.dtype).str, "fortran_order": False, "shape": (rows, *self.width)}
        np.lib.format.write_array_header_1_0(buffer, described)
        return buffer.getvalue()

    def read_header(self, file: BinaryIO, path: Path) -> int:
        """Reads the number of rows from the header of a `.npy` file, and refuses rows of another shape or dtype."""
        try:
            np.lib.format.read_magic(file)
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        except Exception as error:  # a damaged header fails in many ways
            raise FileError(f"Expected a .npy file in {path}, found something else ({error}). {DAMAGED}") from error
        if fortran or dtype != np.dtype(self.dtype) or shape[1:] != self.width or file.tell() != len(self.header(0)):
            raise FileError(
                f"Expected rows of {self} in {path}, as {MANIFEST} says, found {dtype} of shape {shape}. {DAMAGED}"
            )
        return int(shape[0])

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.width}"


@dataclass(frozen=True)
class Manifest:
    """The content of `outputs.json`."""

    rows: int
    complete: bool
    identity: dict[str, Any]
    arrays: dict[str, ArraySpec]

    def write(self, folder: Path) -> None:
        """Replaces the manifest in the folder by this one, whole or not at all, and waits for the disk."""
        document = {"format": FORMAT, "version": VERSION, **asdict(self)}
        with atomic_path(folder / MANIFEST) as temporary, temporary.open("w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(folder)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a folder, checked."""
        document = read_document(folder)
        if document.get("version") != VERSION:
            raise FileError(
                f"Expected format version {VERSION}, found {document.get('version')} in {folder}: open it with the "
                "posthoc that wrote it, or make it again with this one."
            )
        try:
            specs = {k: ArraySpec(v["dtype"], tuple(v["width"])) for k, v in document["arrays"].items()}
            manifest = cls(document["rows"], document["complete"], document["identity"], specs)
            whole = [manifest.rows, *(size for spec in specs.values() for size in spec.width)]
            sound = (
                all(type(number) is int and number >= 0 for number in whole)
                and all(spec.dtype in DTYPES for spec in specs.values())
                and specs.keys() <= set(NAMES)
                and ("outputs" in specs) == (manifest.rows > 0)
                and isinstance(manifest.complete, bool)
                and isinstance(manifest.identity, dict)
            )
        except (KeyError, TypeError, AttributeError):
            sound = False
        if not sound:
            raise FileError(f"Expected rows, identity and arrays in {folder / MANIFEST}, found others. {DAMAGED}")
        return manifest


def read_document(folder: Path) -> dict[str, Any]:
    """Reads `outputs.json`, of any version, and refuses one of another origin."""
    path = folder / MANIFEST
    try:
        require_regular(path)
        with path.open("rb") as file:
            document = json.loads(file.read(LONGEST_MANIFEST))
    except FileNotFoundError as error:
        raise FileError(
            f"Expected a folder of outputs, found {folder} without {MANIFEST}: check the path; such folders are made "
            "by posthoc's save_outputs and OutputsWriter."
        ) from error
    except FileError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"Expected JSON written by posthoc, found something else in {path} ({error}).") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FileError(f"Expected {MANIFEST} written by posthoc, found one of another origin: {path}.")
    return document


def open_folder(folder: Path) -> Outputs:
    """Maps a finished folder; nothing but the headers is read."""
    manifest = Manifest.read(folder)
    if not manifest.complete:
        raise FileError(
            f"Expected a finished folder of outputs, found one with {manifest.rows} rows so far: {folder}. "
            "Run the collection again: it goes on from there."
        )
    if not manifest.rows:
        raise FileError(f"Expected at least one row in {folder}, found none. {DAMAGED}")
    tensors = {name: mapped(array_path(folder, name), spec, manifest.rows) for name, spec in manifest.arrays.items()}
    return Outputs.trusted(**tensors)


def is_outputs_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds outputs, finished or not."""
    return (Path(path) / MANIFEST).exists()


def array_path(folder: Path, name: str) -> Path:
    """Where a folder keeps an array."""
    return folder / f"{name}.npy"


def mapped(path: Path, spec: ArraySpec, rows: int) -> Tensor:
    """A tensor on the file itself: pages are read when they are used, and changes stay in memory."""
    try:
        require_regular(path)
        with path.open("rb") as file:
            found = spec.read_header(file, path)
            start, size = file.tell(), os.fstat(file.fileno()).st_size
            if found != rows or size != start + rows * spec.row_bytes:
                raise FileError(
                    f"Expected {rows} rows in {path} ({start + rows * spec.row_bytes} bytes), found {found} in "
                    f"{size} bytes. {DAMAGED}"
                )
            data = copy_on_write(file)
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"Expected a file that can be mapped, found that {path} cannot be ({error}).") from error
    return torch.from_numpy(np.frombuffer(data, spec.dtype, offset=start).reshape(rows, *spec.width))


def copy_on_write(file: BinaryIO) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    # Linux would set memory aside for the changes, and so refuse files larger than the memory, but for this flag,
    # which Python has a name for only in later versions.
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
    return mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE | no_reserve, mmap.PROT_READ | mmap.PROT_WRITE)


class OutputsWriter:
    """Writes `Outputs` to a folder batch by batch, going on where an earlier run ended.

    Left without `finish`, also by an exception, the folder keeps its rows and stays unfinished.

    Args:
        folder: A new or empty folder, or one of outputs.
        identity: A JSON mapping of all that the rows depend on. A folder of another identity is refused.
        force: Whether to start a folder over, whatever outputs it holds.

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
        self._files: dict[str, GrowingFile] = {}
        self._held = ExitStack()
        try:
            with writing(self.folder, "Make it writable, or choose another folder."):
                self._manifest = self._begin(as_json(identity), force=force)
                self._rows = self._manifest.rows
                self._open_files(self._manifest.arrays)
        except BaseException:
            self._held.close()
            raise
        self._open = True
        self._committed_at = time.monotonic()

    @property
    def rows(self) -> int:
        """The number of rows so far, those of an earlier run included."""
        return self._rows

    def append(self, outputs: Outputs) -> None:
        """Adds rows with the same arrays, dtypes and widths as those before; they count a few seconds later."""
        self._require_open()
        if not len(outputs):
            return
        arrays = self._fitting(outputs)
        with self._writing():
            if not self._files:
                self._open_files({name: ArraySpec.of(array) for name, array in arrays.items()})
                sync_folder(self.folder)
            for name, array in arrays.items():
                self._files[name].write(self._rows, array)
            self._rows += len(outputs)
            if time.monotonic() - self._committed_at >= COMMIT_SECONDS:
                self._commit()

    def finish(self) -> None:
        """Marks the folder complete, so that it can be opened, and closes it for writing."""
        self._require_open()
        if not self._rows:
            raise DataError(f"Expected at least one row to finish {self.folder} with, got none: append some first.")
        with self._writing():
            for file in self._files.values():
                file.sync(self._rows, seal=True)
            self._record(complete=True)
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._open:
            return
        try:
            with self._writing():
                self._commit()
        except FileError:
            if error is None:  # otherwise the first error is the one to raise
                raise
        finally:
            self._close()

    def _begin(self, identity: dict[str, Any], *, force: bool) -> Manifest:
        if self.folder.is_dir():
            require_ours(self.folder)
        else:
            require_writable(self.folder).mkdir(exist_ok=True)
        self._held.enter_context(lock(self.folder / LOCK))
        return begin(self.folder, identity, force=force)

    def _commit(self) -> None:
        if self._rows > self._manifest.rows:
            for file in self._files.values():
                file.sync(self._rows)
            self._record(complete=False)
        self._committed_at = time.monotonic()

    def _record(self, *, complete: bool) -> None:
        specs = {name: file.spec for name, file in self._files.items()}
        manifest = Manifest(self._rows, complete, self._manifest.identity, specs)
        manifest.write(self.folder)
        self._manifest = manifest

    def _open_files(self, specs: Mapping[str, ArraySpec]) -> None:
        self._files = {
            name: self._held.enter_context(GrowingFile(array_path(self.folder, name), spec, self._rows))
            for name, spec in specs.items()
        }

    def _fitting(self, outputs: Outputs) -> dict[str, Array]:
        """The arrays of a batch, checked."""
        arrays = arrays_of(outputs)
        specs = {name: ArraySpec.of(array) for name, array in arrays.items()}
        known = {name: file.spec for name, file in self._files.items()} or specs
        if specs != known:
            raise DataError(f"Expected {describe(known)}, as in the rows before, got {describe(specs)}.")
        for name, spec in specs.items():
            if not spec.row_bytes:
                raise DataError(f"Expected at least one column of {name}, got none.")
            require_finite(getattr(outputs, name), name, first_row=self._rows)
        return arrays

    def _require_open(self) -> None:
        if not self._open:
            raise FileError(f"Expected a folder open for writing, found that {self.folder} was finished or left.")

    def _writing(self) -> AbstractContextManager[None]:
        safe = self._manifest.rows
        return writing(self.folder, f"Its first {safe} rows are safe: make room for more, then run again to go on.")

    def _close(self) -> None:
        self._open = False
        self._held.close()


class GrowingFile:
    """A `.npy` file that rows are added to; its header has their number once it is sealed."""

    def __init__(self, path: Path, spec: ArraySpec, rows: int) -> None:
        self.path, self.spec = path, spec
        self._start = len(spec.header(0))
        self._file = path.open("r+b" if rows else "w+b", buffering=0)
        try:
            if rows:
                spec.read_header(self._file, path)
                self._truncate(rows)
            else:
                self._put(0, spec.header(0))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, row: int, array: Array) -> None:
        """Writes rows, the first as number `row`."""
        self._put(self._end(row), np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def sync(self, rows: int, *, seal: bool = False) -> None:
        """Cuts the file after these rows and waits until they are on the disk."""
        if seal:
            self._put(0, self.spec.header(rows))
        self._truncate(rows)
        os.fsync(self._file.fileno())

    def _end(self, rows: int) -> int:
        return self._start + rows * self.spec.row_bytes

    def _put(self, at: int, data: bytes | memoryview) -> None:
        self._file.seek(at)
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def _truncate(self, rows: int) -> None:
        size = os.fstat(self._file.fileno()).st_size
        if size < self._end(rows):
            raise FileError(f"Expected {self._end(rows)} bytes or more in {self.path}, found {size}. {DAMAGED}")
        self._file.truncate(self._end(rows))


def arrays_of(outputs: Outputs) -> dict[str, Array]:
    if not isinstance(outputs, Outputs):
        raise DataError(f"Expected posthoc.Outputs to write, got {type(outputs).__name__}.")
    return {name: array_of(part, name) for name, part in vars(outputs).items() if part is not None}


def require_ours(folder: Path) -> None:
    """Refuses a folder that holds anything but outputs."""
    if (folder / MANIFEST).exists():
        read_document(folder)
    elif strangers := [n for n in sorted(os.listdir(folder)) if n != LOCK and not n.startswith(f".{MANIFEST}.")]:
        raise FileError(
            f"Expected a new or empty folder, or one of outputs, found {folder} with {', '.join(strangers[:5])} in it: "
            "choose another."
        )


def begin(folder: Path, identity: dict[str, Any], *, force: bool) -> Manifest:
    """The manifest to go on from; whatever it does not list is removed."""
    for litter in folder.glob(f".{MANIFEST}.*"):  # of a run that was killed
        litter.unlink()
    before = None if force or not (folder / MANIFEST).exists() else Manifest.read(folder)
    if before is None or not before.rows:  # a run that failed before its first row leaves nothing to go on with
        manifest = Manifest(0, False, identity, {})
        manifest.write(folder)
    else:
        manifest = before
        require_same(folder, manifest.identity, identity)
        if manifest.complete:
            raise FileError(
                f"Expected a folder to go on with, found a complete one of {manifest.rows} rows: {folder}. Open it "
                "with open_outputs; to make it again, use --force (force=True)."
            )
    for name in NAMES:
        if name not in manifest.arrays:
            # Removed and not truncated: the file may be mapped.
            array_path(folder, name).unlink(missing_ok=True)
    return manifest


def require_same(folder: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Refuses a folder of another network, layer or data, and says what differs."""
    keys = sorted(there.keys() | here.keys())
    differing = [key for key in keys if (key in there, there.get(key)) != (key in here, here.get(key))]
    if differing:
        lines = "; ".join(f"{key}: {shown(there, key)} there, {shown(here, key)} now" for key in differing[:4])
        raise FileError(
            f"Expected to go on with the outputs in {folder}, found that they are of something else ({lines}). "
            "Collect into another folder, or start this one over with --force (force=True)."
        )


def shown(mapping: dict[str, Any], key: str) -> str:
    text = json.dumps(mapping[key]) if key in mapping else "nothing"
    return text if len(text) <= 100 else f"{text[:50]} ... {text[-40:]}"


def as_json(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity as it is when it is read back, in a fixed order."""
    try:
        return dict(json.loads(json.dumps(dict(identity), sort_keys=True)))
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"Expected identity to be a mapping that JSON can hold, got {reprlib.repr(identity)} ({error})."
        ) from error


def describe(specs: Mapping[str, ArraySpec]) -> str:
    return ", ".join(f"{name} of {spec}" for name, spec in specs.items())
