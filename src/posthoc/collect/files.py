"""Files of outputs: `open_outputs` knows their form from what they hold, `save_outputs` from the name it is given."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posthoc.collect.folder import LOCK, Manifest, OutputsWriter, arrays_of, open_folder, require_ours
from posthoc.collect.loaders import Array, tensor_of
from posthoc.collect.outputs import NAMES, Outputs
from posthoc.collect.tables import Columns, read_csv, read_parquet, write_parquet
from posthoc.errors import DataError, FileError, OptionError
from posthoc.io import atomic_folder, atomic_path, lock, require_regular, writing

__all__ = ["open_outputs", "opened", "read_identity", "save_outputs", "split_range"]

ROWS_AT_ONCE = 4096


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
        raise OptionError(
            f"Expected a name that ends in {', '.join(WRITERS)}, or in no suffix for a folder, got {target.name!r}."
        )
    if not len(outputs):
        raise DataError("Expected at least one row to save, got none.")
    if target.exists() and not force:
        raise FileError(f"Expected a new name, found {target} there already: choose another, or use force=True.")
    with writing(target, "Make room or choose another place; what was there is as it was."):
        if not suffix:
            write_folder(target, outputs)
            return
        arrays = arrays_of(outputs)
        with atomic_path(target) as temporary:
            WRITERS[suffix](temporary, arrays)


def write_folder(target: Path, outputs: Outputs) -> None:
    if target.is_file():
        raise FileError(f"Expected the name of a folder, found a file: {target}.")
    with ExitStack() as stack:
        if target.is_dir():
            require_ours(target)
            stack.enter_context(lock(target / LOCK))
        new = stack.enter_context(atomic_folder(target))
        try:
            with OutputsWriter(new, identity={}) as writer:
                for start in range(0, len(outputs), ROWS_AT_ONCE):
                    writer.append(outputs[start : start + ROWS_AT_ONCE])
                writer.finish()
        except FileError as error:
            raise error.__cause__ or error from None  # its message names a temporary folder
        (new / LOCK).unlink(missing_ok=True)


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
    found = re.fullmatch(r"([0-9]{0,18}):([0-9]{0,18})\]", rows)
    if not found or not name:
        raise OptionError(f"Expected rows as in {name}[:5000], [5000:] or [100:200], got [{rows:.40} in {name!r:.200}.")
    first, last = (int(number) if number else None for number in found.groups())
    return Path(name), slice(first, last)


def require_rows(some: Outputs, path: str | os.PathLike[str], rows: int) -> Outputs:
    if not len(some):
        raise OptionError(f"Expected a range with rows in it, got none with {os.fspath(path)!r}: there are {rows}.")
    return some


def form_of(path: Path) -> str:
    """The form of a file, from its first bytes."""
    if path.is_dir():
        return "folder"
    try:
        require_regular(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(4096)
    except FileNotFoundError as error:
        raise FileError(f"Expected a file or folder of outputs, found nothing at {path}: check the path.") from error
    except FileError:
        raise
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


# Files of named arrays. Names that are not ours are left alone.


def read_npz(path: Path) -> dict[str, Tensor]:
    try:
        with np.load(path, allow_pickle=False) as file:
            found = file.files
            refuse_large(path, sum(each.file_size for each in file.zip.infolist() if each.filename[:-4] in NAMES))
            arrays = {name: file[name] for name in NAMES if name in found}
    except FileError:
        raise
    except Exception as error:  # a damaged archive fails in many ways
        raise FileError(
            f"Expected an .npz file of arrays of numbers, found one in {path} that cannot be read ({error}). "
            "A truncated file must be saved again; arrays of objects must be turned into numbers first."
        ) from error
    require_outputs(path, found)
    if foreign := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
        raise FileError(f"Expected arrays in {path}, found something else as {', '.join(foreign)}: save it again.")
    return {name: tensor_of(array, name) for name, array in arrays.items()}


def refuse_large(path: Path, size: int) -> None:
    """Refuses a compressed file whose content does not fit into the memory of this machine."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 2**63
    if size > memory // 2:
        raise FileError(
            f"Expected arrays that fit into memory, found {size / 1e9:.1f} GB in {path}, with {memory / 1e9:.1f} GB of "
            "memory: save them as a folder (save_outputs with a name without suffix), which is mapped."
        )


def write_npz(path: Path, arrays: Mapping[str, Array]) -> None:
    named: dict[str, Any] = dict(arrays)
    np.savez(path, **named)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            found = list(file.keys())
            tensors = {name: file.get_tensor(name) for name in NAMES if name in found}
    except (SafetensorError, OSError) as error:
        raise FileError(
            f"Expected a safetensors file, found one in {path} that cannot be read ({error}). "
            "A truncated file must be saved again."
        ) from error
    require_outputs(path, found)
    if foreign := [name for name, tensor in tensors.items() if tensor.dtype not in READABLE]:
        raise FileError(
            f"Expected numbers in {path}, found {tensors[foreign[0]].dtype} as {foreign[0]}: save it again."
        )
    return {name: tensor.float() if tensor.dtype in HALF else tensor for name, tensor in tensors.items()}


HALF = (torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)
READABLE = (*HALF, torch.float32, torch.float64, *INTEGERS)


def write_safetensors(path: Path, arrays: Mapping[str, Array]) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file({name: array.copy() for name, array in arrays.items()}, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def require_outputs(path: Path, found: Iterable[str]) -> None:
    if "outputs" not in found:
        names = ", ".join(ascii(name)[1:-1] for name in list(found)[:20])
        raise FileError(
            f"Expected an array named outputs in {path} (and targets, features, inputs where there are any), found "
            f"{names or 'none'}: save it with posthoc's save_outputs, or rename the arrays."
        )


ARRAYS: dict[str, Callable[[Path], dict[str, Tensor]]] = {".npz": read_npz, ".safetensors": read_safetensors}
TABLES: dict[str, Callable[[Path, Columns | None], dict[str, Tensor]]] = {"Parquet": read_parquet, "CSV": read_csv}
WRITERS = {".npz": write_npz, ".safetensors": write_safetensors, ".parquet": write_parquet}
