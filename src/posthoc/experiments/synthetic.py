"""The paper's Figure 1: six methods on one-dimensional data with gaps, and with noise that changes along the way.

The paper names the methods and not their options. Those below were chosen on these very data, with the figure in sight:
it illustrates what the methods do and is no comparison of how good they are.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from posthoc.data.synthetic import heteroscedastic
from posthoc.errors import FileError, OptionError
from posthoc.experiments.runner import Run, run_once, timed
from posthoc.fmgp import FMGP
from posthoc.kernels import kernel_from_spec
from posthoc.method import Method
from posthoc.methods import GP, HMC, MFVI, LaplaceTorch
from posthoc.metrics import Scores
from posthoc.report.figures import require_matplotlib
from posthoc.report.panels import Panel, panel_figure

__all__ = ["VARIANTS", "Variant", "reproduce", "train_network"]

POINTS, TEST_POINTS = 400, 2000
FILE = Path("synthetic", "synthetic_data.npy")
"""The paper's own points, in a folder of data."""
SPAN = (-8.5, 8.5, 500)
"""Where the curves are drawn: from, to, and at how many places."""
STEPS = 1500
"""Steps of training of the network."""


@dataclass(frozen=True)
class Variant:
    """A panel of the figure: a method and its options."""

    title: str
    kind: type[Method]
    options: dict[str, Any]  # of what JSON knows

    def build(self, model: nn.Module, seed: int) -> Method:
        options = dict(self.options)
        if "kernel" in options:
            options["kernel"] = kernel_from_spec(options["kernel"])
        return self.kind(model, "regression", **options, seed=seed)  # type: ignore[call-arg]


VARIANTS = {
    # Over all weights: that of the last layer alone hardly widens in the gaps.
    "lla": Variant("LLA", LaplaceTorch, {"subset": "all", "hessian": "full"}),
    "fmgp": Variant(
        "FMGP", FMGP, {"kernel": {"type": "rbf", "on": "inputs"}, "num_inducing": 20, "steps": 2000, "batch_size": 100}
    ),
    # At precisions of 1 to 100 the KL of 2,700 weights outweighs 400 points, and the noise grows to make up for it.
    "mfvi": Variant("MFVI", MFVI, {"prior_precision": 1000.0, "steps": 1500}),
    "gp-zero": Variant("GP, zero mean", GP, {"mean": "zero"}),
    "gp": Variant("GP, the network's mean", GP, {"mean": "network"}),
    # The width of the prior is a choice of ours. These chains are short: see their R-hat in the result.
    "hmc": Variant("HMC", HMC, {"prior_std": 0.3, "samples": 200, "warmup": 200, "chains": 2, "max_tree_depth": 8}),
}
"""The six panels, in the paper's order."""


class Data(NamedTuple):
    """The points to fit on, and where there are more of their kind, points to be judged by."""

    source: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor] | None


def reproduce(
    out: str | os.PathLike[str],
    *,
    methods: Sequence[str] | None = None,
    seeds: Iterable[int] = (0,),
    data_dir: str | os.PathLike[str] | None = None,
    force: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Trains the network, fits every method on its training data, and draws one figure a seed beside the results. The
    data are the paper's points where a folder has them, else as many of the same kind."""
    chosen = list(methods) if methods is not None else list(VARIANTS)
    if unknown := sorted(set(chosen) - VARIANTS.keys()):
        raise OptionError(f"Expected methods among {', '.join(VARIANTS)}, got {', '.join(unknown)}.")
    require_matplotlib()
    for name in chosen:  # what is not installed is found out before the work, not after it
        VARIANTS[name].build(untrained(0), 0)
    results: list[dict[str, Any]] = []
    for seed in seeds:
        data = load_points(data_dir, seed)
        network = Trained(data, seed)
        found: dict[str, dict[str, Any]] = {}
        for name in chosen:
            found[name] = one_run(name, network, out, force)
            say(f"{name}, seed {seed}: NLL {found[name]['metrics']['train']['nll']:.3f} on the points of the fit")
        folder = Path(out) / "synthetic"
        paths = [folder / f"figure1-{seed}.{kind}" for kind in ("png", "pdf")]
        panels = [Panel(VARIANTS[name].title, **result["curve"]) for name, result in found.items()]
        panel_figure(paths, panels, data.train)
        say(f"wrote {' and '.join(map(str, paths))}")
        results += found.values()
    return results


class Trained:
    """The network of one seed, trained when it is first asked for: not at all where every run is there already."""

    def __init__(self, data: Data, seed: int) -> None:
        self.data, self.seed = data, seed
        self._network: nn.Module | None = None

    @property
    def network(self) -> nn.Module:
        if self._network is None:
            self._network = train_network(*self.data.train, self.seed)
        return self._network


def one_run(name: str, trained: Trained, out: str | os.PathLike[str], force: bool) -> dict[str, Any]:
    """The result of one method: its figures, its times and its curve."""
    variant, data, seed = VARIANTS[name], trained.data, trained.seed
    configuration = {
        "method": variant.kind.name,
        "options": variant.options,
        "network": f"2 x 50 tanh units, {STEPS} steps",
        "data": {"source": data.source, "sha256": digest(data.train)},
        "span": SPAN,
    }

    def work() -> dict[str, Any]:
        method = variant.build(trained.network, seed)
        _, fit_seconds = timed(lambda: method.fit(data.train))
        x = torch.linspace(*SPAN)[:, None]
        pred, predict_seconds = timed(lambda: method.predict(x))
        sets = {"train": data.train} | ({"test": data.test} if data.test is not None else {})
        return {
            "metrics": {split: scores(method, *points) for split, points in sets.items()},
            "times": {"fit_s": fit_seconds, "predict_s": predict_seconds},
            "curve": {
                "x": x.squeeze(-1).tolist(),
                "mean": pred.mean.squeeze(-1).tolist(),
                "std": pred.std.squeeze(-1).tolist(),
            },
            "diagnostics": getattr(method, "diagnostics", {}),
        }

    return run_once(Run("synthetic", name, seed, configuration), out, work, force=force)


def scores(method: Method, x: Tensor, y: Tensor) -> dict[str, float]:
    figures = Scores("regression")
    figures.update(method.predict(x), y)
    return figures.compute()


def load_points(data_dir: str | os.PathLike[str] | None, seed: int) -> Data:
    """The paper's points from a folder (the one given, or POSTHOC_DATA's), or generated ones with this seed."""
    folder = data_dir if data_dir is not None else os.environ.get("POSTHOC_DATA")
    path = Path(folder) / FILE if folder else None
    if path is not None and path.is_file():
        return Data("the paper's points", read_points(path), None)
    if data_dir is not None:
        raise FileError(f"Expected the paper's points at {path}, found no file: leave --data-dir out to generate some.")
    generator = torch.Generator().manual_seed(seed)
    train, test = (heteroscedastic(n, generator) for n in (POINTS, TEST_POINTS))
    return Data("generated in the manner of the paper's", train, test)


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


def untrained(seed: int) -> nn.Sequential:
    """Two hidden layers of 50 tanh units."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))


def train_network(x: Tensor, y: Tensor, seed: int) -> nn.Module:
    """The network of the figure, trained on all the points."""
    model = untrained(seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    for _ in range(STEPS):
        optimiser.zero_grad()
        (model(x) - y).square().mean().backward()
        optimiser.step()
        schedule.step()
    return model
