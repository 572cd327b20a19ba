"""The linear kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from posthoc.kernels.base import BlockKernel, Points, Space, log_of_one

__all__ = ["Linear"]


class Linear(BlockKernel):
    """variance · xᵀx': the kernel of Bayesian linear regression (add `Constant()` for its bias).

    Args:
        on: as in `RBF`.
        variance: the initial variance.

    Example:
        >>> (Linear(on="features") + Linear(on="inputs")).spec()["type"]
        'sum'
    """

    def __init__(self, on: Space | None = None, variance: float = 1.0) -> None:
        super().__init__(on)
        self.log_variance = log_of_one(variance, "a variance")

    def forward(self, a: Points, b: Points) -> Tensor:
        return self.log_variance.exp() * self.block(a) @ self.block(b).mT

    def diag(self, a: Points) -> Tensor:
        return self.log_variance.exp() * self.block(a).square().sum(-1)

    def spec(self) -> dict[str, Any]:
        return {"type": "linear", "on": self.on}
