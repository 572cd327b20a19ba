"""Predictions as a table with one row a point, written as they are made, as Parquet or CSV."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from posthoc.errors import OptionError
from posthoc.io import atomic_path
from posthoc.optional import require
from posthoc.predictive.base import Predictive
from posthoc.predictive.classification import ClassificationPredictive

__all__ = ["require_table", "write_predictions"]

Columns = dict[str, np.ndarray[Any, Any]]


def write_predictions(parts: Iterable[Predictive], path: str | os.PathLike[str]) -> int:
    """Write a table of predictions, whole or not at all.

    Args:
        parts: The predictions, some rows at a time.
        path: The table. For regression its columns are row, mean and std; for classification they are row, label,
            probs, entropy and std, which is the logit's of the label.

    Returns:
        The number of rows.
    """
    writer = require_table(path)
    add: Callable[[Columns], object] | None = None
    rows = 0
    with atomic_path(path) as temporary, ExitStack() as stack:
        for part in parts:
            table = columns(part.cpu(), rows)
            add = add or stack.enter_context(writer(temporary, table))
            add(table)
            rows += len(part)
    return rows


def columns(part: Predictive, first: int) -> Columns:
    """The columns of some rows, numbered from `first`."""
    values = part.numpy()
    table: Columns = {"row": np.arange(first, first + len(part))}
    if isinstance(part, ClassificationPredictive):
        std = part.latent.std.gather(-1, part.labels[:, None]).squeeze(-1).numpy()
        return table | {"label": values["labels"], "probs": values["probs"], "entropy": values["entropy"], "std": std}
    for name in ("mean", "std"):
        table[name] = values[name][:, 0] if values[name].shape[1:] == (1,) else values[name]
    return table


def require_table(path: str | os.PathLike[str]) -> Callable[[Path, Columns], Any]:
    """The function that writes a table of this suffix; raises, before the work, if there is none."""
    suffix = Path(path).suffix
    if suffix == ".csv":
        return csv_writer
    if suffix != ".parquet":
        raise OptionError(f"Expected a table to write, a .parquet or a .csv, got {Path(path).name!r}.")
    require("pyarrow", "tables", "Writing Parquet")
    return parquet_writer


@contextmanager
def parquet_writer(path: Path, first: Columns) -> Iterator[Callable[[Columns], object]]:
    """Gives a function that adds rows to a Parquet file with the columns of `first`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def as_arrow(table: Columns) -> Any:
        return pa.table({name: list(values) if values.ndim > 1 else values for name, values in table.items()})

    with pq.ParquetWriter(path, as_arrow(first).schema) as writer:
        yield lambda table: writer.write_table(as_arrow(table))


@contextmanager
def csv_writer(path: Path, first: Columns) -> Iterator[Callable[[Columns], object]]:
    """Gives a function that adds rows to a CSV file with the columns of `first`."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(flat(first))
        yield lambda table: writer.writerows(zip(*flat(table).values(), strict=True))


def flat(table: Columns) -> dict[str, list[Any]]:
    """The columns as lists; an array of several columns becomes name_0, name_1, ..."""
    return {
        name if values.ndim == 1 else f"{name}_{i}": column.tolist()
        for name, values in table.items()
        for i, column in enumerate(values.reshape(len(values), -1).T)
    }
