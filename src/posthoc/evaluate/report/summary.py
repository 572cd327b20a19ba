"""A folder of results: its runs by experiment, case and method, and means over seeds with their errors."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeVar

from posthoc.errors import FileError
from posthoc.evaluate.report.records import Record, read_record
from posthoc.methods import REGISTRY


@dataclass(frozen=True)
class Estimate:
    """A mean over runs, with its standard error (None if unknown)."""

    mean: float
    error: float | None = None
    count: int = 1


Entry = TypeVar("Entry")
Estimates = Mapping[str, Estimate]
"""Estimates by the name of a method or of a figure."""


def estimate(values: Sequence[float], errors: Sequence[float] = ()) -> Estimate:
    """The mean of several seeds and its standard error.

    Args:
        values: One value a seed.
        errors: The standard errors of the values over test sets. The first is the estimate's error if there is one
            seed only; of several seeds it follows from the spread of the values (n - 1 in the denominator).

    Example:
        >>> estimate([1.0, 2.0, 3.0])
        Estimate(mean=2.0, error=0.577, count=3)
    """
    if len(values) == 1:
        return Estimate(values[0], errors[0] if errors else None)
    return Estimate(fmean(values), stdev(values) / math.sqrt(len(values)), len(values))


class MethodSummary:
    """A method's runs on one case, in the order of their seeds.

    Args:
        runs: The runs; those with a problem count in no mean.
        seeds: The seeds that the methods of the case were run with.
    """

    def __init__(self, runs: Sequence[Record], seeds: set[int]) -> None:
        self.method, self.title, self.runs = runs[0].method, runs[0].title, runs
        self.seeds = len(seeds)
        self.missing = sorted(seeds - {run.seed for run in runs})
        self.counted = [run for run in runs if run.problem is None]
        self.excluded = [run for run in runs if run.problem is not None]
        self.applies = any(run.applies for run in runs)
        self.sources = list(dict.fromkeys(f"{part}: {of}" for run in runs for part, of in described(run.data).items()))
        self.estimates = {
            figure: estimate(
                [run.figures[figure] for run in self.counted if figure in run.figures],
                [run.errors[figure] for run in self.counted if figure in run.errors],
            )
            for figure in dict.fromkeys(figure for run in self.counted for figure in run.figures)
        }


class CaseSummary:
    """The methods on one case: a network, a data set.

    Raises:
        FileError: If there are two documents of one run, which a mean would count twice, or runs of two tasks.
    """

    def __init__(self, experiment: str, case: str, runs: Sequence[Record]) -> None:
        self.experiment, self.case, self.task, self.runs = experiment, case, runs[0].task, runs
        for first, *others in group_by(runs, lambda run: (run.method, run.seed)).values():
            if others:
                run = f"{first.method} with seed {first.seed}"
                raise FileError(f"Expected one document of {run}, found two: {first.path} and {others[0].path}.")
            if first.task != self.task:
                raise FileError(f"Expected runs of one task in {experiment}, found {first.task} in {first.path}.")
        methods, seeds = group_by(runs, lambda run: run.method), {run.seed for run in runs}
        self.methods = [MethodSummary(methods[name], seeds) for name in sorted(methods, key=registry_order)]

    def estimates(self, figure: str) -> dict[str, Estimate]:
        """A figure of all methods that have it."""
        return {method.method: method.estimates[figure] for method in self.methods if figure in method.estimates}

    @property
    def figures(self) -> list[str]:
        """The names of all figures that a method has."""
        return list(dict.fromkeys(figure for method in self.methods for figure in method.estimates))

    @property
    def sources(self) -> list[str]:
        """Where each part of the data comes from; the methods are named where they differ."""
        methods: dict[str, list[str]] = {}
        for method in self.methods:
            for source in method.sources:
                methods.setdefault(source, []).append(method.title)
        everywhere = len(self.methods)
        return [s if len(titles) == everywhere else f"{s} ({', '.join(titles)})" for s, titles in methods.items()]

    def notes(self) -> list[str]:
        """The runs that no mean contains, and why; methods that do not apply are left out."""
        notes = []
        for method in (method for method in self.methods if method.applies):
            title = method.title
            notes += [f"{title}, seed {run.seed} (left out of the means): {run.problem}" for run in method.excluded]
            if method.missing:
                notes.append(f"{title}: no run with seed {', '.join(map(str, method.missing))}")
        return notes


class ExperimentSummary:
    """The cases of one experiment, or the one of a comparison."""

    def __init__(self, name: str, runs: Sequence[Record]) -> None:
        self.name, self.runs = name, runs
        cases = group_by(runs, lambda run: run.case)
        self.cases = [CaseSummary(name, case, cases[case]) for case in sorted(cases, key=natural)]

    @property
    def numbers(self) -> dict[str, int]:
        """The methods of all cases in one order, numbered."""
        return {name: i for i, name in enumerate(sorted({run.method for run in self.runs}, key=registry_order))}

    def warnings(self) -> list[str]:
        """Reasons not to compare the runs: several versions, different data, or quick runs."""
        warnings = []
        versions = sorted({run.versions.get("posthoc", "unknown") for run in self.runs})
        if len(versions) > 1:
            warnings.append(f"{self.name} mixes runs of several versions of posthoc: {', '.join(versions)}.")
        for case in self.cases:
            # A method may be fitted on data of its own, and a digest may differ from seed to seed.
            roles = ("train", "test", "ood", "val")
            if len({str([run.data.get(role) for role in roles]) for run in case.runs}) > 1:
                name = f"{self.name} {case.case}".strip()
                warnings.append(f"{name} mixes runs on different data: see how it was run.")
        if quick := sum(run.configuration.get("quick") is True for run in self.runs):
            warnings.append(f"{self.name} has {quick} quick runs, on a few rows: no figure of theirs means anything.")
        return warnings


@dataclass(frozen=True)
class Results:
    """The experiments of a folder, and what a reader of them must know."""

    experiments: tuple[ExperimentSummary, ...]
    warnings: tuple[str, ...]

    @property
    def records(self) -> list[Record]:
        """All runs."""
        return [run for experiment in self.experiments for run in experiment.runs]


def read_results(folder: str | os.PathLike[str]) -> Results:
    """Reads every run in a folder and in those below it.

    Files that are not documents of a run are left out; warnings name them, and runs that do not belong together.

    Raises:
        FileError: If there is no run, two documents of one run, or runs of two tasks in one case.
    """
    root = Path(folder)
    if not root.is_dir():
        raise FileError(f"Expected a folder of results, found {'a file' if root.exists() else 'nothing'} at {root}.")
    records, left_out = [], []
    for place in (path.relative_to(root) for path in sorted(root.rglob("*.json"))):
        if any(part.startswith(".") for part in place.parts):
            continue
        try:
            records.append(read_record(root, place))
        except (OSError, ValueError) as reason:
            left_out.append(f"{place.as_posix()} is left out: {reason}.")
    if not records:
        wanted = "the JSON files of posthoc compare or python -m reproduction"
        raise FileError(" ".join((f"Expected {wanted} in {root}, found none.", *left_out[:1])))
    grouped = group_by(sorted(records, key=lambda run: run.seed), lambda run: run.experiment)
    experiments = tuple(ExperimentSummary(name, grouped[name]) for name in sorted(grouped, key=natural))
    mixed = [warning for experiment in experiments for warning in experiment.warnings()]
    return Results(experiments, (*left_out, *mixed))


def group_by(entries: Iterable[Entry], key: Callable[[Entry], Any]) -> dict[Any, list[Entry]]:
    """Entries by a key, in their order."""
    groups: dict[Any, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return groups


def described(data: Mapping[str, Any]) -> dict[str, str]:
    """What is known of data or options, in words, without digests; a part with parts of its own on one line."""
    parts = {part: words for part, words in data.items() if part != "sha256" and words is not None}
    for part, words in parts.items():
        own = described(words).items() if isinstance(words, dict) else ()
        parts[part] = "; ".join(f"{name}: {text}" for name, text in own) if own else str(words)
    return parts


def natural(text: str) -> str:
    """A key by which 9 comes before 10, and 0.25 before 0.5."""
    return re.sub(r"[0-9]+(\.[0-9]+)?", lambda number: f"{float(number[0]):020.6f}", text)


def registered(method: str) -> str | None:
    """The name in the registry that a method's name is, or begins with as a variant of it does ("ella-all")."""
    return next((name for name in (method, re.split("[-_]", method)[0]) if name in REGISTRY), None)


def registry_order(method: str) -> tuple[bool, int, str]:
    """A key for the order of the registry, with variants after their method, and FMGP last."""
    name = registered(method)
    return method.startswith("fmgp"), list(REGISTRY).index(name) if name else len(REGISTRY), natural(method)
