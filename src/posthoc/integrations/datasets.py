"""Data named by a string: a folder of images, a Parquet or `.npz` file, or a Hugging Face data set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from posthoc.errors import FileError, OptionError
from posthoc.integrations.hub import MappedRows, StreamedRows, open_hub
from posthoc.integrations.images import ImageFolder
from posthoc.integrations.npz import NpzRows
from posthoc.integrations.parquet import ParquetRows

__all__ = ["Rows", "open_data"]

Rows = ImageFolder | ParquetRows | NpzRows | MappedRows | StreamedRows
"""Rows (input, target or None) in a fixed order, an `identity` that tells them from others, and whether a row is
`costly` to make, so that several processes should."""


def open_data(name: str, *, input_columns: Sequence[str] = (), target_column: str | None = None) -> Rows:
    """The data that a string names; columns are for tables, and by default the usual names are looked for."""
    scheme, _, rest = name.partition(":")
    if scheme == "hf" and rest:
        return open_hub(rest, input_columns, target_column)
    path = Path(name)
    if path.is_dir():
        if input_columns or target_column is not None:
            raise OptionError("Columns are for tables: a folder of images has its classes as sub-folders.")
        return ImageFolder(path)
    if not path.exists():
        raise FileError(f"Expected data, found nothing at {path}. A Hugging Face data set is written hf:NAME:SPLIT.")
    if path.suffix == ".npz":
        return NpzRows(path, input_columns, target_column)
    if path.suffix in (".parquet", ".pq"):
        return ParquetRows(path, input_columns, target_column)
    raise OptionError(f"Expected a folder of images, a .parquet or .npz file, or hf:NAME:SPLIT, got {name!r}.")
