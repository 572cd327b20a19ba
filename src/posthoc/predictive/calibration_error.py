"""The expected calibration error of predicted classes, and the bins of confidence it is made of."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ConfidenceBins", "confidence_bins", "expected_calibration_error"]


class ConfidenceBins(NamedTuple):
    """The number of points in each bin of confidence and the sums over them, (bins,) in float64."""

    points: Tensor
    confidence: Tensor
    hits: Tensor


def confidence_bins(
    confidence: Tensor,  # (N,)
    hits: Tensor,  # (N,)
    bins: int = 15,
    *,
    equal_mass: bool = False,
) -> ConfidenceBins:
    """Sums confidence and hits over bins that are open on the left, (a, b]; the last holds a confidence of 1.

    Args:
        confidence: The probability of each predicted class.
        hits: 1 where the predicted class is the true one, else 0.
        bins: Number of bins.
        equal_mass: Bins of equal numbers of points instead of equal width. Equal confidences share a bin, so that the
            order of the points does not matter.
    """
    confidence, hits = confidence.double(), hits.double()
    if equal_mass:
        last = [-(-len(hits) * k // bins) - 1 for k in range(1, bins)]  # the last point of each bin but one, by rank
        edges = confidence.sort().values[last]
    else:
        edges = torch.linspace(0.0, 1.0, bins + 1, dtype=torch.float64, device=confidence.device)[1:-1]
    place = torch.bucketize(confidence, edges)
    zeros = confidence.new_zeros(bins)
    return ConfidenceBins(*(zeros.index_add(0, place, v) for v in (torch.ones_like(hits), confidence, hits)))


def expected_calibration_error(
    confidence: Tensor,  # (N,)
    hits: Tensor,  # (N,)
    bins: int = 15,
    *,
    equal_mass: bool = False,
) -> Tensor:
    """The mean over the points of |accuracy - confidence| of their bin (Naeini et al., 2015); see `confidence_bins`.

    Example:
        >>> float(expected_calibration_error(torch.tensor([0.75, 0.75]), torch.tensor([1, 0])))
        0.25
    """
    found = confidence_bins(confidence, hits, bins, equal_mass=equal_mass)
    return (found.hits - found.confidence).abs().sum() / len(hits)
