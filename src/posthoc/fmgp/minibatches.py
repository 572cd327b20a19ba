"""Batches of training points: rows of `Outputs`, in the units of the kernel and of the likelihood."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from posthoc.collect.outputs import Outputs
from posthoc.errors import OptionError
from posthoc.fmgp.coordinates import Coordinates
from posthoc.fmgp.objective import TrainingBatch
from posthoc.fmgp.ood import OutOfDistribution
from posthoc.likelihoods.base import Likelihood
from posthoc.training import Ranks, drawn_rows, slice_of

__all__ = ["DrawnBatches", "FreshBatches", "PointView"]

MAX_BATCHES = 50
"""Batches that are read at once, at most."""
MAX_VALUES = 2**20
"""Numbers that are read at once, at most (8 MB of float64); eight times as many on a GPU, which waits for each read."""


class PointView:
    """Outputs as the training loop sees them: wherever they are kept, a few rows at a time, on the head's device."""

    def __init__(self, outputs: Outputs, coordinates: Coordinates, ood: OutOfDistribution | None = None) -> None:
        self.outputs, self.coordinates, self.ood = outputs, coordinates, ood

    def __len__(self) -> int:
        return len(self.outputs)

    def points(self, rows: Any) -> dict[str, Tensor]:
        return self.coordinates.points(self.outputs[rows])

    def sample(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Up to n rows drawn at random."""
        if n >= len(self):
            return self.points(slice(None))
        return self.points(torch.randint(len(self), (n,), generator=generator))

    def batch(self, likelihood: Likelihood, rows: Any) -> TrainingBatch:
        part = self.outputs[rows].to(self.coordinates.device)
        assert part.targets is not None
        mean, target = likelihood.standardize(part.outputs, part.targets)
        if self.ood is not None and part.features is not None:
            mean = mean / self.ood.logit_scale(self.ood.distance(part.features))
        return TrainingBatch(self.coordinates.points(part), mean, target)

    def of(self, outputs: Outputs) -> PointView:
        """Other rows, seen in the same way."""
        return PointView(outputs, self.coordinates, self.ood)


class DrawnBatches:
    """Batches of rows drawn with replacement, many read and standardised at once (one by one that would take a tenth
    of the time of a step); or all rows, where there are no more than a batch holds."""

    fixed = True

    def __init__(self, view: PointView, likelihood: Likelihood, size: int, seed: int, ranks: Ranks) -> None:
        self.view, self.likelihood, self.seed = view, likelihood, seed
        self.size = min(size, len(view))
        if self.size < ranks.count:
            raise OptionError(f"Expected batches of at least one row a process, got {self.size} for {ranks.count}.")
        self.part = slice_of(self.size, ranks)
        self.weight = (self.part.stop - self.part.start) / self.size
        coordinates = view.coordinates
        width = view.outputs.outputs[0].numel() + sum(map(coordinates.width, coordinates.spaces))
        most = MAX_VALUES if coordinates.device.type == "cpu" else 8 * MAX_VALUES
        self.ahead = max(1, min(MAX_BATCHES, most // (self.size * width)))
        self.everything: TrainingBatch | None = None
        # A GPU need not wait for rows that are read from a file or from the host's memory.
        away = view.outputs.outputs.device != coordinates.device
        self.reader = Prefetch(self._read) if away else None

    def block(self, step: int, count: int) -> TrainingBatch:
        if self.size == len(self.view):
            if self.everything is None:
                self.everything = self.view.batch(self.likelihood, self.part)
            return self.everything.map(lambda t: t.expand(count, *t.shape))
        rows = self.reader(step, count) if self.reader else self._read(step, count)
        block = self.view.of(rows).batch(self.likelihood, slice(None))
        return block.map(lambda t: t.unflatten(0, (count, -1)))

    def _read(self, step: int, count: int) -> Outputs:
        rows = drawn_rows(len(self.view), self.size, self.seed, step, count)[:, self.part].reshape(-1)
        part = self.view.outputs[rows.to(self.view.outputs.outputs.device)]
        return part.pinned() if self.reader else part


class FreshBatches:
    """Batches that are made as they are asked for, of whatever size they come."""

    ahead, fixed, weight = 1, False, 1.0

    def __init__(self, batches: Iterator[TrainingBatch]) -> None:
        self.batches = batches

    def block(self, step: int, count: int) -> TrainingBatch:
        return next(self.batches).map(lambda t: t[None])


class Prefetch:
    """Calls a function of (step, count) for the next block while the present one is worked on."""

    def __init__(self, read: Callable[[int, int], Outputs]) -> None:
        self.read, self.pool = read, ThreadPoolExecutor(1)
        self.next: tuple[tuple[int, int], Future[Outputs]] | None = None

    def __call__(self, step: int, count: int) -> Outputs:
        ready = self.next is not None and self.next[0] == (step, count)
        result = self.next[1].result() if ready and self.next else self.read(step, count)
        follows = (step + count, count)
        self.next = (follows, self.pool.submit(self.read, *follows))
        return result
