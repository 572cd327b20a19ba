"""`posthoc evaluate`: how good a head is, beside the bare predictor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from posthoc.cli import shared


def evaluate(
    head: Annotated[Path, typer.Argument(help="A head that posthoc fit wrote.")],
    test: Annotated[str, typer.Argument(help="Outputs and targets that neither network nor head has seen.")],
    ood: Annotated[str | None, typer.Option(help="Outputs on out-of-distribution data, to detect.")] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="Write the figures there too.")] = None,
    device: shared.Device = None,
    outputs: shared.OutputColumns = None,
    targets: shared.Targets = None,
    features: shared.Features = None,
    inputs: shared.Inputs = None,
    force: shared.Force = False,
) -> None:
    """Scores a head on new data, beside the bare predictor (in regression: with its best constant noise)."""
    if json_ is not None:
        shared.require_output(json_, force=force, inputs=(head, test, ood))
    from rich.console import Console
    from rich.table import Table

    from posthoc import methods
    from posthoc.evaluate.evaluate import evaluate as evaluate_method

    columns = shared.read_columns(outputs=outputs, targets=targets, features=features, inputs=inputs)
    method = methods.load(head, device=device)
    data = shared.open_data({"test": test} | ({"ood": ood} if ood is not None else {}), columns)
    figures = evaluate_method(method, data["test"], ood=data.get("ood"))
    table = Table("", "bare predictor", method.name, title=f"{len(data['test']):,} rows", title_justify="left")
    for figure in (key for key in figures if not key.startswith("base_")):
        bare = figures.get(f"base_{figure}")  # a bare predictor has no OOD score
        table.add_row(figure, "" if bare is None else f"{bare:.4f}", f"{figures[figure]:.4f}")
    Console().print(table)
    if json_ is not None:
        shared.write_text(json_, json.dumps(figures, indent=2) + "\n")
        typer.echo(f"wrote {json_}")
