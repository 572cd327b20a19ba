"""FMGP with default options beside temperature scaling: six real classifiers, as files of outputs.

    POSTHOC_DATA=... python -m benchmarks.calibration [--seeds 3] [--only cifar10] [--device cuda] [--out results.json]

NLL, calibration error, accuracy and, where there are data from elsewhere, the AUC by predictive entropy; means over
seeds.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from benchmarks.harness import console, finish, options, synchronise, with_data, yes
from posthoc import FMGP, Outputs, Temperature
from posthoc.base import Method
from posthoc.evaluate.evaluate import score

FIGURES = ("nll", "ece", "accuracy", "ood_auc")
HALF = 5000
"""CIFAR-10's test images are fitted on up to here and scored from here on."""


@dataclass(frozen=True)
class Case:
    """What to fit on, what to score on, data from elsewhere, and what must be reached."""

    fit: str
    test: str
    ood: str | None = None
    nll: float | None = None
    auc: float | None = None
    slack: float = 0.005  # of the calibration error, above temperature scaling's


CASES = {
    "cifar10_resnet20": Case(f"test[:{HALF}]", f"test[{HALF}:]", "svhn", nll=0.219, auc=0.93, slack=0.003),
    "cifar10_resnet56": Case(f"test[:{HALF}]", f"test[{HALF}:]", "svhn", nll=0.182, auc=0.95, slack=0.003),
    "banking77_minilm": Case("fit", "test", nll=1.42),
    "cifar100_wrn164": Case("fit", "test", nll=0.90),
    "imagenet_resnet50": Case("sample", "nips2017"),
    "imagenet_resnet50, the other way": Case("nips2017", "sample"),
}


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    with_data(parser)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose names begin so")
    args = parser.parse_args(argv)
    seeds, steps = (1, {"steps": 10}) if args.quick else (args.seeds, {})
    runs = {
        name: run(case, args.data_dir / name.partition(",")[0], seeds, torch.device(args.device), steps)
        for name, case in CASES.items()
        if name.startswith(args.only)
    }
    show(runs)
    finish("calibration", args, {"seeds": seeds, "runs": runs})


def run(case: Case, folder: Path, seeds: int, device: torch.device, steps: dict[str, int]) -> dict[str, Any]:
    fit, test = (read(folder, part, device) for part in (case.fit, case.test))
    ood = read(folder, case.ood, device) if case.ood else None
    bare = test.outputs.log_softmax(-1)
    assert test.targets is not None
    found: dict[str, Any] = {"network": {"nll": -float(bare.gather(-1, test.targets[:, None]).mean())}}
    found["temperature"] = figures(Temperature(None, "classification"), fit, test, ood)
    each = []
    for seed in range(seeds):
        each.append(figures(FMGP(None, "classification", seed=seed, **steps), fit, test, ood))
        print(folder.name, case.fit, seed, {key: round(value, 4) for key, value in each[-1].items()}, flush=True)
    found["fmgp"] = {name: statistics.mean(row[name] for row in each) for name in each[0]}
    found["fmgp by seed"] = each
    return {**found, "met": met(case, found["fmgp"], found["temperature"])}


def figures(method: Method, fit: Outputs, test: Outputs, ood: Outputs | None) -> dict[str, float]:
    device = fit.outputs.device
    synchronise(device)
    begin = time.perf_counter()
    method.fit(fit)
    synchronise(device)
    seconds = time.perf_counter() - begin
    found = score(method, test, ood).figures
    return {name: found[name] for name in FIGURES if name in found} | {"fit_seconds": seconds}


def met(case: Case, ours: dict[str, float], scaled: dict[str, float]) -> dict[str, bool]:
    """What was reached, to the digits that targets have."""
    reached = {
        "nll": round(ours["nll"], 4) <= (case.nll or round(scaled["nll"], 4) + 0.0005),
        "ece": ours["ece"] <= scaled["ece"] + case.slack,
        "accuracy": ours["accuracy"] >= scaled["accuracy"] - 0.001,
    }
    return reached | ({"ood_auc": ours["ood_auc"] >= case.auc} if case.auc else {})


def read(folder: Path, part: str, device: torch.device) -> Outputs:
    name, _, rows = part.rstrip("]").partition("[")
    first, _, last = rows.partition(":")
    chosen = slice(int(first) if first else None, int(last) if last else None)
    with np.load(folder / f"{name}.npz") as file:
        features = file["features"][chosen].astype(np.float32) if "features" in file else None
        found = Outputs(file["outputs"][chosen].astype(np.float32), file["targets"][chosen].astype(np.int64), features)
    return found.to(device)


def show(runs: dict[str, Any]) -> None:
    table = Table("", "", *FIGURES, "fit (s)", "reached")
    for name, found in runs.items():
        for method in ("temperature", "fmgp"):
            row = found[method]
            numbers = (f"{row[figure]:.4f}" if figure in row else "" for figure in FIGURES)
            reached = ", ".join(f"{k} {yes(v)}" for k, v in found["met"].items()) if method == "fmgp" else ""
            table.add_row(
                name if method == "temperature" else "", method, *numbers, f"{row['fit_seconds']:.1f}", reached
            )
        table.add_section()
    console().print(table)


if __name__ == "__main__":
    main()
