"""What a report draws of a method: reliability, entropies, risk against coverage, error bars."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from posthoc.errors import DataError
from posthoc.evaluate.metrics import selective_risk
from posthoc.predictive.base import Predictive
from posthoc.validation import choice

__all__ = ["Curves"]

BINS, ENTROPY_BINS, COVERAGES, LEVELS, BARS = 15, 30, 50, 19, 100
"""Of confidence and of entropy; places of a risk–coverage curve; nominal levels; points shown with an error bar."""
LEVEL = 0.9
"""Of the intervals that are shown."""

Curve = dict[str, list[Any]]


class Curves:
    """Curves from predictions, batch after batch; a few numbers a point are kept."""

    def __init__(self, task: str) -> None:
        choice("task", task, ("classification", "regression"))
        self.task = task
        self._kept: dict[str, list[Tensor]] = {}
        self._classes = 0

    def update(self, pred: Predictive, y: Any) -> None:
        """Adds a batch."""
        y = torch.as_tensor(y, device=pred.mean.device)
        if self.task == "classification":
            confidence, said = pred.probs.max(-1)
            self._classes = pred.probs.shape[-1]
            self._keep(confidence=confidence, said=said, target=y.reshape(-1), entropy=pred.entropy())
        else:
            y = y.reshape(pred.mean.shape)
            low, high = pred.interval(LEVEL)
            level = (2.0 * pred.cdf(y) - 1.0).abs()
            self._keep(target=y, mean=pred.mean, low=low, high=high, level=level, variance=pred.variance)

    def update_ood(self, pred: Predictive) -> None:
        """Adds a batch of data from elsewhere, for a classifier to be unsure of."""
        self._keep(elsewhere=pred.entropy())

    def compute(self) -> dict[str, Curve]:
        """All curves, in what JSON knows."""
        if "target" not in self._kept:
            raise DataError("Expected at least one batch to draw curves of, got none.")
        if self.task == "classification":
            wrong = (self["said"] != self["target"]).double()
            return {
                "reliability": reliability(self["confidence"], 1.0 - wrong),
                "entropy": self._entropies(),
                "risk_coverage": risk_coverage(wrong, self["entropy"]),
            }
        error = (self["mean"] - self["target"]).square()
        shown = torch.linspace(0, len(error) - 1, min(BARS, len(error))).long()
        return {
            "calibration": calibration(self["level"]),
            "error_bars": {name: self[name][shown].tolist() for name in ("target", "mean", "low", "high")},
            "risk_coverage": risk_coverage(error, self["variance"]),
        }

    def examples(self, count: int) -> dict[str, list[dict[str, Any]]]:
        """The rows that a classifier is most and least sure of, and what it says of them."""
        order = self["entropy"].argsort(stable=True)
        return {
            "most_certain": [self._example(int(row)) for row in order[:count]],
            "least_certain": [self._example(int(row)) for row in order.flip(0)[:count]],
        }

    def _example(self, row: int) -> dict[str, Any]:
        return {
            "row": row,
            "target": int(self["target"][row]),
            "said": int(self["said"][row]),
            "probability": float(self["confidence"][row]),
            "entropy": float(self["entropy"][row]),
        }

    def __getitem__(self, name: str) -> Tensor:  # (N,) in float64
        return torch.cat(self._kept[name])

    def _keep(self, **columns: Tensor) -> None:
        for name, column in columns.items():
            self._kept.setdefault(name, []).append(column.detach().reshape(-1).double().cpu())

    def _entropies(self) -> Curve:
        edges = torch.linspace(0.0, math.log(max(self._classes, 2)), ENTROPY_BINS + 1, dtype=torch.float64)
        found: Curve = {"edges": edges.tolist(), "in": shares(self["entropy"], edges)}
        if "elsewhere" in self._kept:
            found["out"] = shares(self["elsewhere"], edges)
        return found


def reliability(confidence: Tensor, hit: Tensor) -> Curve:
    """Mean confidence and accuracy in bins of equal width, and the share of points in each."""
    place = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    count = torch.zeros(BINS, dtype=torch.float64).index_add(0, place, torch.ones_like(confidence))

    def mean(values: Tensor) -> list[float | None]:
        total = torch.zeros(BINS, dtype=torch.float64).index_add(0, place, values)
        return [float(t / n) if n else None for t, n in zip(total, count, strict=True)]

    return {"confidence": mean(confidence), "accuracy": mean(hit), "share": (count / len(confidence)).tolist()}


def shares(values: Tensor, edges: Tensor) -> list[float]:
    """Of values in each bin; what rounding puts beyond the last edge is in the last."""
    place = (torch.bucketize(values, edges, right=True) - 1).clamp(0, len(edges) - 2)
    return (torch.bincount(place, minlength=len(edges) - 1).double() / len(values)).tolist()


def risk_coverage(risk: Tensor, uncertainty: Tensor) -> Curve:
    """The mean risk of the points that are kept when the most uncertain are let go."""
    kept = selective_risk(uncertainty, risk)
    counts = (torch.arange(1, COVERAGES + 1, dtype=torch.float64) * len(risk) / COVERAGES).ceil().long()
    return {"coverage": (counts / len(risk)).tolist(), "risk": kept[counts - 1].tolist()}


def calibration(level: Tensor) -> Curve:
    """The share of points inside central intervals, by their nominal level."""
    nominal = torch.arange(1, LEVELS + 1, dtype=torch.float64) / (LEVELS + 1)
    found = torch.searchsorted(level.sort().values, nominal, right=True).double() / len(level)
    return {"level": nominal.tolist(), "coverage": found.tolist()}
