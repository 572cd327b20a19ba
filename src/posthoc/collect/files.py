"""Files of outputs: `open_outputs` knows their form from what they hold, `save_outputs` from the name it is given."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from posthoc.collect.folder import LOCK, Manifest, arrays_of, open_folder, require_ours, row_type
from posthoc.collect.loaders import Array, array_of, listed, tensor_of
from posthoc.collect.outputs import NAMES, Outputs
from posthoc.collect.tables import Columns, read_csv, read_parquet, write_parquet
from posthoc.errors import DataError, FileError, OptionError
from posthoc.io import atomic_folder, atomic_path, lock, parsing, require_regular, writing


def open_outputs(path: str | os.PathLike[str], *, columns: Columns | None = None) -> Outputs:
    """Opens the outputs in a file, or in a folder that posthoc wrote.

    A file is read and checked whole, and its half-precision numbers become float32. A folder is mapped: its numbers
    stay on the disk, with the dtypes they have there.

    Args:
        path: An `.npz`, `.safetensors`, Parquet or CSV file, or a folder. The path may end in a range of rows:
            `test.npz[:5000]`, `test.npz[5000:]`.
        columns: Which columns of a table make up which array, as in
            `{"outputs": ["p_cat", "p_dog"], "targets": "label"}`. A pattern such as `logit_*` stands for all columns
            that match it, numbered ones by number, others in the order of the file. One name gives an array of shape
            (N,), a list or a pattern one of (N, C).

    Raises:
        FileError: If the file is damaged, or of another form.
        DataError: If its values are not finite numbers, one row a point.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/test.npz"
        >>> np.savez(path, outputs=np.zeros((5, 3)), targets=np.arange(5))
        >>> open_outputs(path + "[:2]")
        Outputs(outputs=(2, 3), targets=(2,), float64)
    """
    file, rows = split_range(path)
    form = form_of(file)
    if columns is not None and form not in TABLES:
        raise OptionError(f"Expected a Parquet or CSV table to take columns from, found a {form} at {file}.")
    outputs = open_folder(file) if form == "folder" else read_file(file, form, columns)
    if rows is None:
        return outputs
    part = outputs[rows]
    if not len(part):
        raise OptionError(f"Expected a range with rows in it, got none with {str(path)!r}: there are {len(outputs)}.")
    return part if form == "folder" else part.clone()  # so that the other rows need not stay in memory


def read_file(path: Path, form: str, columns: Columns | None) -> Outputs:
    """Reads `Outputs` from a file; errors name the file."""
    try:
        if form in TABLES:
            parts = TABLES[form](path, columns)
        else:
            parts = {name: tensor_of(array, name) for name, array in ARRAYS[form](path).items()}
        outputs = Outputs(**parts)
        if not len(outputs):
            raise DataError("Expected at least one row, got none.")
    except DataError as error:
        raise DataError(f"{error} This is in {path}.") from error
    return outputs


def save_outputs(outputs: Outputs, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Writes outputs to a file or a folder, whole or not at all.

    Args:
        outputs: The outputs, one row or more.
        path: A name that ends in `.npz`, `.safetensors` or `.parquet`, or in no suffix for a folder to be mapped.
        force: Whether to replace what is there.
    """
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix and suffix not in WRITERS:
        known = ", ".join(WRITERS)
        raise OptionError(f"Expected a name that ends in {known}, or in no suffix for a folder, got {target.name!r}.")
    arrays = arrays_of(outputs)
    if not len(outputs):
        raise DataError("Expected at least one row to save, got none.")
    if target.exists() and not force:
        raise FileError(f"Expected a new name, found {target} there already: choose another, or use force=True.")
    with writing(target, "Make room or choose another place; what was there is as it was."):
        if not suffix:
            write_folder(target, arrays)
            return
        with atomic_path(target) as temporary:
            WRITERS[suffix](temporary, arrays)


def write_folder(target: Path, arrays: dict[str, Array]) -> None:
    """Writes arrays as a folder of outputs, whole or not at all."""
    if target.is_file():
        raise FileError(f"Expected the name of a folder, found a file: {target}.")
    with ExitStack() as stack:
        if target.is_dir():
            require_ours(target)
            stack.enter_context(lock(target / LOCK))
        new = stack.enter_context(atomic_folder(target))
        new.mkdir()
        for name, array in arrays.items():
            np.save(new / f"{name}.npy", np.ascontiguousarray(array))
        types = {name: row_type(array) for name, array in arrays.items()}
        Manifest(len(arrays["outputs"]), True, {}, types).write(new)


def opened(data: Any) -> Any:
    """The outputs in a file, if data are a path; other data are returned as they are."""
    return open_outputs(data) if isinstance(data, str | os.PathLike) else data


def read_identity(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The identity that `OutputsWriter` was given for a folder, finished or not."""
    folder, _ = split_range(path)
    if not folder.is_dir():
        raise FileError(f"Expected a folder of outputs, which has an identity, found none at {folder}.")
    return Manifest.read(folder).identity


def split_range(path: str | os.PathLike[str]) -> tuple[Path, slice | None]:
    """Takes a path such as `test.npz[:5000]` apart; a file with the whole text as its name comes first."""
    text = os.fspath(path)
    if not text.endswith("]") or "[" not in text or os.path.exists(text):
        return Path(text), None
    name, _, rows = text.rpartition("[")
    match = re.fullmatch(r"([0-9]{0,18}):([0-9]{0,18})\]", rows)
    if not match or not name:
        raise OptionError(f"Expected rows as in {name}[:5000], [5000:] or [100:200], got [{rows:.40} in {name!r:.200}.")
    first, last = (int(number) if number else None for number in match.groups())
    return Path(name), slice(first, last)


def form_of(path: Path) -> str:
    """The form of a file, from its first bytes."""
    if path.is_dir():
        return "folder"
    if not path.exists():
        raise FileError(f"Expected a file or folder of outputs, found nothing at {path}: check the path.")
    require_regular(path)
    with path.open("rb") as file:
        start = file.read(4096)
    if start[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return ".npz"
    if start[:4] == b"PAR1":
        return "Parquet"
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= path.stat().st_size:
        return ".safetensors"
    text = start.decode("utf-8", errors="ignore")  # the end of the sample may cut a letter in two
    if text and len(text.encode()) > len(start) - 4 and all(letter >= " " or letter in "\t\r\n" for letter in text):
        return "CSV"
    others = {b"": "an empty file", b"\x93": "a single .npy array", b"\x80": "a pickle, which is never opened,"}
    found = others.get(start[:1], "something else (or a damaged file)")
    expected = "Expected an .npz, .safetensors, Parquet or CSV file, or a folder"
    raise FileError(f"{expected}, found {found} in {path}. np.savez(path, outputs=..., targets=...) makes one.")


# Files of named arrays. Names that are not ours are left alone.


def read_npz(path: Path) -> dict[str, Array]:
    """The arrays of an .npz file that are parts of `Outputs`."""
    with parsing(path, "an .npz file of arrays of numbers"), np.load(path, allow_pickle=False) as file:
        return {name: np.asarray(file[name]) for name in ours(path, file.files)}


def read_safetensors(path: Path) -> dict[str, Array]:
    """The arrays of a safetensors file that are parts of `Outputs`."""
    from safetensors import safe_open

    with parsing(path, "a safetensors file"), safe_open(path, framework="pt") as file:
        return {name: array_of(file.get_tensor(name), name) for name in ours(path, file.keys())}


def ours(path: Path, names: list[str]) -> list[str]:
    """The names in a file that are parts of `Outputs`."""
    if "outputs" not in names:
        raise FileError(f"Expected an array named outputs in {path}, found {listed(names)}: rename the arrays.")
    return [name for name in NAMES if name in names]


def write_npz(path: Path, arrays: dict[str, Array]) -> None:
    """Writes arrays as an .npz file."""
    np.savez(path, **arrays)  # type: ignore[arg-type]  # keywords of its own


def write_safetensors(path: Path, arrays: dict[str, Array]) -> None:
    """Writes arrays as a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file(arrays, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error


ARRAYS = {".npz": read_npz, ".safetensors": read_safetensors}
TABLES = {"Parquet": read_parquet, "CSV": read_csv}
WRITERS = {".npz": write_npz, ".safetensors": write_safetensors, ".parquet": write_parquet}
