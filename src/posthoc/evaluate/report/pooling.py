"""The curves of several seeds as one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from posthoc.evaluate.report.shapes import Curve
from posthoc.evaluate.report.summary import estimate

__all__ = ["mean_curve", "mean_lines", "pooled_reliability"]


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
    """As if the points of all seeds were those of one: bins weigh by how many points they hold."""
    bins = len(curves[0]["share"])
    alike = [curve for curve in curves if len(curve["share"]) == bins]
    pooled: Curve = {"confidence": [], "accuracy": [], "share": []}
    for i in range(bins):
        rows = [(c["share"][i], c["confidence"][i], c["accuracy"][i]) for c in alike]
        held = [row for row in rows if all(map(math.isfinite, row)) and row[0] > 0]
        weight = sum(share for share, _, _ in held)
        pooled["share"].append(weight / len(alike))
        for column, which in (("confidence", 1), ("accuracy", 2)):
            pooled[column].append(sum(row[0] * row[which] for row in held) / weight if held else math.nan)
    return pooled


def mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return math.fsum(known) / len(known) if known else math.nan
