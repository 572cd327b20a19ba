"""One run: its document, of `python -m reproduction` or of `posthoc compare`, as a record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1
LARGEST_VALUE = 1e150
"""Figures beyond it count as infinite, so that sums of their squares do not overflow."""

Curve = dict[str, np.ndarray[Any, Any]]
"""Columns of numbers by name; NaN where there is none."""

CURVES = {
    "reliability": {"confidence", "accuracy", "share"},
    "entropy": {"in", "edges"},
    "risk_coverage": {"coverage", "risk"},
    "calibration": {"level", "coverage"},
    "error_bars": {"target", "mean", "low", "high"},
    "band": {"x", "mean", "low", "high"},
}
"""The columns that a curve must have."""


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
    """Those of `CURVES`; and figures by something, `x` and a column a figure, as "by rotation" or "by severity"."""
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Pictures that a classifier is most and least certain of."""
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
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from error
    if not isinstance(document, dict) or not {"method", "seed", "task"} <= document.keys():
        raise ValueError("it is not the document of a run")
    configuration = nested(document, "configuration")
    if "experiment" in document:
        if document.get("format") != FORMAT:
            raise ValueError(f"its format is {document.get('format')!r}, and this posthoc reads {FORMAT}")
        experiment, data, metrics = document["experiment"], nested(configuration, "data"), nested(document, "metrics")
        figures = metrics | nested(document, "times")
    elif "error" in document:  # a comparison has its figures among all other entries, and the name of its folder
        experiment = place.parent.as_posix() if place.parent.name else root.resolve().name or "results"
        data = nested(document, "data")
        figures = {k: v for k, v in document.items() if isinstance(v, float | None) and k not in ("error", "traceback")}
        metrics = {name: value for name, value in figures.items() if not is_cost(name)}
        configuration |= {"device": document.get("device")}
    else:
        raise ValueError("it is neither of an experiment nor of a comparison")
    known = finite(figures)
    missing = [name for name in metrics if name not in known]
    problem = document.get("problem") or document.get("error")
    if not problem and (missing or not metrics):
        problem = f"not a finite number: {', '.join(missing)}" if missing else "it has no figures"
    given = nested(document, "curves")
    curves = {name: read_curve(name, given[name], required) for name, required in CURVES.items() if name in given}
    curves |= {f"by {name}": read_curve(name, line, {"x"}) for name, line in nested(given, "lines").items()}
    entries: dict[str, Any] = {name: document[name] for name in ("method", "seed", "task")}
    entries |= {name: document.get(name) or "" for name in ("case", "selection")}
    entries |= {name: nested(document, name) for name in ("examples", "versions", "machine")}
    return Record(
        path=place.as_posix(),
        experiment=experiment,
        title=document.get("title") or document["method"],
        figures=known,
        errors=finite(nested(document, "errors")),
        curves=curves,
        problem=problem,
        applies=document.get("applies", True),
        warnings=tuple(document.get("warnings") or ()),
        configuration=configuration,
        data=data,
        **entries,
    )


def nested(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An entry with entries of its own; empty where there is none."""
    value = document.get(name)
    return value if isinstance(value, dict) else {}


def is_cost(figure: str) -> bool:
    """Whether a figure is a time or a memory, not a metric."""
    return "_seconds" in figure or "_memory" in figure


def finite(figures: Mapping[str, Any]) -> dict[str, float]:
    """The figures that are finite numbers."""
    return {name: float(v) for name, v in figures.items() if isinstance(v, int | float) and abs(v) < LARGEST_VALUE}


def read_curve(name: str, curve: Mapping[str, Any], required: Set[str]) -> Curve:
    """The columns of a curve, and an error if one is missing or holds no numbers."""
    try:
        columns = {key: np.asarray(column, float) for key, column in curve.items() if column is not None}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"its curve {name} cannot be read ({error})") from error
    if missing := required - columns.keys():
        raise ValueError(f"its curve {name} lacks {', '.join(sorted(missing))}")
    return {key: np.where(np.abs(column) < LARGEST_VALUE, column, np.nan) for key, column in columns.items()}
