"""The paper's regressions: Year, Airline and Taxi, networks of three layers of 200 tanh units.

As in the paper, methods are fitted on the rows that the network has learnt from, and choose by the validation rows;
FMGP with our defaults is fitted on the validation rows instead, which the network has not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from posthoc.base import Method
from posthoc.fmgp import FMGP
from posthoc.methods import ELLA, MAP, MFVI, Laplace, VaLLA
from reproduction.experiments.experiment import Experiment, Request
from reproduction.experiments.tabular import Problem, problem
from reproduction.experiments.variants import Given, Variant, fitted_and_scored
from reproduction.plots import dot_figure

__all__ = ["PAPER_FMGP", "Regression"]

FEW = {"steps": 3, "batch_size": 20}
FEW_POINTS = {"num_inducing": 5, **FEW}
LINEARISED_ROWS = 50_000
"""Gradients of all weights are taken at no more rows than so many, which then stand for all."""
PAPER_FMGP = {"kernel": {"type": "rbf", "on": "inputs"}, "residuals": "gaussian", "inducing": "kmeans", "steps": 2000}
"""Squared exponential, over the inputs."""
FITTED_ON = {
    "train": "rows that the network learnt from",
    "val": "validation rows",
    "train, val": "rows that the network learnt from, and validation rows to choose by",
}

VARIANTS = {
    "map": Variant("MAP", MAP, on="val"),
    "lla-kfac": Variant("LLA (last layer, KFAC)", Laplace, {"curvature": "kron"}),
    "ella": Variant("ELLA", ELLA, {"weights": "all", "early_stop": False}, {"num_points": 20}, on="train, val"),
    "valla": Variant("VaLLA", VaLLA, {"weights": "all"}, FEW_POINTS, on="train, val"),
    "mfvi": Variant("MFVI", MFVI, {"steps": 3000, "samples": 30}, {"samples": 2, **FEW}),
    "fmgp-paper": Variant("FMGP (the paper's way)", FMGP, PAPER_FMGP, FEW_POINTS, on="train, val"),
    "fmgp": Variant("FMGP (ours)", FMGP, {}, FEW_POINTS, on="val"),
}


class Regression(Experiment):
    """Three tables of real data."""

    name = "regression"
    title = "Regression: Year, Airline and Taxi"
    task = "regression"
    methods = VARIANTS
    cases = ("year", "airline", "taxi")

    def configuration(self, case: str, method: str, request: Request) -> dict[str, Any]:
        return {**VARIANTS[method].describe(request.quick), "network": "3 x 200 tanh units"}

    def prepare(self, case: str, seed: int, request: Request) -> Problem:
        return problem(case, seed, request)

    def work(self, prepared: Problem, case: str, method: str, seed: int, request: Request) -> Mapping[str, Any]:
        variant = VARIANTS[method]
        return run(variant, given(variant, prepared), prepared, seed, request)

    def draw(self, documents: list[dict[str, Any]], folder: Path) -> list[Path]:
        return dot_figure(folder / "figure", documents, {"nll": "NLL", "crps": "CRPS", "cqm": "CQM"})


def given(variant: Variant, task: Problem) -> Given:
    """What a variant is fitted on."""
    if variant.on == "val":
        return Given(task.val)
    x, y = task.train
    val = task.val if "val" in variant.on else None
    if variant.options.get("weights") == "all" and len(x) > LINEARISED_ROWS:
        rows = torch.linspace(0, len(x) - 1, LINEARISED_ROWS, device=x.device).long()
        return Given((x[rows], y[rows]), val, num_data=len(x))
    return Given((x, y), val)


def run(
    variant: Variant,
    given: Given,
    task: Problem,
    seed: int,
    request: Request,
    look: Callable[[Method], dict[str, float]] = lambda method: {},
) -> dict[str, Any]:
    """One method on one problem, with what is to be said of its rows."""
    found = fitted_and_scored(variant, "regression", given, task.test, task.network, seed, request, look)
    rows = {name: len(part[0]) for name, part in (("train", task.train), ("val", task.val), ("test", task.test))}
    return {**found, "data": {"test": task.source, "fit": FITTED_ON[variant.on]}, "diagnostics": {"rows": rows}}
