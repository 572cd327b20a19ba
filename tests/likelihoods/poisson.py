"""Counts: y ~ Poisson(exp f), with the energy by Gauss-Hermite quadrature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from posthoc.errors import DataError
from posthoc.likelihoods.base import Likelihood, columns
from posthoc.likelihoods.registry import register
from posthoc.predictive.base import LatentGaussian, Predictive, UncertaintyScore, row_means
from posthoc.predictive.latent import Latent
from posthoc.validation import regression_targets

NODES, WEIGHTS = (torch.as_tensor(values) for values in np.polynomial.hermite_e.hermegauss(20))


def quadrature(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes f (Q, N, C) of N(mean, variance), and the logarithms of their weights (Q, 1, 1)."""
    std = variance.clamp_min(1e-300).sqrt()
    nodes, weights = NODES.to(mean.device)[:, None, None], (WEIGHTS / WEIGHTS.sum()).to(mean.device)
    return mean + std * nodes, weights.log()[:, None, None]


def log_poisson(y: Tensor, f: Tensor) -> Tensor:
    return y * f - f.exp() - torch.lgamma(y + 1.0)


@dataclass(frozen=True, eq=False, repr=False)
class PoissonPredictive(Predictive):
    """Counts at each of N points, a mixture of Poisson distributions; outputs are log rates."""

    task: ClassVar[str] = "counts"
    uncertainty_scores: ClassVar[Mapping[str, UncertaintyScore]] = {"variance": lambda pred: row_means(pred.variance)}

    @property
    def rate(self) -> Tensor:
        """The expected count, E exp f."""
        return (self.latent.mean + 0.5 * self.latent.variance).exp()

    @property
    def variance(self) -> Tensor:
        """The variance of a count."""
        return self.rate + self.rate.square() * torch.expm1(self.latent.variance)

    def log_prob(self, y: Any) -> Tensor:
        y = columns(regression_targets(y, self.latent.mean))
        f, log_w = quadrature(columns(self.latent.mean), columns(self.latent.variance))
        return (log_w + log_poisson(y, f)).logsumexp(0).sum(-1).to(self.latent.variance.dtype)

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(self.latent.sample(n, generator).exp(), generator)

    def columns(self) -> dict[str, Tensor]:
        return {"rate": self.rate, "variance": self.variance}


def squared_error(pred: PoissonPredictive, y: Tensor) -> Tensor:
    """A metric of this task."""
    return row_means((y - pred.rate).square())


@register("poisson")
class PoissonLikelihood(Likelihood):
    """Counts with log rates f."""

    task: ClassVar[str] = "counts"
    samples_latent: ClassVar[bool] = True

    def check_targets(self, targets: Any, outputs: Tensor) -> Tensor:
        y = regression_targets(targets, outputs)
        if bool(((y < 0) | (y != y.round())).any()):
            raise DataError("Expected counts: whole numbers of at least 0.")
        return y

    def standardize(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return columns(outputs), columns(targets)

    def energy(self, mean: Tensor, latent: Latent, target: Tensor, alpha: float, generator: Any = None) -> Tensor:
        f, log_w = quadrature(mean, latent.variance)
        log_p = log_poisson(target, f)
        if alpha == 0.0:
            return (log_w.exp() * log_p).sum(0).sum(-1)
        return (log_w + alpha * log_p).logsumexp(0).sum(-1) / alpha

    def predictive(self, outputs: Tensor, latent: Latent, *, covariance: bool = False) -> PoissonPredictive:
        return PoissonPredictive(LatentGaussian.around(outputs, latent, covariance=covariance))

    def metrics(self) -> tuple[Any, ...]:
        return "nll", squared_error

    def spec(self) -> dict[str, Any]:
        return {"type": "poisson"}
