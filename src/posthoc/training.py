"""The one training loop: it knows an objective and its parameters, nothing of what they mean."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from posthoc.checks import integer
from posthoc.errors import OptionError, TrainingError

__all__ = ["History", "Training", "few_threads", "train"]


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


@dataclass
class History:
    """What happened: losses by step, scores on the validation data by step, and the step that was kept."""

    losses: list[float] = field(default_factory=list)
    scores: dict[int, float] = field(default_factory=dict)
    best_step: int | None = None


def train(
    objective: Callable[[Any], Tensor],
    parameters: Iterable[Tensor],
    batches: Iterator[Any],
    options: Training,
    *,
    score: Callable[[], float] | None = None,
) -> History:
    """Minimises the objective over batches. With a `score` (lower is better, e.g. the loss on validation data), the
    parameters of the best evaluation are kept, and training stops after `patience` evaluations without a better one."""
    parameters = [p for p in parameters if p.requires_grad]
    history = History()
    if not parameters or not options.steps:
        return history
    optimiser = torch.optim.Adam(parameters, lr=options.lr, fused=True)
    keeper = Keeper(parameters, score, options.patience, history)
    keeper.look(0)
    with progress_bar(options) as report, torch.enable_grad():
        for step in range(options.steps):
            optimiser.param_groups[0]["lr"] = 0.5 * options.lr * (1.0 + math.cos(math.pi * step / options.steps))
            for parameter in parameters:
                parameter.grad = None
            loss = objective(next(batches))
            loss.backward()
            optimiser.step()
            history.losses.append(loss.item())
            if not math.isfinite(history.losses[-1]):
                raise TrainingError(
                    f"The loss became {history.losses[-1]} at step {step + 1} of {options.steps}. "
                    f"Lower the learning rate (it is {options.lr}), or check the data for extreme values."
                )
            report(step + 1, history.losses[-1])
            if score is not None and ((step + 1) % options.eval_every == 0 or step + 1 == options.steps):
                keeper.look(step + 1)
                if keeper.exhausted:
                    break
    keeper.restore()
    if not all(bool(p.isfinite().all()) for p in parameters):
        raise TrainingError(f"A parameter stopped being finite. Lower the learning rate (it is {options.lr}).")
    return history


class Keeper:
    """Remembers the parameters with the best score."""

    def __init__(
        self, parameters: list[Tensor], score: Callable[[], float] | None, patience: int | None, history: History
    ) -> None:
        self.parameters, self.score, self.patience, self.history = parameters, score, patience, history
        self.kept: list[Tensor] = []
        self.misses = 0

    @property
    def exhausted(self) -> bool:
        return self.patience is not None and self.misses >= self.patience

    def look(self, step: int) -> None:
        if self.score is None:
            return
        with torch.no_grad():
            value = self.score()
        self.history.scores[step] = value
        best = self.history.best_step
        if best is None or value < self.history.scores[best]:
            self.history.best_step, self.misses = step, 0
            self.kept = [p.detach().clone() for p in self.parameters]
        else:
            self.misses += 1

    def restore(self) -> None:
        with torch.no_grad():
            for parameter, kept in zip(self.parameters, self.kept, strict=False):
                parameter.copy_(kept)


@contextmanager
def few_threads(wanted: bool) -> Iterator[None]:
    """One thread inside, where the work is too small to share: handing out products of 100 x 100 saves little on an
    idle machine and costs much on a busy one."""
    if not wanted:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def progress_bar(options: Training) -> Iterator[Callable[[int, float], None]]:
    """A bar with the loss and the time left, on a terminal only unless asked for."""
    wanted = sys.stderr.isatty() if options.progress is None else options.progress
    if not wanted:
        yield lambda step, loss: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("fitting"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=sys.stderr.isatty()) as bar:
        task = bar.add_task("fit", total=options.steps, loss="")

        def report(step: int, loss: float) -> None:
            if step % 20 == 0 or step == options.steps:
                bar.update(task, completed=step, loss=f"{loss:.4f}")

        yield report
