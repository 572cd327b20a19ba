"""The latent Gaussian of draws of the outputs, for methods with several networks or a network that is random."""

from __future__ import annotations

import torch
from torch import Tensor

from posthoc.predictive.base import LatentGaussian, working_dtype

__all__ = ["latent_of_draws"]


def latent_of_draws(draws: Tensor, *, covariance: bool = False) -> LatentGaussian:
    """The Gaussian with the mean and variance of draws; the draws are kept for `sample` and `mutual_information`.

    Args:
        draws: The outputs of S functions, (S, N, ...).
        covariance: Whether to compute the covariance across outputs.

    Example:
        >>> latent = latent_of_draws(torch.tensor([[[1.0, 0.0]], [[3.0, 0.0]]]))
        >>> latent.mean, latent.variance
        (tensor([[2., 0.]]), tensor([[1., 0.]]))
    """
    dtype = working_dtype(draws)
    # One draw at a time: all of them in float64 would be many times their size.
    mean = torch.zeros_like(draws[0], dtype=torch.float64)
    for f in draws:
        mean += f.double() / len(draws)
    variance = torch.zeros_like(mean)
    full = None
    for f in draws:
        away = f.double() - mean
        variance += away.square() / len(draws)
        if covariance:
            away = away.reshape(len(away), -1)
            product = away[:, :, None] * away[:, None, :] / len(draws)
            full = product if full is None else full + product
    return LatentGaussian(
        mean.to(dtype),
        variance.to(dtype),
        full_covariance=None if full is None else full.to(dtype),
        independent=False,
        draws=draws.transpose(0, 1).to(dtype),
    )
