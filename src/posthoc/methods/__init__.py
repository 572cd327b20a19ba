"""Every method by name, and the one way to load any of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from posthoc.base import Method
from posthoc.errors import FileError, OptionError
from posthoc.fmgp import FMGP
from posthoc.io import read_head
from posthoc.methods.gp import GP
from posthoc.methods.laplace.laplace import Laplace
from posthoc.methods.laplace_torch import LaplaceTorch
from posthoc.methods.map import MAP
from posthoc.methods.ntk.ella import ELLA
from posthoc.methods.ntk.valla import VaLLA
from posthoc.methods.temperature import Temperature
from posthoc.methods.vector import Vector
from posthoc.methods.weights.dropout import Dropout
from posthoc.methods.weights.ensemble import Ensemble
from posthoc.methods.weights.hmc import HMC
from posthoc.methods.weights.mfvi import MFVI
from posthoc.methods.weights.sngp import SNGP

__all__ = [
    "ELLA",
    "GP",
    "HMC",
    "MAP",
    "MFVI",
    "REGISTRY",
    "SNGP",
    "Dropout",
    "Ensemble",
    "Laplace",
    "LaplaceTorch",
    "Temperature",
    "VaLLA",
    "Vector",
    "load",
    "method_named",
]

METHODS: tuple[type[Method], ...] = (
    FMGP,
    MAP,
    Temperature,
    Vector,
    Laplace,
    ELLA,
    VaLLA,
    Ensemble,
    Dropout,
    MFVI,
    SNGP,
    GP,
    HMC,
)
REGISTRY: dict[str, type[Method]] = {method.name: method for method in METHODS}


def method_named(name: str) -> type[Method]:
    """The class of a method, by the name it has in files and on the command line."""
    if name not in REGISTRY:
        raise OptionError(f"Expected a method among {', '.join(sorted(REGISTRY))}, got {name!r}.")
    return REGISTRY[name]


def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | Sequence[nn.Module] | Callable[..., Any] | None = None,
    device: str | torch.device | None = None,
) -> Method:
    """A saved head of whatever method it is, and the network it was fitted on (for an ensemble, their list)."""
    name = read_head(path)[1]["method"]
    if name not in REGISTRY:
        raise FileError(
            f"Expected a head of {', '.join(sorted(REGISTRY))}, found one of {name!r} in {path}: it needs a later "
            "version of posthoc, or what registers that method."
        )
    found: Method = REGISTRY[name].load(path, model=model, device=device)
    return found
