"""Predictions as a table with one row a point, written as they are made, as Parquet or CSV."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from posthoc.errors import OptionError
from posthoc.io import atomic_path, writing
from posthoc.optional import require
from posthoc.predictive.base import Predictive
from posthoc.predictive.classification import ClassificationPredictive
from posthoc.predictive.regression import RegressionPredictive

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
    write = require_table(path)
    rows = 0
    with writing(path, "Make room, or write elsewhere."), atomic_path(path) as temporary, write(temporary) as add:
        for part in parts:
            add(columns(part.cpu(), rows))
            rows += len(part)
    return rows


def columns(part: Predictive, first: int) -> Columns:
    """The columns of some rows, numbered from `first`."""
    table: Columns = {"row": np.arange(first, first + len(part))}
    if isinstance(part, ClassificationPredictive):
        label = part.labels
        table["label"], table["probs"] = label.numpy(), part.probs.numpy()
        table["entropy"] = part.entropy().numpy()
        table["std"] = part.latent.std.gather(-1, label[:, None]).squeeze(-1).numpy()
        return table
    assert isinstance(part, RegressionPredictive)
    for name, values in (("mean", part.mean.to(part.std.dtype)), ("std", part.std)):
        table[name] = (values.squeeze(-1) if values.ndim == 2 and values.shape[1] == 1 else values).numpy()
    return table


def require_table(path: str | os.PathLike[str]) -> Callable[[Path], Any]:
    """The function that writes a table of this suffix; raises, before the work, if there is none."""
    suffix = Path(path).suffix
    if suffix == ".csv":
        return write_csv
    if suffix != ".parquet":
        raise OptionError(f"Expected a table to write, a .parquet or a .csv, got {Path(path).name!r}.")
    require("pyarrow", "tables", "Writing Parquet")
    return write_parquet


@contextmanager
def write_parquet(path: Path) -> Iterator[Callable[[Columns], None]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer: Any = None

    def add(table: Columns) -> None:
        nonlocal writer
        block = pa.table(
            {
                name: pa.array(values)
                if values.ndim == 1
                else pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
                for name, values in table.items()
            }
        )
        writer = writer or pq.ParquetWriter(path, block.schema)
        writer.write_table(block)

    try:
        yield add
    finally:
        if writer is not None:
            writer.close()


@contextmanager
def write_csv(path: Path) -> Iterator[Callable[[Columns], None]]:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)

        def add(table: Columns) -> None:
            flat = {}
            for name, values in table.items():
                if values.ndim == 1:
                    flat[name] = values.tolist()
                else:
                    flat |= {f"{name}_{i}": values[:, i].tolist() for i in range(values.shape[1])}
            if not file.tell():
                writer.writerow(flat)
            writer.writerows(zip(*flat.values(), strict=True))

        yield add
