"""A head as it was read from a file, on its way to becoming a method again."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from posthoc.collect.class_scores import KINDS
from posthoc.errors import DataError, OptionError, PosthocError
from posthoc.io import changed, check_tensors
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.registry import make_likelihood

__all__ = ["Saved"]

M = TypeVar("M")

UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)
"""What a config that was changed may lead to."""


@dataclass(frozen=True)
class Saved:
    """What was in the file, and what it is to be opened with."""

    path: str | os.PathLike[str]
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    model: nn.Module | Callable[..., Any] | None
    device: str | torch.device | None
    extra: dict[str, Any]
    """What else `load` was given."""

    def __post_init__(self) -> None:
        width, said = self.config["shapes"]["outputs"], self.config["config"]["outputs_are"]
        if not all(type(size) is int and size > 0 for size in width):
            raise changed(self.path, f"outputs of width {width}")
        if said not in KINDS:
            raise changed(self.path, f"outputs that are {said!r}")

    @property
    def options(self) -> dict[str, Any]:
        """What the method said of itself, to take apart."""
        options = dict(self.config["config"])
        return {name: value for name, value in options.items() if name not in ("layer", "outputs_are")}

    @property
    def width(self) -> tuple[int, ...]:
        """The shape of one row of outputs."""
        return tuple(self.config["shapes"]["outputs"])

    def unfitted(self, kind: Callable[..., M], **options: Any) -> M:
        """The method as it was before its fit, with the network."""
        return kind(self.model, self._likelihood(), layer=self.config["config"]["layer"], device=self.device, **options)

    def likelihood(self) -> Likelihood:
        """A likelihood of the right shapes; its values are the caller's to fill in."""
        likelihood = self._likelihood()
        self.shape(likelihood)
        return likelihood

    def shape(self, likelihood: Likelihood) -> None:
        """Gives a likelihood the shapes it had for these outputs."""
        size = math.prod(self.width)
        if likelihood.task == "regression" and size > max((t.numel() for t in self.tensors.values()), default=0):
            raise changed(self.path, f"{size} outputs, more than its tensors are of")
        row = torch.zeros(()).expand(1, *self.width)  # which takes no memory, however wide
        try:
            likelihood.check_outputs(row)
        except DataError as error:
            raise changed(self.path, error) from error
        likelihood.initialize(row, row)

    def _likelihood(self) -> Likelihood:
        try:
            return make_likelihood(self.config["likelihood"])
        except OptionError as error:
            raise changed(self.path, error) from error

    def check(self, expected: Mapping[str, tuple[int, ...] | Tensor]) -> None:
        """Refuses a file whose tensors are others, or of other shapes; or of other dtypes than the tensors given."""
        check_tensors(self.path, self.tensors, expected)

    def check_some(self, expected: Mapping[str, tuple[int, ...] | Tensor]) -> None:
        """As `check`, with more tensors beside these."""
        check_tensors(self.path, {name: self.tensors[name] for name in expected if name in self.tensors}, expected)

    @contextmanager
    def rebuilding(self) -> Iterator[None]:
        """Tells what goes wrong inside, but for errors that are ours, as a file that was changed."""
        try:
            yield
        except OptionError as error:
            error.add_note(f"This was while loading {self.path}.")  # what it was given may be wrong, or what `load` was
            raise
        except (PosthocError, torch.cuda.OutOfMemoryError):
            raise
        except UNREADABLE as error:
            raise changed(self.path, repr(error)) from error
