"""`posthoc predict`: a table of predictions from a head and a file of outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from posthoc.cli import shared

__all__ = ["predict"]


def predict(
    head: Annotated[Path, typer.Argument(help="A head that posthoc fit wrote.")],
    data: Annotated[str, typer.Argument(help="Outputs of the same predictor on new data; targets are not needed.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the table goes: .parquet or .csv.")],
    device: shared.Device = None,
    engine: shared.EngineOption = shared.Engine.local,
    outputs: shared.OutputColumns = None,
    features: shared.Features = None,
    inputs: shared.Inputs = None,
    force: shared.Force = False,
) -> None:
    """Predicts with a head: a table of row, mean, std (regression) or row, label, probs, entropy, std (classes)."""
    from posthoc.cli.table import require_table, write_predictions

    shared.require_output(out, force=force, inputs=(head, data))
    require_table(out)
    columns = shared.Columns(outputs, None, features, inputs)
    if engine is shared.Engine.ray:
        from posthoc.integrations.ray import predict_with_ray

        parts = predict_with_ray(head, data, columns=columns.named())
    else:
        from posthoc import methods

        parts = methods.load(head, device=device).stream(columns.open(data))
    rows = write_predictions(parts, out)
    typer.echo(f"wrote {rows:,} predictions to {out}")
