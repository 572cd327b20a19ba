"""Checkpoints: a run that was killed at any moment goes on to exactly the parameters it would have had."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posthoc.errors import FileError
from posthoc.io import lock, read_tensors, require_folder, write_tensors
from posthoc.training.adam import FlatAdam
from posthoc.training.distributed import Ranks
from posthoc.training.early_stopping import EarlyStopping
from posthoc.training.options import History
from posthoc.validation import integer

__all__ = ["Checkpoint"]

FILE = "checkpoint.safetensors"
FORMAT = "posthoc-checkpoint"


class Checkpoint:
    """A folder with the state of one run, written whole every so many steps."""

    def __init__(self, folder: str | os.PathLike[str], *, every: int = 200, resume: bool = False) -> None:
        self.folder, self.resume = Path(folder), resume
        self.every = integer("checkpoint_every", every, 1)
        self.run: dict[str, Any] = {}

    @property
    def path(self) -> Path:
        return self.folder / FILE

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Makes sure, before the work and not after it, that the folder may be used, and that nobody else does."""
        if not Ranks().first:
            yield
            return
        require_folder(self.folder)
        with lock(self.folder / ".lock"):
            if not self.resume and any(not entry.name.startswith(".") for entry in self.folder.iterdir()):
                raise FileError(
                    f"Expected an empty checkpoint folder, found files in {self.folder}: go on from there with "
                    "--resume (resume=True), or name another folder."
                )
            for unfinished in self.folder.glob(f".{FILE}.*"):  # of a run that was killed while it wrote
                unfinished.unlink()
            yield

    def of(self, run: Mapping[str, Any]) -> None:
        """Says which run it is: method, options and data, as far as they decide the numbers. A checkpoint of another
        one is refused."""
        self.run = json.loads(json.dumps(run))
        if self.resume and self.path.exists():
            self._refuse_another(read_tensors(self.path, FORMAT)[1])

    def save(self, optimizer: FlatAdam, stopping: EarlyStopping, step: int, generator: torch.Generator | None) -> None:
        """Writes the state after `step` steps in place of the one before."""
        tensors = {f"state.{i}": t for i, t in enumerate(optimizer.state)}
        tensors |= {f"kept.{i}": t for i, t in enumerate(stopping.best)}
        history = stopping.history
        tensors["losses"] = torch.tensor(history.losses, dtype=torch.float64)
        if generator is not None:
            tensors["generator"] = generator.get_state()
        config = {"run": self.run, "step": step, "scores": history.scores, "best_step": history.best_step}
        write_tensors(self.path, tensors, FORMAT, config)

    def restore(self, optimizer: FlatAdam, stopping: EarlyStopping, generator: torch.Generator | None) -> int:
        """Puts everything back as it was when the last checkpoint was written, and says after how many steps."""
        if not (self.resume and self.path.exists()):
            return 0
        tensors, config = read_tensors(self.path, FORMAT)
        optimizer.restore(ordered(tensors, "state"))
        stopping.best = [t.to(v.device) for t, v in zip(ordered(tensors, "kept"), optimizer.values, strict=False)]
        history: History = stopping.history
        history.losses = tensors["losses"].tolist()
        history.scores = {int(step): score for step, score in config["scores"].items()}
        history.best_step = config["best_step"]
        if generator is not None:
            generator.set_state(tensors["generator"])
        return int(config["step"])

    def _refuse_another(self, config: Mapping[str, Any]) -> None:
        differences = differing(self.run, config["run"])
        if differences:
            lines = "; ".join(f"{name}: {ours} now, {theirs} there" for name, (ours, theirs) in differences.items())
            raise FileError(
                f"Expected a checkpoint of this run, found one of another configuration or other data in {self.folder} "
                f"({lines}). Use the same options and data, or name another folder."
            )


def ordered(tensors: Mapping[str, Tensor], prefix: str) -> list[Tensor]:
    named = {int(name.split(".")[1]): t for name, t in tensors.items() if name.startswith(f"{prefix}.")}
    return [named[i] for i in sorted(named)]


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """The leaves in which two nested mappings differ, by dotted name."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(key), theirs.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found |= differing(a, b, f"{prefix}{key}.")
        elif a != b:
            found[f"{prefix}{key}"] = (a, b)
    return found
