"""`posthoc predict`: a table of predictions from a head and a file of outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from posthoc.cli.options import Device, Engine, Features, Force, Inputs, OutputColumns, columns_named, open_data, refuse

__all__ = ["predict"]


def predict(
    head: Annotated[Path, typer.Argument(help="A head that posthoc fit wrote.")],
    data: Annotated[str, typer.Argument(help="Outputs of the same predictor on new data; targets are not needed.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the table goes: .parquet or .csv.")],
    device: Device = None,
    engine: Annotated[Engine, typer.Option(help="This process, or a Ray cluster (extra: ray).")] = Engine.local,
    outputs: OutputColumns = None,
    features: Features = None,
    inputs: Inputs = None,
    force: Force = False,
) -> None:
    """Predicts with a head: a table of row, mean, std (regression) or row, label, probs, entropy, std (classes)."""
    from posthoc.cli.table import require_table, write_predictions

    refuse(out, force)
    require_table(out)
    if engine is Engine.ray:
        from posthoc.integrations.ray import predict_with_ray

        parts = predict_with_ray(head, data, columns=columns_named(outputs, None, features, inputs))
    else:
        from posthoc import methods

        parts = methods.load(head, device=device).stream(open_data(data, outputs, None, features, inputs))
    rows = write_predictions(parts, out)
    typer.echo(f"wrote {rows:,} predictions to {out}")
