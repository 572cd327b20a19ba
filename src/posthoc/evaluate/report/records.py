"""A folder of results as records: the documents of `python -m reproduction` and of `posthoc compare`, read alike."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from posthoc.errors import FileError

__all__ = ["Curve", "Record", "Results", "read_curves", "read_results"]

FORMAT = 1
LARGEST_FILE = 64_000_000
"""Bytes; larger files are not opened."""
LARGEST_VALUE = 1e150
"""Figures beyond it count as infinite, so that sums of their squares do not overflow."""
NOT_FIGURES = ("method", "error", "problem", "applies", "traceback", "task", "seed", "device", "format", "title")
"""Entries of a comparison's document that are neither figures nor nested."""

Curve = dict[str, list[float]]
"""Columns of numbers by name; NaN where there is none."""

CURVES = {
    "reliability": ("confidence", "accuracy", "share"),
    "entropy": ("in",),
    "risk_coverage": ("coverage", "risk"),
    "calibration": ("level", "coverage"),
    "error_bars": ("target", "mean", "low", "high"),
    "band": ("x", "mean", "low", "high"),
}
"""Columns of equal length that a curve must have."""


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
    metrics: dict[str, float] = field(default_factory=dict)
    """Finite ones only."""
    costs: dict[str, float] = field(default_factory=dict)
    """Seconds and bytes."""
    errors: dict[str, float] = field(default_factory=dict)
    """Standard errors of metrics over test sets."""
    curves: dict[str, Curve] = field(default_factory=dict)
    lines: dict[str, Curve] = field(default_factory=dict)
    """Figures along something (rotation, severity): `x` and a column a figure."""
    examples: dict[str, list[Any]] = field(default_factory=dict)
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

    @property
    def figures(self) -> dict[str, float]:
        return {**self.metrics, **self.costs}


@dataclass(frozen=True)
class Results:
    """The runs of a folder, in the order of their files, and what a reader of them must know."""

    records: tuple[Record, ...]
    warnings: tuple[str, ...]


class NotARunError(Exception):
    """What is wrong with a document, in words."""


def read_results(folder: str | os.PathLike[str]) -> Results:
    """Reads every run in a folder and in those below it.

    A file that is no run's is left out and named in the warnings, as are runs that do not belong together.

    Args:
        folder: The folder of results.

    Raises:
        FileError: If there is no run, two documents of one run, or runs of two tasks in one case.
    """
    root = Path(folder)
    if not root.is_dir():
        raise FileError(f"Expected a folder of results, found {'a file' if root.exists() else 'nothing'} at {root}.")
    records: list[Record] = []
    left_out: list[str] = []
    undrawn: list[str] = []
    for path in sorted(root.rglob("*.json")):
        place = path.relative_to(root)
        if any(part.startswith(".") for part in place.parts) or not path.is_file():
            continue
        try:
            record, bad = record_of(document_in(path), root, place)
        except NotARunError as reason:
            left_out.append(f"{place.as_posix()} is left out: {reason}.")
            continue
        records.append(record)
        undrawn += [f"{record.path}: its curve {name} cannot be drawn." for name in bad]
    if not records:
        found = f" The first of {len(left_out)} others: {left_out[0]}" if left_out else ""
        raise FileError(
            f"Expected results in {root}, found no run's document there: name the folder that python -m reproduction "
            f"or posthoc compare wrote.{found}"
        )
    require_once(records)
    return Results(tuple(records), (*left_out, *undrawn, *mixtures(records)))


def document_in(path: Path) -> dict[str, Any]:
    """The JSON object of a file."""
    if path.stat().st_size > LARGEST_FILE:
        raise NotARunError(f"it is larger than {LARGEST_FILE / 1e6:.0f} MB")
    try:
        # Integers of many digits are read as floats, which may be infinite.
        document = json.loads(path.read_text(encoding="utf-8"), parse_int=lambda d: int(d) if len(d) < 18 else float(d))
    except (RecursionError, ValueError) as error:
        raise NotARunError(f"it is not JSON ({error})") from error
    except OSError as error:
        raise NotARunError(f"it cannot be read ({error.strerror})") from error
    if not isinstance(document, dict):
        raise NotARunError("it is not the document of a run")
    return printable(document)


def printable(value: Any) -> Any:
    """A JSON value whose strings, keys too, hold no control characters and no halves of surrogate pairs."""
    if isinstance(value, str):
        text = value.encode("utf-8", "replace").decode("utf-8")
        return "".join(sign for sign in text if sign >= " " or sign in "\n\t")
    if isinstance(value, list):
        return [printable(each) for each in value]
    return {printable(k): printable(v) for k, v in value.items()} if isinstance(value, dict) else value


def record_of(document: Mapping[str, Any], root: Path, place: Path) -> tuple[Record, list[str]]:
    """A document of either kind as a record, and the names of its curves that cannot be drawn."""
    method, seed, task = (document.get(key) for key in ("method", "seed", "task"))
    if not isinstance(method, str) or type(seed) is not int or not isinstance(task, str):
        raise NotARunError("it is not the document of a run")
    reproduced = "experiment" in document
    if reproduced and document.get("format") != FORMAT:
        raise NotARunError(f"its format is {document.get('format')!r}, and this posthoc reads {FORMAT}")
    metrics, costs = (experiment_figures if reproduced else comparison_figures)(document)
    curves, lines, bad = read_curves(mapping(document.get("curves")))
    configuration = mapping(document.get("configuration"))
    configuration |= {"device": document["device"]} if "device" in document else {}
    warned = document.get("warnings")
    record = Record(
        path=place.as_posix(),
        experiment=str(document["experiment"]) if reproduced else folder_name(root, place),
        case=str(document.get("case") or ""),
        method=method,
        seed=seed,
        task=task,
        title=str(document.get("title") or method),
        metrics=finite(metrics),
        costs=finite(costs),
        errors=finite(mapping(document.get("errors"))),
        curves=curves,
        lines=lines,
        examples={k: v for k, v in mapping(document.get("examples")).items() if isinstance(v, list)},
        selection=str(document.get("selection") or ""),
        problem=problem_of(document, metrics),
        applies=document.get("applies") is not False,
        warnings=tuple(map(str, warned)) if isinstance(warned, list) else (),
        configuration={name: value for name, value in configuration.items() if name != "data"},
        data=mapping(configuration.get("data") if reproduced else document.get("data")),
        versions=mapping(document.get("versions")),
        machine=mapping(document.get("machine")),
    )
    return record, bad


def experiment_figures(document: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metrics and costs of a run of an experiment."""
    metrics = document.get("metrics")
    if not isinstance(metrics, dict) or not all(value is None or is_number(value) for value in metrics.values()):
        raise NotARunError("its metrics are not numbers by name")
    return metrics, mapping(document.get("times"))


def comparison_figures(document: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metrics and costs of a run of a comparison, which are among all other entries."""
    if "error" not in document:
        raise NotARunError("it is neither of an experiment nor of a comparison")
    flat = {k: v for k, v in document.items() if k not in NOT_FIGURES and (v is None or is_number(v))}
    costs = {name: value for name, value in flat.items() if name.endswith(("_seconds", "_memory"))}
    return {name: value for name, value in flat.items() if name not in costs}, costs


def problem_of(document: Mapping[str, Any], metrics: Mapping[str, Any]) -> str | None:
    """What the document says is wrong, or what its figures show."""
    problem = document.get("problem") or document.get("error")
    if problem:
        return str(problem)
    if missing := [name for name in metrics if name not in finite(metrics)]:
        return f"not a finite number: {', '.join(missing)}"
    return None if metrics else "it has no figures"


def folder_name(root: Path, place: Path) -> str:
    """The name of a comparison: that of its folder."""
    return place.parent.as_posix() if place.parent.name else root.resolve().name or "results"


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def finite(figures: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(v) for name, v in figures.items() if is_number(v) and abs(v) < LARGEST_VALUE}


def mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


def require_once(records: list[Record]) -> None:
    """Refuses two documents of one run, which a mean would count twice, and two tasks in one table."""
    seen: dict[tuple[str, str, str, int], Record] = {}
    tasks: dict[tuple[str, str], Record] = {}
    for record in records:
        key = (record.experiment, record.case, record.method, record.seed)
        if (other := seen.setdefault(key, record)) is not record:
            raise FileError(
                f"Expected one document of {record.method} with seed {record.seed} in {record.experiment}, found two, "
                f"{other.path} and {record.path}: report on each folder by itself."
            )
        if (other := tasks.setdefault(key[:2], record)).task != record.task:
            raise FileError(
                f"Expected runs of one task in {record.experiment}, found {other.task} in {other.path} and "
                f"{record.task} in {record.path}: report on each by itself."
            )


def mixtures(records: list[Record]) -> list[str]:
    """Runs of one experiment that do not belong together: of several versions, on several data, or quick ones."""
    found: list[str] = []
    for experiment in dict.fromkeys(record.experiment for record in records):
        runs = [record for record in records if record.experiment == experiment]
        made_by: dict[str, list[Record]] = {}
        for run in runs:
            made_by.setdefault(str(run.versions.get("posthoc", "unknown")), []).append(run)
        if len(made_by) > 1:
            counts = ", ".join(f"{len(made_by[version])} of {version}" for version in sorted(made_by))
            fewest = min(made_by.values(), key=len)
            found.append(
                f"{experiment} mixes runs of several versions of posthoc ({counts}; {fewest[0].path} is of the fewer): "
                "what they differ by may be the version."
            )
        for case in dict.fromkeys(run.case for run in runs):
            # A method may be fitted on data of its own, and a digest may differ from seed to seed.
            roles = ("train", "test", "ood", "val")
            parts = [{role: run.data[role] for role in roles if role in run.data} for run in runs if run.case == case]
            if len({json.dumps(part, sort_keys=True) for part in parts}) > 1:
                found.append(f"{f'{experiment} {case}'.strip()} mixes runs on different data: see how it was run.")
        if quick := sum(run.configuration.get("quick") is True for run in runs):
            found.append(f"{experiment} has {quick} quick runs, on a few rows: no figure of theirs means anything.")
    return found


def read_curves(curves: Mapping[str, Any]) -> tuple[dict[str, Curve], dict[str, Curve], list[str]]:
    """The curves that can be drawn, lines of figures along something, and the names of those that cannot be drawn.
    Kinds that are not known are left out."""
    good: dict[str, Curve] = {}
    lines: dict[str, Curve] = {}
    bad: list[str] = []
    for name in CURVES:
        if curves.get(name) is not None:
            try:
                good[name] = read_curve(name, curves[name])
            except (AttributeError, KeyError, TypeError, ValueError):
                bad.append(name)
    for name, curve in mapping(curves.get("lines")).items():
        try:
            lines[str(name)] = equal({str(key): numbers(column) for key, column in curve.items()}, ("x",))
        except (AttributeError, KeyError, TypeError, ValueError):
            bad.append(str(name))
    return good, lines, bad


def read_curve(name: str, curve: Mapping[str, Any]) -> Curve:
    """A curve of this name, or an error."""
    found = equal({key: numbers(curve[key]) for key in CURVES[name]}, CURVES[name])
    if name == "reliability" and curve.get("count") is not None:
        found = equal(found | {"count": numbers(curve["count"])}, ())
    if name == "entropy":
        edges, bins = numbers(curve["edges"]), len(found["in"])
        if curve.get("out") is not None:
            found = equal(found | {"out": numbers(curve["out"])}, ())
        if len(edges) != bins + 1 or not all(low < high for low, high in pairwise(edges)):
            raise ValueError("edges and shares do not fit")
        found["edges"] = edges
    if name == "band" and curve.get("points"):
        found["points_x"] = numbers([x for x, _ in curve["points"]])
        found["points_y"] = numbers([y for _, y in curve["points"]])
    return found


def equal(curve: Curve, required: tuple[str, ...]) -> Curve:
    """The curve, if its columns have one length and those required hold a number."""
    lengths = {len(column) for column in curve.values()}
    if len(lengths) != 1 or not all(any(map(math.isfinite, curve[key])) for key in required):
        raise ValueError("columns differ in length, or hold nothing")
    return curve


def numbers(column: Any) -> list[float]:
    """A column as floats; None, and what is not finite, as NaN."""
    if not isinstance(column, list) or not column:
        raise ValueError("expected a list of numbers")
    if not all(value is None or is_number(value) for value in column):
        raise TypeError("expected numbers")
    return [float(value) if value is not None and abs(value) < LARGEST_VALUE else math.nan for value in column]
