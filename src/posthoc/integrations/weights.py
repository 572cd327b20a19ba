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
            f"Expected tensors by name in {path}, found something else: save model.state_dict() alone, by safetensors "
            "or torch.save. A whole pickled model is not loaded, since it could run code."
        ) from error
    for name in WRAPPERS:
        content = content[name] if isinstance(content, Mapping) and isinstance(content.get(name), Mapping) else content
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise FileError(f"Expected tensors by name in {path}, found {type(content).__name__}: save model.state_dict().")
    return {name.removeprefix("module."): tensor for name, tensor in content.items()}  # DataParallel adds the prefix


def load_weights(model: nn.Module, path: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Load all weights of a file (already read, if given) into a network, which must have exactly those."""
    try:
        model.load_state_dict(read_weights(path) if weights is None else weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise FileError(f"Expected weights for this network in {path}, found others: {reason:.500}") from error


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
