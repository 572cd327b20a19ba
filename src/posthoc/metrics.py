"""How good predictive distributions are: streaming `torchmetrics.Metric`s, updated with (predictive, targets)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from posthoc.checks import regression_targets
from posthoc.predictive import Predictive

__all__ = ["CQM", "CRPS", "NLL", "Coverage"]


class _Mean(Metric):
    """The average of a score over all points seen."""

    full_state_update = False
    is_differentiable = False
    higher_is_better = False
    total: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def _add(self, scores: Tensor) -> None:
        self.total += scores.double().sum().to(self.total.device)
        self.count += scores.numel()

    def compute(self) -> Tensor:
        """The average so far."""
        return self.total / self.count


class NLL(_Mean):
    """Negative log-likelihood of a point, in nats."""

    def update(self, pred: Predictive, y: Any) -> None:
        """Adds a batch."""
        self._add(-pred.log_prob(y))


class CRPS(_Mean):
    """Continuous ranked probability score of Gaussian predictions, in closed form: the mean absolute error of a
    distribution, in the user's units."""

    def update(self, pred: Predictive, y: Any) -> None:
        """Adds a batch."""
        mean, std = pred.mean.double(), pred.std.double()
        z = (regression_targets(y, pred.mean) - mean) / std
        density = torch.exp(-0.5 * z.square()) / math.sqrt(2.0 * math.pi)
        self._add(std * (z * (2.0 * torch.special.ndtr(z) - 1.0) + 2.0 * density - 1.0 / math.sqrt(math.pi)))


class Coverage(_Mean):
    """The share of targets inside the central interval of the given level; the level itself is what is wanted."""

    def __init__(self, level: float = 0.95, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.level = level

    def update(self, pred: Predictive, y: Any) -> None:
        """Adds a batch."""
        lower, upper = pred.interval(self.level)
        y = regression_targets(y, pred.mean)
        self._add((y >= lower) & (y <= upper))


class CQM(Metric):
    """The centred quantile metric (paper, section 5.2): ∫₀¹ |share of targets inside the central α-interval - α| dα.

    A target is inside as soon as α reaches u = |2 cdf(y) - 1|, so the share is the empirical distribution of u, a
    staircase, and the integral is exact.
    """

    full_state_update = False
    is_differentiable = False
    higher_is_better = False
    levels: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("levels", [], dist_reduce_fx="cat")

    def update(self, pred: Predictive, y: Any) -> None:
        """Adds a batch."""
        self.levels.append((2.0 * pred.cdf(y).double() - 1.0).abs().reshape(-1))

    def compute(self) -> Tensor:
        """The integral over all points seen."""
        u = dim_zero_cat(self.levels).sort().values
        edges = torch.cat([u.new_zeros(1), u, u.new_ones(1)])
        heights = torch.arange(len(u) + 1, dtype=u.dtype, device=u.device) / len(u)  # between consecutive edges
        # ∫|h - α| over [a, b] is a sum of triangles: with F(t) = t|t|/2, it is F(b - h) - F(a - h).
        ends, starts = edges[1:] - heights, edges[:-1] - heights
        return 0.5 * (ends * ends.abs() - starts * starts.abs()).sum()
