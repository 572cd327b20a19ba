"""Every method by name, and `load` for a head of any of them."""

from __future__ import annotations

import os
from typing import Any

import torch

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
from posthoc.registry import Registry

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

METHODS = (FMGP, MAP, Temperature, Vector, Laplace, ELLA, VaLLA, Ensemble, Dropout, MFVI, SNGP, GP, HMC)
REGISTRY = Registry("posthoc.methods", {method.name: method for method in METHODS})
"""Every method by name. Another package adds its own by an entry point of the group "posthoc.methods"."""


def method_named(name: str) -> type[Method]:
    """The class of a method, by its name in files and on the command line.

    Raises:
        OptionError: There is no method of this name.
    """
    if name not in REGISTRY:
        raise OptionError(f"Expected a method among {', '.join(sorted(REGISTRY))}, got {name!r}.")
    method: type[Method] = REGISTRY[name]
    return method


def load(path: str | os.PathLike[str], *, model: Any = None, device: str | torch.device | None = None) -> Method:
    """Loads a saved head of any method.

    Args:
        path: The file.
        model: The network that the head was fitted on, or None; for an ensemble, the list of networks.
        device: Where the head computes.

    Example:
        >>> import tempfile, torch
        >>> from posthoc import Outputs, Temperature, load
        >>> data = Outputs(torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1, 1]))
        >>> path = f"{tempfile.mkdtemp()}/head.safetensors"
        >>> Temperature().fit(data).save(path)
        >>> load(path)
        Temperature(classification, fitted)
    """
    name = read_head(path)[1]["method"]
    if name not in REGISTRY:
        raise FileError(
            f"Expected a head of {', '.join(sorted(REGISTRY))}, found one of {name!r} in {path}: it needs a later "
            "version of posthoc, or the package that registers the method."
        )
    return method_named(name).load(path, model=model, device=device)
