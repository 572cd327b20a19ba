"""The user's predictor, read-only: an `nn.Module` (with a feature layer) or any callable that returns a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from posthoc.collect.arrays import as_tensor, is_array, is_list
from posthoc.collect.lending import lent, shared
from posthoc.collect.loaders import Batch, move, read_batch
from posthoc.collect.stillness import still, turn
from posthoc.errors import DataError, LayerError
from posthoc.validation import require_finite

__all__ = ["Backbone", "Reading", "settled"]


class Reading(NamedTuple):
    """What one run of the predictor gave."""

    outputs: Tensor  # (N, ...)
    target: Any | None
    features: Tensor | None  # (N, D)
    inputs: Tensor | None  # (N, D)
    settle: Callable[[], None]  # refuses what is not finite: to be called before the numbers leave us


class Wanted(NamedTuple):
    """What is to be read of a run beside the outputs, and the shape of a row of those, if known."""

    features: bool
    inputs: bool
    width: tuple[int, ...] | None


class Backbone:
    """A predictor and the layer its features come from.

    `layer` names a module whose output is taken; without it, the input of the last `nn.Linear` is (in the order of
    `model.named_modules()`), and a model without one has no features.
    """

    def __init__(self, model: nn.Module | Callable[..., Any], layer: str | None, device: torch.device | None) -> None:
        if not callable(model):
            raise DataError(f"Expected a model that can be called (or None), got {type(model).__name__}.")
        self.model = model
        self.module = model if isinstance(model, nn.Module) else None
        self.layer, self.takes_input = self._find(layer)
        self._device = device

    @property
    def has_features(self) -> bool:
        """Whether there is a layer to take features from."""
        return self.layer is not None

    @property
    def device(self) -> torch.device | None:
        """Where the network is now; None for a callable that was given no device."""
        weight = self._weight()
        return weight.device if weight is not None else self._device

    @property
    def dtype(self) -> torch.dtype | None:
        """What the network computes in, if it has weights that say so."""
        weight = self._weight()
        return weight.dtype if weight is not None and weight.is_floating_point() else None

    def _weight(self) -> Tensor | None:
        return next(self.module.parameters(), None) if self.module is not None else None

    def _layers(self) -> list[str]:
        return [name for name, _ in self.module.named_modules() if name] if self.module is not None else []

    def _find(self, layer: str | None) -> tuple[str | None, bool]:
        if self.module is None:
            if layer is not None:
                raise LayerError(
                    f"Expected an nn.Module to take layer {layer!r} from, got {type(self.model).__name__}. "
                    "Leave layer out, or give precomputed features in posthoc.Outputs."
                )
            return None, False
        if layer is None:
            linear = [name for name, part in self.module.named_modules() if name and isinstance(part, nn.Linear)]
            return (linear[-1], True) if linear else (None, False)
        if layer not in self._layers():
            raise LayerError(
                f"Expected the name of a layer, got {layer!r}. The layers are: {', '.join(self._layers())}."
            )
        return layer, False

    @contextmanager
    def running(
        self, *, features: bool, inputs: bool, width: tuple[int, ...] | None = None
    ) -> Iterator[Callable[[Any], Reading]]:
        """Gives a function that runs the predictor on a batch, in eval mode and without gradients. Afterwards, also
        after an exception, the network is as it was: weights, buffers, training flags, hooks, and what requires a
        gradient (`stillness` says how). `width` is the shape of one row of outputs, where it is known."""
        captured: list[Tensor] = []
        seen = 0

        def run(raw: Any) -> Reading:
            nonlocal seen, width
            wanted = Wanted(features and self.has_features, inputs, width)
            # One thread at a time: hooks are the network's, and must not see another's batch.
            with turn(self.module), self._listening(captured, features), torch.no_grad():
                reading = self._run(raw, captured, wanted, seen)
            seen += len(reading.outputs)
            if width is None and len(reading.outputs) > 1:
                width = tuple(reading.outputs.shape[1:])
            return reading

        with still(self.module):
            yield run

    @contextmanager
    def _listening(self, captured: list[Tensor], features: bool) -> Iterator[None]:
        if not features or self.module is None or self.layer is None:
            yield
            return
        part = self.module.get_submodule(self.layer)

        # Copies, since a later layer may work in place on what this one gave or took.
        def keep_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            captured[:] = [first_tensor(args or tuple(kwargs.values())).clone()]

        def keep_output(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            captured[:] = [first_tensor(output).clone()]

        if self.takes_input:
            handle = part.register_forward_pre_hook(keep_input, with_kwargs=True)
        else:
            handle = part.register_forward_hook(keep_output)
        try:
            yield
        finally:
            handle.remove()

    def place(self, raw: Any) -> Batch:
        """A batch where the network is; its target stays where it was."""
        batch = read_batch(raw)
        device = self.device or first_device(batch)
        return Batch(move(batch.args, device, self.dtype), move(batch.kwargs, device, self.dtype), batch.target)

    def _run(self, raw: Any, captured: list[Tensor], wanted: Wanted, seen: int) -> Reading:
        batch = self.place(raw)
        given = [value for value in [*batch.args, *batch.kwargs.values()] if isinstance(value, Tensor)]
        device = given[0].device if given else self.device or torch.device("cpu")
        # Looking at numbers makes the host wait for a GPU, which can be given more to do first.
        later = device.type == "cuda"
        if not later:
            all_finite(given, "inputs", seen)
        captured.clear()
        with lent(batch, given if wanted.inputs else shared(batch, raw)) as mine:
            try:
                answer = self.model(*mine.args, **mine.kwargs)
            except Exception as error:
                error.add_note(
                    "posthoc: raised by your model, called on one batch of the data; the model is as it was."
                )
                raise
            # Copies again: a predictor may give the same buffer every time, or what it was given.
            said = read_outputs(answer).detach().clone()
        outputs = in_rows(said, batch, wanted.width)
        found = [self._features(captured, len(outputs))] if wanted.features else []
        flags = together([*given, outputs, *found]) if later else None

        def settle() -> None:
            if flags is None or not bool(flags):
                all_finite(given if later else [], "inputs", seen)
                all_finite([outputs], "outputs", seen)
                all_finite(found, "features", seen)

        if not later:
            settle()
        return Reading(
            outputs,
            move(batch.target, device) if batch.target is not None else None,
            found[0] if found else None,
            read_inputs(batch, len(outputs)).clone() if wanted.inputs else None,
            settle if later else settled,
        )

    def _features(self, captured: list[Tensor], rows: int) -> Tensor:
        if not captured:
            raise LayerError(
                f"Layer {self.layer!r} was not used when the model ran. Name one that is, with layer=...; "
                f"the layers are: {', '.join(self._layers())}."
            )
        found = captured.pop()
        if found.ndim < 2 or len(found) != rows:
            raise LayerError(
                f"Expected features of shape ({rows}, ...) from layer {self.layer!r}, got {tuple(found.shape)}: "
                "name a layer that keeps one row a point, with layer=..."
            )
        return found.flatten(1)


def together(tensors: list[Tensor]) -> Tensor:  # ()
    """Whether all are finite, on the device. The largest magnitude tells, and is found in one pass."""
    reals = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    return torch.stack([torch.linalg.vector_norm(tensor, math.inf).double() for tensor in reals]).isfinite().all()


def settled() -> None:
    """Nothing is left to refuse."""


def all_finite(tensors: list[Tensor], name: str, first_row: int) -> None:
    for tensor in tensors:
        require_finite(tensor, name, first_row=first_row)


def read_outputs(answer: Any) -> Tensor:
    """The tensor in what a model returned: itself, or `logits` in an object or mapping such as Hugging Face's."""
    if isinstance(answer, Mapping) and "logits" in answer:
        answer = answer["logits"]
    elif not isinstance(answer, Tensor | np.ndarray) and hasattr(answer, "logits"):
        answer = answer.logits
    if isinstance(answer, np.ndarray):
        answer = as_tensor(answer)
    if not isinstance(answer, Tensor):
        raise DataError(
            f"Expected the model to return a tensor (or an object with .logits), got {type(answer).__name__}. "
            "Wrap it in an nn.Module whose forward returns the tensor (so that eval mode still reaches your model)."
        )
    if not answer.is_floating_point():
        raise DataError(f"Expected real-valued outputs (logits or regression values), got {answer.dtype}.")
    return answer


def in_rows(outputs: Tensor, batch: Batch, width: tuple[int, ...] | None) -> Tensor:  # (N, ...)
    """What a model said of a batch, one row a point. A model that ends in `squeeze()` says a number, or (C,), of a
    single row. That is taken for a row where the inputs are one, and the width of other rows or the target says so."""
    if not is_one_row(batch):
        if outputs.ndim < 1:
            raise DataError("Expected the model to return one row a point, got a single number.")
        return outputs
    lost = outputs.ndim < 1 or tuple(outputs.shape) == width or (len(outputs) > 1 and batch.target is not None)
    return outputs[None] if lost else outputs


def is_one_row(batch: Batch) -> bool:
    """Whether all inputs, and the target if there is one, are a single row."""
    inputs = [length(value) for value in [*batch.args, *batch.kwargs.values()]]
    known = {rows for rows in inputs if rows is not None}
    return known == {1} and (batch.target is None or length(batch.target) in (1, None))


def length(value: Any) -> int | None:
    return len(value) if is_list(value) or (is_array(value) and value.ndim) else None


def read_inputs(batch: Batch, rows: int) -> Tensor:
    """The inputs as one row of coordinates a point, for kernels that look at them."""
    values = [v for v in [*batch.args, *batch.kwargs.values()] if isinstance(v, Tensor)]
    if len(values) != 1 or values[0].ndim < 1 or len(values[0]) != rows:
        raise DataError(
            "Expected inputs that are one tensor with a row a point, for a kernel on the inputs; "
            f"got {len(values)} tensors of shapes {[tuple(v.shape) for v in values]}. "
            'Use a kernel on="features" or on="outputs".'
        )
    return values[0].reshape(rows, -1)


def first_tensor(value: Any) -> Tensor:
    while isinstance(value, tuple | list) and value:
        value = value[0]
    if not isinstance(value, Tensor):
        raise LayerError(f"Expected the feature layer to return a tensor, got {type(value).__name__}.")
    return value


def first_device(batch: Batch) -> torch.device:
    for value in [*batch.args, *batch.kwargs.values()]:
        if isinstance(value, Tensor):
            return value.device
    return torch.device("cpu")
