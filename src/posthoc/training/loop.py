"""The loop itself: blocks of steps, between which it looks at validation data, reports and writes checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from posthoc.errors import TrainingError
from posthoc.progress import progress_bar
from posthoc.training.adam import Flat
from posthoc.training.batches import Source
from posthoc.training.checkpoint import Checkpoint
from posthoc.training.cuda_graph import GraphSteps
from posthoc.training.distributed import Ranks
from posthoc.training.early_stopping import Keeper
from posthoc.training.options import History, Training
from posthoc.training.recorded import RecordedSteps
from posthoc.training.steps import PlainSteps, Steps
from posthoc.training.threads import may_go_on, speaks

__all__ = ["train"]

Way = Literal["graph", "recorded", "plain"]
"""How steps are taken: replayed from a CUDA graph or, on the CPU, from a list of their operations; or one by one."""


def train(
    objective: Callable[[Any], Tensor],
    parameters: Iterable[Tensor],
    source: Source,
    options: Training,
    *,
    score: Callable[[], float] | None = None,
    generator: torch.Generator | None = None,
    checkpoint: Checkpoint | None = None,
    way: Way | None = None,
) -> History:
    """Minimises the objective over batches. With a `score` (lower is better, e.g. the loss on validation data), the
    parameters of the best evaluation are kept, and training stops after `patience` evaluations without a better one.

    `generator` is what the objective draws from, so that a checkpoint can hold its state. `way` says how steps are
    taken: by default replayed where they can be. It does not change the numbers."""
    flat, history, ranks = Flat(parameters), History(), Ranks()
    try:
        if not len(flat) or not options.steps:
            return history
        ranks.share(flat.values)
        keeper = Keeper(flat, score, options.patience, history, ranks)
        plain = PlainSteps(objective, flat, ranks, source.weight)
        steps = steps_by(way or best_way(flat, ranks, source, generator, options.steps), plain, source)
        with torch.enable_grad():
            run(steps, flat, keeper, source, options, generator, checkpoint)
        keeper.restore()
        if not flat.finite:
            raise TrainingError(f"A parameter stopped being finite. Lower the learning rate (it is {options.lr}).")
    finally:
        flat.release()
    return history


def best_way(flat: Flat, ranks: Ranks, source: Source, generator: torch.Generator | None, steps: int) -> Way:
    """The fastest way to take steps."""
    if GraphSteps.possible(flat, ranks, source, generator):
        return "graph"
    return "recorded" if RecordedSteps.possible(flat, source, generator, steps) else "plain"


def steps_by(way: Way, plain: PlainSteps, source: Source) -> Steps:
    if way == "graph":
        return GraphSteps(plain, source.ahead)
    return RecordedSteps(plain) if way == "recorded" else plain


def run(
    steps: Steps,
    flat: Flat,
    keeper: Keeper,
    source: Source,
    options: Training,
    generator: torch.Generator | None,
    checkpoint: Checkpoint | None,
) -> None:
    """Takes all steps, from where the checkpoint is."""
    ranks, history = keeper.ranks, keeper.history
    step = checkpoint.restore(flat, keeper, generator) if checkpoint is not None else 0
    if step != ranks.agree(step):
        raise TrainingError("Expected the same checkpoint for every process: its folder must be one that all can read.")
    if step == 0:
        keeper.look(0)
    pauses = [source.ahead] if checkpoint is None else [source.ahead, checkpoint.every]
    if keeper.score is not None:
        pauses.append(options.eval_every)
    with progress_bar(options, step, alone=ranks.first and speaks()) as report:
        while step < options.steps and not keeper.exhausted:
            may_go_on()
            stop = min(options.steps, *((step // every + 1) * every for every in pauses))
            losses = steps.run(source.block(step, stop - step), [options.lr_at(s) for s in range(step, stop)])
            require_finite_losses(losses, step, options)
            history.losses += losses
            step = stop
            report(step, losses[-1])
            if step % options.eval_every == 0 or step == options.steps:
                keeper.look(step)
            last = step == options.steps or keeper.exhausted
            if checkpoint is not None and ranks.first and (last or step % checkpoint.every == 0):
                checkpoint.save(flat, keeper, step, generator)


def require_finite_losses(losses: list[float], before: int, options: Training) -> None:
    for step, loss in enumerate(losses, before + 1):
        if not math.isfinite(loss):
            raise TrainingError(
                f"The loss became {loss} at step {step} of {options.steps}. "
                f"Lower the learning rate (it is {options.lr}), or check the data for extreme values."
            )
