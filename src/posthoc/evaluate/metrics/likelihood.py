"""The score that both tasks share."""

from __future__ import annotations

from typing import Any

from posthoc.evaluate.metrics.base import Mean
from posthoc.predictive.base import Predictive

__all__ = ["NLL"]


class NLL(Mean):
    """Negative log-likelihood of a point, in nats (of its density in the user's units, in regression)."""

    def update(self, pred: Predictive, y: Any) -> None:
        """Adds a batch."""
        if len(pred):
            self._add(-pred.log_prob(y))
