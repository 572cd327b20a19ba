"""B, the covariance among the outputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["OutputCovariance"]

SMALLEST = 1e-300
"""The least diagonal of B's factor, squared, whose logarithm is taken."""


class OutputCovariance(nn.Module):
    """B, the covariance among the outputs: a full Cholesky factor for few (`rank=None`), low rank + diagonal for many.
    It starts at the identity (near it, where the rank is low: a factor of zero would never move)."""

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
        """B between some outputs, any of which may be among them more than once."""
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
        """KL(N(0, B) | N(0, I)) = ½ (tr B - log|B| - C): how far B is from leaving the outputs alone."""
        factor, own = self.parts()
        if own is None:
            log_det = factor.diagonal().square().clamp_min(SMALLEST).log().sum()
        else:  # |F Fᵀ + D| = |D| |I + Fᵀ D⁻¹ F|
            inner = torch.eye(factor.shape[1], dtype=own.dtype, device=own.device) + factor.mT @ (factor / own[:, None])
            log_det = own.log().sum() + 2.0 * torch.linalg.cholesky_ex(inner).L.diagonal().log().sum()
        return 0.5 * (self.diagonal().sum() - log_det - self.num_outputs)
