"""Less confidence for points whose features are unlike those of the fitted data (out of distribution).

The distance d of a point is the squared Mahalanobis distance of its feature vector, divided by its length: on inputs
without meaning for a network, features keep their direction less than their length. d acts in two ways:

- Beyond the 90 % quantile of the fitted data, where there are no errors to learn from, a variance is added for all
  outputs. It is proportional to the square of the top output's margin, as the variance of a linear model is to the
  squared length of its features. So d limits the confidence however large the logits are.
- Among the fitted data, the scale of the logits follows a power of d. `best_exponent` chooses it from the network's
  own errors.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError
from posthoc.likelihoods.temperature import best_inverse, log_likelihood
from posthoc.numerics import rows_that_fit

FLOOR_LEVEL, MEDIAN_LEVEL, FAR_LEVEL = 0.05, 0.5, 0.9
"""Quantile levels of the fitted distances: the smallest distance used for the scale of the logits, the distance at
which that scale is unchanged, and the distance from which variance is added."""
ROWS_PER_DIRECTION = 20
"""Rows needed to estimate the variance along one direction."""
MAX_DIRECTIONS = 128
"""Directions with a variance each; all others share one variance."""
MIN_ROWS = 100
"""With fewer rows no distance is estimated."""
MAX_ROWS = 1024
"""Rows that the directions are computed from where features are wider than this."""
EXPONENTS = tuple(s / 20.0 for s in range(9))
"""The powers of d that `best_exponent` compares."""
PENALTY = 1.0
"""Log-likelihood that a fitted exponent must gain (AIC: Akaike, 1974)."""
MAX_COMPARED_ROWS, MAX_COMPARED_LOGITS = 2**16, 2**22
"""Rows and logits that `best_exponent` looks at, at most."""


class OutOfDistribution(nn.Module):
    """The distance of a point from the fitted features, with the extra variance and the scale factor it leads to.

    With quantiles a, m, b of the fitted distances and margin the top output's distance from the others, the extra
    variance of every output is strength · margin² · (d/b - 1)³ for d > b, and the factor of the logits' scale is
    (max(d, a) / m)^exponent.
    """

    location: Tensor  # (D,)
    basis: Tensor  # (D, r), orthonormal columns
    variances: Tensor  # (r,), along the columns of the basis
    other_variance: Tensor  # (), along any other direction
    quantiles: Tensor  # (3,), a, m and b
    strength: Tensor  # ()

    def __init__(self, width: int, directions: int, exponent: float = 0.0) -> None:
        super().__init__()
        self.exponent = exponent
        shapes = {"location": (width,), "basis": (width, directions), "variances": (directions,), "other_variance": ()}
        for name, shape in {**shapes, "quantiles": (3,), "strength": ()}.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))

    @classmethod
    def of(cls, features: Tensor, exponent: float = 0.0) -> OutOfDistribution | None:
        """Estimates the distance on one half of the rows and its quantiles on the other half, because rows that the
        distance was estimated on are closer than new ones.

        Returns:
            None where there are fewer than 100 rows, or all feature vectors have one direction.
        """
        if len(features) < MIN_ROWS:
            return None
        order = torch.randperm(len(features), generator=torch.Generator().manual_seed(0)).to(features.device)
        directions, others = unit_vectors(features[order[::2]]), features[order[1::2]]
        width, rows = features.shape[1], len(directions)
        location = directions.mean(0)
        variances, vectors = principal_directions(directions - location)
        if float(variances[-1]) <= 1e-20:  # of vectors of length 1
            return None
        count = max(1, min(width, rows // ROWS_PER_DIRECTION, MAX_DIRECTIONS))
        ood = cls(width, count, exponent).to(features.device)
        floor = 1e-6 * variances[-1]
        ood.location = location
        ood.basis, ood.variances = vectors[:, -count:].contiguous(), variances[-count:].clamp_min(floor)
        ood.other_variance = torch.ones_like(floor)
        if count < width:
            total = (directions - location).square().sum() / rows
            ood.other_variance = ((total - variances[-count:].sum()) / (width - count)).clamp_min(floor)
        levels = torch.tensor((FLOOR_LEVEL, MEDIAN_LEVEL, FAR_LEVEL), dtype=torch.float64, device=features.device)
        ood.quantiles = torch.quantile(ood.distance(others), levels)
        return ood

    def distance(self, features: Tensor | None) -> Tensor:  # (N,)
        """The squared Mahalanobis distance of the features' directions, divided by D: about 1 for fitted data."""
        if features is None or features.shape[1] != len(self.location):
            got = "none" if features is None else features.shape[1]
            raise DataError(f"Expected features of width {len(self.location)} as in fit, to compare with, got {got}.")
        x = unit_vectors(features) - self.location
        along = x @ self.basis
        other = (x.square().sum(-1) - along.square().sum(-1)).clamp_min(0.0)
        return ((along.square() / self.variances).sum(-1) + other / self.other_variance) / len(self.location)

    def extra_variance(self, distance: Tensor, outputs: Tensor) -> Tensor:
        """The variance (N,) added to every output, given distances (N,) and outputs (N, C)."""
        beyond = (distance / self.quantiles[2] - 1.0).clamp_min(0.0)
        return self.strength * top_margin(outputs).square() * beyond**3

    def logit_scale(self, distance: Tensor) -> Tensor:
        """The factor (N, 1) of the logits' scale, given distances (N,)."""
        return (torch.maximum(distance, self.quantiles[0]) / self.quantiles[1])[:, None] ** self.exponent


@torch.no_grad()
def best_exponent(rows: Outputs) -> float:
    """The power of d with the greatest likelihood of the network's own logits, each at its best temperature.

    Returns:
        One of `EXPONENTS`; 0 where another gains less log-likelihood than its penalty, or without features.
    """
    most = rows_that_fit(rows.outputs[0].numel(), 8 * MAX_COMPARED_LOGITS)
    some = rows.only("features").spread(min(MAX_COMPARED_ROWS, most))
    ood = OutOfDistribution.of(some.features) if some.features is not None else None
    if ood is None or some.features is None:
        return 0.0
    assert some.targets is not None
    distance, scores = ood.distance(some.features), list[float]()
    for exponent in EXPONENTS:
        ood.exponent = exponent
        logits = some.outputs.double() / ood.logit_scale(distance)
        scores.append(log_likelihood(logits, some.targets, best_inverse(logits, some.targets)))
        if scores[-1] < max(scores):  # it has a single maximum
            break
    best = max(scores)
    return EXPONENTS[scores.index(best)] if best - scores[0] > PENALTY else 0.0


def principal_directions(centered: Tensor) -> tuple[Tensor, Tensor]:
    """Variances along orthonormal directions, in rising order, and these directions as columns. Computed from the
    smaller of the columns' covariance and the rows' Gram matrix (of at most MAX_ROWS rows)."""
    rows, width = centered.shape
    if width <= min(rows, MAX_ROWS):
        variances, vectors = torch.linalg.eigh(centered.mT @ centered / rows)
        return variances, vectors
    some = centered[:MAX_ROWS]
    variances, left = torch.linalg.eigh(some @ some.mT / len(some))
    return variances.clamp_min(0.0), F.normalize(some.mT @ left, dim=0)


def top_margin(outputs: Tensor) -> Tensor:
    """The top output minus the mean of the others, (N,), of outputs (N, C)."""
    outputs = outputs.double()
    top, count = outputs.amax(-1), outputs.shape[-1]
    return (count * top - outputs.sum(-1)) / max(1, count - 1)


def unit_vectors(features: Tensor) -> Tensor:
    """Features (N, D) divided by their lengths."""
    return F.normalize(features.double(), dim=-1)
