"""Hugging Face's classifiers of images and of text, with their own processors.

No code from a repository is run, and only safetensors weights are read.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from torch import nn

from posthoc.errors import FileError, OptionError, PosthocError
from posthoc.integrations.transforms import Transform, require_kind
from posthoc.integrations.weights import load_weights, weights_file
from posthoc.optional import require

__all__ = ["ImageProcessor", "load_transformers", "require_all_loaded"]

IMAGES, TEXTS = "ImageClassification", "SequenceClassification"
"""The tasks, as in the names of transformers' classes."""


def load_transformers(name: str, weights: str | None) -> tuple[nn.Module, Transform]:
    """A model by its name on the hub or its local folder; `weights` is a revision or a file."""
    transformers = require("transformers", "hf", "A Hugging Face predictor")
    path = weights_file(weights)
    source: dict[str, Any] = {"trust_remote_code": False}
    if path is None and weights not in (None, "DEFAULT"):
        source["revision"] = weights
    try:
        config = transformers.AutoConfig.from_pretrained(name, **source)
        task = task_of(config, name)
        family = getattr(transformers, f"AutoModelFor{task}")
        if path is not None:
            model = family.from_config(config, trust_remote_code=False)
            load_weights(model, path)
        else:
            model, loaded = family.from_pretrained(name, use_safetensors=True, output_loading_info=True, **source)
            require_all_loaded(name, loaded["missing_keys"])
        if task == IMAGES:
            return model, ImageProcessor(transformers.AutoImageProcessor.from_pretrained(name, **source))
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **source)
        return model, Tokens(tokenizer, getattr(config, "max_position_embeddings", None))
    except PosthocError:
        raise
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise FileError(f"Expected a model of the Hugging Face hub or its folder, got {name!r}: {reason}") from error


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


@dataclass(frozen=True)
class ImageProcessor:
    """A Hugging Face image processor as a `Transform`."""

    processor: Any

    @property
    def description(self) -> str:
        return f"{type(self.processor).__name__} {text_digest(self.processor.to_json_string())}"

    def __call__(self, inputs: list[Any]) -> Any:
        require_kind(inputs, "an image")
        return dict(self.processor(inputs, return_tensors="pt"))


@dataclass(frozen=True)
class Tokens:
    """A Hugging Face tokenizer as a `Transform`.

    Texts that are too long are cut, short ones are padded to the longest of the batch.

    Args:
        tokenizer: The tokenizer, with a padding token.
        positions: How many positions the network has, if it says so.
    """

    tokenizer: Any
    positions: int | None

    def __post_init__(self) -> None:
        if self.tokenizer.pad_token is None:
            raise OptionError("Expected a tokenizer with a padding token: set pad_token and the model's pad_token_id.")

    @property
    def description(self) -> str:
        vocabulary = json.dumps(self.tokenizer.get_vocab(), sort_keys=True)
        return f"{type(self.tokenizer).__name__} {text_digest(vocabulary)}, at most {self._limit()} tokens"

    def __call__(self, inputs: list[Any]) -> Any:
        require_kind(inputs, "text")
        limit = self._limit()
        return dict(
            self.tokenizer(inputs, padding=True, truncation=limit is not None, max_length=limit, return_tensors="pt")
        )

    def _limit(self) -> int | None:
        # RoBERTa's positions begin after the padding token's, so its tokenizer's own limit is the smaller one;
        # a tokenizer without a limit has a very large number as limit.
        limits = [limit for limit in (self.tokenizer.model_max_length, self.positions) if limit and limit < 10**9]
        return min(limits, default=None)


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
