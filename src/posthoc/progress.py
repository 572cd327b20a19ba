"""The progress bar of everything that takes long; where stderr is no terminal, a line in the log every ten seconds."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

Report = Callable[..., None]
"""Called as report(done) or report(done, note)."""

logger = logging.getLogger("posthoc")

SECONDS_BETWEEN_LINES = 10.0
PAUSE = 1.0
"""A task that begins within so many seconds of the last one continues its work: both share one clock."""

ONE_BAR = threading.Lock()
"""A terminal shows one bar at a time: tasks in other threads run without one."""


@contextmanager
def progress_bar(
    task: str, total: int | None, done: int = 0, *, unit: str = "steps", enabled: bool | None = None
) -> Iterator[Report]:
    """Shows how much of a task is done, how fast it goes and the time left.

    Args:
        task: what is being done, e.g. "fitting".
        total: how much there is to do, or None if it is not known.
        done: how much is done already.
        unit: what is counted.
        enabled: True shows a bar, False nothing. By default there is a bar on a terminal, and elsewhere a line every
            ten seconds at level INFO of the logger "posthoc".

    Yields:
        A function `report(done, note="")`.

    Example:
        >>> with progress_bar("counting", 3, enabled=False) as report:
        ...     report(2, "almost there")
    """
    bar = sys.stderr.isatty() if enabled is None else enabled
    if enabled is False or not ONE_BAR.acquire(blocking=False):
        yield lambda done, note="": None
        return
    try:
        with rich_bar(task, total, done, unit) if bar else nullcontext(log_lines(task, total, done, unit)) as report:
            yield report
    finally:
        ONE_BAR.release()


@contextmanager
def rich_bar(task: str, total: int | None, done: int, unit: str) -> Iterator[Report]:
    """A progress bar on a terminal or in a notebook."""
    from rich import progress
    from rich.console import Console

    class Rate(progress.ProgressColumn):
        def render(self, task: progress.Task) -> str:
            return f"{task.speed:,.0f} {unit}/s" if task.speed else ""

    first = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(), Rate())
    last = (progress.TextColumn("{task.fields[note]}"), progress.TimeRemainingColumn())
    with progress.Progress(*first, *last, console=Console(stderr=True), transient=sys.stderr.isatty()) as bar:
        shown = bar.add_task(task, total=total, completed=done, note="")
        yield lambda done, note="": bar.update(shown, completed=done, note=note)


class Clock:
    """When the last line was written, and when the last task was seen."""

    line = seen = -math.inf


def log_lines(task: str, total: int | None, start: int, unit: str) -> Report:
    """A log line every few seconds, where there is no terminal."""
    began = time.monotonic()
    if began - Clock.seen > PAUSE:
        Clock.line = began
    of_total = f" of {total:,}" if total is not None else ""

    def report(done: int, note: str = "") -> None:
        now = Clock.seen = time.monotonic()
        if now - Clock.line < SECONDS_BETWEEN_LINES:
            return
        Clock.line = now
        line = f"{task}: {done:,}{of_total} {unit}"
        if total is not None and done > start:
            line += f", {(now - began) * (total - done) / (done - start):.0f} s left"
        logger.info("%s", f"{line}, {note}" if note else line)

    return report
