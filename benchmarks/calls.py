"""The call of `posthoc.training.train` that a fit makes: to repeat, to time, and to check against steps by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from posthoc import FMGP
from posthoc.training import History, Source, Training, single_thread, train

__all__ = ["Call", "Steps", "capture", "fit_with", "same_steps"]

CUDA_GRAPH = {None: None, "graph": True, "plain": False}
"""The argument of `train` for each way to take steps."""


@dataclass
class Steps:
    """What some steps gave."""

    losses: list[float]
    parameters: list[Tensor]


@dataclass
class Call:
    """A method fitted but for its training, and what its training would have been called with."""

    method: FMGP
    objective: Callable[[Any], Tensor]
    parameters: list[Tensor]
    source: Source
    training: Training
    others: dict[str, Any]
    threads: int

    def __post_init__(self) -> None:
        self.start = [p.detach().clone() for p in self.parameters]

    def run(self, steps: int, way: str | None = None) -> Steps:
        """So many steps from the start, as `fit` takes them."""
        self._restart()
        with single_thread(self.threads == 1):
            options = replace(self.training, steps=steps)
            history = train(
                self.objective, self.parameters, self.source, options, **self.others, cuda_graph=CUDA_GRAPH[way]
            )
        return self._taken(history.losses)

    def by_hand(self, steps: int) -> Steps:
        """The same with torch's own Adam, one batch at a time: what any faster way must agree with."""
        self._restart()
        schedule = replace(self.training, steps=steps)
        learned = [p for p in self.parameters if p.requires_grad]
        optimizer = torch.optim.Adam(learned, foreach=False)
        losses = []
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = schedule.lr_at(step)
            optimizer.zero_grad()
            loss = self.objective(self.source.block(step, 1).map(lambda t: t[0]))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        for p in learned:
            p.grad = None
        return self._taken(losses)

    @torch.no_grad()
    def _restart(self) -> None:
        for p, value in zip(self.parameters, self.start, strict=True):
            p.copy_(value)

    def _taken(self, losses: list[float]) -> Steps:
        return Steps(losses, [p.detach().clone() for p in self.parameters])


def capture(method: FMGP, data: Any) -> Call:
    """Lets a method fit until it would train."""
    found: list[Any] = []

    def keep(objective: Any, parameters: Any, source: Any, training: Any, **others: Any) -> History:
        found.append((objective, list(parameters), source, training, others, torch.get_num_threads()))
        return History()

    with mock.patch("posthoc.fmgp.build.train", keep):
        method.fit(data)
    return Call(method, *found[0])


def fit_with(method: FMGP, data: Any, way: str | None) -> FMGP:
    """A whole fit, with or without the CUDA graph."""
    with mock.patch("posthoc.fmgp.build.train", partial(train, cuda_graph=CUDA_GRAPH[way])):
        return method.fit(data)


def same_steps(one: Steps, other: Steps, tolerance: float = 1e-6) -> float:
    """The greatest difference of two runs' losses and parameters; raises where it is more than rounding may become."""
    losses = [torch.tensor(steps.losses, dtype=torch.float64) for steps in (one, other)]
    pairs = [(losses[0], losses[1]), *zip(one.parameters, other.parameters, strict=True)]
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    return max(float((a - b).abs().max()) for a, b in pairs)
