"""Adam on flat vectors: one for each dtype and device, which the ranks and checkpoints use as well."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.adam import adam

__all__ = ["FlatAdam"]

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
"""Adam's usual constants."""


class FlatAdam:
    """Adam on parameters that are views of one vector for each dtype and device, until `release`.

    Args:
        parameters: those that require no gradient are left alone.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for p in self.parameters:
            groups.setdefault((p.dtype, p.device), []).append(p)
        self.values: list[Tensor] = []
        self.grads: list[Tensor] = []
        for members in groups.values():
            values = torch.cat([p.detach().reshape(-1) for p in members])
            grads = torch.zeros_like(values)
            sizes = [p.numel() for p in members]
            for p, value, grad in zip(members, values.split(sizes), grads.split(sizes), strict=True):
                p.data, p.grad = value.view(p.shape), grad.view(p.shape)
            self.values.append(values)
            self.grads.append(grads)
        self.first = [torch.zeros_like(v) for v in self.values]
        self.second = [torch.zeros_like(v) for v in self.values]
        self.counts = [torch.zeros((), dtype=torch.float32, device=v.device) for v in self.values]

    def clear(self) -> None:
        """Sets the gradients to zero."""
        for grad in self.grads:
            grad.zero_()

    @torch.no_grad()
    def step(self, lr: float | Tensor) -> None:
        """Takes one step; `lr` is a tensor () on the device where a CUDA graph is captured."""
        adam(
            self.values,
            self.grads,
            self.first,
            self.second,
            [],
            self.counts,
            fused=True,
            capturable=isinstance(lr, Tensor),
            amsgrad=False,
            beta1=BETA1,
            beta2=BETA2,
            lr=lr,
            weight_decay=0.0,
            eps=EPS,
            maximize=False,
        )

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

    @property
    def finite(self) -> bool:
        """Whether all values are finite."""
        return all(bool(v.isfinite().all()) for v in self.values)

    def release(self) -> None:
        """Gives every parameter its own memory again, without a gradient."""
        for p in self.parameters:
            p.data, p.grad = p.data.clone(), None
