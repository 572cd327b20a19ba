"""The temperature at which a classifier's logits have the greatest likelihood."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from posthoc.collect.outputs import Outputs
from posthoc.numerics import rows_that_fit

MIN_MARGIN, MAX_MARGIN = 1e-4, 1e4
"""The root mean square margin of the logits, in units of the temperature, at the least and the greatest 1/τ."""
TYPICAL = 4096
"""The number of rows that a suitable temperature is computed from."""
MIN_GAIN = 2.0
"""A suitable temperature is 1 unless another one raises the log-likelihood by more than this (Akaike, 1974)."""
LOW_MARGIN, HIGH_MARGIN = 0.1, 50.0
"""Limits of the root mean square margin of the logits in units of a suitable temperature."""


class TemperaturePrior(NamedTuple):
    """A prior of log(1/τ) for fits to fewer than `FEW_ROWS` rows: Student's t with four degrees of freedom, so that
    outputs that are far from logits are not held near 1.

    Attributes:
        mean: The mean; networks are usually too certain.
        scale: The scale.
    """

    mean: float = -0.3
    scale: float = 0.35

    def penalty(self, inverse: Any) -> Any:
        """Minus twice the log-density of 1/τ, up to a constant."""
        log = inverse.clamp_min(1e-300).log() if isinstance(inverse, Tensor) else math.log(inverse)
        ratio = ((log - self.mean) / self.scale) ** 2 / FREEDOM
        return (FREEDOM + 1.0) * (ratio.log1p() if isinstance(ratio, Tensor) else math.log1p(ratio))

    def slopes(self, inverse: float) -> tuple[float, float]:
        """The first two derivatives of half the penalty in 1/τ."""
        excess, spread = math.log(inverse) - self.mean, FREEDOM * self.scale**2
        total = spread + excess**2
        first = (FREEDOM + 1.0) * excess / total
        return first / inverse, ((FREEDOM + 1.0) * (spread - excess**2) / total**2 - first) / inverse**2


FREEDOM = 4.0
"""Degrees of freedom of the prior."""
FEW_ROWS = 200
"""The prior is used below this number of rows. With more rows it would hardly matter."""
PRIOR = TemperaturePrior()
"""The default prior: half of all networks then have a temperature between 1.04 and 1.75."""
Block = tuple[Tensor, Tensor]
"""Logits (N, C) with a maximum of zero in each row, and labels (N,)."""


def best_inverse(logits: Tensor, labels: Tensor, prior: TemperaturePrior | None = None) -> float:
    """The 1/τ of greatest likelihood, by Newton steps within a bracket; the log-likelihood is concave in 1/τ.

    Args:
        logits: (N, C), in memory or mapped from a file.
        labels: (N,).
        prior: The prior of 1/τ where there are few rows: the result is then the mode of the posterior.

    Example:
        >>> logits = torch.tensor([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
        >>> round(best_inverse(logits, torch.tensor([0, 0, 1, 1])), 4)
        0.2747
    """
    low, high = limits(logits)
    prior = prior if len(labels) < FEW_ROWS else None
    few = logits.numel() <= rows_that_fit(1)
    kept = list(blocks(logits, labels)) if few else None  # else they are read again at every step

    def slopes(inverse: float) -> tuple[float, float]:
        """The first two derivatives of the negative log-likelihood in 1/τ."""
        first, second = prior.slopes(inverse) if prior is not None else (0.0, 0.0)
        for z, y in kept or blocks(logits, labels):
            p = (inverse * z).softmax(-1)
            mean = (p * z).sum(-1)
            excess = mean - z.gather(-1, y[:, None]).squeeze(-1)
            # Together, so that a GPU is waited for once.
            one, two = torch.stack([excess.sum(), (p * (z - mean[:, None]).square()).sum()]).tolist()
            first, second = first + one, second + two
        return first, second

    if slopes(low)[0] >= 0.0:
        return low
    if slopes(high)[0] <= 0.0:
        return high
    at = min(max(1.0, low), high)
    for _ in range(100):
        slope, curvature = slopes(at)
        step = at - slope / curvature if curvature > 0.0 else math.nan
        if abs(step - at) <= 1e-12 * at:  # tested first, since one end of the bracket is now here
            return step
        low, high = (low, at) if slope > 0.0 else (at, high)
        at = step if low < step < high else math.sqrt(low * high)
    return at


def limits(logits: Tensor) -> tuple[float, float]:
    """The least and the greatest 1/τ."""
    first = logits[: rows_that_fit(logits.shape[1])].double()
    size = rms_margin(first - first.amax(-1, keepdim=True))
    return MIN_MARGIN / size, MAX_MARGIN / size


def limit_reached(logits: Tensor, inverse: float) -> Literal["low", "high"] | None:
    """Whether 1/τ is at its lower limit (predictions are no better than chance) or its upper one (all are right)."""
    low, high = limits(logits)
    if inverse >= high * (1.0 - 1e-9):
        return "high"
    return "low" if inverse <= low * (1.0 + 1e-9) else None


@torch.no_grad()
def suitable_temperature(logits: Tensor, labels: Tensor) -> float:
    """The best temperature of some of the rows and one more that is wrong, since a few rows may all be right: a copy of
    the row of median margin, with its second class as the true one."""
    rows = Outputs.trusted(outputs=logits, targets=labels).spread(TYPICAL)
    assert rows.targets is not None
    best = rows.outputs.double().topk(2, -1)
    usual = (best.values[:, 0] - best.values[:, 1]).median(0).indices
    z = torch.cat([rows.outputs, rows.outputs[usual, None]])
    y = torch.cat([rows.targets, best.indices[usual, 1:].to(rows.targets)])
    inverse, size = best_inverse(z, y), rms_margin(next(blocks(z, y))[0])
    if log_likelihood(z, y, inverse) - log_likelihood(z, y, 1.0) <= MIN_GAIN:
        return 1.0
    return 1.0 / min(max(inverse, LOW_MARGIN / size), HIGH_MARGIN / size)


def log_likelihood(logits: Tensor, labels: Tensor, inverse: float) -> float:
    """The log-likelihood of all rows at a 1/τ."""
    parts = ((inverse * z).log_softmax(-1).gather(-1, y[:, None]).sum() for z, y in blocks(logits, labels))
    return sum(map(float, parts))


def rms_margin(z: Tensor) -> float:
    """The root mean square distance of logits (N, C) from the largest of their row; 1 if all are equal."""
    return float(z.square().mean().sqrt()) or 1.0


def blocks(logits: Tensor, labels: Tensor) -> Iterator[Block]:
    """Consecutive rows, as many at a time as fit into memory."""
    size = rows_that_fit(logits.shape[1])
    for start in range(0, len(logits), size):
        z = logits[start : start + size].double()
        yield z - z.amax(-1, keepdim=True), labels[start : start + size].to(torch.long)
