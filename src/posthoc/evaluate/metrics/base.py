"""What all metrics share: states that can be summed or joined across batches and ranks, in float64."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from posthoc.errors import DataError, OptionError, WrongTaskError
from posthoc.predictive.base import Predictive
from posthoc.validation import class_labels, regression_targets

__all__ = ["Mean", "Stored", "Streaming", "fraction", "label_targets", "real_targets"]


class Streaming(Metric):
    """A metric that is fed batch after batch, on one rank or many, and refuses to speak of no data."""

    full_state_update = False
    is_differentiable = False
    higher_is_better: bool | None = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # A MetricCollection lets metrics share one state if their states look alike after the first batch, as those of
        # Coverage(0.5) and Coverage(0.9) may. NaN is like nothing.
        self.add_state("unlike", torch.tensor(torch.nan, dtype=torch.float64), dist_reduce_fx="max")

    @property
    def dtype(self) -> torch.dtype:
        """float64, whatever the predictions': a rank without data joins the others with an empty tensor of it."""
        return torch.float64

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Adds what another metric of this kind has seen."""
        super().merge_state(incoming_state)
        self._computed = None  # else compute() would go on giving the figure from before

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = super()._wrap_compute(compute)

        @functools.wraps(compute)
        def checked() -> Any:
            # Whether there are data is known once the ranks have been joined: torchmetrics' warning comes too soon.
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The ``compute`` method of metric", UserWarning)
                try:
                    return wrapped()
                except DataError:
                    if self._is_synced:
                        self.unsync()
                    raise

        return checked

    def _taken(self, scores: Tensor) -> Tensor:
        """Scores as they are added: numbers, in float64, without gradients."""
        scores = scores.detach().double()
        if bool(scores.isnan().any()):
            row = int(scores.isnan().nonzero()[0, 0])
            raise DataError(
                f"Expected predictions that {type(self).__name__} can score, got NaN in row {row} of the batch: look "
                "for NaN, or a variance of zero, in the predictions there."
            )
        return scores

    def _require_points(self, count: Tensor | int, what: str = "data") -> None:
        if not int(count):
            raise DataError(
                f"Expected some {what} before {type(self).__name__}.compute(), got none: call update first."
            )


class Mean(Streaming):
    """The average of a score over all numbers seen."""

    total: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def _add(self, scores: Tensor) -> None:
        self.total = self.total + self._taken(scores).sum().to(self.device)
        self.count = self.count + scores.numel()

    def compute(self) -> Tensor:
        """The average so far."""
        self._require_points(self.count)
        return self.total / self.count


class Stored(Streaming):
    """A metric that must see all points at once, and so keeps a number or two for each, on its own device."""

    def _store(self, name: str) -> None:
        self.add_state(name, [], dist_reduce_fx="cat")

    def _keep(self, name: str, scores: Tensor) -> None:
        getattr(self, name).append(self._taken(scores).reshape(-1).to(self.device))

    def _all(self, name: str) -> Tensor:  # (N,)
        kept = getattr(self, name)  # a list of batches, or one tensor once the ranks have been joined
        if isinstance(kept, Tensor):
            return kept
        return torch.cat(kept) if kept else torch.zeros(0, dtype=torch.float64, device=self.device)


def real_targets(pred: Predictive, y: Any) -> Tensor:
    """y as numbers that fit the predictions, which must be a regression's."""
    if not hasattr(pred, "interval"):
        raise WrongTaskError(f"Expected the predictions of a regression, got a {type(pred).__name__}.")
    return regression_targets(y, pred.mean)


def label_targets(pred: Predictive, y: Any) -> Tensor:  # (N,)
    """y as class labels that fit the predictions, which must be of classes."""
    if not hasattr(pred, "log_probs"):
        raise WrongTaskError(f"Expected predictions of classes, got a {type(pred).__name__}.")
    return class_labels(y, pred.mean)


def fraction(name: str, value: float) -> float:
    """An option strictly between 0 and 1."""
    if not 0.0 < value < 1.0:
        raise OptionError(f"Expected {name} strictly between 0 and 1, got {value} (0.95 means 95 %).")
    return value
