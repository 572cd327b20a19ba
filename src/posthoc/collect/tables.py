"""Tables with named columns, Parquet and CSV, as outputs, targets, features and inputs."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from torch import Tensor

from posthoc.collect.loaders import TEXT_ADVICE, Array, tensor_of
from posthoc.collect.outputs import NAMES
from posthoc.errors import DataError, FileError, MissingExtraError, OptionError, PosthocError

__all__ = ["Columns", "read_csv", "read_parquet", "write_parquet"]

Columns = Mapping[str, str | Sequence[str]]
"""Which columns hold what: a name, a pattern or a list of them for "outputs", "targets", "features", "inputs"."""

LINES_AT_ONCE = 10_000
NAMES_SHOWN = 40


def in_order(names: list[str]) -> list[str]:
    """Columns that are numbered (logit_0, logit_1, …) by their numbers, others as they stand in the file."""
    numbers = [re.fullmatch(r"(.*?)(\d+)", name) for name in names]
    prefixes = {found[1] for found in numbers if found}
    if None in numbers or len(prefixes) != 1:
        return names
    return sorted(names, key=lambda name: int(name[len(next(iter(prefixes))) :]))


class Choice(NamedTuple):
    """The columns that make up an array."""

    columns: list[str]
    alone: bool  # one column as it is, and not as a matrix of one


def choose(path: Path, there: list[str], columns: Columns | None) -> dict[str, Choice]:
    """Which columns of a table make up which array."""
    if twice := [name for name, times in Counter(there).items() if times > 1]:
        raise FileError(f"Expected columns of different names in {path}, found {listed(twice)} more than once.")
    chosen = by_default(there) if columns is None else by_name(path, there, columns)
    if "outputs" not in chosen:
        asked = "in columns" if columns is not None else f"or outputs_0, outputs_1, …, in {path}"
        raise OptionError(
            f"Expected columns for outputs {asked}, got none. The columns are: {listed(there)}. Say which are which, "
            'as in --outputs p_cat,p_dog --targets label; in Python columns={"outputs": ["p_cat", "p_dog"], ...}.'
        )
    return chosen


def by_default(there: list[str]) -> dict[str, Choice]:
    """Columns with the names of our arrays: `outputs`, or `outputs_0`, `outputs_1`, …"""
    chosen = {}
    for name in NAMES:
        numbered = [column for column in there if re.fullmatch(rf"{name}_\d+", column)]
        if name in there:
            chosen[name] = Choice([name], alone=True)
        elif numbered:
            chosen[name] = Choice(sorted(numbered, key=lambda column: int(column.rpartition("_")[2])), alone=False)
    return chosen


def by_name(path: Path, there: list[str], columns: Columns) -> dict[str, Choice]:
    """The columns that the user named."""
    if unknown := columns.keys() - set(NAMES):
        raise OptionError(f"Expected columns for {', '.join(NAMES)}, got some for {', '.join(sorted(unknown))}.")
    chosen: dict[str, Choice] = {}
    for name, asked in columns.items():
        patterns = [asked] if isinstance(asked, str) else list(asked)
        found: list[str] = []
        for pattern in patterns:
            matching = [pattern] if pattern in there else in_order([c for c in there if fnmatchcase(c, pattern)])
            if not matching:
                raise OptionError(
                    f"Expected a column of {path} for {name}, got {pattern!r}. The columns are: {listed(there)}."
                )
            found += matching
        if not found or len(set(found)) < len(found):
            raise OptionError(f"Expected one or more columns for {name}, each once, got {listed(found)}.")
        chosen[name] = Choice(found, alone=found == [asked])
    answers = set(chosen["targets"].columns) if "targets" in chosen else set()
    for name, choice in chosen.items():
        if name != "targets" and (both := answers & set(choice.columns)):
            raise OptionError(f"Expected targets in columns of their own, got {listed(both)} as {name} too.")
    return chosen


def assemble(chosen: Mapping[str, Choice], values: Mapping[str, Array]) -> dict[str, Tensor]:
    """Columns as arrays: whole numbers are classes among the targets, and real numbers elsewhere."""
    tensors = {}
    for name, choice in chosen.items():
        parts = [values[column] for column in choice.columns]
        if not len(parts[0]):
            raise DataError("Expected at least one row, got none: the table has nothing but its header.")
        array = parts[0] if choice.alone else np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)
        if array.dtype.kind in "iub":
            array = array.astype(np.int64 if name == "targets" else np.float64)
        tensors[name] = tensor_of(array, name)
    return tensors


def used(chosen: Mapping[str, Choice]) -> list[str]:
    return list(dict.fromkeys(column for choice in chosen.values() for column in choice.columns))


def listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f", and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return (", ".join(map(repr, names[:NAMES_SHOWN])) or "none") + more


# CSV.


def read_csv(path: Path, columns: Columns | None) -> dict[str, Tensor]:
    """The arrays of a text table whose first line names the columns; commas, semicolons or tabs between them."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return parse_csv(path, file, columns)
    except (UnicodeDecodeError, csv.Error) as error:
        raise FileError(
            f"Expected a CSV table in UTF-8, found other text in {path} ({error}): save it again."
        ) from error


def parse_csv(path: Path, file: TextIO, columns: Columns | None) -> dict[str, Tensor]:
    first = file.readline()
    file.seek(0)
    lines = filter(None, csv.reader(file, delimiter=max(",;\t", key=first.count), strict=True))
    there = [name.strip() for name in next(lines, [])]
    if all(is_number(name) for name in there):
        raise FileError(f"Expected the names of the columns in the first line of {path}, found none: add that line.")
    chosen = choose(path, there, columns)
    places = {column: there.index(column) for column in used(chosen)}
    blocks: dict[str, list[Array]] = {column: [np.zeros(0, np.int64)] for column in places}
    row = 0
    while block := list(islice(lines, LINES_AT_ONCE)):
        for number, line in enumerate(block, row):
            if len(line) != len(there):
                raise FileError(
                    f"Expected {len(there)} values in every line of {path}, found {len(line)} in row {number}: the "
                    "file may have been cut short; save it again."
                )
        for column, place in places.items():
            blocks[column].append(parse([line[place] for line in block], column, row))
        row += len(block)
    return assemble(chosen, {column: np.concatenate(parts) for column, parts in blocks.items()})


def parse(texts: list[str], column: str, first_row: int) -> Array:
    """Whole numbers if all of them are, else real ones."""
    for row, text in enumerate(texts, first_row):
        if not is_number(text):
            advice = TEXT_ADVICE if text.strip() else "remove the rows without one"
            raise DataError(f"Expected numbers in column {column!r}, got {text!r:.60} in row {row}: {advice}.")
    try:
        return np.array([int(text) for text in texts], dtype=np.int64)
    except (ValueError, OverflowError):
        return np.array([float(text) for text in texts])


NUMBER = re.compile(r"\s*[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|nan|inf(inity)?)\s*", re.IGNORECASE)
"""A number as programs write it; Python also takes 1_000 and the digits of other scripts."""


def is_number(text: str) -> bool:
    return NUMBER.fullmatch(text) is not None


# Parquet.


def pyarrow() -> Any:
    try:
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", "tables", "Reading and writing Parquet") from error
    return pyarrow


def read_parquet(path: Path, columns: Columns | None) -> dict[str, Tensor]:
    """The arrays of a Parquet file: a column of numbers each, of lists of one length, or several columns."""
    pa = pyarrow()
    try:
        with pa.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            chosen = choose(path, file.schema_arrow.names, columns)
            table = file.read(columns=used(chosen))
    except PosthocError:
        raise
    except Exception as error:  # a damaged file fails in many ways
        raise FileError(
            f"Expected a Parquet file, found one in {path} that cannot be read ({error}). "
            "A truncated file must be saved again."
        ) from error
    return assemble(chosen, {column: values_of(table.column(column), column) for column in used(chosen)})


def values_of(column: Any, name: str) -> Array:
    """A column as an array with one row a row: lists become further axes."""
    pa = pyarrow()
    rows, width = len(column), []
    if not rows:
        return np.zeros(0)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    while is_list(column.type) and not column.null_count:
        lengths = pa.compute.unique(pa.compute.list_value_length(column)).to_pylist()
        if len(lengths) > 1:
            raise DataError(f"Expected lists of one length in column {name!r}, got lengths {sorted(lengths)[:5]}.")
        width += lengths
        column = pa.compute.list_flatten(column)
    if column.null_count:
        raise DataError(
            f"Expected a number in every row of column {name!r}, got none {column.null_count} times: remove those rows."
        )
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        raise DataError(f"Expected numbers in column {name!r}, got text such as {column[0]!s:.40}: {TEXT_ADVICE}.")
    if not (pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise DataError(f"Expected numbers in column {name!r}, got {kind}.")
    return np.asarray(column.to_numpy()).reshape(rows, *width)


def is_list(kind: Any) -> bool:
    types = pyarrow().types
    return types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind)


def write_parquet(path: Path, arrays: Mapping[str, Array]) -> None:
    """One column an array, of numbers or of lists of fixed size."""
    pa = pyarrow()
    columns = {}
    for name, array in arrays.items():
        column = pa.array(array.reshape(-1))
        for size in reversed(array.shape[1:]):
            column = pa.FixedSizeListArray.from_arrays(column, size)
        columns[name] = column
    pa.parquet.write_table(pa.table(columns), path, write_page_checksum=True)
