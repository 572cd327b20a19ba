"""The law of a network's residuals, learnt with their variance: delays and prices are skewed and have long tails.

A Gaussian would say too little of such residuals, and the variance it learns would follow the few largest. So a small
mixture of normals is learnt with the variance, and at the end a finer one (see `posthoc.predictive.residual_mixture`)
from residuals that the variance was not fitted to, or from so many that it does not matter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from posthoc.likelihoods.base import Gaussian, Likelihood
from posthoc.predictive.base import Predictive
from posthoc.predictive.latent import Latent
from posthoc.predictive.regression import RegressionPredictive
from posthoc.predictive.residual_mixture import NORMAL, Law

__all__ = ["LearntResiduals"]

FEWEST = 200
"""Rows below which residuals are taken to be Gaussian."""
LAWS = 32
"""Up to so many outputs have a law each; more share one."""
SHIFTS = torch.linspace(-1.5, 1.5, 5, dtype=torch.float64)
SPREADS = torch.logspace(-3.0, 4.0, 8, base=2.0, dtype=torch.float64)
"""The normals of the mixture that is learnt with the variance."""


class LearntResiduals(Gaussian):
    """Noise whose law is learnt: first with everything else (at α = 1: elsewhere the energy has no closed form), as a
    mixture of mean 0 and variance 1, until `settle` is given residuals. With a number of `normals` it has the shape of
    one that was settled; one is the Gaussian, and is trained as such."""

    def __init__(self, gaussian: Gaussian, normals: int | None = None) -> None:
        super().__init__(cast(Any, gaussian.noise_form))
        self.log_noise.requires_grad_(gaussian.log_noise.requires_grad)
        self.normals = normals
        self.log_weights: nn.Parameter | None = None
        grid = torch.cartesian_prod(SHIFTS, SPREADS)
        self.register_buffer("grid", grid, persistent=False)
        self.grid: Tensor  # (K, 2), shifts and spreads
        self.weights: Tensor
        self.shifts: Tensor
        self.spreads: Tensor

    @staticmethod
    def suit(likelihood: Likelihood, rows: int) -> TypeGuard[Gaussian]:
        """Whether there are residuals to learn from, and enough of them."""
        return type(likelihood) is Gaussian and rows >= FEWEST

    @classmethod
    def before(cls, gaussian: Gaussian, alpha: float) -> LearntResiduals:
        """The noise of a fit that is to begin."""
        return cls(gaussian, None if alpha == 1.0 else 1)

    def start(self, outputs: Tensor, targets: Tensor) -> None:
        super().start(outputs, targets)
        laws = len(self.scale) if len(self.scale) <= LAWS else 1
        if self.normals is not None:
            self._keep(NORMAL.to(outputs.device).expanded(laws, self.normals))
            return
        shifts, spreads = self.grid.to(outputs.device).T
        near_normal = -2.0 * spreads.log().square() - 2.0 * shifts.square()
        self.log_weights = nn.Parameter(near_normal.repeat(laws, 1))

    @property
    def law(self) -> Law:
        """The law of standardised residuals, of mean 0 and variance 1: settled, or as learnt so far."""
        if self.log_weights is None:
            return Law(self.weights, self.shifts, self.spreads)
        weights, (shifts, spreads) = self.log_weights.softmax(-1), self.grid.T
        law = Law(weights, shifts - (weights * shifts).sum(-1, keepdim=True), spreads.expand(weights.shape))
        return law.divided(law.variance.sqrt())

    def energy(
        self, mean: Tensor, latent: Latent, target: Tensor, alpha: float, generator: torch.Generator | None = None
    ) -> Tensor:
        if self.log_weights is None:
            return super().energy(mean, latent, target, alpha, generator)
        total = self.noise + latent.variance
        return (self.law.log_density((target - mean) / total.sqrt()) - 0.5 * total.log()).sum(-1)

    def predictive(self, outputs: Tensor, latent: Latent, *, covariance: bool = False) -> Predictive:
        gaussian = super().predictive(outputs, latent, covariance=covariance)
        return replace(cast(RegressionPredictive, gaussian), law=self.law)

    @torch.no_grad()
    def settle(self, z: Tensor) -> None:
        """Takes the law from standardised residuals (N, C), what was learnt so far being known before. Their variance
        becomes part of the units, so that the law's is 1."""
        law = Law.of(z.reshape(-1, len(self.law.weights)).cpu(), self.law.to("cpu")).to(z.device)
        scale = law.variance.sqrt()
        self.scale = self.scale * scale
        self._keep(law.divided(scale))

    def _keep(self, law: Law) -> None:
        self.log_weights, self.normals = None, law.weights.shape[1]
        for name in ("weights", "shifts", "spreads"):
            self.register_buffer(name, getattr(law, name).contiguous())
