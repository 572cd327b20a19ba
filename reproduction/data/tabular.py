"""Tables to regress on: UCI protein and elevators, Year, Taxi."""

from __future__ import annotations

import os
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posthoc.errors import FileError, MissingExtraError
from reproduction.data.archives import opened, unzipped
from reproduction.data.dataset import Dataset
from reproduction.data.download import Remote, Shelf

__all__ = ["elevators", "protein", "taxi", "year"]

Array = np.ndarray[Any, Any]

UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases"
PROTEIN = Remote(f"{UCI}/00265/CASP.csv", "CASP.csv")
ELEVATORS = Remote("https://www.dcc.fc.up.pt/~ltorgo/Regression/elevators.tgz", "elevators.tgz")
YEAR = Remote(f"{UCI}/00203/YearPredictionMSD.txt.zip", "YearPredictionMSD.txt.zip")
TAXI = Remote(
    "https://d37ci6vzurychx.cloudfront.net/trip-data/yellow_tripdata_2023-01.parquet", "yellow_tripdata_2023-01.parquet"
)

YEAR_ROWS, YEAR_SIZES = 515_345, (400_000, 63_715, 51_630)
"""The test rows are the last ones, so that no artist is in two parts: do not shuffle them."""
TAXI_COLUMNS = (
    "time of day",
    "day of week",
    "day of month",
    "month",
    "PULocationID",
    "DOLocationID",
    "distance",
    "duration",
)
SHORTEST, LONGEST = 10.0, 5 * 3600.0
"""Trips that took fewer or more seconds are left out."""


def protein(data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """How far a predicted protein structure is from the true one, from nine of its physical properties: `protein.npz`
    (`inputs`, `targets`) or `CASP.csv` from the folder `uci`, or a download."""
    shelf = Shelf("uci", data_dir)
    if found := shelf.find("protein.npz"):
        return from_npz("protein", found[0])
    table = numbers(shelf.get(PROTEIN), skip=1)
    return from_table("protein", f"UCI protein ({len(table):,} rows)", np.roll(table, -1, axis=1))


def elevators(data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """An action on the elevators of an aircraft, from 18 things known of its state: `elevators.npz` (`inputs`,
    `targets`) or `elevators.tgz` from the folder `uci`, or a download."""
    shelf = Shelf("uci", data_dir)
    if found := shelf.find("elevators.npz"):
        return from_npz("elevators", found[0])
    with opened(shelf.get(ELEVATORS)) as read:
        table = np.concatenate([numbers(BytesIO(read(f"elevators.{part}"))) for part in ("data", "test")])
    return from_table("elevators", f"UCI elevators ({len(table):,} rows)", table)


def year(data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """The year of a song from 90 features of its sound: `YearPredictionMSD.txt` (or `.txt.zip`), or else a fragment of
    it as `*.csv`, from the folder `year`; or a download."""
    shelf = Shelf("year", data_dir)
    found = shelf.find("YearPredictionMSD.txt", YEAR.filename, "*.csv")
    path = found[0] if found else shelf.get(YEAR)
    zipped = path.suffix == ".zip"
    table = numbers(BytesIO(unzipped(path.read_bytes(), "YearPredictionMSD.txt", path)) if zipped else path)
    if table.shape[1] != 91:
        raise FileError(f"Expected the year and 90 features in {path}, found {table.shape[1]} columns.")
    whole = len(table) == YEAR_ROWS
    words = "YearPredictionMSD" if whole else f"the first {len(table):,} rows of YearPredictionMSD"
    return from_table("Year", words, np.roll(table, -1, axis=1), sizes=YEAR_SIZES if whole else None)


def taxi(data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """The price of a taxi ride in New York, from when, where and how long it was: `yellow_tripdata_2023-01.parquet`, or
    else `green_*.parquet`, from the folder `taxi`; or a download. The paper names nine attributes and lists these
    eight; rows are in the order of time."""
    shelf = Shelf("taxi", data_dir)
    found = shelf.find(TAXI.filename, "green_*.parquet") or [shelf.get(TAXI)]
    table = np.concatenate([trips(path) for path in found])
    words = f"NYC yellow taxi, January 2023 ({len(table):,} trips)"
    if found[0].name != TAXI.filename:
        words = f"NYC green taxi ({len(table):,} trips) in place of the paper's yellow taxi of January 2023"
    return from_table("Taxi", words, table, TAXI_COLUMNS)


def trips(path: Path) -> Array:  # (N, 9) in float64, the price last
    """The trips of a file that took a time one can believe."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", "tables", "Reading taxi trips") from error
    wanted = ("PULocationID", "DOLocationID", "trip_distance", "total_amount")
    try:
        with parquet.ParquetFile(path) as file:
            there = file.schema_arrow.names
            times = [
                next((n for n in there if n.endswith(f"pep_{end}_datetime")), end) for end in ("pickup", "dropoff")
            ]
            if missing := {*times, *wanted} - set(there):
                raise FileError(f"Expected the columns {', '.join(sorted(missing))} in {path}, found none.")
            table = file.read([*times, *wanted])
    except pyarrow.ArrowInvalid as error:
        raise FileError(f"Expected a Parquet file, found something else in {path} ({error}).") from error
    start, end = (table[name].to_numpy().astype("datetime64[us]") for name in times)
    pickup, dropoff, distance, price = (table[name].to_numpy().astype(np.float64) for name in wanted)
    day = start.astype("datetime64[D]")
    month = start.astype("datetime64[M]")
    columns = (
        (start - day) / np.timedelta64(1, "s"),
        (day.astype(np.int64) + 3) % 7,  # Monday is 0; the first of January 1970 was a Thursday
        (day - month) / np.timedelta64(1, "D") + 1,
        month.astype(np.int64) % 12 + 1,
        pickup,
        dropoff,
        distance,
        (end - start) / np.timedelta64(1, "s"),
        price,
    )
    rows = np.stack(columns, axis=1)
    return rows[(rows[:, 7] >= SHORTEST) & (rows[:, 7] <= LONGEST) & np.isfinite(rows).all(1)]


def column(there: list[str], ending: str) -> str:
    """Yellow and green taxis call their times differently: tpep_… and lpep_…."""
    return next((name for name in there if name.endswith(ending)), ending)


def numbers(source: Path | BytesIO, skip: int = 0) -> Array:  # (N, D)
    """A table of numbers with commas between them."""
    try:
        return np.loadtxt(source, delimiter=",", skiprows=skip, ndmin=2)
    except ValueError as error:
        where = source if isinstance(source, Path) else "the archive"
        raise FileError(f"Expected a table of numbers in {where}, found something else ({error}).") from error


def from_table(name: str, source: str, table: Array, columns: tuple[str, ...] = (), **options: Any) -> Dataset:
    """A data set of a table whose last column is the target."""
    values = torch.from_numpy(table.astype(np.float32))
    return Dataset(name, source, values[:, :-1], values[:, -1].clone(), columns, **options)


def from_npz(name: str, path: Path) -> Dataset:
    try:
        with np.load(path, allow_pickle=False) as file:
            inputs, targets = (torch.from_numpy(file[key].astype(np.float32)) for key in ("inputs", "targets"))
    except (KeyError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise FileError(f"Expected arrays inputs and targets in {path}, found otherwise ({error}).") from error
    return Dataset(name, f"UCI {name} ({len(inputs):,} rows, as in {path.name})", inputs, targets)
