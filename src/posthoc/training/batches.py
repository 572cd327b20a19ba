"""Where batches come from: blocks of them, read or drawn ahead, the same for the same step whoever asks and when."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol, Self

import torch
from torch import Tensor

__all__ = ["Block", "Source", "drawn_rows", "tensors"]

PAGE = 64
"""Batches drawn from one seed."""


class Block(Protocol):
    """Some batches, stacked: every tensor in it has one more axis in front. A batch is what `map` makes of it."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same with every tensor changed."""
        ...


def tensors(block: Block) -> list[Tensor]:
    """The tensors of a block, in the order of its `map`."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    block.map(note)
    return found


class Source(Protocol):
    """Batches by step, so that a run can go on where another one stopped."""

    ahead: int
    """At most so many batches are asked for at once."""
    fixed: bool
    """Whether all batches have the same shapes."""
    weight: float
    """The share of each batch that this process has, 1 where it is alone."""

    def block(self, step: int, count: int) -> Block:
        """The batches of the steps from `step` on."""
        ...


def drawn_rows(n: int, size: int, seed: int, step: int, count: int) -> Tensor:  # (count, size)
    """Rows below n for the batches of some steps, drawn with replacement: a step costs the same whatever n is. The
    rows of a step depend on the seed and the step alone, so nothing need be remembered in order to go on."""
    pages = []
    for page in range(step // PAGE, (step + count - 1) // PAGE + 1):
        # A hash, since the generator looks at 32 bits of its seed, which seed and page have to share.
        mixed = hashlib.sha256(f"{seed}/{page}".encode()).digest()[:4]
        generator = torch.Generator().manual_seed(int.from_bytes(mixed, "big"))
        pages.append(torch.randint(n, (PAGE, size), generator=generator))
    first = step % PAGE
    return torch.cat(pages)[first : first + count]
