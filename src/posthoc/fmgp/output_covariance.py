"""B, the covariance among the outputs, and the latent Gaussians of outputs coupled by it.

Either all outputs share one variance, V(x) = v(x) B, or inducing points belong to outputs: V(x) = B k(x, x) - UᵀU,
where U's columns, U_c = W K(Z, (x, c)), are what the inducing points know of each output. Two classes give that V: they
differ in the tensors that they form."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from posthoc.fmgp.covariance import output_covariance
from posthoc.predictive.latent import Latent

__all__ = ["CoupledLatent", "LowRankLatent", "OutputCovariance", "SeparableLatent"]

SMALLEST = 1e-300
"""Lower bound of the squared diagonal of F, whose logarithm is taken."""


class OutputCovariance(nn.Module):
    """B (C, C), the covariance among the outputs: B = F Fᵀ, or B = F Fᵀ + diag(D) of low rank for many outputs.

    It starts at the identity, or near it where the rank is low: a factor of zero would have no gradient.

    Args:
        num_outputs: C.
        rank: the number of columns of F; None makes F a Cholesky factor.
        generator: draws the initial F of low rank.

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
        if self.rank is None:
            return self.factor.tril(), None
        return self.factor, self.log_diagonal.exp()

    def columns(
        self,
        which: Tensor,  # (J,)
    ) -> Tensor:  # (C, J)
        """Some columns of B."""
        factor, diagonal = self.parts()
        columns = factor @ factor[which].mT
        if diagonal is None:
            return columns
        return columns.scatter_add(0, which[None], diagonal[which][None])

    def among(
        self,
        which: Tensor,  # (M,)
    ) -> Tensor:  # (M, M)
        """B between some outputs, which may be repeated."""
        factor, diagonal = self.parts()
        rows = factor[which]
        between = rows @ rows.mT
        return between if diagonal is None else between + diagonal[which] * (which[:, None] == which)

    def difference(
        self,
        top: Tensor,  # (N,)
    ) -> Tensor:  # (N, C)
        """B_cc + B_tt - 2 B_ct for every output c, with one output t for each point."""
        factor, diagonal = self.parts()
        variance = self.diagonal()
        between = factor[top] @ factor.mT
        if diagonal is not None:
            between = between.scatter_add(-1, top[:, None], diagonal[top][:, None])
        return variance + variance[top][:, None] - 2.0 * between

    def diagonal(self) -> Tensor:  # (C,)
        """B_cc."""
        factor, diagonal = self.parts()
        square = factor.square().sum(-1)
        return square if diagonal is None else square + diagonal

    def matrix(self) -> Tensor:  # (C, C)
        """B."""
        factor, diagonal = self.parts()
        product = factor @ factor.mT
        return product if diagonal is None else product + torch.diag(diagonal)

    def divergence(self) -> Tensor:  # ()
        """KL(N(0, B) | N(0, I)) = ½ (tr B - log|B| - C)."""
        factor, own = self.parts()
        if own is None:
            log_det = factor.diagonal().square().clamp_min(SMALLEST).log().sum()
        else:  # |F Fᵀ + D| = |D| |I + Fᵀ D⁻¹ F|
            inner = torch.eye(factor.shape[1], dtype=own.dtype, device=own.device) + factor.mT @ (factor / own[:, None])
            log_det = own.log().sum() + 2.0 * torch.linalg.cholesky_ex(inner).L.diagonal().log().sum()
        return 0.5 * (self.diagonal().sum() - log_det - self.num_outputs)


class SeparableLatent(Latent):
    """V(x) = v(x) B: independent copies of one process, mixed by a root of B."""

    def __init__(
        self,
        coupling: OutputCovariance,
        variance: Tensor,  # (N,)
    ) -> None:
        self.coupling, self.v = coupling, variance[:, None]

    @property
    def variance(self) -> Tensor:
        return self.v * self.coupling.diagonal()

    def covariance(self) -> Tensor:
        return self.v[:, :, None] * self.coupling.matrix()

    def difference(self, top: Tensor) -> Tensor:
        # Where two outputs move together their difference may round to less than nothing.
        return (self.v * self.coupling.difference(top).clamp_min(0.0)).scatter(-1, top[:, None], 0.0)


class CoupledLatent(Latent):
    """For few outputs: U is held, C x N x M numbers."""

    def __init__(
        self,
        coupling: OutputCovariance,
        k_diag: Tensor,  # (N,)
        k_xz: Tensor,  # (N, M)
        w: Tensor,  # (M, M)
        present: Tensor,  # (J,), the outputs that own inducing points
        sizes: list[int],  # how many each of them owns; their inducing points stand together
    ) -> None:
        self.coupling, self.k_diag = coupling, k_diag[:, None]
        # U_c = Σ_j B_cj (Σ k(x, z_m) W_m over the inducing points of output j)
        n, m, j = *k_xz.shape, len(sizes)
        if sizes.count(sizes[0]) == j:
            sums = k_xz.reshape(n, j, -1).transpose(0, 1) @ w.mT.reshape(j, -1, m)  # (J, N, M)
        else:
            groups = zip(k_xz.split(sizes, -1), w.mT.split(sizes), strict=True)
            sums = torch.stack([k @ part for k, part in groups])
        self.taken = (coupling.columns(present) @ sums.reshape(j, -1)).reshape(-1, n, m)  # (C, N, M)

    @property
    def variance(self) -> Tensor:
        return (self.k_diag * self.coupling.diagonal() - self.taken.square().sum(-1).mT).clamp_min(0.0)

    def covariance(self) -> Tensor:
        return output_covariance(self.coupling.matrix(), self.k_diag.squeeze(-1), self.taken)

    def difference(self, top: Tensor) -> Tensor:
        known = self.taken - self.taken.gather(0, top[None, :, None].expand(1, *self.taken.shape[1:]))
        prior = self.coupling.difference(top)
        return (self.k_diag * prior - known.square().sum(-1).mT).clamp_min(0.0)


class LowRankLatent(Latent):
    """For many outputs, where B = F Fᵀ + diag(D) with F of few columns: nothing larger than N x C or N x r x M is held.

    With K_x = diag(k(x, Z)), U_c = Q F_c + D_c s_c, where Q = W K_x F_Z is M x r and s_c sums k(x, z_m) W_m over the
    inducing points that output c owns (for most outputs, none). So U_c·U_t needs only QᵀQ, Qᵀs_c and s_c·s_t.
    """

    def __init__(
        self,
        coupling: OutputCovariance,
        k_diag: Tensor,  # (N,)
        k_xz: Tensor,  # (N, M)
        w: Tensor,  # (M, M)
        z_class: Tensor,  # (M,), the output that owns each inducing point
        present: Tensor,  # (J,), the outputs that own any
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
        return (self.k_diag * self.coupling.diagonal() - self._known()).clamp_min(0.0)

    def covariance(self) -> Tensor:
        classes = torch.arange(len(self.factor), device=self.k_xz.device)
        b = self.factor[self.z_class] @ self.factor.mT + self.own * (self.z_class[:, None] == classes)  # (M, C)
        taken = (self.k_xz[:, :, None] * b).mT @ self.w.mT  # (N, C, M)
        return output_covariance(self.coupling.matrix(), self.k_diag.squeeze(-1), taken.transpose(0, 1))

    def difference(self, top: Tensor) -> Tensor:
        known, label = self._known(), top[:, None]
        prior = self.coupling.difference(top)
        apart = known + known.gather(-1, label) - 2.0 * self._known_with(top)
        return (self.k_diag * prior - apart).clamp_min(0.0).scatter(-1, label, 0.0)

    def _known(self) -> Tensor:  # (N, C)
        """|U_c|²."""
        f, d = self.factor, self.own[self.present]
        outer = (f[:, :, None] * f[:, None, :]).flatten(1)  # (C, r²)
        cross = torch.einsum("nrj,jr->nj", self.qs @ self.owner, f[self.present])
        same = self.owner @ self.owner.mT * (self.w.mT @ self.w)
        alone = ((self.k_xz @ same) * self.k_xz) @ self.owner  # |s_j|²
        return (self.gram.flatten(1) @ outer.mT).index_add(1, self.present, d * (2.0 * cross + d * alone))

    def _known_with(self, top: Tensor) -> Tensor:  # (N, C)
        """U_c·U_top."""
        f, d = self.factor, self.own
        mine = (self.z_class == top[:, None]).to(self.k_xz)  # (N, M), the inducing points of the top output
        f_top, d_top = f[top], d[top][:, None]
        toward = torch.einsum("nrs,ns->nr", self.gram, f_top) + d_top * torch.einsum("nrm,nm->nr", self.qs, mine)
        pull = torch.einsum("nrm,nr->nm", self.qs, f_top)
        pull = pull + d_top * self.k_xz * ((self.k_xz * mine) @ (self.w.mT @ self.w))
        return (toward @ f.mT).index_add(1, self.present, d[self.present] * (pull @ self.owner))
