"""`python -m reproduction NAME`: the tables and figures of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from posthoc.cli import main
from reproduction.experiments import EXPERIMENTS, Request, experiment_named

__all__ = ["reproduce"]


def reproduce(
    name: Annotated[str, typer.Argument(help="The experiment; `list` shows all.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the results.")] = Path("results"),
    data_dir: Annotated[
        Path | None, typer.Option(help="A folder with data.", show_default="the one that POSTHOC_DATA names")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="The number of seeds.")] = 5,
    first_seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    methods: Annotated[str, typer.Option(help="Names of methods, separated by commas, or all.")] = "all",
    cases: Annotated[str, typer.Option(help="Networks or data sets, separated by commas, or all.")] = "all",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="Few rows and steps, to check that it works.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Repeat runs whose results exist.")] = False,
) -> None:
    """Reproduces an experiment of the paper: one JSON file for each run, then tables and figures.

    Runs whose results exist are skipped, so an interrupted command can be repeated.
    posthoc report shows the results as a page.

    \b
    python -m reproduction list
    python -m reproduction cifar10 --data-dir data --seeds 3 --device cuda
    """
    if name == "list":
        width = max(map(len, EXPERIMENTS))
        for experiment_name, (_, _, description) in EXPERIMENTS.items():
            typer.echo(f"{experiment_name:<{width}}  {description}")
        return
    experiment = experiment_named(name)
    request = Request(
        out=out,
        seeds=tuple(range(first_seed, first_seed + seeds)),
        methods=split_names(methods),
        cases=split_names(cases),
        data_dir=data_dir,
        device=device,
        quick=quick,
        force=force,
        log=typer.echo,
    )
    experiment.reproduce(request)
    table = out / experiment.name / "table.md"
    if table.exists():
        Console().print(escape(table.read_text(encoding="utf-8")), highlight=False, soft_wrap=True)


def split_names(names: str) -> tuple[str, ...] | None:
    """The names of an option, or None for "all"."""
    return None if names == "all" else tuple(name.strip() for name in names.split(","))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(reproduce)
    main(app)
