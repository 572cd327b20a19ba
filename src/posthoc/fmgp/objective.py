"""What FMGP minimises: the Black-Box alpha energy with its KL, per data point (paper, section 3.5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from posthoc.fmgp.process import Process
from posthoc.kernels import Points
from posthoc.likelihoods.base import Likelihood

__all__ = ["Objective", "TrainingBatch"]


class TrainingBatch(NamedTuple):
    """Some points as the objective sees them: kernel coordinates, and mean and target in training units."""

    points: Points
    mean: Tensor
    target: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> TrainingBatch:
        """The same with every tensor changed."""
        points = {space: change(block) for space, block in self.points.items()}
        return TrainingBatch(points, change(self.mean), change(self.target))


@dataclass(frozen=True)
class Objective:
    """-(1/|B|) Σ_b energy_b + (copies · KL + prior · KL_B) / N: the mini-batch estimate of the loss of one data point.

    `kl_copies` is the number of independent copies the KL counts: that of the outputs when they share one variance.
    `prior` is how much it counts that B differs from the identity.
    """

    process: Process
    likelihood: Likelihood
    alpha: float
    num_data: int
    kl_copies: int = 1
    prior: float = 0.0
    generator: torch.Generator | None = None

    def __call__(self, batch: TrainingBatch) -> Tensor:  # ()
        latent, kl = self.process(batch.points)
        energy = self.likelihood.energy(batch.mean, latent, batch.target, self.alpha, self.generator)
        loss = kl * (self.kl_copies / self.num_data) - energy.mean()
        if self.prior and self.process.coupling is not None:
            loss = loss + self.process.coupling.divergence() * (self.prior / self.num_data)
        return loss
