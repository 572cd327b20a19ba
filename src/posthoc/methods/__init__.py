"""Every method by name, and `load` for a head of any of them."""

from __future__ import annotations

import os
from typing import Any

import torch

from posthoc.base import Method
from posthoc.errors import FileError, OptionError
from posthoc.io import read_head
from posthoc.registry import Registry

REGISTRY = Registry(
    "posthoc.methods",
    {
        "fmgp": "posthoc.fmgp:FMGP",
        "map": "posthoc.methods.map:MAP",
        "temperature": "posthoc.methods.temperature:Temperature",
        "vector": "posthoc.methods.vector:Vector",
        "structured-vector": "posthoc.methods.calibrators:StructuredVector",
        "structured-matrix": "posthoc.methods.calibrators:StructuredMatrix",
        "isotonic": "posthoc.methods.calibrators:Isotonic",
        "beta": "posthoc.methods.calibrators:Beta",
        "ensemble-temperature": "posthoc.methods.calibrators:EnsembleTemperature",
        "entropy-temperature": "posthoc.methods.calibrators:EntropyTemperature",
        "dirichlet": "posthoc.methods.calibrators:Dirichlet",
        "laplace": "posthoc.methods.laplace.laplace:Laplace",
        "ella": "posthoc.methods.ntk.ella:ELLA",
        "valla": "posthoc.methods.ntk.valla:VaLLA",
        "ensemble": "posthoc.methods.weights.ensemble:Ensemble",
        "dropout": "posthoc.methods.weights.dropout:Dropout",
        "mfvi": "posthoc.methods.weights.mfvi:MFVI",
        "sngp": "posthoc.methods.weights.sngp:SNGP",
        "gp": "posthoc.methods.gp:GP",
        "hmc": "posthoc.methods.weights.hmc:HMC",
    },
)
"""Every method by name. Another package adds its own by an entry point of the group "posthoc.methods"."""


def method_named(name: str) -> type[Method]:
    """The class of a method, by its name in files and on the command line; raises `OptionError` for other names."""
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
        raise FileError(f"{path} is a head of {name!r}: it needs a later posthoc, or the package that has this method.")
    return method_named(name).load(path, model=model, device=device)
