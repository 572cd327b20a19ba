"""`save_outputs`: outputs to a file, in the format that its name asks for."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from posthoc.collect.file_arrays import stored, write_npz, write_safetensors
from posthoc.collect.folder_writer import LOCK, OutputsWriter, require_ours
from posthoc.collect.outputs import Outputs
from posthoc.collect.tables import write_parquet
from posthoc.errors import DataError, FileError, OptionError
from posthoc.io import atomic_folder, atomic_path, lock, writing

__all__ = ["save_outputs"]

FILES = {".npz": write_npz, ".safetensors": write_safetensors, ".parquet": write_parquet}

ROWS_AT_ONCE = 4096


def save_outputs(outputs: Outputs, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Writes outputs as `.npz`, `.safetensors` or `.parquet`, or, without a suffix, as a folder to be mapped: whole or
    not at all. `force` replaces what is there."""
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix and suffix not in FILES:
        raise OptionError(
            f"Expected a name that ends in {', '.join(FILES)}, or in no suffix for a folder, got {target.name!r}."
        )
    if not len(outputs):
        raise DataError("Expected at least one row to save, got none.")
    if target.exists() and not force:
        raise FileError(f"Expected a new name, found {target} there already: choose another, or use force=True.")
    with writing(target, "Make room or choose another place; what was there is as it was."):
        if not suffix:
            write_folder(target, outputs)
            return
        arrays = stored(outputs)
        with atomic_path(target) as temporary:
            FILES[suffix](temporary, arrays)


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
            raise error.__cause__ or error from None  # it speaks of a folder that nobody will see
        (new / LOCK).unlink()
