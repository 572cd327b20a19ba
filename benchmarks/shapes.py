"""Training steps at the sizes of image classifiers: replayed, and taken one after another.

Steps a second are those of a long run less a short one, so that what comes before the first step is told apart. Memory
is the peak of a whole fit, its data included: all that is allocated on a GPU, or what it adds to a fresh process.
"""

from __future__ import annotations

import gc
import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.calls import Call, capture, fit_with, same_steps
from benchmarks.harness import (
    Run,
    awake,
    enough_steps,
    high_water,
    in_fresh_process,
    mib,
    step_and_start,
    verdict,
)
from benchmarks.simulated import Simulated
from posthoc import FMGP

__all__ = ["SHAPES", "Shape", "compare_ways", "show_shapes", "way_names"]

BATCH, INDUCING, POINTS = 100, 100, 5000
SHORT, CHECKED = 50, 60
"""Steps of the short run (one block, on a GPU), and steps that are also taken by hand."""


@dataclass(frozen=True)
class Shape:
    """A size of problem, and how fast it should be on a GPU."""

    classes: int
    features: int
    variance: str
    steps_per_second: int
    most_bytes: float | None = None

    def call(self, device: torch.device) -> Call:
        return capture(self.method(device), self.data())

    def method(self, device: torch.device, **options: Any) -> FMGP:
        options = {"batch_size": BATCH, "num_inducing": INDUCING, "progress": False, **options}
        return FMGP(None, "classification", variance=self.variance, device=device, **options)

    def data(self) -> Any:
        return Simulated(POINTS, self.classes, self.features).outputs()

    @property
    def target(self) -> str:
        limit = f" under {self.most_bytes / 1e9:g} GB" if self.most_bytes else ""
        return f"at least {self.steps_per_second:,} steps/s{limit}"


SHAPES = {
    "10 classes": Shape(10, 64, "separable", 1000),
    "10 classes, a variance each": Shape(10, 64, "per_output", 1000),
    "1,000 classes": Shape(1000, 512, "shared", 500, 1.5e9),
    "1,000 classes, a variance each": Shape(1000, 512, "per_output", 500, 1.5e9),
}


def way_names(device: torch.device) -> list[str]:
    """The ways to take steps on a device, the one that `fit` takes first."""
    return ["graph", "plain"] if device.type == "cuda" else ["plain"]


def compare_ways(name: str, device: torch.device, rounds: int, seconds: float) -> dict[str, Any]:
    """Steps a second and peak memory of each way, which must agree first."""
    shape, ways = SHAPES[name], way_names(device)
    call = shape.call(device)
    by_hand = call.by_hand(CHECKED)
    differences = {way: same_steps(call.run(CHECKED, way), by_hand) for way in ways}
    runs: dict[str, Run] = {way: partial(call.run, way=way) for way in ways}
    counts = {way: enough_steps(run, seconds, device, SHORT) for way, run in runs.items()}
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in runs.items():
            times[way].append(step_and_start(run, counts[way], device, SHORT))
    steps = {way: [step for step, _ in values] for way, values in times.items()}
    middle = {way: statistics.median(values) for way, values in steps.items()}
    starts = {way: statistics.median(start for _, start in values) for way, values in times.items()}
    del call, runs, by_hand  # what they hold is not the next fit's
    memory = {way: mib(peak_memory(name, way, device)) for way in ways}
    used = ways[0]
    speed = 1.0 / middle[used]
    small_enough = shape.most_bytes is None or memory[used] * 2**20 < shape.most_bytes
    return {
        "classes": shape.classes,
        "features": shape.features,
        "inducing": INDUCING,
        "batch": BATCH,
        "points": POINTS,
        "variance": shape.variance,
        "steps_per_second": {way: 1.0 / t for way, t in middle.items()},
        "milliseconds_per_step": {way: 1e3 * t for way, t in middle.items()},
        "seconds_before_the_first_step": starts,
        "steps_per_round": counts,
        "peak_memory_mib": memory,
        "greatest_difference_from_steps_by_hand": differences,
        "over_plain_speed": statistics.median(p / g for g, p in zip(steps[used], steps["plain"], strict=True)),
        "target": shape.target,
        "met": speed >= shape.steps_per_second and small_enough if device.type == "cuda" else None,
    }


def peak_memory(name: str, way: str, device: torch.device) -> int:
    """Bytes of a fit, in a process that has done nothing else."""
    return in_fresh_process(fit_memory, name, way, device.type)


def fit_memory(name: str, way: str, device_type: str) -> int:
    device = torch.device(device_type)
    awake(device)
    gc.collect()
    before = high_water(device, reset=True)
    fit_with(SHAPES[name].method(device, steps=SHORT), SHAPES[name].data(), way)
    return high_water(device) - (before if device.type == "cpu" else 0)


def show_shapes(screen: Console, shapes: dict[str, Any]) -> None:
    table = Table("shape", "way", "steps/s", "ms/step", "start s", "peak MiB", "target", title="Large shapes")
    for name, r in shapes.items():
        for way, speed in r["steps_per_second"].items():
            first = way == next(iter(r["steps_per_second"]))
            table.add_row(
                f"{name} ({r['variance']})" if first else "",
                way,
                f"{speed:,.0f}",
                f"{r['milliseconds_per_step'][way]:.2f}",
                f"{r['seconds_before_the_first_step'][way]:.2f}",
                f"{r['peak_memory_mib'][way]:,.0f}",
                verdict(r["met"], r["target"]) if first else "",
            )
        table.add_section()
    screen.print(table)
