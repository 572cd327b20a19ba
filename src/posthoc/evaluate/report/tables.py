"""Columns of figures, the best and second best of each, and tables for the screen, for a page and for a program."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posthoc.evaluate.report.records import is_cost
from posthoc.evaluate.report.summary import Estimate, Estimates

if TYPE_CHECKING:
    from rich.table import Table

LOW, HIGH = -math.inf, math.inf
decimals = "{:.4f}".format


def digits(value: float) -> str:
    """Four significant digits, for figures in the user's units; an exponent only for very large and small ones."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:#.4g}"


def seconds(value: float) -> str:
    """A time as text, in seconds."""
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def megabytes(value: float) -> str:
    """A number of bytes as text, in megabytes."""
    return f"{value / 1e6:,.0f}"


@dataclass(frozen=True)
class Column:
    """A figure: its title, how it is written, and where it is best.

    Args:
        figure: Its name in JSON.
        title: Its heading.
        write: From a value to text.
        best: Minus or plus infinity, a value to be near to, or None where no value is better than another.
        further: Whether it is in a second table.
    """

    figure: str
    title: str
    write: Callable[[float], str] = digits
    best: float | None = None
    further: bool = False

    @property
    def heading(self) -> str:
        """The title and an arrow to where the figure is better."""
        if self.best is None:
            return self.title
        return f"{self.title} {({LOW: '↓', HIGH: '↑'}).get(self.best, f'→ {self.best:g}')}"


COLUMNS = {
    column.figure: column
    for column in (
        Column("nll", "NLL", decimals, LOW),
        Column("accuracy", "accuracy", decimals, HIGH),
        Column("ece", "ECE", decimals, LOW),
        Column("brier", "Brier", decimals, LOW),
        Column("ood_auc", "OOD AUC", decimals, HIGH),
        Column("ood_score_auc", "OOD score AUC", decimals, HIGH),
        Column("classes_moved", "classes moved", decimals, None),
        Column("rmse", "RMSE", digits, LOW),
        Column("crps", "CRPS", digits, LOW),
        Column("cqm", "CQM", decimals, LOW),
        Column("coverage_90", "cover 90 %", decimals, 0.9),
        Column("width_90", "width 90 %", digits, None),
        Column("interval_score_90", "interval score 90 %", digits, LOW, further=True),
        Column("smooth_ece", "smooth ECE", decimals, LOW, further=True),
        Column("mae", "MAE", digits, LOW, further=True),
        Column("pit_error", "PIT error", decimals, LOW, further=True),
        Column("coverage_50", "cover 50 %", decimals, 0.5, further=True),
        Column("coverage_95", "cover 95 %", decimals, 0.95, further=True),
        Column("aurc", "AURC", digits, LOW, further=True),
        Column("ood_fpr95", "OOD FPR at 95 %", decimals, LOW, further=True),
        Column("fit_seconds", "fit, s", seconds, LOW),
        Column("predict_seconds", "predict, s", seconds, LOW),
        Column("peak_memory", "memory, MB", megabytes, LOW),
        Column("fit_memory", "fit, MB", megabytes, LOW, further=True),
        Column("predict_memory", "predict, MB", megabytes, LOW, further=True),
    )
}
"""What is known of the usual figures, in their order."""


def column_of(figure: str) -> Column:
    """The usual column of a figure, or one for a figure that is not known."""
    if figure in COLUMNS:
        return COLUMNS[figure]
    if figure.endswith("_seconds"):
        return Column(figure, f"{figure.removesuffix('_seconds').replace('_', ' ')}, s", seconds, LOW)
    return Column(figure, figure.replace("_", " "), further=is_cost(figure))


def columns_of(figures: Iterable[str]) -> tuple[list[Column], list[Column]]:
    """The columns of a first and of a second table: the usual metrics, those of a task of its own, and costs."""
    usual = list(COLUMNS)
    columns = [column_of(figure) for figure in dict.fromkeys(figures)]
    columns.sort(key=lambda c: (is_cost(c.figure), usual.index(c.figure) if c.figure in COLUMNS else len(usual)))
    return [column for column in columns if not column.further], [column for column in columns if column.further]


def places_of(column: Column, estimates: Estimates) -> dict[str, int]:
    """The names that are first (1) and second (2) in a column. What is written the same shares a place, and the places
    after it are then missing; where all are the same there is none."""
    best = column.best
    if best is None:
        return {}
    known = {name: found.mean for name, found in estimates.items() if not math.isnan(found.mean)}
    badness = {name: {LOW: value, HIGH: -value}.get(best, abs(value - best)) for name, value in known.items()}
    ranked = sorted(known, key=lambda name: badness[name])
    texts = [column.write(known[name]) for name in ranked]
    places = {name: 1 + texts.index(text) for name, text in zip(ranked, texts, strict=True)}
    return {name: place for name, place in places.items() if place < 3 and len(set(texts)) > 1}


def written(column: Column, found: Estimate | None, *, error: bool = True) -> str:
    """Mean ± standard error."""
    if found is None:
        return "–"
    mean = column.write(found.mean)
    return mean if found.error is None or not error else f"{mean} ± {spread(column, found)}"


def spread(column: Column, found: Estimate) -> str:
    """The standard error, with as many decimals as the mean is written with."""
    error = found.error or 0.0
    if column.write is megabytes:
        return megabytes(error)
    fraction = column.write(found.mean).partition(".")[2]
    if "e" in fraction:
        return f"{error:.1e}"
    return f"{error:,.{len(fraction)}f}" if fraction or error >= 1 else f"{error:.1g}"


# Tables: a row a method. `rows` holds the estimates of each method by figure.

Rows = Mapping[str, Estimates]


def marked_cells(columns: Sequence[Column], rows: Rows, marks: Sequence[str], *, error: bool) -> dict[str, list[str]]:
    """The cells of each row, with the best and the second best of a column in their marks."""
    cells: dict[str, list[str]] = {name: [] for name in rows}
    for column in columns:
        places = places_of(column, {name: row[column.figure] for name, row in rows.items() if column.figure in row})
        for name, row in rows.items():
            cells[name].append(marks[places.get(name, 0)].format(written(column, row.get(column.figure), error=error)))
    return cells


def rich_table(columns: Sequence[Column], rows: Rows, title: str = "") -> Table:
    """For the screen; the best are marked by signs too, for screens without colors."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("", title=title, title_justify="left", caption="¹ best, ² second best", caption_justify="left")
    for column in columns:
        table.add_column(column.heading, justify="right")
    marks = ("{} ", "[bold green]{}¹[/]", "[underline]{}²[/]")
    for name, cells in marked_cells(columns, rows, marks, error=False).items():
        table.add_row(escape(name), *cells)
    return table


def markdown_table(columns: Sequence[Column], rows: Rows) -> str:
    """For a page: the best in bold, the second best in italics."""
    headings = " | ".join(escape_markdown(column.heading) for column in columns)
    lines = [f"| method | {headings} |", "|---|" + "---:|" * len(columns)]
    for name, cells in marked_cells(columns, rows, ("{}", "**{}**", "*{}*"), error=True).items():
        lines.append(f"| {' | '.join([escape_markdown(name), *cells])} |")
    return "\n".join(lines) + "\n"


def figures_and_errors(estimates: Estimates) -> dict[str, float]:
    """Means by the names of their figures, and standard errors by those names with `_se`."""
    columns: dict[str, float] = {}
    for figure, found in estimates.items():
        columns |= {figure: found.mean} | ({} if found.error is None else {f"{figure}_se": found.error})
    return columns


def csv_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """For a program: a line for each row, with all digits, and a column for each name in any of them."""
    rows = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def escape_markdown(text: str) -> str:
    """Text that stays what it is inside a table."""
    return re.sub(r"([\\`*_{}\[\]<>|#~$])", r"\\\1", " ".join(text.split()))
