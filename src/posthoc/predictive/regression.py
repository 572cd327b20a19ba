"""`RegressionPredictive`: predictions of real-valued targets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from posthoc.errors import OptionError
from posthoc.predictive.base import Predictive, UncertaintyScore, row_means, standard_normal, working_dtype
from posthoc.predictive.latent import correlate
from posthoc.predictive.residual_mixture import ResidualMixture
from posthoc.validation import as_numbers, integer, number, regression_targets


@dataclass(frozen=True, eq=False, repr=False)
class RegressionPredictive(Predictive):
    """The distribution of a new observation at each of N points, in the user's units: mean + std · z, where z is
    Gaussian or follows a mixture of normals.

    `log_prob` takes several outputs as independent; `covariance` and `sample` use their covariance if it is there.

    Args:
        latent: The Gaussian over the network's function; its mean is the network's output, bit for bit.
        noise: The variance of an observation around the function, of the shape of the mean.
        residuals: The distribution of z for each output, with mean 0 and variance 1; None is the normal distribution.

    Example:
        >>> from posthoc.predictive.base import LatentGaussian
        >>> latent = LatentGaussian(torch.zeros(2, 1), torch.ones(2, 1))
        >>> pred = RegressionPredictive(latent, noise=torch.full((2, 1), 3.0))
        >>> pred.std.squeeze(1).tolist()
        [2.0, 2.0]
        >>> pred.quantile([0.05, 0.5, 0.95]).shape
        torch.Size([3, 2, 1])
    """

    noise: Tensor
    residuals: ResidualMixture | None = None

    task: ClassVar[str] = "regression"
    uncertainty_scores: ClassVar[Mapping[str, UncertaintyScore]] = {
        "std": lambda pred: row_means(pred.variance).sqrt(),
        "variance": lambda pred: row_means(pred.variance),
    }
    hints: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("probs", "log_probs", "labels", "entropy", "least_confidence", "mutual_information", "temperature"),
        "that is for classification",
    )

    @property
    def mean(self) -> Tensor:
        """The network's output, bit for bit, (N,) or (N, C)."""
        return self.latent.mean

    @property
    def latent_variance(self) -> Tensor:
        """The variance of the function, of the shape of the mean."""
        return self.latent.variance

    @property
    def variance(self) -> Tensor:
        """The variance of a new observation, of the shape of the mean."""
        return self.latent.variance + self.noise

    @property
    def std(self) -> Tensor:
        """The standard deviation of a new observation, of the shape of the mean."""
        return self.variance.sqrt()

    @property
    def covariance(self) -> Tensor:
        """The covariance of a new observation across outputs, (N, C, C); see `predict(..., covariance=True)`."""
        return self.latent.covariance + torch.diag_embed(self.noise.reshape(len(self), -1))

    def scaled(self, scale: Tensor) -> RegressionPredictive:
        """The same around the same mean, with all deviations times a scale for each point, (N, 1) or (N, C)."""
        latent, shape = self.latent, self.mean.shape
        scale = scale.expand(len(self), shape[1:].numel()).to(self.noise.dtype)
        squared, full = scale.square().reshape(shape), latent.full_covariance
        full = full * scale[:, :, None] * scale[:, None, :] if full is not None else None
        latent = replace(latent, variance=latent.variance * squared, full_covariance=full)
        return replace(self, latent=latent, noise=self.noise * squared)

    def quantile(self, q: Any) -> Tensor:
        """The values below which a new observation falls with probability q.

        Args:
            q: A level in (0, 1), a list or one-dimensional tensor of Q levels, or a tensor of more dimensions that
                broadcasts against the mean.

        Returns:
            The quantiles, of the shape of the mean; (Q, *shape of the mean) for Q levels.
        """
        levels = as_numbers(q, torch.float64)
        if levels is None or not bool(((levels > 0) & (levels < 1)).all()):
            raise OptionError(f"Expected a quantile level, or a list of levels, strictly between 0 and 1, got {q!r}.")
        levels = levels.to(self.mean.device)
        if levels.ndim == 1:
            levels = levels.reshape(-1, *[1] * self.mean.ndim)
        elif not all(a in (1, b) or b == 1 for a, b in zip(levels.shape[::-1], self.mean.shape[::-1], strict=False)):
            wanted = f"one level, a list of levels, or levels that broadcast to shape {tuple(self.mean.shape)}"
            raise OptionError(f"Expected {wanted}, got levels of shape {tuple(levels.shape)}.")
        z = torch.special.ndtri(levels) if self.residuals is None else self.residuals.quantile(levels)
        return self.mean + self.std * z.to(self.std.dtype)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval that contains a new observation with probability `level`.

        Returns:
            The lower and the upper ends, of the shape of the mean.
        """
        if not 0.0 < number(level) < 1.0:
            raise OptionError(f"Expected an interval level strictly between 0 and 1, got {level!r} (0.95 means 95 %).")
        lower, upper = self.quantile([0.5 - 0.5 * level, 0.5 + 0.5 * level])
        return lower, upper

    def cdf(self, y: Any) -> Tensor:
        """The probability that a new observation is at most y, of the shape of the mean."""
        z = self._standardize(y)
        return torch.special.ndtr(z) if self.residuals is None else self.residuals.cdf(z).to(z.dtype)

    def log_prob(self, y: Any) -> Tensor:
        """The log-density of observations in the user's units, summed over outputs, (N,)."""
        z = self._standardize(y)
        if self.residuals is None:
            density = -0.5 * z.square() - self.std.log() - 0.5 * math.log(2.0 * math.pi)
        else:
            density = self.residuals.log_density(z).to(z.dtype) - self.std.log()
        return density.flatten(1).sum(-1) if density.ndim > 1 else density

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Draws of new observations, (n, N, ...). Those with a covariance follow the mixtures only approximately."""
        n = integer("n, the number of draws,", n, 1)
        shape = (n, *self.mean.shape)
        if self.latent.draws is not None:
            values = self.latent.sample(n, generator)
            return values + self.noise.sqrt() * standard_normal(shape, values, generator)
        mixture, dtype = self.residuals, working_dtype(self.mean)
        z = mixture.sample(shape, generator).to(dtype) if mixture else standard_normal(shape, self.mean, generator)
        if self.latent.full_covariance is None:
            return self.mean + self.std * z
        return self.mean + correlate(self.covariance, z.reshape(n, len(self), -1)).reshape(z.shape)

    def columns(self) -> dict[str, Tensor]:
        """Mean, standard deviation, latent variance and noise."""
        return {"mean": self.mean, "std": self.std, "latent_variance": self.latent_variance, "noise": self.noise}

    def _standardize(self, y: Any) -> Tensor:
        return (regression_targets(y, self.mean).to(self.std.dtype) - self.mean) / self.std
