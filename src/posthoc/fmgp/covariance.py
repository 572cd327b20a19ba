"""The variational family of FMGP, as pure functions of tensors (paper, section 3.3; `docs/notation.md`).

The posterior covariance is K(x, x') - K(x, Z) (-A) K(Z, x') with -A = (Ã⁻¹ + K_β)⁻¹ and Ã = L Lᵀ. With

    H = I + Lᵀ K_β L = R Rᵀ        and        W = R⁻¹ Lᵀ

we have -A = Wᵀ W, so one Cholesky of H and one triangular solve give every quantity, and nothing is inverted. H has no
eigenvalue below one, whatever the inducing points: duplicated points and singular kernels need no jitter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from posthoc.linalg import cholesky

__all__ = ["Correction", "correction", "kl_divergence", "marginal_variance", "output_covariance"]


class Correction(NamedTuple):
    """What the posterior takes away from the prior: -A = WᵀW, and what the KL needs."""

    w: Tensor  # (M, M)
    log_det: Tensor  # (), log |H|
    trace: Tensor  # (), tr(K_β (-A)) = M - tr H⁻¹


def correction(
    chol: Tensor,  # (M, M), L: lower triangular, any signs
    kzz: Tensor,  # (M, M)
) -> Correction:
    """The correction -A as its factor W, in float64."""
    chol, kzz = chol.double(), kzz.double()
    kl = kzz @ chol
    h = torch.eye(len(chol), dtype=chol.dtype, device=chol.device) + chol.mT @ kl
    r = cholesky(h, "H = I + LᵀKL")
    w = torch.linalg.solve_triangular(r, chol.mT, upper=False)
    return Correction(w, 2.0 * r.diagonal().log().sum(), ((w @ kzz) * w).sum())


def kl_divergence(c: Correction) -> Tensor:  # ()
    """KL(q | p) = ½ (log|H| + tr H⁻¹ - M) ≥ 0, zero at L = 0 (the paper prints its trace with the wrong sign)."""
    return 0.5 * (c.log_det - c.trace)


def marginal_variance(
    k_diag: Tensor,  # (N,)
    k_xz: Tensor,  # (N, M)
    w: Tensor,  # (M, M)
) -> Tensor:  # (N,)
    """K(x, x) - |W K(Z, x)|²: never above the prior's variance and never below zero."""
    return (k_diag - (k_xz @ w.mT).square().sum(-1)).clamp_min(0.0)


def output_covariance(
    b: Tensor,  # (C, C), covariance among the outputs
    b_z: Tensor,  # (C, J), its columns for the J classes that own inducing points
    k_diag: Tensor,  # (N,)
    reduced: Tensor,  # (N, J, J), K(x, Z)(-A)K(Z, x) summed over the inducing points of each pair of classes
) -> Tensor:  # (N, C, C)
    """The covariance across outputs at each point: B k(x, x) - B_z T(x) B_zᵀ."""
    return b * k_diag[:, None, None] - b_z @ reduced @ b_z.mT
