"""The last layer of a network, outputs = W features + b: read from the network, or found from its outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posthoc.collect.network import Backbone
from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError, LayerError, warn
from posthoc.likelihoods.base import columns
from posthoc.numerics import rows_that_fit

MAX_RESIDUAL = 0.01
"""The largest residual of outputs that are linear in the features, as a share of their spread; float16 gives 0.001."""
MIN_VARIANCE = 1e-10
"""Directions in which features vary less than this, as a share of the largest variance, are left out of W."""


class LastLayer(NamedTuple):
    """W and b, in float64."""

    weight: Tensor  # (C, D)
    bias: Tensor | None = None  # (C,)


def require_last_layer(backbone: Backbone | None) -> None:
    """Refuses a network without a layer to take features from."""
    if backbone is not None and not backbone.has_features:
        advice = "Name the layer before the last with layer=..., or give posthoc.Outputs with features."
        raise LayerError(f"Expected a network whose last layer is an nn.Linear, found none. {advice}")


def find_last_layer(backbone: Backbone | None, outputs: Outputs, home: torch.device) -> LastLayer:
    """The layer that turned the features into the outputs: the network's last `nn.Linear` where the features are its
    input, else by least squares. Raises where it does not give the outputs."""
    if outputs.features is None:
        advice = "give Outputs(outputs, targets, features), or an nn.Module whose last layer is an nn.Linear"
        raise DataError(f"Expected features, the inputs of the last layer, got none: {advice}.")
    if backbone is not None and backbone.takes_input:
        layer, expected = read_layer(backbone, outputs, home), f"the layer {backbone.layer!r} to give the outputs"
    else:
        layer, expected = solve(outputs, home), "outputs that are linear in the features"
    found = residual(layer, outputs, home)
    if not found <= MAX_RESIDUAL:
        error = f"Expected {expected}, to {MAX_RESIDUAL:.0%} of their spread, found a residual of {found:.3g} of it"
        raise LayerError(f"{error}. Give what the last nn.Linear returns and takes, or use a method such as fmgp.")
    return layer


def read_layer(backbone: Backbone, outputs: Outputs, home: torch.device) -> LastLayer:
    """The weights of the last `nn.Linear`. A single logit of two classes stands for the logits [0, z]."""
    assert backbone.module is not None
    linear: Any = backbone.module.get_submodule(str(backbone.layer))
    parts = [p.detach().to(home, torch.float64) for p in (linear.weight, linear.bias) if p is not None]
    if len(parts[0]) == 1 and outputs.outputs.shape[1:].numel() == 2:
        parts = [torch.cat([torch.zeros_like(p), p]) for p in parts]
    return LastLayer(*parts)


def solve(outputs: Outputs, home: torch.device) -> LastLayer:
    """The smallest W and its b that are best in least squares."""
    assert outputs.features is not None
    rows, width = outputs.features.shape
    if rows <= width + 1:
        warn(f"{rows} points are too few to find a last layer of {width} features. Give the network, or more points.")
    gram = torch.zeros(width + 1, width + 1, dtype=torch.float64, device=home)
    cross = gram.new_zeros(width + 1, outputs.outputs.shape[1:].numel())
    for features, y, _ in pieces(outputs, home):
        x = with_one(features)
        gram.addmm_(x.mT, x)
        cross.addmm_(x.mT, y)
    x_mean, y_mean = gram[:-1, -1] / rows, cross[-1] / rows
    covariance = gram[:-1, :-1] / rows - torch.outer(x_mean, x_mean)
    inverse = torch.linalg.pinv(covariance, rtol=MIN_VARIANCE, hermitian=True)
    weight = inverse @ (cross[:-1] / rows - torch.outer(x_mean, y_mean))  # (D, C)
    return LastLayer(weight.mT.contiguous(), y_mean - x_mean @ weight)


def residual(layer: LastLayer, outputs: Outputs, home: torch.device) -> float:
    """How far the layer is from giving the outputs, as a share of their spread; infinite if the shapes differ."""
    assert outputs.features is not None
    if layer.weight.shape != (outputs.outputs.shape[1:].numel(), outputs.features.shape[1]):
        return math.inf
    wrong = total = 0.0
    center = columns(outputs.spread(2**16).outputs).mean(0).to(home)
    for x, y, _ in pieces(outputs, home):
        wrong += float((torch.nn.functional.linear(x, layer.weight, layer.bias) - y).square().sum())
        total += float((y - center).square().sum())
    return math.sqrt(wrong / total) if total > 0.0 else (0.0 if wrong == 0.0 else math.inf)


def pieces(outputs: Outputs, home: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Features, outputs and targets, some rows at a time, in float64."""
    assert outputs.features is not None
    assert outputs.targets is not None
    size = rows_that_fit(max(outputs.features.shape[1], outputs.outputs.shape[1:].numel()))
    for start in range(0, len(outputs), size):
        part = slice(start, start + size)
        x = outputs.features[part].to(home).double()
        yield x, columns(outputs.outputs[part].to(home)), columns(outputs.targets[part].to(home))


def features_of(outputs: Outputs, width: int) -> Tensor:  # (N, D)
    """The features of some rows, in float64; refuses those of another width than in the fit."""
    features = outputs.features
    if features is None or features.shape[1] != width:
        found = "none" if features is None else features.shape[1]
        raise DataError(f"Expected features of width {width} as in fit, got {found}.")
    return features.double()


def with_one(features: Tensor) -> Tensor:  # (N, D + 1)
    """Features and a constant, whose weight is the bias."""
    return torch.cat([features, features.new_ones(len(features), 1)], -1)
