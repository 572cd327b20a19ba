"""The objective of FMGP: the Black-Box alpha energy with its KL, for one data point (paper, section 3.5)."""

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
    """Some points: kernel coordinates, and mean and target in the units of training."""

    points: Points
    mean: Tensor
    target: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> TrainingBatch:
        """The batch with `change` applied to each tensor."""
        points = {space: change(block) for space, block in self.points.items()}
        return TrainingBatch(points, change(self.mean), change(self.target))


@dataclass(frozen=True)
class Objective:
    """-(1/|B|) Σ_b energy_b + (copies · KL + prior · KL_B) / N: the mini-batch estimate of the loss of one data point.

    Args:
        process: gives the latent Gaussian and the KL.
        likelihood: gives the energy.
        alpha: the divergence, from 0 (the ELBO) to 1.
        num_data: N.
        kl_copies: how often the KL counts: once, or for each output where outputs share one variance.
        prior: the weight of KL_B, which holds B near the identity.
        generator: what the energy draws from, if it does.
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
