"""The paper's regressions: Year, Airline and Taxi, with networks of three layers of 200 tanh units.

As in the paper, methods are fitted on the network's training rows and use the validation rows for choices. FMGP with
the defaults of this package is fitted on the validation rows, which the network has not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from posthoc import ELLA, MAP, MFVI, Laplace, VaLLA
from posthoc.base import Method
from posthoc.evaluate.cost import versions
from posthoc.fmgp import FMGP
from posthoc.io import atomic_path, require_folder
from reproduction.data import load
from reproduction.data.files import cache_folder
from reproduction.experiments.experiment import Experiment, Request
from reproduction.experiments.variants import QUICK, QUICK_POINTS, FitData, Variant, digest, fit_and_score
from reproduction.figures import dot_figure

__all__ = ["PAPER_FMGP", "VARIANTS", "Problem", "Regression", "fit_data_of", "mlp", "run_variant", "train_mlp"]

EPOCHS, BATCH = 30, 512
QUICK_ROWS = 300
SHUFFLED = ("airline", "taxi")
"""Data sets in the order of time, over more months than the paper's; their rows are shuffled."""
MAX_LINEARIZED_ROWS = 50_000
"""Methods with gradients of all weights use at most this number of rows, evenly spaced."""
PAPER_FMGP = {"kernel": {"type": "rbf", "on": "inputs"}, "residuals": "gaussian", "inducing": "kmeans", "steps": 2000}
"""The paper's FMGP for regression: a squared exponential kernel over the inputs."""
FITTED_ON = {
    "train": "rows that the network learned from",
    "val": "validation rows",
    "train, val": "rows that the network learned from, and validation rows to choose by",
}
VARIANTS = {
    "map": Variant("MAP", MAP, on="val"),
    "lla-kfac": Variant("LLA (last layer, KFAC)", Laplace, {"curvature": "kron"}),
    "ella": Variant("ELLA", ELLA, {"weights": "all", "early_stop": False}, {"num_inducing": 20}, on="train, val"),
    "valla": Variant("VaLLA", VaLLA, {"weights": "all"}, QUICK_POINTS, on="train, val"),
    "mfvi": Variant("MFVI", MFVI, {"steps": 3000, "samples": 30}, {"samples": 2, **QUICK}),
    "fmgp-paper": Variant("FMGP (the paper's way)", FMGP, PAPER_FMGP, QUICK_POINTS, on="train, val"),
    "fmgp": Variant("FMGP (ours)", FMGP, {}, QUICK_POINTS, on="val"),
}

Rows = tuple[Tensor, Tensor]
"""Inputs and targets."""


@dataclass(frozen=True)
class Problem:
    """A trained network, its training rows, validation rows, test rows, and the source of the data."""

    network: nn.Sequential
    train: Rows
    val: Rows
    test: Rows
    source: str


class Regression(Experiment):
    """Three tables of real data."""

    name = "regression"
    title = "Regression: Year, Airline and Taxi"
    task = "regression"
    methods = VARIANTS
    cases: ClassVar[tuple[str, ...]] = ("year", "airline", "taxi")

    def configuration(self, case: str, method: str, request: Request) -> dict[str, Any]:
        return {**self.methods[method].describe(request.quick), "network": "3 x 200 tanh units"}

    def prepare(self, case: str, seed: int, request: Request) -> Problem:
        return load_problem(case, seed, request)

    def run(self, prepared: Problem, case: str, method: str, seed: int, request: Request) -> Mapping[str, Any]:
        variant = self.methods[method]
        return run_variant(variant, fit_data_of(variant, prepared), prepared, seed, request)

    def draw(self, documents: list[dict[str, Any]], folder: Path) -> list[Path]:
        return dot_figure(folder / "figure", documents, {"nll": "NLL", "crps": "CRPS", "cqm": "CQM"})


def fit_data_of(variant: Variant, problem: Problem) -> FitData:
    """The rows that a variant is fitted on."""
    if variant.on == "val":
        return FitData(problem.val)
    x, y = problem.train
    val = problem.val if "val" in variant.on else None
    if variant.options.get("weights") == "all" and len(x) > MAX_LINEARIZED_ROWS:
        rows = torch.linspace(0, len(x) - 1, MAX_LINEARIZED_ROWS, device=x.device).long()
        return FitData((x[rows], y[rows]), val, num_data=len(x))
    return FitData((x, y), val)


def run_variant(
    variant: Variant,
    fit_data: FitData,
    problem: Problem,
    seed: int,
    request: Request,
    inspect: Callable[[Method], dict[str, float]] = lambda method: {},
) -> dict[str, Any]:
    """Fits and scores one variant, and describes the data."""
    result = fit_and_score(variant, "regression", fit_data, problem.test, problem.network, seed, request, inspect)
    rows = {name: len(getattr(problem, name)[0]) for name in ("train", "val", "test")}
    return {**result, "data": {"test": problem.source, "fit": FITTED_ON[variant.on]}, "diagnostics": {"rows": rows}}


def load_problem(name: str, seed: int, request: Request) -> Problem:
    """A data set in three parts, the same for all seeds, and the network of a seed, trained on the first part."""
    data = load(name, request.data_dir)
    source = data.source
    if name in SHUFFLED:
        data, source = data.shuffled(0), f"{source}; rows shuffled"
    if request.quick:
        data = data[:QUICK_ROWS]
    parts = data.split().standardized()
    device = torch.device(request.device)
    train, val, test = ((part.inputs.to(device), part.targets[:, None].to(device)) for part in parts)
    network = cached_mlp(train, seed, source, epochs=2 if request.quick else EPOCHS)
    return Problem(network, train, val, test, source)


def cached_mlp(train: Rows, seed: int, source: str, epochs: int) -> nn.Sequential:
    """The trained network of a seed, kept in the cache, since several experiments use it."""
    x, _ = train
    recipe = [source, list(x.shape), seed, epochs, BATCH, x.device.type, versions()]
    path = cache_folder() / "networks" / f"mlp-{digest(recipe)}.safetensors"
    network = mlp(x.shape[1], seed)
    if path.exists():
        network.load_state_dict(load_file(path))
        return network.to(x.device).eval()
    train_mlp(network.to(x.device), train, seed, epochs=epochs)
    require_folder(path.parent)
    with atomic_path(path) as temporary:
        save_file(network.state_dict(), temporary)
    return network.eval()


def mlp(width: int, seed: int) -> nn.Sequential:
    """An untrained network of three layers of 200 tanh units, for `width` inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        hidden = [layer for a, b in pairwise([width, 200, 200, 200]) for layer in (nn.Linear(a, b), nn.Tanh())]
        return nn.Sequential(*hidden, nn.Linear(200, 1))


def train_mlp(network: nn.Sequential, rows: Rows, seed: int, *, epochs: int = EPOCHS, batch_size: int = BATCH) -> None:
    """Trains a network by Adam with a cosine schedule on the squared error."""
    x, y = rows
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-len(x) // batch_size))
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).to(x.device).split(batch_size):
            optimizer.zero_grad()
            (network(x[batch]) - y[batch]).square().mean().backward()
            optimizer.step()
            schedule.step()
