"""One run: its document, of `python -m reproduction` or of `posthoc compare`, as a record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1
LARGEST_VALUE = 1e150
"""Figures beyond it count as infinite, so that sums of their squares do not overflow."""
NOT_FIGURES = ("seed", "error", "traceback")
"""Entries of a comparison's document that may be numbers or missing, and are no figures."""
EXAMPLES, MOST = ("most_certain", "least_certain"), 8
"""The kinds of examples, and how many of each are kept."""

Curve = dict[str, np.ndarray[Any, Any]]
"""Columns of numbers by name; NaN where there is none."""

CURVES = {
    "reliability": (("confidence", "accuracy", "share"), ("count",)),
    "entropy": (("in", "edges"), ("out",)),
    "risk_coverage": (("coverage", "risk"), ()),
    "calibration": (("level", "coverage"), ()),
    "error_bars": (("target", "mean", "low", "high"), ()),
    "band": (("x", "mean", "low", "high"), ("points",)),
}
"""The columns that a curve must have, and those that it may have."""


@dataclass(frozen=True)
class Record:
    """One method with one seed."""

    path: str
    """Within the folder of results."""
    experiment: str
    case: str
    """Empty where an experiment has one."""
    method: str
    seed: int
    task: str
    title: str
    figures: dict[str, float] = field(default_factory=dict)
    """Metrics, and costs in seconds and bytes; finite ones only."""
    errors: dict[str, float] = field(default_factory=dict)
    """Standard errors of metrics over test sets."""
    curves: dict[str, Curve] = field(default_factory=dict)
    lines: dict[str, Curve] = field(default_factory=dict)
    """Figures along something (rotation, severity): `x` and a column a figure."""
    undrawn: tuple[str, ...] = ()
    """The names of curves that cannot be drawn."""
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    selection: str = ""
    """What the method chose, in words."""
    problem: str | None = None
    """Why it counts in no mean."""
    applies: bool = True
    """False where the problem is that the method is not for such data."""
    warnings: tuple[str, ...] = ()
    configuration: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    """Where the data come from, in words."""
    versions: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)


def read_record(root: Path, place: Path) -> Record:
    """Reads the document of a run, of either kind.

    Args:
        root: The folder of results.
        place: The path of the document in it.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is not the document of a run; the message says why.
    """
    try:
        document = json.loads((root / place).read_text(encoding="utf-8"))
    except (RecursionError, ValueError) as error:
        raise ValueError(f"it is not JSON ({error})") from error
    is_run = isinstance(document, dict) and type(document.get("seed")) is int
    if not is_run or not all(isinstance(document.get(name), str) for name in ("method", "task")):
        raise ValueError("it is not the document of a run")
    configuration = nested(document, "configuration")
    if "experiment" in document:
        if document.get("format") != FORMAT:
            raise ValueError(f"its format is {document.get('format')!r}, and this posthoc reads {FORMAT}")
        experiment, data = str(document["experiment"]), nested(configuration, "data")
        metrics = nested(document, "metrics")
        if not all(value is None or is_number(value) for value in metrics.values()):
            raise ValueError("its metrics are not numbers by name")
        figures = metrics | nested(document, "times")
    elif "error" in document:  # a comparison has its figures among all other entries, and the name of its folder
        experiment = place.parent.as_posix() if place.parent.name else root.resolve().name or "results"
        data = nested(document, "data")
        figures = {k: v for k, v in document.items() if k not in NOT_FIGURES and (v is None or is_number(v))}
        metrics = {name: value for name, value in figures.items() if not is_cost(name)}
        configuration |= {"device": document.get("device")}
    else:
        raise ValueError("it is neither of an experiment nor of a comparison")
    known = finite(figures)
    missing = [name for name in metrics if name not in known]
    problem = document.get("problem") or document.get("error")
    if not problem and (missing or not metrics):
        problem = f"not a finite number: {', '.join(missing)}" if missing else "it has no figures"
    curves, lines, bad = read_curves(nested(document, "curves"))
    examples = nested(document, "examples")
    return Record(
        path=place.as_posix(),
        experiment=experiment,
        case=str(document.get("case") or ""),
        method=document["method"],
        seed=document["seed"],
        task=document["task"],
        title=str(document.get("title") or document["method"]),
        figures=known,
        errors=finite(nested(document, "errors")),
        curves=curves,
        lines=lines,
        undrawn=tuple(bad),
        examples={kind: examples[kind][:MOST] for kind in EXAMPLES if examples.get(kind)},
        selection=str(document.get("selection") or ""),
        problem=str(problem) if problem else None,
        applies=document.get("applies") is not False,
        warnings=tuple(map(str, document.get("warnings") or ())),
        configuration=configuration,
        data=data,
        versions=nested(document, "versions"),
        machine=nested(document, "machine"),
    )


def nested(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An entry with entries of its own; empty where there is none."""
    value = document.get(name)
    return value if isinstance(value, dict) else {}


def is_cost(figure: str) -> bool:
    """Whether a figure is a time or a memory, not a metric."""
    return "_seconds" in figure or "_memory" in figure


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def finite(figures: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(v) for name, v in figures.items() if is_number(v) and abs(v) < LARGEST_VALUE}


def read_curves(curves: Mapping[str, Any]) -> tuple[dict[str, Curve], dict[str, Curve], list[str]]:
    """The curves of known kinds, the lines of figures along something, and the names of those that cannot be drawn."""
    known: dict[str, Curve] = {}
    lines: dict[str, Curve] = {}
    bad: list[str] = []
    given = [(known, name, curves[name], columns) for name, columns in CURVES.items() if name in curves]
    given += [(lines, name, line, (("x",), line)) for name, line in nested(curves, "lines").items()]
    for kind, name, curve, (required, optional) in given:
        try:
            kind[name] = read_curve(curve, required, optional)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            bad.append(name)
    return known, lines, bad


def read_curve(curve: Mapping[str, Any], required: Iterable[str], optional: Iterable[str]) -> Curve:
    """The columns of a curve; an error if they do not fit each other."""
    names = (*required, *(name for name in optional if curve.get(name) is not None))
    columns = {name: np.asarray(curve[name], dtype=float) for name in names}
    columns = {name: np.where(np.abs(column) < LARGEST_VALUE, column, np.nan) for name, column in columns.items()}
    length = len(columns[names[0]])
    for name, column in columns.items():
        shape = {"points": (len(column), 2), "edges": (length + 1,)}.get(name, (length,))
        if column.shape != shape or (name in required and not np.isfinite(column).any()):
            raise ValueError("columns differ in length, or hold nothing")
    if "edges" in columns and not (np.diff(columns["edges"]) > 0).all():
        raise ValueError("edges do not increase")
    return columns
