"""CLIP as a zero-shot classifier, its classes described in words; and networks run once over images, what they said
being kept."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posthoc.collect import open_outputs
from posthoc.collect.fingerprint import fingerprint
from posthoc.collect.network import Backbone
from posthoc.collect.outputs import Outputs
from posthoc.collect.to_folder import collect_to_folder
from posthoc.errors import FileError, PosthocError, UnavailableError
from posthoc.integrations.transformers import ImageProcessor, quiet, require_all_loaded
from posthoc.integrations.transforms import Collate
from posthoc.io import atomic_path, require_folder
from posthoc.optional import require
from reproduction.data import Dataset
from reproduction.data.files import DataFolder, cache_folder

__all__ = ["Pictures", "Said", "ZeroShot", "read_clip", "readers", "said_once"]

MODEL = "openai/clip-vit-base-patch32"
FOLDER = "clip"
"""Of the data, with the model's files if they are not to be downloaded."""
PROMPT = "this is a {}"
MOST_READERS = 8


@dataclass(frozen=True)
class Said:
    """What a network says of images, and the seconds that took, if it was done in one go."""

    outputs: Outputs
    seconds: float | None

    def of(self, rows: Tensor) -> Said:
        """What it says of some of them."""
        share = len(rows) / len(self.outputs)
        return Said(self.outputs[rows], self.seconds * share if self.seconds is not None else None)


def said_once(
    name: str, backbone: Backbone, data: Any, collate: Collate, identity: Mapping[str, Any], *, quick: bool = False
) -> Said:
    """Runs a network over rows (image, class) unless that was done before: it is kept in the cache by all that decides
    it. A run that was killed is gone on with."""
    whole = {"layer": backbone.layer, "network": fingerprint(backbone.module), **identity}
    key = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:24]
    folder = require_folder(cache_folder() / "outputs") / f"{name}-{key}"
    note = folder.with_name(f"{folder.name}.json")
    fresh, begin = not folder.exists(), time.perf_counter()
    try:
        outputs = open_outputs(folder)
    except FileError:  # not there, or not all of it
        workers = 0 if quick else readers()
        outputs = collect_to_folder(backbone, data, folder, identity=whole, collate=collate, workers=workers)
        if fresh:
            with atomic_path(note) as temporary:
                temporary.write_text(json.dumps({"seconds": time.perf_counter() - begin}) + "\n", encoding="utf-8")
    return Said(outputs, json.loads(note.read_text(encoding="utf-8"))["seconds"] if note.exists() else None)


def readers() -> int:
    """How many processes make images ready."""
    return min(MOST_READERS, os.cpu_count() or 1)


class Pictures:
    """The rows (image, class) of a data set of images."""

    def __init__(self, data: Dataset) -> None:
        self.library = require("PIL.Image", "images", "Showing images to CLIP")
        self.data = data
        digest = hashlib.sha256(data.inputs.numpy().tobytes()).hexdigest()
        self.identity = {"kind": "pictures", "rows": len(data), "digest": digest}

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        pixels = self.data.inputs[row].permute(1, 2, 0).contiguous().numpy()
        return self.library.fromarray(pixels), int(self.data.targets[row])


class ZeroShot(nn.Module):
    """τ ⟨f(image), f(text)⟩ for the texts of all classes; embeddings have unit length. Those of images, the features,
    are what the layer `embedding` gives."""

    texts: Tensor  # (C, D)
    scale: Tensor  # (), τ

    def __init__(self, clip: Any, texts: Tensor) -> None:
        super().__init__()
        self.vision, self.projection = clip.vision_model, clip.visual_projection
        self.embedding = nn.Identity()
        self.register_buffer("texts", texts)
        self.register_buffer("scale", clip.logit_scale.detach().exp())

    def forward(self, pixel_values: Tensor) -> Tensor:  # (N, C)
        pooled = self.vision(pixel_values=pixel_values).pooler_output
        embedded = self.embedding(F.normalize(self.projection(pooled), dim=-1))
        return self.scale * embedded @ self.texts.mT


@torch.no_grad()
def read_clip(
    classes: Sequence[str], data_dir: str | os.PathLike[str] | None, device: str
) -> tuple[Backbone, Collate, str]:
    """CLIP with these classes, what makes its batches of rows, and where its weights come from: the folder `clip` of
    the data, or the Hugging Face hub. Only safetensors are read, and no code from there is run."""
    transformers = require("transformers", "hf", "CLIP")
    own = DataFolder(FOLDER, data_dir).own
    local = own is not None and own.is_dir()
    source = str(own) if local else MODEL
    safe: dict[str, Any] = {"trust_remote_code": False}
    try:
        with quiet(transformers.utils.logging):
            model, loaded = transformers.CLIPModel.from_pretrained(
                source, use_safetensors=True, output_loading_info=True, **safe
            )
            require_all_loaded(source, loaded["missing_keys"])
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, **safe)
            processor = transformers.AutoImageProcessor.from_pretrained(source, **safe)
    except PosthocError:
        raise
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UnavailableError(
            f"Expected CLIP's weights as safetensors, found that those of {source} cannot be had ({reason}): put the "
            f"files of {MODEL} into the folder {FOLDER} of the data (--data-dir). The case banking77 does without them."
        ) from error
    model.eval()
    prompts = [PROMPT.format(name.replace("_", " ")) for name in classes]
    tokens = tokenizer(prompts, padding=True, return_tensors="pt")
    texts = model.text_projection(model.text_model(**tokens).pooler_output)
    network = ZeroShot(model, F.normalize(texts, dim=-1)).eval().to(device)
    backbone = Backbone(network, "embedding", None)
    words = f"the folder {FOLDER}" if local else MODEL
    return backbone, Collate(ImageProcessor(processor), backbone.dtype), words
