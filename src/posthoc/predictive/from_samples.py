"""A `Predictive` from draws of the outputs: for methods that have several networks, or one that answers at random."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posthoc.likelihoods.base import Categorical, Gaussian, Likelihood, columns
from posthoc.predictive.base import (
    ClassificationPredictive,
    Predictive,
    RegressionPredictive,
    draws_asked,
    working_dtype,
)

__all__ = ["from_draws"]


def from_draws(
    draws: Tensor,  # (S, N, ...): outputs of S functions, in the user's units
    likelihood: Likelihood,
    *,
    covariance: bool = False,
) -> Predictive:
    """Classes: probabilities averaged over the draws. Regression: the Gaussian with the draws' mean and variance, and
    the likelihood's noise around it. The draws are kept: `sample` and `mutual_information` use them."""
    dtype = working_dtype(draws)
    # One draw at a time: all of them in float64, with softmax and squares, would be many times their size.
    mean = torch.zeros_like(draws[0], dtype=torch.float64)
    for f in draws:
        mean += f.double() / len(draws)
    variance = torch.zeros_like(mean)
    for f in draws:
        variance += (f.double() - mean).square() / len(draws)
    joint = covariances(draws, mean).to(dtype) if covariance else None
    first = draws.transpose(0, 1).to(dtype)  # rows first, as in every tensor of a Predictive
    if isinstance(likelihood, Categorical):
        temperature = likelihood.temperature.detach()
        log_p = torch.full_like(mean, -math.inf)
        for f in draws:
            log_p = torch.logaddexp(log_p, (f.double() / temperature).log_softmax(-1))
        return DrawnClassification(
            mean=mean.to(dtype),
            logit_variance=variance.to(dtype),
            log_probs=(log_p - math.log(len(draws))).to(dtype),
            temperature=temperature.to(dtype),
            keeps_argmax=False,
            independent=False,
            logit_covariance=joint,
            draws=first,
        )
    assert isinstance(likelihood, Gaussian)
    noise = (likelihood.noise * likelihood.scale.square()).detach()
    return DrawnRegression(
        mean=mean.to(dtype),
        latent_variance=variance.to(dtype),
        noise=noise.expand(len(mean), mean[0].numel()).to(dtype).reshape(mean.shape).clone(),
        latent_covariance=joint,
        draws=first,
    )


def covariances(
    draws: Tensor,  # (S, N, ...)
    mean: Tensor,  # (N, ...)
) -> Tensor:  # (N, C, C)
    """Across the outputs of a point, from one draw to the next."""
    total: Tensor | float = 0.0
    for f in draws:
        away = columns(f.double() - mean)
        total = total + away[:, :, None] * away[:, None, :] / len(draws)
    assert isinstance(total, Tensor)
    return total


@dataclass(frozen=True, eq=False)
class DrawnClassification(ClassificationPredictive):
    """Class probabilities averaged over draws of the logits."""

    draws: Tensor | None = None  # (N, S, C)

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        return chosen(self.draws, n, generator)

    def _information(self, samples: int, generator: torch.Generator) -> Tensor:  # from the draws there are, all of them
        assert self.draws is not None
        p = (self.draws / self.temperature).softmax(-1)
        expected = torch.special.entr(p).sum(-1).mean(1)
        return (torch.special.entr(p.mean(1)).sum(-1) - expected).clamp_min(0.0)


@dataclass(frozen=True, eq=False)
class DrawnRegression(RegressionPredictive):
    """A Gaussian with the mean and variance of draws, and noise around it."""

    draws: Tensor | None = None  # (N, S, ...)

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        drawn = chosen(self.draws, n, generator)
        noise = torch.randn(drawn.shape, dtype=drawn.dtype, device=drawn.device, generator=generator)
        return drawn + self.noise.sqrt() * noise


def chosen(draws: Tensor | None, n: int, generator: torch.Generator | None) -> Tensor:  # (n, N, ...)
    """Draws picked at random, the same functions for every row."""
    assert draws is not None
    which = torch.randint(draws.shape[1], (draws_asked(n),), device=draws.device, generator=generator)
    return draws[:, which].transpose(0, 1)
