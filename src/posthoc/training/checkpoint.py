"""Checkpoints of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from posthoc.errors import FileError
from posthoc.io import lock, read_tensors, require_folder, require_outside_outputs, write_tensors
from posthoc.training.distributed import Ranks
from posthoc.validation import integer

FILE = "checkpoint.safetensors"
FORMAT = "posthoc-checkpoint"
SHOWN = 5
"""The most differences between two runs that an error names."""


class Checkpoint:
    """A folder with the state of one run: a killed run can be resumed, to exactly the parameters it would have had.

    Args:
        folder: The folder, which is made if it is not there.
        every: Steps between two checkpoints.
        resume: Whether to continue from the checkpoint in the folder, if there is one.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every: int = 200, resume: bool = False) -> None:
        self.folder, self.path, self.resume = Path(folder), Path(folder) / FILE, resume
        self.every = integer("checkpoint_every", every, 1)
        self.run: dict[str, Any] = {}

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Locks the folder; before any work, refuses one that holds other files.

        Raises:
            FileError: If the folder cannot be used, or another process uses it.
        """
        if not Ranks().first:
            yield
            return
        require_outside_outputs(self.folder)
        require_folder(self.folder)
        with lock(self.folder / ".lock"):
            resumes = self.resume and self.path.exists()
            if not resumes and any(not entry.name.startswith(".") for entry in self.folder.iterdir()):
                hint = "" if self.resume else "go on from there with --resume (resume=True), or "
                found = f"found other files in {self.folder}: {hint}name another"
                raise FileError(f"Expected an empty checkpoint folder, {found}.")
            for unfinished in self.folder.glob(f".{FILE}.*"):  # of a run that was killed while writing
                unfinished.unlink()
            yield

    def of(self, run: Mapping[str, Any]) -> None:
        """Sets what identifies the run: method, options and data, as far as they decide the numbers.

        Raises:
            FileError: If the folder has the checkpoint of another run.
        """
        self.run = json.loads(json.dumps(run))
        if (saved := self.load()) is None:
            return
        now, there = flattened(self.run), flattened(saved[1]["run"])
        differing = [name for name in now.keys() | there.keys() if now.get(name) != there.get(name)]
        if differing:
            named = sorted(differing, key=lambda name: (name.count("."), name))[:SHOWN]
            values = [f"{name}: {now.get(name)!s:.80} now, {there.get(name)!s:.80} there" for name in named]
            found = f"one of another configuration or other data in {self.folder} ({'; '.join(values)})"
            advice = "use the same options and data, or name another folder"
            raise FileError(f"Expected a checkpoint of this run, found {found}: {advice}.")

    def save(self, tensors: dict[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Writes tensors, and what JSON can hold, in place of the previous ones."""
        write_tensors(self.path, tensors, FORMAT, {"run": self.run, **numbers})

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What was saved last; None if the run does not resume, or nothing was saved."""
        return read_tensors(self.path, FORMAT) if self.resume and self.path.exists() else None


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested mappings by dotted names."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat
