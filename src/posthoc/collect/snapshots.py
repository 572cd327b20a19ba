"""Weights, buffers and attributes of a network as they were, and how they are put back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Attributes", "Snapshot", "Watch", "all_parts", "copies", "snapshots", "version"]

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of a number, what to read it as, so that NaN is equal to itself and -0 not to 0."""


class Snapshot:
    """One weight or buffer as it was: which tensor, in which memory and, once they were copied, with which values."""

    def __init__(self, part: nn.Module, registry: str, name: str, path: str) -> None:
        self.holder, self.name, self.path = getattr(part, registry), name, path
        self.tensor: Tensor = self.holder[name]
        self.memory = self.tensor.data  # it lives on, should the network give the tensor another
        self.requires_grad, self.version = self.tensor.requires_grad, version(self.tensor)
        self.values: Tensor | None = None

    def copy(self) -> None:
        """Keeps the values too."""
        if self.values is None:
            self.values = self.memory.clone()

    def lost(self) -> bool:
        """Whether the values have changed, and nobody knows what they were."""
        return self.values is None and version(self.tensor) != self.version

    def changed(self) -> bool:
        """Whether the network has another tensor now, or the same with other memory, values or need of a gradient; or
        wrote to it, if only the values it had: next time they may be others."""
        same = self.name in self.holder and self.holder[self.name] is self.tensor
        same = same and not self._moved() and self.tensor.requires_grad == self.requires_grad
        return not same or version(self.tensor) != self.version or self._written()

    @torch.no_grad()
    def put_back(self) -> None:
        """As it was, without a trace for autograd where the network left none."""
        if self.name not in self.holder or self.holder[self.name] is not self.tensor:
            self.holder[self.name] = self.tensor
        if self._moved():
            self.tensor.data = self.memory
        if self._written():
            assert self.values is not None
            self.tensor.data.copy_(self.values)
        if self.tensor.requires_grad != self.requires_grad:
            self.tensor.requires_grad_(self.requires_grad)

    def _moved(self) -> bool:
        now, then = self.tensor, self.memory
        return now.data_ptr() != then.data_ptr() or geometry(now) != geometry(then)

    def _written(self) -> bool:
        return self.values is not None and not torch.equal(bits(self.memory), bits(self.values))


def snapshots(module: nn.Module) -> list[Snapshot]:
    """Of all weights and buffers whose values are there to be read: not of meta, sparse or quantised tensors, nor of
    those that are more than tensors. What is in several places is taken once."""
    found: dict[int, Snapshot] = {}
    for path, part in module.named_modules():
        for registry in ("_parameters", "_buffers"):
            for name, tensor in getattr(part, registry).items():
                if tensor is not None and id(tensor) not in found and is_plain(tensor):
                    found[id(tensor)] = Snapshot(part, registry, name, f"{path}.{name}" if path else name)
    return list(found.values())


def is_plain(tensor: Tensor) -> bool:
    strided = tensor.layout == torch.strided and not tensor.is_quantized
    return type(tensor) in (Tensor, nn.Parameter) and strided and tensor.device.type != "meta"


def geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def bits(tensor: Tensor) -> Tensor:
    dtype = BITS.get(tensor.element_size())
    return tensor.view(dtype) if dtype is not None else tensor


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


class Watch(TorchDispatchMode):
    """Copies the values of a snapshot just before its memory is written to, by whatever way: `.data`, a view, an
    operation on many tensors. Nothing is copied that nobody writes to."""

    supports_higher_order_operators = True

    def __init__(self, taken: Iterable[Snapshot]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.at: dict[int, list[Snapshot]] = {}
        for snapshot in taken:
            self.at.setdefault(place(snapshot.memory), []).append(snapshot)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # there is none to skip, and saying so would import it: a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in about_to_be_written(func, args, kwargs or {}):
            for snapshot in self.at.get(place(tensor), ()) if is_plain(tensor) else ():
                snapshot.copy()
        return func(*args, **(kwargs or {}))


def place(tensor: Tensor) -> int:
    """Which memory a tensor is in."""
    return tensor.untyped_storage()._cdata


def about_to_be_written(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    schema = getattr(operation, "_schema", None)
    for i, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (each for each in (value if isinstance(value, list | tuple) else [value]) if each is not None)


class Attributes:
    """The attributes of a module as they were, and what its dicts, lists and sets held: hooks and parts, say."""

    def __init__(self, part: nn.Module) -> None:
        self.part, self.values = part, dict(vars(part))
        holders = [value for value in self.values.values() if type(value) in (dict, OrderedDict, list, set)]
        self.held = [(holder, holder.copy()) for holder in holders]

    def keep_changes(self) -> bool:
        """Forgets what is still as it was; returns whether anything is left to be put back."""
        now = vars(self.part)
        self.new = [name for name in now if name not in self.values]
        self.values = {k: v for k, v in self.values.items() if k != "training" and (k not in now or now[k] is not v)}
        self.held = [(holder, before) for holder, before in self.held if not alike(holder, before)]
        return bool(self.new or self.values or self.held)

    def put_back(self) -> None:
        """What changed before `keep_changes`."""
        now = vars(self.part)
        for name in self.new:
            now.pop(name, None)
        now.update(self.values)
        for holder, before in self.held:
            holder.clear()
            (holder.extend if isinstance(holder, list) else holder.update)(before)


def alike(a: Any, b: Any) -> bool:
    """Whether they hold the same objects."""
    if isinstance(a, set):
        return bool(a == b)
    a, b = ([each for pair in x.items() for each in pair] if isinstance(x, dict) else list(x) for x in (a, b))
    return len(a) == len(b) and all(map(is_, a, b))


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
