"""`posthoc demo`: the paper's Figure 1 in a minute, from training the network to the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from posthoc.cli import shared


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the figure goes (PNG).")] = Path("posthoc-demo.png"),
    seed: shared.Seed = 0,
) -> None:
    """Trains a small network on noisy 1-D data with gaps, puts error bars on it, prints a table and draws a figure."""
    from posthoc.evaluate.plots import prediction_bands
    from posthoc.optional import require

    require("matplotlib", "plots", "Drawing the figure")
    shared.require_output(out, force=True)
    import torch

    from posthoc import FMGP, MAP, RBF, compare
    from posthoc.cli.demo_data import heteroscedastic, train_network

    seed = seed or 0
    generator = torch.Generator().manual_seed(seed)
    train, calibration, test = (heteroscedastic(n, generator) for n in (400, 400, 2000))
    model = train_network(*train, seed)
    typer.echo("trained a network of 2 x 50 tanh units on 400 points")
    options: dict[str, Any] = {"kernel": RBF(on="inputs"), "num_inducing": 40, "steps": 500, "seed": seed}
    methods = {
        "network + constant noise": MAP(model, "regression"),
        # The noise of these data is known to be Gaussian.
        "network + FMGP": FMGP(model, "regression", residuals="gaussian", **options),
    }
    comparison = compare(model, calibration, test, methods)
    comparison.show(title="fitted on 400 points that the network has not seen, scored on 2,000")

    x = torch.linspace(-8.5, 8.5, 500)[:, None]
    panels = [(f"The {name}", method.predict(x)) for name, method in methods.items()]
    points = (torch.cat([train[0], calibration[0]]), torch.cat([train[1], calibration[1]]))
    prediction_bands(out, x, panels, points)
    typer.echo(f"wrote {out}")
