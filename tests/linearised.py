"""The linearised Laplace approximation by its definition: Jacobians by loops, all matrices dense."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


def jacobian(module: nn.Module, x: Tensor) -> Tensor:  # (N, C, P)
    """One backward pass for each output of each row, in the weights that are not frozen."""
    module = copy.deepcopy(module).eval()
    weights = [p for p in module.parameters() if p.requires_grad]
    rows = []
    for i in range(len(x)):
        each = []
        for value in module(x[i : i + 1]).reshape(-1):
            parts = torch.autograd.grad(value, weights, retain_graph=True, materialize_grads=True, allow_unused=True)
            each.append(torch.cat([part.reshape(-1) for part in parts]))
        rows.append(torch.stack(each))
    return torch.stack(rows)


def hessians(logits: Tensor) -> Tensor:  # (N, C, C)
    """diag p - ppᵀ."""
    p = logits.double().softmax(-1)
    return torch.diag_embed(p) - p[:, :, None] * p[:, None, :]


def covariance(j: Tensor, curvature: Tensor, at: Tensor, prior: float) -> Tensor:  # (N, C, C)
    """J (Σ JᵀΛJ + I/σ₀²)⁻¹ Jᵀ at other points, given their Jacobians."""
    j, at = j.double(), at.double()
    precision = torch.einsum("ncp,ncd,ndq->pq", j, curvature.double(), j)
    posterior = torch.linalg.inv(precision + torch.eye(len(precision), dtype=torch.float64) / prior)
    return torch.einsum("ncp,pq,ndq->ncd", at, posterior, at)


def last_only(module: nn.Module, last: nn.Module) -> nn.Module:
    """A copy whose weights are frozen but for those of its last layer."""
    copied = copy.deepcopy(module).requires_grad_(False)
    for (_, part), (_, other) in zip(module.named_modules(), copied.named_modules(), strict=True):
        if part is last:
            other.requires_grad_(True)
    return copied
