"""The best parameters seen, by a score on data that the objective does not see."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from posthoc.training.adam import Flat
from posthoc.training.distributed import Ranks
from posthoc.training.options import History

__all__ = ["Keeper"]


class Keeper:
    """Remembers the parameters with the best score; does nothing where there is no score."""

    def __init__(
        self, flat: Flat, score: Callable[[], float] | None, patience: int | None, history: History, ranks: Ranks
    ) -> None:
        self.flat, self.score, self.patience, self.history, self.ranks = flat, score, patience, history, ranks
        self.kept: list[Tensor] = [v.clone() for v in flat.values] if score is not None else []

    @property
    def exhausted(self) -> bool:
        """Whether the last `patience` scores were no better than one before them."""
        if self.patience is None or self.history.best_step is None:
            return False
        return sum(step > self.history.best_step for step in self.history.scores) >= self.patience

    def look(self, step: int) -> None:
        if self.score is None:
            return
        with torch.no_grad():
            value = self.ranks.agree(self.score() if self.ranks.first else 0.0)
        self.history.scores[step] = value
        best = self.history.best_step
        before = math.inf if best is None else self.history.scores[best]
        if best is None or value < before or (math.isnan(before) and not math.isnan(value)):
            self.history.best_step = step
            self.kept = [v.clone() for v in self.flat.values]

    def restore(self) -> None:
        """Goes back to the best parameters."""
        self.flat.restore(self.kept)
