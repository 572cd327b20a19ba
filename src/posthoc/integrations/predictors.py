"""Predictors named by a string: `torchvision:resnet50`, `timm:NAME`, `hf:NAME`, `package.module:factory`, or a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posthoc.collect.fingerprint import fingerprint
from posthoc.collect.network import Backbone
from posthoc.errors import FileError, OptionError
from posthoc.integrations.digests import file_digest
from posthoc.integrations.graphs import load_exported, load_torchscript
from posthoc.integrations.imports import import_object, require_trust
from posthoc.integrations.onnx import load_onnx, onnx_files
from posthoc.integrations.timm import load_timm
from posthoc.integrations.torchvision import load_torchvision
from posthoc.integrations.transformers import load_transformers
from posthoc.integrations.transforms import Each, Plain, Transform
from posthoc.integrations.weights import load_weights, read_weights, weights_file

__all__ = ["Predictor", "open_predictor"]

LIBRARIES: dict[str, Callable[[str, str | None], tuple[nn.Module, Transform]]] = {
    "torchvision": load_torchvision,
    "timm": load_timm,
    "hf": load_transformers,
}
PROGRAMS = (".pt", ".ts", ".pt2", ".onnx")


@dataclass(frozen=True)
class Predictor:
    """A predictor ready to be run: what makes its batches, and what its outputs depend on."""

    backbone: Backbone
    transform: Transform
    identity: dict[str, Any]


def open_predictor(
    name: str,
    *,
    layer: str | None = None,
    weights: str | None = None,
    transform: str | None = None,
    device: str | torch.device | None = None,
    trust_code: bool = False,
) -> Predictor:
    """The predictor that a string names.

    `weights` are published ones by name or a file; `transform` is an import string, "none", or by default what belongs
    to the weights; `layer` is where features are taken, by default the input of the last linear layer. Without
    `device` a GPU is used if there is one. What runs code needs `trust_code`.
    """
    scheme, _, rest = name.partition(":")
    suffix = Path(name).suffix
    if suffix in PROGRAMS and scheme not in LIBRARIES:
        backbone, identity = open_program(Path(name), layer, weights, chosen_device(device), trust_code)
        own: Transform = Plain()
    elif scheme in LIBRARIES and rest:
        model, own = LIBRARIES[scheme](rest, weights)
        backbone = Backbone(model.to(chosen_device(device)), layer, None)
        # A local folder is known by its name: it may be moved.
        identity = {"predictor": f"{scheme}:{Path(rest).resolve().name if Path(rest).is_dir() else rest}"}
    elif rest:
        backbone, own = open_import(name, layer, weights, device, trust_code), Plain()
        identity = {"predictor": name}
    else:
        raise OptionError(
            "Expected a predictor such as torchvision:resnet50, timm:NAME, hf:NAME, package.module:factory or a file "
            f"({', '.join(PROGRAMS)}), got {name!r}."
        )
    chosen = open_transform(transform, own, trust_code)
    taken = f"input of {backbone.layer}" if layer is None and backbone.layer is not None else layer
    if "network" not in identity:
        identity["network"] = fingerprint(backbone.module)
    return Predictor(backbone, chosen, {**identity, "layer": taken, "transform": chosen.description})


def open_program(
    path: Path, layer: str | None, weights: str | None, device: torch.device, trust_code: bool
) -> tuple[Backbone, dict[str, Any]]:
    """A network in a file that holds all of it, known by the file's bytes."""
    if not path.is_file():
        raise FileError(f"Expected a file with a network, found none at {path}.")
    if weights is not None:
        raise OptionError(f"--weights is for networks without weights of their own: {path.name} has them.")
    files = [path]
    if path.suffix == ".onnx":
        files = onnx_files(path)
        # Batches stay where ONNX Runtime takes them from.
        backbone = Backbone(load_onnx(path, layer, device), "layer" if layer else None, torch.device("cpu"))
    else:
        require_trust(f"Loading {path.name}", trust_code)
        if path.suffix == ".pt2":
            backbone = Backbone(load_exported(path, device), layer, device)
        else:
            backbone = Backbone(load_torchscript(path, layer, device), "layer" if layer else None, device)
    return backbone, {"predictor": path.name, "network": file_digest(*files)}


def open_import(
    name: str, layer: str | None, weights: str | None, device: str | torch.device | None, trust_code: bool
) -> Backbone:
    """What a factory returns: a module, or any callable."""
    found = import_object(name, trust_code=trust_code)
    model = found() if callable(found) and not isinstance(found, nn.Module) else found
    if not callable(model):
        raise OptionError(
            f"Expected {name!r} to be a function that returns a network (or any callable), got {type(model).__name__}."
        )
    path = weights_file(weights)
    if weights is not None and path is None:
        raise OptionError(f"Expected a file of weights for {name!r}, got the name {weights!r}.")
    if not isinstance(model, nn.Module):
        if path is not None:
            raise OptionError(f"Expected an nn.Module to put weights into, got {type(model).__name__} from {name!r}.")
        return Backbone(model, layer, chosen_device(device) if device is not None else None)
    if path is not None:
        load_weights(model, read_weights(path), path)
    return Backbone(model.to(chosen_device(device)), layer, None)


def open_transform(transform: str | None, own: Transform, trust_code: bool) -> Transform:
    """The transform that was asked for, or the predictor's own."""
    if transform is None:
        return own
    if transform == "none":
        return Plain()
    if ":" not in transform:
        raise OptionError(f'Expected a transform such as package.module:function, or "none", got {transform!r}.')
    return Each(import_object(transform, trust_code=trust_code), transform)


def chosen_device(device: str | torch.device | None) -> torch.device:
    """The device asked for, or the best there is."""
    there = torch.cuda.is_available()
    if device is None:
        return torch.device("cuda" if there else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"Expected a device such as cpu, cuda or cuda:1, got {device!r}.") from error
    if chosen.type == "cuda" and not there:
        raise OptionError(f"Expected a device that is there, got {device!r}, but PyTorch sees no GPU: use cpu.")
    return chosen
