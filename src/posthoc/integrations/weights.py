"""Files of weights, read without running what is in them, and put into networks that fit them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posthoc.collect.network import Backbone
from posthoc.errors import FileError

__all__ = ["load_weights", "only_tensors", "read_weights", "sized_for", "weights_file"]

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
WRAPPERS = ("state_dict", "model_state_dict", "model")
"""The names under which training scripts keep the weights beside other things."""


def weights_file(weights: str | None) -> Path | None:
    """The file that --weights names, or None where it is the name of published weights."""
    if weights is None:
        return None
    path = Path(weights)
    if path.is_file():
        return path
    if path.suffix in SUFFIXES:
        raise FileError(f"Expected a file of weights, found none at {path}.")
    return None


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors in a safetensors file, or in one that `torch.save` wrote, by name."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise FileError(
            f"Expected tensors by name in {path}, found what is not, or not only, that. Save model.state_dict() alone, "
            "with safetensors.torch.save_file or torch.save; a whole pickled model is not loaded, since it could run "
            "code."
        ) from error
    for wrapper in WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(wrapper), Mapping):
            found = found[wrapper]
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise FileError(f"Expected tensors by name in {path}, found {type(found).__name__}: save model.state_dict().")
    return {name.removeprefix("module."): tensor for name, tensor in found.items()}  # as DataParallel saves them


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Puts all weights into the network, which must take exactly those."""
    own = model.state_dict()
    wrong = [
        *(f"{name} missing" for name in own if name not in weights),
        *(f"{name} unknown" for name in weights if name not in own),
        *(
            f"{name} {tuple(weights[name].shape)} instead of {tuple(tensor.shape)}"
            for name, tensor in own.items()
            if name in weights and weights[name].shape != tensor.shape
        ),
    ]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise FileError(f"Expected weights for this network in {path}, found others: {', '.join(wrong[:5])}{more}.")
    model.load_state_dict(weights)


def sized_for(build: Callable[..., nn.Module], weights: Mapping[str, Tensor]) -> nn.Module:
    """A network with as many classes as the last linear layer has in the weights."""
    model = build()
    last = Backbone(model, None, None).layer
    if last is None or f"{last}.weight" not in weights:
        return model
    classes = len(weights[f"{last}.weight"])
    return model if classes == len(model.get_submodule(last).weight) else build(num_classes=classes)  # type: ignore[arg-type]


@contextmanager
def only_tensors() -> Iterator[None]:
    """Inside, whatever is loaded by `torch.load`, also by other libraries, is loaded with `weights_only=True`."""
    wanted: dict[str, Any] = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": None}
    before = {name: os.environ.get(name) for name in wanted}
    try:
        set_environment(wanted)
        yield
    finally:
        set_environment(before)


def set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
