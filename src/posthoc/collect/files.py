"""`open_outputs`: the outputs in a file, or some rows of them. Its form is known from what it holds, not its name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from posthoc.collect.file_arrays import read_npz, read_safetensors
from posthoc.collect.folder import Manifest, open_folder
from posthoc.collect.outputs import Outputs
from posthoc.collect.tables import Columns, read_csv, read_parquet
from posthoc.errors import DataError, FileError, OptionError

__all__ = ["open_outputs", "opened", "read_identity"]

ARRAYS: dict[str, Callable[[Path], dict[str, Tensor]]] = {".npz": read_npz, ".safetensors": read_safetensors}
TABLES: dict[str, Callable[[Path, Columns | None], dict[str, Tensor]]] = {"Parquet": read_parquet, "CSV": read_csv}


def open_outputs(path: str | os.PathLike[str], *, columns: Columns | None = None) -> Outputs:
    """The outputs in an `.npz`, `.safetensors`, Parquet or CSV file, or in a folder that posthoc wrote.

    The path may end in a range of rows: `test.npz[:5000]`, `test.npz[5000:]`. `columns` says which columns of a table
    hold what: `{"outputs": ["p_cat", "p_dog"], "targets": "label"}`; a pattern such as `logit_*` stands for all that
    match it, numbered ones by number, others in the order of the file. One name gives an array of shape (N,), a list or
    a pattern one of (N, C).

    A file is read and checked whole, and its half-precision numbers become float32. A folder is mapped: its numbers
    stay on the disk, of the type they have there, and were checked when they were written.
    """
    place, rows = split_range(path)
    form = form_of(place)
    if columns is not None and form not in TABLES:
        raise OptionError(f"Expected a Parquet or CSV table to take columns from, found a {form} at {place}.")
    if form == "folder":
        outputs = open_folder(place)
        return outputs if rows is None else require_rows(outputs[rows], path, len(outputs))
    tensors = TABLES[form](place, columns) if form in TABLES else ARRAYS[form](place)
    try:
        outputs = Outputs(**tensors)
        if not len(outputs):
            raise DataError("Expected at least one row, got none.")
    except DataError as error:
        raise DataError(f"{error} This is in {place}.") from error
    if rows is None:
        return outputs
    some = require_rows(outputs[rows], path, len(outputs))
    # Copies, so that the other rows need not stay in memory.
    return Outputs.trusted(**{name: getattr(some, name).clone() for name in tensors})


def opened(data: Any) -> Any:
    """Data as they are, or the outputs in the file whose path was given."""
    return open_outputs(data) if isinstance(data, str | os.PathLike) else data


def read_identity(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the outputs in a folder, finished or not, were made with: the mapping that `OutputsWriter` was given."""
    folder, _ = split_range(path)
    if not folder.is_dir():
        raise FileError(f"Expected a folder of outputs, which has an identity, found none at {folder}.")
    return Manifest.read(folder).identity


def split_range(path: str | os.PathLike[str]) -> tuple[Path, slice | None]:
    """The file, and the rows asked for, if any; a file that is really called so comes first."""
    text = os.fspath(path)
    if not text.endswith("]") or "[" not in text or os.path.exists(text):
        return Path(text), None
    name, _, asked = text.rpartition("[")
    found = re.fullmatch(r"(\d{0,18}):(\d{0,18})\]", asked)
    if not found or not name:
        raise OptionError(f"Expected rows as in {name}[:5000], [5000:] or [100:200], got [{asked:.40} in {name!r}.")
    first, last = (int(number) if number else None for number in found.groups())
    return Path(name), slice(first, last)


def require_rows(some: Outputs, path: str | os.PathLike[str], rows: int) -> Outputs:
    if not len(some):
        raise OptionError(f"Expected a range with rows in it, got none with {os.fspath(path)!r}: there are {rows}.")
    return some


def form_of(path: Path) -> str:
    """Which of the forms a file has, from its first bytes."""
    if path.is_dir():
        return "folder"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(4096)
    except FileNotFoundError as error:
        raise FileError(f"Expected a file or folder of outputs, found nothing at {path}: check the path.") from error
    except OSError as error:
        raise FileError(f"Expected a file that can be read, found that {path} cannot be ({error}).") from error
    if start[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return ".npz"
    if start[:4] == b"PAR1":
        return "Parquet"
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= size:
        return ".safetensors"
    if start and is_text(start):
        return "CSV"
    raise FileError(
        f"Expected an .npz, .safetensors, Parquet or CSV file, or a folder that posthoc wrote, found {guess(start)} "
        f"in {path}. Make one with np.savez(path, outputs=..., targets=...), say."
    )


def is_text(start: bytes) -> bool:
    try:
        text = start.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.end < len(start):
            return False
        text = start[: error.start].decode("utf-8")  # a letter that the end of the sample cut in two
    return all(letter >= " " or letter in "\t\r\n" for letter in text)


def guess(start: bytes) -> str:
    if not start:
        return "an empty file"
    if start.startswith(b"\x93NUMPY"):
        return "a single .npy array"
    if start.startswith(b"\x80"):
        return "a pickle, which is never opened because it can run code,"
    return "something else (or a damaged file)"
