"""The paper's experiments on CIFAR-10: four residual networks on the test images and on SVHN.

All methods but two are fitted on the training images, as in the paper, and scored on the test images. The network has
memorized the training images, so temperature scaling and FMGP with our defaults are fitted on random crops of them.
Cases that end in `-half` show our recommendation: fit on one half of the test images, score on the other.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from posthoc import ELLA, MAP, MFVI, SNGP, Laplace, Temperature, VaLLA
from posthoc.base import Method
from posthoc.evaluate import metrics as m
from posthoc.evaluate.evaluate import Evaluation, details, score
from posthoc.fmgp import FMGP
from reproduction.data.images import CIFAR10_CLASSES
from reproduction.experiments.cifar_networks import CROPS, Cifar
from reproduction.experiments.experiment import Experiment, Request
from reproduction.experiments.variants import (
    PAPER_KERNEL,
    PAPER_LIKELIHOOD,
    QUICK,
    QUICK_POINTS,
    FitData,
    Variant,
    cached_fit,
    quality_of,
)
from reproduction.figures import dot_figure, histogram_figure

__all__ = ["Cifar10", "Cifar10OOD", "CifarExperiment"]

DEPTHS = (20, 32, 44, 56)
FINE_TUNING = {"steps": 500, "batch_size": 256}
EXAMPLES = 8
"""The number of the most and of the least certain images in a document."""
FITTED_ON = {
    "train": "training images",
    "crops": f"{CROPS:,} random crops of training images",
    "train, crops to choose": f"training images, and {CROPS:,} random crops of them to choose by",
    "crops of train": "random crops of training images",
    "half of test": "the first half of the test images",
}
VARIANTS = {
    "map": Variant("MAP", MAP),
    "temperature": Variant("Temperature scaling", Temperature, on="crops"),
    "lla-kfac": Variant("LLA (last layer, KFAC)", Laplace, {"curvature": "kron"}),
    "lla": Variant("LLA (last layer)", Laplace, {"curvature": "full"}),
    "ella": Variant("ELLA (last layer)", ELLA, {"num_features": 64}, on="train, crops to choose"),
    "valla": Variant("VaLLA (last layer)", VaLLA, {}, QUICK_POINTS, on="train, crops to choose"),
    # The paper's own, over all weights: an hour on a CPU for ResNet20, and longer for the others.
    "ella-all": Variant(
        "ELLA (all weights)",
        ELLA,
        {"weights": "all"},
        {"num_inducing": 20, "num_features": 4},
        on="train, crops to choose",
    ),
    "valla-all": Variant("VaLLA (all weights)", VaLLA, {"weights": "all"}, QUICK_POINTS, on="train, crops to choose"),
    "mfvi": Variant("MFVI", MFVI, {"samples": 20, **FINE_TUNING}, {"samples": 2, **QUICK}),
    "sngp": Variant("SNGP", SNGP, {"lr": 1e-5, **FINE_TUNING}, {"num_features": 32, **QUICK}),
    "fmgp-paper": Variant(
        "FMGP (the paper's way)",
        FMGP,
        {
            "kernel": PAPER_KERNEL,
            "variance": "per_output",
            "inducing": "random",
            "steps": 3000,
            "lr": 0.02,
            "ood_strength": 0.0,
        },
        QUICK_POINTS,
        likelihood=PAPER_LIKELIHOOD,
    ),
    "fmgp": Variant("FMGP (ours)", FMGP, {}, QUICK_POINTS, on="crops of train"),
}
HALF_VARIANTS = {
    "map": VARIANTS["map"],
    "temperature": Variant("Temperature scaling", Temperature, on="half of test"),
    "fmgp": Variant("FMGP (ours)", FMGP, {}, QUICK_POINTS, on="half of test"),
}


@lru_cache(maxsize=1)
def cifar_of(request: Request) -> Cifar:
    """The images and networks of a request, which its runs share."""
    return Cifar(request)


class CifarExperiment(Experiment):
    """An experiment on CIFAR-10: a case is a network; fits are cached, since several experiments use them."""

    task = "classification"
    methods = VARIANTS
    cases = tuple(f"resnet{depth}" for depth in DEPTHS)

    def variant(self, case: str, method: str) -> Variant:
        return (HALF_VARIANTS if is_half(case) else VARIANTS)[method]

    def methods_of(self, case: str) -> tuple[str, ...]:
        return tuple(HALF_VARIANTS if is_half(case) else VARIANTS)

    def configuration(self, case: str, method: str, request: Request) -> dict[str, Any]:
        return {**self.variant(case, method).describe(request.quick), "network": case.removesuffix("-half")}

    def prepare(self, case: str, seed: int, request: Request) -> Cifar:
        return cifar_of(request)

    def fit(self, cifar: Cifar, case: str, method: str, seed: int) -> tuple[Method, dict[str, float]]:
        """A fitted method for one network, and the seconds of its fit."""
        request, depth, variant = cifar.request, depth_of(case), self.variant(case, method)
        network = cifar.network(depth)

        def build() -> Method:
            return variant.build(network, self.task, seed=seed, device=request.device, quick=request.quick)

        recipe = {**variant.describe(request.quick), "network": depth, "seed": seed, "device": request.device}
        return cached_fit(build, lambda: fit_data_of(variant, cifar, depth, seed), recipe, network)

    def score(self, cifar: Cifar, case: str, method: str, fitted: Method) -> Evaluation:
        """A fitted method on the test images and on SVHN."""
        if self.variant(case, method).needs_network:
            return score(fitted, cifar.rows("test"), cifar.rows("svhn")[0], device=cifar.device)
        test, ood = (cifar.outputs(depth_of(case), part).outputs for part in ("test", "svhn"))
        if is_half(case):
            test = test[len(test) // 2 :]
        return score(fitted, test, ood, device=cifar.device)

    def sources(self, cifar: Cifar, case: str, method: str) -> dict[str, str]:
        """The sources of the data."""
        test = cifar.images("test").source
        return {
            "test": f"{test}, the second half" if is_half(case) else test,
            "fit": FITTED_ON[self.variant(case, method).on],
            "ood": cifar.images("svhn").source,
        }


def fit_data_of(variant: Variant, cifar: Cifar, depth: int, seed: int) -> FitData:
    """The data that a variant is fitted on, for the network of this depth."""
    if variant.on == "crops of train":
        return FitData(cifar.rows("train"), augment="crops")
    crops = cifar.crops(seed) if "crops" in variant.on else None
    if variant.needs_network:
        return FitData(cifar.rows("train"), crops)
    on_crops = cifar.compute(depth, *crops) if crops is not None else None
    if variant.on == "crops":
        assert on_crops is not None
        return FitData(on_crops.outputs, collect_seconds=on_crops.seconds or 0.0)
    computed = cifar.outputs(depth, "test" if variant.on == "half of test" else "train")
    outputs = computed.outputs[: len(computed.outputs) // 2] if variant.on == "half of test" else computed.outputs
    val = on_crops.outputs if on_crops is not None else None
    return FitData(outputs, val, collect_seconds=computed.seconds or 0.0)


class Cifar10(CifarExperiment):
    """Four networks: the quality of each method's probabilities, and the costs."""

    name = "cifar10"
    title = "CIFAR-10: four residual networks"
    cases = (*CifarExperiment.cases, *(f"resnet{depth}-half" for depth in DEPTHS))

    def run(self, prepared: Cifar, case: str, method: str, seed: int, request: Request) -> Mapping[str, Any]:
        fitted, times = self.fit(prepared, case, method, seed)
        scored = self.score(prepared, case, method, fitted)
        times = {**times, "predict_seconds": scored.seconds}
        times["network_seconds"] = prepared.outputs(depth_of(case), "test").seconds or 0.0
        if self.variant(case, method).needs_network:
            times["predict_seconds_with_network"] = scored.seconds
        elif not is_half(case):
            with_network = score(fitted, prepared.rows("test"), device=prepared.device)
            times["predict_seconds_with_network"] = with_network.seconds
        return {
            **quality_of(fitted, scored),
            "times": times,
            "data": self.sources(prepared, case, method),
            "examples": examples(scored, prepared, case) if seed == 0 else {},
        }

    def draw(self, documents: list[dict[str, Any]], folder: Path) -> list[Path]:
        whole = [document for document in documents if not is_half(document["case"])]
        figures = {"nll": "NLL", "ece": "ECE", "brier": "Brier", "ood_auc": "OOD AUC", "accuracy": "accuracy"}
        return dot_figure(folder / "figure", whole, figures) if whole else []


class Cifar10OOD(CifarExperiment):
    """ResNet56: entropies of predictions for photographs and for digits, from the runs of `cifar10`."""

    name = "cifar10-ood"
    title = "CIFAR-10 or SVHN: entropies of predictions, ResNet56"
    cases = ("resnet56",)

    def run(self, prepared: Cifar, case: str, method: str, seed: int, request: Request) -> Mapping[str, Any]:
        document = Cifar10().document(case, method, seed, request)
        return {
            "metrics": {name: document["metrics"][name] for name in ("ood_auc", "ood_fpr95", "accuracy")},
            "times": {name: document["times"][name] for name in ("fit_seconds", "fit_seconds_with_network")},
            "curves": {"entropy": document["curves"]["entropy"]},
            "data": document["configuration"]["data"],
        }

    def draw(self, documents: list[dict[str, Any]], folder: Path) -> list[Path]:
        return histogram_figure(folder / "figure", documents, "CIFAR-10", "SVHN")


def depth_of(case: str) -> int:
    return int(case.removeprefix("resnet").removesuffix("-half"))


def is_half(case: str) -> bool:
    return case.endswith("-half")


def examples(scored: Evaluation, cifar: Cifar, case: str) -> dict[str, list[dict[str, Any]]]:
    """The most and the least certain test images, as PNG in base64 with their classes."""
    pixels = cifar.images("test").pixels
    first = len(pixels) // 2 if is_half(case) else 0
    columns = map(scored.scores.column, (m.uncertainty, m.confidence, details))
    entropy, confidence, classes = (column for column in columns if column is not None)
    order = entropy.argsort(stable=True)
    return {
        kind: [
            {
                "row": row,
                "target": CIFAR10_CLASSES[int(classes[row, 1])],
                "said": CIFAR10_CLASSES[int(classes[row, 0])],
                "probability": float(confidence[row]),
                "entropy": float(entropy[row]),
                "png": base64.b64encode(png(pixels[first + row])).decode("ascii"),
            }
            for row in rows.tolist()
        ]
        for kind, rows in (("most_certain", order[:EXAMPLES]), ("least_certain", order.flip(0)[:EXAMPLES]))
    }


def png(pixels: Tensor) -> bytes:
    """An image (3, H, W) in uint8 as PNG."""
    file = BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(file, "PNG", optimize=True)
    return file.getvalue()
