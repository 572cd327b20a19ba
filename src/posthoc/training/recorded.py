"""Steps on the CPU without Python and without autograd: a step's operations are noted once, and then just done again.

The operations are run by TorchScript's interpreter, with none of its optimisations, so that they are the same and in
the same order: its numbers are those of ordinary steps, to the bit. As a language for models TorchScript is deprecated;
as a way to run a list of operations nothing in PyTorch has taken its place. Where it is gone, steps are ordinary ones.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from posthoc.numerics import blindly
from posthoc.training.adam import Flat
from posthoc.training.batches import Block, Source, tensors
from posthoc.training.steps import PlainSteps

__all__ = ["RecordedSteps"]

Function = Callable[..., Sequence[Tensor]]

FEWEST = 100
"""Steps, below which to note them takes longer than it saves."""
MOST = 2**28
"""Bytes of numbers in a step, above which the time is in the operations, and it is not worth while to note them."""


class RecordedSteps:
    """The steps of `plain`, whose gradient is noted at the first one. A block whose loss is not finite is taken again
    step by step: an ordinary step can add jitter, warn, and say what is wrong, and a list of operations cannot."""

    def __init__(self, plain: PlainSteps) -> None:
        self.plain = plain
        self.script: Function | None = None
        self.refused = False

    @staticmethod
    def possible(flat: Flat, source: Source, generator: torch.Generator | None, steps: int) -> bool:
        """Whether it is worth trying: many steps, all on the CPU, in batches of one shape, without draws."""
        on_cpu = {v.device.type for v in flat.values} == {"cpu"}
        return on_cpu and source.fixed and generator is None and steps >= FEWEST

    def run(self, block: Block, lrs: list[float]) -> list[float]:
        if self.script is None and not self.refused:
            self._record(block.map(lambda t: t[0]))
        if self.script is None:
            return self.plain.run(block, lrs)
        before = self.plain.flat.snapshot()
        with as_they_are():
            losses = self._take(block, lrs)
        if all(map(math.isfinite, losses)):
            return losses
        self.plain.flat.restore(before)
        return self.plain.run(block, lrs)

    def _take(self, block: Block, lrs: list[float]) -> list[float]:
        batches = [block.map(lambda t, i=i: t[i]) for i in range(len(lrs))]  # type: ignore[misc]
        losses = [self.plain.step(batch, lr, self._gradient) for batch, lr in zip(batches, lrs, strict=True)]
        total = torch.stack(losses)
        self.plain.ranks.sum([total], self.plain.weight)
        return total.tolist()

    def _gradient(self, batch: Block) -> Tensor:
        flat = self.plain.flat
        assert self.script is not None
        loss, *fresh = self.script(*flat.parameters, *tensors(batch))
        for grad, vector in zip(flat.grads, fresh, strict=True):
            grad.copy_(vector)
        return loss

    def _record(self, batch: Block) -> None:
        """Notes the gradient at one batch. Whatever is wrong with a step, an ordinary one says it better."""
        flat = self.plain.flat

        def function() -> list[Tensor]:
            loss = self.plain.objective(batch)
            grads = torch.autograd.grad(loss, flat.parameters, allow_unused=True, materialize_grads=True)
            return [loss, *flat.vectors(grads)]

        try:
            with blindly():
                self.script = recorded(function, [*flat.parameters, *tensors(batch)])
        except Exception:  # a list of reasons would be one of PyTorch's versions
            self.refused = True


def recorded(function: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]) -> Function:
    """A function of the inputs that does what `function`, which looks at those very tensors, does with their values.
    Raises where that cannot be promised: see `Recorder`."""
    with alone_and_quiet():
        with Recorder(inputs) as recorder:
            expected = function()
        with as_they_are():
            script: Function = torch.jit.trace(
                lambda *values: recorder.replay(values, expected), tuple(t.detach() for t in inputs), check_trace=False
            )
            found = script(*inputs)
    if not all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)):
        raise NotImplementedError("The recorded operations have other numbers.")
    return script


class Recorder(TorchDispatchMode):
    """Notes operations on tensors, below autograd. What is to be done again must not depend on numbers that Python has
    looked at, draw, change anything that was there before, or reach what is new by a way that is not seen here."""

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inputs = list(inputs)
        self.operations: list[tuple[Any, Any, Any, Any]] = []  # what they gave is held: by its identity it is known
        self.seen = {id(t) for t in self.inputs}
        self.changing = {place(t) for t in self.inputs}  # memory that will hold other numbers next time
        self.made: set[int] = set()  # what of it is new
        self.bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # there is none to skip, and saying so would import it: a second

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(id(t) not in self.seen and place(t) in self.changing for t in given):
            raise NotImplementedError(f"{operation} was given a tensor that came in an unknown way.")
        if any(place(t) not in self.made for t in changed(operation, args, kwargs)):
            raise NotImplementedError(f"{operation} would change what was there before.")
        result = operation(*args, **kwargs)
        found = tree_leaves(result)
        if not all(isinstance(t, Tensor) for t in found) or torch.Tag.nondeterministic_seeded in operation.tags:
            raise NotImplementedError(f"{operation} cannot be done again without Python.")
        self.operations.append((operation, args, kwargs, result))
        self.seen |= {id(t) for t in found}
        self.made |= {place(t) for t in found} - {place(t) for t in given}
        self.changing |= self.made
        self.bytes += sum(t.nbytes for t in found)
        if self.bytes > MOST:
            raise NotImplementedError("A step so large gains nothing.")
        return result

    def replay(self, values: Iterable[Tensor], wanted: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Does it all with other inputs."""
        known: dict[int, Any] = dict(zip(map(id, self.inputs), values, strict=True))

        def now(value: Any) -> Any:
            return known.get(id(value), value)

        for operation, args, kwargs, result in self.operations:
            found = operation(*tree_map(now, args), **tree_map(now, kwargs))
            known |= zip(map(id, tree_leaves(result)), tree_leaves(found), strict=True)
        return tuple(map(now, wanted))


def changed(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes to."""
    written = []
    for i, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return [t for t in tree_leaves(written) if isinstance(t, Tensor)]


def place(tensor: Tensor) -> int:
    """The memory that a tensor is in."""
    return tensor.untyped_storage()._cdata


@contextmanager
def as_they_are() -> Iterator[None]:
    """Inside, and in this thread, TorchScript changes nothing about what it runs, and autograd does not watch."""
    with torch.inference_mode(), torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
        yield


RECORDING = threading.Lock()


@contextmanager
def alone_and_quiet() -> Iterator[None]:
    """One thread at a time, since modes and warnings are the process's too; without the word that TorchScript is
    deprecated."""
    with RECORDING, warnings.catch_warnings():
        for kind in (DeprecationWarning, torch.jit.TracerWarning):  # type: ignore[attr-defined]
            warnings.simplefilter("ignore", kind)
        yield
