"""The neural tangent kernel, J(x) J(x')ᵀ with J the gradients of a network's outputs in its weights: of all of them by
automatic differentiation, of the last layer's in closed form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap
from torch.utils._pytree import tree_map

from posthoc.collect.class_scores import as_logits
from posthoc.collect.loaders import Batch, copied, row_count, take
from posthoc.collect.network import read_outputs
from posthoc.errors import OptionError
from posthoc.kernels import Linear, Points, Space

CHUNK_BYTES = 2**28
"""Bytes of the gradients that are computed at once, for at least one row."""
ROWS, DIRECTIONS = 128, 8
"""Rows, and directions, of which directional derivatives are computed at once."""
WEIGHTS = 2**16
"""Weights that products of gradients are summed over at once."""


class Jacobian:
    """J(x): the gradients of a network's outputs (C) in its weights (P), those that are not frozen. Call it while the
    network is in eval mode. Networks that `torch.func` cannot see through are differentiated a row at a time."""

    def __init__(self, module: nn.Module, task: str) -> None:
        self.module, self.task = module, task
        if not self.weights:
            raise OptionError('weights="all" needs weights that are not frozen: call requires_grad_() on some of them.')

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights by name, as they are now."""
        return {name: p.detach() for name, p in self.module.named_parameters() if p.requires_grad}

    @property
    def size(self) -> int:
        """P."""
        return sum(weight.numel() for weight in self.weights.values())

    @property
    def row_bytes(self) -> int:
        """The bytes of the gradients of one output."""
        return sum(weight.nbytes for weight in self.weights.values())

    def outputs(self, weights: dict[str, Tensor], batch: Batch) -> Tensor:  # (N, C)
        """The network's outputs on a batch with these weights."""
        mine = copied(batch)
        outputs = read_outputs(functional_call(self.module, weights, mine.args, mine.kwargs)).reshape(count(batch), -1)
        return as_logits(outputs, "logits") if self.task == "classification" and outputs.shape[1] == 1 else outputs

    def pull(self, batch: Batch, combinations: Tensor) -> Tensor:  # (N, R, P)
        """The gradients of combinations (N, R, C) of each row's outputs; with an identity for each row, J(x)."""
        with torch.inference_mode(False):
            batch, weights = copied(batch), self.weights
            arguments = batch.args, batch.kwargs
            axes = tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) and leaf.ndim else None, arguments)
            rows = tree_map(lambda leaf: leaf[:, None] if isinstance(leaf, Tensor) and leaf.ndim else leaf, arguments)

            def one(combination: Tensor, row: tuple[Any, Any]) -> Tensor:
                back = vjp(lambda w: self.outputs(w, Batch(*row, None)).squeeze(0), weights)[1]
                (gradient,) = vmap(back)(combination)
                return torch.cat([part.flatten(1) for part in gradient.values()], -1)

            try:
                return vmap(one, (0, axes))(combinations, rows)
            except RuntimeError:
                return torch.stack([self._slowly(*row) for row in zip(pieces(batch, 1), combinations, strict=True)])

    @torch.enable_grad()
    def _slowly(self, row: Batch, combinations: Tensor) -> Tensor:  # (R, P)
        """The gradients of one row, by backward passes without `torch.func`."""
        weights = {name: weight.requires_grad_() for name, weight in self.weights.items()}
        outputs, gradients = self.outputs(weights, row)[0], []
        for each in combinations.to(outputs):
            parts = torch.autograd.grad(outputs, [*weights.values()], each, retain_graph=True, materialize_grads=True)
            gradients.append(torch.cat([part.reshape(-1) for part in parts]))
        return torch.stack(gradients)

    def push(self, batch: Batch, directions: Tensor) -> Tensor:  # (N, C, K)
        """J(x) times directions (K, P) in the space of weights, in forward mode: J(x) itself is not computed."""
        return torch.cat([self._push(part, directions) for part in pieces(batch, ROWS)])

    def _push(self, batch: Batch, directions: Tensor) -> Tensor:
        with torch.inference_mode(False):
            batch, weights = copied(batch), self.weights
            split = directions.split([weight.numel() for weight in weights.values()], -1)
            tangents = {n: d.reshape(-1, *w.shape).to(w) for (n, w), d in zip(weights.items(), split, strict=True)}

            def moved(tangent: dict[str, Tensor]) -> Tensor:
                return jvp(lambda w: self.outputs(w, batch), (weights,), (tangent,))[1]

            try:
                return vmap(moved, chunk_size=DIRECTIONS)(tangents).permute(1, 2, 0)
            except RuntimeError:
                return torch.cat([j @ directions.to(j).mT for j in self.written(batch)])

    def written(self, batch: Batch) -> Iterator[Tensor]:  # of (n, C, P)
        """J(x), some rows at a time."""
        with torch.no_grad():
            outputs = self.outputs(self.weights, next(pieces(batch, 1))).shape[1]
        identity = torch.eye(outputs).to(next(iter(self.weights.values())))
        for part in pieces(batch, max(1, CHUNK_BYTES // (outputs * self.row_bytes))):
            yield self.pull(part, identity.expand(count(part), -1, -1))


def gradients(jacobian: Jacobian, batches: Iterable[Batch], pairs: Tensor, outputs: int) -> Tensor:  # (M, P)
    """The gradients of single outputs at single points: `pairs` (M,) of row * outputs + output, in ascending order."""
    size, weight = max(1, CHUNK_BYTES // jacobian.row_bytes), next(iter(jacobian.weights.values()))
    parts, start = [], 0
    for batch in batches:
        end = start + count(batch)
        inside = pairs[(pairs >= start * outputs) & (pairs < end * outputs)]
        for some in inside.split(size) if len(inside) else ():
            one_hot = nn.functional.one_hot(some % outputs, outputs).to(weight)
            rows = rows_of(batch, (some // outputs - start).to(weight.device))
            parts.append(jacobian.pull(rows, one_hot[:, None]).squeeze(1))
        start = end
    return torch.cat(parts)


def products(a: Tensor, b: Tensor) -> Tensor:  # (..., N, P), (..., M, P) -> (..., N, M)
    """The inner products of gradients, in float64: what is left of a covariance may be a small part of it."""
    parts = zip(a.split(WEIGHTS, -1), b.split(WEIGHTS, -1), strict=True)
    return torch.stack([x.double() @ y.double().mT for x, y in parts]).sum(0)


class LastLayerNTK(Linear):
    """σ₀² (ψᵀψ' + 1): the tangent kernel of one output in the weights and bias of its last layer, of prior variance
    σ₀²; or without the 1, where the layer has no bias. Between two outputs it is zero."""

    def __init__(self, on: Space | None = "features", variance: float = 1.0, bias: bool = True) -> None:
        super().__init__(on, variance)
        self.bias = bias

    def forward(self, a: Points, b: Points) -> Tensor:
        return super().forward(a, b) + self.bias * self.log_variance.exp()

    def diag(self, a: Points) -> Tensor:
        return super().diag(a) + self.bias * self.log_variance.exp()

    def spec(self) -> dict[str, Any]:
        return {"type": "last_layer_ntk", "on": self.on, "bias": self.bias}


def rows_of(batch: Batch, rows: slice | Tensor) -> Batch:
    """Some rows of a batch."""
    args, kwargs = take((batch.args, batch.kwargs), rows)
    return Batch(args, kwargs, None)


def pieces(batch: Batch, size: int) -> Iterator[Batch]:
    """Consecutive rows of a batch."""
    for start in range(0, count(batch), size):
        yield rows_of(batch, slice(start, start + size))


def count(batch: Batch) -> int:
    """The number of rows of a batch."""
    return row_count((batch.args, batch.kwargs))
