"""The paper's Figure 1: six methods on one-dimensional data with gaps, and with noise that changes along the way.

The paper names the methods and not their options. Those below were chosen on these very data, with the figure in sight:
it illustrates what the methods do and is no comparison of how good they are.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from posthoc.cli.demo_data import heteroscedastic, train_network
from posthoc.errors import FileError
from posthoc.evaluate.evaluate import score
from posthoc.evaluate.report.figures import require_matplotlib
from posthoc.fmgp import FMGP
from posthoc.methods import GP, HMC, MFVI, LaplaceTorch
from reproduction.drawing import by
from reproduction.experiments.experiment import Experiment, Request
from reproduction.experiments.variants import Given, Variant
from reproduction.panels import Panel, panel_figure

__all__ = ["VARIANTS", "Synthetic"]

POINTS, TEST_POINTS = 400, 2000
FILE = Path("synthetic", "synthetic_data.npy")
"""The paper's own points, in a folder of data."""
SPAN = (-8.5, 8.5, 500)
"""Where the curves are drawn: from, to, and at how many places."""
STEPS, QUICK_STEPS = 1500, 20
"""Steps of training of the network."""
FEW = {"steps": 3, "batch_size": 20}


VARIANTS = {
    # Over all weights: that of the last layer alone hardly widens in the gaps.
    "lla": Variant("LLA", LaplaceTorch, {"subset": "all", "hessian": "full"}),
    "fmgp": Variant(
        "FMGP",
        FMGP,
        {"kernel": {"type": "rbf", "on": "inputs"}, "num_inducing": 20, "steps": 2000, "batch_size": 100},
        FEW,
    ),
    # At precisions of 1 to 100 the KL of 2,700 weights outweighs 400 points, and the noise grows to make up for it.
    "mfvi": Variant("MFVI", MFVI, {"prior_precision": 1000.0, "steps": 1500}, FEW),
    "gp-zero": Variant("GP, zero mean", GP, {"mean": "zero"}, {"steps": 3}),
    "gp": Variant("GP, the network's mean", GP, {"mean": "network"}, {"steps": 3}),
    # The width of the prior is a choice of ours. These chains are short: see their R-hat in the result.
    "hmc": Variant(
        "HMC",
        HMC,
        {"prior_std": 0.3, "samples": 200, "warmup": 200, "chains": 2, "max_tree_depth": 8},
        {"samples": 4, "warmup": 2, "max_tree_depth": 2},
    ),
}
"""The six panels, in the paper's order."""


class Data(NamedTuple):
    """The points to fit on, and those to be judged by: others of their kind where there are any, else the same."""

    source: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    judged_by: str


class Synthetic(Experiment):
    """Six methods on points of one variable."""

    name = "synthetic"
    title = "One-dimensional data with gaps, and noise that changes along the way"
    task = "regression"
    methods = VARIANTS

    def configuration(self, case: str, method: str, request: Request) -> dict[str, Any]:
        return {
            **VARIANTS[method].describe(request.quick),
            "network": f"2 x 50 tanh units, {STEPS} steps",
            "span": SPAN,
        }

    def prepare(self, case: str, seed: int, request: Request) -> tuple[Data, nn.Module]:
        require_matplotlib()
        data = load_points(request.data_dir, seed)
        return data, train_network(*data.train, seed, steps=QUICK_STEPS if request.quick else STEPS)

    def work(
        self, prepared: tuple[Data, nn.Module], case: str, method: str, seed: int, request: Request
    ) -> Mapping[str, Any]:
        data, network = prepared
        fit = VARIANTS[method].build(network, self.task, seed=seed, device="cpu", quick=request.quick)
        seconds = Given(data.train).fit(fit)
        found = score(fit, data.test)
        x = torch.linspace(*SPAN)[:, None]
        pred = fit.predict(x)
        low, high = pred.mean - 2.0 * pred.std, pred.mean + 2.0 * pred.std
        band = {
            name: values.squeeze(-1).tolist()
            for name, values in {"x": x, "mean": pred.mean, "low": low, "high": high}.items()
        }
        return {
            "metrics": found.figures,
            "times": {"fit_seconds": seconds, "predict_seconds": found.seconds},
            "curves": {**found.curves(), "band": {**band, "points": torch.cat(data.train, 1).tolist()}},
            "diagnostics": getattr(fit, "diagnostics", {}),
            "data": {"fit": data.source, "test": data.judged_by, "sha256": digest(data.train)},
        }

    def draw(self, documents: list[dict[str, Any]], folder: Path) -> list[Path]:
        return [path for seed, runs in by(documents, "seed").items() for path in figure1(folder, seed, runs)]


def figure1(folder: Path, seed: int, runs: Sequence[Mapping[str, Any]]) -> list[Path]:
    """The figure of one seed."""
    bands = [(run["title"], run["curves"]["band"]) for run in runs]
    paths = [folder / f"figure1-{seed}.{kind}" for kind in ("png", "pdf")]
    points = torch.tensor(bands[0][1]["points"])
    panels = [Panel(title, band["x"], band["mean"], band["low"], band["high"]) for title, band in bands]
    panel_figure(paths, panels, (points[:, :1], points[:, 1:]))
    return paths


def load_points(data_dir: str | os.PathLike[str] | None, seed: int) -> Data:
    """The paper's points from a folder (the one given, or POSTHOC_DATA's), or generated ones with this seed."""
    folder = data_dir if data_dir is not None else os.environ.get("POSTHOC_DATA")
    path = Path(folder) / FILE if folder else None
    if path is not None and path.is_file():
        points = read_points(path)
        return Data("the paper's points", points, points, "the points of the fit")
    if data_dir is not None:
        raise FileError(f"Expected the paper's points at {path}, found no file: leave --data-dir out to generate some.")
    generator = torch.Generator().manual_seed(seed)
    train, test = (heteroscedastic(n, generator) for n in (POINTS, TEST_POINTS))
    return Data("generated in the manner of the paper's", train, test, f"{TEST_POINTS:,} more of them")


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


def digest(points: tuple[Tensor, Tensor]) -> str:
    return hashlib.sha256(torch.cat(points, 1).numpy().tobytes()).hexdigest()[:16]
