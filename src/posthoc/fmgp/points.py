"""Kernel coordinates: which blocks of the outputs a kernel reads, in which units, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from posthoc.errors import DataError
from posthoc.fmgp.objective import TrainingBatch
from posthoc.kernels import Kernel
from posthoc.likelihoods import Likelihood
from posthoc.outputs import Outputs

__all__ = ["Coordinates", "PointView"]

AHEAD = 50
"""At most so many batches are read at once,"""
VALUES_AHEAD = 2**20
"""and at most so many numbers: 8 MB of float64."""


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
        """The default block is the features if there are any, else the inputs, else the outputs themselves."""
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

    def width(self, space: str) -> int:
        return len(self.get_buffer(f"{space}_location"))

    def standardise(self, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Raw coordinates in the kernel's units, float64."""
        standard = {}
        for space, block in blocks.items():
            location, scale = self.get_buffer(f"{space}_location"), self.get_buffer(f"{space}_scale")
            standard[space] = (block.to(location) - location) / scale
        return standard

    def points(self, outputs: Outputs, rows: Any = slice(None)) -> dict[str, Tensor]:
        """The coordinates of some rows."""
        blocks = {}
        for space in self.spaces:
            block = outputs.space(space)
            if block is None:
                raise DataError(f"Expected {space}, which the kernel looks at, got outputs without them.")
            if block.shape[1] != self.width(space):
                raise DataError(f"Expected {space} of width {self.width(space)} as in fit, got {block.shape[1]}.")
            blocks[space] = block[rows]
        return self.standardise(blocks)


class PointView:
    """Outputs as the training loop sees them."""

    def __init__(self, outputs: Outputs, coordinates: Coordinates) -> None:
        self.outputs, self.coordinates = outputs, coordinates

    def __len__(self) -> int:
        return len(self.outputs)

    def points(self, rows: Any) -> dict[str, Tensor]:
        return self.coordinates.points(self.outputs, rows)

    def sample(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Up to n rows drawn at random."""
        if n >= len(self):
            return self.points(slice(None))
        return self.points(torch.randint(len(self), (n,), generator=generator))

    def batch(self, likelihood: Likelihood, rows: Any) -> TrainingBatch:
        assert self.outputs.targets is not None
        mean, target = likelihood.standardise(self.outputs.outputs[rows], self.outputs.targets[rows])
        return TrainingBatch(self.points(rows), mean, target)

    def batches(self, likelihood: Likelihood, size: int, generator: torch.Generator) -> Iterator[TrainingBatch]:
        """Endless batches of rows drawn with replacement (a step costs the same whatever N), or all rows if fewer."""
        if size >= len(self):
            everything = self.batch(likelihood, slice(None))
            while True:
                yield everything
        # Many batches are read and standardised at once, and then handed out: one by one, that would take a tenth of
        # the time of a step.
        width = self.outputs.outputs[0].numel() + sum(map(self.coordinates.width, self.coordinates.spaces))
        ahead = max(1, min(AHEAD, VALUES_AHEAD // (size * width)))
        while True:
            rows = torch.randint(len(self), (ahead * size,), generator=generator)
            block = self.batch(likelihood, rows.to(self.outputs.outputs.device))
            for start in range(0, ahead * size, size):
                part = slice(start, start + size)
                points = {space: values[part] for space, values in block.points.items()}
                yield TrainingBatch(points, block.mean[part], block.target[part])


def location_and_scale(block: Tensor) -> tuple[Tensor, Tensor]:
    """Where coordinates lie and how far they spread; constant ones keep their unit."""
    parts = block.split(65536)  # in float64, all of it at once might not fit
    location = sum(part.double().sum(0) for part in parts) / len(block)
    spread = (sum((part.double() - location).square().sum(0) for part in parts) / len(block)).sqrt()
    largest = block.abs().amax(0).double()
    return location, torch.where(spread > 1e-12 * largest, spread, torch.ones_like(spread))
