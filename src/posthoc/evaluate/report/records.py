"""A folder of results as records: the documents of `python -m reproduction` and of `posthoc compare`, read alike."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posthoc.errors import FileError
from posthoc.evaluate.report.shapes import Curve, Lines, read_curves
from posthoc.evaluate.report.tables import COLUMNS

__all__ = ["Record", "Results", "read_results"]

FORMAT = 1
LARGEST = 64_000_000
"""Bytes of a file that is still looked into."""
ABOUT = frozenset({"method", "error", "applies", "traceback", "task", "seed", "device", "format", "title", "problem"})
"""What a document of a comparison holds beside its figures and what is nested."""


@dataclass(frozen=True)
class Record:
    """One method with one seed, and all that is known of it."""

    path: str
    """Within the folder of results."""
    experiment: str
    case: str  # empty where an experiment has one
    method: str
    seed: int
    task: str
    title: str
    metrics: dict[str, float] = field(default_factory=dict)
    """Finite ones only."""
    costs: dict[str, float] = field(default_factory=dict)
    """Seconds, and bytes."""
    curves: dict[str, Curve] = field(default_factory=dict)
    lines: Lines = field(default_factory=dict)
    examples: dict[str, list[Any]] = field(default_factory=dict)
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
        """How good it is, then what it costs."""
        return {**self.metrics, **self.costs}


@dataclass(frozen=True)
class Results:
    """The runs of a folder, in the order of their files, and what a reader of them must know."""

    records: tuple[Record, ...]
    warnings: tuple[str, ...]


class NotARunError(Exception):
    """What is wrong with a document, in words."""


def read_results(folder: str | os.PathLike[str]) -> Results:
    """Every run in a folder and in those below it. A file that is no run's is left out and told of in the warnings, as
    are runs that do not belong together; a folder without any run, or with two documents of one, is refused."""
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
    if path.stat().st_size > LARGEST:
        raise NotARunError(f"it is larger than {LARGEST / 1e6:.0f} MB")
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_int=whole)
    except (RecursionError, ValueError) as error:
        raise NotARunError(f"it is not JSON ({error})") from error
    except OSError as error:
        raise NotARunError(f"it cannot be read ({error.strerror})") from error
    if not isinstance(document, dict):
        raise NotARunError("it is not the document of a run")
    return document


def whole(digits: str) -> int | float:
    """An integer, or a float (perhaps infinite) of one that no float is."""
    return int(digits) if len(digits) < 18 else float(digits)


def record_of(document: Mapping[str, Any], root: Path, place: Path) -> tuple[Record, list[str]]:
    """A document of either kind as a record, and the names of its curves that are none."""
    named = {key: document.get(key) for key in ("method", "seed", "task")}
    if not isinstance(named["method"], str) or type(named["seed"]) is not int or named["task"] not in COLUMNS:
        raise NotARunError("it is not the document of a run")
    reproduced = "experiment" in document
    if reproduced and document.get("format") != FORMAT:
        raise NotARunError(f"its format is {document.get('format')!r}, and this posthoc reads {FORMAT}")
    metrics, costs = figures_of(document) if reproduced else compared_figures(document)
    curves, lines, bad = read_curves(mapping(document.get("curves")))
    configuration = mapping(document.get("configuration"))
    configuration |= {"device": document["device"]} if "device" in document else {}
    told = document.get("warnings")
    record = Record(
        path=place.as_posix(),
        experiment=str(document["experiment"]) if reproduced else folder_name(root, place),
        case=str(document.get("case") or ""),
        method=named["method"],
        seed=named["seed"],
        task=str(named["task"]),
        title=str(document.get("title") or named["method"]),
        metrics=finite(metrics),
        costs=finite(costs),
        curves=curves,
        lines=lines,
        examples={k: v for k, v in mapping(document.get("examples")).items() if isinstance(v, list)},
        problem=problem_of(document, metrics),
        applies=document.get("applies") is not False,
        warnings=tuple(str(text) for text in told) if isinstance(told, list) else (),
        configuration={name: value for name, value in configuration.items() if name != "data"},
        data=mapping(configuration.get("data") if reproduced else document.get("data")),
        versions=mapping(document.get("versions")),
        machine=mapping(document.get("machine")),
    )
    return record, bad


def figures_of(document: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metrics and costs of a run of an experiment."""
    metrics, times = document.get("metrics"), mapping(document.get("times"))
    if not isinstance(metrics, dict) or not all(value is None or is_number(value) for value in metrics.values()):
        raise NotARunError("its metrics are not numbers by name")
    return metrics, times


def compared_figures(document: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metrics and costs of a run of a comparison, which stand among all the rest."""
    if "error" not in document:
        raise NotARunError("it is neither of an experiment nor of a comparison")
    flat = {k: v for k, v in document.items() if k not in ABOUT and (v is None or is_number(v))}
    costs = {name: value for name, value in flat.items() if name.endswith(("_seconds", "_memory"))}
    return {name: value for name, value in flat.items() if name not in costs}, costs


def problem_of(document: Mapping[str, Any], metrics: Mapping[str, Any]) -> str | None:
    """What the document says is wrong, or what its figures show."""
    said = document.get("problem") or document.get("error")
    missing = [name for name, value in metrics.items() if value is None or not math.isfinite(value)]
    if said:
        return str(said)
    if missing:
        return f"not a finite number: {', '.join(missing)}"
    return None if metrics else "it has no figures"


def folder_name(root: Path, place: Path) -> str:
    """What a comparison is called: as its folder is."""
    return place.parent.as_posix() if place.parent.parts else root.resolve().name or "results"


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def finite(figures: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in figures.items() if is_number(value) and math.isfinite(value)}


def mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


def require_once(records: list[Record]) -> None:
    """Refuses two documents of one run: a mean would count it twice. And two tasks in one table."""
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
    """What was thrown together in an experiment and should not be: runs of several versions, on several data, or made
    only to see that they work."""
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
            sources = {json.dumps(roles(run), sort_keys=True) for run in runs if run.case == case}
            if len(sources) > 1:
                found.append(
                    f"{' '.join((experiment, case)).strip()} mixes runs on different data: see how it was run."
                )
        if quick := sum(run.configuration.get("quick") is True for run in runs):
            found.append(f"{experiment} has {quick} quick runs, on a few rows: no figure of theirs means anything.")
    return found


def roles(run: Record) -> dict[str, Any]:
    """The data of a run that others should share: what it was judged on, and in a comparison fitted on. (A method of an
    experiment may be fitted on data of its own, and a digest may differ from seed to seed.)"""
    return {role: run.data[role] for role in ("train", "test", "ood", "val") if role in run.data}
