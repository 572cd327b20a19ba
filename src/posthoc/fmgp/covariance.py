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

__all__ = ["Correction", "correction", "marginal_variance", "output_covariance"]


class Correction(NamedTuple):
    """The difference between posterior and prior.

    Attributes:
        w: W (M, M), with -A = WᵀW. Use it in that form only: its gradient assumes that.
        kl: KL(q | p) = ½ (log|H| + tr H⁻¹ - M) ≥ 0, (), zero at L = 0 (the paper prints its trace with the wrong sign).
    """

    w: Tensor
    kl: Tensor


def correction(chol: Tensor, kzz: Tensor) -> Correction:
    """W and KL(q | p), in float64.

    Args:
        chol: L (M, M), lower triangular with any signs.
        kzz: K_β (M, M), symmetric.

    Example:
        >>> one = torch.ones(1, 1)
        >>> round(float(correction(one, one).w) ** 2, 6)  # 1 / (1 + 1)
        0.5
    """
    w, kl = _Correction.apply(chol.double(), kzz.double())  # type: ignore[no-untyped-call]
    return Correction(w, kl)


def marginal_variance(k_diag: Tensor, k_xz: Tensor, w: Tensor) -> Tensor:
    """K(x, x) - |W K(Z, x)|², in float64: never above the prior's variance and never below zero.

    Args:
        k_diag: K(x, x) (N,).
        k_xz: K(x, Z) (N, M).
        w: W (M, M).

    Returns:
        The variances (N,).
    """
    known = k_xz.double() @ w.double().mT
    return (k_diag.double() - torch.linalg.vecdot(known, known)).clamp_min(0.0)


def output_covariance(b: Tensor, k_diag: Tensor, known: Tensor) -> Tensor:
    """The covariance across outputs at each point, B k(x, x) - K((x, ·), Z) (-A) K(Z, (x, ·)), in float64.

    Args:
        b: B (C, C), the covariance among the outputs.
        k_diag: k(x, x) (N,).
        known: W K(Z, (x, c)) (C, N, M), what the inducing points know of each output.

    Returns:
        The covariances (N, C, C).
    """
    known = known.double().transpose(0, 1)
    return b.double() * k_diag.double()[:, None, None] - known @ known.mT


class _Correction(torch.autograd.Function):
    """W and the KL from L and K, with a derived backward pass: products and one triangular solve, where autograd
    would differentiate the Cholesky factor and the solve one by one.

    The KL follows from log|H| = 2 Σ log R_mm and M - tr H⁻¹ = tr(W K Wᵀ). For a function f of G = WᵀW, with the
    gradients W̄ of f and κ of the KL, and using tr(K G) = tr(W K Wᵀ):

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
        return w, r.diagonal().log().sum() - 0.5 * (wk * w).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, w_grad: Tensor, kl_grad: Tensor) -> tuple[Tensor, Tensor]:
        r, w, wk = ctx.saved_tensors
        d = (kl_grad * wk).sub_(w_grad) @ w.mT
        # L̄ᵀ = R⁻ᵀ (W̄ + D W K), since D is symmetric
        chol_grad = torch.linalg.solve_triangular(r.mT, torch.addmm(w_grad, d, wk), upper=True).mT
        return chol_grad, (w.mT @ d @ w).mul_(0.5)
