"""Stationary kernels, functions of the distance between two points: RBF and Matérn."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from posthoc.errors import OptionError
from posthoc.kernels.base import BlockKernel, Points, Space, log_of_one, log_positive


class _Stationary(BlockKernel):
    """amplitude · shape(distance), with one length-scale for each dimension."""

    def __init__(
        self, on: Space | None = None, lengthscale: float | Tensor | None = None, amplitude: float = 1.0
    ) -> None:
        super().__init__(on)
        self.set_from_data = {"log_lengthscale"} if lengthscale is None else set()
        scales = log_positive(1.0 if lengthscale is None else lengthscale, "length-scales")
        self.log_lengthscale = nn.Parameter(scales.reshape(-1))
        self.log_amplitude = log_of_one(amplitude, "an amplitude")

    def initialize(self, sample: Points, default: str) -> None:
        super().initialize(sample, default)
        x, start = self.block(sample), self.log_lengthscale.detach()
        if self.set_from_data:
            start = median_distance(x).log().reshape(1)
        if (found := start.numel()) not in (1, x.shape[1]):
            raise OptionError(f"Expected one length-scale, or one for each of the {x.shape[1]} {self.on}, got {found}.")
        self.log_lengthscale = nn.Parameter(start.to(x).expand(x.shape[1]).clone(), self.log_lengthscale.requires_grad)

    def diag(self, a: Points) -> Tensor:
        return self.log_amplitude.exp().expand(len(self.block(a)))


class RBF(_Stationary):
    """amplitude · exp(-½ Σ_j (x_j - x'_j)² / l_j²). The paper prints l_j where we, as usual, square it.

    Args:
        on: the block to read: "inputs", "features" or "outputs"; by default the first there is of features, inputs,
            outputs.
        lengthscale: the initial l, one number or one for each dimension; by default the median distance of a sample.
        amplitude: the initial amplitude.

    Example:
        >>> kernel = RBF(on="inputs", lengthscale=1.0, amplitude=4.0)
        >>> x = {"inputs": torch.zeros(2, 3, dtype=torch.float64)}
        >>> float(kernel(x, x)[0, 1].detach())
        4.0
    """

    name = "rbf"

    def forward(self, a: Points, b: Points) -> Tensor:
        return self.at(a, self.anchor(b))

    def anchor(self, b: Points) -> tuple[Tensor, ...]:
        y, inverse = self.block(b), (-self.log_lengthscale).exp()
        scaled = (y - y[:1]) * inverse
        return y[:1], inverse, scaled, half_square(scaled)

    def at(self, a: Points, anchor: Any) -> Tensor:
        origin, inverse, y, half_y = anchor
        return (log_correlation((self.block(a) - origin) * inverse, y, half_y) + self.log_amplitude).exp()

    def joint(self, x: Points, z: Points) -> Tensor:
        a, b = self.block(x), self.block(z)
        if a.requires_grad:
            return super().joint(x, z)
        return _JointRBF.apply(a, b, self.log_lengthscale, self.log_amplitude)  # type: ignore[no-untyped-call]


class Matern(_Stationary):
    """The Matérn family, rougher than RBF, which is its limit.

    Args:
        nu: the smoothness: 0.5, 1.5 or 2.5.
        on: as in `RBF`.
        lengthscale: as in `RBF`.
        amplitude: the initial amplitude.

    Example:
        >>> Matern(nu=1.5).spec()
        {'type': 'matern', 'on': None, 'nu': 1.5}
    """

    name = "matern"
    options = ("on", "nu")

    def __init__(
        self,
        nu: float = 2.5,
        on: Space | None = None,
        lengthscale: float | Tensor | None = None,
        amplitude: float = 1.0,
    ) -> None:
        super().__init__(on, lengthscale, amplitude)
        if nu not in (0.5, 1.5, 2.5):
            raise OptionError(f"Expected nu of 0.5, 1.5 or 2.5, got {nu}.")
        self.nu = nu

    def forward(self, a: Points, b: Points) -> Tensor:
        inverse = (-self.log_lengthscale).exp()
        # Differences, not products: the square root would turn a rounding of 1e-16 into one of 1e-8.
        r = torch.cdist(self.block(a) * inverse, self.block(b) * inverse, compute_mode="donot_use_mm_for_euclid_dist")
        r = math.sqrt(2.0 * self.nu) * r
        decay = (self.log_amplitude - r).exp()
        if self.nu == 0.5:
            return decay
        return (1.0 + r) * decay if self.nu == 1.5 else (1.0 + r + r.square() / 3.0) * decay


class _JointRBF(torch.autograd.Function):
    """The RBF kernel K(a, b) above K(b, b), (N + M, M), with a derived backward pass, for a without gradient.

    In scaled coordinates x and y, with P and Q the products K̄ ∘ K of the two parts: ȳ = Pᵀ x - (Pᵀ 1) y + (Q + Qᵀ) y -
    ((Q + Qᵀ) 1) y, and the gradient of log l is Σ_i (P 1)_i x_i² - Σ_j y_j (ȳ + Pᵀ x)_j.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, log_lengthscale: Tensor, log_amplitude: Tensor) -> Tensor:
        inverse = (-log_lengthscale).exp()
        scaled = torch.cat([a, b]).sub_(b[:1]).mul_(inverse)
        y = scaled[len(a) :]
        k = log_correlation(scaled, y, half_square(y)).add_(log_amplitude).exp_()
        ctx.save_for_backward(scaled, k, inverse)
        return k

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        scaled, k, inverse = ctx.saved_tensors
        sizes = [len(scaled) - k.shape[1], k.shape[1]]
        product = grad * k
        (x, y), (p, q) = scaled.split(sizes), product.split(sizes)
        both, px = q + q.mT, p.mT @ x
        y_grad = torch.addmm(px, both, y).addcmul_((p.sum(0) + both.sum(0))[:, None], y, value=-1)
        scale_grad = (p.sum(-1) @ x.square()).sub_((y * (y_grad + px)).sum(0))
        return None, y_grad * inverse, scale_grad, product.sum()


def half_square(x: Tensor) -> Tensor:  # (N,)
    """-½|x|² of each row."""
    return -0.5 * torch.linalg.vecdot(x, x)


def log_correlation(x: Tensor, y: Tensor, half_y: Tensor) -> Tensor:  # (N, M)
    """-½|x - y|² = x·y - ½|x|² - ½|y|². The products lose digits far from the origin, so one of the points should be
    the origin; distances do not depend on it."""
    return torch.addmm(half_square(x)[:, None], x, y.mT).add_(half_y).clamp_max_(0.0)


def median_distance(x: Tensor) -> Tensor:  # ()
    """The median distance between different rows, or 1 where there is none."""
    distances = torch.pdist(x)
    distances = distances[distances > 0]
    return distances.median() if distances.numel() else x.new_ones(())
