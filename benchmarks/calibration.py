"""FMGP with default options beside other calibrators, on files of the outputs of real classifiers.

    POSTHOC_DATA=... python -m benchmarks.calibration [--seeds 3] [--orders 3] [--only cifar10 ...] [--methods fmgp ...]
        [--jobs 16] [--resume] [--cache FOLDER] [--few-rows] [--device cuda] [--out results.json]

NLL, calibration error, accuracy, share of classes moved, time, and where there are data from elsewhere the AUC by
predictive entropy. FMGP is fitted with several seeds on several orders of the rows and its figures are means; the other
methods are fitted once. Each row is written as soon as it is complete; `--resume` leaves out the rows that are in the
file. With `--few-rows`, fits are on random subsets of the rows. Targets are in `benchmarks/calibration_targets.py`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import traceback
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from benchmarks.calibration_rows import CASES, METHODS, OURS, Job, Place, Result, work
from benchmarks.calibration_targets import few_checks, row_checks
from benchmarks.harness import console, finish, options, with_data, yes
from posthoc.evaluate.scores import METRICS, bootstrap_error

FIGURES = ("nll", "ece", "accuracy", "classes_moved", "ood_auc", "fit_seconds")
FEW = (
    "cifar10_resnet20",
    "cifar10_resnet56",
    "banking77_minilm",
    "cifar100_wrn164",
    "llm_emotion/mistral7b",
    "cifar10_zoo/vgg11_bn",
    "llm_cosmosqa/qwen72b",
)
FEW_METHODS = ("bare", "temperature", "structured-matrix", *OURS)
SIZES, SUBSETS = (20, 50, 100, 200, 500), 20
Outcome = Result | list[float] | str
"""Of a job; text if it failed."""


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    with_data(parser)
    parser.add_argument("--seeds", type=int, default=3, help="of FMGP")
    parser.add_argument("--orders", type=int, default=3, help="orders of the rows, the first that of the file")
    parser.add_argument("--only", nargs="*", default=[""], metavar="ROW", help="rows whose names begin so")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS, metavar="METHOD")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--cache", type=Path, help="a folder that keeps what other methods than FMGP predict")
    parser.add_argument("--resume", action="store_true", help="leave out the rows that are in the file")
    parser.add_argument("--few-rows", action="store_true", help="fit on random subsets of the rows")
    args = parser.parse_args(argv)
    if args.quick:
        args.seeds, args.orders = 1, 1
    name = "calibration_few_rows" if args.few_rows else "calibration"
    out = args.out or Path(__file__).parent / "results" / f"{name}-{torch.device(args.device).type}.json"
    runs = json.loads(out.read_text())["runs"] if args.resume and out.exists() else {}
    rows = [row for row in CASES if row.startswith(tuple(args.only)) and row not in runs]
    settings = {each: getattr(args, each) for each in ("seeds", "orders", "jobs")}
    screen = console()
    for row, outcomes in outcomes_of(rows, args):
        runs[row] = (few_summary if args.few_rows else summary)(row, outcomes)
        screen.print((few_table if args.few_rows else table_of)(row, runs[row]))
        finish(name, args, {**settings, "runs": {row: runs[row] for row in CASES if row in runs}})
    table = table_of_checks(runs)
    screen.print(table)
    met = sum(each["met"] for found in runs.values() for checks in found["checks"].values() for each in checks.values())
    screen.print(f"{met} of {table.row_count} checks met")


def outcomes_of(rows: list[str], args: Namespace) -> Iterator[tuple[str, dict[Job, Outcome]]]:
    """The outcomes of each row's jobs, as soon as all of them are known."""
    pending = {row: (few_jobs if args.few_rows else jobs)(row, args) for row in rows}
    pending = {row: each for row, each in pending.items() if each}
    found: dict[str, dict[Job, Outcome]] = {row: {} for row in pending}
    place = Place(args.data_dir, args.cache, args.device, {"steps": 10} if args.quick else {})
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes to come
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        started = {pool.submit(attempt, job, place): job for each in pending.values() for job in each}
        for future in as_completed(started):
            job = started[future]
            found[job.row][job] = future.result()
            if len(found[job.row]) == len(pending[job.row]):
                yield job.row, {each: found[job.row][each] for each in pending[job.row]}


def jobs(row: str, args: Namespace) -> list[Job]:
    """FMGP for every seed and order, the other methods once."""
    once = [Job(row, name) for name in args.methods if name not in OURS]
    several = [(seed, order) for seed in range(args.seeds) for order in range(args.orders)]
    return [Job(row, name, *each) for name in args.methods if name in OURS for each in several] + once


def few_jobs(row: str, args: Namespace) -> list[Job]:
    names = [name for name in FEW_METHODS if name in args.methods]
    sizes, subsets = (SIZES[:1], 2) if args.quick else (SIZES, SUBSETS)
    return [Job(row, name, size=size, subsets=subsets) for size in sizes for name in names] if row in FEW else []


def attempt(job: Job, place: Place) -> Outcome:
    try:
        return work(job, place)
    except Exception:
        return traceback.format_exc()


def summary(row: str, outcomes: dict[Job, Outcome]) -> dict[str, Any]:
    """The figures of each method, their errors and differences, and what was reached."""
    runs: dict[str, dict[Job, Result]] = {}
    methods: dict[str, dict[str, Any]] = {}
    for job, outcome in outcomes.items():
        if isinstance(outcome, Result):
            runs.setdefault(job.method, {})[job] = outcome
        else:
            methods[job.method] = {"error": str(outcome)}
    for name, results in runs.items():
        methods.setdefault(name, {}).update(figures_of(results))
    loss = {name: np.mean([r.columns["loss"] for r in results.values()], 0) for name, results in runs.items()}
    pairs = {ours: {other: paired(loss[ours], loss[other]) for other in loss if other != ours} for ours in loss}
    found = {"methods": methods, "pairs": {name: pairs[name] for name in pairs if name in OURS}}
    return {**found, "checks": row_checks(row, found)}


def figures_of(results: dict[Job, Result]) -> dict[str, Any]:
    """Means over the runs, standard errors, the spread over the orders, and the figures of each run."""
    every = [result.figures for result in results.values()]
    first = next(iter(results.values())).columns
    columns = [torch.as_tensor(first[name]) for name in ("confidence", "hit")]
    by_seed: dict[int, list[float]] = {}
    for job, result in results.items():
        by_seed.setdefault(job.seed, []).append(result.figures["nll"])
    spreads = [max(nlls) - min(nlls) for nlls in by_seed.values()]
    return {
        **{name: float(np.mean([figures[name] for figures in every])) for name in every[0]},
        "nll_error": float(first["loss"].std() / len(first["loss"]) ** 0.5),
        "ece_error": bootstrap_error(METRICS["ece"], columns, torch.Generator().manual_seed(0)),
        **({"nll_spread": max(spreads)} if any(job.order for job in results) else {}),
        **({"runs": every} if len(every) > 1 else {}),
    }


def paired(ours: np.ndarray, other: np.ndarray) -> list[float]:
    """The mean difference of the losses of the same test rows, and its standard error."""
    difference = ours - other
    return [float(difference.mean()), float(difference.std() / len(difference) ** 0.5)]


def few_summary(row: str, outcomes: dict[Job, Outcome]) -> dict[str, Any]:
    """The NLL of every subset by size and method, and what was reached."""
    found: dict[str, Any] = {}
    for job, outcome in outcomes.items():
        found.setdefault(str(job.size), {})[job.method] = outcome
    known = {size: {name: each for name, each in by.items() if isinstance(each, list)} for size, by in found.items()}
    return {"nll": found, "checks": {size: few_checks(row, int(size), by) for size, by in known.items()}}


def table_of(row: str, found: dict[str, Any]) -> Table:
    table = Table(row, *FIGURES, "error")
    for name, figures in found["methods"].items():
        numbers = (f"{figures[each]:.4f}" if each in figures else "" for each in FIGURES)
        table.add_row(name, *numbers, figures.get("error", "").strip().rpartition("\n")[2])
    return table


def few_table(row: str, found: dict[str, Any]) -> Table:
    table = Table(row, "rows", "mean NLL", "worst NLL")
    for size, by in found["nll"].items():
        for name, nlls in by.items():
            figures = [nlls[-200:], ""] if isinstance(nlls, str) else [f"{f(nlls):.4f}" for f in (np.mean, max)]
            table.add_row(name, size, *figures)
    return table


def table_of_checks(runs: dict[str, Any]) -> Table:
    table = Table("row", "", "check", "value", "limit", "met")
    for row, found in runs.items():
        for kind, checks in found["checks"].items():
            for name, each in checks.items():
                table.add_row(row, kind, name, f"{each['value']:.4f}", f"{each['limit']:.4f}", yes(each["met"]))
    return table


if __name__ == "__main__":
    main()
