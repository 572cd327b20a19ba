"""The curves of a document: which there are, what each holds, and whether it does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

__all__ = ["Curve", "Lines", "read_curves"]

Curve = dict[str, list[float]]
"""Columns of numbers by name; NaN where there is none."""
Lines = dict[str, Curve]
"""Figures along something (rotation, severity): `x` and a column a figure."""

COLUMNS = {
    "reliability": ("confidence", "accuracy", "share"),
    "entropy": ("in",),
    "risk_coverage": ("coverage", "risk"),
    "calibration": ("level", "coverage"),
    "error_bars": ("target", "mean", "low", "high"),
    "band": ("x", "mean", "low", "high"),
}
"""Columns of equal length that a curve must have."""


def read_curves(curves: Mapping[str, Any]) -> tuple[dict[str, Curve], Lines, list[str]]:
    """Those that can be drawn, and the names of those that cannot. Kinds that are not known are passed over."""
    good: dict[str, Curve] = {}
    lines: Lines = {}
    bad: list[str] = []
    for name, columns in COLUMNS.items():
        if curves.get(name) is not None:
            try:
                good[name] = read_curve(name, curves[name], columns)
            except (AttributeError, KeyError, TypeError, ValueError):
                bad.append(name)
    along = curves.get("lines")
    for name, curve in along.items() if isinstance(along, dict) else ():
        try:
            lines[str(name)] = equal({str(key): numbers(column) for key, column in curve.items()}, ("x",))
        except (AttributeError, KeyError, TypeError, ValueError):
            bad.append(str(name))
    return good, lines, bad


def read_curve(name: str, curve: Mapping[str, Any], columns: tuple[str, ...]) -> Curve:
    """A curve of this name, or an error."""
    found = equal({key: numbers(curve[key]) for key in columns}, columns)
    if name == "entropy":
        found["edges"] = numbers(curve["edges"])
        if curve.get("out") is not None:
            found["out"] = numbers(curve["out"])
        bins = len(found["in"])
        steps = [high - low for low, high in pairwise(found["edges"])]
        if len(steps) != bins or len(found.get("out", found["in"])) != bins or not all(step > 0 for step in steps):
            raise ValueError("edges and shares do not fit")
    if name == "band" and curve.get("points"):
        found["points_x"] = numbers([x for x, _ in curve["points"]])
        found["points_y"] = numbers([y for _, y in curve["points"]])
    return found


def equal(curve: Curve, required: tuple[str, ...]) -> Curve:
    """The curve, if its columns are as long as each other and there is something to draw."""
    lengths = {len(column) for column in curve.values()}
    if len(lengths) != 1 or not all(any(map(math.isfinite, curve[key])) for key in required):
        raise ValueError("columns differ in length, or hold nothing")
    return curve


def numbers(column: Any) -> list[float]:
    """A column as floats; None, and what is not finite, as NaN."""
    if not isinstance(column, list) or not column:
        raise ValueError("expected a list of numbers")
    return [number(value) for value in column]


def number(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("expected a number")
    return float(value) if math.isfinite(value) else math.nan
