"""The objective of FMGP: the Black-Box alpha energy with its KL, for one data point (paper, section 3.5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posthoc.fmgp.minibatches import TrainingBatch
from posthoc.fmgp.process import Process
from posthoc.likelihoods.base import Likelihood

__all__ = ["Objective"]


@dataclass(frozen=True)
class Objective:
    """-(1/|B|) Σ_b energy_b + (copies · KL + prior · KL_B) / N: the mini-batch estimate of the loss of one data point.

    Args:
        process: Gives the latent Gaussian and the KL.
        likelihood: Gives the energy.
        alpha: The divergence, from 0 (the ELBO) to 1.
        num_data: N.
        kl_copies: How often the KL counts: once, or for each output where outputs share one variance.
        prior: The weight of KL_B, which holds B near the identity.
        generator: What the energy draws from, if it does.
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
