"""The last layer of a network, outputs = W features + b: read from the network, or found from its outputs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from posthoc.collect.network import Backbone
from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError, LayerError, PosthocWarning
from posthoc.likelihoods.base import columns
from posthoc.numerics import rows_that_fit

__all__ = ["LastLayer", "find_last_layer", "pieces", "require_last_layer", "with_one"]

ALLOWED = 0.01
"""How far from linear in the features the outputs may be, as a share of their spread: float16 files are at 0.001."""
SPECK = 1e-10
"""Directions in which features vary by less than this share of the largest variance tell nothing about W."""


class LastLayer(NamedTuple):
    """W and b, in float64."""

    weight: Tensor  # (C, D)
    bias: Tensor | None  # (C,)

    @property
    def square_norm(self) -> float:
        """The sum of all squared parameters."""
        return sum(float(part.square().sum()) for part in self if part is not None)

    def __call__(self, features: Tensor) -> Tensor:  # (N, C)
        """The outputs of the layer."""
        outputs = features @ self.weight.mT
        return outputs if self.bias is None else outputs + self.bias


def require_last_layer(backbone: Backbone | None) -> None:
    """Refuses a network without a layer to take features from."""
    if backbone is not None and not backbone.has_features:
        raise LayerError(
            "Expected a network whose last layer is an nn.Linear, found none to take features from. Name the layer "
            "before the last with layer=..., or give posthoc.Outputs with features."
        )


def find_last_layer(backbone: Backbone | None, outputs: Outputs, home: torch.device) -> LastLayer:
    """The layer that turned the features into the outputs: the network's last `nn.Linear` where the features are its
    input, else by least squares. Refused where it does not give the outputs."""
    if outputs.features is None:
        raise DataError(
            "Expected features, what the network computes before its last layer, got none: give "
            "Outputs(outputs, targets, features), or an nn.Module whose last layer is an nn.Linear."
        )
    if backbone is not None and backbone.module is not None and backbone.layer is not None and backbone.takes_input:
        layer, named = read_layer(backbone.module, backbone.layer, outputs, home), backbone.layer
    else:
        layer, named = solve(outputs, home), None
    found = residual(layer, outputs, home)
    if not found <= ALLOWED:
        expected = f"the layer {named!r} to give the outputs" if named else "outputs that are linear in the features"
        raise LayerError(
            f"Expected {expected}, to {ALLOWED:.0%} of their spread, found a residual of {found:.3g} of it: the last "
            "layer is not an nn.Linear, something follows it (a softmax, a scale), or these are other features. Give "
            "logits and the features that the last layer takes, or use a method that needs no last layer, such as fmgp."
        )
    return layer


def read_layer(network: nn.Module, name: str, outputs: Outputs, home: torch.device) -> LastLayer:
    """The weights of a named `nn.Linear`. A single logit of two classes stands for the logits [0, z]."""
    linear, features = network.get_submodule(name), outputs.features
    assert isinstance(linear, nn.Linear)
    assert features is not None
    weight = linear.weight.detach().to(home, torch.float64)
    bias = linear.bias.detach().to(home, torch.float64) if linear.bias is not None else None
    width = outputs.outputs.shape[1:].numel()
    if len(weight) == 1 and width == 2:
        weight = torch.cat([torch.zeros_like(weight), weight])
        bias = torch.cat([torch.zeros_like(bias), bias]) if bias is not None else None
    if weight.shape != (width, features.shape[1]):
        raise LayerError(
            f"Expected the layer {name!r} to take the {features.shape[1]} features and give the {width} outputs, found "
            f"one from {weight.shape[1]} to {weight.shape[0]}: it is not the last layer. Name the layer before the "
            "last with layer=..., so that its output is taken as features."
        )
    return LastLayer(weight, bias)


def solve(outputs: Outputs, home: torch.device) -> LastLayer:
    """The smallest W and its b that are best in least squares."""
    assert outputs.features is not None
    rows, width = outputs.features.shape
    if rows <= width + 1:
        warnings.warn(
            f"{rows} points are too few to find a last layer of {width} features: the smallest that gives the outputs "
            "is taken, and whether they are linear in the features cannot be seen. Give the network, or more points.",
            PosthocWarning,
            stacklevel=6,
        )
    gram = torch.zeros(width + 1, width + 1, dtype=torch.float64, device=home)
    cross = gram.new_zeros(width + 1, outputs.outputs.shape[1:].numel())
    for features, y, _ in pieces(outputs, home):
        x = with_one(features)
        gram.addmm_(x.mT, x)
        cross.addmm_(x.mT, y)
    x_mean, y_mean = gram[:-1, -1] / rows, cross[-1] / rows
    covariance = gram[:-1, :-1] / rows - torch.outer(x_mean, x_mean)
    inverse = torch.linalg.pinv(covariance, rtol=SPECK, hermitian=True)
    weight = inverse @ (cross[:-1] / rows - torch.outer(x_mean, y_mean))  # (D, C)
    return LastLayer(weight.mT.contiguous(), y_mean - x_mean @ weight)


def residual(layer: LastLayer, outputs: Outputs, home: torch.device) -> float:
    """How far the layer is from giving the outputs, as a share of their spread."""
    wrong = total = 0.0
    center = columns(outputs.spread(2**16).outputs).mean(0).to(home)
    for x, y, _ in pieces(outputs, home):
        wrong += float((layer(x) - y).square().sum())
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


def with_one(features: Tensor) -> Tensor:  # (N, D + 1)
    """Features and a constant, whose weight is the bias."""
    return torch.cat([features, features.new_ones(len(features), 1)], -1)
