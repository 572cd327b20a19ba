"""Scores of a fitted method on data that neither it nor the network has seen: figures and curves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posthoc.base import CHUNK, Method
from posthoc.collect import opened
from posthoc.collect.loaders import iterate
from posthoc.collect.outputs import Outputs
from posthoc.errors import OptionError
from posthoc.evaluate import metrics as m
from posthoc.evaluate.cost import synchronize
from posthoc.evaluate.scores import Scores
from posthoc.methods.map import MAP
from posthoc.predictive.base import Predictive
from posthoc.predictive.calibration_error import confidence_bins
from posthoc.predictive.classification import ClassificationPredictive
from posthoc.validation import class_labels

Curve = dict[str, list[Any]]

CONFIDENCE_BINS, ENTROPY_BINS, COVERAGES, LEVELS, INTERVALS = 15, 30, 50, 19, 100
"""Bins of confidence and of entropy; points of a risk-coverage curve; nominal levels; points with an interval."""
LEVEL = 0.9
"""Of those intervals."""


def evaluate(method: Method, test: Outputs, *, ood: Outputs | None = None) -> dict[str, float]:
    """The figures of a method, and those of its bare predictor.

    Args:
        method: A fitted method.
        test: Outputs and targets, or the path of a file of them.
        ood: Out-of-distribution outputs, for a classifier to detect.

    Returns:
        Figures by name (see `Scores`), and those of the bare predictor under the same names with `base_` before them.

    Raises:
        DataError: If there are no targets.
        OptionError: If `ood` is given and the task is not classification.

    Example:
        >>> from posthoc import Outputs, Temperature
        >>> data = Outputs(4 * torch.eye(3).repeat(2, 1), torch.tensor([0, 1, 2, 0, 1, 0]))
        >>> figures = evaluate(Temperature(None, "classification").fit(data), data)
        >>> figures["nll"] < figures["base_nll"]
        True
    """
    test, ood = opened(test), opened(ood)
    require_ood_task(method.likelihood.task, ood)
    bare = score(MAP.beside(method), test, ood).figures
    return {**score(method, test, ood).figures, **{f"base_{name}": value for name, value in bare.items()}}


@dataclass(frozen=True)
class Evaluation:
    """What is known of a method's predictions for test data."""

    scores: Scores
    seconds: float
    """For the predictions of the test data, without the scoring."""
    classes: int = 0
    moved: float | None = None
    """The share of rows whose predicted class is not the network's, where the method can change it."""

    @property
    def figures(self) -> dict[str, float]:
        """Figures by name; see `Scores`. Of a method that can change the predicted class, and whose mean is the
        network's output, also `classes_moved`, the share of rows where it does."""
        return self.scores.compute() | ({} if self.moved is None else {"classes_moved": self.moved})

    def curves(self) -> dict[str, Curve]:
        """What a report draws, in types that JSON knows: those of `reliability`, `entropy`, `risk_coverage`,
        `calibration` and `error_bars` that apply to the task."""
        curves = {}
        for name, (make, needed) in CURVES.items():
            columns = [column for column in map(self.scores.column, needed) if column is not None]
            if len(columns) == len(needed):
                curves[name] = make(*columns)
        entropy, outside = (self.scores.column(m.uncertainty, outside=outside) for outside in (False, True))
        if self.classes and entropy is not None:
            curves["entropy"] = entropies(entropy, outside, self.classes)
        return curves


def score(method: Method, test: Any, ood: Any = None, *, device: torch.device | None = None) -> Evaluation:
    """Scores a fitted method; rows are predicted and forgotten a few at a time.

    Args:
        method: A fitted method.
        test: Data with targets, as `fit` takes them.
        ood: Out-of-distribution data, with or without targets.
        device: The GPU to wait for when time is measured, if the method computes on one.
    """
    scores, seconds, classes = Scores(method.likelihood, keep=(details,), ood=ood is not None), 0.0, 0
    moved: list[Tensor] = []
    with closing(method.stream_with_targets(test)) as parts:
        while True:
            synchronize(device)
            begin = time.perf_counter()
            part = next(parts, None)
            synchronize(device)
            seconds += time.perf_counter() - begin
            if part is None:
                break
            scores.update(*part)
            if isinstance(pred := part[0], ClassificationPredictive):
                classes = pred.log_probs.shape[1]
                if method.fixed_mean and not pred.keeps_argmax:
                    moved.append((pred.labels != pred.latent.mean.argmax(-1)).double())
    if ood is not None:
        for pred in method.stream(ood if isinstance(ood, Outputs) else iterate(ood, CHUNK)):
            scores.update_ood(pred)
    return Evaluation(scores, seconds, classes, float(torch.cat(moved).mean()) if moved else None)


def require_ood_task(task: str, ood: Any) -> None:
    """Raises `OptionError` for out-of-distribution data of a task other than classification."""
    if ood is not None and task != "classification":
        raise OptionError("Out-of-distribution data are for classification: leave them out for regression.")


def details(pred: Predictive, y: Any) -> Tensor:  # (N, 2) or (N, ..., 4) or (N, 0)
    """Predicted class and target; or target, mean and the ends of the interval; or nothing, for another task."""
    if hasattr(pred, "log_probs"):
        return torch.stack([pred.labels, class_labels(y, pred.log_probs)], -1)
    if hasattr(pred, "interval"):
        return torch.stack([m.real_targets(pred, y).double(), pred.mean.double(), *pred.interval(LEVEL)], -1)
    return torch.zeros(len(pred), 0)


def entropies(entropy: Tensor, outside: Tensor | None, classes: int) -> Curve:
    """Shares of the test data, and of out-of-distribution data if there are any, in bins of entropy."""
    top = math.log(classes)
    edges, counts = m.histogram(entropy, top, ENTROPY_BINS)
    curve = {"edges": edges.tolist(), "in": (counts.double() / len(entropy)).tolist()}
    if outside is not None:
        curve["out"] = (m.histogram(outside, top, ENTROPY_BINS)[1].double() / len(outside)).tolist()
    return curve


def reliability(confidence: Tensor, hits: Tensor, bins: int = CONFIDENCE_BINS) -> Curve:
    """Mean confidence and accuracy by bins of equal width (None if empty), and the share and number of points."""
    points, *sums = confidence_bins(confidence, hits, bins)
    means = [[float(total / n) if n else None for total, n in zip(each, points, strict=True)] for each in sums]
    share, count = (points / len(hits)).tolist(), points.tolist()
    return {"confidence": means[0], "accuracy": means[1], "share": share, "count": count}


def risk_coverage(uncertainty: Tensor, loss: Tensor) -> Curve:
    """The mean loss of the points that are kept when the most uncertain are withheld."""
    risk = m.selective_risk(uncertainty, loss)
    kept = (torch.arange(1, COVERAGES + 1, dtype=torch.float64) * len(risk) / COVERAGES).ceil().long()
    return {"coverage": (kept / len(risk)).tolist(), "risk": risk[kept - 1].tolist()}


def calibration(below: Tensor) -> Curve:
    """The share of targets inside central intervals, by nominal level."""
    level = (2.0 * below - 1.0).abs().reshape(-1).sort().values
    nominal = torch.arange(1, LEVELS + 1, dtype=torch.float64) / (LEVELS + 1)
    coverage = torch.searchsorted(level, nominal, right=True).double() / len(level)
    return {"level": nominal.tolist(), "coverage": coverage.tolist()}


def shown_intervals(shown: Tensor, below: Tensor | None = None, *, most: int = INTERVALS) -> Curve:
    """Target, mean and the ends of the interval of rows that are evenly spread over all."""
    rows = shown.reshape(-1, 4)
    chosen = rows[torch.linspace(0, len(rows) - 1, min(most, len(rows))).long()]
    return dict(zip(("target", "mean", "low", "high"), chosen.T.tolist(), strict=True))


CURVES: dict[str, tuple[Callable[..., Curve], tuple[m.Score, ...]]] = {
    "reliability": (reliability, (m.confidence, m.hit)),
    "risk_coverage": (risk_coverage, (m.uncertainty, m.default_loss)),
    "calibration": (calibration, (m.probability_below,)),
    "error_bars": (shown_intervals, (details, m.probability_below)),
}
"""The curves that follow from scores of the test data, and these scores."""
