"""Adam on flat vectors: one for each dtype and device, which the ranks and checkpoints use as well."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
"""Adam's usual constants."""
OPTIONS: dict[str, Any] = {"fused": True, "amsgrad": False, "weight_decay": 0.0, "maximize": False}


class FlatAdam:
    """Adam on parameters that are views of one vector for each dtype and device, until `release`.

    Args:
        parameters: Those that require no gradient are left alone.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for p in self.parameters:
            groups.setdefault((p.dtype, p.device), []).append(p)
        self.values = [torch.cat([p.detach().reshape(-1) for p in members]) for members in groups.values()]
        self.grads, self.first, self.second = ([torch.zeros_like(v) for v in self.values] for _ in range(3))
        self.counts = [torch.zeros((), dtype=torch.float32, device=v.device) for v in self.values]
        for members, values, grads in zip(groups.values(), self.values, self.grads, strict=True):
            sizes = [p.numel() for p in members]
            for p, value, grad in zip(members, values.split(sizes), grads.split(sizes), strict=True):
                p.data, p.grad = value.view(p.shape), grad.view(p.shape)

    @torch.no_grad()
    def step(self, lr: float | Tensor) -> None:
        """Takes one step and clears the gradients; `lr` is a tensor () on the device where a CUDA graph is captured."""
        options = {**OPTIONS, "beta1": BETA1, "beta2": BETA2, "eps": EPS, "capturable": isinstance(lr, Tensor)}
        adam(self.values, self.grads, self.first, self.second, [], self.counts, lr=lr, **options)
        for grad in self.grads:
            grad.zero_()

    @property
    def state(self) -> list[Tensor]:
        """All tensors that a step changes: values, moments and counts."""
        return [*self.values, *self.first, *self.second, *self.counts]

    def snapshot(self) -> list[Tensor]:
        """A copy of the state."""
        return [t.clone() for t in self.state]

    @torch.no_grad()
    def restore(self, snapshot: list[Tensor]) -> None:
        """Copies a snapshot back; a list of the values alone leaves the moments as they are."""
        for tensor, kept in zip(self.state, snapshot, strict=False):
            tensor.copy_(kept)

    def release(self) -> None:
        """Gives every parameter its own memory again, without a gradient."""
        for p in self.parameters:
            p.data, p.grad = p.data.clone(), None
