"""The expected calibration error of predicted classes, and the bins of confidence it is made of."""

from __future__ import annotations

import torch
from torch import Tensor


def confidence_bins(confidence: Tensor, hits: Tensor, bins: int = 15, *, equal_mass: bool = False) -> Tensor:
    """Sums over bins of confidence that are open on the left, (a, b]; the last bin holds a confidence of 1.

    Args:
        confidence: The probability of each predicted class, (N,).
        hits: 1 where the predicted class is the true one, else 0, (N,).
        bins: Number of bins.
        equal_mass: Bins of equal numbers of points instead of equal width. Equal confidences share a bin, so that the
            order of the points does not matter.

    Returns:
        The number of points, the sum of confidence and the sum of hits in each bin, (3, bins) in float64.
    """
    confidence, hits = confidence.double(), hits.double()
    if equal_mass:
        last = [-(-len(hits) * k // bins) - 1 for k in range(1, bins)]  # the last point of each bin but one, by rank
        edges = confidence.sort().values[last]
    else:
        edges = torch.linspace(0.0, 1.0, bins + 1, dtype=torch.float64, device=confidence.device)[1:-1]
    values = torch.stack([torch.ones_like(hits), confidence, hits])
    return confidence.new_zeros(3, bins).index_add(1, torch.bucketize(confidence, edges), values)


def expected_calibration_error(confidence: Tensor, hits: Tensor, bins: int = 15, *, equal_mass: bool = False) -> Tensor:
    """The mean over the points of |accuracy - confidence| of their bin (Naeini et al., 2015); see `confidence_bins`.

    Example:
        >>> float(expected_calibration_error(torch.tensor([0.75, 0.75]), torch.tensor([1, 0])))
        0.25
    """
    _, confidences, right = confidence_bins(confidence, hits, bins, equal_mass=equal_mass)
    return (right - confidences).abs().sum() / len(hits)
