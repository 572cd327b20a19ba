"""`posthoc evaluate`: how good a head is, beside the bare predictor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from posthoc.cli.options import Device, Features, Force, Inputs, OutputColumns, Targets, open_data, refuse

__all__ = ["evaluate"]


def evaluate(
    head: Annotated[Path, typer.Argument(help="A head that posthoc fit wrote.")],
    test: Annotated[str, typer.Argument(help="Outputs and targets that neither network nor head has seen.")],
    ood: Annotated[str | None, typer.Option(help="Outputs on data from elsewhere, to tell from the test data.")] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="Write the figures there too.")] = None,
    device: Device = None,
    outputs: OutputColumns = None,
    targets: Targets = None,
    features: Features = None,
    inputs: Inputs = None,
    force: Force = False,
) -> None:
    """Scores a head on new data, beside the bare predictor (in regression: with its best constant noise)."""
    if json_ is not None:
        refuse(json_, force)
    from posthoc import methods
    from posthoc.evaluate.evaluate import evaluate as evaluate_method
    from posthoc.io import atomic_path

    method = methods.load(head, device=device)
    rows = open_data(test, outputs, targets, features, inputs)
    elsewhere = open_data(ood, outputs, None, features, inputs) if ood is not None else None
    figures = evaluate_method(method, rows, ood=elsewhere)
    show(figures, method.name, len(rows))
    if json_ is not None:
        with atomic_path(json_) as temporary:
            temporary.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        typer.echo(f"wrote {json_}")


def show(figures: dict[str, float], name: str, rows: int) -> None:
    """A table of both columns."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", "bare predictor", name, title=f"{rows:,} rows", title_justify="left")
    for figure in (key for key in figures if not key.startswith("base_")):
        table.add_row(figure, f"{figures[f'base_{figure}']:.4f}", f"{figures[figure]:.4f}")
    Console().print(table)
