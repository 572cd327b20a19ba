"""A bar with the loss and the time left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posthoc.training.options import Training

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(options: Training, done: int = 0, *, alone: bool = True) -> Iterator[Callable[[int, float], None]]:
    """Reports steps done and the loss: on a terminal only unless asked for, and from one process (`alone`)."""
    wanted = sys.stderr.isatty() if options.progress is None else options.progress
    if not (wanted and alone):
        yield lambda step, loss: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("fitting"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=sys.stderr.isatty()) as bar:
        task = bar.add_task("fit", total=options.steps, completed=done, loss="")
        yield lambda step, loss: bar.update(task, completed=step, loss=f"{loss:.4f}")
