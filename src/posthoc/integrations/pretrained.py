"""Networks of torchvision, timm and Hugging Face, with published weights or those of a file, and their transforms.

No code from a repository is run, and nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posthoc.collect.network import Backbone
from posthoc.errors import FileError, OptionError
from posthoc.integrations.files import expecting
from posthoc.integrations.transforms import Transform, for_each
from posthoc.optional import require

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""A name with one of these suffixes is a file, not published weights."""

WRAPPERS = ("state_dict", "model_state_dict", "model")
"""The names under which training scripts store the weights beside other things."""

IMAGES, TEXTS = "ImageClassification", "SequenceClassification"
"""The tasks, as in the names of transformers' classes."""


# Files of weights


def weights_file(weights: str | None) -> Path | None:
    """The file that --weights names, or None where it is the name of published weights."""
    if weights is None:
        return None
    path = Path(weights)
    if path.suffix in SUFFIXES and not path.is_file():
        raise FileError(f"Expected a file of weights, found none at {path}.")
    return path if path.is_file() else None


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors by name in a safetensors file, or in one that `torch.save` wrote."""
    from safetensors.torch import load_file

    with expecting(f"tensors by name in {path} (save model.state_dict() alone: a pickled model could run code)"):
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    for name in WRAPPERS:
        content = content[name] if isinstance(content, Mapping) and isinstance(content.get(name), Mapping) else content
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise FileError(f"Expected tensors by name in {path}, found {type(content).__name__}: save model.state_dict().")
    return {name.removeprefix("module."): tensor for name, tensor in content.items()}  # DataParallel adds the prefix


def load_weights(model: nn.Module, path: Path) -> nn.Module:
    """Load all weights of a file into a network, which must have exactly those; returns the network."""
    with expecting(f"weights for this network in {path}"):
        model.load_state_dict(read_weights(path))
    return model


def sized_for(path: Path, build: Callable[..., nn.Module]) -> nn.Module:
    """A network with the weights of a file, and with as many classes as its last linear layer has there."""
    model = build()
    last = read_weights(path).get(f"{Backbone(model, None, None).layer}.weight")
    return load_weights(model if last is None else build(num_classes=len(last)), path)


# torchvision and timm


def load_torchvision(name: str, weights: str | None) -> tuple[nn.Module, Transform]:
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
    build = partial(models.get_model, name)
    model = build(weights=published[chosen]) if path is None else sized_for(path, build)
    return model, each_image(published[chosen].transforms())


def load_timm(name: str, weights: str | None) -> tuple[nn.Module, Transform]:
    """A timm model such as `resnet50` or `resnet50.a1_in1k`, with its default weights, those of a tag, or a file's."""
    timm = require("timm", "timm", "A timm predictor")
    data = require("timm.data", "timm", "A timm predictor")
    path = weights_file(weights)
    if path is None and weights not in (None, "DEFAULT"):
        name = f"{name.partition('.')[0]}.{weights}"
    if ":" not in name:  # timm itself looks up names with a scheme, such as hf-hub:
        require_name(name, timm.list_models(include_tags=True) + timm.list_models(), "timm")
    build = partial(timm.create_model, name)
    model = build(pretrained=True) if path is None else sized_for(path, build)
    return model, each_image(data.create_transform(**data.resolve_model_data_config(model), is_training=False))


def require_name(name: str, known: Sequence[str], library: str) -> None:
    """Refuse a name that the library does not know."""
    if name not in known:
        near = ", ".join(get_close_matches(name, known, 5))
        hint = f"Do you mean {near}?" if near else f"See the list_models() of {library}."
        raise OptionError(f"Expected the name of a {library} model (or of its weights), got {name!r}. {hint}")


def each_image(function: Callable[[Any], Any]) -> Transform:
    """A transform of images whose text shows its settings."""
    return for_each(function, " ".join(str(function).split()), takes="an image")


# Hugging Face


def load_transformers(name: str, weights: str | None) -> tuple[nn.Module, Transform]:
    """A model by its name on the hub or its local folder; `weights` is a revision or a file."""
    transformers = require("transformers", "hf", "A Hugging Face predictor")
    path = weights_file(weights)
    source: dict[str, Any] = {"trust_remote_code": False}
    if path is None and weights not in (None, "DEFAULT"):
        source["revision"] = weights
    with expecting(f"a model of the Hugging Face hub or its folder at {name!r}"):
        config = transformers.AutoConfig.from_pretrained(name, **source)
        task = task_of(config, name)
        family = getattr(transformers, f"AutoModelFor{task}")
        if path is not None:
            model = load_weights(family.from_config(config, trust_remote_code=False), path)
        else:
            model, loaded = family.from_pretrained(name, use_safetensors=True, output_loading_info=True, **source)
            require_all_loaded(name, loaded["missing_keys"])
        if task == IMAGES:
            return model, image_transform(transformers.AutoImageProcessor.from_pretrained(name, **source))
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **source)
        return model, text_transform(tokenizer, getattr(config, "max_position_embeddings", None))


def task_of(config: Any, name: str) -> str:
    """The task that the model was trained for."""
    for task in (IMAGES, TEXTS):
        if any(architecture.endswith(f"For{task}") for architecture in config.architectures or ()):
            return task
    raise OptionError(f"Expected a model for {IMAGES} or {TEXTS}, got {name!r}, which is {config.architectures}.")


def require_all_loaded(name: str, missing: Any) -> None:
    """Refuse a network of which a part, often the classifier, would be random."""
    if missing:
        advice = "it was not trained for this task; train it first, or give its weights with --weights."
        raise FileError(f"Expected all weights of {name!r}, found none for {', '.join(sorted(missing)[:5])}: {advice}")


def image_transform(processor: Any) -> Transform:
    """A Hugging Face image processor as a `Transform`."""
    return Transform(partial(process, processor), describe(processor, processor.to_json_string()), "an image")


def text_transform(tokenizer: Any, positions: int | None) -> Transform:
    """A Hugging Face tokenizer as a `Transform`: long texts are cut, short ones padded to the longest of the batch.

    `positions` is how many the network has, if it says so.
    """
    if tokenizer.pad_token is None:
        raise OptionError("Expected a tokenizer with a padding token: set pad_token and the model's pad_token_id.")
    # RoBERTa's positions begin after the padding token's, so its tokenizer's own limit is the smaller one;
    # a tokenizer without a limit has a very large number as limit.
    limit = min((n for n in (tokenizer.model_max_length, positions) if n and n < 10**9), default=None)
    description = describe(tokenizer, json.dumps(tokenizer.get_vocab(), sort_keys=True))
    tokenize = partial(process, tokenizer, padding=True, truncation=limit is not None, max_length=limit)
    return Transform(tokenize, f"{description}, at most {limit} tokens", "text")


def process(processor: Any, inputs: list[Any], **options: Any) -> dict[str, Any]:
    """Inputs as tensors, by a processor of Hugging Face."""
    return dict(processor(inputs, return_tensors="pt", **options))


def describe(processor: Any, settings: str) -> str:
    """A name for a processor with these settings."""
    return f"{type(processor).__name__} {hashlib.sha256(settings.encode()).hexdigest()[:16]}"


LIBRARIES = {"torchvision": load_torchvision, "timm": load_timm, "hf": load_transformers}
"""How the models of each library are loaded, by name and weights."""
