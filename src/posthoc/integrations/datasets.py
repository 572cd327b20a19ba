"""Data named by a string: a folder of images, a table, an `.npz` file, or a Hugging Face data set."""

from __future__ import annotations

import io
import os
import reprlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from posthoc.collect.loaders import TARGET_KEYS
from posthoc.errors import DataError, FileError, OptionError
from posthoc.integrations.files import expecting, file_digest, listing_digest, walk
from posthoc.optional import require

INPUT_KEYS = ("inputs", "input", "image", "img", "text", "sentence", "x")
"""The usual names of input columns, as `TARGET_KEYS` are of target columns."""

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
"""The suffixes of the images in a folder."""

TABLES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
"""The formats of tables, by suffix, as the library `datasets` names them."""


def open_data(name: str, *, input_columns: Sequence[str] = (), target_column: str | None = None) -> Rows:
    """Open the data that a string names.

    Args:
        name: A folder of images, a table (.parquet, .csv, .json, .jsonl), an .npz file, or `hf:NAME:SPLIT`.
        input_columns: The columns of the inputs; by default the first one of a usual name.
        target_column: The column of the targets; by default one of a usual name, if there is one.
    """
    scheme, _, rest = name.partition(":")
    if scheme == "hf" and rest:
        return open_hub(rest, input_columns, target_column)
    path = Path(name)
    if path.is_dir():
        if input_columns or target_column is not None:
            raise OptionError("Columns are for tables: a folder of images has its classes as sub-folders.")
        return ImageFolder(path)
    if not path.exists():
        raise FileError(f"Expected data, found nothing at {path}. For a Hugging Face data set write hf:NAME:SPLIT.")
    if path.suffix == ".npz":
        return ArrayRows(path, input_columns, target_column)
    if path.suffix in TABLES:
        return open_table(path, input_columns, target_column)
    raise OptionError(f"Expected a folder of images, .npz, {', '.join(TABLES)} or hf:NAME:SPLIT, got {name!r}.")


class Columns(NamedTuple):
    """The names of the columns to read."""

    inputs: list[str]
    target: str | None


def choose_columns(existing: Sequence[str], inputs: Sequence[str], target: str | None) -> Columns:
    """The columns that were asked for, or else those of usual names."""
    listed = f"The columns are: {', '.join(existing)}."
    for name in (*inputs, target):
        if name is not None and name not in existing:
            raise OptionError(f"Expected the name of a column, got {name!r}. {listed}")
    target = target if target is not None else next((key for key in TARGET_KEYS if key in existing), None)
    others = [name for name in existing if name != target]
    usual = [key for key in INPUT_KEYS if key in others][:1]
    chosen = list(inputs) or usual or (others if len(others) == 1 else [])
    if not chosen:
        raise OptionError(f"Which column holds the inputs? Name it with --input-column. {listed}")
    return Columns(chosen, target)


# Images


def read_image(source: Any, name: str) -> Any:
    """Read an image in color from a `Path`, a file, or an address that fsspec knows; errors call it `name`."""
    library = require("PIL.Image", "images", "Reading images")
    opened = require("fsspec", "hf", "Reading images").open(source) if isinstance(source, str) else nullcontext(source)
    with expecting(f"an image in {name} (repair or remove it)", DataError), opened as file, library.open(file) as image:
        return image.convert("RGB")


class ImageFolder:
    """The images of a folder in the order of their names.

    Images in sub-folders have the sub-folder as class, numbered in the order of the names; images in the folder itself
    have no targets.
    """

    costly = True

    def __init__(self, folder: Path) -> None:
        require("PIL.Image", "images", "Reading images")
        self.folder = folder
        classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        files = [(name, size) for name, size in walk(folder) if Path(name).suffix.lower() in IMAGES]
        if not files:
            raise DataError(f"Expected images ({', '.join(IMAGES)}) in {folder} or in its sub-folders, found none.")
        loose = sum("/" not in name for name, _ in files)
        if 0 < loose < len(files):
            raise DataError(f"Expected images in {folder} or in its sub-folders, found {loose} of {len(files)} there.")
        self.labels = {name: number for number, name in enumerate(classes)} if not loose else {}
        # Bytes in one array: every worker process would copy a list of strings.
        self.names = np.array([os.fsencode(name) for name, _ in files])
        # The classes belong to the identity, since one without images counts when they are numbered.
        listing = chain(((f"{name}/", 0) for name in self.labels), files)
        self.identity = {"kind": "images", "rows": len(files), "digest": listing_digest(listing)}

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, row: int) -> tuple[Any, int | None]:
        name = os.fsdecode(self.names[row])
        path = self.folder / name
        return read_image(path, str(path)), self.labels.get(name.partition("/")[0])


# Arrays


class ArrayRows:
    """The rows of an `.npz` file, in memory."""

    costly = False

    def __init__(self, path: Path, inputs: Sequence[str], target: str | None) -> None:
        with expecting(f"arrays of numbers in {path}"), np.load(path, allow_pickle=False) as file:
            columns = choose_columns(file.files, inputs, target)
            if len(columns.inputs) > 1:
                raise DataError(f"Expected one array of inputs in an .npz file, got {', '.join(columns.inputs)}.")
            self.inputs = file[columns.inputs[0]]
            self.targets = file[columns.target] if columns.target is not None else None
        arrays = [array for array in (self.inputs, self.targets) if array is not None]
        lengths = {len(array) if array.ndim and array.dtype.kind in "fiub" else 0 for array in arrays}
        if len(lengths) > 1 or 0 in lengths:
            found = " and ".join(f"{array.dtype} of shape {array.shape}" for array in arrays)
            raise DataError(f"Expected rows of numbers in {path}, as many targets as inputs, found {found}.")
        self.identity = {"kind": "npz", "rows": len(self), "digest": file_digest(path), "columns": columns._asdict()}

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        return np.atleast_1d(self.inputs[row]), None if self.targets is None else self.targets[row]


# Tables and the Hugging Face hub, by the library `datasets`


@dataclass
class StreamedRows:
    """The rows of a `datasets.IterableDataset`, which can only be read in order."""

    costly: ClassVar = True

    table: Any  # with images as they are stored: `read_image` names the row of one that it cannot read
    columns: Columns
    name: str  # for errors
    identity: dict[str, Any]
    first: int = 0  # the number of the first row

    def skip(self, rows: int) -> StreamedRows:
        """The same without its first rows."""
        return replace(self, table=self.table.skip(rows), first=self.first + rows)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return (self.read(example, row) for row, example in enumerate(self.table, self.first))

    def read(self, example: dict[str, Any], row: int) -> tuple[Any, Any]:
        """The input and the target of a row."""
        values = [self._input(example[name], name, row) for name in self.columns.inputs]
        if len(values) > 1:
            if any(not isinstance(value, np.ndarray) or value.shape != (1,) for value in values):
                raise DataError("Expected one number a row in each of several input columns, got texts or others.")
            values = [np.concatenate(values)]
        name = self.columns.target
        return values[0], None if name is None else self._numbers(example[name], name, row)

    def _input(self, value: Any, name: str, row: int) -> Any:
        """An image, a text, or an array of numbers."""
        if isinstance(value, str):
            return value
        if isinstance(value, bytes):
            value = {"bytes": value, "path": None}
        if isinstance(value, dict) and "bytes" in value:  # an image as `datasets` stores it
            content, path = value["bytes"], value["path"]
            place = f"column {name!r} of row {row} of {self.name}{f' ({path})' if path else ''}"
            return read_image(path if content is None else io.BytesIO(content), place)
        return np.atleast_1d(self._numbers(value, name, row))

    def _numbers(self, value: Any, name: str, row: int) -> np.ndarray[Any, Any]:
        """A number or lists of numbers, in the type of the column."""
        feature: Any = (self.table.features or {}).get(name)
        while hasattr(feature, "feature"):  # lists say what is in them
            feature = feature.feature
        with suppress(TypeError, ValueError):
            array = np.asarray(value, getattr(feature, "dtype", None))
            if value is not None and array.dtype.kind in "fiub":
                return array
        expected = f"numbers, or lists of numbers of one length, in column {name!r} of row {row} of {self.name}"
        raise DataError(f"Expected {expected}, got {reprlib.repr(value)}. Number the names of classes from 0 first.")


class TableRows(StreamedRows):
    """The rows of a `datasets.Dataset`, which is mapped from the disk."""

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        return self.read(self.table[row], row)


Rows = ImageFolder | ArrayRows | StreamedRows
"""Rows (input, target or None) in a fixed order. `identity` tells them from other data; `costly` says whether a row is
slow to read, so that several processes should read them."""


def open_table(path: Path, inputs: Sequence[str], target: str | None) -> StreamedRows:
    """Open a Parquet, CSV or JSON file, which `datasets` converts once and keeps in its cache."""
    library = require("datasets", "hf", f"Reading {path.name}")
    with expecting(f"a table with at least one row in {path}"):
        table = getattr(library.Dataset, f"from_{TABLES[path.suffix]}")(str(path))
    identity = {"kind": "table", "rows": len(table), "digest": file_digest(path)}
    return rows_of(library, table, path.name, choose_columns(table.column_names, inputs, target), identity)


def open_hub(name: str, inputs: Sequence[str], target: str | None) -> StreamedRows:
    """Open `NAME`, `NAME:SPLIT` or `NAME:CONFIGURATION:SPLIT`, where NAME is on the hub or a local folder.

    Data sets saved to disk are mapped; others are streamed, so that only what is read is downloaded. No code of a data
    set is run.
    """
    library = require("datasets", "hf", "A Hugging Face data set")
    path, *configuration = name.split(":")
    split = configuration.pop() if configuration else None
    folder = Path(path)
    with expecting(f"a data set on the Hugging Face hub or a folder of one at {path!r}"):
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            splits = library.load_from_disk(path)
            files = walk(folder)
        else:
            builder = library.load_dataset_builder(path, *configuration)
            splits = builder.as_streaming_dataset()
            # The addresses of files on the hub contain the commit; local files are known by name and size.
            named = ((str(file), 0) for part in (builder.config.data_files or {}).values() for file in part)
            files = walk(folder) if folder.is_dir() else named
    tables = splits if isinstance(splits, dict) else {None: splits}
    if split not in tables and (split is not None or len(tables) > 1):
        names = ", ".join(filter(None, tables)) or "none"
        raise OptionError(f"Expected one of the splits {names}, got {split}: write hf:{path}:SPLIT.")
    table = tables[split if split in tables else next(iter(tables))]
    columns = choose_columns(table.column_names or list(next(iter(table))), inputs, target)
    return rows_of(library, table, path, columns, {"kind": "hf", "split": split, "digest": listing_digest(files)})


def rows_of(library: Any, table: Any, name: str, columns: Columns, identity: dict[str, Any]) -> StreamedRows:
    """The rows of a table, whose images are not decoded."""
    for column, feature in (table.features or {}).items():
        if isinstance(feature, library.Image):
            table = table.cast_column(column, library.Image(decode=False))
    rows = TableRows if isinstance(table, library.Dataset) else StreamedRows
    return rows(table, columns, name, {**identity, "columns": columns._asdict()})
