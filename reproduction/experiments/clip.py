"""The paper's zero-shot classifiers: CLIP on CIFAR-10 and CIFAR-100 as a black box, of which outputs are all there is.

Its text twin, `banking77`, is a sentence encoder used as CLIP is: a question's embedding against those of 77 prompts.
None has been trained on these data, so that every method is fitted on the training part, as in the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from posthoc.collect import open_outputs
from posthoc.collect.outputs import Outputs
from posthoc.errors import UnavailableError
from posthoc.fmgp import FMGP
from posthoc.methods import MAP, Temperature
from reproduction.data import Dataset, cifar10
from reproduction.data.files import DataFolder
from reproduction.data.images import cifar100
from reproduction.experiments.experiment import Experiment, Request
from reproduction.experiments.variants import PAPER_CLASSES, Given, Variant, fitted_and_scored
from reproduction.experiments.zero_shot import MODEL, PROMPT, Pictures, read_clip, said_once
from reproduction.plots import dot_figure

__all__ = ["FEW_POINTS", "PAPER_FMGP", "Clip", "outputs_file"]

FEW_POINTS = {"num_inducing": 5, "steps": 3, "batch_size": 20}
QUICK_ROWS, QUICK_IMAGES = 100, 24
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
    FEW_POINTS,
    likelihood=PAPER_CLASSES,
)
"""With a dot product of features for a kernel."""
VARIANTS = {
    "map": Variant("Zero-shot", MAP),
    "temperature": Variant("Temperature scaling", Temperature),
    "fmgp-paper": PAPER_FMGP,
    "fmgp": Variant("FMGP (ours)", FMGP, {}, FEW_POINTS),
}
IMAGES: dict[str, Callable[[Path | None, str], Dataset]] = {"cifar10": cifar10, "cifar100": cifar100}
BANKING = "banking77_minilm"
BANKING_PARTS = {"train": "fit.npz", "test": "test.npz"}
BANKING_WORDS = "Banking77, outputs of a MiniLM sentence encoder in place of CLIP's"


class Parts(NamedTuple):
    """What the classifier says of the rows to fit on and of those to score by, and where they come from."""

    train: Outputs
    test: Outputs
    words: dict[str, str]


class Clip(Experiment):
    """A classifier that was told its classes in words."""

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

    def work(self, prepared: Parts, case: str, method: str, seed: int, request: Request) -> Mapping[str, Any]:
        found = fitted_and_scored(
            VARIANTS[method], self.task, Given(prepared.train), prepared.test, None, seed, request
        )
        return {**found, "data": prepared.words}

    def draw(self, documents: list[dict[str, Any]], folder: Path) -> list[Path]:
        figures = {"nll": "NLL", "accuracy": "accuracy", "ece": "ECE", "brier": "Brier"}
        return dot_figure(folder / "figure", documents, figures)


@lru_cache(maxsize=1)
def parts_of(case: str, request: Request) -> Parts:
    """The data of a case: its runs share them."""
    if case not in IMAGES:
        banking = {part: outputs_file(BANKING, name, request) for part, name in BANKING_PARTS.items()}
        words = {
            part: f"{BANKING_WORDS}, {len(banking[part]):,} rows of {name}" for part, name in BANKING_PARTS.items()
        }
        return Parts(banking["train"], banking["test"], {"fit": words["train"], "test": words["test"]})
    images = {part: IMAGES[case](request.data_dir, part) for part in ("train", "test")}
    backbone, collate, origin = read_clip(images["test"].classes, request.data_dir, request.device)

    def said(part: str) -> Outputs:
        rows = Pictures(images[part][:QUICK_IMAGES] if request.quick else images[part])
        identity = {"data": rows.identity, "transform": collate.transform.description}
        return said_once(f"clip-{case}-{part}", backbone, rows, collate, identity, quick=request.quick).outputs

    seen = {part: f"{data.source}, seen by CLIP ({origin})" for part, data in images.items()}
    return Parts(said("train"), said("test"), {"fit": seen["train"], "test": seen["test"]})


def outputs_file(folder: str, name: str, request: Request) -> Outputs:
    """The outputs in a file of the data."""
    found = DataFolder(folder, request.data_dir).find(name)
    if not found:
        raise UnavailableError(
            f"Expected outputs in {name} in the folder {folder} of the data, found none: name the folder of the data "
            "with --data-dir or POSTHOC_DATA."
        )
    outputs = open_outputs(found[0])
    return outputs[:QUICK_ROWS] if request.quick else outputs
