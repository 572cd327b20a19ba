"""A last correction of a classifier's confidence, from rows that it was not fitted on.

One temperature makes confidence right on average. Predictions that are sure and predictions that are not may still be
off in opposite ways, so the temperature may depend on how unsure a prediction is: t(x) = t exp(b h(x)), with h the
entropy as a share of its largest. The predicted class stays, and means do.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from posthoc.collect.outputs import Outputs
from posthoc.likelihoods.temperature import best_inverse
from posthoc.predictive.classification import ClassificationPredictive

__all__ = ["NONE", "Recalibration"]

BENDS = tuple(b / 10.0 for b in range(-6, 7))
"""Every b that is tried: an exponent this small keeps surer predictions surer."""


class Recalibration(NamedTuple):
    """t and b."""

    temperature: float
    bend: float

    @classmethod
    def of(cls, log_p: Tensor, y: Tensor) -> Recalibration:
        """What suits these rows best; with a b only where it earns more than it costs to learn (Schwarz, 1978)."""
        found = {}
        for bend in BENDS:
            suited = cls(1.0, bend).again(log_p, y)
            right = suited.log_probs(log_p).gather(-1, y[:, None])
            found[suited] = float(right.sum()) - (0.5 * math.log(len(y)) if bend else 0.0)
        return max(found, key=found.__getitem__)

    def again(self, log_p: Tensor, y: Tensor) -> Recalibration:
        """What suits these rows best with the same b."""
        scores = log_p.double() / Recalibration(1.0, self.bend).temperatures(log_p)
        return Recalibration(1.0 / best_inverse(Outputs.trusted(outputs=scores, targets=y)), self.bend)

    def temperatures(self, log_p: Tensor) -> Tensor:  # (N, 1)
        """t(x), for each row of log-probabilities."""
        unsure = torch.special.entr(log_p.double().exp()).sum(-1, keepdim=True) / math.log(log_p.shape[-1])
        return self.temperature * torch.exp(self.bend * unsure)

    def log_probs(self, log_p: Tensor) -> Tensor:  # (N, C), float64
        """Log-probabilities, corrected."""
        return (log_p.double() / self.temperatures(log_p)).log_softmax(-1)

    def __call__(self, pred: ClassificationPredictive) -> ClassificationPredictive:
        """The same logits, with a temperature of its own for each row and the covariance that goes with it."""
        return pred if self == NONE else pred.tempered(self.temperatures(pred.log_probs))


NONE = Recalibration(1.0, 0.0)
"""Leaves everything as it is."""
