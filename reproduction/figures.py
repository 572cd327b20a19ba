"""Figures of the experiments, from the documents of their runs, on matplotlib (extra `reproduction`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import pyplot

from posthoc.evaluate import plots
from posthoc.io import atomic_path

__all__ = ["band_figure", "dependence_figure", "dot_figure", "group_by", "histogram_figure", "line_figure"]

Documents = Sequence[Mapping[str, Any]]

matplotlib.use("Agg")

COLORS = (
    *("#1b1b1f", "#b4532a", "#3b6fb6", "#2f8f6b", "#c79a1e", "#7a5bb5"),
    *("#c2588a", "#5a7d2a", "#4aa3c7", "#8a6f5a", "#9a9aa5", "#d0021b"),
)
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LEGEND = {"loc": "upper center", "ncol": 4, "frameon": False, "fontsize": 8, "bbox_to_anchor": (0.5, 0.0)}
"""The legend of a figure stands below it."""
HEADROOM = 0.75
"""How far the panels of `band_figure` extend beyond the data, in units of their range; wider bands are cut."""


def dot_figure(path: Path, documents: Documents, figures: Mapping[str, str]) -> list[Path]:
    """One panel for each figure: a marker for each method in groups of cases, with standard errors over seeds.

    Args:
        path: Where to write, without suffix.
        documents: Documents of runs.
        figures: Titles of the panels by the names of metrics.

    Returns:
        The paths of the PNG and of the PDF, as for all functions here.
    """
    cases, titles = group_by(documents, "case"), titles_of(documents)
    canvas, axes = panels(len(figures), 3, (4.6, 3.1))
    width = 0.8 / len(titles)
    for axis, (figure, title) in zip(axes, figures.items(), strict=True):
        for i, method in enumerate(titles):
            points = {}
            for j, runs in enumerate(cases.values()):
                values = [run["metrics"].get(figure) for run in runs if run["method"] == method]
                if any(value is not None for value in values):
                    points[j + (i - (len(titles) - 1) / 2) * width] = mean_and_error(values)
            means, errors = ([point[k] for point in points.values()] for k in (0, 1))
            style = {"color": COLORS[i % len(COLORS)], "fmt": MARKERS[i % len(MARKERS)], "markersize": 5}
            axis.errorbar(list(points), means, errors, label=titles[method], **style)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xticks(range(len(cases)), list(cases))
        axis.set_xlim(-0.5, len(cases) - 0.5)
        axis.grid(axis="y", color="#e6e6ea", linewidth=0.7)
        axis.set_axisbelow(True)
    canvas.legend(*axes[0].get_legend_handles_labels(), **LEGEND)
    return save(canvas, path)


def line_figure(path: Path, documents: Documents, line: str, figures: Mapping[str, str], label: str) -> list[Path]:
    """A row for each figure and a column for each case: a line for each method, means over seeds.

    Args:
        path: Where to write, without suffix.
        documents: Documents of runs.
        line: The name of the line in `document["curves"]["lines"]`.
        figures: Titles of the rows by the names of metrics.
        label: What the x axis is.
    """
    cases, titles = group_by(documents, "case"), titles_of(documents)
    size = (3.8 * len(cases), 3.0 * len(figures))
    canvas, axes = pyplot.subplots(len(figures), len(cases), figsize=size, squeeze=False, sharex=True, sharey="row")
    for column, (case, runs) in enumerate(cases.items()):
        axes[0][column].set_title(case, loc="left", fontsize=10)
        axes[-1][column].set_xlabel(label)
        for axis, figure in zip(axes[:, column], figures, strict=True):
            axis.spines[["top", "right"]].set_visible(False)
            for i, method in enumerate(titles):
                lines = [run["curves"]["lines"][line] for run in runs if run["method"] == method]
                if lines:
                    style = {"color": COLORS[i % len(COLORS)], "linestyle": DASHES[i % len(DASHES)], "linewidth": 1.4}
                    axis.plot(lines[0]["x"], mean_line([one[figure] for one in lines]), label=titles[method], **style)
    for axis, title in zip(axes[:, 0], figures.values(), strict=True):
        axis.set_ylabel(title)
    canvas.legend(*axes[0][0].get_legend_handles_labels(), **LEGEND)
    return save(canvas, path)


def dependence_figure(
    path: Path, documents: Documents, option: str, figures: Mapping[str, str], label: str
) -> list[Path]:
    """One panel for each figure: its dependence on an option, a line for each case, with standard errors."""
    canvas, axes = panels(len(figures), len(figures), (3.0, 2.6))
    for axis, (figure, title) in zip(axes, figures.items(), strict=True):
        for i, (case, runs) in enumerate(group_by(documents, "case").items()):
            values: dict[float, list[float]] = {}
            for run in runs:
                values.setdefault(run["configuration"]["options"][option], []).append(run["metrics"][figure])
            means, errors = zip(*(mean_and_error(values[x]) for x in sorted(values)), strict=True)
            axis.errorbar(sorted(values), means, errors, color=COLORS[2 + i], marker="o", markersize=3, label=case)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel(label)
    axes[0].legend(frameon=False, fontsize=8)
    return save(canvas, path)


def histogram_figure(path: Path, documents: Documents, inside: str, outside: str) -> list[Path]:
    """One panel for each method: entropies on test data and on out-of-distribution data, means over seeds.

    `inside` and `outside` are the names of the two data sets.
    """
    titles = titles_of(documents)
    methods = group_by(documents, "method")
    canvas, axes = panels(len(methods), 4, (3.4, 2.5))
    for axis, (method, runs) in zip(axes, methods.items(), strict=True):
        histograms = [run["curves"]["entropy"] for run in runs]
        means = {part: mean_line([histogram[part] for histogram in histograms]) for part in ("in", "out")}
        plots.draw_entropy(axis, {"edges": histograms[0]["edges"], **means})
        auc, _ = mean_and_error(run["metrics"]["ood_auc"] for run in runs)
        axis.set_title(f"{titles[method]}: AUC {auc:.3f}", loc="left", fontsize=9)
    axes[0].legend([inside, outside], frameon=False, fontsize=8)
    return save(canvas, path)


def band_figure(path: Path, documents: Documents) -> list[Path]:
    """One panel for each run of a function of one variable: mean, band and data, all to one scale."""
    canvas, axes = panels(len(documents), 3, (3.6, 2.6), sharex=True, sharey=True)
    for axis, run in zip(axes, documents, strict=True):
        band = run["curves"]["band"]
        plots.draw_band(axis, band, plots.range_of([np.array(band["points"])[:, 1]], HEADROOM))
        axis.set_title(run["title"], loc="left", fontsize=10)
    return save(canvas, path)


def panels(count: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, list[Any]]:
    """A canvas with `count` panels of this size in inches, in at most `columns` columns."""
    columns = min(count, columns)
    rows = -(-count // columns)
    canvas, axes = pyplot.subplots(rows, columns, figsize=(size[0] * columns, size[1] * rows), squeeze=False, **options)
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    for axis in axes.flat[:count]:
        axis.spines[["top", "right"]].set_visible(False)
    return canvas, list(axes.flat[:count])


def save(canvas: Any, path: Path) -> list[Path]:
    """Writes a figure as PNG and as PDF, without a date, so that the same figure gives the same file."""
    paths = [path.with_suffix(".png"), path.with_suffix(".pdf")]
    try:
        canvas.tight_layout()
        for place in paths:
            metadata = {"CreationDate": None} if place.suffix == ".pdf" else None
            with atomic_path(place) as temporary:
                canvas.savefig(temporary, dpi=150, format=place.suffix[1:], metadata=metadata, bbox_inches="tight")
    finally:
        pyplot.close(canvas)
    return paths


def group_by(documents: Documents, key: str) -> dict[Any, list[Mapping[str, Any]]]:
    """Documents by one of their entries, in their order."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for document in documents:
        groups.setdefault(document[key], []).append(document)
    return groups


def titles_of(documents: Documents) -> dict[str, str]:
    """Titles of the methods by their names."""
    return {document["method"]: document.get("title", document["method"]) for document in documents}


def mean_and_error(values: Iterable[float | None]) -> tuple[float, float]:
    """Mean and standard error (0 for one value) of the values that are not None; NaN where there are none."""
    known = np.array([value for value in values if value is not None])
    if not len(known):
        return float("nan"), 0.0
    return float(known.mean()), float(known.std(ddof=1) / len(known) ** 0.5) if len(known) > 1 else 0.0


def mean_line(lines: list[list[float]]) -> list[float]:
    """The mean of several lines at each point."""
    return [mean_and_error(values)[0] for values in zip(*lines, strict=True)]
