"""`Laplace`: the linearized Laplace approximation of a network's last layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from posthoc.base import CHUNK, Fitted, Job, Method
from posthoc.collect.outputs import Outputs
from posthoc.config import FeatureConfig, option
from posthoc.errors import OptionError
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.likelihoods.registry import make_likelihood
from posthoc.methods.laplace.curvature import Curvature, Dense, Form, Separable, require_room, sum_curvature
from posthoc.methods.laplace.last_layer import features_of, find_last_layer, pieces, require_last_layer, with_one
from posthoc.methods.laplace.marginal_likelihood import best_evidence
from posthoc.numerics import rows_that_fit
from posthoc.predictive.base import Predictive
from posthoc.predictive.latent import IndependentLatent

GRID = range(-6, 7)
"""Powers of ten that the prior precision is multiplied by on validation data, before the best is refined."""


@dataclass(frozen=True, kw_only=True)
class LaplaceConfig(FeatureConfig):
    """Options of `Laplace`."""

    curvature: Form = "kron"
    prior_precision: Literal["marglik", "val"] | float = option("marglik", above=0.0)
    max_gigabytes: float = option(8.0, above=0.0, saved=False)


class Laplace(Method):
    """The weights of the last layer as Gaussian, with the curvature of the loss at the trained ones as its precision.

    `Outputs` with features are enough: the last layer is then found by least squares. Other subsets of the weights are
    for `LaplaceTorch`. Nothing in it is random.

    Args:
        model: An `nn.Module` whose last layer is an `nn.Linear`, or None to work from `Outputs` with features.
        likelihood: "regression", "classification", or a `Gaussian` or `Categorical` with options of its own. By default
            classes are predicted by logit scaling (the "probit" approximation) at temperature 1. "shared" noise is one
            σ² for all outputs.
        curvature: "kron" (KFAC), "full" or "diag".
        prior_precision: The precision of the weights' prior, or how it and the noise of a regression are found:
            "marglik" (they maximize the marginal likelihood of the data) or "val" (the likelihood of `val`).
        max_gigabytes: The most memory that the matrices of the curvature may take.
        layer: A module whose output is taken as features. By default the input of the last `nn.Linear` is.
        device: Where the fitted method computes.

    Example:
        >>> import torch
        >>> from posthoc import Laplace
        >>> model = torch.nn.Linear(2, 1)
        >>> x, y = torch.randn(20, 2), torch.randn(20, 1)
        >>> Laplace(torch.nn.Sequential(model), "regression").fit(x, y).predict(x).std.shape
        torch.Size([20, 1])
    """

    name = "laplace"
    Config = LaplaceConfig
    config: LaplaceConfig
    needs_classes = True

    def _suited(self, likelihood: Any) -> Likelihood:
        return linearized(likelihood)

    @property
    def posterior(self) -> Posterior:
        """The fitted posterior of the weights."""
        posterior: Posterior = self._require_fitted("posterior")
        return posterior

    @property
    def prior_precision(self) -> float:
        """The fitted precision of the weights' prior."""
        return float(self.posterior.log_precision.detach().exp())

    def _fit(self, job: Job) -> Posterior:
        prior, form, train, device = self.config.prior_precision, self.config.curvature, job.train, job.device
        if prior == "val" and job.val is None:
            raise OptionError('prior_precision="val" needs validation data: give fit(..., val=...), or use "marglik".')
        layer = find_last_layer(self.backbone, train, device)
        bias, (width, num_features) = layer.bias is not None, layer.weight.shape
        classes = self._likelihood.task == "classification"
        require_room(form, width, num_features + bias, classes=classes, gigabytes=self.config.max_gigabytes)
        likelihood = self._start_likelihood(train, device)
        error, share = torch.zeros(width, dtype=torch.float64, device=device), job.num_data / len(train)

        def parts() -> Iterator[tuple[Tensor, Tensor]]:
            for x, outputs, targets in pieces(train, device):
                if isinstance(likelihood, Categorical):
                    outputs = (outputs / likelihood.temperature.detach()).softmax(-1)
                else:
                    error.add_((targets - outputs).square().sum(0))
                yield with_one(x) if bias else x, outputs

        curvature = sum_curvature(parts(), form, width, classes=classes, bias=bias, share=share)
        values, count, errors = curvature.values, share * len(train), share * error
        if isinstance(likelihood, Categorical):
            values = values.reshape(1, -1) / likelihood.temperature.detach().square()
        elif isinstance(likelihood, Gaussian) and likelihood.noise_form == "shared":
            use_one_unit(likelihood)
            values, count, errors = values.reshape(1, -1), count * width, errors.sum()[None]
        square_norm = sum(float(part.square().sum()) for part in layer if part is not None)
        given, square_error = prior if isinstance(prior, float) else None, None if classes else errors
        noise, precision = best_evidence(values, square_norm, count=count, square_error=square_error, precision=given)
        if isinstance(likelihood, Gaussian):
            likelihood.set_noise(noise)
        posterior = Posterior(curvature, likelihood, num_features=num_features, bias=bias).to(device)
        nn.init.constant_(posterior.log_precision, math.log(precision))
        if prior == "val" and job.val is not None:
            refine(posterior, job.val.only("features"))
        return posterior

    def _reads(self) -> tuple[str, ...]:
        require_last_layer(self.backbone)
        return ("features",)

    def _blank(self, shapes: Mapping[str, Any]) -> Posterior:
        zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes["matrices"].items()}
        curvature: Curvature = Dense(**zeros) if "vectors" in zeros else Separable(**zeros)
        likelihood = self._blank_likelihood()
        return Posterior(curvature, likelihood, num_features=shapes["num_features"], bias=shapes["bias"])


class Posterior(Fitted):
    """The curvature of the loss, the precision δ of the weights' prior, and the likelihood."""

    reads = ("features",)
    curvature: Curvature

    def __init__(self, curvature: Curvature, likelihood: Likelihood, *, num_features: int, bias: bool) -> None:
        matrices = {name: list(tensor.shape) for name, tensor in curvature.state_dict().items()}
        metadata = {"matrices": matrices, "num_features": num_features, "bias": bias}
        super().__init__(likelihood, metadata, curvature=curvature)
        self.num_features, self.bias = num_features, bias
        self.log_precision = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def rows_at_once(self, outputs: int, *, dense: bool) -> int:
        return rows_that_fit(self.curvature.width)

    def predictive(self, outputs: Outputs, *, covariance: bool = False) -> Predictive:
        """The predictive distribution of some rows."""
        x, likelihood, precision = features_of(outputs, self.num_features), self.likelihood, self.log_precision.exp()
        x = with_one(x) if self.bias else x
        if isinstance(likelihood, Categorical):
            latent = self.curvature.latent(x, precision, likelihood.temperature.square())
        else:
            assert isinstance(likelihood, Gaussian)
            unit = likelihood.scale.square()
            variance = self.curvature.latent(x, precision, likelihood.noise * unit).variance
            latent = IndependentLatent(variance / unit)
        return likelihood.predictive(outputs.outputs, latent, covariance=covariance)


def refine(posterior: Posterior, val: Outputs) -> None:
    """Gives a posterior the prior precision, and in regression the noise, that make validation data likeliest."""
    learned = [posterior.log_precision]
    if isinstance(posterior.likelihood, Gaussian):
        learned.append(posterior.likelihood.log_noise)
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

    set_best_power(posterior.log_precision, GRID, loss)
    search.step(loss)


@torch.no_grad()
def set_best_power(log_value: Tensor, powers: Iterable[int], score: Callable[[], float]) -> None:
    """Multiplies a positive number, given by its logarithm, by the power of ten at which a score is lowest."""
    start = float(log_value)

    def at(power: int) -> float:
        log_value.fill_(start + power * math.log(10.0))
        return score()

    at(min(powers, key=at))


def linearized(likelihood: str | Likelihood) -> Likelihood:
    """The likelihood of a Laplace approximation: its temperature is 1 unless the user fixed another one, and by name
    alone classes are predicted by logit scaling."""
    made = make_likelihood(likelihood)
    if not isinstance(made, Categorical):
        return made
    if not isinstance(likelihood, Likelihood):
        return Categorical(temperature=1.0, prediction="logit_scaling")
    return make_likelihood({**made.spec(), "temperature": made.fixed_temperature or 1.0})


def use_one_unit(likelihood: Gaussian) -> None:
    """Measures all outputs in one unit, so that they can share one σ²."""
    likelihood.scale = likelihood.scale.square().mean().sqrt().expand(len(likelihood.scale)).clone()
