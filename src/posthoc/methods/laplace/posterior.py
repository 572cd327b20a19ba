"""The Gaussian posterior of a last layer's weights: fitted from outputs and features, it predicts from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from posthoc.base import Fitted
from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError
from posthoc.likelihoods.base import Likelihood, columns
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.methods.laplace.curvature import Curvature, Dense, Diagonal, Form, Kronecker, of_classes, of_outputs
from posthoc.methods.laplace.last_layer import LastLayer, pieces, with_one
from posthoc.methods.laplace.marginal_likelihood import best_evidence
from posthoc.predictive.base import Predictive
from posthoc.predictive.latent import IndependentLatent, Latent

__all__ = ["Posterior", "fit_posterior", "refine"]

AT_ONCE, MOST_ROWS = 2**23, 1024
"""Numbers in the largest tensor of a prediction (64 MB), and rows of it."""
TYPICAL = 2**16
"""Rows that units are taken from."""
GRID = range(-6, 7)
"""Powers of ten that the prior precision is multiplied by on validation data, before the best is refined."""


class Posterior(Fitted):
    """The curvature of the loss, the precision δ of the weights' prior, and the likelihood."""

    def __init__(self, curvature: Curvature, likelihood: Likelihood, *, num_features: int, bias: bool) -> None:
        super().__init__(likelihood)
        self.curvature, self.num_features, self.bias = curvature, num_features, bias
        self.log_precision = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def shapes(self) -> dict[str, Any]:
        matrices = {name: list(tensor.shape) for name, tensor in self.curvature.state_dict().items()}
        return {
            "curvature": type(self.curvature).__name__,
            "matrices": matrices,
            "num_features": self.num_features,
            "bias": self.bias,
        }

    @classmethod
    def blank(cls, likelihood: Likelihood, shapes: Mapping[str, Any]) -> Posterior:
        """A posterior of these shapes, to load tensors into."""
        kind = {kind.__name__: kind for kind in (Kronecker, Diagonal, Dense)}[shapes["curvature"]]
        zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes["matrices"].items()}
        return cls(kind(**zeros), likelihood, num_features=shapes["num_features"], bias=shapes["bias"])

    @property
    def rows_at_once(self) -> int:
        """How many rows to predict at a time."""
        return max(1, min(MOST_ROWS, AT_ONCE // self.curvature.width))

    def latent(self, features: Tensor) -> Latent:
        """The Gaussian over the outputs at some rows, in the likelihood's units."""
        x = features.double()
        x, precision, likelihood = with_one(x) if self.bias else x, self.log_precision.exp(), self.likelihood
        if isinstance(likelihood, Categorical):
            return self.curvature.latent(x, precision, likelihood.temperature.square())
        assert isinstance(likelihood, Gaussian)
        unit = likelihood.scale.square()
        return IndependentLatent(self.curvature.latent(x, precision, likelihood.noise * unit).variance / unit)

    def predictive(self, outputs: Outputs, *, covariance: bool = False) -> Predictive:
        """The predictive distribution of some rows."""
        features = outputs.features
        if features is None or features.shape[1] != self.num_features:
            found = "none" if features is None else str(features.shape[1])
            raise DataError(f"Expected features of width {self.num_features} as in fit, got {found}.")
        return self.likelihood.predictive(outputs.outputs, self.latent(features), covariance=covariance)


def fit_posterior(
    train: Outputs,
    layer: LastLayer,
    likelihood: Likelihood,  # made for this: it becomes part of the posterior
    form: Form,
    *,
    precision: float | None = None,  # the prior's; None for the one of greatest evidence
    num_data: int | None = None,  # how many points the data stand for, if not their own number
) -> Posterior:
    """The posterior at the trained weights; the noise of a regression is the one of greatest evidence."""
    share = (num_data or len(train)) / len(train)
    fit = fit_classes if isinstance(likelihood, Categorical) else fit_outputs
    posterior, found = fit(train, layer, likelihood, form, precision, share)
    nn.init.constant_(posterior.log_precision, math.log(found))
    return posterior


def fit_classes(
    train: Outputs, layer: LastLayer, likelihood: Likelihood, form: Form, precision: float | None, share: float
) -> tuple[Posterior, float]:
    assert isinstance(likelihood, Categorical)
    temperature, bias, home = likelihood.temperature.detach(), layer.bias is not None, layer.weight.device

    def parts() -> Iterator[tuple[Tensor, Tensor]]:
        for x, f in pieces(train, home):
            yield with_one(x) if bias else x, (f / temperature).softmax(-1)

    curvature = of_classes(parts(), form, bias=bias, share=share)
    if precision is None:
        eigenvalues = curvature.eigenvalues().reshape(1, -1) / temperature.square()
        _, precision = best_evidence(eigenvalues, layer.square_norm)
    return placed(curvature, likelihood, layer), precision


def fit_outputs(
    train: Outputs, layer: LastLayer, likelihood: Likelihood, form: Form, precision: float | None, share: float
) -> tuple[Posterior, float]:
    assert isinstance(likelihood, Gaussian)
    bias, home = layer.bias is not None, layer.weight.device
    typical = train.spread(TYPICAL).to(home)
    assert typical.targets is not None
    likelihood.initialize(typical.outputs, typical.targets)
    shared = likelihood.noise_form == "shared"
    if shared:  # one σ² for all outputs: they are measured in one unit
        likelihood.scale = likelihood.scale.square().mean().sqrt().expand(len(likelihood.scale)).clone()
    whole = (with_one(x) if bias else x for x, _ in pieces(train, home))
    curvature = of_outputs(whole, len(likelihood.scale), form, bias=bias, share=share)
    error, eigenvalues, count = share * square_error(train, home), curvature.eigenvalues(), share * len(train)
    if shared:
        error, eigenvalues, count = error.sum()[None], eigenvalues.reshape(1, -1), count * len(error)
    noise, found = best_evidence(eigenvalues, layer.square_norm, count=count, square_error=error, precision=precision)
    likelihood.set_noise(noise)
    return placed(curvature, likelihood, layer), found


def placed(curvature: Curvature, likelihood: Likelihood, layer: LastLayer) -> Posterior:
    features, bias = layer.weight.shape[1], layer.bias is not None
    return Posterior(curvature, likelihood, num_features=features, bias=bias).to(layer.weight.device)


def square_error(train: Outputs, home: torch.device) -> Tensor:  # (C,)
    assert train.targets is not None
    total = torch.zeros(train.outputs.shape[1:].numel(), dtype=torch.float64, device=home)
    for rows in torch.arange(len(train)).split(TYPICAL):
        part = train[rows[0] : rows[-1] + 1].only().to(home)
        assert part.targets is not None
        total += (columns(part.targets) - columns(part.outputs)).square().sum(0)
    return total


def refine(posterior: Posterior, val: Outputs) -> None:
    """Gives a posterior the prior precision, and in regression the noise, that make validation data likeliest."""
    likelihood, start = posterior.likelihood, posterior.log_precision.detach().clone()
    learnt: list[Tensor] = [posterior.log_precision]
    if isinstance(likelihood, Gaussian):
        learnt.append(likelihood.log_noise)

    def loss(*, gradient: bool = False) -> float:
        total = 0.0
        for rows in torch.arange(len(val)).split(posterior.rows_at_once):
            part = val[rows[0] : rows[-1] + 1].to(posterior.device)
            with torch.set_grad_enabled(gradient):
                predictive = posterior.predictive(part.with_outputs(part.outputs.double()))
                minus = -predictive.log_prob(part.targets).sum() / len(val)
            if gradient:
                minus.backward()
            total += float(minus.detach())
        return total

    def tried(power: int) -> float:
        nn.init.constant_(posterior.log_precision, float(start) + power * math.log(10.0))
        return loss()

    best = min(GRID, key=tried)
    before = tried(best)
    kept = [value.detach().clone() for value in learnt]
    search = torch.optim.LBFGS(learnt, max_iter=50, tolerance_change=1e-12, line_search_fn="strong_wolfe")

    def closure() -> float:
        search.zero_grad()
        return loss(gradient=True)

    search.step(closure)
    if not loss() <= before:
        for value, old in zip(learnt, kept, strict=True):
            value.data.copy_(old)
    for value in learnt:
        value.grad = None
