"""The temperature at which a classifier's confidence is right on average, by its likelihood."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from posthoc.outputs import Outputs

__all__ = ["LIMITS", "best_inverse"]

LIMITS = (1e-3, 1e3)
"""The least and the greatest 1/τ."""
VALUES_AT_ONCE = 2**22
"""Logits read at once."""

Part = tuple[Tensor, Tensor]
"""Logits (N, C), the largest of each row zero, and what is true (N,)."""


def best_inverse(outputs: Outputs) -> float:
    """The 1/τ at which the likelihood is greatest: Newton's steps, kept within a bracket. The log-likelihood is concave
    in 1/τ, so there is one."""
    low, high = LIMITS
    few = list(parts(outputs)) if outputs.outputs.numel() <= VALUES_AT_ONCE else None  # else read anew every time

    def slopes_at(inverse: float) -> tuple[float, float]:
        return slopes(few or parts(outputs), inverse)

    if slopes_at(low)[0] >= 0.0:
        return low
    if slopes_at(high)[0] <= 0.0:
        return high
    at = 1.0
    for _ in range(100):
        slope, curvature = slopes_at(at)
        step = at - slope / curvature if curvature > 0.0 else math.nan
        if abs(step - at) <= 1e-12 * at:  # before the bracket is asked, one end of which is now here
            return step
        low, high = (low, at) if slope > 0.0 else (at, high)
        at = step if low < step < high else math.sqrt(low * high)
    return at


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
