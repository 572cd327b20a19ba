"""`posthoc predict`: a table of predictions from a head and a file of outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from posthoc.cli import shared


def predict(
    head: Annotated[Path, typer.Argument(help="A head that posthoc fit wrote.")],
    data: Annotated[str, typer.Argument(help="Outputs of the same predictor on new data; targets are not needed.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the table goes: .parquet or .csv.")],
    device: shared.Device = None,
    engine: shared.EngineOption = "local",
    outputs: shared.OutputColumns = None,
    features: shared.Features = None,
    inputs: shared.Inputs = None,
    force: shared.Force = False,
) -> None:
    """Predicts with a head: a table of row, mean, std (regression) or row, label, probs, entropy, std (classes)."""
    from posthoc.cli.table import require_table, write_predictions

    shared.require_output(out, force=force, inputs=(head, data))
    require_table(out)
    columns = shared.read_columns(outputs=outputs, features=features, inputs=inputs)
    if engine == "ray":
        from posthoc.integrations.ray import predict_with_ray

        parts = predict_with_ray(head, data, columns=columns)
    else:
        from posthoc import methods
        from posthoc.collect import open_outputs

        parts = methods.load(head, device=device).stream(open_outputs(data, columns=columns))
    rows = write_predictions(parts, out)
    typer.echo(f"wrote {rows:,} predictions to {out}")
