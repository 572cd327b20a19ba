"""A head as it was read from a file, on its way to becoming a method again."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from posthoc.files import check_shapes
from posthoc.likelihoods import Likelihood, make_likelihood

__all__ = ["Saved"]

M = TypeVar("M")


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

    @property
    def options(self) -> dict[str, Any]:
        """What the method said of itself, to take apart."""
        return dict(self.config["options"])

    @property
    def width(self) -> tuple[int, ...]:
        """The shape of one row of outputs."""
        return tuple(self.config["width"])

    def unfitted(self, kind: Callable[..., M], **options: Any) -> M:
        """The method as it was before its fit, with the network."""
        likelihood = make_likelihood(self.config["likelihood"])
        return kind(self.model, likelihood, layer=self.config["layer"], device=self.device, **options)

    def likelihood(self) -> Likelihood:
        """A likelihood of the right shapes; its values are the caller's to fill in."""
        likelihood = make_likelihood(self.config["likelihood"])
        likelihood.start(torch.zeros(1, *self.width), torch.ones(1, *self.width))
        return likelihood

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuses a file whose tensors are others, or of other shapes."""
        check_shapes(self.path, self.tensors, shapes)
