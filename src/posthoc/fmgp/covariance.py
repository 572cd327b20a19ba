"""The variational family of FMGP, as pure functions of tensors (paper, section 3.3; `docs/notation.md`).

The posterior covariance is K(x, x') - K(x, Z) (-A) K(Z, x') with -A = (Ã⁻¹ + K_β)⁻¹ and Ã = L Lᵀ. With

    H = I + Lᵀ K_β L = R Rᵀ        and        W = R⁻¹ Lᵀ

we have -A = Wᵀ W, so one Cholesky of H and one triangular solve give every quantity, and nothing is inverted. H has no
eigenvalue below one, whatever the inducing points: duplicated points and singular kernels need no jitter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posthoc.numerics import cholesky

__all__ = ["Correction", "correction", "kl_divergence", "marginal_variance", "output_covariance"]


class Correction(NamedTuple):
    """What the posterior takes away from the prior, and what that costs."""

    w: Tensor  # (M, M), with -A = WᵀW. Use it in that form only: its gradient assumes so.
    kl: Tensor  # (), KL(q | p)


def correction(
    chol: Tensor,  # (M, M), L: lower triangular, any signs
    kzz: Tensor,  # (M, M), symmetric
) -> Correction:
    """The correction -A as its factor W, and KL(q | p), in float64."""
    w, kl = _Correction.apply(chol.double(), kzz.double())  # type: ignore[no-untyped-call]
    return Correction(w, kl)


def kl_divergence(
    chol: Tensor,  # (M, M)
    kzz: Tensor,  # (M, M)
) -> Tensor:  # ()
    """KL(q | p) = ½ (log|H| + tr H⁻¹ - M) ≥ 0, zero at L = 0 (the paper prints its trace with the wrong sign)."""
    return correction(chol, kzz).kl


def marginal_variance(
    k_diag: Tensor,  # (N,)
    k_xz: Tensor,  # (N, M)
    w: Tensor,  # (M, M)
) -> Tensor:  # (N,)
    """K(x, x) - |W K(Z, x)|², in float64: never above the prior's variance and never below zero."""
    return _MarginalVariance.apply(k_diag.double(), k_xz.double(), w.double())  # type: ignore[no-untyped-call]


def output_covariance(
    b: Tensor,  # (C, C), covariance among the outputs
    k_diag: Tensor,  # (N,)
    taken: Tensor,  # (C, N, M), W K(Z, (x, c)): what the inducing points know of each output
) -> Tensor:  # (N, C, C)
    """The covariance across outputs at each point, B k(x, x) - K((x, ·), Z) (-A) K(Z, (x, ·)), in float64."""
    known = taken.double().transpose(0, 1)
    return b.double() * k_diag.double()[:, None, None] - known @ known.mT


class _Correction(torch.autograd.Function):
    """W and the KL from L and K, with the backward pass written out: products and one triangular solve, where autograd
    would differentiate the Cholesky factor and the solve one by one.

    For a function f of G = WᵀW, with the gradients W̄ of f and κ of the KL, and using tr(K G) = tr(W K Wᵀ):

        D = (κ W K - W̄) Wᵀ          (symmetric, since f does not change under W → QW with Q orthogonal)
        K̄ = ½ Wᵀ D W                L̄ = (W̄ᵀ + K Wᵀ D) R⁻¹
    """

    @staticmethod
    def forward(ctx: Any, chol: Tensor, kzz: Tensor) -> tuple[Tensor, Tensor]:
        identity = torch.eye(len(chol), dtype=chol.dtype, device=chol.device)
        r = cholesky(torch.addmm(identity, chol.mT, kzz @ chol), "H = I + LᵀKL")
        # Wᵀ = L R⁻ᵀ: solved from the right, with an upper factor, it takes two thirds of the time
        w = torch.linalg.solve_triangular(r.mT, chol, upper=True, left=False).mT
        wk = w @ kzz
        ctx.save_for_backward(r, w, wk)
        # log|H| = 2 Σ log R_mm, and M - tr H⁻¹ = tr(W K Wᵀ)
        return w, r.diagonal().log().sum() - 0.5 * (wk * w).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, w_grad: Tensor, kl_grad: Tensor) -> tuple[Tensor, Tensor]:
        r, w, wk = ctx.saved_tensors
        d = (kl_grad * wk).sub_(w_grad) @ w.mT
        # L̄ᵀ = R⁻ᵀ (W̄ + D W K), since D is symmetric: a solve from the left, which two threads share well
        chol_grad = torch.linalg.solve_triangular(r.mT, torch.addmm(w_grad, d, wk), upper=True).mT
        return chol_grad, (w.mT @ d @ w).mul_(0.5)


class _MarginalVariance(torch.autograd.Function):
    """K(x, x) - |W K(Z, x)|² with its backward pass in one node, where autograd would take eight."""

    @staticmethod
    def forward(ctx: Any, k_diag: Tensor, k_xz: Tensor, w: Tensor) -> Tensor:
        known = k_xz @ w.mT
        variance = torch.sub(k_diag, torch.linalg.vecdot(known, known)).clamp_min_(0.0)
        ctx.save_for_backward(variance, k_xz, known, w)
        return variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        variance, k_xz, known, w = ctx.saved_tensors
        grad = torch.where(variance > 0.0, grad, 0.0)
        known_grad = known * (-2.0 * grad)[:, None]
        return grad, known_grad @ w, known_grad.mT @ k_xz
