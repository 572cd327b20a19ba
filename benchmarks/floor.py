"""The least that a step of FMGP can cost: its kernel evaluations, its products, one Cholesky and one triangular solve,
forward and backward in float64. No data, no likelihood, no reductions, no optimizer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["floor_step"]


def floor_step(n: int, m: int, d: int, c: int, device: torch.device) -> Callable[[], None]:
    """A function that runs one such step for n points, m inducing points, d coordinates and c outputs."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(device)

    x, z, log_scale = normal(n, d), normal(m, d).requires_grad_(), (0.5 * normal(d)).abs().requires_grad_()
    factor = (0.1 * torch.eye(m, dtype=torch.float64, device=device)).requires_grad_()
    b_factor = torch.eye(c, dtype=torch.float64, device=device).requires_grad_(c > 1)
    identity = torch.eye(m, dtype=torch.float64, device=device)
    group = torch.arange(m, device=device) * c // m  # as many inducing points for each output, in order
    leaves = [p for p in (z, log_scale, factor, b_factor) if p.requires_grad]

    def kernel() -> Tensor:  # (N + M, M), unit amplitude
        joint = torch.cat([x, z]) * (-log_scale).exp()
        half = 0.5 * joint.square().sum(-1)
        return (torch.addmm(-half[n:], joint, joint[n:].mT) - half[:, None]).exp()

    def forward() -> list[Tensor]:
        k = kernel()
        kxz, kzz = k[:n], k[n:]
        if c > 1:
            b = b_factor.tril() @ b_factor.tril().mT
            kzz = kzz * b[group][:, group]
        chol = factor.tril()
        r, _ = torch.linalg.cholesky_ex(torch.addmm(identity, chol.mT, kzz @ chol))
        w = torch.linalg.solve_triangular(r, chol.mT, upper=False)
        wk = w @ kzz  # whose product with W is the trace in the KL
        if c == 1:
            return [r, wk, kxz @ w.mT]
        # Σ_m k(x, z_m) W_m over the inducing points of each output, and from these B's mixture for every output.
        parts = torch.bmm(kxz.reshape(n, c, -1).transpose(0, 1), w.mT.reshape(c, -1, m))  # (C, N, M)
        return [r, wk, b @ parts.reshape(c, -1)]

    cotangents = [1e-3 * torch.ones_like(t) for t in forward()]

    def step() -> None:
        torch.autograd.grad(forward(), leaves, cotangents)

    return step
