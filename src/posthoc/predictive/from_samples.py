"""Predictions from draws of the outputs, for methods that have several networks or a network that is random."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posthoc.likelihoods.base import Categorical, Gaussian, Likelihood, columns
from posthoc.predictive.base import LatentGaussian, Predictive, working_dtype
from posthoc.predictive.classification import ClassificationPredictive
from posthoc.predictive.regression import RegressionPredictive

__all__ = ["from_draws"]


def from_draws(draws: Tensor, likelihood: Likelihood, *, covariance: bool = False) -> Predictive:
    """Predictions from draws of the outputs.

    Classification averages the probabilities over the draws. Regression takes the Gaussian with the mean and variance
    of the draws, and the likelihood's noise around it. The draws are kept for `sample` and `mutual_information`.

    Args:
        draws: The outputs of S functions in the user's units, (S, N, ...).
        likelihood: The likelihood of the task.
        covariance: Whether to compute the covariance across outputs.
    """
    dtype = working_dtype(draws)
    # One draw at a time: all of them in float64, with softmax and squares, would be many times their size.
    mean = torch.zeros_like(draws[0], dtype=torch.float64)
    for f in draws:
        mean += f.double() / len(draws)
    variance = torch.zeros_like(mean)
    for f in draws:
        variance += (f.double() - mean).square() / len(draws)
    latent = LatentGaussian(
        mean.to(dtype),
        variance.to(dtype),
        full_covariance=covariances(draws, mean).to(dtype) if covariance else None,
        independent=False,
        draws=draws.transpose(0, 1).to(dtype),
    )
    if isinstance(likelihood, Categorical):
        temperature = likelihood.temperature.detach()
        log_p = torch.full_like(mean, -math.inf)
        for f in draws:
            log_p = torch.logaddexp(log_p, (f.double() / temperature).log_softmax(-1))
        return ClassificationPredictive(
            latent,
            log_probs=(log_p - math.log(len(draws))).to(dtype),
            temperature=temperature.to(dtype),
            keeps_argmax=False,
        )
    assert isinstance(likelihood, Gaussian)
    noise = (likelihood.noise * likelihood.scale.square()).detach()
    noise = noise.expand(len(mean), mean[0].numel()).to(dtype).reshape(mean.shape).clone()
    return RegressionPredictive(latent, noise)


def covariances(draws: Tensor, mean: Tensor) -> Tensor:
    """The covariance across the outputs of each point, (N, C, C), of draws (S, N, ...) with mean (N, ...)."""
    total: Tensor | float = 0.0
    for f in draws:
        away = columns(f.double() - mean)
        total = total + away[:, :, None] * away[:, None, :] / len(draws)
    assert isinstance(total, Tensor)
    return total
