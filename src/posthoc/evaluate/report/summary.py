"""Runs put together: means and standard errors over seeds, a method at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from posthoc.evaluate.report.records import Record

__all__ = [
    "CaseSummary",
    "Estimate",
    "ExperimentSummary",
    "MethodSummary",
    "described",
    "estimate",
    "natural",
    "summarise",
]

LAST = "fmgp"
"""The method whose forms stand at the end of a table, after what they are compared with."""

DIGEST = "sha256"
"""What is said of data for programs, not for people."""


@dataclass(frozen=True)
class Estimate:
    """A mean over runs."""

    mean: float
    error: float | None  # the standard error; None of one run
    count: int


def estimate(values: Sequence[float]) -> Estimate:
    """The mean, and its standard error from the spread of the values themselves (n - 1 in the denominator)."""
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, None, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return Estimate(mean, math.sqrt(variance / n), n)


@dataclass(frozen=True)
class MethodSummary:
    """A method's runs on one case."""

    method: str
    title: str
    counted: tuple[Record, ...]  # in the order of their seeds
    excluded: tuple[Record, ...]
    """Runs with a problem."""
    missing: tuple[int, ...]
    """Seeds that other methods were run with and this one was not."""
    estimates: dict[str, Estimate]

    @property
    def runs(self) -> tuple[Record, ...]:
        return (*self.counted, *self.excluded)


@dataclass(frozen=True)
class CaseSummary:
    """The methods on one case: a network, a data set."""

    experiment: str
    case: str
    task: str
    methods: tuple[MethodSummary, ...]

    @property
    def runs(self) -> list[Record]:
        return [run for method in self.methods for run in method.runs]

    @property
    def sources(self) -> list[str]:
        """Where the data come from, in words, stand-ins named: one entry a part of the data and a source of it, with
        the methods that had it where others had another. Sources of a part stand together."""
        parts: dict[str, dict[str, dict[str, None]]] = {}  # methods by source by part, in their order
        for method in self.methods:
            for part, source in (pair for run in method.runs for pair in described(run.data).items()):
                parts.setdefault(part, {}).setdefault(source, {})[method.title] = None
        return [
            f"{part}: {source}" + (f" ({', '.join(titles)})" if len(titles) < len(self.methods) else "")
            for part, sources in parts.items()
            for source, titles in sources.items()
        ]

    def notes(self) -> list[str]:
        """Which runs the means are without, and why."""
        found = []
        for method in self.methods:
            for run in method.excluded:
                verdict = "left out of the means" if run.applies else "does not apply"
                found.append(f"{method.title}, seed {run.seed} ({verdict}): {run.problem}")
            if method.missing:
                found.append(f"{method.title}: no run with seed {', '.join(map(str, method.missing))}")
        return found


@dataclass(frozen=True)
class ExperimentSummary:
    """The cases of one experiment, or the one of a comparison."""

    name: str
    cases: tuple[CaseSummary, ...]

    @property
    def methods(self) -> dict[str, str]:
        """Titles of the methods of all cases by name, in one order."""
        titles = {method.method: method.title for case in self.cases for method in case.methods}
        return {name: titles[name] for name in sorted(titles, key=order)}


def summarise(records: Iterable[Record]) -> list[ExperimentSummary]:
    """Runs by experiment, case and method; those with a problem are kept and left out of the means."""
    grouped: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        grouped.setdefault(record.experiment, {}).setdefault(record.case, []).append(record)
    return [
        ExperimentSummary(
            name, tuple(summarise_case(name, case, grouped[name][case]) for case in sorted(grouped[name], key=natural))
        )
        for name in sorted(grouped, key=natural)
    ]


def summarise_case(experiment: str, case: str, records: list[Record]) -> CaseSummary:
    methods: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: record.seed):
        methods.setdefault(record.method, []).append(record)
    seeds = {record.seed for record in records}
    summaries = (summarise_method(name, methods[name], seeds) for name in sorted(methods, key=order))
    return CaseSummary(experiment, case, records[0].task, tuple(summaries))


def summarise_method(name: str, runs: list[Record], seeds: set[int]) -> MethodSummary:
    counted = tuple(run for run in runs if run.problem is None)
    figures = dict.fromkeys(figure for run in counted for figure in run.figures)
    means = {figure: estimate([run.figures[figure] for run in counted if figure in run.figures]) for figure in figures}
    excluded = tuple(run for run in runs if run.problem is not None)
    missing = tuple(sorted(seeds - {run.seed for run in runs}))
    return MethodSummary(name, runs[0].title, counted, excluded, missing, means)


def described(data: dict[str, object]) -> dict[str, str]:
    """Parts of data in words; a part with parts of its own on one line."""

    def line(words: object) -> str:
        if not isinstance(words, dict):
            return str(words)
        return "; ".join(f"{part}: {said}" for part, said in described(words).items())

    return {part: line(words) for part, words in data.items() if part != DIGEST}


def natural(text: str) -> list[tuple[int, float, str]]:
    """A key by which 9 comes before 10, and 0.25 before 0.5."""
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return [(0, float(part), part) if part[:1].isdecimal() else (1, 0.0, part) for part in parts if part]


def order(method: str) -> tuple[bool, int, list[tuple[int, float, str]]]:
    """A key by which methods come in the order of the registry, their variants after them, ours last."""
    from posthoc.methods import REGISTRY

    of = [i for i, name in enumerate(REGISTRY) if method == name or method.startswith((f"{name}-", f"{name}_"))]
    return (method.startswith(LAST), min(of, default=len(REGISTRY)), natural(method))
