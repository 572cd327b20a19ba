"""Files of weights, read without running code, and loaded into the networks that they fit."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn

from posthoc.collect.network import Backbone
from posthoc.errors import FileError

__all__ = ["load_weights", "only_tensors", "read_weights", "sized_for", "weights_file"]

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""A name with one of these suffixes is a file, not published weights."""

WRAPPERS = ("state_dict", "model_state_dict", "model")
"""The names under which training scripts store the weights beside other things."""


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
    """The tensors by name in a safetensors file, or in one that `torch.save` wrote."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise FileError(
            f"Expected tensors by name in {path}, found what is not, or not only, that. Save model.state_dict() alone, "
            "with safetensors.torch.save_file or torch.save; a whole pickled model is not loaded, since it could run "
            "code."
        ) from error
    for wrapper in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise FileError(f"Expected tensors by name in {path}, found {type(content).__name__}: save model.state_dict().")
    return {name.removeprefix("module."): tensor for name, tensor in content.items()}  # DataParallel adds the prefix


def load_weights(model: nn.Module, path: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Load all weights of a file (already read, if given) into a network, which must have exactly those."""
    weights = read_weights(path) if weights is None else weights
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


def sized_for(path: Path, build: Callable[..., nn.Module]) -> nn.Module:
    """A network with the weights of a file, and with as many classes as its last linear layer has there."""
    weights = read_weights(path)
    model = build()
    last = Backbone(model, None, None).layer
    if last is not None and f"{last}.weight" in weights:
        classes = len(weights[f"{last}.weight"])
        if classes != model.get_submodule(last).out_features:
            model = build(num_classes=classes)
    load_weights(model, path, weights)
    return model


@contextmanager
def only_tensors() -> Iterator[None]:
    """Inside, every `torch.load`, also in other libraries, runs with `weights_only=True`."""
    with patch.dict(os.environ, {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}):
        os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
        yield
