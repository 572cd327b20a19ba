"""How many threads a small problem deserves: one; and what to do with the others: the next problem."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, Generic, TypeVar

import torch

__all__ = ["few_threads", "may_go_on", "side_by_side", "speaks"]

T = TypeVar("T")


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


def side_by_side(tasks: Sequence[Callable[[], T]], wanted: bool) -> list[T]:
    """What some tasks give, in their order. If wanted, as many are at work as PyTorch has threads, one thread each. The
    first to fail ends them all."""
    workers = min(torch.get_num_threads(), len(tasks)) if wanted else 1
    if workers <= 1:
        return [task() for task in tasks]
    with few_threads(True):  # set once for all: the number is the process's
        return Section(tasks).run(workers)


class Section(Generic[T]):
    """Tasks that are worked on by the calling thread and some helpers."""

    def __init__(self, tasks: Sequence[Callable[[], T]]) -> None:
        self.tasks, self.left = tasks, iter(range(len(tasks)))
        self.lock, self.stopped = threading.Lock(), threading.Event()
        self.results: dict[int, T] = {}
        self.errors: dict[int, BaseException] = {}

    def run(self, workers: int) -> list[T]:
        first = next(self.left)  # is the caller's own, who can be interrupted and may speak
        helpers = [threading.Thread(target=copy_context().run, args=(self._help,)) for _ in range(workers - 1)]
        for helper in helpers:
            helper.start()
        try:
            self._work(first)
            for helper in helpers:
                helper.join()
        finally:  # whoever is interrupted while he waits has no use for what he waits for
            self.stopped.set()
            for helper in helpers:
                helper.join()
        if self.errors:
            raise self.errors[min(self.errors)]
        return [self.results[i] for i in range(len(self.tasks))]

    def _help(self) -> None:
        HELPS.set(self)
        self._work(self._next())

    def _work(self, i: int | None) -> None:
        while i is not None and not self.stopped.is_set():
            try:
                self.results[i] = self.tasks[i]()
            except Stopped:
                return
            except BaseException as error:
                self.errors[i] = error
                self.stopped.set()
            i = self._next()

    def _next(self) -> int | None:
        with self.lock:
            return next(self.left, None)


class Stopped(BaseException):
    """Another task of the section has failed."""


HELPS: ContextVar[Section[Any] | None] = ContextVar("HELPS", default=None)
"""The section that this thread helps with; None in the thread that the user called from."""


def may_go_on() -> None:
    """To be asked now and then by what takes long: raises where nobody waits for the result any more."""
    section = HELPS.get()
    if section is not None and section.stopped.is_set():
        raise Stopped


def speaks() -> bool:
    """Whether this thread may write to the terminal, as one of several should."""
    return HELPS.get() is None
