"""The training loop: blocks of steps, between which it validates, reports and writes checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from posthoc.errors import TrainingError
from posthoc.progress import progress_bar
from posthoc.training.adam import FlatAdam
from posthoc.training.batches import Block, Source
from posthoc.training.checkpoint import Checkpoint
from posthoc.training.cuda_graph import GraphSteps
from posthoc.training.distributed import Ranks
from posthoc.training.early_stopping import EarlyStopping
from posthoc.training.options import History, Training
from posthoc.training.parallel import check_cancelled

__all__ = ["PlainSteps", "train"]


def train(
    objective: Callable[[Any], Tensor],
    parameters: Iterable[Tensor],
    source: Source,
    options: Training,
    *,
    score: Callable[[], float] | None = None,
    generator: torch.Generator | None = None,
    checkpoint: Checkpoint | None = None,
    cuda_graph: bool | None = None,
) -> History:
    """Minimizes an objective over batches with Adam.

    Args:
        objective: the loss () of a batch.
        parameters: what is learned; those that require no gradient stay as they are.
        source: the batches.
        options: steps, learning rate and so on.
        score: a validation score, lower is better. The parameters of the best evaluation are kept, and training stops
            after `options.patience` evaluations without a better one.
        generator: what the objective draws from, so that a checkpoint can hold its state.
        checkpoint: where the state is written periodically and read from.
        cuda_graph: whether steps are replayed from a CUDA graph, which does not change the numbers; by default where
            that is possible.

    Returns:
        The losses and scores.

    Raises:
        TrainingError: if a loss or a parameter is not finite.
    """
    optimizer, history, ranks = FlatAdam(parameters), History(), Ranks()
    try:
        if not optimizer.parameters or not options.steps:
            return history
        ranks.share(optimizer.values)
        stopping = EarlyStopping(optimizer, score, options.patience, history, ranks)
        if cuda_graph is None:
            cuda_graph = GraphSteps.possible(optimizer, ranks, source, generator)
        plain = PlainSteps(objective, optimizer, ranks, source.weight)
        steps = GraphSteps(plain, source.ahead) if cuda_graph else plain
        with torch.enable_grad():
            run(steps, optimizer, stopping, source, options, generator, checkpoint)
        stopping.restore()
        if not optimizer.finite:
            raise TrainingError(f"A parameter stopped being finite. Lower the learning rate (it is {options.lr}).")
    finally:
        optimizer.release()
    return history


class PlainSteps:
    """Ordinary steps: loss, gradient, sum over the ranks, Adam."""

    def __init__(
        self, objective: Callable[[Any], Tensor], optimizer: FlatAdam, ranks: Ranks, weight: float = 1.0
    ) -> None:
        self.objective, self.optimizer, self.ranks, self.weight = objective, optimizer, ranks, weight

    def run(self, block: Block, lrs: list[float]) -> list[float]:
        """Takes one step for each learning rate and returns the losses; ends at a loss that is not finite."""
        losses: list[Tensor] = []
        for i, lr in enumerate(lrs):
            losses.append(self.step(block.map(lambda t, i=i: t[i]), lr))  # type: ignore[misc]
            # On a GPU the test would wait for the device, and among ranks all have to take the same steps.
            if self.ranks.alone and not losses[-1].is_cuda and not math.isfinite(losses[-1].item()):
                break
        total = torch.stack(losses)
        self.ranks.sum([total], self.weight)
        return total.tolist()

    def step(self, batch: Block, lr: float | Tensor) -> Tensor:
        """Takes one step; its loss stays on the device."""
        self.optimizer.clear()
        loss = self.objective(batch)
        loss.backward()
        self.ranks.sum(self.optimizer.grads, self.weight)
        self.optimizer.step(lr)
        return loss.detach()


def run(
    steps: PlainSteps | GraphSteps,
    optimizer: FlatAdam,
    stopping: EarlyStopping,
    source: Source,
    options: Training,
    generator: torch.Generator | None,
    checkpoint: Checkpoint | None,
) -> None:
    """Takes all steps that the checkpoint has not taken yet."""
    ranks, history = stopping.ranks, stopping.history
    step = checkpoint.restore(optimizer, stopping, generator) if checkpoint is not None else 0
    if step != ranks.agree(step):
        raise TrainingError("Expected the same checkpoint for every process: its folder must be one that all can read.")
    if step == 0:
        stopping.evaluate(0)
    pauses = [source.ahead] if checkpoint is None else [source.ahead, checkpoint.every]
    if stopping.score is not None:
        pauses.append(options.eval_every)
    with progress_bar("fitting", options.steps, step, enabled=options.progress if ranks.first else False) as report:
        while step < options.steps and not stopping.exhausted:
            check_cancelled()
            stop = min(options.steps, *((step // every + 1) * every for every in pauses))
            losses = steps.run(source.block(step, stop - step), [options.lr_at(s) for s in range(step, stop)])
            require_finite(losses, step, options)
            history.losses += losses
            step = stop
            report(step, f"loss {losses[-1]:.4f}")
            if step % options.eval_every == 0 or step == options.steps:
                stopping.evaluate(step)
            last = step == options.steps or stopping.exhausted
            if checkpoint is not None and ranks.first and (last or step % checkpoint.every == 0):
                checkpoint.save(optimizer, stopping, step, generator)


def require_finite(losses: list[float], before: int, options: Training) -> None:
    for step, loss in enumerate(losses, before + 1):
        if not math.isfinite(loss):
            raise TrainingError(
                f"The loss became {loss} at step {step} of {options.steps}. "
                f"Lower the learning rate (it is {options.lr}), or check the data for extreme values."
            )
