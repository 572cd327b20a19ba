"""Sources of batches. Batches are read in blocks, and a step has the same batch whenever and wherever it is read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol, Self

import torch
from torch import Tensor

__all__ = ["Block", "Source", "drawn_rows", "tensors"]

PAGE = 64
"""Number of batches drawn from one seed."""


class Block(Protocol):
    """Several batches, stacked: each tensor has one more axis in front."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The block with `change` applied to each tensor."""
        ...


def tensors(block: Block) -> list[Tensor]:
    """The tensors of a block, in the order of its `map`."""
    parts: list[Tensor] = []

    def append(tensor: Tensor) -> Tensor:
        parts.append(tensor)
        return tensor

    block.map(append)
    return parts


class Source(Protocol):
    """Batches by step, so that a run can be resumed."""

    ahead: int
    """The largest number of batches to read at once."""
    fixed: bool
    """Whether all batches have the same shapes."""
    weight: float
    """The share of each batch that this process has; 1 if it is alone."""

    def block(self, step: int, count: int) -> Block:
        """The batches of `count` steps, from `step` on."""
        ...


def drawn_rows(n: int, size: int, seed: int, step: int, count: int) -> Tensor:
    """Rows for the batches of some steps, drawn with replacement.

    The rows of a step depend on the seed and the step alone, so that a resumed run draws the same ones.

    Args:
        n: number of rows to draw from.
        size: rows in a batch.
        seed: the seed.
        step: the first step.
        count: number of steps.

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
