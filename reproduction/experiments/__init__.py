"""The paper's tables and figures, one file each."""

from __future__ import annotations

from importlib import import_module

from posthoc.errors import OptionError
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
    "ablation-alpha": ("ablations", "AblationAlpha", "what alpha does"),
    "ablation-inducing": ("ablations", "AblationInducing", "what the number of inducing points does"),
}
"""Every experiment by name: its module, its class and a few words. Modules are read when they are asked for."""


def experiment_named(name: str) -> Experiment:
    """An experiment by its name."""
    if name not in EXPERIMENTS:
        raise OptionError(f"Expected an experiment among {', '.join(EXPERIMENTS)}, got {name!r}.")
    module, kind, _ = EXPERIMENTS[name]
    found: Experiment = getattr(import_module(f"reproduction.experiments.{module}"), kind)()
    return found
