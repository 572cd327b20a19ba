"""FMGP with default options against other scales around the same fixed mean: constant noise, boosting of log|r|,
conformalized quantiles of |r|, NGBoost and CatBoost.

Networks and splits are those of `benchmarks.regression`. `electricity` is a forecast of somebody else, in the order of
time: the first half is fitted, the second is scored. Scores of a row are averaged over the networks; differences have
paired standard errors over rows. NGBoost and CatBoost are compared where they are installed.

POSTHOC_DATA=... python -m benchmarks.regression_scale [--seeds 3] [--only taxi] [--networks FOLDER] [--quick]
"""

from __future__ import annotations

import argparse
import importlib
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from benchmarks.harness import console, finish, options, with_data
from benchmarks.regression import QUICK_ROWS, problem
from posthoc import FMGP, Outputs, PosthocWarning
from posthoc.evaluate.metrics import log_loss, ranked_probability_score
from posthoc.predictive.base import LatentGaussian, Predictive
from posthoc.predictive.regression import RegressionPredictive
from posthoc.predictive.residual_mixture import ResidualMixture

TRAINED, FORECASTS = ("protein", "elevators", "taxi", "airline"), ("de", "fr")
DRIFTING = FORECASTS
LEVELS = (0.5, 0.9, 0.95)
METRICS = ("crps", "interval_score", "nll")
FOLDS, DRAWS = 3, 400

Rows = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""Columns (N, D) and residuals (N,)."""
Law = Callable[[Outputs], dict[str, Tensor]]
"""From rows of a test to the scores of each."""


def rows_of(name: str, args: argparse.Namespace, seed: int) -> tuple[Outputs, Outputs]:
    """The rows of the fit and of the test."""
    if name in FORECASTS:
        with np.load(args.data_dir / "electricity" / f"{name}.npz") as file:
            rows = Outputs(file["outputs"], file["targets"], inputs=file["inputs"])
        half = len(rows) // 2
        fit, test = rows[:half], rows[half:]
        return (fit[:QUICK_ROWS], test[:QUICK_ROWS]) if args.quick else (fit, test)
    task = problem(name, args.data_dir, seed, args.networks, args.quick)
    with torch.no_grad():
        parts = [Outputs(task.network(x), y, task.network[:-1](x), x) for x, y in (task.fit, task.test)]
    return parts[0], parts[1]


def columns(rows: Outputs) -> Rows:
    assert rows.inputs is not None
    assert rows.targets is not None
    x = torch.cat([rows.inputs, rows.outputs], -1).double().numpy()
    return x, (rows.targets.double() - rows.outputs.double()).squeeze(1).numpy()


def interval_scores(low: Tensor, high: Tensor, y: Tensor, level: float) -> Tensor:
    """The Winkler score of intervals: their width, and 2 / α times what they miss a target by."""
    missed = (low - y).clamp_min(0.0) + (y - high).clamp_min(0.0)
    return high - low + 2.0 / (1.0 - level) * missed


def of_predictive(pred: Predictive, rows: Outputs) -> dict[str, Tensor]:
    assert rows.targets is not None
    y, found = (
        rows.targets.double(),
        {"nll": log_loss(pred, rows.targets), "crps": ranked_probability_score(pred, rows.targets)},
    )
    for level in LEVELS:
        low, high = (end.double() for end in pred.interval(level))
        found[f"inside_{level}"] = ((y >= low) & (y <= high)).double().squeeze(1)
        if level == 0.9:
            found["interval_score"] = interval_scores(low, high, y, level).squeeze(1)
    return found


def normal(scale: Tensor, rows: Outputs, residuals: ResidualMixture | None = None) -> dict[str, Tensor]:
    mean, scale = rows.outputs.double(), scale.reshape(-1, 1).double()
    latent = LatentGaussian(mean, torch.zeros_like(mean))
    return of_predictive(RegressionPredictive(latent, scale.square(), residuals), rows)


def fmgp(fit: Outputs, seed: int) -> Law:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PosthocWarning)
        method = FMGP(None, "regression", seed=seed, progress=False).fit(fit)
    print(f"  {method.selection_.scale}")
    return lambda rows: of_predictive(method.predict(rows), rows)


def constant_noise(fit: Outputs, seed: int) -> Law:
    _, r = columns(fit)
    return lambda rows: normal(torch.full((len(rows),), float(np.sqrt(np.mean(r**2)))), rows)


def boosting(**options: Any) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor

    return HistGradientBoostingRegressor(random_state=0, **options)


def recipe(fit: Outputs, seed: int) -> Law:
    """Boosting of log|r|, then the empirical law of cross-fitted r / s."""
    from sklearn.model_selection import KFold, cross_val_predict

    x, r = columns(fit)
    size = np.log(np.abs(r) + 1e-3 * np.median(np.abs(r)))
    z = r / np.exp(cross_val_predict(boosting(), x, size, cv=KFold(FOLDS, shuffle=True, random_state=seed)))
    model, unit = boosting().fit(x, size), np.sqrt(np.mean(z**2))
    law = ResidualMixture.fit(torch.from_numpy(z / unit)[:, None])
    return lambda rows: normal(torch.from_numpy(unit * np.exp(model.predict(columns(rows)[0]))), rows, law)


def conformal_quantiles(fit: Outputs, seed: int) -> Law:
    """A .9-quantile of |r|, conformalized: intervals by the quantiles of cross-fitted |r| / s. There is no density."""
    from sklearn.model_selection import KFold, cross_val_predict

    x, r = columns(fit)
    size, floor = np.abs(r), 0.05 * np.median(np.abs(r))
    folds = KFold(FOLDS, shuffle=True, random_state=seed)
    model = boosting(loss="quantile", quantile=0.9)
    z = torch.from_numpy(r / np.maximum(cross_val_predict(model, x, size, cv=folds), floor))
    model.fit(x, size)
    draws = z.quantile((torch.arange(DRAWS, dtype=torch.float64) + 0.5) / DRAWS) if len(z) < 2**24 else z
    spread = 0.5 * (draws[:, None] - draws).abs().mean()

    def predict(rows: Outputs) -> dict[str, Tensor]:
        x, error = columns(rows)
        s, r = torch.from_numpy(np.maximum(model.predict(x), floor)), torch.from_numpy(error)
        found = {
            "crps": s * torch.cat([(part[:, None] - draws).abs().mean(-1) for part in (r / s).split(4096)]) - s * spread
        }
        for level in LEVELS:
            half = s * z.abs().quantile(min(1.0, math.ceil(level * (len(z) + 1)) / len(z)))
            found[f"inside_{level}"] = (r.abs() <= half).double()
            if level == 0.9:
                found["interval_score"] = interval_scores(-half, half, r, level)
        return found

    return predict


def ngboost(fit: Outputs, seed: int) -> Law:
    """NGBoost of the scale of a normal distribution with mean zero."""
    from ngboost import NGBRegressor
    from ngboost.distns.normal import NormalFixedMean

    x, r = columns(fit)
    unit = np.sqrt(np.mean(r**2))
    model = NGBRegressor(
        Dist=NormalFixedMean, verbose=False, random_state=seed, minibatch_frac=min(1.0, 10_000 / len(r))
    )
    model.fit(x, r / unit)
    return lambda rows: normal(torch.from_numpy(unit * model.pred_dist(columns(rows)[0]).params["scale"]), rows)


def catboost(fit: Outputs, seed: int) -> Law:
    """CatBoost of the variance of a normal distribution with mean zero: the deviance of r² (Tweedie's, near gamma)."""
    from catboost import CatBoostRegressor

    x, r = columns(fit)
    unit = np.mean(r**2)
    loss = "Tweedie:variance_power=1.99"
    model = CatBoostRegressor(
        loss_function=loss, random_seed=seed, verbose=False, allow_writing_files=False, thread_count=1
    )
    model.fit(x, r**2 / unit + 1e-6)
    predict = lambda rows: unit * model.predict(columns(rows)[0], prediction_type="Exponent")  # noqa: E731
    return lambda rows: normal(torch.from_numpy(predict(rows)).sqrt(), rows)


METHODS = {
    "fmgp": fmgp,
    "constant noise": constant_noise,
    "recipe": recipe,
    "conformal quantiles": conformal_quantiles,
    "ngboost": ngboost,
    "catboost": catboost,
}
NEEDS = {"ngboost": "ngboost", "catboost": "catboost"}


def installed(method: str) -> bool:
    try:
        importlib.import_module(NEEDS.get(method, "sklearn"))
    except ImportError:
        return False
    return True


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    seeds = 1 if args.quick or name in FORECASTS else args.seeds
    rows: dict[str, list[dict[str, Tensor]]] = {method: [] for method in METHODS}
    seconds: dict[str, float] = {}
    for seed in range(seeds):
        fit, test = rows_of(name, args, seed)
        for method, function in METHODS.items():
            if installed(method):
                start = time.process_time()
                predict = function(fit, seed)
                seconds[method] = seconds.get(method, 0.0) + (time.process_time() - start) / seeds
                rows[method].append(predict(test))
    entry: dict[str, Any] = {"fit_rows": len(fit), "test_rows": len(test), "networks": seeds, "methods": {}}
    ours = averaged(rows["fmgp"])
    for method, found in rows.items():
        if not found:
            entry["methods"][method] = "not installed"
            continue
        scores = averaged(found)
        result: dict[str, Any] = {"fit_cpu_seconds": seconds[method]}
        for metric in METRICS:
            if metric in scores:
                gain = scores[metric] - ours[metric]
                error = float(gain.std() / math.sqrt(len(gain)))
                mean, own = float(scores[metric].mean()), float(ours[metric].mean())
                within = own <= mean + max(0.01 * abs(mean), 2.0 * error)
                result[metric] = {"mean": mean, "fmgp_better_by": mean - own, "paired_se": error, "held": within}
        result["coverage"] = {}
        for level in LEVELS:
            band = 2.0 * math.sqrt(level * (1.0 - level) * (1.0 / len(fit) + 1.0 / len(test)))
            shares = [float(each[f"inside_{level}"].mean()) for each in found]
            inside = all(abs(share - level) <= band for share in shares)
            result["coverage"][str(level)] = {"share": sum(shares) / len(shares), "band": band, "inside": inside}
        entry["methods"][method] = result
    return entry


def averaged(found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The scores of each row, averaged over networks."""
    return {key: torch.stack([each[key] for each in found]).mean(0) for key in found[0]}


def table_of(name: str, entry: dict[str, Any]) -> Table:
    title = (
        f"{name}: fitted on {entry['fit_rows']:,} rows, scored on {entry['test_rows']:,}, {entry['networks']} networks"
    )
    table = Table(
        title=title, title_justify="left", caption="! FMGP is worse by more than 1 % and 2 SE; * outside 2 SE"
    )
    for column in ("method", "CRPS", "90 % interval score", "NLL", *(f"{level:.0%}" for level in LEVELS), "fit, CPU s"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method, result in entry["methods"].items():
        if isinstance(result, str):
            table.add_row(method, result)
            continue
        cells = [
            f"{result[metric]['mean']:.4f}{' ' if result[metric]['held'] else '!'}" if metric in result else "–"
            for metric in METRICS
        ]
        cover = [f"{each['share']:.3f}{' ' if each['inside'] else '*'}" for each in result["coverage"].values()]
        table.add_row(method, *cells, *cover, f"{result['fit_cpu_seconds']:.1f}")
    return table


def overall(data: dict[str, Any]) -> dict[str, Any]:
    """For each peer the geometric mean over sets of FMGP's CRPS and interval score in units of the peer's, and the mean
    difference of the NLL."""
    found: dict[str, Any] = {}
    for method in METHODS:
        pairs = [
            (e["methods"]["fmgp"], e["methods"][method])
            for e in data.values()
            if e["methods"][method] != "not installed"
        ]
        if method == "fmgp" or not pairs:
            continue
        found[method] = {
            metric: math.exp(
                sum(math.log(own[metric]["mean"] / peer[metric]["mean"]) for own, peer in pairs) / len(pairs)
            )
            for metric in ("crps", "interval_score")
        }
        if all("nll" in peer for _, peer in pairs):
            found[method]["nll"] = sum(own["nll"]["mean"] - peer["nll"]["mean"] for own, peer in pairs) / len(pairs)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__)
    with_data(parser)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=(*TRAINED, *FORECASTS), default=(*TRAINED, *FORECASTS))
    parser.add_argument("--networks", type=Path, help="a folder to keep trained networks in")
    args = parser.parse_args(arguments)
    if args.device != "cpu":
        parser.error("this benchmark runs on the CPU")
    result: dict[str, Any] = {"drifting": list(DRIFTING), "data": {}}
    wide = console()
    for name in args.only:
        result["data"][name] = run(name, args)
        wide.print(table_of(name, result["data"][name]))
    result["fmgp_over_peer"] = overall(result["data"])
    wide.print(result["fmgp_over_peer"])
    finish("regression_scale", args, result)


if __name__ == "__main__":
    main()
