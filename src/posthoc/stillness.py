"""A network that is run and comes back as it was: training flags and buffers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

__all__ = ["still", "turn", "version"]

LOCK = threading.RLock()
RUNNING: WeakKeyDictionary[nn.Module, State] = WeakKeyDictionary()
"""The networks that someone runs now: several may, in turns or in threads, and the last one puts things back."""


@contextmanager
def still(module: nn.Module | None) -> Iterator[None]:
    """Eval mode inside; outside, every training flag and buffer as it was."""
    if module is None:
        yield
        return
    with LOCK:
        state = RUNNING.get(module)
        if state is None:
            state = RUNNING[module] = State(module)
        state.users += 1
    try:
        yield
    finally:
        with LOCK:
            state.users -= 1
            if not state.users:
                del RUNNING[module]
                state.restore()


TURNS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()


@contextmanager
def turn(module: nn.Module | None) -> Iterator[None]:
    """Waits until no other thread runs the module."""
    if module is None:
        yield
        return
    with LOCK:
        lock = TURNS.setdefault(module, threading.RLock())
    with lock:
        yield


UNWRITTEN: WeakKeyDictionary[nn.Module, tuple[list[Tensor], list[int], list[Tensor]]] = WeakKeyDictionary()
"""Copies of the buffers of networks that did not write to them when they were last run: good for the next run."""


class State:
    """What a module was before it was put into eval mode."""

    def __init__(self, module: nn.Module) -> None:
        self.users = 0
        self.module = ref(module)
        self.parts = all_parts(module)
        self.training = [part for part in self.parts if part.training]
        self.owners = [part for part in self.parts if part._buffers]
        self.held = [dict(part._buffers) for part in self.owners]
        self.buffers = [buffer for held in self.held for buffer in held.values() if buffer is not None]
        self.versions = versions(self.buffers)
        before = UNWRITTEN.get(module)
        same = before is not None and before[1] == self.versions and all(map(is_, before[0], self.buffers))
        self.copies = before[2] if same and before is not None else copies(self.buffers)
        if self.training:
            module.eval()

    @torch.no_grad()
    def restore(self) -> None:
        for part in self.parts:  # a flag is set only where it changed: setting attributes of modules is slow
            if part.training:
                part.training = False
        for part in self.training:
            part.training = True
        for part, held in zip(self.owners, self.held, strict=True):
            now = part._buffers
            if len(now) != len(held) or not all(map(is_, now.values(), held.values())):  # forward put others there
                now.clear()
                now.update(held)
        after, module = versions(self.buffers), self.module()
        if after == self.versions:
            if module is not None:
                UNWRITTEN[module] = self.buffers, self.versions, self.copies
            return
        for buffer, copy, old, new in zip(self.buffers, self.copies, self.versions, after, strict=True):
            if old != new:
                buffer.copy_(copy)
        if module is not None:
            UNWRITTEN.pop(module, None)


def versions(tensors: list[Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # some are of inference mode
        return [version(tensor) for tensor in tensors]


def version(tensor: Tensor) -> int:
    """How often a tensor was written to; tensors of inference mode do not count."""
    return -1 if tensor.is_inference() else tensor._version


@torch.no_grad()
def copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of all: of the plain ones in a few kernels, since a prediction on a GPU waits for them."""
    found: dict[int, Tensor] = {}
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        if tensor.layout == torch.strided and not tensor.is_quantized and tensor.dtype != torch.bool:
            groups.setdefault((tensor.device, tensor.dtype), []).append(i)
        else:
            found[i] = tensor.detach().clone()
    for group in groups.values():
        found |= zip(group, torch._foreach_mul([tensors[i].detach() for i in group], 1), strict=True)
    return [found[i] for i in range(len(tensors))]


def all_parts(module: nn.Module) -> list[nn.Module]:
    """`list(module.modules())`, in a third of the time: a prediction waits for it."""
    found = {id(module): module}
    ahead = [module]
    while ahead:
        for part in ahead.pop()._modules.values():
            if part is not None and id(part) not in found:
                found[id(part)] = part
                ahead.append(part)
    return list(found.values())
