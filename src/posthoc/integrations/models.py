"""Predictors named by a string: `torchvision:NAME`, `timm:NAME`, `hf:NAME`, `package.module:function`, or a file."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from posthoc.collect.fingerprint import fingerprint
from posthoc.collect.network import Backbone
from posthoc.errors import FileError, LayerError, OptionError, warn
from posthoc.integrations.datasets import Rows, open_data
from posthoc.integrations.files import expecting, file_digest
from posthoc.integrations.onnx import OnnxGraph, onnx_files
from posthoc.integrations.pretrained import LIBRARIES, load_weights, weights_file
from posthoc.integrations.transforms import PLAIN, Collate, Transform, for_each
from posthoc.validation import known_device

PROGRAMS = (".pt", ".ts", ".pt2", ".onnx")
"""The suffixes of files with a whole network."""

ONLY_TENSORS = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}
"""The environment in which every `torch.load`, also in other libraries, runs with `weights_only=True`."""


@dataclass(frozen=True)
class Plan:
    """Which predictor to run over which data, in words alone, so that other processes and machines can do it."""

    predictor: str  # torchvision:NAME, timm:NAME, hf:NAME, package.module:function or a file (.onnx, .pt, .ts, .pt2)
    data: str = ""  # what `open_data` opens
    layer: str | None = None  # where features are taken; by default the input of the last linear layer
    weights: str | None = None  # published ones by name, a file, or "none" for a function that loads its own
    transform: str | None = None  # an import string, "none", or None for the one that belongs to the weights
    input_columns: tuple[str, ...] = ()  # where the data are a table
    target_column: str | None = None
    inputs: bool = False  # whether the inputs are stored
    device: str | None = None  # by default a GPU if there is one
    trust_code: bool = False  # allows what runs code: import strings, TorchScript and torch.export files

    def open(self) -> tuple[Predictor, Rows]:
        """Open the predictor, whose identity then includes the data, and the data."""
        data = open_data(self.data, input_columns=self.input_columns, target_column=self.target_column)
        predictor = open_predictor(self)
        predictor.identity.update(data=data.identity, inputs=self.inputs)
        return predictor, data


@dataclass(frozen=True)
class Predictor:
    """A predictor ready to be run, what makes its batches, and what its outputs depend on."""

    backbone: Backbone
    collate: Collate
    identity: dict[str, Any]


def open_predictor(plan: Plan) -> Predictor:
    """Open the predictor of a plan."""
    name, layer = plan.predictor, plan.layer
    scheme, _, rest = name.partition(":")
    device = known_device(plan.device) or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    transform, network = PLAIN, None
    if scheme in LIBRARIES and rest:
        with patch.dict(os.environ, ONLY_TENSORS):
            model, transform = LIBRARIES[scheme](rest, plan.weights)
        backbone = Backbone(model.to(device), layer, None)
        if Path(rest).is_dir():  # it may be moved
            name = f"{scheme}:{Path(rest).resolve().name}"
    elif Path(name).suffix in PROGRAMS:
        backbone = open_program(plan, device)
        path = Path(name)
        name, network = path.name, file_digest(*(onnx_files(path) if path.suffix == ".onnx" else [path]))
    elif rest:
        backbone = open_import(plan, device)
    else:
        raise OptionError(f"Expected a predictor such as torchvision:resnet50, {', '.join(PROGRAMS)}, got {name!r}.")
    if plan.transform is not None:
        transform = open_transform(plan.transform, plan.trust_code)
    identity = {
        "predictor": name,
        "network": network or fingerprint(backbone.module),
        "layer": f"input of {backbone.layer}" if layer is None and backbone.layer is not None else layer,
        "transform": transform.description,
    }
    return Predictor(backbone, Collate(transform, backbone.dtype), identity)


# Import strings, which run code


def require_trust(what: str, trusted: bool) -> None:
    """Refuse to run code that the user has not declared trusted."""
    if not trusted:
        raise OptionError(f"{what} runs code of its own, which could do anything: add --trust-code if you trust it.")


def import_object(string: str, trust_code: bool) -> Any:
    """The object that an import string such as `package.module:name` names.

    The current folder is searched first, as `python -m` does, from now on: the object may import more when it runs.
    """
    require_trust(f"Importing {string!r}", trust_code)
    module_name, _, name = string.partition(":")
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)
    try:
        return reduce(getattr, name.split("."), import_module(module_name))
    except (ImportError, AttributeError) as error:
        raise OptionError(f"Expected package.module:name, but {string!r} cannot be imported: {error}.") from error


def open_import(plan: Plan, device: torch.device) -> Backbone:
    """The network, or any callable, that an import string names or that the function it names returns."""
    name, weights = plan.predictor, plan.weights
    model = import_object(name, plan.trust_code)
    if callable(model) and not isinstance(model, nn.Module):
        model = model()
    path = weights_file(weights)
    if path is None and weights not in (None, "none"):
        raise OptionError(f'Expected a file of weights for {name!r}, or "none", got the name {weights!r}.')
    if not callable(model) or (path is not None and not isinstance(model, nn.Module)):
        kind = "an nn.Module" if path is not None else "an nn.Module or a callable"
        raise OptionError(f"Expected {name!r} to return {kind}, got {type(model).__name__}.")
    if not isinstance(model, nn.Module):
        return Backbone(model, plan.layer, device if plan.device is not None else None)
    if path is not None:
        load_weights(model, path)
    elif weights is None:
        warn(f"{name!r} may be a random network: give --weights FILE, or --weights none if it has its own.")
    return Backbone(model.to(device), plan.layer, None)


def open_transform(name: str, trust_code: bool) -> Transform:
    """The transform that --transform names."""
    if name == "none":
        return PLAIN
    if ":" not in name:
        raise OptionError(f'Expected a transform such as package.module:function, or "none", got {name!r}.')
    return for_each(import_object(name, trust_code), name)


# Networks saved as programs; loading TorchScript or torch.export runs code


def open_program(plan: Plan, device: torch.device) -> Backbone:
    """The network of a file that contains all of it."""
    path, layer = Path(plan.predictor), plan.layer
    if not path.is_file():
        raise FileError(f"Expected a file with a network, found none at {path}.")
    if plan.weights is not None:
        raise OptionError(f"--weights is for networks without weights of their own: {path.name} has them.")
    if path.suffix == ".onnx":
        graph = NamedOutputs(OnnxGraph(path, layer, device), layer)
        return Backbone(graph, "layer" if layer else None, torch.device("cpu"))  # where ONNX Runtime takes its batches
    require_trust(f"Loading {path.name}", plan.trust_code)
    if path.suffix == ".pt2":
        return Backbone(load_exported(path, device), layer, device)
    with expecting(f"a TorchScript program in {path} (for weights: package.module:network ... --weights FILE)"):
        program = torch.jit.load(path, map_location=device)
    return Backbone(NamedOutputs(program, layer), "layer" if layer else None, device)


def load_exported(path: Path, device: torch.device) -> nn.Module:
    """A program that `torch.export.save` wrote, with the layers it was made of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch warns of its own code
        with expecting(f"a file of torch.export.save in {path}"):
            program = torch.export.load(path)
        if device.type != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, device)
        return torch.export.unflatten(program)


class NamedOutputs(nn.Module):
    """A compiled network, whose features are one of the values it returns, since no hook reaches inside it.

    Args:
        network: Returns a tensor, a tuple (whose values are named by their numbers) or a mapping.
        features: The name of the value that passes through the module `layer`, where `Backbone` takes it; the
            first of the others (or the one named `logits`) is the output.
    """

    def __init__(self, network: Callable[..., Any], features: str | None) -> None:
        super().__init__()
        self.network = network  # if it is a module, its weights give the device and the dtype
        self.features = features
        self.layer = nn.Identity()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        returned = self.network(*args, **kwargs)
        if isinstance(returned, torch.Tensor):
            returned = (returned,)
        items = returned.items() if isinstance(returned, Mapping) else enumerate(returned)
        values = {str(name): value for name, value in items}
        if self.features is not None:
            if self.features not in values:
                known = f"It returns: {', '.join(values)}."
                raise LayerError(f"Expected as layer a value of the compiled network, got {self.features!r}. {known}")
            self.layer(values[self.features])
        others = (value for name, value in values.items() if name != self.features)
        return values.get("logits", next(others, returned))
