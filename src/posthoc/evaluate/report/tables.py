"""Tables of figures, a row a method, the best and second best of each column marked."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from posthoc.errors import OptionError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Column", "columns_of", "csv_table", "markdown_table", "places", "rich_table"]

Figures = Mapping[str, Mapping[str, float]]
"""Figures by name, of methods by name."""
MARKS = {1: "¹", 2: "²", None: ""}
KEY = "¹ best, ² second best"


@dataclass(frozen=True)
class Column:
    """A figure, how it is called and written, and which way it is better."""

    figure: str
    title: str
    better: Literal["low", "high"]
    write: Callable[[float], str]

    @property
    def heading(self) -> str:
        """With an arrow to where it is better."""
        return f"{self.title} {'↑' if self.better == 'high' else '↓'}"


def decimals(value: float) -> str:
    return f"{value:.4f}"


def digits(value: float) -> str:
    """Four significant ones, for figures in the user's units; no exponent that can be done without."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:#.4g}"


def seconds(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def megabytes(value: float) -> str:
    return f"{value / 1e6:,.0f}"


COSTS = (
    Column("fit_seconds", "fit, s", "low", seconds),
    Column("predict_seconds", "predict, s", "low", seconds),
    Column("peak_memory", "memory, MB", "low", megabytes),
)
COLUMNS = {
    "classification": (
        Column("nll", "NLL", "low", decimals),
        Column("accuracy", "accuracy", "high", decimals),
        Column("ece", "ECE", "low", decimals),
        Column("brier", "Brier", "low", decimals),
        Column("ood_auc", "OOD AUC", "high", decimals),
        *COSTS,
    ),
    "regression": (
        Column("nll", "NLL", "low", decimals),
        Column("rmse", "RMSE", "low", digits),
        Column("crps", "CRPS", "low", digits),
        Column("cqm", "CQM", "low", decimals),
        *COSTS,
    ),
}


def columns_of(task: str, figures: Figures) -> list[Column]:
    """Those of a task that there are figures for."""
    if task not in COLUMNS:
        raise OptionError(f"Expected a task among {', '.join(COLUMNS)}, got {task!r}.")
    return [column for column in COLUMNS[task] if any(column.figure in row for row in figures.values())]


def places(column: Column, figures: Figures) -> dict[str, int | None]:
    """Who is first (1) and second (2) in a column. What is written the same shares a place, and the places after it are
    then missing; where all are the same there is none."""
    values = {name: row[column.figure] for name, row in figures.items() if column.figure in row}
    values = {name: value for name, value in values.items() if not math.isnan(value)}
    order = sorted(values, key=lambda name: values[name], reverse=column.better == "high")
    written = [column.write(values[name]) for name in order]
    place = {name: 1 + written.index(text) for name, text in zip(order, written, strict=True)}
    differ = len(set(written)) > 1
    return {name: place[name] if differ and place.get(name, 3) < 3 else None for name in figures}


def rich_table(task: str, figures: Figures, title: str = "") -> Table:
    """For the screen; marks are letters too, so that they survive where there are no colours."""
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", caption=KEY, caption_justify="left")
    table.add_column("")
    styles = {1: "bold green", 2: "underline", None: ""}
    columns = columns_of(task, figures)
    marks = [places(column, figures) for column in columns]
    for column in columns:
        table.add_column(column.heading, justify="right")
    for name, row in figures.items():
        cells = []
        for column, place in zip(columns, marks, strict=True):
            style, text = styles[place[name]], cell(column, row) + (MARKS[place[name]] or " ")
            cells.append(f"[{style}]{text}[/]" if style else text)
        table.add_row(name, *cells)
    return table


def markdown_table(task: str, figures: Figures) -> str:
    """For a page: the best in bold, the second best in italics."""
    columns = columns_of(task, figures)
    marks = [places(column, figures) for column in columns]
    around = {1: "**", 2: "*", None: ""}
    lines = [
        f"| method | {' | '.join(column.heading for column in columns)} |",
        "|---|" + "---:|" * len(columns),
    ]
    for name, row in figures.items():
        cells = (
            f"{around[place[name]]}{cell(c, row)}{around[place[name]]}" for c, place in zip(columns, marks, strict=True)
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def csv_table(figures: Figures) -> str:
    """For a program: every figure, with all its digits."""
    names = list(dict.fromkeys(figure for row in figures.values() for figure in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", *names])
    writer.writerows([method, *(row.get(name, "") for name in names)] for method, row in figures.items())
    return text.getvalue()


def cell(column: Column, row: Mapping[str, float]) -> str:
    return column.write(row[column.figure]) if column.figure in row else "–"
