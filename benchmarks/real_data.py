"""FMGP with default options on real data, against what people use without it: a constant noise, a temperature, nothing.

POSTHOC_DATA=... python -m benchmarks.real_data [--seeds 3] [--quick] [--out results.json]
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness import finish, options, with_data
from posthoc import FMGP, Outputs, Predictive
from posthoc.evaluate.metrics import cqm, crps, nll
from posthoc.predictive.base import LatentGaussian
from posthoc.predictive.regression import RegressionPredictive

Split = tuple[Tensor, Tensor]


def uci_splits(folder: Path, name: str) -> tuple[Split, Split, Split]:
    """The first 80 %, the next 10 % and the last 10 %, standardized by the first."""
    with np.load(folder / "uci" / f"{name}.npz") as file:
        x, y = torch.from_numpy(file["inputs"]), torch.from_numpy(file["targets"])[:, None]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order].float(), y[order].float()
    first, second = int(0.8 * len(x)), int(0.9 * len(x))
    x = (x - x[:first].mean(0)) / x[:first].std(0).clamp_min(1e-9)
    y = (y - y[:first].mean()) / y[:first].std()
    parts = (slice(0, first), slice(first, second), slice(second, None))
    train, calibration, test = ((x[part], y[part]) for part in parts)
    return train, calibration, test


def train_mlp(x: Tensor, y: Tensor, seed: int, epochs: int = 40) -> nn.Module:
    """The paper's 3 x 200 tanh network."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        widths = [x.shape[1], 200, 200, 200]
        hidden = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
        model = nn.Sequential(*hidden, nn.Linear(200, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    steps = epochs * -(-len(x) // 256)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(256):
            optimizer.zero_grad()
            (model(x[rows]) - y[rows]).square().mean().backward()
            optimizer.step()
            schedule.step()
    return model


def regression_scores(pred: Predictive, y: Tensor) -> dict[str, float]:
    return {"nll": float(nll(pred, y)), "crps": float(crps(pred, y)), "cqm": float(cqm(pred, y))}


def uci(folder: Path, name: str, seed: int, **options: Any) -> dict[str, Any]:
    """A network trained on 80 %, error bars fitted on the next 10 % and scored on the last 10 %."""
    train, calibration, test = uci_splits(folder, name)
    model = train_mlp(*train, seed)
    with torch.no_grad():
        residual, mean = calibration[1] - model(calibration[0]), model(test[0])
    noise = residual.square().mean().expand_as(mean)
    constant = RegressionPredictive(LatentGaussian(mean, torch.zeros_like(mean)), noise)
    start = time.perf_counter()
    bayes = FMGP(model, "regression", seed=seed, **options).fit(calibration)
    seconds = time.perf_counter() - start
    return {
        "fmgp": {**regression_scores(bayes.predict(test[0]), test[1]), "fit_seconds": seconds},
        "constant noise": regression_scores(constant, test[1]),
        "rmse": float((mean - test[1]).square().mean().sqrt()),
    }


def read_outputs(path: Path, rows: slice = slice(None)) -> Outputs:
    with np.load(path) as file:
        features = file["features"][rows].astype(np.float32) if "features" in file else None
        return Outputs(file["outputs"][rows].astype(np.float32), file["targets"][rows].astype(np.int64), features)


def temperature_nll(fit: Outputs, test: Outputs) -> tuple[float, float]:
    """Temperature scaling by a line search: its NLL on test and the temperature."""
    grid = torch.linspace(0.3, 4.0, 1851)
    losses = [float(nn.functional.cross_entropy(fit.outputs / t, known(fit.targets))) for t in grid]
    best = float(grid[int(np.argmin(losses))])
    return float(nn.functional.cross_entropy(test.outputs / best, known(test.targets))), best


def classification(fit: Outputs, test: Outputs, seed: int, **options: Any) -> dict[str, Any]:
    start = time.perf_counter()
    bayes = FMGP(None, "classification", seed=seed, **options).fit(fit)
    seconds = time.perf_counter() - start
    pred = bayes.predict(test)
    scaled, temperature = temperature_nll(fit, test)
    return {
        "fmgp": {
            "nll": float(nll(pred, test.targets)),
            "classes_changed": int((pred.probs.argmax(-1) != test.outputs.argmax(-1)).sum()),
            "fit_seconds": seconds,
        },
        "temperature scaling": {"nll": scaled, "temperature": temperature},
        "network": {"nll": float(nn.functional.cross_entropy(test.outputs, known(test.targets)))},
    }


def known(targets: Tensor | None) -> Tensor:
    assert targets is not None
    return targets


def cifar10(folder: Path) -> tuple[Outputs, Outputs]:
    """A ResNet20 on the test images: the first 5,000 to fit on, the others to score."""
    path = folder / "cifar10_resnet20" / "test.npz"
    return read_outputs(path, slice(0, 5000)), read_outputs(path, slice(5000, None))


def imagenet(folder: Path) -> tuple[Outputs, Outputs]:
    """A ResNet-50: one image a class to fit on, 1,000 unseen images to score."""
    return read_outputs(folder / "imagenet_resnet50/sample.npz"), read_outputs(
        folder / "imagenet_resnet50/nips2017.npz"
    )


def cases(folder: Path, more: dict[str, Any]) -> dict[str, Callable[[int], dict[str, Any]]]:
    """What is run for each seed; `more` are options of FMGP."""
    shared = {**more, "variance": "shared"}
    return {
        "uci/protein": lambda seed: uci(folder, "protein", seed, **more),
        "uci/elevators": lambda seed: uci(folder, "elevators", seed, **more),
        "cifar10_resnet20": lambda seed: classification(*cifar10(folder), seed, **more),
        "cifar10_resnet20, shared variance": lambda seed: classification(*cifar10(folder), seed, **shared),
        "imagenet_resnet50": lambda seed: classification(*imagenet(folder), seed, **more),
    }


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    with_data(parser)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args(argv)
    if args.device != "cpu":
        parser.error("this benchmark runs on the CPU")
    runs: dict[str, Any] = {}
    for name, run in cases(args.data_dir, {"steps": 10} if args.quick else {}).items():
        runs[name] = [run(seed) for seed in range(1 if args.quick else args.seeds)]
        for row in runs[name]:
            print(name, json.dumps(row), flush=True)
    finish("real_data", args, {"runs": runs})


if __name__ == "__main__":
    main()
