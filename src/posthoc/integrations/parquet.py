"""A Parquet file as rows, read a little at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from posthoc.errors import DataError, FileError
from posthoc.integrations.columns import choose_columns, table_rows
from posthoc.integrations.digests import file_digest
from posthoc.optional import require

__all__ = ["ParquetRows"]

AT_ONCE = 64
"""Rows taken from the file at a time; there may be images in them."""
BUFFER = 2**20
"""Bytes read ahead of each column."""


class ParquetRows:
    """The rows (input, target) of a Parquet file. Reading goes forward, and skips groups of rows that nobody asks for;
    each process that reads has a place of its own in the file."""

    costly = True

    def __init__(self, path: Path, inputs: Sequence[str], target: str | None) -> None:
        pyarrow, parquet = libraries()
        self.path = path
        try:
            with parquet.ParquetFile(path) as file:
                there = file.schema_arrow.names
                groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        except pyarrow.ArrowInvalid as error:
            raise FileError(f"Expected a Parquet file, found something else in {path} ({error}).") from error
        self.columns = choose_columns(there, inputs, target)
        self.starts = [0, *accumulate(groups)]
        if not len(self):
            raise DataError(f"Expected at least one row in {path}, found none.")
        self.identity = {
            "kind": "parquet",
            "rows": len(self),
            "digest": file_digest(path),
            "columns": self.columns._asdict(),
        }
        self._pieces: Iterator[Any] | None = None  # opened where it is read, which may be in a worker
        self._piece: Any = None
        self._first = self._end = 0  # the rows that the piece holds

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[tuple[Any, Any]]:  # consecutive rows
        found: list[tuple[Any, Any]] = []
        row, stop = rows[0], rows[-1] + 1
        while row < stop:
            self._move_to(row)
            part = self._piece.slice(row - self._first, stop - row)
            found += table_rows(part, self.columns, row, self.path.name)
            row += part.num_rows
        return found

    def _move_to(self, row: int) -> None:
        """Makes the piece the one that holds the row."""
        group = bisect_right(self.starts, row) - 1
        if self._pieces is None or row < self._first or self.starts[group] > self._end:
            self._pieces = self._pieces_from(group)
            self._first = self._end = self.starts[group]
        while self._end <= row:
            self._piece = next(self._pieces)
            self._first, self._end = self._end, self._end + self._piece.num_rows

    def _pieces_from(self, group: int) -> Iterator[Any]:
        pyarrow, parquet = libraries()
        # Neither a whole group nor a whole column is in memory: a file may have all its rows in one group.
        with parquet.ParquetFile(self.path, pre_buffer=False, buffer_size=BUFFER) as file:
            groups = list(range(group, file.num_row_groups))
            names = list(dict.fromkeys(self.columns.names))
            for batch in file.iter_batches(AT_ONCE, groups, names, use_threads=False):
                yield pyarrow.Table.from_batches([batch])


def libraries() -> tuple[Any, Any]:
    purpose = "Reading Parquet files"
    return require("pyarrow", "tables", purpose), require("pyarrow.parquet", "tables", purpose)
