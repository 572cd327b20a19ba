"""Kernel coordinates: which blocks of the outputs a kernel reads, and their units."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError
from posthoc.kernels import Kernel

__all__ = ["Coordinates"]


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
        return self.standardize(blocks)
