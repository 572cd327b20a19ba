"""The paper's figures and tables, one file each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from posthoc.errors import OptionError
from posthoc.experiments import synthetic

__all__ = ["EXPERIMENTS", "experiment_named"]

EXPERIMENTS: dict[str, Callable[..., list[dict[str, Any]]]] = {"synthetic": synthetic.reproduce}
"""Every experiment by name. Each takes the folder for its results, then by keyword `methods` (None: all), `seeds`,
`data_dir`, `force` and `say` (what prints a line of progress), and returns the results of its runs."""


def experiment_named(name: str) -> Callable[..., list[dict[str, Any]]]:
    """An experiment by its name."""
    if name not in EXPERIMENTS:
        raise OptionError(f"Expected an experiment among {', '.join(sorted(EXPERIMENTS))}, got {name!r}.")
    return EXPERIMENTS[name]
