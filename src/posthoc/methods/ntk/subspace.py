"""The linearised Laplace approximation in K directions of weight space: which directions, G along them, and the prior
variance and noise that go with it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError
from posthoc.likelihoods.base import Likelihood, columns
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.methods.laplace.marginal_likelihood import best_evidence
from posthoc.methods.ntk.ntk import products
from posthoc.predictive.latent import FactorLatent

__all__ = ["Candidate", "curvature", "grid", "leading", "likeliest", "scores", "set_relative_noise"]

NOISES = (1.0, 0.8, 0.6, 0.4, 0.2, 0.1, 0.03, 0.01)
"""Shares of the mean squared residual that are tried as the noise of a regression."""


class Candidate(NamedTuple):
    """A posterior covariance that may be the best, (G + I/σ₀²)⁻¹, by G's eigenvalues and eigenvectors."""

    rows: int  # that G was summed over
    values: Tensor  # (K,), for a noise of one
    vectors: Tensor  # (K, K)
    prior: float  # σ₀²
    noise: float  # in units of the mean squared residual; 1 for classes

    def scales(self) -> Tensor:  # (K,)
        """Standard deviations along the eigenvectors."""
        return (self.values / self.noise + 1.0 / self.prior).rsqrt()

    def factor(self) -> Tensor:  # (K, K)
        """F with F Fᵀ the covariance."""
        return self.vectors * self.scales()


def grid(sums: dict[int, Tensor], priors: Iterable[float], likelihood: Likelihood) -> list[Candidate]:
    """One for each G (by the rows it was summed over), prior variance and noise."""
    noises = NOISES if isinstance(likelihood, Gaussian) else (1.0,)
    pairs, found = list(product(priors, noises)), []
    for rows, g in sums.items():
        values, vectors = eigen(g)
        found += [Candidate(rows, values, vectors, prior, noise) for prior, noise in pairs]
    return found


def leading(j: Tensor, most: int) -> tuple[Tensor, Tensor]:  # (K, P), (K,)
    """Orthonormal directions that explain most of J Jᵀ, and how much: Jᵀ U Λ^(-½) of its leading eigenvectors."""
    values, vectors = torch.linalg.eigh(products(j, j))
    # What is below the rounding of J is no direction of its own.
    kept = values > values[-1].clamp_min(0.0) * len(j) * torch.finfo(j.dtype).eps
    values, vectors = values[kept].flip(0)[:most], vectors[:, kept].flip(1)[:, :most]
    if not len(values):
        raise DataError("Expected outputs that depend on the weights, got gradients that are all zero.")
    return (vectors * values.rsqrt()).mT.to(j.dtype) @ j, values


def curvature(
    phi: Tensor,  # (N, C, K)
    outputs: Tensor,  # (N, ...)
    likelihood: Likelihood,
) -> Tensor:  # (K, K)
    """Σ φᵀ Λ φ over some rows, Λ the Hessian of the negative log-likelihood in the outputs; for a noise of one."""
    if isinstance(likelihood, Gaussian):
        flat = phi.flatten(0, 1)
        return flat.mT @ flat
    assert isinstance(likelihood, Categorical)
    p = (columns(outputs) / likelihood.temperature).softmax(-1)[..., None]
    weighted, mean = (p.sqrt() * phi).flatten(0, 1), (p * phi).sum(1)
    return (weighted.mT @ weighted - mean.mT @ mean) / likelihood.temperature.square()


@torch.no_grad()
def scores(parts: Iterable[tuple[Outputs, Tensor]], likelihood: Likelihood, candidates: list[Candidate]) -> Tensor:
    """The mean negative log-likelihood of rows, given with their φ, under each candidate."""
    totals, n = torch.zeros(len(candidates), dtype=torch.float64), 0
    for part, phi in parts:
        n += len(part)
        along, vectors = phi, None
        for i, candidate in enumerate(candidates):
            if vectors is not candidate.vectors:  # those of one G stand together
                along, vectors = phi @ candidate.vectors, candidate.vectors
            set_relative_noise(likelihood, candidate.noise)
            predictive = likelihood.predictive(part.outputs, FactorLatent(along * candidate.scales()))
            totals[i] -= float(predictive.log_prob(part.targets).double().sum())
    return totals / n


def likeliest(
    rows: int,
    g: Tensor,  # (K, K), for a noise of one
    likelihood: Likelihood,
    mean: Tensor,  # (K,), the network's weights along the directions
    num_data: int,
    prior: float | None,
) -> Candidate:
    """The candidate of greatest evidence, Laplace's, with the weights counted where they may move: along the
    directions."""
    values, vectors = eigen(g)
    count, error = 0.0, None
    if isinstance(likelihood, Gaussian):  # whose residuals have unit mean square
        count = float(num_data * len(likelihood.scale))
        error = values.new_tensor([count])
    precision = 1.0 / prior if prior is not None else None
    noise, found = best_evidence(
        values[None], float(mean.square().sum()), count=count, square_error=error, precision=precision
    )
    return Candidate(rows, values, vectors, 1.0 / found, float(noise) if error is not None else 1.0)


def eigen(g: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(g)
    return values.clamp_min(0.0), vectors


def set_relative_noise(likelihood: Likelihood, noise: float) -> None:
    """Sets σ², in units of the mean squared residual."""
    if isinstance(likelihood, Gaussian):
        likelihood.set_noise(noise * likelihood.scale.square())
