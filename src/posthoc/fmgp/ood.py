"""Less confidence where a point is unlike those of the fit: nothing that was fitted says how far off it may be there.

A network's features keep their direction where they lose their meaning, so length is put aside: features are divided by
their length, and the Mahalanobis distance d of what is left tells new kinds of points from known ones. Beyond almost
all known points, where there are no errors to learn from, the variance grows steeply (`far`), in proportion to the
square of how far the top output is from the others, as the variance of a linear model is to the squared length of its
features: however sure the network is, d sets a ceiling on how sure it may be. Among known points the whole scale of the
logits follows a power of d, as far as the network's errors do (`slope`): the usual are trusted more, the unusual less.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posthoc.collect.outputs import Outputs
from posthoc.likelihoods.temperature import best_log_likelihood

__all__ = ["Novelty", "best_slope", "lead"]

FLOOR, USUAL, FAR = 0.05, 0.5, 0.9
"""Shares of the points of the fit: no point counts as closer than the first of them, the scale of logits stays at the
second, and variance is added beyond the third."""
ROWS_A_DIRECTION = 20
"""So many rows are needed to know the spread along one direction."""
MOST_DIRECTIONS = 128
"""The rest are given one spread together."""
FEWEST_ROWS = 100
MOST_ROWS = 1024
"""Wider features than this have their directions taken from so many rows."""
SLOPES = tuple(s / 20.0 for s in range(9))
"""Every power of d that is tried."""
WORTH = 1.0
"""What one fitted number adds to the log-likelihood of its rows, and takes from that of others (Akaike, 1974)."""
MOST_COMPARED, VALUES = 2**16, 2**22
"""Rows, and logits, by which powers are compared at the most."""


class Novelty(nn.Module):
    """The extra variance at a point, for all outputs alike: unit · lead² · far · (d/b - 1)³, where d passes b; and the
    factor of the logits' unit, (max(d, a) / m)^slope. a, m and b are quantiles of the distances of the fit."""

    def __init__(self, width: int, directions: int, slope: float = 0.0) -> None:
        super().__init__()
        self.slope = slope
        self.register_buffer("location", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("basis", torch.zeros(width, directions, dtype=torch.float64))
        self.register_buffer("spread", torch.ones(directions, dtype=torch.float64))
        self.register_buffer("rest", torch.ones((), dtype=torch.float64))
        self.register_buffer("quantiles", torch.ones(3, dtype=torch.float64))
        self.register_buffer("strength", torch.zeros((), dtype=torch.float64))
        self.location: Tensor  # (D,)
        self.basis: Tensor  # (D, r), orthonormal
        self.spread: Tensor  # (r,), the variance along each
        self.rest: Tensor  # (), the variance along any other direction
        self.quantiles: Tensor  # (3,), a, m and b
        self.strength: Tensor  # (), unit · far

    @classmethod
    def of(cls, features: Tensor, slope: float = 0.0) -> Novelty | None:
        """Distances from one half of the rows, and quantiles from the other: those that shape a distance are closer
        than new ones. None where there are too few rows to know any, or all are alike."""
        if len(features) < FEWEST_ROWS:
            return None
        order = torch.randperm(len(features), generator=torch.Generator().manual_seed(0)).to(features.device)
        shaping, others = direction(features[order[::2]]), features[order[1::2]]
        width, rows = features.shape[1], len(shaping)
        location = shaping.mean(0)
        variances, vectors = principal(shaping - location)
        if float(variances[-1]) <= 1e-20:  # lengths are 1: all point the same way
            return None
        count = max(1, min(width, rows // ROWS_A_DIRECTION, MOST_DIRECTIONS))
        novelty = cls(width, count, slope).to(features.device)
        floor = 1e-6 * variances[-1]
        novelty.location = location
        novelty.basis, novelty.spread = vectors[:, -count:].contiguous(), variances[-count:].clamp_min(floor)
        if count < width:
            total = (shaping - location).square().sum() / rows
            novelty.rest = ((total - variances[-count:].sum()) / (width - count)).clamp_min(floor)
        levels = torch.tensor((FLOOR, USUAL, FAR), dtype=torch.float64, device=features.device)
        novelty.quantiles = torch.quantile(novelty.distance(others), levels)
        return novelty

    def distance(self, features: Tensor) -> Tensor:  # (N,)
        """The squared Mahalanobis distance of the direction of features, about 1 for those of the fit."""
        x = direction(features) - self.location
        along = x @ self.basis
        aside = (x.square().sum(-1) - along.square().sum(-1)).clamp_min(0.0)
        return ((along.square() / self.spread).sum(-1) + aside / self.rest) / len(self.location)

    def more_variance(
        self,
        distance: Tensor,  # (N,)
        outputs: Tensor,  # (N, C)
    ) -> Tensor:  # (N,)
        """What is added to the variance of every output."""
        beyond = (distance / self.quantiles[2] - 1.0).clamp_min(0.0)
        return self.strength * lead(outputs).square() * beyond**3

    def stretch(
        self,
        distance: Tensor,  # (N,)
    ) -> Tensor:  # (N, 1)
        """What the scale of the logits is multiplied by."""
        return (torch.maximum(distance, self.quantiles[0]) / self.quantiles[1])[:, None] ** self.slope


@torch.no_grad()
def best_slope(rows: Outputs) -> float:
    """The power of d that the scale of logits should follow, by the errors of the network alone: where the likelihood
    of its logits is greatest, each at its best temperature; none where that earns less than it costs to learn."""
    some = rows.only("features").spread(max(1, min(MOST_COMPARED, VALUES // rows.outputs[0].numel())))
    novelty = Novelty.of(some.features) if some.features is not None else None
    if novelty is None or some.features is None:
        return 0.0
    distance, scores = novelty.distance(some.features), list[float]()
    for novelty.slope in SLOPES:
        scaled = some.only().with_outputs(some.outputs.double() / novelty.stretch(distance))
        scores.append(best_log_likelihood(scaled))
        if scores[-1] < max(scores):  # it rises and then falls
            break
    best = max(scores)
    return SLOPES[scores.index(best)] if best - scores[0] > WORTH else 0.0


def principal(centred: Tensor) -> tuple[Tensor, Tensor]:
    """Variances along orthonormal directions, in rising order, and these as columns: from whichever is smaller, the
    covariance of the columns or the products of (at most so many) rows."""
    rows, width = centred.shape
    if width <= min(rows, MOST_ROWS):
        variances, vectors = torch.linalg.eigh(centred.mT @ centred / rows)
        return variances, vectors
    some = centred[:MOST_ROWS]
    variances, left = torch.linalg.eigh(some @ some.mT / len(some))
    return variances.clamp_min(0.0), F.normalize(some.mT @ left, dim=0)


def lead(
    outputs: Tensor,  # (N, C)
) -> Tensor:  # (N,)
    """How far the top output is above the mean of the others."""
    outputs = outputs.double()
    top, count = outputs.amax(-1), outputs.shape[-1]
    return (count * top - outputs.sum(-1)) / max(1, count - 1)


def direction(features: Tensor) -> Tensor:
    return F.normalize(features.double(), dim=-1)
