"""The paper's tables and figures; `experiment_named` imports the module of an experiment when it is used."""

from __future__ import annotations

from importlib import import_module

from posthoc.errors import MissingExtraError, OptionError
from reproduction.experiments.experiment import Experiment, Request

__all__ = ["EXPERIMENTS", "Experiment", "Request", "experiment_named"]

EXPERIMENTS = {
    "synthetic": ("synthetic", "Synthetic", "six methods on one-dimensional data (Figure 1)"),
    "regression": ("regression", "Regression", "Year, Airline and Taxi"),
    "cifar10": ("cifar10", "Cifar10", "four residual networks"),
    "cifar10-ood": ("cifar10", "Cifar10OOD", "entropies on CIFAR-10 and SVHN"),
    "cifar10-rotations": ("cifar10_shifts", "Cifar10Rotations", "images rotated by up to 180 degrees"),
    "cifar10-corruptions": ("cifar10_shifts", "Cifar10Corruptions", "images corrupted in fifteen ways"),
    "imagenet": ("imagenet", "ImageNet", "five residual networks, 1,000 classes"),
    "qm9": ("qm9", "QM9", "the dipole moments of molecules"),
    "clip": ("clip", "Clip", "zero-shot classifiers as black boxes"),
    "ablation-alpha": ("ablations", "AblationAlpha", "the effect of alpha"),
    "ablation-inducing": ("ablations", "AblationInducing", "the effect of the number of inducing points"),
}
"""Module, class and description of each experiment."""


def experiment_named(name: str) -> Experiment:
    """An experiment by its name.

    Raises:
        OptionError: There is none of that name.
        MissingExtraError: It needs a library that is not installed.
    """
    if name not in EXPERIMENTS:
        raise OptionError(f"Expected an experiment among {', '.join(EXPERIMENTS)}, got {name!r}.")
    module, kind, _ = EXPERIMENTS[name]
    try:
        experiment: Experiment = getattr(import_module(f"reproduction.experiments.{module}"), kind)()
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name), "reproduction", f"The experiment {name}") from error
    return experiment
