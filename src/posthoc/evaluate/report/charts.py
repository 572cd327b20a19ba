"""The charts of a case: all methods as lines where they can be told apart, else a panel a method, to one scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from posthoc.evaluate.report.aggregates import FURTHER, MEASURES
from posthoc.evaluate.report.markup import element, text
from posthoc.evaluate.report.pooling import mean_curve, mean_lines, pooled_reliability
from posthoc.evaluate.report.shapes import Curve
from posthoc.evaluate.report.summary import CaseSummary, MethodSummary
from posthoc.evaluate.report.svg import (
    COLOURS,
    Frame,
    Points,
    area,
    dots,
    marks,
    polyline,
    segments,
    series_class,
    swatch,
    ticks,
)

__all__ = ["charts_of"]

UNIT = (0.0, 1.0)
HALVES = (0.0, 0.5, 1.0)
HEADROOM = 0.6
"""How far beyond the data the panels of bands reach, in units of the data's range: bands that leave them are cut."""


@dataclass(frozen=True)
class Line:
    """A method's line in a chart of all."""

    index: int
    title: str
    x: list[float]
    y: list[float]
    error: list[float] | None = None


def charts_of(case: CaseSummary, numbers: Mapping[str, int]) -> str:
    """Every chart there are curves for. `numbers` are those of the methods, by which their lines look the same in every
    chart of an experiment."""
    together = [*lines_along(case, numbers), *calibration(case, numbers), *risk_coverage(case, numbers)]
    parts = []
    if together:
        drawn = [method for method in case.methods if any(run.curves or run.lines for run in method.counted)]
        parts.append(
            block("All methods", "Pick a method to follow it.", legend(drawn, numbers) + grid("plots", together))
        )
    return "".join((*parts, *panels(case)))


def panels(case: CaseSummary) -> Iterable[str]:
    """The blocks of one panel a method."""
    for name, draw, heading, hint in (
        (
            "reliability",
            reliability,
            "Reliability",
            "How often the said class is the true one, by how sure the method says it is. On the diagonal the two "
            "agree; below it the method is too sure. Bars: the share of points.",
        ),
        (
            "entropy",
            entropies,
            "Entropy",
            "How unsure the predictions are. Filled: test data; thick line: data from elsewhere, which a method should "
            "be less sure of. Heights grow with the square root of the share.",
        ),
        (
            "error_bars",
            error_bars,
            "Error bars",
            "A sample of test points of the first seed, each with its 90 % interval. Intervals that hold the truth "
            "cross the diagonal; those that miss it stand out and carry a dot.",
        ),
        ("band", bands, "Predictions", "The mean, the 90 % interval shaded, the data as dots; the first seed."),
    ):
        drawn = [(method, curves) for method in case.methods if (curves := curves_of(method, name))]
        if drawn:
            yield block(heading, hint, grid("panels wide" if name == "band" else "panels", draw(drawn)))


def curves_of(method: MethodSummary, name: str) -> list[Curve]:
    return [run.curves[name] for run in method.counted if name in run.curves]


Drawn = list[tuple[MethodSummary, list[Curve]]]


def lines_along(case: CaseSummary, numbers: Mapping[str, int]) -> Iterable[str]:
    """Figures along rotations, severities or whatever else: a chart a figure."""
    wanted = dict.fromkeys(
        (name, column)
        for method in case.methods
        for run in method.counted
        for name, curve in run.lines.items()
        for column in curve
        if column != "x"
    )
    titles = {measure.figure: measure.title for measure in (*MEASURES[case.task], *FURTHER)}
    for name, column in wanted:
        lines = []
        for method in case.methods:
            if curves := [run.lines[name] for run in method.counted if column in run.lines.get(name, {})]:
                mean = mean_lines(curves, column)
                lines.append(Line(numbers[method.method], method.title, mean["x"], mean["mean"], error=mean["error"]))
        title = titles.get(column, column.replace("_", " "))
        yield line_chart(f"{title} by {name}", lines, name, title)


def calibration(case: CaseSummary, numbers: Mapping[str, int]) -> Iterable[str]:
    """The share of targets inside intervals against what was promised."""
    lines = [
        Line(numbers[method.method], method.title, mean["level"], mean["coverage"])
        for method in case.methods
        if (curves := curves_of(method, "calibration"))
        for mean in [mean_curve(curves, "level", "coverage")]
    ]
    if lines:
        yield line_chart("Calibration", lines, "promised coverage", "found coverage", unit=True, diagonal=True)


def risk_coverage(case: CaseSummary, numbers: Mapping[str, int]) -> Iterable[str]:
    """The risk that remains when the most uncertain are let go."""
    lines = [
        Line(numbers[method.method], method.title, mean["coverage"], mean["risk"])
        for method in case.methods
        if (curves := curves_of(method, "risk_coverage"))
        for mean in [mean_curve(curves, "coverage", "risk")]
    ]
    if lines:
        risk = "error rate" if case.task == "classification" else "mean squared error"
        yield line_chart("Risk and coverage", lines, "share of points kept, the surest first", risk, from_zero=True)


def line_chart(
    title: str,
    lines: list[Line],
    x_label: str,
    y_label: str,
    *,
    unit: bool = False,
    diagonal: bool = False,
    from_zero: bool = False,
) -> str:
    """A chart of several methods; standard errors are bars, where there are any."""
    xs = [x for line in lines for x in line.x]
    reach = [
        y + side * error
        for line in lines
        for y, error in zip(line.y, line.error or [0.0] * len(line.y), strict=True)
        for side in (-1.0, 1.0)
    ]
    y = UNIT if unit else padded(reach, from_zero=from_zero)
    wide = any(abs(end) >= 1e4 or 0 < abs(end) < 0.01 for end in y)
    x = (0.0, 1.0) if unit or from_zero else padded(xs, 0.0)
    frame = Frame(x, y, x_label, y_label, left=58 if wide else 50)
    body = polyline(frame.place(UNIT, UNIT), "diagonal") if diagonal else ""
    for line in lines:
        points = frame.place(line.x, line.y)
        drawn = polyline(points, f"line {series_class(line.index)}", line.title)
        spans = (
            frame.place((x, x), (y - error, y + error))
            for x, y, error in zip(line.x, line.y, line.error or (), strict=False)
            if error > 0
        )
        bars = segments(spans, f"bar s{line.index % COLOURS}")
        every = max(1, math.ceil(len(points) / 6))
        body += element("g", drawn + bars + marks(points, line.index, every), class_="series", data_m=line.index)
    said = f"A line for each of {', '.join(line.title for line in lines)}; {y_label} against {x_label}."
    return element("figure", element("figcaption", text(title)) + frame.svg(body, title, said), class_="plot")


def reliability(drawn: Drawn) -> Iterable[str]:
    for method, curves in drawn:
        pooled = pooled_reliability(curves)
        frame = Frame(UNIT, UNIT, "confidence", "accuracy", 220, 204, left=54, x_ticks=HALVES, y_ticks=HALVES)
        bins = len(pooled["share"])
        bars = "".join(
            area(frame.place((i / bins, i / bins, (i + 1) / bins, (i + 1) / bins), (0, share, share, 0)), "share")
            for i, share in enumerate(pooled["share"])
            if share > 0
        )
        points = frame.place(pooled["confidence"], pooled["accuracy"])
        pairs = zip(pooled["confidence"], pooled["accuracy"], strict=True)
        gaps = segments((frame.place((sure, sure), (sure, right)) for sure, right in pairs), "gap")
        body = (
            bars + polyline(frame.place(UNIT, UNIT), "diagonal") + gaps + polyline(points, "main") + dots(points, "dot")
        )
        yield panel(method, frame, body, "Reliability", "ece", "ECE", "{:.4f}".format)


def entropies(drawn: Drawn) -> Iterable[str]:
    means = [
        (method, mean_curve(curves, "edges", *(("in", "out") if all("out" in c for c in curves) else ("in",))))
        for method, curves in drawn
    ]
    top = max(
        (share for _, mean in means for name in ("in", "out") for share in finite(mean.get(name, []))), default=1.0
    )
    for method, mean in means:
        edges = mean["edges"]
        levels = tuple(level for level in (0.01, 0.1, 0.5, 1.0) if level <= 1.05 * top) or (0.0,)
        frame = Frame(
            (edges[0], edges[-1]), (0.0, 1.05 * top), "entropy, nats", "share of points", 220, 204, left=54,
            percent_y=True, root_y=True, y_ticks=levels,
        )  # fmt: skip
        body = area(frame.place(*steps(edges, mean["in"])), "inside")
        body += polyline(frame.place(*steps(edges, mean["out"])), "outside") if "out" in mean else ""
        yield panel(method, frame, body, "Entropy", "ood_auc", "OOD AUC", "{:.4f}".format)


def steps(edges: list[float], shares: list[float]) -> tuple[list[float], list[float]]:
    """The outline of a histogram."""
    xs = [edges[0], *(edge for pair in pairwise(edges) for edge in pair), edges[-1]]
    heights = [0.0 if math.isnan(share) else share for share in shares]
    return xs, [0.0, *(height for share in heights for height in (share, share)), 0.0]


def error_bars(drawn: Drawn) -> Iterable[str]:
    # What a very unsure method says would make all others flat: the scale follows from targets and means.
    scale = padded(value for _, curves in drawn for name in ("target", "mean") for value in curves[0][name])
    for method, curves in drawn:
        curve = curves[0]
        frame = Frame(scale, scale, "target", "prediction", 220, 204, left=54, x_ticks=tuple(ticks(*scale, 4)))
        hit: list[Points] = []
        missed: list[Points] = []
        ends: list[tuple[float, float]] = []
        for target, mean, low, high in zip(*(curve[name] for name in ("target", "mean", "low", "high")), strict=True):
            if not all(map(math.isfinite, (target, mean, low, high))):
                continue
            bar = frame.place((target, target), (low, high))
            (hit if low <= target <= high else missed).append(bar)
            if not low <= target <= high:
                ends += frame.place((target,), (mean,))
        body = polyline(frame.place(scale, scale), "diagonal")
        body += segments(hit, "held") + segments(missed, "missed") + dots(ends, "miss")
        total = len(hit) + len(missed)
        yield panel(
            method, frame, body, f"Error bars, {len(hit)} of {total} hold the truth", note=f"{len(hit)} of {total} hold"
        )


def bands(drawn: Drawn) -> Iterable[str]:
    first = [curves[0] for _, curves in drawn]
    ys = finite(y for curve in first for y in curve.get("points_y", curve["mean"]))
    room = HEADROOM * (max(ys) - min(ys) or 1.0)
    across = padded((x for curve in first for x in curve["x"]), 0.0)
    for method, curves in drawn:
        curve = curves[0]
        frame = Frame(across, (min(ys) - room, max(ys) + room), "x", "y", 300, 210)
        outline = frame.place(curve["x"], curve["high"]) + frame.place(curve["x"], curve["low"])[::-1]
        body = area(outline, "band") + dots(frame.place(curve.get("points_x", []), curve.get("points_y", [])), "datum")
        body += polyline(frame.place(curve["x"], curve["mean"]), "ink")
        yield panel(method, frame, body, "Prediction", "nll", "NLL", "{:.4f}".format)


def panel(
    method: MethodSummary,
    frame: Frame,
    body: str,
    what: str,
    figure: str = "",
    called: str = "",
    write: Callable[[float], str] = str,
    note: str = "",
) -> str:
    """One method's chart, with its figure of what is seen there."""
    if figure in method.estimates:
        note = f"{called} {write(method.estimates[figure].mean)}"
    caption = element("b", text(method.title)) + (element("span", text(note)) if note else "")
    chart = frame.svg(body, f"{what}: {method.title}", note)
    return element("figure", element("figcaption", caption) + chart, class_="panel")


def legend(methods: Iterable[MethodSummary], numbers: Mapping[str, int]) -> str:
    """The methods and how their lines look; each is a button that brings its line out."""
    entries = (
        element(
            "button",
            swatch(numbers[method.method]) + text(method.title),
            type="button",
            aria_pressed="false",
            data_m=numbers[method.method],
        )
        for method in methods
    )
    return element("div", "".join(entries), class_="legend", role="group", aria_label="Methods")


def block(heading: str, hint: str, content: str) -> str:
    head = element("h4", text(heading)) + element("p", text(hint), class_="hint")
    return element("section", head + content, class_="block")


def grid(class_: str, items: Iterable[str]) -> str:
    return element("div", "".join(items), class_=class_)


def finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def padded(values: Iterable[float], share: float = 0.05, *, from_zero: bool = False) -> tuple[float, float]:
    """The range of values with some room around it."""
    known = finite(values) or [0.0, 1.0]
    low, high = (min(0.0, min(known)) if from_zero else min(known)), max(known)
    if not high > low:
        return low - 0.5, high + 0.5
    room = share * (high - low)
    return (low if from_zero else low - room), high + room
