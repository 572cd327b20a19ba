"""Sums and products of kernels, and the simple kernels that are combined: linear, constant and white."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from posthoc.kernels.base import BlockKernel, Kernel, Points, Space, count, log_of_one
from posthoc.kernels.gpytorch import as_kernel


class Linear(BlockKernel):
    """variance · xᵀx': the kernel of Bayesian linear regression (add `Constant()` for its bias).

    Args:
        on: As in `RBF`.
        variance: The initial variance.

    Example:
        >>> (Linear(on="features") + Linear(on="inputs")).spec()["type"]
        'sum'
    """

    name = "linear"

    def __init__(self, on: Space | None = None, variance: float = 1.0) -> None:
        super().__init__(on)
        self.log_variance = log_of_one(variance, "a variance")

    def forward(self, a: Points, b: Points) -> Tensor:
        return self.log_variance.exp() * self.block(a) @ self.block(b).mT

    def diag(self, a: Points) -> Tensor:
        return self.log_variance.exp() * self.block(a).square().sum(-1)


class _Everywhere(Kernel):
    """A kernel that reads no coordinates."""

    def __init__(self, variance: float = 1.0) -> None:
        super().__init__()
        self.log_variance = log_of_one(variance, "a variance")

    def spaces(self) -> set[str | None]:
        return set()

    def diag(self, a: Points) -> Tensor:
        return self.log_variance.exp().expand(count(a))


class Constant(_Everywhere):
    """The same covariance everywhere: an unknown shift of the whole function.

    Args:
        variance: the initial variance of the shift.

    Example:
        >>> Constant(variance=4.0).spec()
        {'type': 'constant'}
    """

    name = "constant"

    def forward(self, a: Points, b: Points) -> Tensor:
        return self.log_variance.exp().expand(count(a), count(b))


class White(_Everywhere):
    """The paper's δ: variance of a point with itself, and no covariance between two points.

    Args:
        variance: the initial variance.

    Example:
        >>> White().knows_identity
        True
    """

    name = "white"
    knows_identity = True

    def forward(self, a: Points, b: Points) -> Tensor:
        return self.log_variance.new_zeros(()).expand(count(a), count(b))


class _Pair(Kernel):
    """Two kernels combined, each of posthoc or GPyTorch."""

    def __init__(self, left: Kernel, right: Kernel) -> None:
        super().__init__()
        self.left, self.right = as_kernel(left), as_kernel(right)
        self.knows_identity = self.left.knows_identity or self.right.knows_identity

    def spaces(self) -> set[str | None]:
        return self.left.spaces() | self.right.spaces()

    def initialize(self, sample: Points, default: str) -> None:
        self.left.initialize(sample, default)
        self.right.initialize(sample, default)

    def spec(self) -> dict[str, Any]:
        return {"type": self.name, "left": self.left.spec(), "right": self.right.spec()}

    def recipe(self) -> dict[str, Any]:
        return {**self.spec(), "left": self.left.recipe(), "right": self.right.recipe()}


class Sum(_Pair):
    """k + k'."""

    name = "sum"

    def forward(self, a: Points, b: Points) -> Tensor:
        return self.left(a, b) + self.right(a, b)

    def diag(self, a: Points) -> Tensor:
        return self.left.diag(a) + self.right.diag(a)


class Product(_Pair):
    """k · k'."""

    name = "product"

    def forward(self, a: Points, b: Points) -> Tensor:
        return self.left(a, b) * self.right(a, b)

    def diag(self, a: Points) -> Tensor:
        return self.left.diag(a) * self.right.diag(a)
