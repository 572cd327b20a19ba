"""The linearized Laplace approximation by its definition: Jacobians by loops, all matrices dense."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from tests.cases import inputs, labels, mlp, values


def case(task: str, n: int = 20) -> tuple[nn.Sequential, Tensor, Tensor, Tensor]:
    """A network, its data, and other points."""
    model = mlp(3 if task == "classification" else 2, dtype=torch.float64)
    x = inputs(n, dtype=torch.float64)
    y = labels(n) if task == "classification" else model(x).detach() + values(n, 2) * torch.tensor([0.1, 3.0])
    return model, x, y, inputs(9, dtype=torch.float64, seed=9)


def without_bias(outputs: int = 3) -> nn.Sequential:
    model = mlp(outputs, dtype=torch.float64)
    model[-1].register_parameter("bias", None)
    return model


def jacobian(module: nn.Module, x: Tensor) -> Tensor:  # (N, C, P)
    """One backward pass for each output of each row, in the weights that are not frozen."""
    module = copy.deepcopy(module).eval()
    weights = [p for p in module.parameters() if p.requires_grad]
    gradients = []
    for row in x.split(1):
        for value in module(row).reshape(-1):
            parts = torch.autograd.grad(value, weights, retain_graph=True, materialize_grads=True, allow_unused=True)
            gradients.append(torch.cat([part.reshape(-1) for part in parts]))
    return torch.stack(gradients).unflatten(0, (len(x), -1))


def hessians(logits: Tensor) -> Tensor:  # (N, C, C)
    """diag p - ppᵀ."""
    p = logits.double().softmax(-1)
    return torch.diag_embed(p) - p[:, :, None] * p[:, None, :]


def covariance(j: Tensor, curvature: Tensor, at: Tensor, prior_precision: float) -> Tensor:  # (N, C, C)
    """J (Σ JᵀΛJ + δI)⁻¹ Jᵀ at other points, given their Jacobians."""
    j, at = j.double(), at.double()
    precision = torch.einsum("ncp,ncd,ndq->pq", j, curvature.double(), j)
    posterior = torch.linalg.inv(precision + prior_precision * torch.eye(len(precision), dtype=torch.float64))
    return at @ posterior @ at.mT


def last_only(module: nn.Sequential) -> nn.Sequential:
    """A copy whose weights are frozen but for those of its last layer."""
    copied = copy.deepcopy(module).requires_grad_(False)
    copied[-1].requires_grad_(True)
    return copied
