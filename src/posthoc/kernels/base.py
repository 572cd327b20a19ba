"""What all kernels have in common.

A kernel reads named blocks of coordinates ("inputs", "features" or "outputs") from its points, so that one kernel may
read several: `RBF(on="inputs") * (Linear(on="features") + White())` is the paper's classification kernel. Calling a
kernel gives the covariance between points that are all different; `diag` gives that of each point with itself. Only
`White` tells the two apart: its δ is the identity of a point, by role and not by value (a test point is never an
inducing point, even where their coordinates agree).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from posthoc.errors import OptionError
from posthoc.validation import as_numbers, choice

Space = Literal["inputs", "features", "outputs"]
Points = Mapping[str, Tensor]
"""Blocks of coordinates by name, each (N, D_block) in float64."""

SPACES = ("inputs", "features", "outputs")


class Kernel(nn.Module, ABC):
    """A covariance function with parameters to learn; `requires_grad_(False)` keeps them as they are.

    Kernels are added and multiplied with `+` and `*`.
    """

    name: ClassVar[str]
    """The name under which the kernel is registered."""
    options: ClassVar[tuple[str, ...]] = ()
    """The arguments of the constructor that decide the form of the kernel, which are attributes of the same names."""
    knows_identity = False
    """Whether a point's covariance with itself differs from that with another point at the same place."""
    set_from_data: Set[str] = frozenset()
    """The names of parameters whose initial values `initialize` chooses."""

    @abstractmethod
    def forward(self, a: Points, b: Points) -> Tensor:
        """The covariance (N, M) between the points of a and those of b, all different."""

    @abstractmethod
    def diag(self, a: Points) -> Tensor:
        """The covariance (N,) of each point with itself."""

    @abstractmethod
    def spaces(self) -> set[str | None]:
        """The blocks it reads; None stands for the default one."""

    def initialize(self, sample: Points, default: str) -> None:
        """Sets the block where none was named to `default`, and initial values from a sample of the data."""

    def spec(self) -> dict[str, Any]:
        """What `kernel_from_spec` needs to build the kernel again, apart from its parameters."""
        return {"type": self.name, **{option: getattr(self, option) for option in self.options}}

    def recipe(self) -> dict[str, Any]:
        """The spec of a kernel that is not fitted, with initial values and whether they are learned."""
        own, unset = self.named_parameters(recurse=False), self.set_from_data
        start = {name: [None if name in unset else p.tolist(), p.requires_grad] for name, p in own}
        return {**self.spec(), "start": start}

    def set_start(self, start: Mapping[str, Any]) -> None:
        """Sets the initial values of a `recipe`; None stands for those that `initialize` chooses."""
        self.set_from_data = {name for name, (values, _) in start.items() if values is None}
        for name, (values, learned) in start.items():
            parameter = self.get_parameter(name)
            if values is not None:
                parameter = nn.Parameter(torch.tensor(values, dtype=torch.float64))
            setattr(self, name, parameter.requires_grad_(learned))

    def anchor(self, b: Points) -> Any:
        """What `at` needs of some points, for several calls."""
        return b

    def at(self, a: Points, anchor: Any) -> Tensor:
        """The covariance (N, M) between the points of a and those of an `anchor`, all different."""
        return self(a, anchor)

    def joint(self, x: Points, z: Points) -> Tensor:
        """K(x, z) and, below it, `gram` of z, in one evaluation: (N + M, M)."""
        k = self({space: torch.cat([x[space], block]) for space, block in z.items()}, z)
        return k.diagonal_scatter(self.diag(z), offset=k.shape[1] - len(k)) if self.knows_identity else k

    def __add__(self, other: Kernel) -> Kernel:
        from posthoc.kernels.combine import Sum

        return Sum(self, other)

    def __mul__(self, other: Kernel) -> Kernel:
        from posthoc.kernels.combine import Product

        return Product(self, other)


def gram(kernel: Kernel, z: Points) -> Tensor:
    """The covariance (M, M) among the points of z: on the diagonal, each point is itself."""
    k = kernel(z, z)
    return k.diagonal_scatter(kernel.diag(z)) if kernel.knows_identity else k


class BlockKernel(Kernel):
    """A kernel that reads one block."""

    options: ClassVar[tuple[str, ...]] = ("on",)

    def __init__(self, on: Space | None) -> None:
        super().__init__()
        if on is not None:
            choice("on", on, SPACES)
        self.on: str | None = on

    def spaces(self) -> set[str | None]:
        return {self.on}

    def initialize(self, sample: Points, default: str) -> None:
        self.on = self.on or default

    def extra_repr(self) -> str:
        return f"on={self.on!r}" if self.on is not None else ""

    def block(self, points: Points) -> Tensor:
        """The coordinates that the kernel reads, (N, D)."""
        assert self.on is not None, "initialize() sets the block"
        return points[self.on]


def count(points: Points) -> int:
    """The number of points."""
    return len(next(iter(points.values())))


def log_positive(value: Any, name: str) -> Tensor:
    """The logarithm of numbers that have to be positive."""
    tensor = as_numbers(value, torch.float64)
    if tensor is None or not bool(((tensor > 0) & tensor.isfinite()).all()):
        raise OptionError(f"Expected {name} above zero, got {value!r}.")
    return tensor.log()


def log_of_one(value: Any, name: str) -> nn.Parameter:
    """The logarithm () of one positive number, to be learned."""
    log = log_positive(value, name)
    if log.numel() != 1:
        raise OptionError(f"Expected {name}, which is one number, got {log.numel()}.")
    return nn.Parameter(log.reshape(()))
