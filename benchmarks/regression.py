"""FMGP with default options against what else could be said of a regression network's errors: a constant noise, a
last-layer Laplace approximation, and a second head that learns the variance.

A network learns from 80 % of the rows; the methods are fitted on the next 10 % and scored on the last 10 %.

POSTHOC_DATA=... python -m benchmarks.regression [--seeds 3] [--only airline] [--networks FOLDER] [--quick]
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.harness import console, finish, options, with_data
from posthoc import FMGP, MAP, Laplace, Predictive
from posthoc.evaluate.metrics import coverage, cqm, crps, nll, rmse
from posthoc.predictive.base import LatentGaussian
from posthoc.predictive.regression import RegressionPredictive
from reproduction.data import load
from reproduction.experiments.regression import mlp, train_mlp

DATASETS = ("protein", "elevators", "airline", "taxi")
LEVELS = (0.5, 0.9, 0.95)
TRAINING_ROWS, QUICK_ROWS = 100_000, 1000
"""The largest number of rows that networks learn from, of the 80 %, to save time."""
HEADS, PATIENCE = 5, 10
"""A fifth of the rows of a fit tells the second head when to stop: when it has not improved for so many epochs."""
MANY = 10_000
"""From so many rows on, a fifth of them is not missed."""

Rows = tuple[Tensor, Tensor]
Method = Callable[[nn.Sequential, Rows, int], Callable[[Tensor], Predictive]]


@dataclass
class Problem:
    """A trained network, and rows that it has not seen."""

    network: nn.Sequential
    fit: Rows
    test: Rows
    source: str


def problem(name: str, data_dir: Path, seed: int, networks: Path | None, quick: bool = False) -> Problem:
    """One split for all seeds: they tell networks and fits apart, and nothing is chosen on the rows of the test."""
    data = load(name, data_dir).shuffled(0)
    parts = data.split().standardized()
    train, fit, test = ((part.inputs, part.targets[:, None]) for part in parts)
    train = (train[0][:TRAINING_ROWS], train[1][:TRAINING_ROWS])
    if quick:
        train, fit, test = ((x[:QUICK_ROWS], y[:QUICK_ROWS]) for x, y in (train, fit, test))
    kept = networks / f"{name}-{seed}.safetensors" if networks is not None else None
    network = mlp(train[0].shape[1], seed)
    if kept is not None and kept.is_file():
        network.load_state_dict(load_file(kept))
    else:
        train_mlp(network, train, seed, batch_size=256)
        if kept is not None:
            save_file(network.state_dict(), kept)
    return Problem(network.requires_grad_(False).eval(), fit, test, data.source)


def constant_noise(network: nn.Sequential, fit: Rows, seed: int) -> Callable[[Tensor], Predictive]:
    return MAP(network, "regression").fit(fit).predict


def fmgp(network: nn.Sequential, fit: Rows, seed: int) -> Callable[[Tensor], Predictive]:
    return FMGP(network, "regression", seed=seed, progress=False).fit(fit).predict


def last_layer_laplace(network: nn.Sequential, fit: Rows, seed: int) -> Callable[[Tensor], Predictive]:
    return Laplace(network, "regression", curvature="full").fit(fit).predict


def second_head(network: nn.Sequential, fit: Rows, seed: int) -> Callable[[Tensor], Predictive]:
    """A small network from the last hidden layer to the log-variance; the mean stays the network's own. Where rows are
    few, several are trained, each stopped by another part of the rows, and their log-variances are averaged."""
    with torch.no_grad():
        phi, squared = network[:-1](fit[0]), (fit[1] - network(fit[0])).square()
    location, spread, unit = phi.mean(0), phi.std(0).clamp_min(1e-6), squared.mean()
    phi, squared = (phi - location) / spread, squared / unit
    order = torch.randperm(len(phi), generator=torch.Generator().manual_seed(seed))
    count = HEADS if len(phi) < MANY else 1
    heads = [variance_head(phi, squared, order, part, seed) for part in order.chunk(HEADS)[:count]]

    @torch.no_grad()
    def predict(x: Tensor) -> Predictive:
        mean, at = network(x), (network[:-1](x) - location) / spread
        variance = unit * torch.stack([head(at) for head in heads]).mean(0).exp()
        return RegressionPredictive(LatentGaussian(mean, torch.zeros_like(mean)), variance)

    return predict


def variance_head(phi: Tensor, squared: Tensor, order: Tensor, held: Tensor, seed: int) -> nn.Sequential:
    """One head, kept as it was when the held-out rows liked it best."""
    used = order[~torch.isin(order, held)]
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = nn.Sequential(nn.Linear(phi.shape[1], 128), nn.Tanh(), nn.Linear(128, 1))
    nn.init.zeros_(head[-1].weight)
    nn.init.zeros_(head[-1].bias)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, weight_decay=0.1)

    def loss(rows: Tensor) -> Tensor:
        log_variance = head(phi[rows])
        return 0.5 * (log_variance + squared[rows] * (-log_variance).exp()).mean()

    best, kept, waited = math.inf, copy.deepcopy(head.state_dict()), 0
    while waited < PATIENCE:
        for batch in used[torch.randperm(len(used), generator=generator)].split(256):
            optimizer.zero_grad()
            loss(batch).backward()
            optimizer.step()
        with torch.no_grad():
            score = float(loss(held))
        waited += 1
        if score < best:
            best, kept, waited = score, copy.deepcopy(head.state_dict()), 0
    head.load_state_dict(kept)
    return head


METHODS: dict[str, Method] = {
    "fmgp": fmgp,
    "constant noise": constant_noise,
    "last-layer laplace": last_layer_laplace,
    "second head": second_head,
}


def scores(pred: Predictive, y: Tensor, fitted_on: int) -> dict[str, Any]:
    result: dict[str, Any] = {m.__name__: float(m(pred, y)) for m in (nll, crps, cqm, rmse)}
    result["coverage"] = {}
    for level in LEVELS:
        share = float(coverage(pred, y, level))
        band = 2.0 * math.sqrt(level * (1.0 - level) * (1.0 / fitted_on + 1.0 / len(y)))
        result["coverage"][str(level)] = {"share": share, "band": band, "inside": abs(share - level) <= band}
    return result


def run(task: Problem, seed: int) -> dict[str, Any]:
    results = {}
    for name, method in METHODS.items():
        start = time.perf_counter()
        predict = method(task.network, task.fit, seed)
        seconds = time.perf_counter() - start
        results[name] = {**scores(predict(task.test[0]), task.test[1], len(task.fit[0])), "fit_seconds": seconds}
    return results


def average(runs: list[dict[str, Any]], method: str, *path: str) -> tuple[float, float]:
    """The mean over seeds and its standard error."""
    values = []
    for run in runs:
        value = run[method]
        for key in path:
            value = value[key]
        values.append(float(value))
    column = torch.tensor(values, dtype=torch.float64)
    error = float(column.std() / math.sqrt(len(values))) if len(values) > 1 else 0.0
    return float(column.mean()), error


def table_of(name: str, entry: dict[str, Any]) -> Table:
    runs = entry["runs"]
    bands = {level: runs[0]["fmgp"]["coverage"][str(level)]["band"] for level in LEVELS}
    title = f"{name}: {entry['source']}; fitted on {entry['fit_rows']:,} rows, scored on {entry['test_rows']:,}"
    table = Table(title=title, title_justify="left", caption="* beyond two standard errors in some run")
    for column in (
        "method",
        "NLL",
        "CRPS",
        "CQM",
        *(f"{level:.0%} ± {bands[level]:.3f}" for level in LEVELS),
        "fit, s",
    ):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method in METHODS:
        cells = ["{:.4f}±{:.4f}".format(*average(runs, method, metric)) for metric in ("nll", "crps", "cqm")]
        for level in map(str, LEVELS):
            share, _ = average(runs, method, "coverage", level, "share")
            inside = all(run[method]["coverage"][level]["inside"] for run in runs)
            cells.append(f"{share:.3f}{' ' if inside else '*'}")
        table.add_row(method, *cells, f"{average(runs, method, 'fit_seconds')[0]:.1f}")
    return table


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__)
    with_data(parser)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=DATASETS, default=DATASETS)
    parser.add_argument("--networks", type=Path, help="a folder to keep trained networks in")
    args = parser.parse_args(arguments)
    if args.device != "cpu":
        parser.error("this benchmark runs on the CPU")
    result: dict[str, Any] = {"training_rows": QUICK_ROWS if args.quick else TRAINING_ROWS, "data": {}}
    wide = console()
    for name in args.only:
        entry: dict[str, Any] = {"runs": []}
        for seed in range(1 if args.quick else args.seeds):
            task = problem(name, args.data_dir, seed, args.networks, args.quick)
            entry |= {"source": task.source, "fit_rows": len(task.fit[0]), "test_rows": len(task.test[0])}
            entry["runs"].append(run(task, seed))
        result["data"][name] = entry
        wide.print(table_of(name, entry))
    finish("regression", args, result)


if __name__ == "__main__":
    main()
