"""Columns of figures, means over seeds with their errors, the best and second best of each column, and tables."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from posthoc.evaluate.report.records import Record

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "COLUMNS",
    "CaseSummary",
    "Column",
    "Estimate",
    "ExperimentSummary",
    "MethodSummary",
    "columns_of",
    "csv_table",
    "estimate",
    "markdown_table",
    "natural",
    "places_of",
    "rich_table",
    "spread",
    "summarize",
    "written",
]

LOW, HIGH = -math.inf, math.inf


def decimals(value: float) -> str:
    return f"{value:.4f}"


def digits(value: float) -> str:
    """Four significant digits, for figures in the user's units; an exponent only for the very large and small."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:#.4g}"


def seconds(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def megabytes(value: float) -> str:
    return f"{value / 1e6:,.0f}"


@dataclass(frozen=True)
class Column:
    """A figure: its title, how it is written, and where it is best.

    Args:
        figure: Its name in JSON.
        title: Its heading.
        write: From a value to text.
        best: Minus or plus infinity, a value to be near to, or None where no value is better than another.
    """

    figure: str
    title: str
    write: Callable[[float], str] = digits
    best: float | None = None

    @property
    def heading(self) -> str:
        """The title and an arrow to where the figure is better."""
        if self.best is None:
            return self.title
        return f"{self.title} {({LOW: '↓', HIGH: '↑'}).get(self.best, f'→ {self.best:g}')}"

    def badness(self, value: float) -> float:
        """A number that is least for the best value."""
        if self.best is None:
            raise ValueError(f"{self.figure} has no better or worse")
        return {LOW: value, HIGH: -value}.get(self.best, abs(value - self.best))


COLUMNS = {
    column.figure: column
    for column in (
        Column("nll", "NLL", decimals, LOW),
        Column("accuracy", "accuracy", decimals, HIGH),
        Column("ece", "ECE", decimals, LOW),
        Column("brier", "Brier", decimals, LOW),
        Column("ood_auc", "OOD AUC", decimals, HIGH),
        Column("rmse", "RMSE", digits, LOW),
        Column("crps", "CRPS", digits, LOW),
        Column("cqm", "CQM", decimals, LOW),
        Column("coverage_90", "cover 90 %", decimals, 0.9),
        Column("width_90", "width 90 %", digits, None),
        Column("fit_seconds", "fit, s", seconds, LOW),
        Column("predict_seconds", "predict, s", seconds, LOW),
        Column("peak_memory", "memory, MB", megabytes, LOW),
        Column("mae", "MAE", digits, LOW),
        Column("coverage_50", "cover 50 %", decimals, 0.5),
        Column("coverage_95", "cover 95 %", decimals, 0.95),
        Column("aurc", "AURC", digits, LOW),
        Column("ood_fpr95", "OOD FPR at 95 %", decimals, LOW),
        Column("fit_memory", "fit, MB", megabytes, LOW),
        Column("predict_memory", "predict, MB", megabytes, LOW),
    )
}
"""What is known of the usual figures, in their order."""
COSTS = ("fit_seconds", "predict_seconds", "peak_memory")
FURTHER = ("mae", "coverage_50", "coverage_95", "aurc", "ood_fpr95", "fit_memory", "predict_memory")
"""Figures of a second table."""


@dataclass(frozen=True)
class Estimate:
    """A mean over runs, with its standard error (None if unknown)."""

    mean: float
    error: float | None = None
    count: int = 1


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
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, errors[0] if errors else None)
    return Estimate(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n), n)


@dataclass(frozen=True)
class MethodSummary:
    """A method's runs on one case."""

    method: str
    title: str
    counted: tuple[Record, ...]
    """In the order of their seeds."""
    excluded: tuple[Record, ...]
    """Runs with a problem."""
    missing: tuple[int, ...]
    """Seeds that other methods were run with and this one was not."""
    estimates: dict[str, Estimate] = field(default_factory=dict)

    @property
    def runs(self) -> tuple[Record, ...]:
        return (*self.counted, *self.excluded)

    @property
    def seeds(self) -> int:
        """How many seeds it was run with or is missing."""
        return len(self.runs) + len(self.missing)

    @property
    def applies(self) -> bool:
        """False if the method is not for such data."""
        return bool(self.counted) or any(run.applies for run in self.excluded)


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
        """Where the data come from: one entry a part of the data and a source of it, with the methods that had it
        where others had another."""
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
        """Which runs the means are without, and why; not of methods that do not apply."""
        found = []
        for method in (method for method in self.methods if method.applies):
            for run in method.excluded:
                found.append(f"{method.title}, seed {run.seed} (left out of the means): {run.problem}")
            if method.missing:
                found.append(f"{method.title}: no run with seed {', '.join(map(str, method.missing))}")
        return found


@dataclass(frozen=True)
class ExperimentSummary:
    """The cases of one experiment, or the one of a comparison."""

    name: str
    cases: tuple[CaseSummary, ...]

    @property
    def runs(self) -> list[Record]:
        return [run for case in self.cases for run in case.runs]

    @property
    def numbers(self) -> dict[str, int]:
        """The methods of all cases in one order, numbered."""
        names = {method.method for case in self.cases for method in case.methods}
        return {name: number for number, name in enumerate(sorted(names, key=order))}


def summarize(records: Iterable[Record]) -> list[ExperimentSummary]:
    """Runs by experiment, case and method; those with a problem are kept and left out of the means."""
    grouped: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        grouped.setdefault(record.experiment, {}).setdefault(record.case, []).append(record)
    return [
        ExperimentSummary(
            name, tuple(summarize_case(name, case, grouped[name][case]) for case in sorted(grouped[name], key=natural))
        )
        for name in sorted(grouped, key=natural)
    ]


def summarize_case(experiment: str, case: str, records: list[Record]) -> CaseSummary:
    methods: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: record.seed):
        methods.setdefault(record.method, []).append(record)
    seeds = {record.seed for record in records}
    summaries = (summarize_method(name, methods[name], seeds) for name in sorted(methods, key=order))
    return CaseSummary(experiment, case, records[0].task, tuple(summaries))


def summarize_method(name: str, runs: list[Record], seeds: set[int]) -> MethodSummary:
    counted = tuple(run for run in runs if run.problem is None)
    figures = dict.fromkeys(figure for run in counted for figure in run.figures)
    means = {
        figure: estimate(
            [run.figures[figure] for run in counted if figure in run.figures],
            [run.errors[figure] for run in counted if figure in run.errors],
        )
        for figure in figures
    }
    excluded = tuple(run for run in runs if run.problem is not None)
    missing = tuple(sorted(seeds - {run.seed for run in runs}))
    return MethodSummary(name, runs[0].title, counted, excluded, missing, means)


def described(data: Mapping[str, Any]) -> dict[str, str]:
    """Parts of data in words, without digests; a part with parts of its own on one line."""

    def line(words: Any) -> str:
        if not isinstance(words, dict):
            return str(words)
        return "; ".join(f"{part}: {text}" for part, text in described(words).items())

    return {part: line(words) for part, words in data.items() if part != "sha256"}


def natural(text: str) -> list[tuple[int, float, str]]:
    """A key by which 9 comes before 10, and 0.25 before 0.5."""
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return [(0, float(part), part) if part[:1].isdecimal() else (1, 0.0, part) for part in parts if part]


def order(method: str) -> tuple[bool, int, list[tuple[int, float, str]]]:
    """A key for the order of the registry, with variants after their method, and FMGP last."""
    from posthoc.methods import REGISTRY

    places = [i for i, name in enumerate(REGISTRY) if method == name or method.startswith((f"{name}-", f"{name}_"))]
    return (method.startswith("fmgp"), min(places, default=len(REGISTRY)), natural(method))


# Columns.


def columns_for(figures: Iterable[str], costs: Iterable[str] = ()) -> tuple[list[Column], list[Column]]:
    """The columns of a first and of a second table: the usual metrics, those of a task of its own, and costs; then the
    further ones."""
    there, costs = dict.fromkeys(figures), set(costs) | set(COSTS)
    own = [Column(figure, title_of(figure)) for figure in there if figure not in COLUMNS]
    main = [COLUMNS[figure] for figure in COLUMNS if figure in there and figure not in (*FURTHER, *COSTS)]
    main += [column for column in own if column.figure not in costs]
    main += [COLUMNS[figure] for figure in COSTS if figure in there]
    times = [c for c in own if c.figure in costs and c.figure.endswith("_seconds")]
    main += [Column(c.figure, f"{c.title.removesuffix(' seconds')}, s", seconds, LOW) for c in times]
    further = [COLUMNS[figure] for figure in FURTHER if figure in there]
    return main, further + [column for column in own if column.figure in costs and column not in times]


def columns_of(case: CaseSummary) -> tuple[list[Column], list[Column]]:
    """The columns of a case that there are figures for, those of the first table and further ones."""
    figures = dict.fromkeys(figure for method in case.methods for figure in method.estimates)
    metrics = {figure for run in case.runs for figure in run.metrics}
    return columns_for(figures, [figure for figure in figures if figure not in metrics])


def title_of(figure: str) -> str:
    return COLUMNS[figure].title if figure in COLUMNS else figure.replace("_", " ")


def places_of(column: Column, estimates: Estimates) -> dict[str, int]:
    """The names that are first (1) and second (2) in a column. What is written the same shares a place, and the places
    after it are then missing; where all are the same there is none."""
    known = {name: found.mean for name, found in estimates.items() if not math.isnan(found.mean)}
    if column.best is None:
        return {}
    ranked = sorted(known, key=lambda name: column.badness(known[name]))
    texts = [column.write(known[name]) for name in ranked]
    if len(set(texts)) < 2:
        return {}
    places = {name: 1 + texts.index(text) for name, text in zip(ranked, texts, strict=True)}
    return {name: place for name, place in places.items() if place < 3}


def written(column: Column, found: Estimate | None) -> str:
    """Mean ± standard error."""
    if found is None:
        return "–"
    mean = column.write(found.mean)
    return mean if found.error is None else f"{mean} ± {spread(column, found)}"


def spread(column: Column, found: Estimate) -> str:
    """The standard error, with as many decimals as the mean is written with."""
    if found.error is None:
        raise ValueError("the error is not known")
    if column.write is megabytes:
        return megabytes(found.error)
    _, _, fraction = column.write(found.mean).partition(".")
    if "e" in fraction:
        return f"{found.error:.1e}"
    if not fraction and found.error < 1:
        return f"{found.error:.1g}"  # rather than none
    return f"{found.error:,.{len(fraction)}f}"


# Tables: a row a method. `rows` holds the estimates of each method by figure.

Rows = Mapping[str, Estimates]


def column_places(column: Column, rows: Rows) -> dict[str, int]:
    return places_of(column, {name: row[column.figure] for name, row in rows.items() if column.figure in row})


def rich_table(columns: Sequence[Column], rows: Rows, title: str = "") -> Table:
    """For the screen; the best are marked by signs too, for screens without colors."""
    from rich.table import Table

    caption = "¹ best, ² second best"
    table = Table(title=title or None, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("")
    styles, marks = {1: "bold green", 2: "underline", None: ""}, {1: "¹", 2: "²", None: " "}
    places = [column_places(column, rows) for column in columns]
    for column in columns:
        table.add_column(column.heading, justify="right")
    for name, row in rows.items():
        cells = []
        for column, place in zip(columns, places, strict=True):
            found = row.get(column.figure)
            text = (column.write(found.mean) if found else "–") + marks[place.get(name)]
            style = styles[place.get(name)]
            cells.append(f"[{style}]{text}[/]" if style else text)
        table.add_row(name, *cells)
    return table


def markdown_table(columns: Sequence[Column], rows: Rows, *, last: Mapping[str, str] | None = None) -> str:
    """For a page: the best in bold, the second best in italics.

    Args:
        columns: Which figures.
        rows: Estimates by figure of each method.
        last: Words of each method for a last column, whose heading is under the empty name.
    """
    headings = [column.heading for column in columns] + ([last[""]] if last else [])
    lines = [f"| method | {' | '.join(map(escape_markdown, headings))} |", "|---|" + "---:|" * len(headings)]
    around = {1: "**", 2: "*", None: ""}
    places = [column_places(column, rows) for column in columns]
    for name, row in rows.items():
        marks = [around[place.get(name)] for place in places]
        cells = [f"{m}{written(c, row.get(c.figure))}{m}" for c, m in zip(columns, marks, strict=True)]
        lines.append(f"| {' | '.join((escape_markdown(name), *cells, *([last[name]] if last else [])))} |")
    return "\n".join(lines) + "\n"


def csv_table(rows: Rows, more: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    """For a program: every figure and its standard error (`_se`), with all digits.

    Args:
        rows: Estimates by figure of each method.
        more: Further values by name of each method, for columns before the figures.
    """
    more = more if more is not None else {name: {"method": name} for name in rows}
    figures = dict.fromkeys(figure for row in rows.values() for figure in row)
    uncertain = {figure for row in rows.values() for figure, found in row.items() if found.error is not None}
    columns = [name for f in figures for name in ((f, f"{f}_se") if f in uncertain else (f,))]
    first = dict.fromkeys(key for each in more.values() for key in each)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*first, *columns], lineterminator="\n", restval="")
    writer.writeheader()
    for name, row in rows.items():
        values = {figure: found.mean for figure, found in row.items()}
        errors = {f"{figure}_se": found.error for figure, found in row.items() if found.error is not None}
        writer.writerow({**more[name], **values, **errors})
    return text.getvalue()


def escape_markdown(text: str) -> str:
    """Text that stays what it is inside a table."""
    return re.sub(r"([\\`*_{}\[\]<>|#~$])", r"\\\1", " ".join(text.split()))
