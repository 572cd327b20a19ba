"""Predictors named by a string: `torchvision:NAME`, `timm:NAME`, `hf:NAME`, `package.module:function`, or a file."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posthoc.collect.fingerprint import fingerprint
from posthoc.collect.network import Backbone
from posthoc.errors import FileError, LayerError, OptionError, PosthocWarning
from posthoc.integrations.datasets import Rows, file_digest, open_data
from posthoc.integrations.onnx import OnnxGraph, onnx_files
from posthoc.integrations.transformers import load_transformers
from posthoc.integrations.transforms import Collate, Each, Plain, Transform
from posthoc.integrations.weights import load_weights, only_tensors, sized_for, weights_file
from posthoc.optional import require

__all__ = ["Plan", "Predictor", "open_predictor"]

PROGRAMS = (".pt", ".ts", ".pt2", ".onnx")
"""The suffixes of files with a whole network."""


@dataclass(frozen=True)
class Predictor:
    """A predictor ready to be run, what makes its batches, and what its outputs depend on."""

    backbone: Backbone
    transform: Transform
    identity: dict[str, Any]

    @property
    def collate(self) -> Collate:
        """Makes a batch for the predictor of rows of data."""
        return Collate(self.transform, self.backbone.dtype)


def open_predictor(
    name: str,
    *,
    layer: str | None = None,
    weights: str | None = None,
    transform: str | None = None,
    device: str | torch.device | None = None,
    trust_code: bool = False,
) -> Predictor:
    """Open the predictor that a string names.

    Args:
        name: `torchvision:NAME`, `timm:NAME`, `hf:NAME`, `package.module:function` or a file (.onnx, .pt, .ts, .pt2).
        layer: Where features are taken; by default the input of the last linear layer.
        weights: Published weights by name, a file of weights, or "none" for a function that loads its own.
        transform: An import string, "none", or None for the transform that belongs to the weights.
        device: Where the network runs; by default on a GPU if there is one.
        trust_code: Allow what runs code: import strings, TorchScript and torch.export files.
    """
    scheme, _, rest = name.partition(":")
    own: Transform = Plain()
    identity: dict[str, Any]
    if scheme in LIBRARIES and rest:
        model, own = LIBRARIES[scheme](rest, weights)
        backbone = Backbone(model.to(choose_device(device)), layer, None)
        # A local folder is known by its name: it may be moved.
        identity = {"predictor": f"{scheme}:{Path(rest).resolve().name if Path(rest).is_dir() else rest}"}
    elif Path(name).suffix in PROGRAMS:
        backbone, files = open_program(Path(name), layer, weights, choose_device(device), trust_code)
        identity = {"predictor": Path(name).name, "network": file_digest(*files)}
    elif rest:
        backbone = open_import(name, layer, weights, device, trust_code)
        identity = {"predictor": name}
    else:
        known = f"timm:NAME, hf:NAME, package.module:function or a file ({', '.join(PROGRAMS)})"
        raise OptionError(f"Expected a predictor such as torchvision:resnet50, {known}, got {name!r}.")
    chosen = open_transform(transform, own, trust_code)
    taken = f"input of {backbone.layer}" if layer is None and backbone.layer is not None else layer
    if "network" not in identity:
        identity["network"] = fingerprint(backbone.module)
    return Predictor(backbone, chosen, {**identity, "layer": taken, "transform": chosen.description})


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device asked for, or the best there is."""
    has_gpu = torch.cuda.is_available()
    if device is None:
        return torch.device("cuda" if has_gpu else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"Expected a device such as cpu, cuda or cuda:1, got {device!r}.") from error
    if chosen.type == "cuda" and not has_gpu:
        raise OptionError(f"Expected a device that is there, got {device!r}, but PyTorch sees no GPU: use cpu.")
    return chosen


# Libraries of networks


def load_torchvision(name: str, weights: str | None) -> tuple[nn.Module, Each]:
    """A torchvision model with weights by name (`DEFAULT`, `IMAGENET1K_V2`) or from a file.

    The transform belongs to the published weights, or to the default ones if the weights are in a file.
    """
    models = require("torchvision.models", "torchvision", "A torchvision predictor")
    require_name(name, models.list_models(), "torchvision")
    published = models.get_model_weights(name)
    path = weights_file(weights)
    chosen = "DEFAULT" if weights is None or path is not None else weights.rpartition(".")[2]
    if chosen not in published.__members__:
        known = ", ".join(published.__members__) or "none"
        raise OptionError(f"Expected weights of {name} or a file of weights, got {chosen!r}. The weights are: {known}.")
    if path is not None:
        model = sized_for(path, lambda **size: models.get_model(name, weights=None, **size))
    else:
        with only_tensors():
            model = models.get_model(name, weights=published[chosen])
    return model, each_image(published[chosen].transforms())


def load_timm(name: str, weights: str | None) -> tuple[nn.Module, Each]:
    """A timm model such as `resnet50` or `resnet50.a1_in1k`, with its default weights, those of a tag, or a file's."""
    timm = require("timm", "timm", "A timm predictor")
    data = require("timm.data", "timm", "A timm predictor")
    path = weights_file(weights)
    if path is None and weights not in (None, "DEFAULT"):
        name = f"{name.partition('.')[0]}.{weights}"
    if ":" not in name:  # timm itself looks up names with a scheme, such as hf-hub:
        require_name(name, timm.list_models(include_tags=True) + timm.list_models(), "timm")
    if path is not None:
        model = sized_for(path, lambda **size: timm.create_model(name, pretrained=False, **size))
    else:
        with only_tensors():
            model = timm.create_model(name, pretrained=True)
    return model, each_image(data.create_transform(**data.resolve_model_data_config(model), is_training=False))


def require_name(name: str, known: Sequence[str], library: str) -> None:
    """Refuse a name that the library does not know."""
    if name not in known:
        near = ", ".join(get_close_matches(name, known, 5))
        hint = f"Do you mean {near}?" if near else f"See the list_models() of {library}."
        raise OptionError(f"Expected the name of a {library} model (or of its weights), got {name!r}. {hint}")


def each_image(transform: Callable[[Any], Any]) -> Each:
    return Each(transform, " ".join(str(transform).split()), takes="an image")


LIBRARIES: dict[str, Callable[[str, str | None], tuple[nn.Module, Transform]]] = {
    "torchvision": load_torchvision,
    "timm": load_timm,
    "hf": load_transformers,
}
"""How the models of each library are loaded, by name and weights."""


# Import strings, which run code


def require_trust(what: str, trusted: bool) -> None:
    """Refuse to run code that the user has not declared trusted."""
    if not trusted:
        raise OptionError(f"{what} runs code of its own, which could do anything: add --trust-code if you trust it.")


@contextmanager
def importing_from_here() -> Iterator[None]:
    """Search the current folder first for imports, as `python -m` does."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(folder)


def import_object(string: str, *, trust_code: bool) -> Any:
    """The object that an import string such as `package.module:name` names."""
    require_trust(f"Importing {string!r}", trust_code)
    module_name, _, name = string.partition(":")
    try:
        with importing_from_here():
            module = import_module(module_name)
    except ImportError as error:
        reason = f"which cannot be imported from here or from the installed packages: {error}"
        raise OptionError(f"Expected package.module:name, got {string!r}, {reason}") from error
    try:
        return reduce(getattr, name.split("."), module)
    except AttributeError as error:
        public = ", ".join([key for key in vars(module) if not key.startswith("_")][:20])
        raise OptionError(f"Expected a name of {module_name!r}, got {name!r}. It has: {public}.") from error


def open_import(
    name: str, layer: str | None, weights: str | None, device: str | torch.device | None, trust_code: bool
) -> Backbone:
    """The network, or any callable, that an import string names or that the function it names returns."""
    found = import_object(name, trust_code=trust_code)
    with importing_from_here():
        model = found() if callable(found) and not isinstance(found, nn.Module) else found
    if not callable(model):
        raise OptionError(f"Expected {name!r} to return a network (or any callable), got {type(model).__name__}.")
    path = weights_file(weights)
    if path is None and weights not in (None, "none"):
        raise OptionError(f'Expected a file of weights for {name!r}, or "none", got the name {weights!r}.')
    if not isinstance(model, nn.Module):
        if path is not None:
            raise OptionError(f"Expected an nn.Module to put weights into, got {type(model).__name__} from {name!r}.")
        return Backbone(model, layer, choose_device(device) if device is not None else None)
    if path is not None:
        load_weights(model, path)
    elif weights is None:
        warnings.warn(
            f"No weights are given for {name!r}: its outputs are those of a random network unless the function loads "
            "weights itself. Give --weights FILE, or --weights none if it does.",
            PosthocWarning,
            stacklevel=2,
        )
    return Backbone(model.to(choose_device(device)), layer, None)


def open_transform(transform: str | None, own: Transform, trust_code: bool) -> Transform:
    """The transform that was asked for, or the predictor's own."""
    if transform is None:
        return own
    if transform == "none":
        return Plain()
    if ":" not in transform:
        raise OptionError(f'Expected a transform such as package.module:function, or "none", got {transform!r}.')
    return Each(import_object(transform, trust_code=trust_code), transform)


# Networks saved as programs; loading TorchScript or torch.export runs code


def open_program(
    path: Path, layer: str | None, weights: str | None, device: torch.device, trust_code: bool
) -> tuple[Backbone, list[Path]]:
    """The network of a file that contains all of it, and the files it consists of."""
    if not path.is_file():
        raise FileError(f"Expected a file with a network, found none at {path}.")
    if weights is not None:
        raise OptionError(f"--weights is for networks without weights of their own: {path.name} has them.")
    own_layer = "layer" if layer else None
    if path.suffix == ".onnx":
        # ONNX Runtime takes its batches from the CPU.
        return Backbone(
            NamedOutputs(OnnxGraph(path, layer, device), layer), own_layer, torch.device("cpu")
        ), onnx_files(path)
    require_trust(f"Loading {path.name}", trust_code)
    if path.suffix == ".pt2":
        return Backbone(load_exported(path, device), layer, device), [path]
    try:
        program = torch.jit.load(path, map_location=device)
    except RuntimeError as error:
        advice = "For a file of weights: posthoc collect package.module:network ... --weights FILE."
        raise FileError(f"Expected a TorchScript program, found something else in {path}. {advice}") from error
    return Backbone(NamedOutputs(program, layer), own_layer, device), [path]


def load_exported(path: Path, device: torch.device) -> nn.Module:
    """A program that `torch.export.save` wrote, with the layers it was made of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch warns of its own code
        try:
            program = torch.export.load(path)
        except Exception as error:  # other files fail in many ways
            raise FileError(f"Expected a file of torch.export.save, found something else in {path}.") from error
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
        if isinstance(returned, Mapping):
            values = {str(name): value for name, value in returned.items()}
        else:
            several = returned if isinstance(returned, tuple | list) else [returned]
            values = {str(number): value for number, value in enumerate(several)}
        if self.features is not None:
            if self.features not in values:
                raise LayerError(
                    f"Expected as layer a value that the compiled network returns, got {self.features!r}. It returns: "
                    f"{', '.join(values)}. To have features, compile it so that it returns them too."
                )
            self.layer(values[self.features])
        outputs = [value for name, value in values.items() if name != self.features]
        return values.get("logits", outputs[0] if outputs else returned)


# A predictor and data, in words


@dataclass(frozen=True)
class Plan:
    """Which predictor to run over which data, in words alone, so that other processes and machines can do it.

    The fields are the arguments of `open_predictor` and `open_data`; `inputs` says whether the inputs are stored.
    """

    predictor: str
    data: str
    layer: str | None = None
    weights: str | None = None
    transform: str | None = None
    input_columns: tuple[str, ...] = ()
    target_column: str | None = None
    inputs: bool = False
    device: str | None = None
    trust_code: bool = False

    def open(self) -> tuple[Predictor, Rows]:
        """Open the predictor, whose identity then includes the data, and the data."""
        data = open_data(self.data, input_columns=self.input_columns, target_column=self.target_column)
        predictor = open_predictor(
            self.predictor,
            layer=self.layer,
            weights=self.weights,
            transform=self.transform,
            device=self.device,
            trust_code=self.trust_code,
        )
        identity = {**predictor.identity, "data": data.identity, "inputs": self.inputs}
        return replace(predictor, identity=identity), data
