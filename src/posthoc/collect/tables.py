"""Tables with named columns, Parquet and CSV, as outputs, targets, features and inputs."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from posthoc.collect.loaders import TEXT_ADVICE, Array, listed, tensor_of
from posthoc.collect.outputs import COLUMNS, NAMES
from posthoc.errors import DataError, FileError, OptionError
from posthoc.io import parsing
from posthoc.optional import require

Columns = Mapping[str, str | Sequence[str]]
"""Which columns hold what: a name, a pattern or a list of them for "outputs", "targets", "features", "inputs"."""


def choose(path: Path, names: list[str], asked: Columns | None) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Which columns of a table make up which array, and the names or patterns that say so; by default `outputs`, or
    `outputs_0`, `outputs_1`, …"""
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise FileError(f"Expected columns of different names in {path}, found {listed(repeated)} more than once.")
    patterns = [(array, pattern) for array in NAMES for pattern in (f"{array}_[0-9]*", array)]
    columns: dict[str, Any] = {a: pattern for a, pattern in patterns if any(fnmatchcase(n, pattern) for n in names)}
    columns |= asked or {}
    if unknown := columns.keys() - set(NAMES):
        raise OptionError(f"Expected columns for {', '.join(NAMES)}, got some for {', '.join(sorted(unknown))}.")
    if "outputs" not in columns:
        advice = 'Say which: --outputs p_cat,p_dog --targets label, or columns={"outputs": "p_*", ...}.'
        present = f"got none. The columns are: {listed(names)}. {advice}"
        raise OptionError(f"Expected columns for outputs, or named outputs_0, outputs_1, …, in {path}, {present}")
    chosen: dict[str, list[str]] = {}
    for array, wanted in columns.items():
        chosen[array] = []
        for pattern in [wanted] if isinstance(wanted, str) else wanted:
            matching = [pattern] if pattern in names else in_order([n for n in names if fnmatchcase(n, pattern)])
            if not matching:
                raise OptionError(f"Expected a column for {array}, got {pattern!r}. The columns are: {listed(names)}.")
            chosen[array] += matching
        if not chosen[array] or len(set(chosen[array])) < len(chosen[array]):
            raise OptionError(f"Expected one or more columns for {array}, each once, got {listed(chosen[array])}.")
    for array, found in chosen.items():
        if array != "targets" and (both := set(found).intersection(chosen.get("targets", []))):
            raise OptionError(f"Expected targets in columns of their own, got {listed(sorted(both))} as {array} too.")
    return chosen, columns


def in_order(names: list[str]) -> list[str]:
    """Columns that are numbered (logit_0, logit_1, …) by their numbers, others as they stand in the file."""
    matches = [match for name in names if (match := re.fullmatch(r"(.*?)(\d+)", name))]
    if len(matches) < len(names) or len({match[1] for match in matches}) > 1:
        return names
    return [match[0] for match in sorted(matches, key=lambda match: int(match[2]))]


def assemble(
    chosen: Mapping[str, list[str]], columns: Columns, asked: Columns | None, values: Mapping[str, Array]
) -> dict[str, Any]:
    """Columns as arrays: whole numbers are classes among the targets, and real numbers elsewhere."""
    parts: dict[str, Any] = {}
    for array, names in chosen.items():
        blocks = [values[name] for name in names]
        if not len(blocks[0]):
            raise DataError("Expected at least one row, got none: the table has nothing but its header.")
        # One column that was named is taken as it is, and not as a matrix of one.
        alone = names == [columns[array]]
        joined = blocks[0] if alone else np.concatenate([block.reshape(len(block), -1) for block in blocks], axis=1)
        if joined.dtype.kind in "iub":
            joined = joined.astype(np.int64 if array == "targets" else np.float64)
        parts[array] = tensor_of(joined, array)
        if array in COLUMNS and array in (asked or {}) and len(names) == parts[array].shape[1:].numel():
            parts[COLUMNS[array]] = tuple(names)
    return parts


def used(chosen: Mapping[str, list[str]]) -> list[str]:
    """The names of all chosen columns, each once."""
    return list(dict.fromkeys(name for names in chosen.values() for name in names))


# CSV.


def read_csv(path: Path, columns: Columns | None) -> dict[str, Any]:
    """The arrays of a text table whose first line names the columns; commas, semicolons or tabs between them."""
    with parsing(path, "a CSV table in UTF-8"), path.open(encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        file.seek(0)
        lines = filter(None, csv.reader(file, delimiter=max(",;\t", key=first.count), strict=True))
        names = [name.strip() for name in next(lines, [])]
        if all(map(is_number, names)):
            raise FileError(f"Expected names of columns in the first line of {path}, found none: add that line.")
        chosen, patterns = choose(path, names, columns)
        numbers = np.fromiter(read_numbers(path, lines, names, used(chosen)), float)
    values = dict(zip(used(chosen), numbers.reshape(-1, len(used(chosen))).T, strict=True))
    for name in chosen.get("targets", []):
        if (abs(values[name]) < 2**53).all() and (values[name] % 1.0 == 0.0).all():
            values[name] = values[name].astype(np.int64)
    return assemble(chosen, patterns, columns, values)


def read_numbers(path: Path, lines: Iterator[list[str]], names: list[str], wanted: list[str]) -> Iterator[float]:
    """The numbers in some of the columns, row by row."""
    places = [names.index(name) for name in wanted]
    for row, line in enumerate(lines):
        if len(line) != len(names):
            raise FileError(f"Expected {len(names)} values in every line of {path}, found {len(line)} in row {row}.")
        for place in places:
            if not is_number(text := line[place]):
                advice = TEXT_ADVICE if any(map(str.isalpha, text)) else "write it with the digits 0 to 9 and a point"
                found = f"{text!r:.60} in row {row}: {advice if text.strip() else 'remove the rows without one'}"
                raise DataError(f"Expected numbers in column {names[place]!r}, got {found}.")
            yield float(text)


def is_number(text: str) -> bool:
    """Whether a text is a number as programs write it; Python also takes 1_000 and the digits of other scripts."""
    try:
        float(text)
    except ValueError:
        return False
    return text.isascii() and "_" not in text


# Parquet.


def read_parquet(path: Path, columns: Columns | None) -> dict[str, Any]:
    """The arrays of a Parquet file: a column of numbers each, of lists of one length, or several columns."""
    parquet = require("pyarrow.parquet", "tables", "Reading Parquet")
    with parsing(path, "a Parquet file"), parquet.ParquetFile(path, page_checksum_verification=True) as file:
        chosen, patterns = choose(path, file.schema_arrow.names, columns)
        table = file.read(columns=used(chosen))
    return assemble(chosen, patterns, columns, {name: values_of(table.column(name), name) for name in used(chosen)})


def values_of(column: Any, name: str) -> Array:
    """A column as an array with one row a row: lists become further axes."""
    import pyarrow as pa
    import pyarrow.compute

    types, rows, width = pa.types, len(column), []
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    while rows and hasattr(column.type, "value_field") and not column.null_count:
        lengths = pa.compute.unique(pa.compute.list_value_length(column)).to_pylist()
        if len(lengths) > 1:
            raise DataError(f"Expected lists of one length in column {name!r}, got lengths {sorted(lengths)[:5]}.")
        width += lengths
        column = pa.compute.list_flatten(column)
    if column.null_count:
        raise DataError(f"Expected a number in every row of column {name!r}, got {column.null_count} nulls: drop them.")
    if types.is_decimal(column.type):
        column = column.cast(pa.float64())
    if types.is_string(column.type) or types.is_large_string(column.type):
        raise DataError(f"Expected numbers in column {name!r}, got text such as {column[0]!s:.40}: {TEXT_ADVICE}.")
    if not (types.is_floating(column.type) or types.is_integer(column.type) or types.is_boolean(column.type)) and rows:
        raise DataError(f"Expected numbers in column {name!r}, got {column.type}.")
    return np.asarray(column.to_numpy()).reshape(rows, *width)


def write_parquet(path: Path, tables: Mapping[str, Array] | Iterable[Mapping[str, Array]]) -> None:
    """Writes a table, or several one after the other. An array is one column, of numbers or of lists of fixed size."""
    parquet = require("pyarrow.parquet", "tables", "Writing Parquet")
    import pyarrow as pa

    with ExitStack() as stack:
        writer: Any = None
        for arrays in [tables] if isinstance(tables, Mapping) else tables:
            columns = {}
            for name, array in arrays.items():
                column = pa.array(array.reshape(-1))
                for size in reversed(array.shape[1:]):
                    column = pa.FixedSizeListArray.from_arrays(column, size)
                columns[name] = column
            table = pa.table(columns)
            writer = writer or stack.enter_context(parquet.ParquetWriter(path, table.schema, write_page_checksum=True))
            writer.write_table(table)
