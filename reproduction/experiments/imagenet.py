"""The paper's residual networks of 18 to 152 layers on ImageNet, of a thousand classes.

All are scored on four of every five validation images. Temperature scaling and FMGP (with our defaults) are fitted on
the fifth, since the network has seen the training images; the others on those, as in the paper. The paper's kernel is
over the features alone here: distances between images of 150,528 numbers say nothing.

The case `resnet50-files` needs no images and no network: it has outputs on 1,000 images to fit on, and on 1,000 others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from posthoc.errors import DataError, PosthocError, UnavailableError
from posthoc.fmgp import FMGP
from posthoc.integrations.datasets import ImageFolder
from posthoc.integrations.models import Predictor, open_predictor
from posthoc.integrations.transforms import Collate
from posthoc.methods import ELLA, MAP, MFVI, Temperature
from reproduction.data.files import DataFolder
from reproduction.experiments.cifar10 import FINE_TUNED, needs_network
from reproduction.experiments.clip import FEW_POINTS, PAPER_FMGP, outputs_file
from reproduction.experiments.experiment import Experiment, Request
from reproduction.experiments.variants import Given, Variant, fitted_and_scored
from reproduction.experiments.zero_shot import Said, readers, said_once
from reproduction.plots import dot_figure

__all__ = ["ImageNet", "Images"]

WEIGHTS = "IMAGENET1K_V1"
"""torchvision's first: the paper's figures of the bare networks are theirs."""
NETWORKS = tuple(f"resnet{depth}" for depth in (18, 34, 50, 101, 152))
FILES, FILES_FOLDER = "resnet50-files", "imagenet_resnet50"
HELD_OUT = 5
"""One validation image in so many is to fit on."""
QUICK_IMAGES, QUICK_BATCH = 60, 4

VARIANTS = {
    "map": Variant("MAP", MAP, on="held out"),
    "temperature": Variant("Temperature scaling", Temperature, on="held out"),
    "ella": Variant(
        "ELLA (last layer)", ELLA, {}, {"num_points": 20, "num_features": 4}, on="train, held out to choose"
    ),
    "mfvi": Variant("MFVI", MFVI, {"samples": 20, **FINE_TUNED}, {"samples": 2, "steps": 3, "batch_size": QUICK_BATCH}),
    "fmgp-paper": PAPER_FMGP,
    "fmgp": Variant("FMGP (ours)", FMGP, {}, FEW_POINTS, on="held out"),
}
SOURCES = {
    "train": "ImageNet, training images",
    "held out": f"ImageNet, one in {HELD_OUT} of the validation images",
    "train, held out to choose": f"ImageNet, training images, and one in {HELD_OUT} of the validation images to choose",
    "test": "ImageNet, the other validation images",
}


class ImageNet(Experiment):
    """Five networks from torchvision, and one's outputs."""

    name = "imagenet"
    title = "ImageNet: five residual networks"
    task = "classification"
    methods = VARIANTS
    cases = (*NETWORKS, FILES)

    def variant(self, case: str, method: str) -> Variant:
        return replace(VARIANTS[method], on="sample") if case == FILES else VARIANTS[method]

    def methods_of(self, case: str) -> tuple[str, ...]:
        # Many draws of the larger networks would take days.
        return tuple(name for name in VARIANTS if name != "mfvi" or case == "resnet18")

    def configuration(self, case: str, method: str, request: Request) -> dict[str, Any]:
        network = "ResNet50" if case == FILES else f"torchvision's {case}, {WEIGHTS}"
        return {**self.variant(case, method).describe(request.quick), "network": network}

    def prepare(self, case: str, seed: int, request: Request) -> Files | Images:
        return Files(request) if case == FILES else images_of(case, request)

    def work(self, prepared: Files | Images, case: str, method: str, seed: int, request: Request) -> Mapping[str, Any]:
        variant = self.variant(case, method)
        given, (test, seconds) = prepared.given(variant), prepared.test(variant)
        found = fitted_and_scored(variant, self.task, given, test, prepared.network, seed, request)
        times = found["times"]
        if given.collected:
            times["fit_seconds_with_network"] = times["fit_seconds"] + given.collected
        if seconds is not None:
            run_again = 0.0 if needs_network(variant) else seconds
            times |= {"network_seconds": seconds, "predict_seconds_with_network": times["predict_seconds"] + run_again}
        return {**found, "data": prepared.words(variant)}

    def draw(self, documents: list[dict[str, Any]], folder: Path) -> list[Path]:
        return dot_figure(folder / "figure", documents, {"nll": "NLL", "ece": "ECE", "accuracy": "accuracy"})


class Files:
    """Outputs in files: all that black-box methods need."""

    network = None

    def __init__(self, request: Request) -> None:
        self.sample, self.nips2017 = (
            outputs_file(FILES_FOLDER, f"{name}.npz", request) for name in ("sample", "nips2017")
        )

    def given(self, variant: Variant) -> Given:
        return Given(self.sample)

    def test(self, variant: Variant) -> tuple[Any, float | None]:
        return self.nips2017, None

    def words(self, variant: Variant) -> dict[str, str]:
        sizes = {"fit": len(self.sample), "test": len(self.nips2017)}
        which = {"fit": "probably seen in its training (sample.npz)", "test": "unseen in its training (nips2017.npz)"}
        return {part: f"ResNet50's outputs on {sizes[part]:,} ImageNet images {which[part]}" for part in sizes}


@lru_cache(maxsize=1)
def images_of(case: str, request: Request) -> Images:
    """The images and the network of a case: its runs share them."""
    return Images(case, request)


class Images:
    """ImageNet's images, `imagenet/train` and `imagenet/val` with one folder a class, and what one network says of
    them: each part is read, and run, when it is first asked for."""

    def __init__(self, case: str, request: Request) -> None:
        self.case, self.request = case, request
        self.folder, self.said = cache(self._folder), cache(self._said)

    @cached_property
    def predictor(self) -> Predictor:
        try:
            return open_predictor(f"torchvision:{self.case}", weights=WEIGHTS, device=self.request.device)
        except PosthocError:
            raise
        except OSError as error:  # of a download
            raise UnavailableError(
                f"Expected to download torchvision's weights of {self.case}, found that they cannot be had ({error}): "
                f"put them into torch's cache (TORCH_HOME). The case {FILES} does without them."
            ) from error

    @property
    def network(self) -> nn.Module:
        network = self.predictor.backbone.module
        assert network is not None
        return network

    @cached_property
    def collate(self) -> Collate:
        return Collate(self.predictor.transform, self.predictor.backbone.dtype)

    def given(self, variant: Variant) -> Given:
        """What a variant is fitted on."""
        if needs_network(variant):
            # As many images as its steps see, from all over: it looks at each of them before it begins.
            images = self.folder("train")
            most = min(len(images), FINE_TUNED["steps"] * FINE_TUNED["batch_size"])
            some = images.some(torch.linspace(0, len(images) - 1, most).long())
            return Given(self._loader(some, shuffle=True), num_data=len(images))
        val = self.said("held out").outputs if variant.on.endswith("to choose") else None
        said = self.said(variant.on.partition(",")[0])
        return Given(said.outputs, val, collected=said.seconds or 0.0)

    def test(self, variant: Variant) -> tuple[Any, float | None]:
        """What it is scored by, and the seconds that the network took."""
        said = self.said("test")
        if not needs_network(variant):
            return said.outputs, said.seconds
        images = self.folder("val")
        return self._loader(images.some(apart(len(images))[1])), said.seconds

    def words(self, variant: Variant) -> dict[str, str]:
        """Where the data come from."""
        return {"fit": SOURCES[variant.on], "test": SOURCES["test"]}

    def _loader(self, images: Folder, *, shuffle: bool = False) -> DataLoader[Any]:
        size, workers = (QUICK_BATCH, 0) if self.request.quick else (FINE_TUNED["batch_size"], readers())
        return DataLoader(images, size, shuffle, collate_fn=self.collate, num_workers=workers)

    def _folder(self, part: str) -> Folder:
        own = DataFolder("imagenet", self.request.data_dir).own
        if own is None or not (own / part).is_dir():
            raise UnavailableError(
                f"Expected ImageNet's images in imagenet/{part} of the data (--data-dir), one folder a class, found no "
                f"such folder{f' in {own.parent}' if own is not None else ''}. The case {FILES} does without them."
            )
        images = ImageFolder(own / part)
        classes = self.network.get_submodule(str(self.predictor.backbone.layer)).out_features
        if len(images.labels) != classes:  # classes are numbered by their folders' names
            raise DataError(f"Expected {classes} folders of classes in {own / part}, found {len(images.labels)}.")
        step = max(1, len(images) // QUICK_IMAGES) if self.request.quick else 1
        return Folder(images, range(0, len(images), step))

    def _said(self, part: str) -> Said:
        if part in ("held out", "test"):
            val = self.said("val")
            return val.of(apart(len(val.outputs))[part == "test"])
        images = self.folder(part)
        identity = {**self.predictor.identity, "data": images.identity}
        name, quick = f"{self.case}-imagenet-{part}", self.request.quick
        return said_once(name, self.predictor.backbone, images, self.collate, identity, quick=quick)


class Folder(Dataset[Any]):
    """Some images of a folder, by their rows in it."""

    def __init__(self, images: ImageFolder, rows: Sequence[int]) -> None:
        self.images, self.rows = images, rows
        self.identity = {**images.identity, "rows": len(rows)}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[Any, int | None]:
        return self.images[self.rows[row]]

    def some(self, rows: Tensor) -> Folder:
        """Fewer of them."""
        return Folder(self.images, [self.rows[row] for row in rows.tolist()])


def apart(count: int) -> tuple[Tensor, Tensor]:
    """Rows to fit on and rows to score by: of every class, since the images lie class by class."""
    rows = torch.arange(count)
    return rows[::HELD_OUT], rows[rows % HELD_OUT != 0]
