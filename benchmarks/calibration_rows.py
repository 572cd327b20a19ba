"""The classifiers that `benchmarks.calibration` runs on, the methods it compares, and one fit of one of them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import synchronise
from posthoc import (
    FMGP,
    MAP,
    Beta,
    Dirichlet,
    EnsembleTemperature,
    EntropyTemperature,
    Isotonic,
    Outputs,
    StructuredMatrix,
    StructuredVector,
    Temperature,
    Vector,
)
from posthoc.base import Method
from posthoc.evaluate import metrics
from posthoc.likelihoods.mean_correction import keep_class
from posthoc.predictive.calibration_error import expected_calibration_error

MEANS = ("fixed", "calibrated", "network")
OURS: dict[str, dict[str, Any]] = (
    {f"fmgp {mean}": {"mean": mean} for mean in MEANS} if "mean" in FMGP.Config.names() else {"fmgp": {}}
)
"""The variants of FMGP by name, with their options."""


@dataclass(frozen=True)
class Case:
    """What to fit on, what to score on, data from elsewhere, and what must be reached."""

    fit: str
    test: str
    outputs_are: str = "logits"
    ood: str | None = None
    limits: dict[str, dict[str, float]] = field(default_factory=dict)
    """The greatest figures of each variant of FMGP, the least for the AUC."""
    judged: bool = True


def halves(path: str, **options: Any) -> Case:
    """A file of 10,000 rows: fitted on the first half, scored on the second."""
    return Case(f"{path}[:5000]", f"{path}[5000:]", **options)


def splits(folder: str, **options: Any) -> Case:
    """A folder with the files `fit` and `test`."""
    return Case(f"{folder}/fit", f"{folder}/test", **options)


ZOO = ("densenet121", "googlenet", "mobilenet_v2", "resnet18", "resnet50", "vgg11_bn", "vgg16_bn")
COSMOS_QA = ("deepseek67b", "llama2_70b", "mistral7b", "qwen72b", "yi34b")
CASES = {
    "cifar10_resnet20": halves(
        "cifar10_resnet20/test", ood="cifar10_resnet20/svhn", limits={"fixed": {"nll": 0.2195, "ood_auc": 0.93}}
    ),
    "cifar10_resnet56": halves(
        "cifar10_resnet56/test", ood="cifar10_resnet56/svhn", limits={"fixed": {"nll": 0.177, "ood_auc": 0.95}}
    ),
    "banking77_minilm": splits("banking77_minilm", limits={"fixed": {"nll": 1.22}, "calibrated": {"nll": 1.16}}),
    "cifar100_wrn164": splits("cifar100_wrn164", outputs_are="log-probs"),
    "news20": splits("news20", outputs_are="log-probs", limits={"fixed": {"nll": 0.312, "ece": 0.02}}),
    "llm_emotion/mistral7b": halves(
        "llm_emotion/mistral7b", limits={"fixed": {"nll": 0.88}, "calibrated": {"nll": 0.87}}
    ),
    "llm_emotion/llama2_7b": halves("llm_emotion/llama2_7b", limits={"calibrated": {"nll": 0.955}}),
    **{f"llm_cosmosqa/{name}": halves(f"llm_cosmosqa/{name}") for name in COSMOS_QA},
    **{f"cifar10_zoo/{name}": halves(f"cifar10_zoo/{name}", outputs_are="probs") for name in ZOO},
    "imagenet_resnet50": Case("imagenet_resnet50/sample", "imagenet_resnet50/nips2017", judged=False),
    "imagenet_resnet50, the other way": Case("imagenet_resnet50/nips2017", "imagenet_resnet50/sample", judged=False),
}

NO_PRIOR = {"prior": None} if "prior" in Temperature.Config.names() else {}
PEERS: dict[str, Callable[..., Method]] = {
    "bare": MAP,
    "temperature": partial(Temperature, **NO_PRIOR),
    "vector": Vector,
    "structured-vector": StructuredVector,
    "structured-matrix": StructuredMatrix,
    "capped structured-matrix": StructuredMatrix,
    "isotonic": Isotonic,
    "beta": Beta,
    "ensemble-temperature": EnsembleTemperature,
    "entropy-temperature": EntropyTemperature,
    "dirichlet": Dirichlet,
}
"""What FMGP is compared with. They are fitted once, on the rows in the order of the file."""
METHODS: dict[str, Callable[..., Method]] = {
    **PEERS,
    **{name: partial(FMGP, **options) for name, options in OURS.items()},
}


@dataclass(frozen=True)
class Job:
    """One fit, or the fits of one method on random subsets of the rows."""

    row: str
    method: str
    seed: int = 0
    order: int = 0
    size: int | None = None
    """The number of rows in a subset; None for all rows."""
    subsets: int = 0


@dataclass
class Result:
    """What is known of one fit: figures, and columns over the test rows."""

    figures: dict[str, float]
    columns: dict[str, np.ndarray]
    """`loss`, `confidence`, `hit`."""


@dataclass(frozen=True)
class Place:
    """Where a job finds its data, where peers are kept, where it computes, and options for a quick run."""

    data: Path
    cache: Path | None
    device: str
    options: dict[str, Any]


def work(job: Job, place: Place) -> Result | list[float]:
    """The result of one fit, from the cache if it is there; of subsets, the NLL of each."""
    warnings.simplefilter("ignore")
    case = CASES[job.row]
    fit, test = (read(place.data, part, torch.device(place.device)) for part in (case.fit, case.test))
    if job.size is not None:
        chosen = (order_of(len(fit), 1 + k)[: job.size] for k in range(job.subsets))
        return [fitted(job, place, fit[rows.to(fit.outputs.device)], test)[0].figures["nll"] for rows in chosen]
    kept = place.cache / f"{job.row.replace('/', '--')}--{job.method}.npz" if place.cache else None
    if kept is not None and job.method in PEERS and kept.exists():
        with np.load(kept) as file:
            figures = {name.removeprefix("figure_"): float(file[name]) for name in file if name.startswith("figure_")}
            return Result(figures, {name: file[name] for name in ("loss", "confidence", "hit")})
    if job.order:
        fit = fit[order_of(len(fit), job.order).to(fit.outputs.device)]
    result, log_probs = fitted(job, place, fit, test)
    if kept is not None and job.method in PEERS:
        kept.parent.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = {**result.columns, "log_probs": log_probs.float().cpu().numpy()}
        np.savez(kept, **arrays, **{f"figure_{name}": np.array(value) for name, value in result.figures.items()})
    return result


def order_of(rows: int, order: int) -> Tensor:
    return torch.randperm(rows, generator=torch.Generator().manual_seed(order))


def fitted(job: Job, place: Place, fit: Outputs, test: Outputs) -> tuple[Result, Tensor]:
    """The result of a fit, and the logarithms of the test rows' probabilities."""
    case, kind = CASES[job.row], METHODS[job.method]
    options = {"seed": job.seed, **place.options} if job.method in OURS else {}
    method = kind(None, "classification", outputs_are=case.outputs_are, **options)
    synchronise(fit.outputs.device)
    begin = time.perf_counter()
    method.fit(fit)
    synchronise(fit.outputs.device)
    seconds, pred = time.perf_counter() - begin, method.predict(test)
    assert test.targets is not None
    log_probs, probs, top = pred.log_probs.double(), pred.probs, test.outputs.argmax(-1)
    if job.method.startswith("capped"):
        log_probs = keep_class(log_probs, top)
        probs = log_probs.exp().float()
    labels = probs.argmax(-1)
    loss = -log_probs.gather(-1, test.targets[:, None]).squeeze(-1)
    confidence = log_probs.gather(-1, labels[:, None]).squeeze(-1).exp()
    hit = (labels == test.targets).double()
    figures = {
        "nll": float(loss.mean()),
        "ece": float(expected_calibration_error(confidence, hit)),
        "accuracy": float(hit.mean()),
        "classes_moved": float((labels != top).double().mean()),
        "fit_seconds": seconds,
    }
    if case.ood and job.size is None:
        outside = method.predict(read(place.data, case.ood, fit.outputs.device))
        figures["ood_auc"] = float(metrics.ood_detection(pred, outside)["auc"])
    columns = {name: t.cpu().numpy() for name, t in (("loss", loss), ("confidence", confidence), ("hit", hit))}
    return Result(figures, columns), log_probs


def read(folder: Path, part: str, device: torch.device) -> Outputs:
    """Rows of a file, such as `test[:5000]`."""
    name, _, rows = part.rstrip("]").partition("[")
    first, _, last = rows.partition(":")
    chosen = slice(int(first) if first else None, int(last) if last else None)
    with np.load(folder / f"{name}.npz") as file:
        features = file["features"][chosen].astype(np.float32) if "features" in file else None
        found = Outputs(file["outputs"][chosen].astype(np.float32), file["targets"][chosen].astype(np.int64), features)
    return found.to(device)
