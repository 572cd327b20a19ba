"""The present code against an earlier version: training step, default fit, import, command line, single-row predict.

    python -m benchmarks.against_before --before FOLDER [--only step] [--rounds 5] [--quick] [--out results.json]

FOLDER is a checkout (a git worktree) of the earlier version. Every measurement runs in a process of its own, the two
versions in turn in every round and each first in every other round; medians count, and ratios are medians of the
rounds' ratios. Only what both versions offer is called.

step: milliseconds of a training step, a fit of 1,200 steps less one of 200, on outputs that are known;
fit: seconds of a fit with all options at their defaults, 5,000 rows of 64 features;
import: seconds of `from posthoc import FMGP` after `import torch`, and those of torch;
help: seconds of `python -m posthoc --help`, and those of a Python that only imports typer;
predict: microseconds of `predict` for one row through a small network; of the network alone; of `predict` for outputs
    that are known; and of the head's mathematics, which no tidier code around it could save.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.table import Table
from torch import nn

from benchmarks.harness import console, finish, options, verdict

ROOT = Path(__file__).parents[1]
ROWS, WIDTH, CLASSES = 5000, 64, 10
FEW_STEPS, MANY_STEPS, RATE = 200, 1200, 0.01
CALLS = 300
"""Predictions of one row that are timed in a process; their median counts."""
TASKS = ("regression", "classification")

Figures = dict[str, float | None]


class Target(NamedTuple):
    """The most that is allowed: of a figure, or of its ratio to the earlier version's."""

    most: float
    of_ratio: bool

    def verdict(self, now: float, ratio: float | None) -> str:
        found = ratio if self.of_ratio else now
        text = f"≤ {self.most:g} ×" if self.of_ratio else f"≤ {self.most:g} s"
        return verdict(found is not None and found <= self.most, text)


TARGETS = {
    ("step", "regression"): Target(1.6, True),
    ("step", "classification"): Target(1.6, True),
    ("fit", "regression"): Target(1.3, True),
    ("fit", "classification"): Target(1.3, True),
    ("import", "posthoc"): Target(0.2, False),
    ("help", "posthoc --help"): Target(0.5, False),
    ("predict", "regression"): Target(0.6, True),
    ("predict", "classification"): Target(0.6, True),
}
UNITS = {"step": "ms", "fit": "s", "import": "s", "help": "s", "predict": "µs"}


# ---- in the processes that measure -----------------------------------------------------------------------------------


def step(quick: bool) -> Figures:
    few, many = (5, 25) if quick else (FEW_STEPS, MANY_STEPS)
    return {task: 1e3 * (steps_take(task, many) - steps_take(task, few)) / (many - few) for task in TASKS}


def steps_take(task: str, steps: int) -> float:
    """Seconds of a fit with so many steps."""
    data, more = known(task), {"variance": "separable"} if task == "classification" else {"residuals": "gaussian"}
    return seconds(lambda: method(None, task, steps=steps, lr=RATE, **more).fit(data))


def fit(quick: bool) -> Figures:
    found: Figures = {}
    for task in TASKS:
        rows = known(task)[:300] if quick else known(task)
        estimator = method(None, task)
        found[task] = seconds(partial(estimator.fit, rows))
    return found


def predict(quick: bool) -> Figures:
    """Microseconds by task: of all, and of what it consists of."""
    from posthoc import Outputs

    found: Figures = {}
    for task in TASKS:
        network, x, targets = problem(task)
        more = {"variance": "separable"} if task == "classification" else {"residuals": "gaussian"}
        estimator = method(network, task, steps=20, lr=RATE, **more).fit((x[:1000], targets[:1000]))
        row = torch.from_numpy(x[:1])
        with torch.no_grad():
            features = network[:2](row)
            one = Outputs(network(row), features=features)
        found[task] = microseconds(partial(estimator.predict, row), quick)
        found[f"{task}, network alone"] = microseconds(partial(network, row), quick)
        found[f"{task}, outputs known"] = microseconds(partial(estimator.predict, one), quick)
        mathematics = head_alone(estimator, one)
        found[f"{task}, head's mathematics"] = microseconds(mathematics, quick) if mathematics is not None else None
    return found


def head_alone(estimator: Any, one: Any) -> Callable[[], object] | None:
    """The kernel, the variance and the predictive of a row, by the head itself; None where it is not found."""
    head: Any = getattr(estimator, "head", None)
    if not hasattr(head, "predictive"):
        return None
    return partial(head.predictive, one, *([head.prepared()] if hasattr(head, "prepared") else []))


def method(network: nn.Module | None, task: str, **more: Any) -> Any:
    from posthoc import FMGP

    return FMGP(network, task, progress=False, **more)


def known(task: str) -> Any:
    """The network's outputs and features, and the targets."""
    from posthoc import Outputs

    network, x, targets = problem(task)
    with torch.no_grad():
        features = network[:2](torch.from_numpy(x))
        return Outputs(network[2](features), targets, features)


def problem(task: str) -> tuple[nn.Sequential, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A network that is too sure of itself far from zero along the first input, inputs and targets."""
    rng = np.random.default_rng(0)
    outputs = CLASSES if task == "classification" else 1
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs))
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(torch.from_numpy(0.3 * rng.normal(size=tuple(p.shape))))
        y = network.eval()(torch.from_numpy(x)).numpy()
    if task == "classification":
        return network, x, (y / (0.3 + 2.0 * np.abs(x[:, :1])) + rng.gumbel(size=y.shape)).argmax(-1)
    return network, x, (y + (0.2 + np.abs(x[:, :1])) * rng.normal(size=y.shape)).astype(np.float32)


def seconds(run: Callable[[], object]) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin


@torch.no_grad()
def microseconds(run: Callable[[], object], quick: bool) -> float:
    for _ in range(3 if quick else 30):
        run()
    return 1e6 * statistics.median(seconds(run) for _ in range(5 if quick else CALLS))


MEASURED: dict[str, Callable[[bool], Figures]] = {"step": step, "fit": fit, "predict": predict}


# ---- in the process that compares ------------------------------------------------------------------------------------

IMPORTS = """
import time
a = time.perf_counter()
import torch
b = time.perf_counter()
from posthoc import FMGP
c = time.perf_counter()
import json
print(json.dumps({"posthoc": c - b, "torch": b - a}))
"""


def measure(kind: str, checkout: Path, quick: bool) -> Figures:
    """The figures of one version, from processes that see no other."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
    if kind == "help":
        return {
            "posthoc --help": process_takes(["-m", "posthoc", "--help"], environment),
            "typer alone": process_takes(["-c", "import typer"], environment),
        }
    code = ["-c", IMPORTS] if kind == "import" else ["-m", "benchmarks.against_before", "--measure", kind]
    if quick and kind in MEASURED:
        code.append("--quick")
    done = subprocess.run([sys.executable, *code], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{kind} failed with the code of {checkout}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def process_takes(arguments: list[str], environment: dict[str, str]) -> float:
    def run() -> None:
        subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, check=True)

    return seconds(run)


def compare(kind: str, before: Path, rounds: int, quick: bool) -> dict[str, Any]:
    """Medians of both versions, and of their ratios."""
    checkouts = {"before": before, "now": ROOT}
    found: dict[str, list[Figures]] = {"before": [], "now": []}
    for i in range(rounds):
        for version in sorted(checkouts, reverse=bool(i % 2)):
            found[version].append(measure(kind, checkouts[version], quick))
    result: dict[str, Any] = {}
    for name in dict.fromkeys([*found["before"][0], *found["now"][0]]):
        times = {version: [figures.get(name) for figures in all_figures] for version, all_figures in found.items()}
        pairs = [(n, b) for n, b in zip(times["now"], times["before"], strict=True) if n is not None and b]
        result[name] = {version: middle(values) for version, values in times.items()}
        result[name] |= {"ratio": middle([n / b for n, b in pairs]), "rounds": times}
    return result


def middle(values: list[Any]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def commit(checkout: Path) -> str | None:
    """The commit of a checkout, with a mark where files differ from it."""
    try:
        done = subprocess.run(
            ["git", "-C", str(checkout), "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def show(result: dict[str, Any]) -> None:
    screen = console()
    table = Table("", "figure", "before", "now", "ratio", "target", title=f"Against {result['before']}")
    for kind, figures in result["figures"].items():
        for name, found in figures.items():
            numbers = (shown(found[key], UNITS[kind]) for key in ("before", "now"))
            target = TARGETS.get((kind, name))
            met = target.verdict(found["now"], found["ratio"]) if target is not None else ""
            table.add_row(kind, name, *numbers, shown(found["ratio"], "×"), met)
        table.add_section()
    screen.print(table)


def shown(value: float | None, unit: str) -> str:
    return "–" if value is None else f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--before", type=Path, help="a checkout of the earlier version")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=list(UNITS), action="append", help="may be given more than once")
    parser.add_argument("--measure", choices=list(MEASURED), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        print(json.dumps(MEASURED[args.measure](args.quick)))
        return
    if args.before is None or not (args.before / "src" / "posthoc").is_dir():
        parser.error("--before names a checkout of the earlier version: git worktree add FOLDER COMMIT")
    before, rounds = args.before.resolve(), 1 if args.quick else args.rounds
    result: dict[str, Any] = {"before": commit(before), "now": commit(ROOT), "rounds": rounds}
    result["figures"] = {kind: compare(kind, before, rounds, args.quick) for kind in args.only or UNITS}
    show(result)
    finish("against_before", args, result)


if __name__ == "__main__":
    main()
