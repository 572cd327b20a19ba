"""The charts of a case as SVG: all methods as lines where lines can be told apart, else one small chart a method."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from markupsafe import Markup

from posthoc.evaluate import plots
from posthoc.evaluate.report.records import Curve
from posthoc.evaluate.report.tables import CaseSummary, MethodSummary, decimals, estimate, title_of
from posthoc.optional import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Block", "Chart", "Charts"]

STYLE = {
    "font.size": 9,
    "axes.edgecolor": plots.SOFT,
    "axes.labelcolor": plots.SOFT,
    "xtick.color": plots.SOFT,
    "ytick.color": plots.SOFT,
    "text.color": plots.INK,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": plots.RULE,
    "grid.linewidth": 0.7,
    "svg.fonttype": "none",
    "text.parse_math": False,
    "svg.hashsalt": "posthoc",
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
INCH = 72
HEADROOM = 0.6
"""How far charts of bands reach beyond the data, in units of the data's range; bands that leave them are cut."""

KINDS = ("reliability", "entropy", "error_bars", "band")
"""Curves that are drawn in a chart a method, in this order."""


@dataclass(frozen=True)
class Chart:
    """One chart: its heading, a figure of what it shows, and the SVG's parts."""

    title: str
    note: str
    label: str
    """What it shows, for those who listen to the page."""
    viewbox: str
    body: Markup


@dataclass(frozen=True)
class Block:
    """Charts of one kind: "lines" of all methods with their legend, or one of `KINDS`."""

    kind: str
    charts: list[Chart]
    legend: Sequence[tuple[int, str, Chart]] = ()


class Charts:
    """Draws the charts of one page; ids are unique within it."""

    def __init__(self) -> None:
        self._drawn = 0
        self._matplotlib = require("matplotlib", "plots", "Drawing the charts of a report")

    def of(self, case: CaseSummary, numbers: Mapping[str, int]) -> list[Block]:
        """Every block of charts that there are curves for. `numbers` are those of the methods, whose lines look the
        same in all charts of an experiment."""
        blocks = []
        if lines := [*self._along(case, numbers), *self._over_methods(case, numbers)]:
            drawn = [method for method in case.methods if any(run.curves or run.lines for run in method.counted)]
            legend = [(numbers[each.method], each.title, self._swatch(numbers[each.method])) for each in drawn]
            blocks.append(Block("lines", lines, legend))
        for kind in KINDS:
            having = [(method, curves) for method in case.methods if (curves := curves_of(method, kind))]
            if having:
                blocks.append(Block(kind, list(getattr(self, f"_{kind}")(having))))
        return blocks

    def _along(self, case: CaseSummary, numbers: Mapping[str, int]) -> Iterable[Chart]:
        """Figures along rotations, severities or whatever else: a chart a figure."""
        runs = [run for method in case.methods for run in method.counted]
        wanted = [(name, column) for run in runs for name, curve in run.lines.items() for column in curve]
        for name, column in (each for each in dict.fromkeys(wanted) if each[1] != "x"):
            lines = []
            for method in case.methods:
                if curves := [run.lines[name] for run in method.counted if column in run.lines.get(name, {})]:
                    lines.append((method, mean_lines(curves, column)))
            title = title_of(column)
            yield self._lines(f"{title} by {name}", lines, numbers, ("x", "mean", "error"), (name, title))

    def _over_methods(self, case: CaseSummary, numbers: Mapping[str, int]) -> Iterable[Chart]:
        """Coverage by level, and risk by coverage."""

        def of(name: str, *columns: str) -> list[tuple[MethodSummary, Curve]]:
            having = [(method, curves_of(method, name)) for method in case.methods]
            return [(method, mean_curve(curves, *columns)) for method, curves in having if curves]

        if lines := of("calibration", "level", "coverage"):
            labels = ("promised coverage", "actual coverage")
            yield self._lines("Coverage of intervals", lines, numbers, ("level", "coverage"), labels, unit=True)
        if lines := of("risk_coverage", "coverage", "risk"):
            risk = "error rate" if case.task == "classification" else "mean squared error"
            labels = ("share of rows kept, the most certain first", risk)
            yield self._lines("Risk and coverage", lines, numbers, ("coverage", "risk"), labels)

    def _lines(
        self,
        title: str,
        lines: list[tuple[MethodSummary, Curve]],
        numbers: Mapping[str, int],
        columns: tuple[str, ...],
        labels: tuple[str, str],
        *,
        unit: bool = False,
    ) -> Chart:
        def draw(ax: Axes) -> None:
            for method, curve in lines:
                plots.draw_line(ax, numbers[method.method], *(curve[name] for name in columns))
            ax.set(xlabel=labels[0], ylabel=labels[1])
            if unit:
                ax.plot([0, 1], [0, 1], color=plots.SOFT, linestyle="dashed", linewidth=1)
                ax.set(xlim=(0, 1), ylim=(0, 1))
            elif columns[0] == "coverage":  # the risk of the first few rows is noise that would set the scale
                ax.set_ylim(plots.range_of(y for _, curve in lines for y in curve["risk"][len(curve["risk"]) // 10 :]))

        label = f"{title}. A line for each of {', '.join(method.title for method, _ in lines)}; "
        return self._chart(title, "", f"{label}{labels[1]} against {labels[0]}.", (4.4, 2.9), draw, fitted=True)

    def _swatch(self, number: int) -> Chart:
        def draw(ax: Axes) -> None:
            plots.draw_line(ax, number, (0.0, 0.5, 1.0), (0.0, 0.0, 0.0))
            ax.lines[0].set_markevery([1])
            ax.set(xlim=(-0.1, 1.1), ylim=(-1, 1))
            ax.axis("off")

        return self._chart("", "", "", (34 / INCH, 14 / INCH), draw, margins=(0, 0, 1, 1))

    def _reliability(self, having: list[tuple[MethodSummary, list[Curve]]]) -> Iterable[Chart]:
        for method, curves in having:
            pooled = pooled_reliability(curves)
            yield self._panel(
                method, "Reliability", noted(method, "ece"), partial(plots.draw_reliability, curve=pooled)
            )

    def _entropy(self, having: list[tuple[MethodSummary, list[Curve]]]) -> Iterable[Chart]:
        means = []
        for method, curves in having:
            columns = ("in", "out") if all("out" in curve for curve in curves) else ("in",)
            means.append((method, mean_curve(curves, "edges", *columns)))
        top = max(v for _, mean in means for name in ("in", "out") for v in mean.get(name, []) if math.isfinite(v))

        def draw(ax: Axes, curve: Curve) -> None:
            plots.draw_entropy(ax, curve, top)
            ax.set_ylabel("")  # the ticks need the room on a phone

        for method, mean in means:
            yield self._panel(method, "Entropy", noted(method, "ood_auc"), partial(draw, curve=mean))

    def _error_bars(self, having: list[tuple[MethodSummary, list[Curve]]]) -> Iterable[Chart]:
        # The intervals of a very uncertain method would flatten all others: targets and means set the scale.
        span = plots.range_of(v for _, curves in having for name in ("target", "mean") for v in curves[0][name])
        for method, curves in having:
            rows = zip(*(curves[0][name] for name in ("target", "low", "high")), strict=True)
            known = [row for row in rows if all(map(math.isfinite, row))]
            note = f"{sum(low <= target <= high for target, low, high in known)} of {len(known)} hold"
            yield self._panel(method, "Intervals", note, partial(plots.draw_intervals, curve=curves[0], span=span))

    def _band(self, having: list[tuple[MethodSummary, list[Curve]]]) -> Iterable[Chart]:
        first = [curves[0] for _, curves in having]
        low, high = plots.range_of((y for curve in first for y in curve.get("points_y", curve["mean"])), HEADROOM)

        def draw(ax: Axes, curve: Curve) -> None:
            plots.draw_band(ax, curve)
            ax.set_ylim(low, high)

        for method, curves in having:
            yield self._panel(method, "Prediction", noted(method, "nll"), partial(draw, curve=curves[0]), (4.2, 2.9))

    def _panel(
        self,
        method: MethodSummary,
        what: str,
        note: str,
        draw: Callable[[Axes], Any],
        size: tuple[float, float] = (3.0, 2.8),
    ) -> Chart:
        return self._chart(method.title, note, f"{what}: {method.title}. {note}", size, draw)

    def _chart(
        self,
        title: str,
        note: str,
        label: str,
        size: tuple[float, float],
        draw: Callable[[Axes], Any],
        *,
        fitted: bool = False,
        margins: tuple[float, float, float, float] = (0.23, 0.17, 0.95, 0.96),
    ) -> Chart:
        """A chart of a size in inches. `fitted` gives labels the room they need, which takes longer than margins."""
        from matplotlib.figure import Figure

        self._drawn += 1
        with self._matplotlib.rc_context(STYLE):
            figure = Figure(figsize=size, layout="constrained" if fitted else None, facecolor="none")
            ax = figure.add_subplot(facecolor="none")
            if not fitted:
                figure.subplots_adjust(*margins)
            plots.bare(ax)
            draw(ax)
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata={"Date": None})
        viewbox, body = inline(file.getvalue(), f"c{self._drawn}")
        return Chart(title, note, label, viewbox, body)


def inline(svg: str, prefix: str) -> tuple[str, Markup]:
    """The viewBox and the content of an SVG file, ready to stand in a page.

    Styles become attributes, which the page's policy allows; colors become variables of the style sheet; ids get a
    prefix; groups `series-N` get a class and their number.
    """
    root = ElementTree.fromstring(svg)
    parts = []
    for child in root:  # but for metadata, and definitions of a style that the page has itself
        if child.tag.endswith("}g") or child.find(".//{*}clipPath") is not None:
            for element in child.iter():
                tidy(element, prefix)
            parts.append(ElementTree.tostring(child, encoding="unicode"))
    return root.attrib["viewBox"], Markup("".join(parts))  # ElementTree has escaped all text


def tidy(element: ElementTree.Element, prefix: str) -> None:
    """One element of an SVG as `inline` wants it."""
    element.tag = element.tag.rpartition("}")[2]
    element.tail = None
    if element.text is not None and not element.text.strip():
        element.text = None
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
    element.attrib.clear()
    element.attrib.update(attributes)


def noted(method: MethodSummary, figure: str) -> str:
    found = method.estimates.get(figure)
    return f"{title_of(figure)} {decimals(found.mean)}" if found else ""


# Curves of several seeds as one.


def curves_of(method: MethodSummary, name: str) -> list[Curve]:
    return [run.curves[name] for run in method.counted if name in run.curves]


def mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return math.fsum(known) / len(known) if known else math.nan


def mean_curve(curves: Sequence[Curve], along: str, *columns: str) -> Curve:
    """The mean of each column over the curves that are along the same places as the first."""
    alike = [curve for curve in curves if curve[along] == curves[0][along]]
    return {along: alike[0][along]} | {
        column: [mean(values) for values in zip(*(curve[column] for curve in alike), strict=True)]
        for column in columns
        if all(column in curve for curve in alike)
    }


def mean_lines(curves: Sequence[Curve], column: str) -> Curve:
    """`x`, and the mean and the standard error (0 of one run) of a column there."""
    alike = [curve for curve in curves if column in curve and curve["x"] == curves[0]["x"]]
    found: Curve = {"x": curves[0]["x"], "mean": [], "error": []}
    for values in zip(*(curve[column] for curve in alike), strict=True):
        known = [value for value in values if math.isfinite(value)]
        at = estimate(known) if known else None
        found["mean"].append(at.mean if at else math.nan)
        found["error"].append((at.error or 0.0) if at else math.nan)
    return found


def pooled_reliability(curves: Sequence[Curve]) -> Curve:
    """The bins of all seeds together, weighted by the share of points each holds. Counts are averaged: the seeds share
    their test rows."""
    bins = len(curves[0]["share"])
    alike = [curve for curve in curves if len(curve["share"]) == bins]
    pooled: Curve = {"confidence": [], "accuracy": [], "share": []}
    for i in range(bins):
        rows = [(c["share"][i], c["confidence"][i], c["accuracy"][i]) for c in alike]
        held = [row for row in rows if all(map(math.isfinite, row)) and row[0] > 0]
        weight = sum(share for share, _, _ in held)
        pooled["share"].append(weight / len(alike))
        for name, which in (("confidence", 1), ("accuracy", 2)):
            pooled[name].append(sum(row[0] * row[which] for row in held) / weight if held else math.nan)
    if all("count" in curve for curve in alike):
        pooled["count"] = [mean(column) for column in zip(*(curve["count"] for curve in alike), strict=True)]
    return pooled
