"""`posthoc reproduce`: the paper's figures and tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["reproduce"]


def reproduce(
    name: Annotated[str, typer.Argument(help="synthetic: Figure 1, six methods on one-dimensional data.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the results.")] = Path("results"),
    data_dir: Annotated[
        Path | None,
        typer.Option(help="A folder with the paper's data. Default: the one that POSTHOC_DATA names, if it does."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0 on.")] = 1,
    methods: Annotated[str, typer.Option(help="Names with commas between, or all.")] = "all",
    force: Annotated[bool, typer.Option("--force", help="Run again what was run before.")] = False,
) -> None:
    """Reproduces an experiment of the paper: one JSON file a run, and the figure.

    Runs that are there already are not made again, so the same command goes on where it was stopped.
    """
    from posthoc.experiments import experiment_named

    chosen = None if methods == "all" else [part.strip() for part in methods.split(",")]
    results = experiment_named(name)(
        out, methods=chosen, seeds=range(seeds), data_dir=data_dir, force=force, say=typer.echo
    )
    show(results)


def show(results: list[dict[str, Any]]) -> None:
    """A table of what the runs have in common: their figures on the last of their sets, and their times."""
    from rich.console import Console
    from rich.table import Table

    sets = list(results[0]["metrics"])
    split = sets[-1]
    figures = ("nll", "rmse", "crps", "cqm", "coverage_95")
    table = Table("", "seed", *figures, "fit (s)", "predict (s)", title=f"on the {split} points", title_justify="left")
    for result in results:
        numbers = (f"{result['metrics'][split][figure]:.4f}" for figure in figures)
        times = (f"{result['times'][time]:.2f}" for time in ("fit_s", "predict_s"))
        table.add_row(result["method"], str(result["seed"]), *numbers, *times)
    Console().print(table)
