"""A batch lent to a model, which may work on it in place: the user's data stay as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from posthoc.collect.loaders import Batch, read_batch
from posthoc.collect.snapshots import version

__all__ = ["copied", "lent", "shared"]


@contextmanager
def lent(batch: Batch, keep: list[Tensor]) -> Iterator[Batch]:
    """A batch in the same memory, so that the answer is the same to the bit. What is written to the tensors of `keep`
    is undone afterwards, unless by ways that PyTorch does not count (`.data`, NumPy)."""
    before = [(tensor, version(tensor), tensor.detach().clone()) for tensor in keep]
    try:
        yield with_tensors(batch, alias)
    finally:
        for tensor, count, copy in before:
            if version(tensor) != count or (tensor.is_inference() and not torch.equal(tensor, copy)):
                tensor.data.copy_(copy)


def copied(batch: Batch) -> Batch:
    """A batch with tensors of its own, for a model that is run on it several times or differentiated."""
    return with_tensors(batch, Tensor.clone)


def shared(batch: Batch, raw: Any) -> list[Tensor]:
    """The tensors of a batch that are the user's own, as they were handed over: neither moved nor converted."""
    theirs = {id(tensor) for tensor in tensors(read_batch(raw))}
    return [tensor for tensor in tensors(batch) if id(tensor) in theirs]


def tensors(batch: Batch) -> list[Tensor]:
    found: list[Tensor] = []
    with_tensors(batch, found.append)
    return found


def with_tensors(batch: Batch, change: Callable[[Tensor], Any]) -> Batch:
    return Batch(changed(batch.args, change), changed(batch.kwargs, change), batch.target)


def changed(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A part of a batch with its tensors changed (`tree_map`, in a tenth of the time: a prediction waits for it)."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: changed(each, change) for name, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(changed(each, change) for each in value))
    if isinstance(value, tuple | list):
        return type(value)(changed(each, change) for each in value)
    return value


def alias(tensor: Tensor) -> Tensor:
    """The same memory as another tensor: what a model makes of its shape, or of its need for a gradient, is its own."""
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor.detach()
