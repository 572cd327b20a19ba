"""Runs that are made once: each leaves a JSON file with its figures and all that decided them, and is skipped when that
is there."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

from posthoc.errors import FileError
from posthoc.files import atomic_path, require_folder

__all__ = ["Run", "run_once", "timed"]

T = TypeVar("T")

LIBRARIES = ("posthoc", "torch", "numpy", "gpytorch", "pyro-ppl", "laplace-torch")
"""Whose versions a result names, where they are installed."""


@dataclass(frozen=True)
class Run:
    """One method on one experiment with one seed, and everything else that decides its numbers."""

    experiment: str
    method: str
    seed: int
    configuration: dict[str, Any]  # of what JSON knows

    def path(self, out: str | os.PathLike[str]) -> Path:
        """Where its result is."""
        return Path(out) / self.experiment / f"{self.method}-{self.seed}.json"


def run_once(
    run: Run, out: str | os.PathLike[str], work: Callable[[], dict[str, Any]], *, force: bool = False
) -> dict[str, Any]:
    """The result of a run: read if it was made before, else made by `work` (its metrics, times and whatever belongs to
    them, in what JSON knows) and written, whole or not at all."""
    path = run.path(out)
    if path.exists() and not force:
        return read(path, run)
    require_folder(path.parent)  # before the work, not after it
    document = {**asdict(run), **work(), "versions": versions(), "machine": machine()}
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return json.loads(json.dumps(document))


def read(path: Path, run: Run) -> dict[str, Any]:
    """A result that is there, if it is of this run."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        found = {name: document[name] for name in asdict(run)}
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(
            f"Expected the result of a run, found something else in {path}: delete it, or run again with --force."
        ) from error
    if found != json.loads(json.dumps(asdict(run))):
        raise FileError(
            f"Expected the result of this run, found one of another configuration in {path}: write elsewhere, or "
            "replace it with --force."
        )
    return document


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """What a call returns, and the seconds it took; a GPU's work is waited for."""
    begin = time.perf_counter()
    value = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return value, time.perf_counter() - begin


def versions() -> dict[str, str]:
    """The versions of Python and of the libraries that are there."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """What the run was made on: enough to read its times by, nothing that names the machine."""
    cuda = torch.cuda.is_available()
    return {
        "system": platform.system(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if cuda else None,
    }
