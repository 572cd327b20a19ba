"""A Gaussian over the outputs at each point, around a mean it does not know: what a method gives to its likelihood."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from posthoc.numerics import cholesky


class Latent(ABC):
    """The covariance V(x) of the latent outputs at N points. A subclass gives V, and what it can compute from less."""

    independent: bool = False
    """Whether the outputs at a point are independent, so that `variance` is all of V."""
    has_variance: bool = True
    """False if V is zero everywhere."""

    @abstractmethod
    def covariance(self) -> Tensor:
        """V, (N, C, C)."""

    @property
    def variance(self) -> Tensor:
        """The diagonal of V, (N, C)."""
        return self.covariance().diagonal(dim1=-2, dim2=-1).clamp_min(0.0)  # rounding may leave it a little below zero

    def difference(self, top: Tensor) -> Tensor:
        """Var(f_c - f_top) for every output c, (N, C), given one output for each point, (N,)."""
        which, variance = top[:, None], self.variance
        total = variance + variance.gather(-1, which)
        if not self.independent:
            total = total - 2.0 * self.covariance()[torch.arange(len(top), device=top.device), top]
        return total.clamp_min(0.0).scatter(-1, which, 0.0)

    def perturb(self, noise: Tensor) -> Tensor:
        """Draws of f - mean, (S, N, C), from standard normal noise of that shape; differentiable in V."""
        if not self.independent:
            return correlate(self.covariance(), noise)
        # The lower limit keeps the gradient of the square root finite where the variance is zero.
        return noise * self.variance.clamp_min(1e-300 if noise.dtype == torch.float64 else 1e-30).sqrt()


class IndependentLatent(Latent):
    """Independent outputs with variances (N, C): V is diagonal."""

    independent = True

    def __init__(self, variance: Tensor) -> None:
        self._variance = variance

    @property
    def variance(self) -> Tensor:
        return self._variance

    def covariance(self) -> Tensor:
        return torch.diag_embed(self._variance)


class ZeroLatent(IndependentLatent):
    """No variance around network outputs (N, ...): V = 0."""

    has_variance = False

    def __init__(self, outputs: Tensor) -> None:
        super().__init__(outputs.new_zeros((), dtype=torch.float64).expand(len(outputs), outputs.shape[1:].numel()))


class DenseLatent(Latent):
    """V given as matrices (N, C, C)."""

    def __init__(self, matrices: Tensor) -> None:
        self._matrices = matrices

    def covariance(self) -> Tensor:
        return self._matrices


class FactorLatent(Latent):
    """V = F Fᵀ with factors F (N, C, K)."""

    def __init__(self, factor: Tensor) -> None:
        self.factor = factor

    @property
    def variance(self) -> Tensor:
        return self.factor.square().sum(-1)

    def covariance(self) -> Tensor:
        return self.factor @ self.factor.mT

    def difference(self, top: Tensor) -> Tensor:
        of_top = self.factor[torch.arange(len(top), device=top.device), top]
        return (self.factor - of_top[:, None]).square().sum(-1)


def correlate(covariance: Tensor, noise: Tensor) -> Tensor:
    """Standard normal draws (S, N, C) turned into draws with a covariance (N, C, C), which may be singular."""
    # Outputs may be perfectly correlated, or certain. A ridge of a billionth of the variance, or of what float32
    # resolves of it, makes the Cholesky factor exist without a warning.
    share, covariance = 1e-9 if covariance.dtype == torch.float64 else 1e-6, covariance.double()
    ridge = share * covariance.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True).clamp_min(1e-290)
    factor = cholesky(covariance + torch.diag_embed(ridge.expand(covariance.shape[:-1])), "the covariance of outputs")
    return torch.einsum("ncd,snd->snc", factor, noise.double()).to(noise.dtype)
