"""How to train, and what happened."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field

from posthoc.errors import OptionError
from posthoc.validation import integer

__all__ = ["History", "Training"]


@dataclass(frozen=True)
class Training:
    """How to train: Adam with a cosine schedule, for `steps` mini-batches of `batch_size` points."""

    steps: int = 500
    batch_size: int = 100
    lr: float = 0.02
    seed: int = 0
    eval_every: int = 20
    patience: int | None = 5
    progress: bool | None = None  # None: a bar on a terminal, silence in a log

    def __post_init__(self) -> None:
        for name, least in (("steps", 0), ("batch_size", 1), ("eval_every", 1), ("seed", 0)):
            object.__setattr__(self, name, integer(name, getattr(self, name), least))
        if self.patience is not None:
            object.__setattr__(self, "patience", integer("patience", self.patience, 1))
        if not isinstance(self.lr, int | float) or not (math.isfinite(self.lr) and self.lr > 0):
            raise OptionError(f"Expected a positive learning rate, got lr={self.lr!r}.")

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0; a float32, which is what Adam takes on a GPU."""
        rate = 0.5 * self.lr * (1.0 + math.cos(math.pi * step / self.steps))
        return struct.unpack("f", struct.pack("f", rate))[0]


@dataclass
class History:
    """What happened: losses by step, scores on the validation data by step, and the step that was kept."""

    losses: list[float] = field(default_factory=list)
    scores: dict[int, float] = field(default_factory=dict)
    best_step: int | None = None
