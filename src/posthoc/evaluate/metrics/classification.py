"""How good predicted class probabilities are."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from posthoc.errors import DataError
from posthoc.evaluate.metrics.base import Mean, Stored, Streaming, label_targets
from posthoc.evaluate.metrics.rows import by_rows, entropy, predicted_class
from posthoc.predictive.base import Predictive
from posthoc.validation import integer

__all__ = ["ECE", "Accuracy", "AdaptiveECE", "Brier", "EntropyHistogram"]


class Accuracy(Mean):
    """The share of points whose most probable class is theirs."""

    higher_is_better = True

    def update(self, pred: Predictive, y: Any) -> None:
        """Adds a batch."""
        y = label_targets(pred, y)
        self._add(predicted_class(pred) == y)


class Brier(Mean):
    """The multi-class Brier score, Σ_c (p_c - 1[y = c])² averaged over the points: from 0 to 2."""

    def update(self, pred: Predictive, y: Any) -> None:
        """Adds a batch."""
        self._add(by_rows(squared_distance, pred, label_targets(pred, y)))


def squared_distance(pred: Predictive, y: Tensor) -> Tensor:  # (N,)
    """From the probabilities to the class that occurred, as a one-hot vector."""
    probs = pred.log_probs.double().exp()
    return (probs - one_hot(y, probs.shape[-1])).square().sum(-1)


def confidence_and_hits(pred: Predictive, y: Any) -> tuple[Tensor, Tensor]:
    """The probability of the predicted class, and 1 where it is right, else 0."""
    y = label_targets(pred, y)
    top = predicted_class(pred)
    return pred.log_probs.gather(-1, top[:, None]).squeeze(-1).double().exp(), (top == y).double()


class ECE(Streaming):
    """Expected calibration error of the predicted class: |accuracy - confidence| in bins of equal width, weighted by
    their points. Bins are open on the left, (a, b], and the last holds a confidence of 1."""

    gaps: Tensor
    count: Tensor

    def __init__(self, bins: int = 15, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.bins = integer("bins", bins, 1)
        self.add_state("gaps", torch.zeros(self.bins, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, pred: Predictive, y: Any) -> None:
        """Adds a batch."""
        confidence, hits = (self._taken(rows).to(self.device) for rows in confidence_and_hits(pred, y))
        edges = torch.linspace(0.0, 1.0, self.bins + 1, dtype=torch.float64, device=self.device)
        self.gaps = self.gaps.index_add(0, torch.bucketize(confidence, edges[1:-1]), hits - confidence)
        self.count = self.count + len(hits)

    def compute(self) -> Tensor:
        """The error over all points seen."""
        self._require_points(self.count)
        return self.gaps.abs().sum() / self.count


class AdaptiveECE(Stored):
    """Expected calibration error in bins of equal mass: as many points in each, save that equal confidences share a
    bin, so that the order of the points does not matter."""

    def __init__(self, bins: int = 15, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.bins = integer("bins", bins, 1)
        self._store("confidence")
        self._store("hits")

    def update(self, pred: Predictive, y: Any) -> None:
        """Adds a batch."""
        confidence, hits = confidence_and_hits(pred, y)
        self._keep("confidence", confidence)
        self._keep("hits", hits)

    def compute(self) -> Tensor:
        """The error over all points seen."""
        confidence, hits = self._all("confidence"), self._all("hits")
        n = len(hits)
        self._require_points(n)
        last = [-(-n * k // self.bins) - 1 for k in range(1, self.bins)]  # the last point of each bin but one, by rank
        edges = confidence.sort().values[last]
        gaps = confidence.new_zeros(self.bins).index_add(0, torch.bucketize(confidence, edges), hits - confidence)
        return gaps.abs().sum() / n


class EntropyHistogram(Streaming):
    """How many points have which entropy: `compute()` gives the edges of equal bins from 0 to log C, and the counts."""

    higher_is_better = None
    counts: Tensor
    classes: Tensor

    def __init__(self, bins: int = 50, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.bins = integer("bins", bins, 1)
        self.add_state("counts", torch.zeros(self.bins, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("classes", torch.zeros((), dtype=torch.int64), dist_reduce_fx="max")

    def update(self, pred: Predictive, y: Any = None) -> None:
        """Adds a batch; targets are not looked at."""
        found = self._taken(entropy(pred)).to(self.device)
        classes = pred.mean.shape[1]
        if int(self.classes) not in (0, classes):
            raise DataError(f"Expected predictions of {int(self.classes)} classes, as before, got {classes}.")
        self.classes = torch.full_like(self.classes, classes)
        # A uniform prediction's entropy may round above log C.
        index = (found * (self.bins / math.log(classes))).long().clamp_max(self.bins - 1)
        self.counts = self.counts.index_add(0, index, torch.ones_like(index))

    def compute(self) -> tuple[Tensor, Tensor]:  # (bins + 1,), (bins,)
        """The edges of the bins and the number of points in each."""
        self._require_points(self.counts.sum())
        top = math.log(int(self.classes))
        return torch.linspace(0.0, top, self.bins + 1, dtype=torch.float64, device=self.device), self.counts
