"""The temperature at which a classifier's confidence is right on average, by its likelihood."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor

from posthoc.collect.outputs import Outputs

__all__ = ["best_inverse", "best_log_likelihood", "limit_reached", "suitable_temperature"]

LEAST, MOST = 1e-4, 1e4
"""How far logits are apart on average at the least and the greatest 1/τ."""
VALUES_AT_ONCE = 2**22
"""Logits read at once."""
TYPICAL = 4096
"""Rows that a suitable temperature is taken from,"""
CLEARLY = 2.0
"""which is the network's own unless the log-likelihood of another is so much greater (Akaike, 1974),"""
CLOSE, APART = 0.1, 50.0
"""and leaves logits so far apart."""

Part = tuple[Tensor, Tensor]
"""Logits (N, C), the largest of each row zero, and what is true (N,)."""


def best_inverse(outputs: Outputs) -> float:
    """The 1/τ at which the likelihood is greatest: Newton's steps, kept within a bracket. The log-likelihood is concave
    in 1/τ, so there is one."""
    low, high = limits(outputs)
    few = list(parts(outputs)) if outputs.outputs.numel() <= VALUES_AT_ONCE else None  # else read anew every time

    def slopes_at(inverse: float) -> tuple[float, float]:
        return slopes(few or parts(outputs), inverse)

    if slopes_at(low)[0] >= 0.0:
        return low
    if slopes_at(high)[0] <= 0.0:
        return high
    at = min(max(1.0, low), high)
    for _ in range(100):
        slope, curvature = slopes_at(at)
        step = at - slope / curvature if curvature > 0.0 else math.nan
        if abs(step - at) <= 1e-12 * at:  # before the bracket is asked, one end of which is now here
            return step
        low, high = (low, at) if slope > 0.0 else (at, high)
        at = step if low < step < high else math.sqrt(low * high)
    return at


def limits(outputs: Outputs) -> tuple[float, float]:
    """The least and the greatest 1/τ, by the size of the logits."""
    size = apart(next(parts(outputs))[0])
    return LEAST / size, MOST / size


def limit_reached(outputs: Outputs, inverse: float) -> Literal["low", "high"] | None:
    """Whether a 1/τ is at the least that it can be (predictions are no better than chance) or the greatest (they are
    all right)."""
    low, high = limits(outputs)
    if inverse >= high * (1.0 - 1e-9):
        return "high"
    return "low" if inverse <= low * (1.0 + 1e-9) else None


@torch.no_grad()
def suitable_temperature(outputs: Outputs) -> float:
    """The temperature that suits some rows, and one more that is wrong: few rows may all be right."""
    some = with_one_wrong(outputs.only().spread(TYPICAL))
    inverse, size = best_inverse(some), apart(next(parts(some))[0])
    if log_likelihood(some, inverse) - log_likelihood(some, 1.0) <= CLEARLY:
        return 1.0
    return 1.0 / min(max(inverse, CLOSE / size), APART / size)


def with_one_wrong(rows: Outputs) -> Outputs:
    """A row more, as sure as is usual, whose second class is true."""
    best = rows.outputs.double().topk(2, -1)
    usual = (best.values[:, 0] - best.values[:, 1]).median(0).indices
    outputs = torch.cat([rows.outputs, rows.outputs[usual, None]])
    assert rows.targets is not None
    return rows.with_outputs(outputs).with_targets(torch.cat([rows.targets, best.indices[usual, 1:].to(rows.targets)]))


def best_log_likelihood(outputs: Outputs) -> float:
    """Of all rows, at the temperature that suits them best."""
    return log_likelihood(outputs, best_inverse(outputs))


def log_likelihood(outputs: Outputs, inverse: float) -> float:
    return sum(float((inverse * z).log_softmax(-1).gather(-1, y[:, None]).sum()) for z, y in parts(outputs))


def apart(
    z: Tensor,  # (N, C)
) -> float:
    """How far logits are below the largest of their row, by the root of the mean square; 1 where they are all alike."""
    return float(z.square().mean().sqrt()) or 1.0


def slopes(blocks: Iterable[Part], inverse: float) -> tuple[float, float]:
    """The first two derivatives, in 1/τ, of the negative log-likelihood."""
    first = second = 0.0
    for z, y in blocks:
        p = (inverse * z).softmax(-1)
        mean = (p * z).sum(-1)
        wrong = mean - z.gather(-1, y[:, None]).squeeze(-1)
        both = torch.stack([wrong.sum(), (p * (z - mean[:, None]).square()).sum()])
        one, two = both.tolist()  # together: a GPU is waited for once
        first, second = first + one, second + two
    return first, second


def parts(outputs: Outputs) -> Iterator[Part]:
    rows = max(1, VALUES_AT_ONCE // outputs.outputs.shape[1])
    for start in range(0, len(outputs), rows):
        part = outputs[start : start + rows]
        assert part.targets is not None
        z = part.outputs.double()
        yield z - z.amax(-1, keepdim=True), part.targets.to(torch.long)
