"""How well an uncertainty tells out-of-distribution data, the positives, from in-distribution data."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from posthoc.errors import OptionError
from posthoc.evaluate.metrics.base import Stored
from posthoc.evaluate.metrics.rows import Uncertainty, uncertainty
from posthoc.predictive.base import Predictive

__all__ = ["OOD", "auroc", "fpr_at"]


def auroc(
    inside: Tensor,  # (N,)
    outside: Tensor,  # (M,)
) -> Tensor:
    """The probability that an outside score exceeds an inside one, ties counted half: the area under the ROC curve."""
    ordered = inside.sort().values
    below, at_most = (torch.searchsorted(ordered, outside, right=right) for right in (False, True))
    return (below + at_most).sum().double() / (2 * len(inside) * len(outside))


def fpr_at(
    tpr: float,
    inside: Tensor,  # (N,)
    outside: Tensor,  # (M,)
) -> Tensor:
    """The share of inside scores above the highest threshold that at least a share `tpr` of outside scores reach."""
    reaching = math.ceil(tpr * len(outside) - 1e-9)  # 0.95 · 20 is 19, whatever it rounds to
    threshold = outside.sort(descending=True).values[reaching - 1]
    return (inside >= threshold).double().mean()


class OOD(Stored):
    """Detection of out-of-distribution data by an uncertainty: `compute()` gives `auc`, the area under the ROC curve
    (exact, ties counted half), and `fpr95`, the share of in-distribution data flagged where 95 % of the others are.

    The score is "entropy" (of the class), "mutual_information" (of class and function), "variance" (the mean over the
    outputs), "least_confidence" (one minus the largest probability), or a function of predictions.
    """

    higher_is_better = None

    def __init__(self, score: str | Uncertainty = "entropy", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.score = uncertainty(score)
        self._store("inside")
        self._store("outside")

    def update(self, pred: Predictive, is_ood: bool) -> None:
        """Adds a batch that is out of distribution, or one that is not."""
        if not isinstance(is_ood, bool):
            raise OptionError(
                f"Expected is_ood to be True or False for the whole batch, got a {type(is_ood).__name__}."
            )
        self._keep("outside" if is_ood else "inside", self.score(pred))

    def compute(self) -> dict[str, Tensor]:
        """`auc` and `fpr95` over all points seen."""
        inside, outside = self._all("inside"), self._all("outside")
        self._require_points(len(inside), "in-distribution data")
        self._require_points(len(outside), "out-of-distribution data")
        return {"auc": auroc(inside, outside), "fpr95": fpr_at(0.95, inside, outside)}
