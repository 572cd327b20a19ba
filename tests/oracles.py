"""The same quantities computed densely, with explicit inverses and loops, from the definitions in docs/notation.md."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from posthoc.predictive.latent import Latent


def correction(chol: Tensor, kzz: Tensor) -> Tensor:
    """-A = (Ã⁻¹ + K)⁻¹ with Ã = LLᵀ; Ã must be invertible."""
    return torch.linalg.inv(torch.linalg.inv(chol @ chol.mT) + kzz)


def gaussian_kl(cov_q: Tensor, cov_p: Tensor) -> Tensor:
    """KL between Gaussians of equal means."""
    ratio = torch.linalg.solve(cov_p, cov_q)
    return 0.5 * (ratio.trace() - len(cov_p) - torch.linalg.slogdet(ratio).logabsdet)


def exact_gp_variance(k_diag: Tensor, k_tx: Tensor, k_xx: Tensor, noise: float) -> Tensor:
    gain = torch.linalg.inv(k_xx + noise * torch.eye(len(k_xx), dtype=k_xx.dtype))
    return k_diag - (k_tx @ gain @ k_tx.mT).diagonal()


def titsias_variance(k_diag: Tensor, k_tz: Tensor, k_zz: Tensor, k_zx: Tensor, noise: float) -> Tensor:
    """The optimal SVGP's variance (Titsias 2009): k - k_tz K⁻¹ k_zt + k_tz (K + K_zx K_xz / σ²)⁻¹ k_zt."""
    posterior = torch.linalg.inv(k_zz + k_zx @ k_zx.mT / noise)
    return k_diag - (k_tz @ (torch.linalg.inv(k_zz) - posterior) @ k_tz.mT).diagonal()


SHAPES: dict[str, Callable[[float], float]] = {
    "rbf": lambda r: math.exp(-0.5 * r * r),
    "matern12": lambda r: math.exp(-r),
    "matern32": lambda r: (1 + math.sqrt(3) * r) * math.exp(-math.sqrt(3) * r),
    "matern52": lambda r: (1 + math.sqrt(5) * r + 5 * r * r / 3) * math.exp(-math.sqrt(5) * r),
}


def kernel_matrix(name: str, a: Tensor, b: Tensor, lengthscale: Tensor, amplitude: float) -> Tensor:
    """Stationary kernels from their textbook formulas, one pair of points at a time."""
    out = torch.empty(len(a), len(b), dtype=a.dtype)
    for i in range(len(a)):
        for j in range(len(b)):
            r = float((((a[i] - b[j]) / lengthscale) ** 2).sum()) ** 0.5
            out[i, j] = amplitude * SHAPES[name](r)
    return out


def coupled_covariance(b, k_diag, k_xz, k_zz, z_class, chol):  # (N, C, C)
    """V(x) of the multi-output process with kernel B_cc' k(x, x'), one point at a time."""
    gain = correction(chol, b[z_class][:, z_class] * k_zz)
    covariances = []
    for n in range(len(k_diag)):
        cross = b[:, z_class] * k_xz[n]  # (C, M)
        covariances.append(b * k_diag[n] - cross @ gain @ cross.mT)
    return torch.stack(covariances)


def gaussian_energy_by_quadrature(residual: float, variance: float, noise: float, alpha: float) -> float:
    """(1/α) log E[N(y | f, σ²)^α] (E[log N] at α = 0) by a fine Riemann sum over f."""
    z = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    weight = torch.softmax(-0.5 * z**2, 0)
    log_density = -0.5 * ((residual - math.sqrt(variance) * z) ** 2 / noise + math.log(2 * math.pi * noise))
    if alpha == 0:
        return float((weight * log_density).sum())
    return float((weight * torch.exp(alpha * log_density)).sum().log() / alpha)


def cqm_by_grid(cdf: Tensor, points: int = 200_001) -> float:
    """∫|share of targets inside the central α-interval - α| dα on a fine grid."""
    inside_from = (2 * cdf - 1).abs()
    grid = torch.linspace(0, 1, points, dtype=torch.float64)
    share = (inside_from[None, :] <= grid[:, None]).double().mean(1)
    return float((share - grid).abs().mean())


class DenseLatent(Latent):
    """The covariance written out."""

    def __init__(self, covariance: Tensor) -> None:
        self._covariance = covariance

    @property
    def variance(self) -> Tensor:
        return self._covariance.diagonal(dim1=-2, dim2=-1)

    def covariance(self) -> Tensor:
        return self._covariance

    def difference(self, top: Tensor) -> Tensor:
        row, variance = self._covariance[torch.arange(len(top), device=top.device), top], self.variance
        return (variance + variance.gather(-1, top[:, None]) - 2.0 * row).clamp_min(0.0)
