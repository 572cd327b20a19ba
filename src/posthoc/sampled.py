"""A `Predictive` from draws of the outputs: for methods that have several networks, or one that answers at random."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posthoc.errors import OptionError
from posthoc.likelihoods import Categorical, Gaussian, Likelihood, columns
from posthoc.predictive import ClassificationPredictive, Predictive, RegressionPredictive, working_dtype

__all__ = ["from_draws"]


def from_draws(
    draws: Tensor,  # (S, N, ...): outputs of S functions, in the user's units
    likelihood: Likelihood,
    *,
    mean: Tensor | None = None,  # (N, ...), where the method has one of its own, such as the network's
) -> Predictive:
    """Classes: probabilities averaged over the draws. Regression: the Gaussian with the draws' mean and variance, and
    the likelihood's noise around it. The draws are kept: `sample` and `mutual_information` use them."""
    dtype = working_dtype(draws)
    first = draws.transpose(0, 1).double()  # rows first, as in every tensor of a Predictive
    centre = first.mean(1).to(dtype) if mean is None else mean
    away = columns(centre).unsqueeze(1) - first.flatten(2)
    covariance = torch.einsum("nsc,nsd->ncd", away, away) / len(draws)
    if isinstance(likelihood, Categorical):
        temperature = likelihood.temperature.detach()
        log_p = (first / temperature).log_softmax(-1)
        return DrawnClassification(
            mean=centre,
            logit_variance=covariance.diagonal(dim1=-2, dim2=-1).to(dtype),
            log_probs=(log_p.logsumexp(1) - math.log(len(draws))).to(dtype),
            temperature=temperature.to(dtype),
            keeps_argmax=False,
            independent=False,
            logit_covariance=covariance.to(dtype),
            draws=first.to(dtype),
        )
    assert isinstance(likelihood, Gaussian)
    noise = (likelihood.noise * likelihood.scale.square()).detach()
    return DrawnRegression(
        mean=centre,
        latent_variance=covariance.diagonal(dim1=-2, dim2=-1).to(dtype).reshape(centre.shape),
        noise=noise.expand(len(centre), covariance.shape[-1]).to(dtype).reshape(centre.shape).clone(),
        latent_covariance=covariance.to(dtype),
        draws=first.to(dtype),
    )


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
    if n < 1:
        raise OptionError(f"Expected at least one draw, got n = {n}.")
    which = torch.randint(draws.shape[1], (n,), device=draws.device, generator=generator)
    return draws[:, which].transpose(0, 1)
