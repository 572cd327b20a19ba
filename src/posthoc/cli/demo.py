"""`posthoc demo`: the paper's Figure 1 in a minute, from training the network to the picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from posthoc.predictive.base import Predictive
    from posthoc.predictive.regression import RegressionPredictive

__all__ = ["demo"]


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the figure goes (PNG).")] = Path("posthoc-demo.png"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the data, the network and the fit.")] = 0,
) -> None:
    """Trains a small network on noisy 1-D data with gaps, puts error bars on it, prints a table and draws a figure."""
    from posthoc.evaluate.report.figures import require_matplotlib
    from posthoc.io import require_writable

    # Before the work, not after it.
    require_matplotlib()
    require_writable(out)
    import torch

    from posthoc import FMGP, RBF
    from posthoc.cli.demo_data import heteroscedastic, train_network
    from posthoc.evaluate.report.figures import error_bar_figure

    generator = torch.Generator().manual_seed(seed)
    train, calibration, test = (heteroscedastic(n, generator) for n in (400, 400, 2000))
    model = train_network(*train, seed)
    typer.echo("trained a network of 2 x 50 tanh units on 400 points")
    kernel = RBF(on="inputs")
    # The noise is Gaussian here, and known to be.
    bayes = FMGP(model, "regression", kernel=kernel, num_inducing=40, steps=500, residuals="gaussian", seed=seed)
    bayes.fit(calibration)
    typer.echo("fitted an FMGP on 400 points the network has not seen")

    rows = {
        "network + constant noise": constant_noise(model, calibration, test[0]),
        "network + FMGP": bayes.predict(test[0]),
    }
    print_table(rows, test[1])

    x = torch.linspace(-8.5, 8.5, 500)[:, None]
    panels = [
        ("The network with its best constant noise", constant_noise(model, calibration, x)),
        ("The same network with FMGP", bayes.predict(x)),
    ]
    error_bar_figure(out, x, panels, (torch.cat([train[0], calibration[0]]), torch.cat([train[1], calibration[1]])))
    typer.echo(f"wrote {out}")


def constant_noise(model: nn.Module, calibration: tuple[Tensor, Tensor], x: Tensor) -> RegressionPredictive:
    """The bare network, with the one noise variance that is best on the calibration data."""
    import torch

    from posthoc.predictive.base import LatentGaussian
    from posthoc.predictive.regression import RegressionPredictive

    with torch.no_grad():
        residual, mean = calibration[1] - model(calibration[0]), model(x)
    noise = residual.square().mean().expand_as(mean)
    return RegressionPredictive(LatentGaussian(mean, torch.zeros_like(mean)), noise)


def print_table(rows: dict[str, Predictive], y: Tensor) -> None:
    """NLL, CRPS and coverage of each prediction on the test data."""
    from rich.console import Console
    from rich.table import Table

    from posthoc.evaluate.metrics import coverage, cqm, crps, nll

    table = Table(title="on 2,000 test points")
    for column in ("", "NLL ↓", "CRPS ↓", "CQM ↓", "in 50 % interval", "in 95 % interval"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=not column)
    for name, pred in rows.items():
        half, most = (float(coverage(pred, y, level)) for level in (0.5, 0.95))
        row = [f"{nll(pred, y):.3f}", f"{crps(pred, y):.4f}", f"{cqm(pred, y):.3f}", f"{half:.1%}", f"{most:.1%}"]
        table.add_row(name, *row)
    Console().print(table)
