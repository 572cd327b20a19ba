"""Batches of training points: rows of `Outputs`, in the units of the kernel and of the likelihood."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posthoc.collect.outputs import Outputs
from posthoc.errors import OptionError
from posthoc.fmgp.coordinates import Coordinates
from posthoc.fmgp.ood import OutOfDistribution
from posthoc.kernels import Points
from posthoc.likelihoods.base import Likelihood
from posthoc.training import Ranks

__all__ = ["DrawnBatches", "FreshBatches", "PointView", "TrainingBatch", "drawn_rows"]

MAX_BATCHES = 50
"""Batches that are read at once, at most."""
MAX_VALUES = 2**20
"""Numbers that are read at once, at most (8 MB of float64); eight times as many on a GPU, which waits for each read."""
PAGE = 64
"""Number of batches drawn from one seed."""


class TrainingBatch(NamedTuple):
    """Some points: kernel coordinates, and mean and target in the units of training."""

    points: Points
    mean: Tensor
    target: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> TrainingBatch:
        """The batch with `change` applied to each tensor."""
        points = {space: change(block) for space, block in self.points.items()}
        return TrainingBatch(points, change(self.mean), change(self.target))


class PointView:
    """Outputs as the training loop sees them: wherever they are kept, a few rows at a time, on the head's device.

    Args:
        outputs: The rows.
        coordinates: The units of the kernel.
        ood: What the scale of the logits follows, if anything.
    """

    def __init__(self, outputs: Outputs, coordinates: Coordinates, ood: OutOfDistribution | None = None) -> None:
        self.outputs, self.coordinates, self.ood = outputs, coordinates, ood

    def __len__(self) -> int:
        return len(self.outputs)

    def points(self, rows: Any) -> dict[str, Tensor]:
        """The kernel's coordinates of some rows, in float64."""
        return self.coordinates.points(self.outputs[rows])

    def sample(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        """The coordinates of up to n rows drawn at random."""
        return self.points(torch.randint(len(self), (n,), generator=generator) if n < len(self) else slice(None))

    def batch(self, likelihood: Likelihood, rows: Outputs) -> TrainingBatch:
        """Some rows in the units of training."""
        rows = rows.to(self.coordinates.device)
        assert rows.targets is not None
        mean, target = likelihood.standardize(rows.outputs, rows.targets)
        if self.ood is not None and rows.features is not None:
            mean = mean / self.ood.logit_scale(self.ood.distance(rows.features))
        return TrainingBatch(self.coordinates.points(rows), mean, target)


class DrawnBatches:
    """Batches of rows drawn with replacement, many read and standardized at once (one by one that would take a tenth
    of the time of a step); or all rows, where there are no more than a batch holds.

    Where the rows are in a file or in the host's memory, those of the next block are read while a GPU works."""

    fixed = True

    def __init__(self, view: PointView, likelihood: Likelihood, size: int, seed: int, ranks: Ranks) -> None:
        self.view, self.likelihood, self.seed = view, likelihood, seed
        self.size = min(size, len(view))
        if self.size < ranks.count:
            raise OptionError(f"Expected batches of at least one row a process, got {self.size} for {ranks.count}.")
        self.part = ranks.part(self.size)
        self.weight = (self.part.stop - self.part.start) / self.size
        coordinates = view.coordinates
        width = view.outputs.outputs[0].numel() + sum(map(coordinates.width, coordinates.spaces))
        most = MAX_VALUES if coordinates.device.type == "cpu" else 8 * MAX_VALUES
        self.ahead = max(1, min(MAX_BATCHES, most // (self.size * width)))
        self.everything: TrainingBatch | None = None
        self.reader = ThreadPoolExecutor(1) if view.outputs.outputs.device != coordinates.device else None
        self.next: dict[tuple[int, int], Future[Outputs]] = {}

    def block(self, step: int, count: int) -> TrainingBatch:
        """The batches of `count` steps, from `step` on."""
        if self.size == len(self.view):
            if self.everything is None:
                self.everything = self.view.batch(self.likelihood, self.view.outputs[self.part])
            return self.everything.map(lambda t: t.expand(count, *t.shape))
        ready = self.next.pop((step, count), None)
        rows = ready.result() if ready is not None else self._read(step, count)
        if self.reader is not None:
            self.next = {(step + count, count): self.reader.submit(self._read, step + count, count)}
        return self.view.batch(self.likelihood, rows).map(lambda t: t.unflatten(0, (count, -1)))

    def _read(self, step: int, count: int) -> Outputs:
        rows = drawn_rows(len(self.view), self.size, self.seed, step, count)[:, self.part].reshape(-1)
        part = self.view.outputs[rows.to(self.view.outputs.outputs.device)]
        return part.pinned() if self.reader is not None else part


class FreshBatches:
    """Batches that are made as they are asked for, of whatever size they come."""

    ahead, fixed, weight = 1, False, 1.0

    def __init__(self, batches: Iterator[TrainingBatch]) -> None:
        self.batches = batches

    def block(self, step: int, count: int) -> TrainingBatch:
        """The next batch, as a block of one."""
        return next(self.batches).map(lambda t: t[None])


def drawn_rows(n: int, size: int, seed: int, step: int, count: int) -> Tensor:
    """Rows for the batches of some steps, drawn with replacement.

    The rows of a step depend on the seed and the step alone, so that a resumed run draws the same ones.

    Args:
        n: Number of rows to draw from.
        size: Rows in a batch.
        seed: The seed.
        step: The first step.
        count: Number of steps.

    Returns:
        Row numbers (count, size).
    """
    pages = []
    for page in range(step // PAGE, (step + count - 1) // PAGE + 1):
        # The generator uses 32 bits of its seed: a hash mixes seed and page into them.
        mixed = hashlib.sha256(f"{seed}/{page}".encode()).digest()[:4]
        generator = torch.Generator().manual_seed(int.from_bytes(mixed, "big"))
        pages.append(torch.randint(n, (PAGE, size), generator=generator))
    first = step % PAGE
    return torch.cat(pages)[first : first + count]
