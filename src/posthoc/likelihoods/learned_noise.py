"""`MixtureNoise`: noise whose distribution is learned with the variance, as residuals are often skewed with long tails.

A Gaussian would follow the few largest residuals. So a coarse mixture of normals is learned with the variance, and
after training a finer one (see `posthoc.predictive.residual_mixture`) from residuals of held-out rows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from posthoc.likelihoods.gaussian import Gaussian
from posthoc.predictive.latent import Latent
from posthoc.predictive.regression import RegressionPredictive
from posthoc.predictive.residual_mixture import NORMAL, ResidualMixture

MAX_MIXTURES = 32
"""With up to this many outputs each has a mixture of its own; more outputs share one."""
SHIFTS = torch.linspace(-1.5, 1.5, 5, dtype=torch.float64)
"""Means of the normals of the coarse mixture, in units of z."""
SPREADS = torch.logspace(-3.0, 4.0, 8, base=2.0, dtype=torch.float64)
"""Standard deviations of the normals of the coarse mixture, in units of z."""


class MixtureNoise(Gaussian):
    """Noise that is a mixture of normals with mean 0 and variance 1, times σ.

    The weights of a coarse mixture are learned with the other parameters (only at α = 1, since the energy has no closed
    form elsewhere). `set_residuals` then replaces it by one that is fitted to residuals.

    Args:
        gaussian: The Gaussian noise it replaces.
        normals: The number of normals of a fitted mixture, to load one; 1 is Gaussian noise. None: learn the weights.
    """

    def __init__(self, gaussian: Gaussian, normals: int | None = None) -> None:
        super().__init__(gaussian.noise_form)
        self.log_noise.requires_grad_(gaussian.log_noise.requires_grad)
        self.normals = normals
        self.log_weights: nn.Parameter | None = None
        grid = torch.cartesian_prod(SHIFTS, SPREADS)
        self.register_buffer("grid", grid, persistent=False)
        self.grid: Tensor  # (K, 2), shifts and spreads
        self.weights: Tensor
        self.shifts: Tensor
        self.spreads: Tensor

    def initialize(self, outputs: Tensor, targets: Tensor) -> None:
        super().initialize(outputs, targets)
        mixtures = len(self.scale) if len(self.scale) <= MAX_MIXTURES else 1
        if self.normals is not None:
            self._keep(NORMAL.to(outputs.device).expanded(mixtures, self.normals))
            return
        shifts, spreads = self.grid.to(outputs.device).T
        near_normal = -2.0 * spreads.log().square() - 2.0 * shifts.square()
        self.log_weights = nn.Parameter(near_normal.repeat(mixtures, 1))

    @property
    def residuals(self) -> ResidualMixture:
        """The distribution of the standardized residuals, with mean 0 and variance 1."""
        if self.log_weights is None:
            return ResidualMixture(self.weights, self.shifts, self.spreads)
        weights, (shifts, spreads) = self.log_weights.softmax(-1), self.grid.T
        centered = shifts - (weights * shifts).sum(-1, keepdim=True)
        mixture = ResidualMixture(weights, centered, spreads.expand(weights.shape))
        return mixture.divided(mixture.variance.sqrt())

    def energy(self, mean: Tensor, latent: Latent, target: Tensor, alpha: float, generator: Any = None) -> Tensor:
        if self.log_weights is None:
            return super().energy(mean, latent, target, alpha, generator)
        # The standardized residual z has mean 0 and variance 1 where u = z √v + m has the normals of the grid. With m
        # and v the mixture's mean and variance, that is `residuals.log_density` with fewer operations.
        log_weights, (shifts, spreads) = self.log_weights.log_softmax(-1), self.grid.T
        weights = log_weights.exp()
        center = weights @ shifts
        ratio = (weights @ (shifts.square() + spreads.square()) - center.square()) / (self.noise + latent.variance)
        u = (target - mean) * ratio.sqrt() + center
        fit = -0.5 * ((u[..., None] - shifts) / spreads).square()  # (N, C, K)
        log_normals = fit + (log_weights - spreads.log() - 0.5 * math.log(2.0 * math.pi))
        return (log_normals.logsumexp(-1) + 0.5 * ratio.log()).sum(-1)

    def predictive(self, outputs: Tensor, latent: Latent, *, covariance: bool = False) -> RegressionPredictive:
        return replace(super().predictive(outputs, latent, covariance=covariance), residuals=self.residuals)

    @torch.no_grad()
    def set_residuals(self, z: Tensor) -> None:
        """Fits the mixture to standardized residuals (N, C), with the coarse mixture as the prior. Their variance
        becomes a part of the units, so that the mixture has variance 1."""
        prior = self.residuals.to("cpu")
        mixture = ResidualMixture.fit(z.reshape(-1, len(prior.weights)).cpu(), prior).to(z.device)
        scale = mixture.variance.sqrt()
        self.scale = self.scale * scale
        self._keep(mixture.divided(scale))

    def _keep(self, mixture: ResidualMixture) -> None:
        self.log_weights, self.normals = None, mixture.weights.shape[1]
        for name in ("weights", "shifts", "spreads"):
            self.register_buffer(name, getattr(mixture, name).contiguous())
