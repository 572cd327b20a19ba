"""The folder that is mapped instead of read: one `.npy` an array, and `outputs.json`, which says what they hold.

Opening it takes milliseconds whatever its size. Its values were checked when they were written, by `OutputsWriter`.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from posthoc.collect.file_arrays import NAMES, Array
from posthoc.collect.outputs import Outputs
from posthoc.errors import FileError
from posthoc.io import atomic_path, sync_folder

__all__ = [
    "DAMAGED",
    "MANIFEST",
    "ArraySpec",
    "Manifest",
    "array_path",
    "open_folder",
    "read_document",
]

MANIFEST = "outputs.json"
FORMAT = "posthoc-outputs"
VERSION = 1
DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "bool")
DAMAGED = "The folder was changed or damaged: make it again, with force=True."


@dataclass(frozen=True)
class ArraySpec:
    """All that is known of an array but its number of rows."""

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
        """How a `.npy` file of so many rows begins; NumPy leaves room for every number of them."""
        buffer = io.BytesIO()
        described = {"descr": np.dtype(self.dtype).str, "fortran_order": False, "shape": (rows, *self.width)}
        np.lib.format.write_array_header_1_0(buffer, described)
        return buffer.getvalue()

    def read_header(self, file: BinaryIO, path: Path) -> int:
        """The number of rows a `.npy` file says it has, refusing one of other rows; the file is then at its data."""
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
    """What `outputs.json` says."""

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
    """What is in `outputs.json`, if it is ours, of whatever version."""
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileError(
            f"Expected a folder of outputs, found {folder} without {MANIFEST}: check the path; such folders are made "
            "by posthoc's save_outputs and OutputsWriter."
        ) from error
    except (OSError, ValueError) as error:
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


def array_path(folder: Path, name: str) -> Path:
    """Where a folder keeps an array."""
    return folder / f"{name}.npy"


def mapped(path: Path, spec: ArraySpec, rows: int) -> Tensor:
    """A tensor on the file itself: pages are read when they are used, and changes stay in memory."""
    try:
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
