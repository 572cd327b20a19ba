"""How a head does on rows, while it is being made: for early stopping, and for choosing among several."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from posthoc.collect.outputs import Outputs
from posthoc.fmgp.fitted import Head
from posthoc.predictive.base import ClassificationPredictive
from posthoc.training import Ranks

__all__ = ["log_probs", "validation_score"]


def validation_score(head: Head, val: Outputs) -> Callable[[], float]:
    """Minus the mean log-probability of the validation data, as `predict` would give it."""

    def score() -> float:
        w, total = head.process.prepare(), 0.0
        for rows in torch.arange(len(val)).split(1024):
            part = val[rows].to(head.device)
            total -= float(head.predictive(part, w).log_prob(part.targets).sum())
        return total / len(val)

    return score


@torch.no_grad()
def log_probs(head: Head, rows: Outputs) -> Tensor:  # (N, C)
    """What a head says of some rows."""
    w, parts = head.prepared(), []
    for start in range(0, len(rows), 1024):
        predictive = head.predictive(rows[start : start + 1024].to(head.device), w)
        assert isinstance(predictive, ClassificationPredictive)
        parts.append(predictive.log_probs)
    found = torch.cat(parts)
    Ranks().share([found])  # to the bit: what is decided by them must be the same everywhere
    return found
