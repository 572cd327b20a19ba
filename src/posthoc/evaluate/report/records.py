"""One run: its document, of `python -m reproduction` or of `posthoc compare`, as a record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Curve", "Record", "is_cost", "read_record"]

FORMAT = 1
LARGEST_VALUE = 1e150
"""Figures beyond it count as infinite, so that sums of their squares do not overflow."""
NOT_FIGURES = ("method", "error", "problem", "applies", "traceback", "task", "seed", "device", "format", "title")
"""Entries of a comparison's document that are neither figures nor nested."""
NESTED = {
    **dict.fromkeys(("configuration", "curves", "errors", "examples", "machine", "times", "versions"), dict),
    "warnings": list,
}
"""Entries with entries of their own; those of another type count as empty."""

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


def document_in(path: Path) -> dict[str, Any]:
    """The JSON object of a file."""
    try:
        # Integers of many digits are read as floats, which may be infinite.
        document = json.loads(path.read_text(encoding="utf-8"), parse_int=lambda d: int(d) if len(d) < 18 else float(d))
    except (RecursionError, ValueError) as error:
        raise ValueError(f"it is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise ValueError("it is not the document of a run")
    return printable(document)


def printable(value: Any) -> Any:
    """A JSON value whose strings, keys too, hold no control characters and no halves of surrogate pairs."""
    if isinstance(value, str):
        text = value.encode("utf-8", "replace").decode("utf-8")
        return "".join(sign for sign in text if sign >= " " or sign in "\n\t")
    if isinstance(value, list):
        return [printable(each) for each in value]
    return {printable(k): printable(v) for k, v in value.items()} if isinstance(value, dict) else value


def read_record(root: Path, place: Path) -> tuple[Record, list[str]]:
    """The document of a run, of either kind, as a record, and the names of its curves that cannot be drawn.

    Args:
        root: The folder of results.
        place: The path of the document in it.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is not the document of a run; the message says why.
    """
    document = document_in(root / place)
    method, seed, task = (document.get(key) for key in ("method", "seed", "task"))
    if not isinstance(method, str) or type(seed) is not int or not isinstance(task, str):
        raise ValueError("it is not the document of a run")
    parts: dict[str, Any] = {
        name: document[name] if isinstance(document.get(name), kind) else kind() for name, kind in NESTED.items()
    }
    if "experiment" in document:
        if document.get("format") != FORMAT:
            raise ValueError(f"its format is {document.get('format')!r}, and this posthoc reads {FORMAT}")
        experiment = str(document["experiment"])
        metrics, data = document.get("metrics"), parts["configuration"].get("data")
        if not isinstance(metrics, dict) or not all(value is None or is_number(value) for value in metrics.values()):
            raise ValueError("its metrics are not numbers by name")
        figures = metrics | parts["times"]
    elif "error" in document:  # a comparison: its figures are among all other entries, its name is that of its folder
        experiment = place.parent.as_posix() if place.parent.name else root.resolve().name or "results"
        data = document.get("data")
        figures = {k: v for k, v in document.items() if k not in NOT_FIGURES and (v is None or is_number(v))}
        metrics = [name for name in figures if not is_cost(name)]
    else:
        raise ValueError("it is neither of an experiment nor of a comparison")
    known = finite(figures)
    missing = [name for name in metrics if name not in known]
    problem = document.get("problem") or document.get("error")
    if not problem and (missing or not metrics):
        problem = f"not a finite number: {', '.join(missing)}" if missing else "it has no figures"
    curves, lines, bad = read_curves(parts["curves"])
    groups = {kind: group for kind, group in parts["examples"].items() if kind in EXAMPLES and isinstance(group, list)}
    if "device" in document:
        parts["configuration"]["device"] = document["device"]
    record = Record(
        path=place.as_posix(),
        experiment=experiment,
        case=str(document.get("case") or ""),
        method=method,
        seed=seed,
        task=task,
        title=str(document.get("title") or method),
        figures=known,
        errors=finite(parts["errors"]),
        curves=curves,
        lines=lines,
        examples={kind: [each for each in group if isinstance(each, dict)][:MOST] for kind, group in groups.items()},
        selection=str(document.get("selection") or ""),
        problem=str(problem) if problem else None,
        applies=document.get("applies") is not False,
        warnings=tuple(map(str, parts["warnings"])),
        data=data if isinstance(data, dict) else {},
        **{name: parts[name] for name in ("configuration", "versions", "machine")},
    )
    return record, bad


def is_cost(figure: str) -> bool:
    """Whether a figure is a time or a memory, not a metric."""
    return "_seconds" in figure or "_memory" in figure


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def finite(figures: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(v) for name, v in figures.items() if is_number(v) and abs(v) < LARGEST_VALUE}


def read_curves(curves: Mapping[str, Any]) -> tuple[dict[str, Curve], dict[str, Curve], list[str]]:
    """The curves that can be drawn, lines of figures along something, and the names of those that cannot be drawn.
    Kinds that are not known are left out."""
    known: dict[str, Curve] = {}
    lines: dict[str, Curve] = {}
    bad: list[str] = []
    named = curves.get("lines")
    given = [(known, name, curves.get(name), columns) for name, columns in CURVES.items()]
    given += [(lines, name, line, (("x",), line)) for name, line in named.items()] if isinstance(named, dict) else []
    for kind, name, curve, (required, optional) in given:
        if curve is not None:
            try:
                kind[name] = read_curve(curve, required, optional)
            except (AttributeError, KeyError, TypeError, ValueError):
                bad.append(name)
    return known, lines, bad


def read_curve(curve: Mapping[str, Any], required: Iterable[str], optional: Iterable[str]) -> Curve:
    """The columns of a curve, or an error."""
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
