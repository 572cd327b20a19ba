"""The values of the RBF kernel, with their gradient: where most of the time goes that is not in factors and solves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["RBFValues"]


class RBFValues(torch.autograd.Function):
    """The RBF kernel between the rows of a and b (and `among` those of b, which then stand below a's), with its
    backward pass written out, where autograd would keep and revisit a dozen tensors.

    In scaled coordinates x and y, with P = K̄ ∘ K: x̄ = P y - (P 1) x and ȳ = Pᵀ x - (Pᵀ 1) y, and Σ_i x_i x̄_i +
    Σ_j y_j ȳ_j is minus the gradient of log l. Among y, where Q takes P's place, ȳ has (Q + Qᵀ) y - (Q 1 + Qᵀ 1) y.
    """

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, log_lengthscale: Tensor, log_amplitude: Tensor, among: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        inverse, n = (-log_lengthscale).exp(), len(a)
        # Products lose digits far from the origin; distances do not depend on where it is.
        x = torch.cat([a, b]).sub_(b[:1]).mul_(inverse)
        half = x.square().sum(-1, keepdim=True).mul_(-0.5)
        y, half_y = x[n:], half[n:].mT
        if not among:
            x, half = x[:n], half[:n]
        # -½|x - y|² = x·y - ½|x|² - ½|y|², with the amplitude in the exponent
        k = torch.addmm(half, x, y.mT).add_(half_y + log_amplitude).clamp_max_(log_amplitude).exp_()
        ctx.save_for_backward(x, y, k, inverse)
        ctx.among = among
        return (k[:n], k[n:]) if among else k

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, Tensor, Tensor, None]:
        x, y, k, inverse = ctx.saved_tensors
        p = torch.cat(grads).mul_(k)
        if ctx.among and not ctx.needs_input_grad[0]:  # as in training: half the products do
            x, (p, q) = x[: len(x) - len(y)], p.split([len(x) - len(y), len(y)])
            both, px = q + q.mT, p.mT @ x
            y_grad = torch.addmm(px, both, y).addcmul_((p.sum(0) + both.sum(0))[:, None], y, value=-1)
            scale_grad = (p.sum(-1) @ x.square()).sub_((y * (y_grad + px)).sum(0))
            return None, y_grad * inverse, scale_grad, p.sum() + q.sum(), None
        rows = p.sum(-1, keepdim=True)
        x_grad = (p @ y).addcmul_(rows, x, value=-1)
        y_grad = (p.mT @ x).addcmul_(p.sum(0)[:, None], y, value=-1)
        scale_grad = (x * x_grad).sum(0).add_((y * y_grad).sum(0)).neg_()
        if ctx.among:
            x_grad, below = x_grad.split([len(x) - len(y), len(y)])
            y_grad += below
        return x_grad * inverse, y_grad * inverse, scale_grad, rows.sum(), None
