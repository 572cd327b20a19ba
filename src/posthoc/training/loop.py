"""The training loop: blocks of steps, between which it validates, reports and writes checkpoints."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from posthoc.display import html_table
from posthoc.errors import FileError, TrainingError
from posthoc.progress import progress_bar
from posthoc.training.adam import FlatAdam
from posthoc.training.checkpoint import Checkpoint
from posthoc.training.cuda_graph import GraphSteps
from posthoc.training.distributed import Ranks


@dataclass(frozen=True)
class Training:
    """Options of training: Adam with a cosine schedule.

    Args:
        steps: Number of mini-batches.
        batch_size: Rows of a mini-batch.
        lr: The learning rate at the start.
        seed: Decides the rows of each batch and all other random numbers.
        eval_every: Steps between two evaluations of the validation score.
        patience: Evaluations without a better score after which training stops; None takes all steps.
        progress: True shows a progress bar, False does not; by default it is shown on a terminal.
    """

    steps: int = 500
    batch_size: int = 100
    lr: float = 0.02
    seed: int = 0
    eval_every: int = 20
    patience: int | None = 5
    progress: bool | None = None

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0, rounded to float32 as Adam takes it on a GPU."""
        rate = 0.5 * self.lr * (1.0 + math.cos(math.pi * step / self.steps))
        return struct.unpack("f", struct.pack("f", rate))[0]


@dataclass(repr=False)
class History:
    """What happened in training.

    Attributes:
        losses: The loss of each step.
        scores: The validation score by step.
        best_step: The step whose parameters were kept, where there are validation data.

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
            score = self.scores[self.best_step]
            parts.append(f"best of {len(self.scores)} scores {score:.4g} at step {self.best_step}")
        return f"History({', '.join(parts)})"

    def _repr_html_(self) -> str:
        if self.scores:
            return html_table(repr(self), {"step": list(self.scores), "validation score": list(self.scores.values())})
        return html_table(repr(self), {"step": range(1, len(self.losses) + 1), "loss": self.losses})


class Block(Protocol):
    """Several batches, stacked: each tensor has one more axis in front."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The block with `change` applied to each tensor."""


class Source(Protocol):
    """Batches by step: a step has the same batch whenever and wherever it is read, so that a run can be resumed."""

    ahead: int
    """The largest number of batches to read at once."""
    fixed: bool
    """Whether all batches have the same shapes."""
    weight: float
    """The share of each batch that this process has; 1 if it is alone."""

    def block(self, step: int, count: int) -> Block:
        """The batches of `count` steps, from `step` on."""


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
        objective: The loss () of a batch.
        parameters: What is learned; those that require no gradient stay as they are.
        source: The batches.
        options: Steps, learning rate and so on.
        score: A validation score, lower is better; rank 0 alone computes it. The parameters of the best evaluation are
            kept, and training stops after `options.patience` evaluations without a better one.
        generator: What the objective draws from, so that a checkpoint can hold its state.
        checkpoint: Where the state is written periodically and read from.
        cuda_graph: Whether steps are replayed from a CUDA graph, which does not change the numbers. By default they are
            if all is on one GPU, with batches of one shape, no other ranks and no random numbers.

    Returns:
        The losses and scores.

    Raises:
        TrainingError: If a loss or a parameter is not finite.
    """
    optimizer, ranks = FlatAdam(parameters), Ranks()
    run = Run(optimizer, generator, scored=score is not None)
    try:
        if not optimizer.parameters or not options.steps:
            return run.history
        ranks.share(optimizer.values)
        if cuda_graph is None:
            on_gpu = {v.device.type for v in optimizer.values} == {"cuda"}
            cuda_graph = on_gpu and source.fixed and ranks.alone and generator is None
        plain = PlainSteps(objective, optimizer, ranks, source.weight)
        steps = GraphSteps(plain, source.ahead) if cuda_graph else plain
        pauses = [source.ahead]
        if checkpoint is not None:
            pauses.append(checkpoint.every)
            run.restore(checkpoint)
        if run.step != ranks.agree(run.step):
            raise TrainingError("Expected the same checkpoint for every process: name a folder that all can read.")
        if score is not None:
            pauses.append(options.eval_every)
            if run.step == 0:
                run.evaluate(score, ranks)
        shown = options.progress if ranks.first else False
        with torch.enable_grad(), progress_bar("fitting", options.steps, run.step, enabled=shown) as report:
            while run.step < options.steps and not run.exhausted(options.patience):
                start, stop = run.step, min(options.steps, *((run.step // every + 1) * every for every in pauses))
                lrs = [options.lr_at(step) for step in range(start, stop)]
                losses = steps.run(source.block(start, stop - start), lrs)
                for step, loss in enumerate(losses, start + 1):
                    if not math.isfinite(loss):
                        advice = f"Lower the learning rate (it is {options.lr}), or check the data for extreme values."
                        raise TrainingError(f"The loss became {loss} at step {step} of {options.steps}. {advice}")
                run.history.losses += losses
                run.step = stop
                report(stop, f"loss {losses[-1]:.4f}")
                if score is not None and (stop % options.eval_every == 0 or stop == options.steps):
                    run.evaluate(score, ranks)
                last = stop == options.steps or run.exhausted(options.patience)
                if checkpoint is not None and ranks.first and (last or stop % checkpoint.every == 0):
                    run.save(checkpoint)
        optimizer.restore(run.best)
        if not all(bool(values.isfinite().all()) for values in optimizer.values):
            raise TrainingError(f"A parameter stopped being finite. Lower the learning rate (it is {options.lr}).")
    finally:
        optimizer.release()
    return run.history


@contextmanager
def single_thread(wanted: bool = True) -> Iterator[None]:
    """Lets PyTorch compute with one thread inside, if `wanted`, as suits products of small matrices."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if wanted else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class PlainSteps:
    """Ordinary steps: loss, gradient, sum over the ranks, Adam."""

    def __init__(self, objective: Callable[[Any], Tensor], optimizer: FlatAdam, ranks: Ranks, weight: float) -> None:
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
        loss = self.objective(batch)
        loss.backward()
        self.ranks.sum(self.optimizer.grads, self.weight)
        self.optimizer.step(lr)
        return loss.detach()


class Run:
    """The state of a run, which a checkpoint holds.

    Args:
        optimizer: The parameters and Adam's moments.
        generator: What the objective draws from, if it does.
        scored: Whether the parameters with the lowest validation score are kept.
    """

    def __init__(self, optimizer: FlatAdam, generator: torch.Generator | None, *, scored: bool) -> None:
        self.optimizer, self.generator, self.step, self.history = optimizer, generator, 0, History()
        self.best = [values.clone() for values in optimizer.values] if scored else []

    def evaluate(self, score: Callable[[], float], ranks: Ranks) -> None:
        """Computes the score, and keeps the parameters if it is the lowest."""
        with torch.no_grad():
            value = ranks.agree(score() if ranks.first else 0.0)
        scores = self.history.scores
        scores[self.step] = value
        self.history.best_step = min(scores, key=lambda step: (math.isnan(scores[step]), scores[step]))
        if self.history.best_step == self.step:
            self.best = [values.clone() for values in self.optimizer.values]

    def exhausted(self, patience: int | None) -> bool:
        """Whether the last `patience` scores were no better than one before them."""
        best = self.history.best_step
        return patience is not None and best is not None and sum(s > best for s in self.history.scores) >= patience

    def tensors(self) -> dict[str, Tensor]:
        """What decides how the run goes on, by name."""
        named = {f"state.{i}": tensor for i, tensor in enumerate(self.optimizer.state)}
        named |= {f"best.{i}": values for i, values in enumerate(self.best)}
        return named if self.generator is None else {**named, "generator": self.generator.get_state()}

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes the state to a checkpoint."""
        losses = torch.tensor(self.history.losses, dtype=torch.float64)
        scores = {str(step): score for step, score in self.history.scores.items()}
        numbers = {"step": self.step, "scores": scores, "best_step": self.history.best_step}
        checkpoint.save({**self.tensors(), "losses": losses}, numbers)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restores the state of the checkpoint, if there is one."""
        if (saved := checkpoint.load()) is None:
            return
        tensors, numbers = saved
        losses, own = tensors.pop("losses"), self.tensors()
        shapes, own_shapes = ({name: (t.shape, t.dtype) for name, t in some.items()} for some in (tensors, own))
        if shapes != own_shapes:
            raise FileError(f"Expected the parameters of this run, found those of another in {checkpoint.path}.")
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        if self.generator is not None:
            self.generator.set_state(tensors["generator"])
        self.step = int(numbers["step"])
        scores = {int(step): score for step, score in numbers["scores"].items()}
        self.history = History(losses.tolist(), scores, numbers["best_step"])
