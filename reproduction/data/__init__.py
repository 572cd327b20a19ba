"""Data sets: each is read from a folder that the user names, or downloaded once and kept."""

from __future__ import annotations

import os
from collections.abc import Callable

from posthoc.errors import OptionError
from reproduction.data.airline import airline
from reproduction.data.cifar100 import cifar100
from reproduction.data.dataset import Dataset, Splits
from reproduction.data.download import Remote, fetch
from reproduction.data.images import cifar10, svhn
from reproduction.data.tabular import elevators, protein, taxi, year

__all__ = [
    "LOADERS",
    "Dataset",
    "Remote",
    "Splits",
    "airline",
    "cifar10",
    "cifar100",
    "elevators",
    "fetch",
    "load",
    "protein",
    "svhn",
    "taxi",
    "year",
]

LOADERS: dict[str, Callable[[str | os.PathLike[str] | None], Dataset]] = {
    loader.__name__: loader for loader in (protein, elevators, year, airline, taxi, cifar10, cifar100, svhn)
}
"""Every data set by name. Those of images are the test images here."""


def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """A data set by its name, from a folder (by default the one that POSTHOC_DATA names), the cache or the network."""
    if name not in LOADERS:
        raise OptionError(f"Expected a data set among {', '.join(sorted(LOADERS))}, got {name!r}.")
    return LOADERS[name](data_dir)
