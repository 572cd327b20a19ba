"""A data set: inputs, targets and their source; and its split into three parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posthoc.collect.outputs import as_rows
from posthoc.errors import DataError, OptionError

__all__ = ["Dataset", "Splits"]

TRAIN_SHARE, VAL_SHARE = 0.8, 0.1
"""Shares of training and validation rows where a data set has no sizes of its own; the rest is for testing."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Inputs and targets, one row a point.

    Attributes:
        name: The name for tables.
        source: Where the rows come from, and which original they replace, if any.
        inputs: (N, D) in float32, or images (N, 3, H, W) in uint8.
        targets: (N,) in float32, or classes in int64.
        columns: Names of the columns of a table.
        classes: Names of the classes.
        sizes: Numbers of training, validation and test rows in the paper, in this order of the rows.
    """

    name: str
    source: str
    inputs: Tensor
    targets: Tensor
    columns: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    sizes: tuple[int, int, int] | None = None

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
        """The same rows in an order that the seed determines."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return replace(self[order], sizes=self.sizes)

    def split(self, sizes: tuple[int, int, int] | None = None) -> Splits:
        """Consecutive rows for training, validation and testing.

        Args:
            sizes: Their numbers. None: those of the paper, else 80, 10 and 10 % of the rows.
        """
        train, val, test = sizes or self.sizes or self._default_sizes()
        if min(train, val, test) < 1 or train + val + test > len(self):
            raise OptionError(
                f"Expected sizes of at least 1 that fit into the {len(self)} rows of {self.name}, "
                f"got {train}, {val} and {test}."
            )
        return Splits(self[:train], self[train : train + val], self[train + val : train + val + test])

    def _default_sizes(self) -> tuple[int, int, int]:
        train, val = int(TRAIN_SHARE * len(self)), int(VAL_SHARE * len(self))
        return train, val, len(self) - train - val


class Splits(NamedTuple):
    """The three parts of a data set."""

    train: Dataset
    val: Dataset
    test: Dataset

    def standardized(self) -> Splits:
        """The parts with inputs and real targets scaled to zero mean and unit deviation over the training rows.

        Constant columns are only shifted. Classes and pixels stay as they are.
        """
        units = {
            name: mean_and_deviation(values)
            for name in ("inputs", "targets")
            if (values := getattr(self.train, name)).is_floating_point()
        }

        def scaled(part: Dataset) -> Dataset:
            changes = {name: ((getattr(part, name) - mean) / std).float() for name, (mean, std) in units.items()}
            return replace(part, **changes)

        return Splits(*map(scaled, self))


def mean_and_deviation(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over rows, in float64; a deviation of zero becomes one."""
    std = values.double().std(0, unbiased=False)
    return values.double().mean(0), torch.where(std > 0, std, torch.ones_like(std))
