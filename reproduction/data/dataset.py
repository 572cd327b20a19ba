"""A data set: its inputs, its targets and where they come from; and its three parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posthoc.errors import DataError, OptionError
from posthoc.validation import as_rows

__all__ = ["Dataset", "Splits"]

SHARES = (0.8, 0.1)
"""Of training and of validation, where a data set has no sizes of its own; the rest is for testing."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Inputs and targets, one row a point, with the words that a table must say about them."""

    name: str
    source: str
    """Where the rows come from, in plain words; what stands in for what the paper used, if something does."""
    inputs: Tensor  # (N, D) in float32, or images: (N, 3, H, W) in uint8
    targets: Tensor  # (N,): float32, or classes in int64
    columns: tuple[str, ...] = ()
    """What each column of a table is."""
    classes: tuple[str, ...] = ()
    sizes: tuple[int, int, int] | None = None
    """How many rows, in their order, the paper takes for training, validation and testing."""

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets) or self.targets.ndim != 1:
            raise DataError(
                f"Expected one target a row of {self.name}, got {tuple(self.inputs.shape)} and "
                f"{tuple(self.targets.shape)}."
            )
        if not len(self.inputs):
            raise DataError(f"Expected at least one row of {self.name}, found none in {self.source}.")
        if self.columns and self.inputs.shape[1:] != (len(self.columns),):
            raise DataError(
                f"Expected the columns {', '.join(self.columns)} of {self.name}, found {tuple(self.inputs.shape)}."
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: Any) -> Dataset:
        rows = as_rows(rows, len(self))
        return replace(self, inputs=self.inputs[rows], targets=self.targets[rows], sizes=None)

    def shuffled(self, seed: int) -> Dataset:
        """The same rows in an order that follows from the seed."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return replace(self[order], sizes=self.sizes)

    def split(self, sizes: tuple[int, int, int] | None = None) -> Splits:
        """Rows for training, validation and testing, one after the other: so many as asked for, as the paper takes, or
        80, 10 and 10 % of them."""
        train, val, test = sizes or self.sizes or self._shares()
        if min(train, val, test) < 1 or train + val + test > len(self):
            raise OptionError(
                f"Expected sizes of at least 1 that fit into the {len(self)} rows of {self.name}, "
                f"got {train}, {val} and {test}."
            )
        return Splits(self[:train], self[train : train + val], self[train + val : train + val + test])

    def _shares(self) -> tuple[int, int, int]:
        train, val = int(SHARES[0] * len(self)), int(SHARES[1] * len(self))
        return train, val, len(self) - train - val


class Splits(NamedTuple):
    """The three parts of a data set."""

    train: Dataset
    val: Dataset
    test: Dataset

    def standardised(self) -> Splits:
        """Inputs and real targets in units in which those of training have zero mean and unit spread; what is constant
        there keeps its unit."""
        units = {name: location_and_spread(getattr(self.train, name)) for name in ("inputs", "targets")}

        def change(part: Dataset) -> Dataset:
            new = {name: ((getattr(part, name) - a) / b).float() for name, (a, b) in units.items() if b is not None}
            return replace(part, **new)

        return Splits(*map(change, self))


def location_and_spread(values: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Of real numbers; classes and pixels have none."""
    if not values.is_floating_point():
        return None, None
    wide = values.double()
    spread = wide.std(0, unbiased=False)
    return wide.mean(0), torch.where(spread > 0, spread, torch.ones_like(spread))
