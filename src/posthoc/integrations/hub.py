"""Hugging Face data sets: those saved to disk are mapped; all others, of the hub or files in a folder, are streamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from posthoc.errors import DataError, FileError, OptionError
from posthoc.integrations.columns import Columns, choose_columns, table_rows
from posthoc.integrations.digests import listing_digest, walk
from posthoc.optional import require

__all__ = ["MappedRows", "StreamedRows", "open_hub"]

AT_ONCE = 64
"""Rows taken from a stream at a time; there may be images in them."""


def open_hub(name: str, inputs: Sequence[str], target: str | None) -> MappedRows | StreamedRows:
    """`NAME`, `NAME:SPLIT` or `NAME:CONFIGURATION:SPLIT`, where NAME is on the hub or a local folder. No code of a data
    set is run."""
    library = require("datasets", "hf", "A Hugging Face data set")
    path, *rest = name.split(":")
    split = rest.pop() if rest else None
    folder = Path(path)
    try:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            found = library.load_from_disk(path)
            digest = listing_digest(walk(folder))
        else:
            builder = library.load_dataset_builder(path, *rest)
            found = builder.as_streaming_dataset()
            # The files' addresses on the hub hold the commit; local ones are known by name and size.
            files = [str(file) for part in (builder.config.data_files or {}).values() for file in part]
            digest = listing_digest(walk(folder) if folder.is_dir() else ((file, 0) for file in files))
    except (OSError, ValueError, library.exceptions.DatasetsError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise FileError(
            f"Expected a data set on the Hugging Face hub or a folder of one, got {path!r}: {reason}"
        ) from error
    part = choose_split(found, split, path)
    columns = choose_columns(part.column_names, inputs, target)
    identity = {"kind": "hf", "split": split, "digest": digest, "columns": columns._asdict()}
    part = part.select_columns(list(dict.fromkeys(columns.names))).with_format("arrow")
    return (MappedRows if hasattr(part, "num_rows") else StreamedRows)(part, columns, name, identity)


def choose_split(found: Any, split: str | None, path: str) -> Any:
    """The part that was asked for, or the only one."""
    if not isinstance(found, dict):
        if split is not None:
            raise OptionError(f"Expected no split for {path!r}, which has none, got {split!r}.")
        return found
    if split is None and len(found) == 1:
        return next(iter(found.values()))
    if split not in found:
        raise OptionError(f"Expected one of the splits {', '.join(found)}, got {split}: write hf:{path}:SPLIT.")
    return found[split]


@dataclass
class MappedRows:
    """A data set on disk."""

    costly: ClassVar = True

    table: Any
    columns: Columns
    name: str
    identity: dict[str, Any]

    def __post_init__(self) -> None:
        if not len(self):
            raise DataError(f"Expected at least one row in {self.name}, found none.")

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[tuple[Any, Any]]:  # consecutive rows
        return table_rows(self.table[rows[0] : rows[-1] + 1], self.columns, rows[0], self.name)


@dataclass
class StreamedRows:
    """A data set that can only be gone through."""

    costly: ClassVar = True

    stream: Any
    columns: Columns
    name: str
    identity: dict[str, Any]
    first: int = 0

    def skip(self, rows: int) -> StreamedRows:
        """The same without its first rows."""
        return replace(self, stream=self.stream.skip(rows), first=self.first + rows)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        first = self.first
        for table in self.stream.iter(batch_size=AT_ONCE):
            yield from table_rows(table, self.columns, first, self.name)
            first += table.num_rows
