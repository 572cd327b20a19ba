"""Predictions as a table with one row a point, written as they are made, as Parquet or CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from posthoc.collect.tables import write_parquet
from posthoc.errors import OptionError
from posthoc.io import StrPath, atomic_path
from posthoc.optional import require
from posthoc.predictive.base import Predictive
from posthoc.predictive.classification import ClassificationPredictive

Columns = dict[str, np.ndarray[Any, Any]]


def write_predictions(parts: Iterable[Predictive], path: StrPath) -> int:
    """Write a table of predictions, some rows at a time but whole or not at all; returns the number of rows.

    For regression its columns are row, mean and std; for classification they are row, label, probs, entropy and std,
    which is the logit's of the label.
    """
    write, rows = require_table(path), 0

    def tables() -> Iterator[Columns]:
        nonlocal rows
        for part in parts:
            yield columns(part.cpu(), rows)
            rows += len(part)

    with atomic_path(path) as temporary:
        write(temporary, tables())
    return rows


def columns(part: Predictive, first: int) -> Columns:
    """The columns of some rows, numbered from `first`."""
    values = part.numpy()
    table: Columns = {"row": np.arange(first, first + len(part))}
    if isinstance(part, ClassificationPredictive):
        std = part.latent.std.gather(-1, part.labels[:, None]).squeeze(-1).numpy()
        return table | {"label": values["labels"], "probs": values["probs"], "entropy": values["entropy"], "std": std}
    alone = values["mean"].shape[1:] == (1,)
    return table | {name: values[name][:, 0] if alone else values[name] for name in ("mean", "std")}


def require_table(path: StrPath) -> Callable[[Path, Iterator[Columns]], None]:
    """The function that writes a table of this suffix; raises, before the work, if there is none."""
    suffix = Path(path).suffix
    if suffix == ".csv":
        return write_csv
    if suffix != ".parquet":
        raise OptionError(f"Expected a table to write, a .parquet or a .csv, got {Path(path).name!r}.")
    require("pyarrow", "tables", "Writing Parquet")
    return write_parquet


def write_csv(path: Path, tables: Iterator[Columns]) -> None:
    """Writes tables of columns one after the other as rows of a CSV file, with one header."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        for table in map(flat, tables):
            if file.tell() == 0:
                writer.writerow(table)
            writer.writerows(zip(*table.values(), strict=True))


def flat(table: Columns) -> dict[str, list[Any]]:
    """The columns as lists; an array of several columns becomes name_0, name_1, ..."""
    return {
        name if values.ndim == 1 else f"{name}_{i}": column.tolist()
        for name, values in table.items()
        for i, column in enumerate(values.reshape(len(values), -1).T)
    }
