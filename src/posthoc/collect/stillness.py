"""A network that is run and comes back as it was: weights, buffers, training flags.

Three things can change a network that is run without gradients, and each is met where it is cheap to meet.

- `eval()` sets flags; in layers with a `train` of their own it may do anything (merge adapters into weights, say), so
  there it is watched, and what it is about to write to is copied.
- Buffers are copied beforehand: they are small.
- Weights are not: they are large, and hardly any network writes to them. The first batch of a network shows which
  tensors it writes to; from then on those are copied beforehand, and the others are trusted. A network that only later
  begins to write to weights is not found out, nor to buffers behind autograd's back (`.data`). Of networks above 1 GiB
  the first batch is run without copies: there is a warning if weights change.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from posthoc.collect.snapshots import Attributes, Snapshot, Watch, all_parts, copies, snapshots, version
from posthoc.errors import PosthocWarning

__all__ = ["still", "turn", "written"]

MOST_COPIED = 2**30
"""The bytes of the largest network whose weights are copied for its first batch."""

LOCK = threading.RLock()
RUNNING: WeakKeyDictionary[nn.Module, State] = WeakKeyDictionary()
"""The networks that someone runs now: several may, in turns or in threads, and the last one puts things back."""


@contextmanager
def still(module: nn.Module | None) -> Iterator[None]:
    """Eval mode inside; outside, every weight, buffer and training flag as it was. See above for what is promised."""
    if module is None:
        yield
        return
    with LOCK:
        state = RUNNING.get(module)
        if state is None:
            state = State(module)
            try:
                state.quieten()
            except BaseException:
                state.restore()
                raise
            RUNNING[module] = state
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
    """Waits until no other thread runs the module. The first turn of a network shows what it writes to."""
    if module is None:
        yield
        return
    with LOCK:
        lock = TURNS.setdefault(module, threading.RLock())
    with lock:
        state = RUNNING.get(module)
        if state is None or module in WRITTEN:
            yield
        else:
            with tried(module, state):
                yield


WRITTEN: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()
"""The names of the weights and buffers that networks wrote to in their first batch."""


def written(module: nn.Module) -> list[str] | None:
    """The weights and buffers that a network writes to when it is run; None if it never was."""
    return WRITTEN.get(module)


@contextmanager
def tried(module: nn.Module, state: State) -> Iterator[None]:
    """Finds out what the network writes to inside, and has it put back when `state` is."""
    taken = snapshots(module)
    size = sum(each.memory.nbytes for each in taken)
    for each in taken if size <= MOST_COPIED else ():
        each.copy()
    WRITTEN[module], done = [], False  # already, for turns inside this one
    try:
        yield
        done = True
    finally:
        changed = [each for each in taken if each.changed()]
        state.written += changed
        if done:
            WRITTEN[module] = [each.path for each in changed]
        else:
            del WRITTEN[module]
        if lost := [each.path for each in changed if each.lost()]:
            warnings.warn(
                f"The network writes to {', '.join(lost)} when it is run in eval mode, and it is too large "
                f"({size / 1e9:.1f} GB) to be copied just in case: these are not as they were. Load them again; from "
                "now on they are copied beforehand.",
                PosthocWarning,
                stacklevel=2,
            )


UNWRITTEN: WeakKeyDictionary[nn.Module, tuple[list[Tensor], list[int], list[Tensor]]] = WeakKeyDictionary()
"""Copies of the buffers of networks that did not write to them when they were last run: good for the next run."""


class State:
    """What a module was before it was put into eval mode."""

    def __init__(self, module: nn.Module) -> None:
        self.users = 0
        self.module = ref(module)
        self.parts = all_parts(module)
        self.training = [part for part in self.parts if part.training]
        self.attributes = {part: part.__dict__.copy() for part in self.parts}
        self.owners = [part for part in self.parts if part._buffers]
        self.held = [dict(part._buffers) for part in self.owners]
        self.buffers = [buffer for held in self.held for buffer in held.values() if buffer is not None]
        self.versions = versions(self.buffers)
        before = UNWRITTEN.get(module)
        same = before is not None and before[1] == self.versions and all(map(is_, before[0], self.buffers))
        self.copies = before[2] if same and before is not None else copies(self.buffers)
        self.switched: list[Snapshot | Attributes] = []
        """What `eval()` changed beside flags."""
        self.written: list[Snapshot] = []
        """What running the network changed or, as far as is known, will."""

    def quieten(self) -> None:
        """Eval mode, and copies of what the network is known to write to."""
        module = self.module()
        assert module is not None
        if self.training:
            if any(map(has_own_train, self.parts)):
                self._eval_watched(module)
            else:
                module.eval()
        if names := WRITTEN.get(module):
            self.written = [each for each in snapshots(module) if each.path in names]
            for each in self.written:
                each.copy()

    def _eval_watched(self, module: nn.Module) -> None:
        taken, attributes = snapshots(module), [Attributes(part) for part in self.parts]
        try:
            with Watch(taken):
                module.eval()
        finally:
            self.switched = [each for each in taken if each.changed()]
            self.switched += [each for each in attributes if each.keep_changes()]

    @torch.no_grad()
    def restore(self) -> None:
        self._restore_registries()
        for snapshot in self.written:
            snapshot.put_back()
        for each in self.switched:
            each.put_back()
        for part in self.parts:  # a flag is set only where it changed: setting attributes of modules is slow
            if part.training:
                part.training = False
        for part in self.training:
            part.training = True
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

    def _restore_registries(self) -> None:
        """Puts buffers back that were replaced, and takes new ones away, which a cache made when it was first used."""
        for part, held in zip(self.owners, self.held, strict=True):
            now = part._buffers
            if len(now) != len(held) or not all(map(is_, now.values(), held.values())):
                replace(part, held, self.attributes[part])
        if sum(1 for part in self.parts if part._buffers) > len(self.owners):
            for part in self.parts:
                if part._buffers and part not in self.owners:
                    replace(part, {}, self.attributes[part])


def has_own_train(part: nn.Module) -> bool:
    """Whether `train` or `eval` may do more than set flags."""
    kind = type(part)
    return kind.train is not nn.Module.train or kind.eval is not nn.Module.eval or not vars(part).keys().isdisjoint(OWN)


OWN = {"train", "eval"}


def replace(part: nn.Module, held: dict[str, Tensor | None], attributes: dict[str, object]) -> None:
    """Puts the buffers back that were in a module, and its attributes: they may say how far a cache reaches."""
    now = part._buffers
    if isinstance(part, torch.jit.ScriptModule):  # whose attributes are its buffers and constants
        for name, buffer in held.items():
            now[name] = buffer
        return
    now.clear()
    now.update(held)
    vars(part).clear()
    vars(part).update(attributes)


def versions(tensors: list[Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # some are of inference mode
        return [version(tensor) for tensor in tensors]
