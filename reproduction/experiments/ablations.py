"""The paper's ablations: α and the number of inducing points, for the paper's FMGP on one table.

The paper uses Year. Where Year is unavailable, use `--cases airline`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from posthoc.base import Method
from posthoc.collect.outputs import Outputs
from posthoc.fmgp import FMGP
from posthoc.kernels import RBF
from posthoc.likelihoods.gaussian import Gaussian
from reproduction.experiments.experiment import Request
from reproduction.experiments.regression import PAPER_FMGP, Problem, Regression, run_variant
from reproduction.experiments.variants import QUICK, QUICK_POINTS, FitData, Variant
from reproduction.figures import dependence_figure

__all__ = ["AblationAlpha", "AblationInducing"]

ALPHAS, NUMBERS = (0.0, 0.25, 0.5, 0.75, 1.0), (10, 50, 100, 200)


class Ablation(Regression):
    """The paper's FMGP with one option that changes from row to row."""

    cases = ("year", "airline")
    option: ClassVar[str]
    label: ClassVar[str]

    def run(self, prepared: Problem, case: str, method: str, seed: int, request: Request) -> Mapping[str, Any]:
        fit_data = FitData(prepared.train, prepared.val)
        x = prepared.test[0]
        return run_variant(self.methods[method], fit_data, prepared, seed, request, lambda fit: decomposition(fit, x))

    def draw(self, documents: list[dict[str, Any]], folder: Path) -> list[Path]:
        figures = {"nll": "NLL", "crps": "CRPS", "cqm": "CQM", "amplitude": "amplitude", "noise": "noise"}
        return dependence_figure(folder / "figure", documents, self.option, figures, self.label)


class AblationAlpha(Ablation):
    """From the ELBO (α = 0) to the energy of expectation propagation (α = 1)."""

    name = "ablation-alpha"
    title = "What α does"
    option, label = "alpha", "α"
    methods = {  # noqa: RUF012 (declared a ClassVar above)
        f"alpha-{alpha:g}": Variant(f"α = {alpha:g}", FMGP, {**PAPER_FMGP, "alpha": alpha}, QUICK_POINTS)
        for alpha in ALPHAS
    }


class AblationInducing(Ablation):
    """From 10 inducing points to 200."""

    name = "ablation-inducing"
    title = "What the number of inducing points does"
    option, label = "num_inducing", "inducing points"
    methods = {  # noqa: RUF012
        f"m-{number}": Variant(f"M = {number}", FMGP, {**PAPER_FMGP, "num_inducing": number}, QUICK)
        for number in NUMBERS
    }


@torch.no_grad()
def decomposition(method: Method, x: Tensor) -> dict[str, float]:
    """The learned parameters of a fit, in units of the residuals, and the parts of the prior variance at `x`.

    Returns:
        Amplitude, mean and standard deviation of the length-scales, noise; and the posterior variance and the
        correction, in percent of the prior variance.
    """
    assert isinstance(method, FMGP)
    assert isinstance(method.likelihood, Gaussian)
    assert method.head is not None
    head, process = method.head, method.head.process
    kernel, coupling = process.kernel, process.coupling
    assert isinstance(kernel, RBF)
    unit = coupling.diagonal() if coupling is not None else torch.ones(1, dtype=torch.float64, device=head.device)
    rows = Outputs(torch.zeros(len(x), 1, device=x.device), inputs=x)  # the variance does not depend on the outputs
    prior = (kernel.diag(head.coordinates.points(rows))[:, None] * unit).mean()
    posterior = head.latent(rows).variance.mean()
    lengthscale = kernel.log_lengthscale.exp()
    return {
        "amplitude": float(kernel.log_amplitude.exp() * unit.mean()),
        "lengthscale_mean": float(lengthscale.mean()),
        "lengthscale_std": float(lengthscale.std()) if lengthscale.numel() > 1 else 0.0,
        "noise": float(method.likelihood.noise.mean()),
        "posterior_percent": 100.0 * float(posterior / prior),
        "correction_percent": 100.0 * float((prior - posterior) / prior),
    }
