"""The user's predictor, read-only: an `nn.Module` (with a layer whose values are features) or another callable.

A module is run in eval mode. Afterwards, also after an exception, its training flags and buffers are as they were.
Weights are not copied: a module that writes to them when it is run is refused, and so is one that another thread trains
meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from posthoc.collect.loaders import (
    Batch,
    as_tensor,
    change_tensors,
    copied,
    is_array,
    iterate,
    listed,
    move,
    read_batch,
    tensors_of,
)
from posthoc.collect.outputs import Outputs, join
from posthoc.errors import DataError, LayerError, PosthocError
from posthoc.validation import require_finite

TABLE_WIDTH = 256
"""Inputs of more columns are not taken for a table."""

# Eval mode, and back.

LOCK = threading.RLock()
RUNNING: WeakKeyDictionary[nn.Module, State] = WeakKeyDictionary()
"""The networks in eval mode now. Several generators or threads may run one; the last of them restores it."""

CHECKED: WeakSet[nn.Module] = WeakSet()
"""The networks whose weights had the same values before and after a whole pass."""

CHANGED = (
    "Expected a network that stays as it is while posthoc runs it, found {} (not restored). If another thread trains "
    "it, predict with copy.deepcopy(model). If its eval() changes weights, call model.eval() first. If its forward "
    "pass does, run it yourself and give posthoc.Outputs."
)


@contextmanager
def evaluating(module: nn.Module | None) -> Iterator[None]:
    """Puts a module into eval mode inside; afterwards its training flags and buffers are as they were.

    Raises:
        PosthocError: If the module writes to its weights, or another thread trains it meanwhile.
    """
    if module is None:
        yield
        return
    with LOCK:
        state = RUNNING.get(module) or State(module)
        RUNNING[module] = state
        state.users += 1
        state.threads.add(threading.get_ident())
    try:
        yield
    finally:
        with LOCK:
            state.users -= 1
            changes = state.changes()
            if not state.users:
                del RUNNING[module]
                state.restore(changed=bool(changes))
    if changes:
        raise PosthocError(CHANGED.format(changes))
    CHECKED.add(module)


@contextmanager
def exclusive(module: nn.Module | None) -> Iterator[None]:
    """Waits until no other thread runs the module that is in eval mode by `evaluating`."""
    state = RUNNING.get(module) if module is not None else None
    if state is not None:
        state.threads.add(threading.get_ident())
    with state.lock if state is not None else nullcontext():
        if state is not None and module is not None and module.training:
            raise PosthocError(CHANGED.format("it in training mode"))
        yield


class State:
    """Puts a module into eval mode, and knows what it was before."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.lock, self.users = module, threading.RLock(), 0
        self.threads: set[int] = set()
        self.parts = list(module.modules())
        self.training = [part.training for part in self.parts]
        plain = (nn.Module.train, nn.Module.eval)  # others may do more than set flags
        self.own_eval = [p for p in self.parts if p.training and (type(p).train, type(p).eval) != plain]
        self.weights = parameters(self.parts)  # kept alive, so that their identities stay theirs
        self.marks = list(map(mark, self.weights))
        self.attributes = [(dict(part._buffers), part.__dict__.copy()) for part in self.parts]
        buffers = [buffer for part in self.parts for buffer in part._buffers.values() if buffer is not None]
        self.buffers = [(buffer, version(buffer), buffer.detach().clone()) for buffer in buffers]
        # PyTorch does not count what is written to the `.data` of a tensor: norms show it, once for each network.
        self.norms = norms(module) if self.own_eval or module not in CHECKED else {}
        self.hook: Any = None
        if any(self.training):
            try:
                module.eval()
            except BaseException:
                self.set_flags()
                raise
            if not isinstance(module, torch.jit.ScriptModule):
                self.hook = module.register_forward_pre_hook(refuse_other_threads)

    def changes(self) -> str:
        """What changed in the module that no forward pass in eval mode explains; empty if nothing did."""
        same = list(map(mark, parameters(self.parts))) == self.marks
        names = [] if same else [n for n, p in self.module.named_parameters() if mark(p) not in self.marks]
        if self.norms:
            names += [key[0] for key, norm in norms(self.module).items() if self.norms.get(key, norm) != norm]
        if names or not same:
            return f"changed weights ({listed(names, 5) or 'some are gone'})"
        return "it in training mode" if self.module.training else ""

    @torch.no_grad()
    def restore(self, *, changed: bool) -> None:
        """Restores flags and buffers; of a network that someone else changed only the flags, if they are ours."""
        if self.hook is not None:
            self.hook.remove()
        if not (changed and self.module.training):
            self.set_flags()
        if changed:
            return
        for part, (buffers, attributes) in zip(self.parts, self.attributes, strict=True):
            if list(map(id, part._buffers.values())) == list(map(id, buffers.values())):
                continue
            if isinstance(part, torch.jit.ScriptModule):
                for name, buffer in buffers.items():
                    setattr(part, name, buffer)
            else:  # all attributes: one of them may say how far a cache among the buffers reaches
                part.__dict__.clear()
                part.__dict__.update(attributes, _buffers=buffers)
        for buffer, count, copy in self.buffers:
            if version(buffer) != count:
                buffer.copy_(copy)

    def set_flags(self) -> None:
        """Sets the training flags to what they were, those that changed: setting attributes of modules is slow."""
        for part in self.own_eval:
            part.train()
        for part, training in zip(self.parts, self.training, strict=True):
            if part.training != training:
                part.training = training


def refuse_other_threads(module: nn.Module, args: Any) -> None:
    """A hook on networks that `evaluating` took out of training mode; in a copy of the network it does nothing."""
    state = RUNNING.get(module)
    if state is not None and threading.get_ident() not in state.threads:
        raise PosthocError("The network is in eval mode: another thread predicts with it. Use copy.deepcopy(model).")


def version(tensor: Tensor) -> int:
    """The number of writes to a tensor; those to tensors of inference mode are not counted."""
    return -1 if tensor.is_inference() else tensor._version


def parameters(parts: list[nn.Module]) -> list[nn.Parameter]:
    """The parameters that modules hold themselves."""
    return [p for part in parts for p in part._parameters.values() if p is not None]


def mark(p: Tensor) -> tuple[int, int, bool]:
    """What stays the same of a parameter if nobody changes it."""
    return id(p), version(p), p.requires_grad


def norms(module: nn.Module) -> dict[tuple[str, int, int], str]:
    """The norms, as text, of weights and buffers that have plain values, by their name, identity and version."""
    result = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        plain = tensor.layout == torch.strided and tensor.device.type != "meta" and tensor.is_floating_point()
        if plain and type(tensor) in (Tensor, nn.Parameter):
            norm = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)
            result[name, id(tensor), version(tensor)] = str(float(norm))  # as text, NaN equals itself
    return result


# One batch.

Width = tuple[int, ...] | None
"""The shape of one row of outputs, or None if it is not known."""


def run_network(model: Callable[..., Any], batch: Batch, width: Width = None) -> Tensor:  # (N, ...)
    """The outputs of a network on a copy of a batch."""
    own = copied(batch)
    return in_rows(read_outputs(model(*own.args, **own.kwargs)), batch, width)


def read_outputs(result: Any) -> Tensor:
    """The tensor in what a model returned: itself, or `logits` in an object or mapping such as Hugging Face's."""
    if isinstance(result, Mapping):
        result = result.get("logits", result)
    elif not is_array(result):
        result = getattr(result, "logits", result)
    if not is_array(result):
        found = f"{type(result).__name__}. Wrap it in an nn.Module whose forward returns the tensor."
        raise DataError(f"Expected the model to return a tensor (or an object with .logits), got {found}")
    outputs = as_tensor(result)
    if not outputs.is_floating_point():
        raise DataError(f"Expected real-valued outputs (logits or regression values), got {outputs.dtype}.")
    return outputs


def in_rows(outputs: Tensor, batch: Batch, width: Width) -> Tensor:  # (N, ...)
    """Outputs with one row a point. A model that ends in `squeeze()` returns a number, or (C,), of one row; that is
    taken for a row where the inputs are one, and the known width or the target agrees."""
    if width is not None and outputs.shape[1:] == width and outputs.ndim:
        return outputs
    lengths = {length(value) for value in [*batch.args, *batch.kwargs.values()]} - {None}
    one_row = lengths == {1} and length(batch.target) in (1, None)
    if not one_row and outputs.ndim < 1:
        advice = "a single point must be a batch of one, x[None]"
        raise DataError(f"Expected the model to return one row a point, got a single number: {advice}.")
    lost = outputs.ndim < 1 or tuple(outputs.shape) == width or (len(outputs) > 1 and batch.target is not None)
    return outputs[None] if one_row and lost else outputs


def length(value: Any) -> int | None:
    """The length of a list or an array; None for anything else."""
    return len(value) if isinstance(value, list | tuple) or (is_array(value) and value.ndim) else None


# The predictor.


class Backbone:
    """A predictor and the layer its features come from.

    Args:
        model: An `nn.Module`, or another callable that returns outputs.
        layer: Name of the module whose output is the features. By default the features are the input of the last
            `nn.Linear` (in the order of `model.named_modules()`); a model without one has no features.
        device: Where to run a callable; a module is run where its weights are.
    """

    def __init__(self, model: nn.Module | Callable[..., Any], layer: str | None, device: torch.device | None) -> None:
        if not callable(model):
            raise DataError(f"Expected a model that can be called (or None), got {type(model).__name__}.")
        self.model, self._device = model, device
        self.module = model if isinstance(model, nn.Module) else None
        if layer is not None and self.module is None:
            found = f"{type(model).__name__}. Leave layer out."
            raise LayerError(f"Expected an nn.Module to take layer {layer!r} from, got {found}")
        layers = self._layers()
        if layer is not None and layer not in layers:
            raise LayerError(f"Expected the name of a layer, got {layer!r}. The layers are: {listed(layers)}.")
        linear = [name for name, part in layers.items() if isinstance(part, nn.Linear)]
        self.takes_input = layer is None and bool(linear)
        self.layer = linear[-1] if self.takes_input else layer
        self.has_features = self.layer is not None

    @property
    def device(self) -> torch.device | None:
        """Where the network is now; None for a callable that was given no device."""
        return self._home()[0]

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the network's weights, if it has real-valued ones."""
        return self._home()[1]

    def _home(self) -> tuple[torch.device | None, torch.dtype | None]:
        """`device` and `dtype`."""
        weight = next(self.module.parameters(), None) if self.module is not None else None
        if weight is None:
            return self._device, None
        return weight.device, weight.dtype if weight.is_floating_point() else None

    def _layers(self) -> dict[str, nn.Module]:
        return {name: part for name, part in self.module.named_modules() if name} if self.module is not None else {}

    def batches(self, raw_batches: Iterable[Any]) -> Iterator[Batch]:
        """The batches of a loader, with their inputs as tensors where the network is; NaN and infinity are refused
        on the CPU; on a GPU the outputs are tested."""
        (device, dtype), rows = self._home(), 0
        for raw in raw_batches:
            batch = read_batch(raw)
            home = device or next((tensor.device for tensor in tensors_of(batch)), torch.device("cpu"))
            batch = Batch(move(batch.args, home, dtype), move(batch.kwargs, home, dtype), batch.target)
            tensors = tensors_of(batch)
            for tensor in (tensor for tensor in tensors if not tensor.is_cuda):
                require_finite(tensor, "inputs", first_row=rows)
            rows += len(tensors[0]) if tensors and tensors[0].ndim else 0
            yield batch

    @contextmanager
    def reading(
        self, *, features: bool, inputs: bool | None, targets: bool = True, width: Width = None
    ) -> Iterator[Reader]:
        """A context manager whose value maps batches to their `Outputs`, with the module in eval mode.

        Args:
            features: Whether to read the features too, if the model has any.
            inputs: Whether to keep the inputs too, flattened; None: if they are a table of up to `TABLE_WIDTH` columns.
            targets: Whether to keep the targets too, if the data have any.
            width: The shape of one row of outputs, where it is known.
        """
        reader = Reader(self, features=features and self.has_features, inputs=inputs, targets=targets, width=width)
        with evaluating(self.module):
            hook = self.listen(reader.capture) if reader.features else None
            with hook or nullcontext():
                yield reader

    def listen(self, capture: Callable[[Any], None]) -> Any:
        """Registers a hook on the feature layer, which hands its values over; returns the handle."""
        assert self.module is not None
        layer = self.module.get_submodule(str(self.layer))
        if not self.takes_input:
            return layer.register_forward_hook(lambda _, args, output: capture(output))

        def before(_: nn.Module, args: Any, more: Mapping[str, Any] = MappingProxyType({})) -> None:
            """`more` is missing in other threads while PyTorch registers or removes this hook."""
            capture((*args, *more.values()))

        return layer.register_forward_pre_hook(before, with_kwargs=True)

    def features_of(self, batch: Batch, captured: Tensor | None, rows: int) -> Tensor:  # (rows, D)
        """The features of a batch from what the layer's hook captured."""
        if captured is None:
            advice = f"Name one that is, with layer=...; the layers are: {listed(self._layers())}."
            raise LayerError(f"Layer {self.layer!r} was not used when the model ran. {advice}")
        if captured.ndim < 2 or len(captured) != rows:
            found = f"{tuple(captured.shape)}: a single point must be a batch of one, x[None]; else name another layer"
            raise LayerError(f"Expected features of shape ({rows}, ...) from layer {self.layer!r}, got {found}.")
        return captured.flatten(1)


def collect(backbone: Backbone, data: Any, *, features: bool, inputs: bool | None, batch_size: int = 256) -> Outputs:
    """Runs the predictor once over the data and keeps its outputs, with the targets."""
    with backbone.reading(features=features, inputs=inputs) as read:
        return join(list(read(iterate(data, batch_size))))


class Reader:
    """Runs a predictor on one batch after another: see `Backbone.reading`."""

    def __init__(self, backbone: Backbone, *, features: bool, inputs: bool | None, targets: bool, width: Width) -> None:
        self.backbone, self.features, self.inputs, self.targets, self.width = backbone, features, inputs, targets, width
        self.rows = 0
        self.thread: int | None = None  # the one that runs a batch of this reader now
        self.captured: Tensor | None = None

    def __call__(self, raw_batches: Iterable[Any]) -> Iterator[Outputs]:
        """The outputs of every batch, with features and inputs if wanted, and the targets if it has any."""
        return map(self._read, self.backbone.batches(raw_batches))

    @torch.no_grad()
    def _read(self, batch: Batch) -> Outputs:
        features = None
        with exclusive(self.backbone.module):
            outputs = in_rows(self._run(batch), batch, self.width)
            if self.features and len(outputs):
                features = self.backbone.features_of(batch, self.captured, len(outputs)).detach()
            # On a GPU each test would wait for the network: the outputs that are joined, and predictions, are tested.
            for name, values in {"outputs": outputs, "features": features}.items():
                if values is not None and not values.is_cuda:
                    require_finite(values, name, first_row=self.rows)
        tensors = tensors_of(batch)
        wanted = is_table(tensors, len(outputs)) if self.inputs is None else self.inputs
        inputs = read_inputs(tensors, len(outputs)) if wanted and len(outputs) else None
        target = batch.target if self.targets else None
        targets = as_tensor(move(target, outputs.device)) if target is not None else None
        self.rows += len(outputs)
        if self.width is None and len(outputs) > 1:
            self.width = tuple(outputs.shape[1:])
        return Outputs.trusted(outputs=outputs, targets=targets, features=features, inputs=inputs)

    def _run(self, batch: Batch) -> Tensor:
        """What the model returns for a batch. The inputs, which may be the user's own, stay as they are."""
        tensors = tensors_of(batch)
        before = [(tensor, version(tensor), tensor.detach().clone()) for tensor in tensors]
        args, kwargs = change_tensors(batch[:2], in_same_memory)
        self.thread, self.captured = threading.get_ident(), None
        try:
            # A copy, since a predictor may return the same buffer every time, or what it was given.
            return read_outputs(self.backbone.model(*args, **kwargs)).detach().clone()
        except PosthocError:
            raise
        except Exception as error:
            shapes = ", ".join(f"{tuple(tensor.shape)} ({tensor.dtype})" for tensor in tensors)
            advice = "a single point must be a batch of one, x[None], and integers may have to be floats"
            error.add_note(f"posthoc: raised by your model, called on one batch of shape {shapes}; {advice}.")
            raise
        finally:
            self.thread = None
            for tensor, count, copy in before:
                if version(tensor) != count or (tensor.is_inference() and not torch.equal(tensor, copy)):
                    tensor.data.copy_(copy)

    def capture(self, value: Any) -> None:
        """Keeps what the feature layer returned, or was given, for the batch that runs in this thread."""
        if self.thread != threading.get_ident():
            return  # a batch of another reader
        while isinstance(value, tuple | list) and value:
            value = value[0]
        if not isinstance(value, Tensor):
            raise LayerError(f"Expected the feature layer to return a tensor, got {type(value).__name__}.")
        self.captured = value.clone()  # a later layer may work on it in place


def in_same_memory(value: Any) -> Any:
    """A tensor that the model may change in shape and flags; in other memory its outputs may differ in the last bit."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def is_table(tensors: list[Tensor], rows: int) -> bool:
    """Whether the inputs are real numbers in few columns, a row a point."""
    if len(tensors) != 1 or tensors[0].ndim not in (1, 2) or len(tensors[0]) != rows:
        return False
    return tensors[0].is_floating_point() and tensors[0].shape[1:].numel() <= TABLE_WIDTH


def read_inputs(tensors: list[Tensor], rows: int) -> Tensor:  # (rows, D)
    """A copy of the inputs as one row of coordinates a point, for kernels on the inputs."""
    if len(tensors) != 1 or tensors[0].shape[:1] != (rows,):
        found = f"tensors of shapes {[tuple(tensor.shape) for tensor in tensors]}"
        advice = 'a single point must be a batch of one, x[None]; for other inputs use a kernel on="features"'
        raise DataError(f"Expected one tensor of inputs, a row a point, got {found}: {advice}.")
    return tensors[0].detach().reshape(rows, -1).clone()
