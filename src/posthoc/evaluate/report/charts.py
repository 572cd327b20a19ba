"""The charts of a case as SVG: all methods as lines where lines can be told apart, else one small chart a method."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np
from markupsafe import Markup

from posthoc.evaluate import plots
from posthoc.evaluate.report.records import Curve
from posthoc.evaluate.report.summary import CaseSummary, MethodSummary
from posthoc.evaluate.report.tables import column_of
from posthoc.optional import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE = {
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), plots.SOFT),
    **dict.fromkeys(("axes.linewidth", "xtick.major.width", "ytick.major.width"), 0.6),
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "font.size": 9,
    "grid.color": plots.RULE,
    "grid.linewidth": 0.7,
    "svg.fonttype": "none",
    "text.color": plots.INK,
    "text.parse_math": False,
}
VARIABLES = {
    **{color: f"var(--s{index})" for index, color in enumerate(plots.COLORS)},
    plots.INK: "var(--ink)",
    plots.SOFT: "var(--soft)",
    plots.RULE: "var(--rule)",
    "#000000": "var(--soft)",
    "#ffffff": "var(--card)",
}
"""Colors of charts as variables of the style sheet, which has others for dark mode."""
PANELS = {
    "reliability": ("Reliability", "ece"),
    "entropy": ("Entropy", "ood_auc"),
    "error_bars": ("Intervals", "coverage_90"),
    "band": ("Prediction", "nll"),
}
"""Curves that are drawn in a chart a method, in this order: what they show, and the figure above them."""
NOTES = {"level": "on the diagonal as promised", "coverage": "lower is better"}
"""What charts of all methods show, by their x."""
HEADROOM = 0.6
"""How far charts of bands reach beyond the data, in units of the data's range; bands that leave them are cut."""

Draw = Callable[["Axes"], Any]


@dataclass(frozen=True)
class Chart:
    """One chart: its heading, a figure of what it shows, and the SVG."""

    title: str
    note: str
    svg: Markup


@dataclass(frozen=True)
class Block:
    """Charts of one kind: "lines" of all methods with their legend, or one of `PANELS`."""

    kind: str
    charts: list[Chart]
    legend: Sequence[tuple[int, str, Markup]] = ()


def blocks_of(case: CaseSummary, numbers: Mapping[str, int], name: str) -> list[Block]:
    """Every block of charts that there are curves for.

    Args:
        case: The methods, with their runs.
        numbers: A number for each method, whose lines look the same in all charts of an experiment.
        name: The beginning of all ids in the charts.
    """
    ids = (f"{name}-{number}" for number in itertools.count())
    blocks = []
    if charts := line_charts(case, numbers, ids):
        shown = [method for method in case.methods if any(run.curves for run in method.counted)]
        drawn = [(numbers[method.method], method.title) for method in shown]
        legend = [(n, title, draw_svg(partial(draw_swatch, n), "", next(ids), (0.47, 0.19))) for n, title in drawn]
        blocks.append(Block("lines", charts, legend))
    return blocks + [Block(kind, charts) for kind in PANELS if (charts := panel_charts(case, kind, ids))]


def line_charts(case: CaseSummary, numbers: Mapping[str, int], ids: Iterator[str]) -> list[Chart]:
    """Charts with a line a method: figures along rotations or severities, coverage by level, and risk by coverage."""
    every = [curve for method in case.methods for run in method.counted for curve in run.curves.items()]
    by = dict.fromkeys((name, y) for name, curve in every if name.startswith("by ") for y in curve if y != "x")
    risk = "error rate" if case.task == "classification" else "mean squared error"
    kinds = [(f"{column_of(y).title} {name}", name[3:], column_of(y).title, name, "x", y) for name, y in by]
    kinds += [
        ("Coverage of intervals", "promised coverage", "actual coverage", "calibration", "level", "coverage"),
        ("Risk and coverage", "share of rows kept, the most certain first", risk, "risk_coverage", "coverage", "risk"),
    ]
    charts = []
    for title, xlabel, ylabel, name, x, y in kinds:
        titles, lines = [], []
        for method in case.methods:
            if curves := [curve for curve in curves_of(method, name) if y in curve]:
                mean, error = mean_curve(curves, x)
                titles.append(method.title)
                lines.append((numbers[method.method], mean[x], mean[y], error[y] if x == "x" else None))
        if lines:
            label = f"{title}. A line for each of {', '.join(titles)}; {ylabel} against {xlabel}."
            draw = partial(draw_lines, lines=lines, kind=x, xlabel=xlabel, ylabel=ylabel)
            charts.append(Chart(title, NOTES.get(x, ""), draw_svg(draw, label, next(ids), (4.4, 2.9))))
    return charts


def draw_lines(ax: Axes, lines: Sequence[tuple[int, Any, Any, Any]], kind: str, xlabel: str, ylabel: str) -> None:
    """The lines of all methods, each with its number, x, y and error; `kind` is the column of x."""
    for line in lines:
        plots.draw_line(ax, *line)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    if kind == "level":
        ax.plot([0, 1], [0, 1], color=plots.SOFT, linestyle="dashed", linewidth=1)
        ax.set(xlim=(0, 1), ylim=(0, 1))
    elif kind == "coverage":  # the risk of the first few rows is noise that would set the scale
        ax.set_ylim(plots.range_of(y[len(y) // 10 :] for _, _, y, _ in lines))


def panel_charts(case: CaseSummary, kind: str, ids: Iterator[str]) -> list[Chart]:
    """A chart a method of one of `PANELS`, on scales that the methods share."""
    shown, figure = PANELS[kind]
    curves = {method: each for method in case.methods if (each := curves_of(method, kind))}
    if not curves:
        return []
    charts = []
    for method, draw in zip(curves, panel_drawings(kind, list(curves.values())), strict=True):
        found = method.estimates.get(figure)
        note = f"{column_of(figure).title}: {found.mean:.4f}" if found else ""
        size = (4.2 if kind == "band" else 3.0, 2.8)
        charts.append(Chart(method.title, note, draw_svg(draw, f"{shown}: {method.title}. {note}", next(ids), size)))
    return charts


def panel_drawings(kind: str, curves: list[list[Curve]]) -> list[Draw]:
    """The drawings of each method's curves."""
    if kind == "reliability":
        return [partial(plots.draw_reliability, curve=pooled_reliability(each)) for each in curves]
    if kind == "entropy":
        means = [mean_curve(each, "edges")[0] for each in curves]
        top = max(float(np.nan_to_num(mean[name]).max()) for mean in means for name in ("in", "out") if name in mean)
        return [partial(plots.draw_entropy, curve=mean, top=top) for mean in means]
    first = [each[0] for each in curves]
    if kind == "error_bars":
        # The intervals of a very uncertain method would flatten all others: targets and means set the scale.
        span = plots.range_of(curve[name] for curve in first for name in ("target", "mean"))
        return [partial(plots.draw_intervals, curve=curve, span=span) for curve in first]
    data = [curve["points"][:, 1] if "points" in curve else curve["mean"] for curve in first]
    return [partial(plots.draw_band, curve=curve, span=plots.range_of(data, HEADROOM)) for curve in first]


def draw_swatch(number: int, ax: Axes) -> None:
    """A line of the legend."""
    plots.draw_line(ax, number, (0.0, 0.5, 1.0), (0.0, 0.0, 0.0))
    ax.lines[0].set_markevery([1])
    ax.set(xlim=(-0.1, 1.1), ylim=(-1, 1), position=(0, 0, 1, 1))
    ax.axis("off")


def draw_svg(draw: Draw, label: str, name: str, size: tuple[float, float]) -> Markup:
    """A chart of a size in inches, ready to stand in a page where no other has its name."""
    matplotlib = require("matplotlib", "plots", "Drawing the charts of a report")
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": name}):  # ids follow from it
        from matplotlib.figure import Figure

        figure = Figure(size, facecolor="none")
        left = min(0.69 / size[0], 0.3)  # inches for labels
        ax = figure.add_axes((left, 0.17, 0.95 - left, 0.76), facecolor="none")
        plots.bare(ax)
        draw(ax)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = " ".join(file.getvalue().split())
    root = ElementTree.fromstring(text)
    root.remove(root[0])  # a style, which the page has itself
    for element in root.iter():
        tidy(element, set(re.findall(r"#(\w+)", text)))
    chart, swatch = {"class": "chart", "role": "img", "aria-label": label}, {"class": "swatch", "aria-hidden": "true"}
    root.attrib = {"viewBox": root.attrib["viewBox"], **(chart if label else swatch)}
    return Markup(ElementTree.tostring(root, encoding="unicode"))  # ElementTree has escaped all text


def tidy(element: ElementTree.Element, references: Container[str]) -> None:
    """Makes styles of an SVG's element attributes, which the page's policy allows, and colors variables of its style
    sheet. A group `series-N` gets a class and its number; other ids stay if something refers to them."""
    element.tag = element.tag.rpartition("}")[2]
    attributes = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
    for declaration in filter(None, attributes.pop("style", "").split(";")):
        name, value = (part.strip() for part in declaration.split(":", 1))
        if name not in ("font-family", "font"):
            attributes[name] = VARIABLES.get(value, value)
    name = attributes.pop("id", "")
    if name.startswith("series-"):
        attributes |= {"class": "series", "data-m": name.removeprefix("series-")}
    elif name in references:
        attributes["id"] = name
    element.attrib = attributes


# Curves of several seeds as one.


def curves_of(method: MethodSummary, name: str) -> list[Curve]:
    """The curves of a name of all runs that count."""
    return [run.curves[name] for run in method.counted if name in run.curves]


def mean_curve(curves: Sequence[Curve], along: str) -> tuple[Curve, Curve]:
    """The mean and standard error (0 of one curve) of each column, over curves along the same places as the first."""
    alike = [curve for curve in curves if np.array_equal(curve[along], curves[0][along])]
    means, errors = {along: curves[0][along]}, {}
    for name in (name for name in alike[0] if name != along and all(name in curve for curve in alike)):
        values = np.ma.masked_invalid(np.stack([curve[name] for curve in alike]))
        means[name] = values.mean(0).filled(np.nan)
        errors[name] = (values.std(0, ddof=1) / np.sqrt(values.count(0))).filled(0.0)
    return means, errors


def pooled_reliability(curves: Sequence[Curve]) -> Curve:
    """The bins of all seeds, weighted by shares of points; counts are averaged, as all have the same test rows."""
    names = [name for name in curves[0] if all(name in curve for curve in curves)]
    columns = {name: np.stack([curve[name] for curve in curves]) for name in names}
    share = columns["share"]
    pooled = {name: column.mean(0) for name, column in columns.items()}
    with np.errstate(invalid="ignore"):  # an empty bin has no means
        means = {name: np.nansum(share * columns[name], 0) / share.sum(0) for name in ("confidence", "accuracy")}
    return pooled | means
