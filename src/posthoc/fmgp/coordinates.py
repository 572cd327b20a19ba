"""Kernel coordinates: which blocks of the outputs a kernel reads, in which units, a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError, OptionError
from posthoc.fmgp.objective import TrainingBatch
from posthoc.fmgp.ood import Novelty
from posthoc.kernels.base import Kernel
from posthoc.likelihoods.base import Likelihood
from posthoc.training import Ranks, drawn_rows, slice_of

__all__ = ["Coordinates", "DrawnBatches", "FreshBatches", "PointView"]

AHEAD = 50
"""At most so many batches are read at once,"""
VALUES_AHEAD = 2**20
"""and at most so many numbers (8 MB of float64), or eight times as many on a GPU, where a block costs a wait."""


class Coordinates(nn.Module):
    """The blocks a kernel reads and their units, as learnt from the data of the fit."""

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
        present = [space for space in ("features", "inputs", "outputs") if outputs.space(space) is not None]
        wanted = {space or present[0] for space in kernel.spaces() or {None}}
        if missing := wanted - set(present):
            raise DataError(
                f"Expected {', '.join(sorted(missing))} for the kernel to look at, got only {', '.join(present)}. "
                f'Give them, or use a kernel on="{present[0]}".'
            )
        blocks = {space: outputs.space(space) for space in wanted}
        coordinates = cls({s: b.shape[1] for s, b in blocks.items() if b is not None}, present[0])
        coordinates.to(outputs.outputs.device)
        for space, block in blocks.items():
            if standardize and block is not None:
                location, scale = location_and_scale(block)
                coordinates.get_buffer(f"{space}_location").copy_(location)
                coordinates.get_buffer(f"{space}_scale").copy_(scale)
        return coordinates

    @property
    def device(self) -> torch.device:
        """Where the kernel is."""
        return self.get_buffer(f"{self.spaces[0]}_location").device

    def width(self, space: str) -> int:
        return len(self.get_buffer(f"{space}_location"))

    def standardise(self, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Raw coordinates in the kernel's units, float64."""
        standard = {}
        for space, block in blocks.items():
            location, scale = self.get_buffer(f"{space}_location"), self.get_buffer(f"{space}_scale")
            standard[space] = (block.to(location.device).double() - location) / scale
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
        return self.standardise(blocks)


class PointView:
    """Outputs as the training loop sees them: wherever they are kept, a few rows at a time, on the head's device."""

    def __init__(self, outputs: Outputs, coordinates: Coordinates, novelty: Novelty | None = None) -> None:
        self.outputs, self.coordinates, self.novelty = outputs, coordinates, novelty

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
        mean, target = likelihood.standardise(part.outputs, part.targets)
        if self.novelty is not None and part.features is not None:
            mean = mean / self.novelty.stretch(self.novelty.distance(part.features))
        return TrainingBatch(self.coordinates.points(part), mean, target)

    def of(self, outputs: Outputs) -> PointView:
        """Other rows, seen in the same way."""
        return PointView(outputs, self.coordinates, self.novelty)


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
        most = VALUES_AHEAD if coordinates.device.type == "cpu" else 8 * VALUES_AHEAD
        self.ahead = max(1, min(AHEAD, most // (self.size * width)))
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


def location_and_scale(block: Tensor) -> tuple[Tensor, Tensor]:
    """Where coordinates lie and how far they spread; constant ones keep their unit."""
    parts = block.split(4096)  # in float64, all of it at once might not fit
    location = sum(part.double().sum(0) for part in parts) / len(block)
    spread = (sum((part.double() - location).square().sum(0) for part in parts) / len(block)).sqrt()
    largest = torch.stack([part.double().abs().amax(0) for part in parts]).amax(0)
    return location, torch.where(spread > 1e-12 * largest, spread, torch.ones_like(spread))
