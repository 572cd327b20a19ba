"""The options of training, and its history."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field

from posthoc.errors import OptionError
from posthoc.validation import integer

__all__ = ["History", "Training"]


@dataclass(frozen=True)
class Training:
    """Options of training: Adam with a cosine schedule.

    Args:
        steps: number of mini-batches.
        batch_size: rows of a mini-batch.
        lr: the learning rate at the start.
        seed: decides the rows of each batch and all other random numbers.
        eval_every: steps between two evaluations of the validation score.
        patience: evaluations without a better score after which training stops; None takes all steps.
        progress: True shows a progress bar, False does not; by default it is shown on a terminal.
    """

    steps: int = 500
    batch_size: int = 100
    lr: float = 0.02
    seed: int = 0
    eval_every: int = 20
    patience: int | None = 5
    progress: bool | None = None

    def __post_init__(self) -> None:
        for name, least in (("steps", 0), ("batch_size", 1), ("eval_every", 1), ("seed", 0)):
            object.__setattr__(self, name, integer(name, getattr(self, name), least))
        if self.patience is not None:
            object.__setattr__(self, "patience", integer("patience", self.patience, 1))
        if not isinstance(self.lr, int | float) or not (math.isfinite(self.lr) and self.lr > 0):
            raise OptionError(f"Expected a positive learning rate, got lr={self.lr!r}.")

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0, rounded to float32 as Adam takes it on a GPU."""
        rate = 0.5 * self.lr * (1.0 + math.cos(math.pi * step / self.steps))
        return struct.unpack("f", struct.pack("f", rate))[0]


@dataclass(repr=False)
class History:
    """What happened in training.

    Attributes:
        losses: the loss of each step.
        scores: the validation score by step.
        best_step: the step whose parameters were kept, where there are validation data.

    Example:
        >>> History([0.5, 0.25], {0: 0.7, 2: 0.6}, best_step=2)
        History(2 steps, last loss 0.25, best of 2 scores 0.6 at step 2)
    """

    losses: list[float] = field(default_factory=list)
    scores: dict[int, float] = field(default_factory=dict)
    best_step: int | None = None

    def __repr__(self) -> str:
        parts = [f"{len(self.losses):,} steps"]
        if self.losses:
            parts.append(f"last loss {self.losses[-1]:.4g}")
        if self.best_step is not None:
            parts.append(
                f"best of {len(self.scores)} scores {self.scores[self.best_step]:.4g} at step {self.best_step}"
            )
        return f"History({', '.join(parts)})"
