"""Which columns of a table are the inputs and the targets, and Arrow tables as rows of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from posthoc.collect.loaders import TARGET_KEYS
from posthoc.errors import DataError, OptionError
from posthoc.integrations.images import read_image

__all__ = ["INPUT_KEYS", "Columns", "choose_columns", "table_rows"]

Array = np.ndarray[Any, Any]

INPUT_KEYS = ("inputs", "input", "image", "img", "text", "sentence", "x")
"""The usual names of inputs, as `TARGET_KEYS` are of targets."""


class Columns(NamedTuple):
    """The names of the columns to read."""

    inputs: list[str]
    target: str | None

    @property
    def names(self) -> list[str]:
        """All of them."""
        return [*self.inputs, *([self.target] if self.target is not None else [])]


def choose_columns(there: Sequence[str], inputs: Sequence[str], target: str | None) -> Columns:
    """The columns that were named, or else those of usual names."""
    listed = ", ".join(there)
    if absent := [name for name in [*inputs, *([target] if target is not None else [])] if name not in there]:
        raise OptionError(f"Expected the name of a column, got {absent[0]!r}. The columns are: {listed}.")
    target = target if target is not None else next((key for key in TARGET_KEYS if key in there), None)
    usual = [key for key in INPUT_KEYS if key in there and key != target]
    others = [name for name in there if name != target]
    chosen = list(inputs) or usual[:1] or (others if len(others) == 1 else [])
    if not chosen:
        raise OptionError(f"Which column holds the inputs? Name it with --input-column; the columns are: {listed}.")
    return Columns(chosen, target)


def table_rows(table: Any, columns: Columns, first: int, source: str) -> list[tuple[Any, Any]]:
    """The rows (input, target) of an Arrow table that begins at row `first` of its source."""
    for name in columns.names:
        if table.column(name).null_count:
            row = first + int(np.argmax(table.column(name).is_null().to_numpy()))
            raise DataError(f"Expected a value in every row, found none in row {row} of column {name!r} of {source}.")
    parts = [table.column(name) for name in columns.inputs]
    if len(parts) == 1:
        inputs = values(parts[0], columns.inputs[0], first, source)
    else:
        inputs = list(np.stack([one_number(part, name) for part, name in zip(parts, columns.inputs, strict=True)], 1))
    if columns.target is None:
        return [(value, None) for value in inputs]
    return list(zip(inputs, numbers(table.column(columns.target), columns.target), strict=True))


def values(column: Any, name: str, first: int, source: str) -> list[Any]:
    """The inputs in a column: images, texts or numbers, by its type."""
    kind = str(column.type)
    if kind in ("string", "large_string"):
        return list(column.to_pylist())
    if kind in ("binary", "large_binary"):
        contents: list[Any] = [{"bytes": content} for content in column.to_pylist()]
    elif kind.startswith("struct") and "bytes" in {field.name for field in column.type}:
        contents = column.to_pylist()
    else:
        return [np.atleast_1d(value) for value in numbers(column, name)]
    return [stored_image(content, f"row {first + i} of {source}") for i, content in enumerate(contents)]


def stored_image(content: dict[str, Any], name: str) -> Any:
    """An image as Hugging Face's data sets keep it: its bytes, or the path of its file."""
    path = content.get("path")
    found = content["bytes"] if content["bytes"] is not None else path
    if found is None:
        raise DataError(f"Expected the bytes or the path of an image in {name}, found neither.")
    return read_image(found, f"{name} ({path})" if path else name)


def numbers(column: Any, name: str) -> Array | list[Array]:
    """A column of numbers, or of lists of them, one entry a row."""
    array = column.to_numpy()
    if array.dtype == object and len(array) and isinstance(array[0], np.ndarray):
        return [dense(value, name) for value in array]
    if array.dtype.kind not in "fiub":
        raise DataError(
            f"Expected numbers in column {name!r}, got {column.type}. Classes are numbered from 0; turn their names "
            "into numbers first."
        )
    return array


def dense(value: Array, name: str) -> Array:
    """Lists of lists as one array."""
    if value.dtype != object:
        return value
    try:
        return np.stack([dense(part, name) for part in value])
    except (ValueError, AttributeError) as error:
        raise DataError(f"Expected lists of numbers of one length in column {name!r}, got others.") from error


def one_number(column: Any, name: str) -> Array:
    array = numbers(column, name)
    if not isinstance(array, np.ndarray):
        raise DataError(f"Expected one number a row in each of several input columns, got lists in {name!r}.")
    return array
