"""CIFAR-10's test images, rotated and corrupted: how a network's doubts grow as its world changes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from posthoc.base import Method
from posthoc.evaluate.evaluate import score
from reproduction.data.corruptions import CORRUPTIONS, available_corruptions, corrupted
from reproduction.data.images import ROTATIONS, rotate
from reproduction.experiments.cifar10 import CifarExperiment, depth_of, needs_network
from reproduction.experiments.cifar_data import Cifar
from reproduction.experiments.experiment import Request
from reproduction.plots import line_figure

__all__ = ["Cifar10Corruptions", "Cifar10Rotations"]

IMAGES = 2000
"""The first so many test images are changed: nineteen or seventy-five times all of them would take hours."""
SEVERITIES = (1, 2, 3, 4, 5)
FIGURES = ("nll", "ece", "accuracy", "brier")


class Shifted(CifarExperiment):
    """A method on many changed copies of the first test images."""

    def figures(self, cifar: Cifar, case: str, method: str, fit: Method, changes: Iterable[str]) -> dict[str, Any]:
        """Those of each copy, by its name."""
        whole = needs_network(self.variant(case, method))
        found = {}
        for change in changes:
            data = changed(cifar, change) if whole else said_of(cifar, depth_of(case), change)
            figures = score(fit, data, device=cifar.device).figures
            found[change] = {name: figures[name] for name in FIGURES}
        return found

    def sources(self, cifar: Cifar, case: str, method: str) -> dict[str, str]:
        words = self.data(cifar, case, method)
        first = min(IMAGES, len(cifar.images("test").pixels))
        return {"fit": words["fit"], "test": f"{words['test']}, the first {first:,} images"}


class Cifar10Rotations(Shifted):
    """Four networks on images rotated by 0 to 180 degrees."""

    name = "cifar10-rotations"
    title = "CIFAR-10 rotated by 0 to 180 degrees"

    def work(self, prepared: Cifar, case: str, method: str, seed: int, request: Request) -> Mapping[str, Any]:
        fit, times = self.fitted(prepared, case, method, seed)
        angles = ROTATIONS[:3] if request.quick else ROTATIONS
        found = self.figures(prepared, case, method, fit, [f"rotated {angle}" for angle in angles])
        line = {"x": list(angles), **{name: [row[name] for row in found.values()] for name in FIGURES}}
        return {
            "metrics": {name: statistics.fmean(line[name]) for name in FIGURES},  # over all angles
            "times": times,
            "curves": {"lines": {"rotation": line}},
            "data": self.sources(prepared, case, method),
        }

    def draw(self, documents: list[dict[str, Any]], folder: Path) -> list[Path]:
        return line_figure(folder / "figure", documents, "rotation", {"nll": "NLL", "ece": "ECE"}, "degrees")


class Cifar10Corruptions(Shifted):
    """ResNet56 on images corrupted in fifteen ways, each in five severities."""

    name = "cifar10-corruptions"
    title = "CIFAR-10 corrupted in fifteen ways"
    cases = ("resnet56",)

    def work(self, prepared: Cifar, case: str, method: str, seed: int, request: Request) -> Mapping[str, Any]:
        fit, times = self.fitted(prepared, case, method, seed)
        usable, missing = available_corruptions(request.data_dir)
        kinds = usable[:2] if request.quick else usable
        found = self.figures(prepared, case, method, fit, [f"{kind} {s}" for kind in kinds for s in SEVERITIES])
        line: dict[str, list[Any]] = {"x": list(SEVERITIES)}
        for name in FIGURES:
            line[name] = [statistics.fmean(found[f"{kind} {s}"][name] for kind in kinds) for s in SEVERITIES]
        words = self.sources(prepared, case, method)
        words["test"] += f", corrupted in {len(kinds)} of {len(CORRUPTIONS)} ways"
        if missing:
            words["missing"] = "; ".join(f"{kind}: {why}" for kind, why in missing.items())
        return {
            "metrics": {name: statistics.fmean(line[name]) for name in FIGURES},  # over kinds and severities
            "times": times,
            "curves": {"lines": {"severity": line}},
            "data": words,
            "diagnostics": {"nll": {kind: [found[f"{kind} {s}"]["nll"] for s in SEVERITIES] for kind in kinds}},
        }

    def draw(self, documents: list[dict[str, Any]], folder: Path) -> list[Path]:
        return line_figure(folder / "figure", documents, "severity", {"nll": "NLL", "ece": "ECE"}, "severity")


@lru_cache(maxsize=len(CORRUPTIONS) * len(SEVERITIES) + len(ROTATIONS))
def pixels_of(cifar: Cifar, change: str) -> Tensor:
    """The first test images, changed."""
    images = cifar.images("test").pixels[:IMAGES]
    kind, amount = change.split()
    if kind == "rotated":
        return rotate(images, float(amount))
    return corrupted(images, kind, int(amount), data_dir=cifar.request.data_dir)


def changed(cifar: Cifar, change: str) -> tuple[Tensor, Tensor]:
    """Changed images as the networks take them, and their classes."""
    pixels = pixels_of(cifar, change)
    return cifar.ready(pixels), cifar.images("test").targets[: len(pixels)].to(cifar.device)


@lru_cache(maxsize=4 * (len(CORRUPTIONS) * len(SEVERITIES) + len(ROTATIONS)))
def said_of(cifar: Cifar, depth: int, change: str) -> Any:
    """What a network says of them."""
    return cifar.run(depth, *changed(cifar, change)).outputs
