"""Calibration errors of predicted classes: in bins of confidence, and smoothed over it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

GRID = 512
"""Points of [0, 1] on which the smooth calibration error is computed."""


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


def smooth_calibration_error(confidence: Tensor, hits: Tensor) -> Tensor:
    """The smooth calibration error (Błasiok and Nakkiran, 2024).

    hits - confidence is smoothed over confidence by a Gaussian kernel of width σ, reflected at 0 and 1; the error is
    the integral of its absolute value, at the σ that equals it.

    Args:
        confidence: The probability of each predicted class, (N,).
        hits: 1 where the predicted class is the true one, else 0, (N,).

    Example:
        >>> round(float(smooth_calibration_error(torch.tensor([0.9, 0.9]), torch.tensor([1, 0]))), 2)
        0.4
    """
    confidence, hits = confidence.double(), hits.double()
    place = (confidence * GRID - 0.5).clamp(0.0, GRID - 1.0)  # among the midpoints of equal cells, between two of them
    left = place.long().clamp_max(GRID - 2)
    share, gap = place - left, (hits - confidence) / len(hits)
    mass = confidence.new_zeros(GRID).index_add(0, left, gap * (1.0 - share)).index_add(0, left + 1, gap * share)
    waves = torch.arange(GRID, dtype=torch.float64, device=confidence.device)
    # Cosines are the eigenfunctions of the reflected kernel: it multiplies cos(πkt) by exp(-(πkσ)²/2).
    cosines = torch.cos(math.pi * waves[:, None] * (waves + 0.5) / GRID)
    coefficients = 2.0 * cosines @ mass
    coefficients[0] /= 2.0
    low, high = 0.0, 1.0
    for _ in range(30):
        width = (low + high) / 2.0
        smoothed = (coefficients * torch.exp(-0.5 * (math.pi * width * waves).square())) @ cosines
        low, high = (width, high) if float(smoothed.abs().mean()) > width else (low, width)
    return confidence.new_tensor(high)
