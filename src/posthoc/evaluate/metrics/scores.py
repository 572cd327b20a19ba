"""`Scores`: all the usual figures of a task at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from torch import nn
from torchmetrics import Metric
from torchmetrics.wrappers.abstract import WrapperMetric

from posthoc.errors import DataError, OptionError, WrongTaskError
from posthoc.evaluate.metrics.classification import ECE, Accuracy, Brier
from posthoc.evaluate.metrics.likelihood import NLL
from posthoc.evaluate.metrics.ood import OOD
from posthoc.evaluate.metrics.regression import CQM, CRPS, MAE, RMSE, Coverage, Width
from posthoc.evaluate.metrics.selective import AURC
from posthoc.predictive.base import Predictive
from posthoc.validation import choice

__all__ = ["Scores"]


def classification(**kwargs: Any) -> dict[str, Metric]:
    """The figures of a classification."""
    return {
        "nll": NLL(**kwargs),
        "accuracy": Accuracy(**kwargs),
        "ece": ECE(15, **kwargs),
        "brier": Brier(**kwargs),
        "aurc": AURC("entropy", **kwargs),
        "ood": OOD("entropy", **kwargs),
    }


def regression(**kwargs: Any) -> dict[str, Metric]:
    """The figures of a regression."""
    return {
        "nll": NLL(**kwargs),
        "rmse": RMSE(**kwargs),
        "mae": MAE(**kwargs),
        "crps": CRPS(**kwargs),
        "cqm": CQM(**kwargs),
        "coverage_50": Coverage(0.5, **kwargs),
        "coverage_90": Coverage(0.9, **kwargs),
        "coverage_95": Coverage(0.95, **kwargs),
        "width_90": Width(0.9, **kwargs),
        "aurc": AURC("variance", **kwargs),
    }


TASKS: dict[str, Callable[..., dict[str, Metric]]] = {"classification": classification, "regression": regression}


class Scores(WrapperMetric):
    """The usual figures of a task, batch after batch, as one flat dictionary of numbers.

    Classification: `nll`, `accuracy`, `ece` (15 equal bins), `brier` (summed over classes), `aurc` (of the error rate,
    by entropy), and, where `update_ood` was called, `ood_auc` and `ood_fpr95` (by entropy).

    Regression: `nll`, `rmse`, `mae`, `crps`, `cqm`, `coverage_50`, `coverage_90`, `coverage_95`, `width_90`, `aurc` (of
    the squared error, by variance).

    Shares are fractions, the rest is in the user's units. What is kept is a few numbers a point, however many classes.
    """

    def __init__(self, task: str, **kwargs: Any) -> None:
        super().__init__()
        choice("task", task, tuple(TASKS))
        self.task = task
        # A ModuleDict, so that they move between devices with their owner.
        self.metrics = cast(dict[str, Metric], nn.ModuleDict(TASKS[task](**kwargs)))

    def update(self, pred: Predictive, y: Any) -> None:
        """Adds a batch, whole or not at all."""
        self.merge_state(self._scores_of(pred, y))

    def update_ood(self, pred: Predictive) -> None:
        """Adds a batch of out-of-distribution data."""
        if "ood" not in self.metrics:
            raise WrongTaskError(f"update_ood is for classification; these are the scores of a {self.task}.")
        self.metrics["ood"].update(pred, is_ood=True)

    def compute(self) -> dict[str, float]:
        """All figures so far."""
        figures = {name: float(metric.compute()) for name, metric in self.metrics.items() if name != "ood"}
        if "ood" in self.metrics:
            # Asked even if this rank has seen no such data: others may have, and wait for it.
            with suppress(DataError):
                figures |= {f"ood_{name}": float(value) for name, value in self.metrics["ood"].compute().items()}
        return figures

    def forward(self, pred: Predictive, y: Any) -> dict[str, float]:
        """Adds a batch, and gives the figures of that batch alone."""
        batch = self._scores_of(pred, y)
        self.merge_state(batch)
        return batch.compute()

    def _scores_of(self, pred: Predictive, y: Any) -> Scores:
        """A batch's own, apart from what is there until every metric has accepted it."""
        batch = Scores(self.task, sync_on_compute=False).to(self.device)
        for name, metric in batch.metrics.items():
            metric.update(pred, False if name == "ood" else y)
        return batch

    def reset(self) -> None:
        """Forgets all data."""
        super().reset()
        for metric in self.metrics.values():
            metric.reset()

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Adds what other `Scores` of the same task have seen."""
        if not isinstance(incoming_state, Scores) or incoming_state.task != self.task:
            raise OptionError(f"Expected Scores({self.task!r}) to merge with, got {incoming_state}.")
        for name, metric in self.metrics.items():
            metric.merge_state(incoming_state.metrics[name])
