"""Sums and products of kernels, and the two kernels that only make sense in them: constant and white."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from posthoc.kernels.base import Kernel, Points, count, log_of_one
from posthoc.kernels.gpytorch import as_kernel

__all__ = ["Constant", "Product", "Sum", "White"]


class _Everywhere(Kernel):
    """A kernel that reads no coordinates."""

    def __init__(self, variance: float = 1.0) -> None:
        super().__init__()
        self.log_variance = log_of_one(variance, "a variance")

    def spaces(self) -> set[str | None]:
        return set()

    def initialize(self, sample: Points, default: str) -> None:
        pass

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

    def forward(self, a: Points, b: Points) -> Tensor:
        return self.log_variance.exp().expand(count(a), count(b))

    def spec(self) -> dict[str, Any]:
        return {"type": "constant"}


class White(_Everywhere):
    """The paper's δ: variance of a point with itself, and no covariance between two points.

    Args:
        variance: the initial variance.

    Example:
        >>> White().knows_identity
        True
    """

    knows_identity = True

    def forward(self, a: Points, b: Points) -> Tensor:
        return self.log_variance.new_zeros(()).expand(count(a), count(b))

    def spec(self) -> dict[str, Any]:
        return {"type": "white"}


class _Pair(Kernel):
    """Two kernels combined.

    Args:
        left: a kernel, of posthoc or GPyTorch.
        right: another one.
    """

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
        return {"type": type(self).__name__.lower(), "left": self.left.spec(), "right": self.right.spec()}

    def recipe(self) -> dict[str, Any]:
        return {**self.spec(), "left": self.left.recipe(), "right": self.right.recipe()}


class Sum(_Pair):
    """k + k'."""

    def forward(self, a: Points, b: Points) -> Tensor:
        return self.left(a, b) + self.right(a, b)

    def diag(self, a: Points) -> Tensor:
        return self.left.diag(a) + self.right.diag(a)


class Product(_Pair):
    """k · k'."""

    def forward(self, a: Points, b: Points) -> Tensor:
        return self.left(a, b) * self.right(a, b)

    def diag(self, a: Points) -> Tensor:
        return self.left.diag(a) * self.right.diag(a)
