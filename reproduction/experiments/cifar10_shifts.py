"""CIFAR-10's test images, rotated and corrupted: uncertainty under distribution shift."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from posthoc.base import Method
from posthoc.collect.outputs import Outputs
from posthoc.evaluate.evaluate import score
from reproduction.data.corruptions import CORRUPTIONS, SEVERITIES, available_corruptions, corrupted
from reproduction.data.images import ROTATIONS, rotate
from reproduction.experiments.cifar10 import CifarExperiment, depth_of
from reproduction.experiments.cifar_networks import Cifar
from reproduction.experiments.experiment import Request
from reproduction.figures import line_figure

__all__ = ["Cifar10Corruptions", "Cifar10Rotations"]

IMAGES = 2000
"""The number of test images, since 19 or 75 copies of all of them would take hours."""
METRICS = ("nll", "ece", "accuracy", "brier")
SHIFTS = len(CORRUPTIONS) * len(SEVERITIES) + len(ROTATIONS)


class ShiftExperiment(CifarExperiment):
    """A method on several shifted copies of the first test images."""

    def metrics_by_shift(
        self, cifar: Cifar, case: str, method: str, fitted: Method, shifts: Iterable[str]
    ) -> dict[str, dict[str, float]]:
        """Metrics of each copy; a shift is "rotated 30" or "fog 2"."""
        needs_network = self.variant(case, method).needs_network
        metrics = {}
        for shift in shifts:
            data = shifted_rows(cifar, shift) if needs_network else shifted_outputs(cifar, depth_of(case), shift)
            figures = score(fitted, data, device=cifar.device).figures
            metrics[shift] = {name: figures[name] for name in METRICS}
        return metrics

    def sources(self, cifar: Cifar, case: str, method: str) -> dict[str, str]:
        sources = super().sources(cifar, case, method)
        count = min(IMAGES, len(cifar.images("test").pixels))
        return {"fit": sources["fit"], "test": f"{sources['test']}, the first {count:,} images"}


class Cifar10Rotations(ShiftExperiment):
    """Four networks on images rotated by 0 to 180 degrees; metrics are means over the angles."""

    name = "cifar10-rotations"
    title = "CIFAR-10 rotated by 0 to 180 degrees"

    def run(self, prepared: Cifar, case: str, method: str, seed: int, request: Request) -> Mapping[str, Any]:
        fitted, times = self.fit(prepared, case, method, seed)
        angles = ROTATIONS[:3] if request.quick else ROTATIONS
        metrics = self.metrics_by_shift(prepared, case, method, fitted, [f"rotated {angle}" for angle in angles])
        line: dict[str, list[Any]] = {name: [row[name] for row in metrics.values()] for name in METRICS}
        return {
            "metrics": {name: statistics.fmean(line[name]) for name in METRICS},
            "times": times,
            "curves": {"lines": {"rotation": {"x": list(angles), **line}}},
            "data": self.sources(prepared, case, method),
        }

    def draw(self, documents: list[dict[str, Any]], folder: Path) -> list[Path]:
        return line_figure(folder / "figure", documents, "rotation", {"nll": "NLL", "ece": "ECE"}, "degrees")


class Cifar10Corruptions(ShiftExperiment):
    """ResNet56 on images corrupted in fifteen ways and five severities; metrics are means over all of them."""

    name = "cifar10-corruptions"
    title = "CIFAR-10 corrupted in fifteen ways"
    cases = ("resnet56",)

    def run(self, prepared: Cifar, case: str, method: str, seed: int, request: Request) -> Mapping[str, Any]:
        fitted, times = self.fit(prepared, case, method, seed)
        available, missing = available_corruptions(request.data_dir)
        kinds = available[:2] if request.quick else available
        shifts = [f"{kind} {severity}" for kind in kinds for severity in SEVERITIES]
        metrics = self.metrics_by_shift(prepared, case, method, fitted, shifts)
        line: dict[str, list[Any]] = {"x": list(SEVERITIES)}
        for name in METRICS:
            line[name] = [statistics.fmean(metrics[f"{kind} {s}"][name] for kind in kinds) for s in SEVERITIES]
        sources = self.sources(prepared, case, method)
        sources["test"] += f", corrupted in {len(kinds)} of {len(CORRUPTIONS)} ways"
        if missing:
            sources["missing"] = "; ".join(f"{kind}: {reason}" for kind, reason in missing.items())
        return {
            "metrics": {name: statistics.fmean(line[name]) for name in METRICS},
            "times": times,
            "curves": {"lines": {"severity": line}},
            "data": sources,
            "diagnostics": {"nll": {kind: [metrics[f"{kind} {s}"]["nll"] for s in SEVERITIES] for kind in kinds}},
        }

    def draw(self, documents: list[dict[str, Any]], folder: Path) -> list[Path]:
        return line_figure(folder / "figure", documents, "severity", {"nll": "NLL", "ece": "ECE"}, "severity")


@lru_cache(maxsize=SHIFTS)
def shifted_pixels(cifar: Cifar, shift: str) -> Tensor:
    """The first test images with a shift."""
    images = cifar.images("test").pixels[:IMAGES]
    kind, amount = shift.split()
    if kind == "rotated":
        return rotate(images, float(amount))
    return corrupted(images, kind, int(amount), data_dir=cifar.request.data_dir)


def shifted_rows(cifar: Cifar, shift: str) -> tuple[Tensor, Tensor]:
    """Shifted images as inputs of the networks, and their classes."""
    pixels = shifted_pixels(cifar, shift)
    return cifar.to_inputs(pixels), cifar.images("test").targets[: len(pixels)].to(cifar.device)


@lru_cache(maxsize=4 * SHIFTS)
def shifted_outputs(cifar: Cifar, depth: int, shift: str) -> Outputs:
    """The outputs of a network for shifted images."""
    return cifar.compute(depth, *shifted_rows(cifar, shift)).outputs
