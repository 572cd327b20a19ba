"""`Scores`: all figures of a task, batch by batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from posthoc.errors import DataError, WrongTaskError
from posthoc.evaluate import metrics as m
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.registry import make_likelihood
from posthoc.predictive.base import Predictive
from posthoc.predictive.calibration_error import expected_calibration_error, smooth_calibration_error


@dataclass(frozen=True)
class Metric:
    """A figure as a function of scores.

    Args:
        scores: Functions (pred, y) -> (N,) or (N, ...).
        figure: From the scores of all rows, one tensor a function, to one number.
        detects: Whether `figure` takes the scores of in-distribution data and those of out-of-distribution data.
    """

    scores: tuple[m.Score, ...]
    figure: Callable[..., Tensor] = torch.mean
    detects: bool = False


METRICS: dict[str, Metric] = {
    "nll": Metric((m.log_loss,)),
    "accuracy": Metric((m.hit,)),
    "ece": Metric((m.confidence, m.hit), expected_calibration_error),
    "smooth_ece": Metric((m.confidence, m.hit), smooth_calibration_error),
    "brier": Metric((m.squared_distance,)),
    "rmse": Metric((m.squared_error,), lambda squares: squares.mean().sqrt()),
    "mae": Metric((m.absolute_error,)),
    "crps": Metric((m.ranked_probability_score,)),
    "cqm": Metric((m.probability_below,), m.cqm_of),
    "pit_error": Metric((m.probability_below,), m.distance_to_uniform),
    **{f"coverage_{percent}": Metric((partial(m.covered, level=percent / 100),)) for percent in (50, 90, 95)},
    "width_90": Metric((partial(m.interval_width, level=0.9),)),
    "interval_score_90": Metric((partial(m.winkler_score, level=0.9),)),
    "aurc": Metric((m.uncertainty, m.default_loss), lambda score, loss: m.selective_risk(score, loss).mean()),
    "ood_auc": Metric((m.uncertainty,), m.auroc, detects=True),
    "ood_fpr95": Metric((m.uncertainty,), partial(m.fpr_at, 0.95), detects=True),
    "ood_score_auc": Metric((m.ood_score,), m.auroc, detects=True),
}
"""Metrics by name; `Likelihood.metrics` names those of a task."""

RESAMPLES, RESAMPLED_ROWS = 100, 10_000
"""Of the bootstrap. Where there are more rows, it draws this many and scales the error to the number of all rows."""


class Scores:
    """The figures of a task from predictions that come batch by batch.

    Classification: `nll`, `accuracy`, `ece` (15 bins of equal width), `smooth_ece`, `brier` (summed over classes),
    `aurc` (of the error rate, by entropy) and, after `update_ood`, `ood_auc` and `ood_fpr95` (by entropy) and, where
    predictions have an `ood_score`, `ood_score_auc`. Regression: `nll`, `rmse`, `mae`, `crps`, `cqm`, `pit_error`,
    `coverage_50`, `coverage_90`, `coverage_95`, `width_90`, `interval_score_90`, `aurc` (of the squared error, by
    standard deviation). Shares are fractions, the rest is in the user's units. A few float64 numbers a row are kept, on
    the CPU, however many classes there are; therefore `posthoc.evaluate.metrics.classwise_ece`, which needs all
    probabilities, is not among the figures.

    Args:
        task: A likelihood, whose `metrics()` are computed, or the name of one.
        keep: More scores to keep, for `column`.
        ood: Whether there will be out-of-distribution data; without them their scores are not computed.

    Example:
        >>> from posthoc import MAP, Outputs
        >>> data = Outputs(2 * torch.eye(3), torch.arange(3))
        >>> scores = Scores("classification")
        >>> scores.update(MAP(None, "classification").fit(data).predict(data), data.targets)
        >>> scores.compute()["accuracy"]
        1.0
    """

    def __init__(self, task: str | Likelihood, keep: Sequence[m.Score] = (), *, ood: bool = True) -> None:
        likelihood = make_likelihood(task)
        self.task = likelihood.task
        self.metrics: dict[str, Metric] = {}
        for named in likelihood.metrics():
            name, metric = (named, METRICS[named]) if isinstance(named, str) else (named.__name__, Metric((named,)))
            if ood or not metric.detects:
                self.metrics[name] = metric
        needed = [score for metric in self.metrics.values() for score in metric.scores]
        detecting = [score for metric in self.metrics.values() if metric.detects for score in metric.scores]
        self._inside: dict[m.Score, list[Tensor]] = {score: [] for score in (*needed, *keep)}
        self._outside: dict[m.Score, list[Tensor]] = {score: [] for score in detecting}

    def update(self, pred: Predictive, y: Any) -> None:
        """Adds a batch. A batch with an error is left out as a whole.

        Args:
            pred: Predictions for N rows.
            y: The N targets.

        Raises:
            DataError: If targets do not fit the predictions, or a score is NaN.
            WrongTaskError: If the predictions are of another task.
        """
        self._add(self._inside, pred, y)

    def update_ood(self, pred: Predictive) -> None:
        """Adds a batch of out-of-distribution data.

        Raises:
            WrongTaskError: If the task has no figure for such data.
        """
        if not self._outside:
            raise WrongTaskError(f"update_ood is for classification; these are the scores of a {self.task}.")
        self._add(self._outside, pred)

    def compute(self) -> dict[str, float]:
        """All figures so far, of the rows of all processes where several have joined with `torch.distributed`.

        Raises:
            DataError: If there are no rows.
        """
        return {name: float(metric.figure(*columns)) for name, metric, columns in self._applicable()}

    def standard_errors(self) -> dict[str, float]:
        """The standard error of each figure over test sets of this size: of a mean from its variance, else by a
        bootstrap over rows (with a fixed seed)."""
        generator = torch.Generator().manual_seed(0)
        errors = {}
        for name, metric, columns in self._applicable():
            if metric.figure is torch.mean:
                errors[name] = float(columns[0].std() / len(columns[0]) ** 0.5) if len(columns[0]) > 1 else math.nan
            else:
                errors[name] = bootstrap_error(metric, columns, generator)
        return {name: error for name, error in errors.items() if math.isfinite(error)}

    def column(self, score: m.Score, *, outside: bool = False) -> Tensor | None:  # (N,) or (N, ...)
        """A score of all rows of this process, or None if no metric of the task needs it or there are no rows."""
        parts = (self._outside if outside else self._inside).get(score)
        return torch.cat(parts) if parts else None

    def _add(self, kept: dict[m.Score, list[Tensor]], pred: Predictive, y: Any = None) -> None:
        if len(pred):
            known = [score for score in kept if score is not m.ood_score or pred.ood is not None]
            batch = [m.scores(score, pred, y).cpu() for score in known]
            for score, values in zip(known, batch, strict=True):
                kept[score].append(values)

    def _applicable(self) -> Iterator[tuple[str, Metric, list[Tensor]]]:
        """Metrics with the columns they take; those of out-of-distribution data only where there are such data."""
        inside = {score: gathered(parts) for score, parts in self._inside.items()}
        outside = {score: gathered(parts) for score, parts in self._outside.items()}
        if not any(map(len, inside.values())):
            raise DataError("Expected some data before Scores.compute(), got none: call update first.")
        for name, metric in self.metrics.items():
            sides = (inside, outside) if metric.detects else (inside,)
            columns = [side[score] for side in sides for score in metric.scores]
            if all(map(len, columns)):
                yield name, metric, columns


def bootstrap_error(metric: Metric, columns: list[Tensor], generator: torch.Generator) -> float:
    """The standard deviation of a figure over resamples of its rows."""
    sizes = [len(column) for column in (columns if metric.detects else columns[:1])]
    figures = []
    for _ in range(RESAMPLES):
        chosen = [torch.randint(n, (min(n, RESAMPLED_ROWS),), generator=generator) for n in sizes]
        chosen = chosen if metric.detects else chosen * len(columns)  # the scores of a row stay together
        figures.append(metric.figure(*(column[rows] for column, rows in zip(columns, chosen, strict=True))))
    # The error falls with the root of the number of rows: that of a part gives that of all.
    share = max(min(n, RESAMPLED_ROWS) / n for n in sizes)
    return float(torch.stack(figures).std()) * math.sqrt(share)


def gathered(parts: list[Tensor]) -> Tensor:  # (N,) or (N, ...)
    """A column of all rows, of every process if there are several; one without rows has an empty column."""
    column = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
    if not (distributed.is_available() and distributed.is_initialized()):
        return column
    columns: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(columns, column)
    return torch.cat(columns)
