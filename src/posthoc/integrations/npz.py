"""An `.npz` file as rows, read as a stream: compressed or not, its arrays are never whole in memory."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from posthoc.errors import DataError, FileError
from posthoc.integrations.columns import choose_columns
from posthoc.integrations.digests import file_digest

__all__ = ["NpzRows"]

Array = np.ndarray[Any, Any]


class NpzRows:
    """The rows (input, target) of a file that `np.savez` or `np.savez_compressed` wrote."""

    costly = False

    def __init__(self, path: Path, inputs: Sequence[str], target: str | None) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                there = [name.removesuffix(".npy") for name in archive.namelist()]
        except zipfile.BadZipFile as error:
            raise FileError(f"Expected an .npz file, found something else in {path} ({error}).") from error
        columns = choose_columns(there, inputs, target)
        if len(columns.inputs) > 1:
            raise DataError(f"Expected one array of inputs in an .npz file, got {', '.join(columns.inputs)}.")
        self.inputs = StreamedArray(path, columns.inputs[0])
        self.targets = StreamedArray(path, columns.target) if columns.target is not None else None
        if self.targets is not None and len(self.targets) != len(self.inputs):
            raise DataError(
                f"Expected as many targets as inputs in {path}, found {len(self.targets)} and {len(self.inputs)}."
            )
        self.identity = {
            "kind": "npz",
            "rows": len(self),
            "digest": file_digest(path),
            "columns": columns._asdict(),
        }

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[tuple[Any, Any]]:  # consecutive rows
        inputs = self.inputs.read(rows[0], rows[-1] + 1)
        inputs = inputs[:, None] if inputs.ndim == 1 else inputs
        targets = self.targets.read(rows[0], rows[-1] + 1) if self.targets is not None else [None] * len(inputs)
        return list(zip(inputs, targets, strict=True))


class StreamedArray:
    """One array of an archive, from whose rows any number can be read; going forward is cheap."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        with self._open() as stream:
            try:
                version = np.lib.format.read_magic(stream)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, fortran, self.dtype = read(stream)
            except ValueError as error:
                raise FileError(f"Expected an array {name!r} in {path}, found something else ({error}).") from error
            self._start = stream.tell()
        if self.dtype.kind not in "fiub" or not shape or fortran:
            layout = ", in Fortran's order" if fortran else ""
            raise DataError(
                f"Expected {name!r} in {path} to be numbers with one row a point, got {self.dtype} of shape {shape}"
                f"{layout}: save np.ascontiguousarray(...) of numbers."
            )
        if not shape[0]:
            raise DataError(f"Expected at least one row of {name!r} in {path}, found none.")
        self.rows, self.width = int(shape[0]), tuple(shape[1:])
        self._stream: IO[bytes] | None = None  # opened where it is read, which may be in a worker

    def __len__(self) -> int:
        return self.rows

    def read(self, start: int, stop: int) -> Array:
        """Some rows."""
        size = int(np.prod(self.width, dtype=int)) * self.dtype.itemsize
        if self._stream is None:
            self._stream = self._open()
        try:
            self._stream.seek(self._start + start * size)
            content = self._stream.read((stop - start) * size)
        except (zipfile.BadZipFile, EOFError, OSError) as error:
            raise FileError(f"Expected to read {self.name!r} in {self.path}, found it damaged ({error}).") from error
        if len(content) < (stop - start) * size:
            raise FileError(f"Expected {self.rows} rows of {self.name!r} in {self.path}, found fewer: save it again.")
        return np.frombuffer(content, self.dtype).reshape(stop - start, *self.width)

    def _open(self) -> IO[bytes]:
        return zipfile.ZipFile(self.path).open(f"{self.name}.npy")
