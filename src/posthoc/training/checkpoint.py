"""Checkpoints of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

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
SHOWN = 5
"""How many differences between two runs an error names."""


class Checkpoint:
    """A folder with the state of one run, written periodically: a run that was killed at any moment can be resumed, to
    exactly the parameters that it would have had.

    Args:
        folder: the folder, which is made if it is not there.
        every: steps between two checkpoints.
        resume: whether to continue from the checkpoint in the folder, if there is one.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every: int = 200, resume: bool = False) -> None:
        self.folder, self.resume = Path(folder), resume
        self.every = integer("checkpoint_every", every, 1)
        self.run: dict[str, Any] = {}

    @property
    def path(self) -> Path:
        return self.folder / FILE

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Locks the folder; before any work, refuses one that holds other files.

        Raises:
            FileError: if the folder cannot be used, or another process uses it.
        """
        if not Ranks().first:
            yield
            return
        require_folder(self.folder)
        with lock(self.folder / ".lock"):
            if not (self.resume and self.path.exists()) and any(
                not entry.name.startswith(".") for entry in self.folder.iterdir()
            ):
                hint = "" if self.resume else "go on from there with --resume (resume=True), or "
                raise FileError(
                    f"Expected an empty checkpoint folder{', or one with a checkpoint' if self.resume else ''}, found "
                    f"other files in {self.folder}: {hint}name another folder."
                )
            for unfinished in self.folder.glob(f".{FILE}.*"):  # of a run that was killed while writing
                unfinished.unlink()
            yield

    def of(self, run: Mapping[str, Any]) -> None:
        """Sets what identifies the run: method, options and data, as far as they decide the numbers.

        Raises:
            FileError: if the folder has the checkpoint of another run.
        """
        self.run = json.loads(json.dumps(run))
        if self.resume and self.path.exists():
            self._require_same_run(read_tensors(self.path, FORMAT)[1]["run"])

    def save(self, optimizer: FlatAdam, stopping: EarlyStopping, step: int, generator: torch.Generator | None) -> None:
        """Writes the state after `step` steps in place of the previous one."""
        tensors = {f"state.{i}": t for i, t in enumerate(optimizer.state)}
        tensors |= {f"best.{i}": t for i, t in enumerate(stopping.best)}
        history = stopping.history
        tensors["losses"] = torch.tensor(history.losses, dtype=torch.float64)
        if generator is not None:
            tensors["generator"] = generator.get_state()
        scores = {str(step): score for step, score in history.scores.items()}
        config = {"run": self.run, "step": step, "scores": scores, "best_step": history.best_step}
        write_tensors(self.path, tensors, FORMAT, config)

    def restore(self, optimizer: FlatAdam, stopping: EarlyStopping, generator: torch.Generator | None) -> int:
        """Restores the state of the last checkpoint.

        Returns:
            After how many steps it was written; 0 if there is none.
        """
        if not (self.resume and self.path.exists()):
            return 0
        tensors, config = read_tensors(self.path, FORMAT)
        state = [tensors.get(f"state.{i}") for i in range(len(optimizer.state))]
        best = [tensors.get(f"best.{i}") for i in range(len(stopping.best))]
        for found, expected in zip([*state, *best], [*optimizer.state, *stopping.best], strict=True):
            if found is None or (found.shape, found.dtype) != (expected.shape, expected.dtype):
                raise FileError(f"Expected a checkpoint with the parameters of this run, found others in {self.path}.")
        optimizer.restore([t for t in state if t is not None])
        stopping.best = [t.to(v.device) for t, v in zip(best, optimizer.values, strict=False) if t is not None]
        history: History = stopping.history
        history.losses = tensors["losses"].tolist()
        history.scores = {int(step): score for step, score in config["scores"].items()}
        history.best_step = config["best_step"]
        if generator is not None:
            generator.set_state(tensors["generator"])
        return int(config["step"])

    def _require_same_run(self, run: Mapping[str, Any]) -> None:
        ours, theirs = flattened(self.run), flattened(run)
        differing = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
        if differing:
            named = sorted(differing, key=lambda name: (name.count("."), name))[:SHOWN]
            values = [f"{name}: {ours.get(name)!s:.80} now, {theirs.get(name)!s:.80} there" for name in named]
            more = f"; and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
            raise FileError(
                f"Expected a checkpoint of this run, found one of another configuration or other data in {self.folder} "
                f"({'; '.join(values)}{more}). Use the same options and data, or name another folder."
            )


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested mappings by dotted names."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat
