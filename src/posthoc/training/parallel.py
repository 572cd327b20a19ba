"""Several small problems at once, each on one thread: products of 100 x 100 matrices are too small to share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import TypeVar

import torch

__all__ = ["check_cancelled", "run_parallel", "single_thread"]

T = TypeVar("T")

CANCELLED: ContextVar[threading.Event | None] = ContextVar("CANCELLED", default=None)
"""Set once the results of the running tasks are not needed any more."""


class CancelledError(Exception):
    """Another task of the group has failed, or the caller was interrupted."""


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
        tasks: functions without arguments.
        parallel: whether to run them at once; False runs them one after another in the calling thread.

    Returns:
        Their results, in the order of the tasks. The first error cancels the other tasks and is raised.

    Example:
        >>> run_parallel([lambda: 1, lambda: 2])
        [1, 2]
    """
    workers = min(torch.get_num_threads(), len(tasks)) if parallel else 1
    if workers <= 1:
        return [task() for task in tasks]
    context, cancelled = copy_context(), threading.Event()
    context.run(CANCELLED.set, cancelled)
    with single_thread(), ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(context.copy().run, task) for task in tasks]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failed = [future for future in futures if future in done and future.exception() is not None]
            return [future.result() for future in failed or futures]
        finally:
            cancelled.set()
            pool.shutdown(wait=False, cancel_futures=True)


def check_cancelled() -> None:
    """Call this periodically in long tasks: it ends a task of `run_parallel` whose result is not needed any more."""
    cancelled = CANCELLED.get()
    if cancelled is not None and cancelled.is_set():
        raise CancelledError
