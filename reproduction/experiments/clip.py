"""The paper's zero-shot classifiers: CLIP on CIFAR-10 and CIFAR-100 as a black box, of which only outputs are known.

The case `banking77` is the same for text: a sentence encoder compares a question's embedding with those of 77 prompts.
No classifier was trained on these data, so every method is fitted on the training part, as in the paper.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from posthoc import MAP, Temperature
from posthoc.collect.network import Backbone
from posthoc.collect.outputs import Outputs
from posthoc.errors import PosthocError
from posthoc.fmgp import FMGP
from posthoc.integrations.pretrained import image_transform, require_all_loaded
from posthoc.integrations.transforms import Collate
from posthoc.optional import require
from reproduction.data import Dataset, cifar10, cifar100
from reproduction.data.files import DataFolder, UnavailableError
from reproduction.experiments.experiment import Experiment, Request
from reproduction.experiments.variants import (
    PAPER_LIKELIHOOD,
    QUICK_POINTS,
    FitData,
    Variant,
    cached_outputs,
    fit_and_score,
    read_outputs,
)
from reproduction.figures import dot_figure

__all__ = ["PAPER_FMGP", "Clip", "PictureRows", "ZeroShotClassifier", "load_clip"]

MODEL = "openai/clip-vit-base-patch32"
FOLDER = "clip"
"""The folder of the data with the model's files, if they are not to be downloaded."""
PROMPT = "this is a {}"
QUICK_IMAGES = 24
PAPER_FMGP = Variant(
    "FMGP (the paper's way)",
    FMGP,
    {
        "kernel": {"type": "linear", "on": "features"},
        "variance": "per_output",
        "inducing": "random",
        "steps": 3000,
        "lr": 0.02,
        "ood_strength": 0.0,
    },
    QUICK_POINTS,
    likelihood=PAPER_LIKELIHOOD,
)
"""The paper's FMGP with a linear kernel over the features."""
VARIANTS = {
    "map": Variant("Zero-shot", MAP),
    "temperature": Variant("Temperature scaling", Temperature),
    "fmgp-paper": PAPER_FMGP,
    "fmgp": Variant("FMGP (ours)", FMGP, {}, QUICK_POINTS),
}
IMAGES: dict[str, Callable[[Path | None, str], Dataset]] = {"cifar10": cifar10, "cifar100": cifar100}
BANKING = "banking77_minilm"
BANKING_FILES = {"train": "fit.npz", "test": "test.npz"}


class Parts(NamedTuple):
    """The classifier's outputs for the rows to fit on and to score by, and the sources of the data."""

    train: Outputs
    test: Outputs
    sources: dict[str, str]


class Clip(Experiment):
    """Classifiers that know their classes from descriptions."""

    name = "clip"
    title = "Zero-shot classifiers as black boxes"
    task = "classification"
    methods = VARIANTS
    cases = ("banking77", *IMAGES)

    def configuration(self, case: str, method: str, request: Request) -> dict[str, Any]:
        network = f"{MODEL}, {PROMPT!r}" if case in IMAGES else "MiniLM, 20 times the cosine"
        return {**VARIANTS[method].describe(request.quick), "network": network}

    def prepare(self, case: str, seed: int, request: Request) -> Parts:
        return parts_of(case, request)

    def run(self, prepared: Parts, case: str, method: str, seed: int, request: Request) -> Mapping[str, Any]:
        fit_data = FitData(prepared.train)
        result = fit_and_score(VARIANTS[method], self.task, fit_data, prepared.test, None, seed, request)
        return {**result, "data": prepared.sources}

    def draw(self, documents: list[dict[str, Any]], folder: Path) -> list[Path]:
        figures = {"nll": "NLL", "accuracy": "accuracy", "ece": "ECE", "brier": "Brier"}
        return dot_figure(folder / "figure", documents, figures)


@lru_cache(maxsize=1)
def parts_of(case: str, request: Request) -> Parts:
    """The data of a case, which its runs share."""
    if case not in IMAGES:
        outputs = {part: read_outputs(BANKING, name, request) for part, name in BANKING_FILES.items()}
        source = "Banking77, outputs of a MiniLM sentence encoder in place of CLIP's"
        sources = [f"{source}, {len(outputs[part]):,} rows of {name}" for part, name in BANKING_FILES.items()]
        return Parts(outputs["train"], outputs["test"], dict(zip(("fit", "test"), sources, strict=True)))
    images = {part: IMAGES[case](request.data_dir, part) for part in ("train", "test")}
    backbone, collate, origin = load_clip(images["test"].classes, request.data_dir, request.device)

    def outputs_of(part: str) -> Outputs:
        rows = PictureRows(images[part][:QUICK_IMAGES] if request.quick else images[part])
        identity = {"data": rows.identity, "transform": collate.transform.description}
        name = f"clip-{case}-{part}"
        return cached_outputs(name, backbone, rows, collate, identity, quick=request.quick).outputs

    fit, test = (f"{images[part].source}, seen by CLIP ({origin})" for part in ("train", "test"))
    return Parts(outputs_of("train"), outputs_of("test"), {"fit": fit, "test": test})


class PictureRows:
    """A data set of images as rows (PIL image, class)."""

    def __init__(self, data: Dataset) -> None:
        self.data = data
        digest = hashlib.sha256(data.inputs.numpy().tobytes()).hexdigest()
        self.identity = {"kind": "pictures", "rows": len(data), "digest": digest}

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> tuple[Image.Image, int]:
        pixels = self.data.inputs[row].permute(1, 2, 0).contiguous().numpy()
        return Image.fromarray(pixels), int(self.data.targets[row])


class ZeroShotClassifier(nn.Module):
    """Logits τ ⟨f(image), f(text)⟩ for the texts of all classes, with embeddings of unit length.

    The embeddings of images, the features, are the output of the layer `embedding`.
    """

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
def load_clip(
    classes: Sequence[str], data_dir: str | os.PathLike[str] | None, device: str
) -> tuple[Backbone, Collate, str]:
    """CLIP as a classifier, from the folder `clip` of the data or from the Hugging Face hub.

    Only safetensors are read, and no code of the repository is run.

    Args:
        classes: Names of the classes.
        data_dir: The folder with data.
        device: Where the network runs.

    Returns:
        The network, the function that makes its batches, and the source of the weights.

    Raises:
        UnavailableError: The weights are not there and cannot be downloaded.
    """
    transformers = require("transformers", "hf", "CLIP")
    own = DataFolder(FOLDER, data_dir).own
    local = own is not None and own.is_dir()
    source = str(own) if local else MODEL
    safe: dict[str, Any] = {"trust_remote_code": False}
    try:
        model, loaded = transformers.CLIPModel.from_pretrained(
            source, use_safetensors=True, output_loading_info=True, **safe
        )
        require_all_loaded(source, loaded["missing_keys"])
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **safe)
        processor = transformers.AutoImageProcessor.from_pretrained(source, **safe)
    except PosthocError:
        raise
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0][:300]
        raise UnavailableError(
            f"Expected CLIP's weights as safetensors, found that those of {source} are unavailable ({reason}): put the "
            f"files of {MODEL} into the folder {FOLDER} of the data (--data-dir). The case banking77 needs no weights."
        ) from error
    model.eval()
    prompts = [PROMPT.format(name.replace("_", " ")) for name in classes]
    tokens = tokenizer(prompts, padding=True, return_tensors="pt")
    texts = model.text_projection(model.text_model(**tokens).pooler_output)
    network = ZeroShotClassifier(model, F.normalize(texts, dim=-1)).eval().to(device)
    backbone = Backbone(network, "embedding", None)
    origin = f"the folder {FOLDER}" if local else MODEL
    return backbone, Collate(image_transform(processor), backbone.dtype), origin
