"""How good predictive distributions of real numbers are; all in the user's units."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from posthoc.errors import DataError, WrongTaskError
from posthoc.evaluate.metrics.base import Mean, Stored, fraction, real_targets
from posthoc.predictive.base import Predictive, RegressionPredictive
from posthoc.validation import regression_targets

__all__ = ["CQM", "CRPS", "MAE", "RMSE", "Coverage", "SampleCRPS", "Width", "crps_of_draws", "errors"]


def errors(pred: Predictive, y: Any) -> Tensor:  # as mean
    """Target minus mean, in float64."""
    return real_targets(pred, y).double() - pred.mean.double()


class RMSE(Mean):
    """Root of the mean squared error of the mean."""

    def update(self, pred: Predictive, y: Any) -> None:
        """Adds a batch."""
        self._add(errors(pred, y).square())

    def compute(self) -> Tensor:
        """The root of the average so far."""
        return super().compute().sqrt()


class MAE(Mean):
    """Mean absolute error of the mean."""

    def update(self, pred: Predictive, y: Any) -> None:
        """Adds a batch."""
        self._add(errors(pred, y).abs())


class CRPS(Mean):
    """Continuous ranked probability score in closed form: the mean absolute error of a distribution."""

    def update(self, pred: Predictive, y: Any) -> None:
        """Adds a batch."""
        if not isinstance(pred, RegressionPredictive):
            raise WrongTaskError(f"Expected predictions of a regression, got a {type(pred).__name__}: see SampleCRPS.")
        error, std = errors(pred, y), pred.std.double()
        z = error / std.clamp_min(1e-300)  # a prediction without any doubt is scored by its absolute error
        if pred.law is not None:
            self._add(std * pred.law.crps(z))
            return
        density = torch.exp(-0.5 * z.square()) / math.sqrt(2.0 * math.pi)
        # σ [z (2Φ(z) - 1) + 2φ(z) - 1/√π]
        self._add(error * torch.erf(z / math.sqrt(2.0)) + std * (2.0 * density - 1.0 / math.sqrt(math.pi)))


def crps_of_draws(
    draws: Tensor,  # (S, N, ...)
    y: Any,  # (N, ...)
    *,
    fair: bool = False,
) -> Tensor:  # (N, ...)
    """The CRPS of each point's draws, taken as the whole distribution; with `fair`, an unbiased estimate of the CRPS
    of what they were drawn from, which is lower."""
    least = 2 if fair else 1
    if draws.ndim < 2 or len(draws) < least:
        raise DataError(f"Expected draws of shape (S, N) with S at least {least}, got {tuple(draws.shape)}.")
    s = len(draws)
    distance = (draws.double() - regression_targets(y, draws[0]).double()).sort(0).values
    # E|X - y| - ½ E|X - X'|, the second from order statistics: ½ Σᵢⱼ |xᵢ - xⱼ| = Σᵢ (2i - S - 1) x₍ᵢ₎, i = 1, …, S.
    rank = torch.arange(1 - s, s, 2, dtype=torch.float64, device=draws.device)
    spread = torch.einsum("s,s...->...", rank, distance) / (s * (s - 1) if fair else s * s)
    return distance.abs().mean(0) - spread


class SampleCRPS(Mean):
    """Continuous ranked probability score of distributions that are known by their draws; see `crps_of_draws`."""

    def __init__(self, *, fair: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fair = fair

    def update(self, draws: Tensor, y: Any) -> None:
        """Adds a batch: S draws of N points, such as `predictive.sample(S)`, and the N targets."""
        self._add(crps_of_draws(draws, y, fair=self.fair))


class Coverage(Mean):
    """The share of targets inside the central interval of the given level; the level itself is what is wanted."""

    higher_is_better = None

    def __init__(self, level: float = 0.95, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.level = fraction("level", level)

    def update(self, pred: Predictive, y: Any) -> None:
        """Adds a batch."""
        y = real_targets(pred, y)
        lower, upper = pred.interval(self.level)
        self._add((y >= lower) & (y <= upper))


class Width(Mean):
    """The mean width of the central interval of the given level: the less, the better, if the coverage is right."""

    def __init__(self, level: float = 0.95, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.level = fraction("level", level)

    def update(self, pred: Predictive, y: Any) -> None:
        """Adds a batch; a width needs no targets, but they are checked like everybody's."""
        real_targets(pred, y)
        lower, upper = pred.interval(self.level)
        self._add(upper.double() - lower.double())


class CQM(Stored):
    """The centred quantile metric (paper, section 5.2): ∫₀¹ |share of targets inside the central α-interval - α| dα.

    A target is inside as soon as α reaches u = |2 cdf(y) - 1|, so the share is the empirical distribution of u, a
    staircase, and the integral is exact.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._store("levels")

    def update(self, pred: Predictive, y: Any) -> None:
        """Adds a batch."""
        self._keep("levels", (2.0 * pred.cdf(real_targets(pred, y)).double() - 1.0).abs())

    def compute(self) -> Tensor:
        """The integral over all points seen."""
        u = self._all("levels").sort().values
        self._require_points(len(u))
        edges = torch.cat([u.new_zeros(1), u, u.new_ones(1)])
        heights = torch.arange(len(u) + 1, dtype=u.dtype, device=u.device) / len(u)  # between consecutive edges
        # ∫|h - α| over [a, b] is a sum of triangles: with F(t) = t|t|/2, it is F(b - h) - F(a - h).
        ends, starts = edges[1:] - heights, edges[:-1] - heights
        return 0.5 * (ends * ends.abs() - starts * starts.abs()).sum()
