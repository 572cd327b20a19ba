"""Several small problems at once, each on one thread: products of 100 x 100 matrices are too small to share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


@contextmanager
def single_thread(wanted: bool = True) -> Iterator[None]:
    """Lets PyTorch compute with one thread inside, if `wanted`."""
    before = torch.get_num_threads()
    if wanted:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if wanted:
            torch.set_num_threads(before)


def run_parallel(tasks: Sequence[Callable[[], T]], parallel: bool = True) -> list[T]:
    """Runs tasks in as many threads as PyTorch has, with one PyTorch thread each.

    Args:
        tasks: Functions without arguments.
        parallel: Whether to run them at once; False runs them one after another in the calling thread.

    Returns:
        Their results, in the order of the tasks. The first error is raised once the running tasks have ended; those
        that have not begun are dropped.

    Example:
        >>> run_parallel([lambda: 1, lambda: 2])
        [1, 2]
    """
    workers = min(torch.get_num_threads(), len(tasks)) if parallel else 1
    if workers <= 1:
        return [task() for task in tasks]
    with single_thread(), ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda task: task(), tasks))
