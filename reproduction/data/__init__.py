"""The paper's data sets: read from a folder that the user names, or downloaded once and kept."""

from __future__ import annotations

import os
from collections.abc import Callable

from posthoc.errors import OptionError
from reproduction.data.dataset import Dataset, Splits
from reproduction.data.images import cifar10, cifar100, svhn
from reproduction.data.tables import airline, elevators, protein, taxi, year

__all__ = [
    "LOADERS",
    "Dataset",
    "Splits",
    "airline",
    "cifar10",
    "cifar100",
    "elevators",
    "load",
    "protein",
    "svhn",
    "taxi",
    "year",
]

LOADERS: dict[str, Callable[[str | os.PathLike[str] | None], Dataset]] = {
    loader.__name__: loader for loader in (protein, elevators, year, airline, taxi, cifar10, cifar100, svhn)
}
"""Loaders by the name of their data set. Those of images load the test images."""


def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """Loads a data set.

    Args:
        name: A key of `LOADERS`.
        data_dir: The folder with data. None: the one that `POSTHOC_DATA` names, if it is set.
    """
    if name not in LOADERS:
        raise OptionError(f"Expected a data set among {', '.join(sorted(LOADERS))}, got {name!r}.")
    return LOADERS[name](data_dir)
