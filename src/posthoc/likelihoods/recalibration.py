"""A correction of a classifier's confidence, fitted on held-out rows.

One temperature corrects confidence on average. Certain and uncertain predictions may still be wrong in opposite
directions, so the temperature may depend on the entropy: t(x) = t exp(b h(x)), with h the entropy as a share of its
maximum. The predicted class and the means stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from posthoc.likelihoods.temperature import best_inverse
from posthoc.predictive.classification import ClassificationPredictive

BENDS = tuple(b / 10.0 for b in range(-6, 7))
"""The values of b that are tried; with these, more certain predictions remain more certain."""


class Recalibration(NamedTuple):
    """The correction t(x) = temperature · exp(bend · h(x)).

    Example:
        >>> log_p = torch.tensor([[0.9, 0.1]]).log()
        >>> Recalibration(2.0, 0.0).log_probs(log_p).exp()
        tensor([[0.7500, 0.2500]], dtype=torch.float64)
    """

    temperature: float
    bend: float

    @classmethod
    def of(cls, log_p: Tensor, y: Tensor, bends: Sequence[float] = BENDS) -> Recalibration:
        """The best correction of log-probabilities (N, C) for labels (N,); with a bend only if its gain in
        log-likelihood exceeds the cost of a parameter (Schwarz, 1978)."""
        scores = {}
        for bend in bends:
            inverse = best_inverse(log_p.double() / cls(1.0, bend).temperatures(log_p), y)
            correction = cls(1.0 / inverse, bend)
            log_prob = correction.log_probs(log_p).gather(-1, y[:, None])
            scores[correction] = float(log_prob.sum()) - (0.5 * math.log(len(y)) if bend else 0.0)
        return max(scores, key=scores.__getitem__)

    def temperatures(self, log_p: Tensor) -> Tensor:
        """t(x) for each row of log-probabilities, (N, 1)."""
        entropy = torch.special.entr(log_p.double().exp()).sum(-1, keepdim=True) / math.log(log_p.shape[-1])
        return self.temperature * torch.exp(self.bend * entropy)

    def log_probs(self, log_p: Tensor) -> Tensor:
        """The corrected log-probabilities, (N, C) in float64."""
        return (log_p.double() / self.temperatures(log_p)).log_softmax(-1)

    def __call__(self, pred: ClassificationPredictive) -> ClassificationPredictive:
        """The predictions with the temperature and the logits' covariance of each row multiplied by t(x) and t(x)²."""
        return pred if self == NONE else pred.tempered(self.temperatures(pred.log_probs))


NONE = Recalibration(1.0, 0.0)
"""No correction."""
