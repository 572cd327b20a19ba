"""The Gaussian posterior of a last layer's weights: fitted from outputs and features, it predicts from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from posthoc.base import CHUNK, Fitted
from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.methods.laplace.curvature import Curvature, Dense, Form, Separable, sum_curvature
from posthoc.methods.laplace.last_layer import LastLayer, pieces, with_one
from posthoc.methods.laplace.marginal_likelihood import best_evidence
from posthoc.numerics import rows_that_fit
from posthoc.predictive.base import Predictive
from posthoc.predictive.latent import IndependentLatent

GRID = range(-6, 7)
"""Powers of ten that the prior precision is multiplied by on validation data, before the best is refined."""


class Posterior(Fitted):
    """The curvature of the loss, the precision δ of the weights' prior, and the likelihood."""

    reads = ("features",)

    def __init__(self, curvature: Curvature, likelihood: Likelihood, *, num_features: int, bias: bool) -> None:
        super().__init__(likelihood)
        self.curvature, self.num_features, self.bias = curvature, num_features, bias
        self.log_precision = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def shapes(self) -> dict[str, Any]:
        matrices = {name: list(tensor.shape) for name, tensor in self.curvature.state_dict().items()}
        return {"matrices": matrices, "num_features": self.num_features, "bias": self.bias}

    @classmethod
    def blank(cls, likelihood: Likelihood, shapes: Mapping[str, Any]) -> Posterior:
        """A posterior of these shapes, to load tensors into."""
        zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes["matrices"].items()}
        curvature: Curvature = Dense(**zeros) if "vectors" in zeros else Separable(**zeros)
        return cls(curvature, likelihood, num_features=shapes["num_features"], bias=shapes["bias"])

    def rows_at_once(self, outputs: int, *, dense: bool) -> int:
        return rows_that_fit(self.curvature.width)

    def predictive(self, outputs: Outputs, *, covariance: bool = False) -> Predictive:
        """The predictive distribution of some rows."""
        features, likelihood, precision = outputs.features, self.likelihood, self.log_precision.exp()
        if features is None or features.shape[1] != self.num_features:
            found = "none" if features is None else features.shape[1]
            raise DataError(f"Expected features of width {self.num_features} as in fit, got {found}.")
        x = with_one(features.double()) if self.bias else features.double()
        if isinstance(likelihood, Categorical):
            latent = self.curvature.latent(x, precision, likelihood.temperature.square())
        else:
            assert isinstance(likelihood, Gaussian)
            unit = likelihood.scale.square()
            variance = self.curvature.latent(x, precision, likelihood.noise * unit).variance
            latent = IndependentLatent(variance / unit)
        return likelihood.predictive(outputs.outputs, latent, covariance=covariance)


def fit_posterior(
    train: Outputs, layer: LastLayer, likelihood: Likelihood, form: Form, *, precision: float | None, share: float
) -> Posterior:
    """The posterior at the trained weights; the noise of a regression is the one of the largest marginal likelihood.

    Args:
        train: The data.
        layer: The last layer.
        likelihood: In the units of the data; it becomes part of the posterior.
        form: The form of the curvature.
        precision: The prior's; None for the one of the largest marginal likelihood.
        share: The number of points that each row stands for.
    """
    home, bias = layer.weight.device, layer.bias is not None
    width = train.outputs.shape[1:].numel()
    error = torch.zeros(width, dtype=torch.float64, device=home)

    def parts() -> Iterator[tuple[Tensor, Tensor | None]]:
        for x, outputs, targets in pieces(train, home):
            p = None
            if isinstance(likelihood, Categorical):
                p = (outputs / likelihood.temperature.detach()).softmax(-1)
            else:
                error.add_((targets - outputs).square().sum(0))
            yield with_one(x) if bias else x, p

    curvature = sum_curvature(parts(), form, width, bias=bias, share=share)
    values, count, errors = curvature.values, share * len(train), share * error
    if isinstance(likelihood, Categorical):
        values = values.reshape(1, -1) / likelihood.temperature.detach().square()
    elif isinstance(likelihood, Gaussian) and likelihood.noise_form == "shared":
        use_one_unit(likelihood)
        values, count, errors = values.reshape(1, -1), count * width, errors.sum()[None]
    square_error = errors if isinstance(likelihood, Gaussian) else None
    noise, precision = best_evidence(
        values, layer.square_norm, count=count, square_error=square_error, precision=precision
    )
    if isinstance(likelihood, Gaussian):
        likelihood.set_noise(noise)
    posterior = Posterior(curvature, likelihood, num_features=layer.weight.shape[1], bias=bias).to(home)
    nn.init.constant_(posterior.log_precision, math.log(precision))
    return posterior


def use_one_unit(likelihood: Gaussian) -> None:
    """Measures all outputs in one unit, so that they can share one σ²."""
    likelihood.scale = likelihood.scale.square().mean().sqrt().expand(len(likelihood.scale)).clone()


def refine(posterior: Posterior, val: Outputs) -> None:
    """Gives a posterior the prior precision, and in regression the noise, that make validation data likeliest."""
    likelihood, start = posterior.likelihood, float(posterior.log_precision.detach())
    learned = [posterior.log_precision]
    if isinstance(likelihood, Gaussian):
        learned.append(likelihood.log_noise)
    search = torch.optim.LBFGS(learned, max_iter=50, tolerance_change=1e-12, line_search_fn="strong_wolfe")

    def loss() -> float:
        """Minus the mean log-probability, with its gradient where that is enabled."""
        search.zero_grad()
        total, size = 0.0, min(CHUNK, rows_that_fit(posterior.curvature.width))
        for first in range(0, len(val), size):
            part = val[first : first + size].to(posterior.device)
            pred = posterior.predictive(part.with_outputs(part.outputs.double()))
            minus = -pred.log_prob(part.targets).sum() / len(val)
            if minus.requires_grad:
                minus.backward()
            total += float(minus.detach())
        return total

    @torch.no_grad()
    def tried(power: int) -> float:
        posterior.log_precision.fill_(start + power * math.log(10.0))
        return loss()

    before = tried(min(GRID, key=tried))
    kept = [value.detach().clone() for value in learned]
    search.step(loss)
    with torch.no_grad():
        if not loss() <= before:
            for value, old in zip(learned, kept, strict=True):
                value.copy_(old)
