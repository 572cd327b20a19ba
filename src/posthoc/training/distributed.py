"""Several processes that train together: each takes a slice of every batch, and gradients are summed over them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from posthoc.errors import TrainingError

TIMEOUT = timedelta(minutes=10)
"""How long a process waits for the others."""


class Ranks:
    """This process among the others of `torch.distributed`, or alone if that was not initialized.

    Attributes:
        rank: The number of this process.
        count: The number of processes.
        alone: Whether there is no other process.
        first: Whether this process writes and reports.
    """

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.rank, self.count = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        self.alone, self.first = self.count == 1, self.rank == 0

    def place(self, device: str | None) -> str | None:
        """The device of this process, where each has a GPU of its own."""
        return f"cuda:{torch.cuda.current_device()}" if device == "cuda" and not self.alone else device

    def part(self, size: int) -> slice:
        """This rank's part of a batch: consecutive rows, as many as the others have, or one more."""
        return slice(size * self.rank // self.count, size * (self.rank + 1) // self.count)

    def sum(self, tensors: list[Tensor], weight: float) -> None:
        """Replaces tensors by their weighted sum over the ranks, the same to the bit on each."""
        if not self.alone:
            with peers():
                for tensor in tensors:
                    dist.all_reduce(tensor.mul_(weight))

    def share(self, tensors: list[Tensor]) -> None:
        """Copies rank 0's numbers to all ranks."""
        if not self.alone:
            with peers():
                for tensor in tensors:
                    dist.broadcast(tensor, 0)

    def agree(self, value: float) -> float:
        """Rank 0's value, on all ranks."""
        if self.alone:
            return value
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        tensor = torch.tensor([value], dtype=torch.float64, device=device)
        self.share([tensor])
        return float(tensor)


@contextmanager
def peers() -> Iterator[None]:
    """Raises a `TrainingError` if another process has ended."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        reason = f"({str(error).splitlines()[0]}): it has failed or was killed"
        advice = "See what it printed, and start all again; with --checkpoint and --resume they go on from there."
        raise TrainingError(f"Lost touch with another process of this run {reason}. {advice}") from error


@contextmanager
def distributed(device: str | None) -> Iterator[Ranks]:
    """Joins the processes of `torchrun`, if it started this one: NCCL between GPUs, gloo between CPUs."""
    started = {"WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()  # some clusters set one of them
    if not started or dist.is_initialized():
        yield Ranks()
        return
    cuda = device is not None and torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with peers():
        dist.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT)
    try:
        yield Ranks()
    finally:
        dist.destroy_process_group()
