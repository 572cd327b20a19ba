"""Runs that are made once: each leaves a JSON file with its figures and all that decided them, and is skipped when that
is there."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posthoc.errors import FileError
from posthoc.evaluate.cost import machine, versions
from posthoc.io import atomic_path, require_folder

__all__ = ["FORMAT", "Run", "run_once"]

FORMAT = 1
"""Of a run's document."""

Document = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One method on one case of an experiment with one seed, and everything else that decides its numbers."""

    experiment: str
    case: str  # a network or a data set; empty where there is one
    method: str
    seed: int
    task: str
    configuration: dict[str, Any]  # of what JSON knows

    def path(self, out: str | os.PathLike[str]) -> Path:
        """Where its result is."""
        name = "-".join(part for part in (self.case, self.method, str(self.seed)) if part)
        return Path(out) / self.experiment / f"{name}.json"


def run_once(
    run: Run, out: str | os.PathLike[str], work: Callable[[], Mapping[str, Any]], *, force: bool = False
) -> Document:
    """The document of a run: read if it was made before, else made by `work` (its metrics, its times and whatever
    belongs to them, in what JSON knows) and written, whole or not at all. `data` among what it returns, words on where
    the data come from, joins the configuration."""
    path = run.path(out)
    if path.exists() and not force:
        return read(path, run)
    require_folder(path.parent)  # before the work, not after it
    found = dict(work())
    metrics = found.pop("metrics")
    configuration = run.configuration | ({"data": found.pop("data")} if "data" in found else {})
    document = {
        "format": FORMAT,
        **asdict(run),
        "configuration": configuration,
        "problem": problem(metrics),
        "metrics": metrics,
        **found,
        "versions": versions(),
        "machine": machine(),
    }
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(finite(document), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def finite(value: Any) -> Any:
    """The same with null for numbers that JSON does not know."""
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def problem(metrics: Mapping[str, float]) -> str | None:
    """Why a run counts in no mean, if it does not."""
    bad = [name for name, value in metrics.items() if not math.isfinite(value)]
    return f"not a finite number: {', '.join(bad)}" if bad else None


def read(path: Path, run: Run) -> Document:
    """A result that is there, if it is of this run and of this version."""
    expected = json.loads(json.dumps(asdict(run)))
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        found = {name: document[name] for name in expected}
        found["configuration"] = {name: value for name, value in found["configuration"].items() if name != "data"}
        made_by = document["versions"]["posthoc"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FileError(
            f"Expected the result of a run, found something else in {path}: delete it, or run again with --force."
        ) from error
    if found != expected:
        differs = [
            name
            for name in expected["configuration"]
            if expected["configuration"][name] != found["configuration"].get(name)
        ]
        raise FileError(
            f"Expected the result of this run, found one of another configuration in {path}"
            f"{' (' + ', '.join(differs) + ')' if differs else ''}: write elsewhere, or replace it with --force."
        )
    if made_by != versions()["posthoc"]:
        raise FileError(
            f"Expected a result of posthoc {versions()['posthoc']}, found one of {made_by} in {path}: write elsewhere, "
            "or replace it with --force."
        )
    return document
