"""The charts of a case as SVG: all methods as lines where lines can be told apart, else one small chart a method."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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

__all__ = ["Block", "Chart", "blocks_of"]

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
    "svg.hashsalt": "posthoc",
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
    if charts := [
        Chart(title, "", draw_svg(draw, f"{title}. {label}", next(ids), (4.4, 2.9), fitted=True))
        for title, label, draw in line_charts(case, numbers)
    ]:
        drawn = [method for method in case.methods if any(run.curves or run.lines for run in method.counted)]
        swatches = [draw_svg(partial(draw_swatch, numbers[each.method]), "", next(ids), (0.47, 0.19)) for each in drawn]
        legend = [(numbers[each.method], each.title, swatch) for each, swatch in zip(drawn, swatches, strict=True)]
        blocks.append(Block("lines", charts, legend))
    for kind, (shown, figure) in PANELS.items():
        having = [(method, curves) for method in case.methods if (curves := curves_of(method, kind))]
        if not having:
            continue
        blocks.append(Block(kind, []))
        for (method, curves), draw in zip(having, panels(kind, [curves for _, curves in having]), strict=True):
            note = ""
            if kind == "error_bars":
                note = "{} of {} hold".format(*plots.intervals_held(curves[0]))
            elif found := method.estimates.get(figure):
                note = f"{column_of(figure).title} {found.mean:.4f}"
            size = (4.2 if kind == "band" else 3.0, 2.8)
            svg = draw_svg(draw, f"{shown}: {method.title}. {note}", next(ids), size)
            blocks[-1].charts.append(Chart(method.title, note, svg))
    return blocks


def line_charts(case: CaseSummary, numbers: Mapping[str, int]) -> Iterator[tuple[str, str, Draw]]:
    """Title, description and drawing of charts with a line a method: figures along rotations, severities or whatever
    else, coverage by level, and risk by coverage."""
    every = [line for method in case.methods for run in method.counted for line in run.lines.items()]
    along = dict.fromkeys((name, y) for name, line in every for y in line if y != "x")
    risk = "error rate" if case.task == "classification" else "mean squared error"
    kinds = [(f"{column_of(y).title} by {name}", name, column_of(y).title, name, "x", y) for name, y in along]
    kinds += [
        ("Coverage of intervals", "promised coverage", "actual coverage", "calibration", "level", "coverage"),
        ("Risk and coverage", "share of rows kept, the most certain first", risk, "risk_coverage", "coverage", "risk"),
    ]
    for title, xlabel, ylabel, name, x, y in kinds:
        drawn = {}
        for method in case.methods:
            if curves := [curve for curve in curves_of(method, name, lines=x == "x") if y in curve]:
                mean, error = mean_curve(curves, x)
                drawn[method.title, numbers[method.method]] = (mean[x], mean[y], error[y] if x == "x" else None)
        if drawn:
            label = f"A line for each of {', '.join(title for title, _ in drawn)}; {ylabel} against {xlabel}."
            lines = {number: line for (_, number), line in drawn.items()}
            yield title, label, partial(draw_lines, lines=lines, kind=name, xlabel=xlabel, ylabel=ylabel)


def draw_lines(ax: Axes, lines: Mapping[int, tuple[Any, Any, Any]], kind: str, xlabel: str, ylabel: str) -> None:
    """The lines of all methods: x, y and error by the method's number."""
    for number, line in lines.items():
        plots.draw_line(ax, number, *line)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    if kind == "calibration":
        ax.plot([0, 1], [0, 1], color=plots.SOFT, linestyle="dashed", linewidth=1)
        ax.set(xlim=(0, 1), ylim=(0, 1))
    elif kind == "risk_coverage":  # the risk of the first few rows is noise that would set the scale
        ax.set_ylim(plots.range_of(y[len(y) // 10 :] for _, y, _ in lines.values()))


def panels(kind: str, curves: list[list[Curve]]) -> list[Draw]:
    """The drawings of each method's curves, on scales that they share."""
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


def draw_svg(draw: Draw, label: str, name: str, size: tuple[float, float], *, fitted: bool = False) -> Markup:
    """A chart of a size in inches, ready to stand in a page.

    Styles become attributes, which the page's policy allows; colors become variables of the style sheet; ids begin with
    `name`; groups `series-N` get a class and their number. `fitted` gives labels the room they need, which takes longer
    than margins.
    """
    with require("matplotlib", "plots", "Drawing the charts of a report").rc_context(STYLE):
        from matplotlib.figure import Figure

        figure = Figure(size, layout="constrained" if fitted else None, facecolor="none")
        ax = figure.add_subplot(facecolor="none")
        if not fitted:
            ax.set_position((0.23, 0.17, 0.72, 0.79))
        plots.bare(ax)
        draw(ax)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())
    described = {"class": "chart", "role": "img", "aria-label": label}
    viewbox = root.attrib["viewBox"]
    for child in [*root]:  # without metadata, and definitions of a style that the page has itself
        if not child.tag.endswith("}g") and child.find(".//{*}clipPath") is None:
            root.remove(child)
    for element in root.iter():
        tidy(element, name)
    root.attrib = {"viewBox": viewbox, **(described if label else {"class": "swatch", "aria-hidden": "true"})}
    return Markup(ElementTree.tostring(root, encoding="unicode"))  # ElementTree has escaped all text


def tidy(element: ElementTree.Element, prefix: str) -> None:
    """One element of an SVG as `draw_svg` wants it."""
    element.tag = element.tag.rpartition("}")[2]
    element.tail = None
    element.text = element.text if element.text and element.text.strip() else None
    attributes = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
    for declaration in attributes.pop("style", "").split(";"):
        name, _, value = declaration.partition(":")
        if name.strip() not in ("", "font-family", "font"):
            attributes[name.strip()] = VARIABLES.get(value.strip(), value.strip())
    if "d" in attributes:
        attributes["d"] = " ".join(attributes["d"].split())
    name = attributes.pop("id", "")
    if name.startswith("series-"):
        attributes |= {"class": "series", "data-m": name.removeprefix("series-")}
    elif re.fullmatch(r"[mpC]\w*[0-9a-f]{6,}\w*", name):  # markers and clip paths are referred to, groups are not
        attributes["id"] = f"{prefix}-{name}"
    for key in ("href", "clip-path"):
        if key in attributes:
            attributes[key] = attributes[key].replace("#", f"#{prefix}-")
    element.attrib = attributes


# Curves of several seeds as one.


def curves_of(method: MethodSummary, name: str, *, lines: bool = False) -> list[Curve]:
    """The curves, or the lines, of a name, of all runs that count."""
    return [curve for run in method.counted if (curve := (run.lines if lines else run.curves).get(name))]


def mean_curve(curves: Sequence[Curve], along: str) -> tuple[Curve, Curve]:
    """The mean of each column over the curves that are along the same places as the first, and the standard error (0
    of one curve)."""
    alike = [curve for curve in curves if np.array_equal(curve[along], curves[0][along])]
    means, errors = {along: curves[0][along]}, {}
    for name in (name for name in alike[0] if name != along and all(name in curve for curve in alike)):
        values = np.ma.masked_invalid(np.stack([curve[name] for curve in alike]))
        means[name] = values.mean(0).filled(np.nan)
        errors[name] = (values.std(0, ddof=1) / np.sqrt(values.count(0))).filled(0.0)
    return means, errors


def pooled_reliability(curves: Sequence[Curve]) -> Curve:
    """The bins of all seeds together, weighted by the share of points each holds. Counts are averaged: the seeds share
    their test rows."""
    alike = [curve for curve in curves if len(curve["share"]) == len(curves[0]["share"])]
    columns = {name: np.stack([curve[name] for curve in alike]) for name in ("share", "confidence", "accuracy")}
    weights = np.where(np.isfinite([*columns.values()]).all(0), columns["share"], 0.0)
    total = weights.sum(0)
    with np.errstate(invalid="ignore"):  # an empty bin has no means
        pooled = {name: np.where(weights > 0, weights * columns[name], 0.0).sum(0) / total for name in columns}
    if all("count" in curve for curve in alike):
        pooled["count"] = np.mean([curve["count"] for curve in alike], 0)
    return pooled | {"share": total / len(alike)}
