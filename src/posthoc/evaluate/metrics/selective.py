"""Selective prediction: how the risk falls when the least certain predictions are withheld."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posthoc.evaluate.metrics.base import Stored, label_targets
from posthoc.evaluate.metrics.regression import errors
from posthoc.evaluate.metrics.rows import Uncertainty, predicted_class, row_means, uncertainty
from posthoc.predictive.base import Predictive

__all__ = ["AURC", "RiskCoverage", "selective_risk"]


def selective_risk(
    score: Tensor,  # (N,)
    loss: Tensor,  # (N,)
) -> Tensor:  # (N,)
    """The mean loss of the k points of lowest score, for k = 1, …, N. Points of equal score stand in random order: each
    is given their mean loss, which is the expectation."""
    _, group, size = score.unique(return_inverse=True, return_counts=True)
    mean_loss = loss.new_zeros(len(size)).index_add(0, group, loss) / size
    kept = torch.arange(1, len(loss) + 1, dtype=loss.dtype, device=loss.device)
    return mean_loss.repeat_interleave(size).cumsum(0) / kept


class Selective(Stored):
    """What the curve and its area share: a point's uncertainty, `by`, and its loss, which is 1 for a wrong class, or
    the squared error of real numbers, averaged over the outputs."""

    def __init__(self, by: str | Uncertainty = "entropy", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.by = uncertainty(by)
        self._store("score")
        self._store("loss")

    def update(self, pred: Predictive, y: Any) -> None:
        """Adds a batch."""
        if hasattr(pred, "log_probs"):
            loss = label_targets(pred, y) != predicted_class(pred)
        else:
            loss = row_means(errors(pred, y).square())
        score, loss = self._taken(self.by(pred)), self._taken(loss)  # both, before either is kept
        self._keep("score", score)
        self._keep("loss", loss)

    def _risk(self) -> Tensor:  # (N,)
        score, loss = self._all("score"), self._all("loss")
        self._require_points(len(score))
        return selective_risk(score, loss)


class RiskCoverage(Selective):
    """The risk–coverage curve: the error rate (or mean squared error) of the most certain points, for every share.

    `by` is "entropy", "least_confidence", "mutual_information", "variance" (whose order is that of the standard
    deviations; for regression), or a function of predictions.
    """

    higher_is_better = None

    def compute(self) -> tuple[Tensor, Tensor]:  # (N,), (N,)
        """The coverages 1/N, …, 1 and the risk at each."""
        risk = self._risk()
        return torch.arange(1, len(risk) + 1, dtype=risk.dtype, device=risk.device) / len(risk), risk


class AURC(Selective):
    """The area under the risk–coverage curve (see `RiskCoverage`): its mean over the N coverages."""

    def compute(self) -> Tensor:
        """The area over all points seen."""
        return self._risk().mean()
