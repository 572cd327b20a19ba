"""B, the covariance among the outputs, and the latent Gaussians of outputs coupled by it.

Either all outputs share one variance, V(x) = v(x) B, or inducing points belong to outputs: V(x) = B k(x, x) - UᵀU,
where U's columns, U_c = W K(Z, (x, c)), are what the inducing points know of each output. Two classes give that V: they
differ in the tensors that they form.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from posthoc.predictive.latent import Latent

SMALLEST = 1e-300
"""Lower bound of the squared diagonal of F, whose logarithm is taken."""


class OutputCovariance(nn.Module):
    """B (C, C), the covariance among the outputs: B = F Fᵀ, or B = F Fᵀ + diag(D) of low rank for many outputs.

    It starts at the identity, or near it where the rank is low: a factor of zero would have no gradient.

    Args:
        num_outputs: C.
        rank: The number of columns of F; None makes F a Cholesky factor.
        generator: Draws the initial F of low rank.

    Example:
        >>> OutputCovariance(2).matrix().tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """

    def __init__(self, num_outputs: int, rank: int | None = None, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.num_outputs, self.rank = num_outputs, rank
        if rank is None:
            self.factor = nn.Parameter(torch.eye(num_outputs, dtype=torch.float64))
            self.register_parameter("log_diagonal", None)
        else:
            factor = 0.1 * torch.randn(num_outputs, rank, dtype=torch.float64, generator=generator) / math.sqrt(rank)
            self.factor = nn.Parameter(factor)
            self.log_diagonal = nn.Parameter(torch.zeros(num_outputs, dtype=torch.float64))

    def parts(self) -> tuple[Tensor, Tensor | None]:
        """F (C, r) and D (C,) with B = F Fᵀ + diag(D)."""
        return (self.factor.tril(), None) if self.rank is None else (self.factor, self.log_diagonal.exp())

    def columns(self, which: Tensor) -> Tensor:
        """The columns (C, J) of B with these numbers (J,)."""
        factor, diagonal = self.parts()
        columns = factor @ factor[which].mT
        return columns if diagonal is None else columns.scatter_add(0, which[None], diagonal[which][None])

    def among(self, which: Tensor) -> Tensor:
        """B between some outputs (M,), which may be repeated: (M, M)."""
        factor, diagonal = self.parts()
        between = factor[which] @ factor[which].mT
        return between if diagonal is None else between + diagonal[which] * (which[:, None] == which)

    def difference(self, top: Tensor) -> Tensor:
        """B_cc + B_tt - 2 B_ct for every output c, (N, C), with one output t for each point, (N,); zero at c = t."""
        if self.rank is None:  # few outputs: all pairs at once
            b = self.matrix()
            variance = b.diagonal()
            return torch.sub(variance[:, None] + variance, b, alpha=2.0)[top]
        variance = self.diagonal()
        apart = variance + variance[top][:, None] - 2.0 * self.columns(top).mT
        return apart.scatter(-1, top[:, None], 0.0)

    def diagonal(self) -> Tensor:
        """B_cc, (C,)."""
        factor, diagonal = self.parts()
        square = factor.square().sum(-1)
        return square if diagonal is None else square + diagonal

    def matrix(self) -> Tensor:
        """B, (C, C)."""
        factor, diagonal = self.parts()
        return factor @ factor.mT if diagonal is None else factor @ factor.mT + diagonal.diag()

    def divergence(self) -> Tensor:
        """KL(N(0, B) | N(0, I)) = ½ (tr B - log|B| - C), ()."""
        factor, diagonal = self.parts()
        trace = factor.square().sum()
        if diagonal is None:
            log_det = factor.diagonal().square().clamp_min(SMALLEST).log().sum()
        else:  # |F Fᵀ + D| = |D| |I + Fᵀ D⁻¹ F|
            identity = torch.eye(factor.shape[1], dtype=factor.dtype, device=factor.device)
            inner = identity + factor.mT @ (factor / diagonal[:, None])
            trace = trace + diagonal.sum()
            log_det = diagonal.log().sum() + 2.0 * torch.linalg.cholesky_ex(inner).L.diagonal().log().sum()
        return 0.5 * (trace - log_det - self.num_outputs)


class SeparableLatent(Latent):
    """V(x) = v(x) B: independent copies of one process, mixed by a root of B.

    Args:
        coupling: B.
        variance: v(x) (N,).
    """

    def __init__(self, coupling: OutputCovariance, variance: Tensor) -> None:
        self.coupling, self.v = coupling, variance[:, None]

    @property
    def variance(self) -> Tensor:
        return self.v * self.coupling.diagonal()

    def covariance(self) -> Tensor:
        return self.v[:, :, None] * self.coupling.matrix()

    def difference(self, top: Tensor) -> Tensor:
        # Where two outputs move together their difference may round to less than nothing.
        return self.v * self.coupling.difference(top).clamp_min(0.0)


class CoupledLatent(Latent):
    """For few outputs: U_c = Σ_j B_cj S_j, where S_j sums k(x, z_m) W_m over the inducing points of output j. Products
    of the U_c need only S_i·S_j: J x J numbers for each point.

    Args:
        coupling: B.
        k_diag: k(x, x) (N,).
        k_xz: k(x, Z) (N, M).
        w: W (M, M).
        present: The outputs that own inducing points (J,).
        sizes: How many each of them owns; their inducing points stand together.
    """

    def __init__(
        self, coupling: OutputCovariance, k_diag: Tensor, k_xz: Tensor, w: Tensor, present: Tensor, sizes: list[int]
    ) -> None:
        self.coupling, self.k_diag = coupling, k_diag[:, None]
        groups = zip(k_xz.split(sizes, -1), w.mT.split(sizes), strict=True)
        sums = torch.stack([k @ part for k, part in groups], 1)  # (N, J, M)
        self.products, self.columns = sums @ sums.mT, coupling.columns(present)  # (N, J, J), (C, J)

    @property
    def variance(self) -> Tensor:
        known = ((self.columns @ self.products) * self.columns).sum(-1)
        return (self.k_diag * self.coupling.diagonal() - known).clamp_min(0.0)

    def covariance(self) -> Tensor:
        return self.coupling.matrix() * self.k_diag[:, :, None] - self.columns @ self.products @ self.columns.mT

    def difference(self, top: Tensor) -> Tensor:
        apart = self.columns - self.columns[top][:, None]  # (N, C, J)
        known = ((apart @ self.products) * apart).sum(-1)
        return (self.k_diag * self.coupling.difference(top) - known).clamp_min(0.0)


class LowRankLatent(Latent):
    """For many outputs, where B = F Fᵀ + diag(D) with F of few columns: nothing larger than N x C or N x r x M is held.

    With K_x = diag(k(x, Z)), U_c = Q F_c + D_c s_c, where Q = W K_x F_Z is M x r and s_c sums k(x, z_m) W_m over the
    inducing points that output c owns (for most outputs, none). So U_c·U_t needs only QᵀQ, Qᵀs_c and s_c·s_t.

    Args:
        coupling: B, of low rank.
        k_diag: k(x, x) (N,).
        k_xz: k(x, Z) (N, M).
        w: W (M, M).
        z_class: The output that owns each inducing point (M,).
        present: The outputs that own any (J,).
    """

    def __init__(
        self, coupling: OutputCovariance, k_diag: Tensor, k_xz: Tensor, w: Tensor, z_class: Tensor, present: Tensor
    ) -> None:
        self.coupling, self.k_diag, self.k_xz, self.w = coupling, k_diag[:, None], k_xz, w
        self.z_class, self.present = z_class, present
        factor, diagonal = coupling.parts()
        assert diagonal is not None
        self.factor, self.own = factor, diagonal  # F (C, r) and D (C,)
        self.q = (k_xz[:, None, :] * factor[z_class].mT) @ w.mT  # (N, r, M), Qᵀ
        self.gram = self.q @ self.q.mT  # (N, r, r), QᵀQ
        self.qs = (self.q @ w) * k_xz[:, None, :]  # (N, r, M), to be summed over the inducing points of an output: Qᵀs
        self.owner = (z_class[:, None] == present).to(k_xz)  # (M, J)

    @property
    def variance(self) -> Tensor:
        return (self.k_diag * self.coupling.diagonal() - self._squares()).clamp_min(0.0)

    def covariance(self) -> Tensor:
        known = (self.k_xz[:, :, None] * self.coupling.columns(self.z_class).mT).mT @ self.w.mT  # (N, C, M)
        return self.coupling.matrix() * self.k_diag[:, :, None] - known @ known.mT

    def difference(self, top: Tensor) -> Tensor:
        squares, label = self._squares(), top[:, None]
        apart = squares + squares.gather(-1, label) - 2.0 * self._products(top)
        return (self.k_diag * self.coupling.difference(top) - apart).clamp_min(0.0).scatter(-1, label, 0.0)

    def _squares(self) -> Tensor:  # (N, C)
        """|U_c|²."""
        f, d = self.factor, self.own[self.present]
        outer = (f[:, :, None] * f[:, None, :]).flatten(1)  # (C, r²)
        cross = torch.einsum("nrj,jr->nj", self.qs @ self.owner, f[self.present])
        same = self.owner @ self.owner.mT * (self.w.mT @ self.w)
        alone = ((self.k_xz @ same) * self.k_xz) @ self.owner  # |s_j|²
        return (self.gram.flatten(1) @ outer.mT).index_add(1, self.present, d * (2.0 * cross + d * alone))

    def _products(self, top: Tensor) -> Tensor:  # (N, C)
        """U_c·U_top."""
        f, d = self.factor, self.own
        mine = (self.z_class == top[:, None]).to(self.k_xz)  # (N, M), the inducing points of the top output
        f_top, d_top = f[top], d[top][:, None]
        toward = torch.einsum("nrs,ns->nr", self.gram, f_top) + d_top * torch.einsum("nrm,nm->nr", self.qs, mine)
        pull = torch.einsum("nrm,nr->nm", self.qs, f_top)
        pull = pull + d_top * self.k_xz * ((self.k_xz * mine) @ (self.w.mT @ self.w))
        return (toward @ f.mT).index_add(1, self.present, d[self.present] * (pull @ self.owner))


class Widened(Latent):
    """A latent Gaussian with an extra variance (N,), the same and independent for every output of a point."""

    def __init__(self, latent: Latent, more: Tensor) -> None:
        self.latent, self.more, self.independent = latent, more[:, None], latent.independent

    @property
    def variance(self) -> Tensor:
        return self.latent.variance + self.more

    def covariance(self) -> Tensor:
        v = self.latent.covariance()
        return v + torch.diag_embed(self.more.expand(v.shape[:-1]))

    def difference(self, top: Tensor) -> Tensor:
        return (self.latent.difference(top) + 2.0 * self.more).scatter(-1, top[:, None], 0.0)


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
