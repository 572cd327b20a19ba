"""The paper's Figure 1: six methods on one-dimensional data with gaps and with input-dependent noise.

The paper names the methods but not their options. The options below were chosen on these data, with the figure in view.
The figure therefore illustrates the methods and does not compare their quality.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from posthoc import GP, HMC, MFVI, LaplaceTorch
from posthoc.cli.demo_data import heteroscedastic, train_network
from posthoc.errors import FileError
from posthoc.evaluate.evaluate import score
from posthoc.fmgp import FMGP
from reproduction.experiments.experiment import Experiment, Request
from reproduction.experiments.variants import QUICK, FitData, Variant, quality_of
from reproduction.figures import band_figure, group_by

__all__ = ["VARIANTS", "Synthetic"]

POINTS, TEST_POINTS = 400, 2000
FOLDER, FILE = "synthetic", "synthetic_data.npy"
"""The paper's own points, in the data."""
SPAN = (-8.5, 8.5, 500)
"""First place, last place and number of places of the curves."""
STEPS, QUICK_STEPS = 1500, 20
"""Training steps of the network."""

VARIANTS = {
    # Over all weights: the variance of the last layer alone hardly grows in the gaps.
    "lla": Variant("LLA", LaplaceTorch, {"curvature": "full"}),
    "fmgp": Variant(
        "FMGP",
        FMGP,
        {"kernel": {"type": "rbf", "on": "inputs"}, "num_inducing": 20, "steps": 2000, "batch_size": 100},
        QUICK,
    ),
    # At precisions of 1 to 100 the KL of 2,700 weights outweighs 400 points, and the learned noise grows instead.
    "mfvi": Variant("MFVI", MFVI, {"prior_precision": 1000.0, "steps": 1500}, QUICK),
    "gp-zero": Variant("GP, zero mean", GP, {"mean": "zero"}, {"steps": 3}),
    "gp": Variant("GP, the network's mean", GP, {"mean": "network"}, {"steps": 3}),
    # The width of the prior is our choice. The chains are short: the document holds their R-hat.
    "hmc": Variant(
        "HMC",
        HMC,
        {"prior_precision": 1 / 0.3**2, "samples": 200, "warmup": 200, "chains": 2, "max_tree_depth": 8},
        {"samples": 4, "warmup": 2, "max_tree_depth": 2},
    ),
}
"""The six panels, in the paper's order."""


class Data(NamedTuple):
    """Points for fitting and for scoring, with their sources; the same points where there are no others."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    train_source: str
    test_source: str


class Synthetic(Experiment):
    """Six methods on points of one variable."""

    name = "synthetic"
    title = "One-dimensional data with gaps, and noise that changes along the way"
    task = "regression"
    methods = VARIANTS

    def configuration(self, case: str, method: str, request: Request) -> dict[str, Any]:
        network = f"2 x 50 tanh units, {STEPS} steps"
        return {**VARIANTS[method].describe(request.quick), "network": network, "span": SPAN}

    def prepare(self, case: str, seed: int, request: Request) -> tuple[Data, nn.Module]:
        data = load_points(request.data_dir, seed)
        return data, train_network(*data.train, seed, steps=QUICK_STEPS if request.quick else STEPS)

    def run(
        self, prepared: tuple[Data, nn.Module], case: str, method: str, seed: int, request: Request
    ) -> Mapping[str, Any]:
        data, network = prepared
        fitted = VARIANTS[method].build(network, self.task, seed=seed, device="cpu", quick=request.quick)
        seconds = FitData(data.train).fit(fitted)
        scored = score(fitted, data.test)
        x = torch.linspace(*SPAN)[:, None]
        pred = fitted.predict(x)
        columns = {"x": x, "mean": pred.mean, "low": pred.mean - 2.0 * pred.std, "high": pred.mean + 2.0 * pred.std}
        band = {name: values.squeeze(-1).tolist() for name, values in columns.items()}
        points = torch.cat(data.train, 1)
        digest = hashlib.sha256(points.numpy().tobytes()).hexdigest()[:16]
        document = quality_of(fitted, scored)
        return {
            **document,
            "times": {"fit_seconds": seconds, "predict_seconds": scored.seconds},
            "curves": {**document["curves"], "band": {**band, "points": points.tolist()}},
            "diagnostics": getattr(fitted, "diagnostics", {}),
            "data": {"fit": data.train_source, "test": data.test_source, "sha256": digest},
        }

    def draw(self, documents: list[dict[str, Any]], folder: Path) -> list[Path]:
        figures = (band_figure(folder / f"figure1-{seed}", runs) for seed, runs in group_by(documents, "seed").items())
        return [path for paths in figures for path in paths]


def load_points(data_dir: str | os.PathLike[str] | None, seed: int) -> Data:
    """The paper's points from the data, or points generated with this seed.

    Raises:
        FileError: `data_dir` is given and does not hold the points, or the file holds something else.
    """
    named = data_dir or os.environ.get("POSTHOC_DATA")
    path = Path(named, FOLDER, FILE) if named else None
    if path is not None and path.is_file():
        points = read_points(path)
        return Data(points, points, "the paper's points", "the points of the fit")
    if data_dir is not None:
        raise FileError(f"Expected the paper's points at {path}, found no file: leave --data-dir out to generate some.")
    generator = torch.Generator().manual_seed(seed)
    train, test = (heteroscedastic(n, generator) for n in (POINTS, TEST_POINTS))
    return Data(train, test, "generated in the manner of the paper's", f"{TEST_POINTS:,} more of them")


def read_points(path: Path) -> tuple[Tensor, Tensor]:
    """The columns x and y of a NumPy file, each (N, 1) in float32."""
    try:
        rows = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise FileError(f"Expected a NumPy file of points (x, y), found something else in {path} ({error}).") from error
    if rows.ndim != 2 or rows.shape[1] != 2 or rows.dtype.kind != "f":
        raise FileError(f"Expected real points (x, y), shape (N, 2), found {rows.dtype} of {rows.shape} in {path}.")
    x, y = torch.from_numpy(np.ascontiguousarray(rows.T)).float()
    return x[:, None], y[:, None]
