"""The paper's residual networks of 18 to 152 layers on ImageNet, with 1,000 classes.

All methods are scored on four of every five validation images. Temperature scaling and FMGP with our defaults are
fitted on the fifth, since the network has seen the training images; the others on the training images, as in the paper.
The paper's kernel uses the features alone here, since distances between images of 150,528 numbers carry no information.

The case `resnet50-files` needs no images and no network: it has outputs for 1,000 images to fit on and 1,000 others.
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

from posthoc import ELLA, MAP, MFVI, Temperature
from posthoc.errors import DataError, PosthocError
from posthoc.fmgp import FMGP
from posthoc.integrations.datasets import ImageFolder
from posthoc.integrations.models import Plan, Predictor, open_predictor
from posthoc.integrations.transforms import Collate
from reproduction.data.files import DataFolder, UnavailableError
from reproduction.experiments.cifar10 import FINE_TUNING
from reproduction.experiments.clip import PAPER_FMGP
from reproduction.experiments.experiment import Experiment, Request
from reproduction.experiments.variants import (
    QUICK_POINTS,
    FitData,
    NetworkOutputs,
    Variant,
    cached_outputs,
    fit_and_score,
    read_outputs,
    worker_count,
)
from reproduction.figures import dot_figure

__all__ = ["ImageNet", "Images"]

WEIGHTS = "IMAGENET1K_V1"
"""torchvision's first weights, which the paper uses."""
NETWORKS = tuple(f"resnet{depth}" for depth in (18, 34, 50, 101, 152))
FILES, FILES_FOLDER = "resnet50-files", "imagenet_resnet50"
HELD_OUT = 5
"""Every fifth validation image is for fitting."""
QUICK_IMAGES, QUICK_BATCH = 60, 4

VARIANTS = {
    "map": Variant("MAP", MAP, on="held out"),
    "temperature": Variant("Temperature scaling", Temperature, on="held out"),
    "ella": Variant(
        "ELLA (last layer)", ELLA, {}, {"num_inducing": 20, "num_features": 4}, on="train, held out to choose"
    ),
    "mfvi": Variant(
        "MFVI", MFVI, {"samples": 20, **FINE_TUNING}, {"samples": 2, "steps": 3, "batch_size": QUICK_BATCH}
    ),
    "fmgp-paper": PAPER_FMGP,
    "fmgp": Variant("FMGP (ours)", FMGP, {}, QUICK_POINTS, on="held out"),
}
SOURCES = {
    "train": "ImageNet, training images",
    "held out": f"ImageNet, one in {HELD_OUT} of the validation images",
    "train, held out to choose": f"ImageNet, training images, and one in {HELD_OUT} of the validation images to choose",
    "test": "ImageNet, the other validation images",
}


class ImageNet(Experiment):
    """Five networks from torchvision, and the outputs of one from files."""

    name = "imagenet"
    title = "ImageNet: five residual networks"
    task = "classification"
    methods = VARIANTS
    cases = (*NETWORKS, FILES)

    def variant(self, case: str, method: str) -> Variant:
        return replace(VARIANTS[method], on="sample") if case == FILES else VARIANTS[method]

    def methods_of(self, case: str) -> tuple[str, ...]:
        # MFVI with many samples of the larger networks would take days.
        return tuple(name for name in VARIANTS if name != "mfvi" or case == "resnet18")

    def configuration(self, case: str, method: str, request: Request) -> dict[str, Any]:
        network = "ResNet50" if case == FILES else f"torchvision's {case}, {WEIGHTS}"
        return {**self.variant(case, method).describe(request.quick), "network": network}

    def prepare(self, case: str, seed: int, request: Request) -> Files | Images:
        return Files(request) if case == FILES else images_of(case, request)

    def run(self, prepared: Files | Images, case: str, method: str, seed: int, request: Request) -> Mapping[str, Any]:
        variant = self.variant(case, method)
        fit_data, (test, seconds) = prepared.fit_data(variant), prepared.test(variant)
        result = fit_and_score(variant, self.task, fit_data, test, prepared.network, seed, request)
        times = result["times"]
        if fit_data.collect_seconds:
            times["fit_seconds_with_network"] = times["fit_seconds"] + fit_data.collect_seconds
        if seconds is not None:
            network_seconds = 0.0 if variant.needs_network else seconds
            times["network_seconds"] = seconds
            times["predict_seconds_with_network"] = times["predict_seconds"] + network_seconds
        return {**result, "data": prepared.sources(variant)}

    def draw(self, documents: list[dict[str, Any]], folder: Path) -> list[Path]:
        return dot_figure(folder / "figure", documents, {"nll": "NLL", "ece": "ECE", "accuracy": "accuracy"})


class Files:
    """Outputs in files, which are all that black-box methods need."""

    network = None

    def __init__(self, request: Request) -> None:
        self.sample, self.nips2017 = (
            read_outputs(FILES_FOLDER, f"{name}.npz", request) for name in ("sample", "nips2017")
        )

    def fit_data(self, variant: Variant) -> FitData:
        return FitData(self.sample)

    def test(self, variant: Variant) -> tuple[Any, float | None]:
        return self.nips2017, None

    def sources(self, variant: Variant) -> dict[str, str]:
        seen = f"{len(self.sample):,} ImageNet images probably seen in its training (sample.npz)"
        unseen = f"{len(self.nips2017):,} ImageNet images unseen in its training (nips2017.npz)"
        return {"fit": f"ResNet50's outputs on {seen}", "test": f"ResNet50's outputs on {unseen}"}


@lru_cache(maxsize=1)
def images_of(case: str, request: Request) -> Images:
    """The images and the network of a case, which its runs share."""
    return Images(case, request)


class Images:
    """ImageNet's images and the outputs of one network, read and computed when they are first used.

    The images are in `imagenet/train` and `imagenet/val` of the data, with one folder for each class.
    """

    def __init__(self, case: str, request: Request) -> None:
        self.case, self.request = case, request
        self.folder, self.outputs = cache(self._folder), cache(self._outputs)

    @cached_property
    def predictor(self) -> Predictor:
        try:
            return open_predictor(Plan(f"torchvision:{self.case}", weights=WEIGHTS, device=self.request.device))
        except PosthocError:
            raise
        except OSError as error:  # of a download
            raise UnavailableError(
                f"Expected to download torchvision's weights of {self.case}, found them unavailable ({error}): "
                f"put them into torch's cache (TORCH_HOME). The case {FILES} needs no weights."
            ) from error

    @property
    def network(self) -> nn.Module:
        network = self.predictor.backbone.module
        assert network is not None
        return network

    @property
    def collate(self) -> Collate:
        return self.predictor.collate

    def fit_data(self, variant: Variant) -> FitData:
        """The data that a variant is fitted on."""
        if variant.needs_network:
            # As many images as its steps use, evenly spaced, since it reads all of them before the first step.
            images = self.folder("train")
            count = min(len(images), FINE_TUNING["steps"] * FINE_TUNING["batch_size"])
            subset = images.subset(torch.linspace(0, len(images) - 1, count).long())
            return FitData(self._loader(subset, shuffle=True), num_data=len(images))
        val = self.outputs("held out").outputs if variant.on.endswith("to choose") else None
        computed = self.outputs(variant.on.partition(",")[0])
        return FitData(computed.outputs, val, collect_seconds=computed.seconds or 0.0)

    def test(self, variant: Variant) -> tuple[Any, float | None]:
        """The test data, and the seconds of the network."""
        computed = self.outputs("test")
        if not variant.needs_network:
            return computed.outputs, computed.seconds
        images = self.folder("val")
        return self._loader(images.subset(split_rows(len(images))[1])), computed.seconds

    def sources(self, variant: Variant) -> dict[str, str]:
        """The sources of the data."""
        return {"fit": SOURCES[variant.on], "test": SOURCES["test"]}

    def _loader(self, images: FolderRows, *, shuffle: bool = False) -> DataLoader[Any]:
        size, workers = (QUICK_BATCH, 0) if self.request.quick else (FINE_TUNING["batch_size"], worker_count())
        return DataLoader(images, size, shuffle, collate_fn=self.collate, num_workers=workers)

    def _folder(self, part: str) -> FolderRows:
        own = DataFolder("imagenet", self.request.data_dir).own
        if own is None or not (own / part).is_dir():
            raise UnavailableError(
                f"Expected ImageNet's images in imagenet/{part} of the data (--data-dir), one folder a class, found no "
                f"such folder{f' in {own.parent}' if own is not None else ''}. The case {FILES} needs no images."
            )
        images = ImageFolder(own / part)
        classes = self.network.get_submodule(str(self.predictor.backbone.layer)).out_features
        if len(images.labels) != classes:  # classes are numbered in the order of the folders' names
            raise DataError(f"Expected {classes} folders of classes in {own / part}, found {len(images.labels)}.")
        step = max(1, len(images) // QUICK_IMAGES) if self.request.quick else 1
        return FolderRows(images, range(0, len(images), step))

    def _outputs(self, part: str) -> NetworkOutputs:
        if part in ("held out", "test"):
            val = self.outputs("val")
            return val.subset(split_rows(len(val.outputs))[part == "test"])
        images = self.folder(part)
        identity = {**self.predictor.identity, "data": images.identity}
        name, quick = f"{self.case}-imagenet-{part}", self.request.quick
        return cached_outputs(name, self.predictor.backbone, images, self.collate, identity, quick=quick)


class FolderRows(Dataset[Any]):
    """Some images of a folder, by their row numbers."""

    def __init__(self, images: ImageFolder, rows: Sequence[int]) -> None:
        self.images, self.rows = images, rows
        self.identity = {**images.identity, "rows": len(rows)}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[Any, int | None]:
        return self.images[self.rows[row]]

    def subset(self, rows: Tensor) -> FolderRows:
        return FolderRows(self.images, [self.rows[row] for row in rows.tolist()])


def split_rows(count: int) -> tuple[Tensor, Tensor]:
    """Rows to fit on and rows to score by; both contain every class, since the images are sorted by class."""
    rows = torch.arange(count)
    return rows[::HELD_OUT], rows[rows % HELD_OUT != 0]
