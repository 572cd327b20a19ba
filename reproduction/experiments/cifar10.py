"""The paper's experiments on CIFAR-10: four residual networks on the test images, and on digits from elsewhere.

Every method but two is fitted on the training images, as in the paper, and scored on the test images. Those the network
has learnt by heart, so that temperature scaling and FMGP (with our defaults) are fitted on random crops of them.
Cases that end in `-half` are what we would do: fit on one half of the test images, score on the other.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from posthoc.base import Method
from posthoc.evaluate.evaluate import Evaluation, score
from posthoc.evaluate.report.pictures import png
from posthoc.fmgp import FMGP
from posthoc.methods import ELLA, MAP, MFVI, SNGP, Laplace, Temperature, VaLLA
from reproduction.data.images import CIFAR10_CLASSES
from reproduction.experiments.cifar_data import CROPS, Cifar
from reproduction.experiments.experiment import Experiment, Request
from reproduction.experiments.variants import PAPER_CLASSES, PAPER_KERNEL, Given, Variant, fitted
from reproduction.plots import dot_figure, histogram_figure

__all__ = ["Cifar10", "Cifar10OOD", "CifarExperiment"]

DEPTHS = (20, 32, 44, 56)
FINE_TUNED = {"steps": 500, "batch_size": 256}
FEW = {"steps": 3, "batch_size": 20}
FEW_POINTS = {"num_inducing": 5, **FEW}
FITTED_ON = {
    "train": "training images",
    "crops": f"{CROPS:,} random crops of training images",
    "train, crops to choose": f"training images, and {CROPS:,} random crops of them to choose by",
    "crops of train": "random crops of training images",
    "half of test": "the first half of the test images",
}
EXAMPLES = 8
"""Of the most and of the least certain images."""

VARIANTS = {
    "map": Variant("MAP", MAP),
    "temperature": Variant("Temperature scaling", Temperature, on="crops"),
    "lla-kfac": Variant("LLA (last layer, KFAC)", Laplace, {"curvature": "kron"}),
    "lla": Variant("LLA (last layer)", Laplace, {"curvature": "full"}),
    "ella": Variant("ELLA (last layer)", ELLA, {"num_features": 64}, on="train, crops to choose"),
    "valla": Variant("VaLLA (last layer)", VaLLA, {}, FEW_POINTS, on="train, crops to choose"),
    # The paper's own, over all weights: an hour on a CPU, and the other networks take longer.
    "ella-all": Variant(
        "ELLA (all weights)",
        ELLA,
        {"weights": "all"},
        {"num_points": 20, "num_features": 4},
        on="train, crops to choose",
    ),
    "valla-all": Variant("VaLLA (all weights)", VaLLA, {"weights": "all"}, FEW_POINTS, on="train, crops to choose"),
    "mfvi": Variant("MFVI", MFVI, {"samples": 20, **FINE_TUNED}, {"samples": 2, **FEW}),
    "sngp": Variant("SNGP", SNGP, {"lr": 1e-5, **FINE_TUNED}, {"num_features": 32, **FEW}),
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
        FEW_POINTS,
        likelihood=PAPER_CLASSES,
    ),
    "fmgp": Variant("FMGP (ours)", FMGP, {}, FEW_POINTS, on="crops of train"),
}
HALVES = {
    "map": VARIANTS["map"],
    "temperature": Variant("Temperature scaling", Temperature, on="half of test"),
    "fmgp": Variant("FMGP (ours)", FMGP, {}, FEW_POINTS, on="half of test"),
}
"""Fitted on the first half of the test images."""


@lru_cache(maxsize=1)
def cifar_of(request: Request) -> Cifar:
    """The images and networks of a request: its runs share them."""
    return Cifar(request)


class CifarExperiment(Experiment):
    """What those on CIFAR-10 share: a case is a network, and its methods are fitted once for all of them."""

    task = "classification"
    methods = VARIANTS
    cases = tuple(f"resnet{depth}" for depth in DEPTHS)

    def variant(self, case: str, method: str) -> Variant:
        return (HALVES if case.endswith("-half") else VARIANTS)[method]

    def methods_of(self, case: str) -> tuple[str, ...]:
        return tuple(HALVES) if case.endswith("-half") else tuple(VARIANTS)

    def configuration(self, case: str, method: str, request: Request) -> dict[str, Any]:
        return {**self.variant(case, method).describe(request.quick), "network": case.removesuffix("-half")}

    def prepare(self, case: str, seed: int, request: Request) -> Cifar:
        return cifar_of(request)

    def fitted(self, cifar: Cifar, case: str, method: str, seed: int) -> tuple[Method, dict[str, float]]:
        """A method of one network, and how long its fit took."""
        request, depth, variant = cifar.request, depth_of(case), self.variant(case, method)
        network = cifar.network(depth)

        def given() -> Given:
            if variant.on == "crops of train":
                return Given(cifar.pair("train"), augment="crops")
            crops = cifar.crops(seed) if "crops" in variant.on else None
            if needs_network(variant):
                return Given(cifar.pair("train"), crops)
            on_crops = cifar.run(depth, *crops) if crops is not None else None
            if variant.on == "crops":
                assert on_crops is not None
                return Given(on_crops.outputs, collected=on_crops.seconds)
            said = cifar.said(depth, "test" if variant.on == "half of test" else "train")
            outputs = said.outputs[: len(said.outputs) // 2] if variant.on == "half of test" else said.outputs
            return Given(outputs, on_crops.outputs if on_crops is not None else None, collected=said.seconds)

        def make() -> Method:
            return variant.build(network, self.task, seed=seed, device=request.device, quick=request.quick)

        recipe = {**variant.describe(request.quick), "network": depth, "seed": seed, "device": request.device}
        return fitted(make, given, recipe, network)

    def scored(self, cifar: Cifar, case: str, method: str, fit: Method) -> Evaluation:
        """A fitted method on the test images and on the digits."""
        device = cifar.device
        if needs_network(self.variant(case, method)):
            return score(fit, cifar.pair("test"), cifar.pair("svhn")[0], device=device)
        test, ood = (cifar.said(depth_of(case), part).outputs for part in ("test", "svhn"))
        if case.endswith("-half"):
            test = test[len(test) // 2 :]
        return score(fit, test, ood, device=device)

    def data(self, cifar: Cifar, case: str, method: str) -> dict[str, str]:
        """Words on where the data come from."""
        test = cifar.images("test").source
        words = {"test": f"{test}, the second half" if case.endswith("-half") else test}
        words["fit"] = FITTED_ON[self.variant(case, method).on]
        return words | {"ood": cifar.images("svhn").source}


class Cifar10(CifarExperiment):
    """Four networks: how good every method's probabilities are, and what they cost."""

    name = "cifar10"
    title = "CIFAR-10: four residual networks"
    cases = (*CifarExperiment.cases, *(f"resnet{depth}-half" for depth in DEPTHS))

    def work(self, prepared: Cifar, case: str, method: str, seed: int, request: Request) -> Mapping[str, Any]:
        fit, times = self.fitted(prepared, case, method, seed)
        scored = self.scored(prepared, case, method, fit)
        times |= {"predict_seconds": scored.seconds}
        test = prepared.said(depth_of(case), "test")
        times["network_seconds"] = test.seconds
        if needs_network(self.variant(case, method)):
            times["predict_seconds_with_network"] = scored.seconds
        elif not case.endswith("-half"):
            times["predict_seconds_with_network"] = score(fit, prepared.pair("test"), device=prepared.device).seconds
        return {
            "metrics": scored.figures,
            "times": times,
            "curves": scored.curves(),
            "data": self.data(prepared, case, method),
            "examples": examples(scored, prepared, case) if seed == 0 else {},
        }

    def draw(self, documents: list[dict[str, Any]], folder: Path) -> list[Path]:
        whole = [document for document in documents if not document["case"].endswith("-half")]
        figures = {"nll": "NLL", "ece": "ECE", "brier": "Brier", "ood_auc": "OOD AUC", "accuracy": "accuracy"}
        return dot_figure(folder / "figure", whole, figures) if whole else []


class Cifar10OOD(CifarExperiment):
    """ResNet56: entropies of what it says of photographs, and of digits. Its runs are those of `cifar10`, made where
    they are not there yet."""

    name = "cifar10-ood"
    title = "CIFAR-10 or SVHN: entropies of predictions, ResNet56"
    cases = ("resnet56",)

    def work(self, prepared: Cifar, case: str, method: str, seed: int, request: Request) -> Mapping[str, Any]:
        run = Cifar10().document(case, method, seed, request)
        return {
            "metrics": {name: run["metrics"][name] for name in ("ood_auc", "ood_fpr95", "accuracy")},
            "times": {name: run["times"][name] for name in ("fit_seconds", "fit_seconds_with_network")},
            "curves": {"entropy": run["curves"]["entropy"]},
            "data": run["configuration"]["data"],
        }

    def draw(self, documents: list[dict[str, Any]], folder: Path) -> list[Path]:
        return histogram_figure(folder / "figure", documents, "CIFAR-10", "SVHN")


def depth_of(case: str) -> int:
    return int(case.removeprefix("resnet").removesuffix("-half"))


def needs_network(variant: Variant) -> bool:
    """Whether its predictions take more than the network's outputs."""
    return not variant.kind.black_box or variant.options.get("weights") == "all"


def examples(scored: Evaluation, cifar: Cifar, case: str) -> dict[str, list[dict[str, Any]]]:
    """The most and the least certain images, as pictures."""
    images = cifar.images("test")
    first = len(images.pixels) // 2 if case.endswith("-half") else 0
    names = CIFAR10_CLASSES
    return {
        kind: [
            {
                **row,
                "target": names[row["target"]],
                "said": names[row["said"]],
                "png": base64.b64encode(png(images.pixels[first + row["row"]])).decode("ascii"),
            }
            for row in rows
        ]
        for kind, rows in scored.examples(EXAMPLES).items()
    }
