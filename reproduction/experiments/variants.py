"""Variants of methods, one a row of a table; their fits and scores; and caches of fits and of networks' outputs."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posthoc.base import Method
from posthoc.collect import open_outputs
from posthoc.collect.fingerprint import fingerprint
from posthoc.collect.network import Backbone
from posthoc.collect.outputs import Outputs
from posthoc.collect.to_folder import collect_to_folder
from posthoc.errors import FileError
from posthoc.evaluate.cost import synchronize, versions
from posthoc.evaluate.evaluate import Evaluation, score
from posthoc.io import atomic_path, require_folder
from posthoc.kernels.registry import kernel_from_spec
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.categorical import Categorical
from reproduction.data.files import DataFolder, UnavailableError, cache_folder
from reproduction.experiments.experiment import Request

__all__ = [
    "PAPER_KERNEL",
    "PAPER_LIKELIHOOD",
    "QUICK",
    "QUICK_POINTS",
    "FitData",
    "NetworkOutputs",
    "Variant",
    "cached_fit",
    "cached_outputs",
    "digest",
    "fit_and_score",
    "quality_of",
    "read_outputs",
    "worker_count",
]

PAPER_KERNEL = {
    "type": "product",
    "left": {"type": "rbf", "on": "inputs"},
    "right": {"type": "sum", "left": {"type": "linear", "on": "features"}, "right": {"type": "white"}},
}
"""The paper's kernel for classification: RBF over the inputs times linear over the features plus noise."""
PAPER_LIKELIHOOD = {"temperature": 1.0, "training": "logit_scaling", "prediction": "logit_scaling"}
"""The paper's likelihood for classification."""
QUICK = {"steps": 3, "batch_size": 20}
QUICK_POINTS = {"num_inducing": 5, **QUICK}
"""Options of quick runs, for methods without and with inducing points."""
QUICK_ROWS = 100
MAX_WORKERS = 8


@dataclass(frozen=True)
class Variant:
    """A method with options.

    Attributes:
        title: The name in tables.
        kind: The class of the method.
        options: Options in JSON's types.
        quick: Options that replace those in quick runs.
        likelihood: Options of a `Categorical` likelihood. None: the default one of the task.
        on: The data that it is fitted on.
    """

    title: str
    kind: type[Method]
    options: Mapping[str, Any] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)
    likelihood: Mapping[str, Any] | None = None
    on: str = "train"

    @property
    def needs_network(self) -> bool:
        """Whether predictions need more than the network's outputs and features."""
        return not self.kind.black_box or self.options.get("weights") == "all"

    def describe(self, quick: bool) -> dict[str, Any]:
        """The part of a run's configuration that this variant determines."""
        options = {"method": self.kind.name, "options": self._options(quick), "fitted_on": self.on}
        return options | ({"likelihood": dict(self.likelihood)} if self.likelihood is not None else {})

    def build(self, model: nn.Module | None, task: str, *, seed: int, device: str, quick: bool = False) -> Method:
        """The method, not yet fitted."""
        options = self._options(quick)
        if "kernel" in options:
            options["kernel"] = kernel_from_spec(options["kernel"])
        likelihood: str | Likelihood = task if self.likelihood is None else Categorical(**self.likelihood)
        common = self.kind.known_options({"device": device, "seed": seed, "progress": False})
        return self.kind(model, likelihood, **common, **options)

    def _options(self, quick: bool) -> dict[str, Any]:
        return {**self.options, **(self.quick if quick else {})}


@dataclass(frozen=True)
class FitData:
    """The data of a fit.

    Attributes:
        data: What `Method.fit` takes.
        val: Validation data.
        augment: The augmentation of the training data.
        num_data: The number of rows that `data` represents.
        collect_seconds: The seconds in which the network computed `data`; 0 where the fit runs the network.
    """

    data: Any
    val: Any = None
    augment: str | None = None
    num_data: int | None = None
    collect_seconds: float = 0.0

    def fit(self, method: Method) -> float:
        """Fits a method and returns the seconds that it took."""
        synchronize(method.device)
        begin = time.perf_counter()
        method.fit(self.data, val=self.val, augment=self.augment, num_data=self.num_data)
        synchronize(method.device)
        return time.perf_counter() - begin


@dataclass(frozen=True)
class NetworkOutputs:
    """Outputs of a network, and the seconds that it took; None where a computation was interrupted."""

    outputs: Outputs
    seconds: float | None

    def subset(self, rows: Tensor) -> NetworkOutputs:
        """Some rows, with their share of the seconds."""
        share = len(rows) / len(self.outputs)
        return NetworkOutputs(self.outputs[rows], self.seconds * share if self.seconds is not None else None)


def fit_and_score(
    variant: Variant,
    task: str,
    fit_data: FitData,
    test: Any,
    network: nn.Module | None,
    seed: int,
    request: Request,
    inspect: Callable[[Method], dict[str, float]] = lambda method: {},
) -> dict[str, Any]:
    """Fits one variant and scores it on test data.

    Returns:
        Its metrics (with those that `inspect` computes from the fitted method), their errors, times, curves and
        selection.
    """
    method = variant.build(network, task, seed=seed, device=request.device, quick=request.quick)
    seconds = fit_data.fit(method)
    scored = score(method, test, device=torch.device(request.device))
    document = quality_of(method, scored)
    return document | {
        "metrics": document["metrics"] | inspect(method),
        "times": {"fit_seconds": seconds, "predict_seconds": scored.seconds},
    }


def quality_of(method: Method, scored: Evaluation) -> dict[str, Any]:
    """Metrics, their standard errors over test sets, curves, and what the method chose, for a document."""
    return {
        "metrics": scored.figures,
        "errors": scored.scores.standard_errors(),
        "curves": scored.curves(),
        "selection": str(getattr(method, "selection_", None) or ""),
    }


def cached_fit(
    build: Callable[[], Method],
    fit_data: Callable[[], FitData],
    recipe: Mapping[str, Any],
    model: nn.Module | None,
) -> tuple[Method, dict[str, float]]:
    """A fitted method and the seconds of its fit, without and with the network's; kept in the cache.

    Several experiments use the same fits. `recipe` identifies a fit, together with the versions of the libraries.
    """
    method = build()
    folder = cache_folder() / "fits"
    path = folder / f"{method.name}-{digest({**recipe, 'versions': versions()})}.safetensors"
    note = path.with_suffix(".json")
    if path.exists() and note.exists():
        return type(method).load(path, model=model, device=method.device), json.loads(note.read_text(encoding="utf-8"))
    data = fit_data()  # before the clock starts
    seconds = data.fit(method)
    times = {"fit_seconds": seconds, "fit_seconds_with_network": seconds + data.collect_seconds}
    require_folder(folder)
    method.save(path)
    write_json(note, times)
    return method, times


def cached_outputs(
    name: str, backbone: Backbone, data: Any, collate: Any, identity: Mapping[str, Any], *, quick: bool = False
) -> NetworkOutputs:
    """Outputs of a network for rows (image, class); kept in the cache, and resumed after an interruption.

    Args:
        name: The beginning of the name in the cache.
        backbone: The network.
        data: A data set of rows.
        collate: Makes a batch from rows.
        identity: Identifies the data and the transform; the network is identified by its weights.
        quick: Read rows in this process.
    """
    key = {"layer": backbone.layer, "network": fingerprint(backbone.module), **identity}
    folder = require_folder(cache_folder() / "outputs") / f"{name}-{digest(key)}"
    note = folder.with_name(f"{folder.name}.json")
    fresh, begin = not folder.exists(), time.perf_counter()
    try:
        outputs = open_outputs(folder)
    except FileError:  # absent or incomplete
        workers = 0 if quick else worker_count()
        outputs = collect_to_folder(backbone, data, folder, identity=key, collate=collate, workers=workers)
        if fresh:
            write_json(note, {"seconds": time.perf_counter() - begin})
    seconds = json.loads(note.read_text(encoding="utf-8"))["seconds"] if note.exists() else None
    return NetworkOutputs(outputs, seconds)


def read_outputs(folder: str, name: str, request: Request) -> Outputs:
    """Outputs from a file of the user's data.

    Raises:
        UnavailableError: The file does not exist.
    """
    files = DataFolder(folder, request.data_dir).find(name)
    if not files:
        raise UnavailableError(
            f"Expected outputs in {name} in the folder {folder} of the data, found none: name the folder of the data "
            "with --data-dir or POSTHOC_DATA."
        )
    outputs = open_outputs(files[0])
    return outputs[:QUICK_ROWS] if request.quick else outputs


def worker_count() -> int:
    """The number of processes that prepare images."""
    return min(MAX_WORKERS, os.cpu_count() or 1)


def digest(recipe: Any) -> str:
    """A name for something that JSON describes."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:24]


def write_json(path: Path, value: Any) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value) + "\n", encoding="utf-8")
