"""A row of a table: a method, its options, and how it is called there."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from posthoc.base import Method
from posthoc.evaluate.cost import synchronize, versions
from posthoc.evaluate.evaluate import score
from posthoc.io import atomic_path, require_folder
from posthoc.kernels.registry import kernel_from_spec
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.categorical import Categorical
from reproduction.data.files import cache_folder
from reproduction.experiments.experiment import Request

__all__ = ["PAPER_CLASSES", "PAPER_KERNEL", "Given", "Variant", "fitted", "fitted_and_scored"]

PAPER_KERNEL = {
    "type": "product",
    "left": {"type": "rbf", "on": "inputs"},
    "right": {"type": "sum", "left": {"type": "linear", "on": "features"}, "right": {"type": "white"}},
}
"""The paper's kernel for classes: one over the inputs times a linear one over the features with some noise."""
PAPER_CLASSES = {"temperature": 1.0, "training": "logit_scaling", "prediction": "logit_scaling"}
"""The paper's likelihood of classes."""


@dataclass(frozen=True)
class Variant:
    """A method and its options, in what JSON knows."""

    title: str
    kind: type[Method]
    options: Mapping[str, Any] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)
    """Options in place of those, for a run that is only to show that it works."""
    likelihood: Mapping[str, Any] | None = None
    """Options of a `Categorical`."""
    on: str = "train"
    """What it is fitted on."""

    def describe(self, quick: bool) -> dict[str, Any]:
        """All that decides its numbers."""
        found: dict[str, Any] = {"method": self.kind.name, "options": self._options(quick), "fitted_on": self.on}
        return found | ({"likelihood": dict(self.likelihood)} if self.likelihood is not None else {})

    def build(self, model: nn.Module | None, task: str, *, seed: int, device: str, quick: bool = False) -> Method:
        """The method itself, not yet fitted."""
        options = self._options(quick)
        if "kernel" in options:
            options["kernel"] = kernel_from_spec(options["kernel"])
        likelihood: str | Likelihood = task if self.likelihood is None else Categorical(**self.likelihood)
        common = self.kind.known_options({"device": device, "seed": seed, "progress": False})
        return self.kind(model, likelihood, **common, **options)

    def _options(self, quick: bool) -> dict[str, Any]:
        return {**self.options, **(self.quick if quick else {})}


@dataclass(frozen=True)
class Given:
    """What a method is fitted on, and the seconds that the network took to say it (0 where the fit runs it)."""

    data: Any
    val: Any = None
    augment: str | None = None
    num_data: int | None = None
    collected: float = 0.0

    def fit(self, method: Method) -> float:
        """Fits a method on it; the seconds that took."""
        synchronize(method.device)
        begin = time.perf_counter()
        method.fit(self.data, val=self.val, augment=self.augment, num_data=self.num_data)
        synchronize(method.device)
        return time.perf_counter() - begin


def fitted(
    make: Callable[[], Method], given: Callable[[], Given], recipe: Mapping[str, Any], model: nn.Module | None
) -> tuple[Method, dict[str, float]]:
    """A fitted method, and the seconds that its fit took: from what the network said, and with running it. It is kept
    in the cache by its recipe, since several experiments look at the same fits."""
    method = make()
    text = json.dumps({**recipe, "versions": versions()}, sort_keys=True)
    folder = cache_folder() / "fits"
    path = folder / f"{method.name}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.safetensors"
    note = path.with_suffix(".json")
    if path.exists() and note.exists():
        return type(method).load(path, model=model, device=method.device), json.loads(note.read_text(encoding="utf-8"))
    what = given()  # before the clock runs
    seconds = what.fit(method)
    times = {"fit_seconds": seconds, "fit_seconds_with_network": seconds + what.collected}
    require_folder(folder)
    method.save(path)
    with atomic_path(note) as temporary:
        temporary.write_text(json.dumps(times) + "\n", encoding="utf-8")
    return method, times


def fitted_and_scored(
    variant: Variant,
    task: str,
    given: Given,
    test: Any,
    network: nn.Module | None,
    seed: int,
    request: Request,
    look: Callable[[Method], dict[str, float]] = lambda method: {},
) -> dict[str, Any]:
    """One method, from the start: figures, curves and times, and among the figures what `look` finds in it."""
    method = variant.build(network, task, seed=seed, device=request.device, quick=request.quick)
    seconds = given.fit(method)
    scored = score(method, test, device=torch.device(request.device))
    return {
        "metrics": {**scored.figures, **look(method)},
        "times": {"fit_seconds": seconds, "predict_seconds": scored.seconds},
        "curves": scored.curves(),
    }
