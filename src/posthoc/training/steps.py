"""Steps, one after another."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from posthoc.training.adam import Flat
from posthoc.training.batches import Block
from posthoc.training.distributed import Ranks

__all__ = ["PlainSteps", "Steps"]


class Steps(Protocol):
    """A way to take the steps of a block."""

    def run(self, block: Block, lrs: list[float]) -> list[float]:
        """Takes one step for each learning rate, and says the losses."""
        ...


class PlainSteps:
    """Steps as anyone would take them: loss, gradient, the other ranks' gradients, Adam."""

    def __init__(self, objective: Callable[[Any], Tensor], flat: Flat, ranks: Ranks, weight: float) -> None:
        self.objective, self.flat, self.ranks, self.weight = objective, flat, ranks, weight

    def run(self, block: Block, lrs: list[float]) -> list[float]:
        losses: list[Tensor] = []
        for i, lr in enumerate(lrs):
            losses.append(self.step(block.map(lambda t, i=i: t[i]), lr))  # type: ignore[misc]
            # On the CPU it costs nothing to stop at once; elsewhere, and among others, the block is finished first.
            if self.ranks.alone and not losses[-1].is_cuda and not math.isfinite(losses[-1].item()):
                break
        total = torch.stack(losses)
        self.ranks.sum([total], self.weight)
        return total.tolist()

    def step(self, batch: Block, lr: float | Tensor, gradient: Callable[[Block], Tensor] | None = None) -> Tensor:
        """One step, by another way to the gradient if one is given; its loss stays on the device."""
        loss = (gradient or self.gradient)(batch)
        self.ranks.sum(self.flat.grads, self.weight)
        self.flat.step(lr)
        return loss

    def gradient(self, batch: Block) -> Tensor:
        """The loss at a batch, whose gradient is then among the parameters' own."""
        self.flat.clear()
        loss = self.objective(batch)
        loss.backward()
        return loss.detach()
