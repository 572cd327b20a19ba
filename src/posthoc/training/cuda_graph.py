"""Training steps replayed from a CUDA graph, so that the host does not wait for each."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from posthoc.training.loop import Block, PlainSteps

WARM_UP = 3
"""Steps taken and undone before the capture, in which libraries allocate their workspaces."""

STREAMS = threading.local()
"""The stream on which each thread captures, by device."""


class GraphSteps:
    """The steps of `plain`, captured once and replayed.

    Batches, learning rates and losses have a fixed place on the device, where a counter tells which is next. A block
    whose loss is not finite is repeated step by step: an ordinary step can add jitter, warn and raise; a graph cannot.

    Args:
        plain: Takes ordinary steps.
        ahead: Steps of the longest block.
    """

    def __init__(self, plain: PlainSteps, ahead: int) -> None:
        self.plain, self.ahead = plain, ahead
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, block: Block, lrs: list[float]) -> list[float]:
        """Takes one step for each learning rate and returns the losses."""
        optimizer = self.plain.optimizer
        with torch.cuda.device(optimizer.values[0].device):
            before = optimizer.snapshot()
            graph = self.graph = self.graph or self._capture(block, lrs)
            self._place(block, lrs)
            for _ in lrs:
                graph.replay()
            losses = self.losses[: len(lrs)].tolist()
            if all(map(math.isfinite, losses)):
                return losses
            optimizer.restore(before)
            return self.plain.run(block, lrs)

    def _capture(self, block: Block, lrs: list[float]) -> torch.cuda.CUDAGraph:
        optimizer = self.plain.optimizer
        before, device = optimizer.snapshot(), optimizer.values[0].device
        self.places: list[Tensor] = []
        self.block = block.map(self._new_place)
        self.lrs = torch.zeros(self.ahead, device=device)
        self.losses = torch.zeros(self.ahead, dtype=torch.float64, device=device)
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        # Always the same stream: libraries keep a workspace of tens of megabytes for every stream that they have seen.
        streams = vars(STREAMS)
        stream = streams[str(device)] = streams.get(str(device)) or torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._place(block, lrs)
                self._step()
                optimizer.restore(before)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Only this thread is captured: another may be reading rows ahead and allocate memory for them.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._step()
        optimizer.restore(before)
        return graph

    def _new_place(self, t: Tensor) -> Tensor:
        self.places.append(torch.zeros(self.ahead, *t.shape[1:], dtype=t.dtype, device=t.device))
        return self.places[-1]

    @torch.no_grad()
    def _place(self, block: Block, lrs: list[float]) -> None:
        places = iter(self.places)
        block.map(lambda t: next(places)[: len(lrs)].copy_(t))
        self.lrs[: len(lrs)].copy_(torch.tensor(lrs))
        self.at.zero_()

    def _step(self) -> None:
        batch = self.block.map(lambda t: t.index_select(0, self.at).squeeze(0))
        loss = self.plain.step(batch, self.lrs.index_select(0, self.at).squeeze(0))
        self.losses.index_copy_(0, self.at, loss.double().reshape(1))
        self.at += 1
