"""Points of the data: their kernel coordinates, and the mini-batches that a process is trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError, OptionError
from posthoc.fmgp.ood import OutOfDistribution
from posthoc.kernels import Kernel, Points
from posthoc.likelihoods.base import Likelihood
from posthoc.training import Ranks

MAX_BATCHES = 50
"""Batches that are read at once, at most."""
MAX_VALUES = 2**20
"""Numbers that are read at once, at most (8 MB of float64); eight times as many on a GPU, which waits for each read."""
PAGE = 64
"""Number of batches drawn from one seed."""


class Coordinates(nn.Module):
    """The blocks that a kernel reads and their units, as learned from the data of the fit.

    Args:
        widths: The number of columns of each block.
        default: The block that a kernel reads where it names none.
    """

    def __init__(self, widths: Mapping[str, int], default: str) -> None:
        super().__init__()
        self.default = default
        self.spaces = sorted(widths)
        for space, width in widths.items():
            self.register_buffer(f"{space}_location", torch.zeros(width, dtype=torch.float64))
            self.register_buffer(f"{space}_scale", torch.ones(width, dtype=torch.float64))

    @classmethod
    def of(cls, outputs: Outputs, kernel: Kernel, *, standardize: bool) -> Coordinates:
        """The default block is the features if there are any, else the inputs, else the outputs themselves. Units are
        those of the rows given, which may be some of many."""
        blocks = {space: outputs.space(space) for space in ("features", "inputs", "outputs")}
        present = {space: block for space, block in blocks.items() if block is not None}
        default = next(iter(present))
        wanted = {space or default for space in kernel.spaces() or {None}}
        if missing := wanted - set(present):
            raise DataError(
                f"Expected {', '.join(sorted(missing))} for the kernel to look at, got only {', '.join(present)}. "
                f'Give them, or use a kernel on="{default}".'
            )
        coordinates = cls({space: present[space].shape[1] for space in wanted}, default).to(outputs.outputs.device)
        if standardize:
            for space in wanted:
                coordinates.set_units(space, present[space])
        return coordinates

    def set_units(self, space: str, block: Tensor) -> None:
        """Takes mean and standard deviation of a block as its origin and unit; constant columns keep their unit."""
        parts = block.split(4096)  # in float64, all of it at once might not fit
        location = sum(part.double().sum(0) for part in parts) / len(block)
        spread = (sum((part.double() - location).square().sum(0) for part in parts) / len(block)).sqrt()
        largest = torch.stack([part.double().abs().amax(0) for part in parts]).amax(0)
        self.get_buffer(f"{space}_location").copy_(location)
        self.get_buffer(f"{space}_scale").copy_(torch.where(spread > 1e-12 * largest, spread, 1.0))

    @property
    def device(self) -> torch.device:
        """Where the kernel is."""
        return self.get_buffer(f"{self.spaces[0]}_location").device

    def width(self, space: str) -> int:
        """The number of columns of a block."""
        return len(self.get_buffer(f"{space}_location"))

    def standardize(self, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Raw coordinates in the kernel's units, float64."""
        standard = {}
        for space, block in blocks.items():
            location, scale = getattr(self, f"{space}_location"), getattr(self, f"{space}_scale")
            standard[space] = (block.to(location.device, torch.float64) - location) / scale
        return standard

    def points(self, outputs: Outputs) -> dict[str, Tensor]:
        """The coordinates of some rows."""
        blocks = {}
        for space in self.spaces:
            block = outputs.space(space)
            if block is None:
                raise DataError(f"Expected {space}, which the kernel looks at, got outputs without them.")
            if block.shape[1] != self.width(space):
                raise DataError(f"Expected {space} of width {self.width(space)} as in fit, got {block.shape[1]}.")
            blocks[space] = block
        return self.standardize(blocks)


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
