"""The best parameters so far, by a score on data that the objective does not see."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from posthoc.training.adam import FlatAdam
from posthoc.training.distributed import Ranks
from posthoc.training.options import History

__all__ = ["EarlyStopping"]


class EarlyStopping:
    """Keeps the parameters with the lowest score. Without a score it does nothing.

    Args:
        optimizer: holds the parameters.
        score: computes the score; rank 0 alone does.
        patience: evaluations without a better score after which training stops; None never stops.
        history: where scores are written.
        ranks: the processes of this run.
    """

    def __init__(
        self,
        optimizer: FlatAdam,
        score: Callable[[], float] | None,
        patience: int | None,
        history: History,
        ranks: Ranks,
    ) -> None:
        self.optimizer, self.score, self.patience = optimizer, score, patience
        self.history, self.ranks = history, ranks
        self.best: list[Tensor] = [v.clone() for v in optimizer.values] if score is not None else []

    @property
    def exhausted(self) -> bool:
        """Whether the last `patience` scores were no better than one before them."""
        if self.patience is None or self.history.best_step is None:
            return False
        return sum(step > self.history.best_step for step in self.history.scores) >= self.patience

    def evaluate(self, step: int) -> None:
        """Computes the score after a step, and keeps the parameters if it is the best."""
        if self.score is None:
            return
        with torch.no_grad():
            value = self.ranks.agree(self.score() if self.ranks.first else 0.0)
        self.history.scores[step] = value
        best_step = self.history.best_step
        lowest = math.inf if best_step is None else self.history.scores[best_step]
        if best_step is None or value < lowest or (math.isnan(lowest) and not math.isnan(value)):
            self.history.best_step = step
            self.best = [v.clone() for v in self.optimizer.values]

    def restore(self) -> None:
        """Goes back to the best parameters."""
        self.optimizer.restore(self.best)
