"""Error bars from the training images alone: FMGP fitted on random crops of what a ResNet20 was trained on.

    POSTHOC_DATA=... python -m benchmarks.augmented [--images 10000] [--seeds 3] [--device cuda] [--out results.json]

Scored on CIFAR-10's whole test set, beside FMGP fitted on the same images as they are, which the network has memorised,
and the network itself. Last-layer Laplace, fitted on the training set, has an NLL of 0.238.
"""

from __future__ import annotations

import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.harness import console, finish, options, with_data, yes
from posthoc import FMGP, MAP, PosthocWarning
from posthoc.evaluate.scores import Scores
from reproduction.data import cifar10
from reproduction.experiments.cifar_networks import normalize, pretrained

LAPLACE = 0.238
FIGURES = ("nll", "ece", "accuracy")


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    with_data(parser)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args(argv)
    device, folder = torch.device(args.device), args.data_dir
    model = pretrained(20, folder).to(device)
    (x, y), (x_test, y_test) = (images(folder, part) for part in ("train", "test"))
    x, y = x[: args.images], y[: args.images]
    seeds = 1 if args.quick else args.seeds

    bare = figures(MAP(model, "classification").fit((x[:100], y[:100])), x_test, y_test)
    rows: dict[str, Any] = {"the network": {**bare, "fit_seconds": 0.0}}
    for name, augment in {"training images": None, "random crops of them": "crops"}.items():
        each = [fitted(model, x, y, x_test, y_test, seed, augment) for seed in range(seeds)]
        rows[name] = {key: statistics.mean(row[key] for row in each) for key in each[0]}
    met = rows["random crops of them"]["nll"] < LAPLACE
    table = Table("FMGP fitted on", *FIGURES, "fit (s)", title=f"{len(x):,} images; below {LAPLACE}: {yes(met)}")
    for name, row in rows.items():
        table.add_row(name, *(f"{row[key]:.4f}" for key in FIGURES), f"{row['fit_seconds']:.1f}")
    console().print(table)
    finish("augmented", args, {"images": len(x), "seeds": seeds, "rows": rows, "target": LAPLACE, "met": met})


def images(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    found = cifar10(folder, part)
    pixels = torch.as_tensor(found.inputs)
    pixels = pixels.float() / 255.0 if not pixels.is_floating_point() else pixels
    return normalize(pixels), torch.as_tensor(found.targets).long()


def fitted(model: Any, x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor, seed: int, augment: str | None) -> Any:
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PosthocWarning)  # that the network has seen these images is the point
        method = FMGP(model, "classification", seed=seed, progress=False).fit((x, y), augment=augment)
    return {**figures(method, x_test, y_test), "fit_seconds": time.perf_counter() - begin}


def figures(method: Any, x: Tensor, y: Tensor) -> dict[str, float]:
    scores = Scores("classification")
    for part, target in method.stream_with_targets((x, y)):
        scores.update(part, target)
    found = scores.compute()
    return {key: found[key] for key in FIGURES}


if __name__ == "__main__":
    main()
