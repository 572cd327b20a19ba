"""`LaplaceTorch`: linearized Laplace approximations over other weights than the last layer's, by laplace-torch."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn

from posthoc.base import Fitted, Job
from posthoc.collect.loaders import Batch
from posthoc.config import MethodConfig, option
from posthoc.errors import DataError, OptionError
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.methods.laplace.laplace import linearized, use_one_unit
from posthoc.methods.laplace.marginal_likelihood import best_evidence
from posthoc.methods.weights.network import NetworkMethod
from posthoc.numerics import rows_that_fit
from posthoc.optional import require
from posthoc.predictive.base import Predictive
from posthoc.predictive.latent import DenseLatent


@dataclass(frozen=True, kw_only=True)
class LaplaceTorchConfig(MethodConfig):
    """Options of `LaplaceTorch`."""

    curvature: Literal["kron", "full", "diag"] = "kron"
    subnetwork: int | None = option(None, least=1)
    prior_precision: Literal["marglik"] | float = option("marglik", above=0.0)
    batch_size: int = option(256, least=1)


class LaplaceTorch(NetworkMethod):
    """The linearized Laplace approximation over all weights that are not frozen, or some of them, by laplace-torch.

    For the last layer alone `Laplace` gives the same numbers in less time and memory. A fit cannot be saved.

    Args:
        model: An `nn.Module` that takes one tensor.
        likelihood: As for `Laplace`; the noise is shared by all outputs, and the temperature is 1.
        curvature: "kron", "full" or "diag"; "full" or "diag" of a subnetwork.
        subnetwork: The number of weights, those of largest magnitude; None for all weights.
        prior_precision: "marglik" (it and the noise maximize the marginal likelihood), or the precision itself.
        batch_size: Rows of arrays that the network is run on at a time.
        device: Where a network without weights computes.
    """

    name = "laplace-torch"
    Config = LaplaceTorchConfig
    config: LaplaceTorchConfig
    needs_classes = True

    def _suited(self, likelihood: Any) -> Likelihood:
        suited = linearized(likelihood)
        spec = suited.spec()
        if spec.get("temperature", 1.0) != 1.0 or spec.get("noise", "shared") != "shared":
            raise OptionError(f'laplace-torch needs Categorical(temperature=1.0) or Gaussian("shared"), got {spec}.')
        return suited

    @property
    def prior_precision(self) -> float:
        """The fitted precision of the weights' prior."""
        return float(self._require_fitted("prior_precision").approximation.prior_precision)

    def _fit(self, job: Job) -> FittedLaplaceTorch:
        laplace = require("laplace", "laplace", "A Laplace approximation over these weights")
        form, count = self.config.curvature, self.config.subnetwork
        weights = [p.detach().reshape(-1) for p in self.module.parameters() if p.requires_grad]
        if not weights:
            raise OptionError("Expected weights that are not frozen, got none: call requires_grad_() on some of them.")
        if count is not None and form == "kron":
            raise OptionError('Expected curvature="full" or "diag" for a subnetwork, got "kron".')
        subset: dict[str, Any] = {"subset_of_weights": "all"}
        if count is not None:
            largest = torch.cat(weights).abs().argsort(descending=True)[:count].sort().values
            subset = {"subset_of_weights": "subnetwork", "subnetwork_indices": largest.cpu()}
        likelihood = self._start_likelihood(job.train, job.train.outputs.device)
        with warnings.catch_warnings(action="ignore"):  # the user can do nothing about what laplace-torch warns of
            network = FlatOutputs(self, copy.deepcopy(self.module).eval())
            approximation = laplace.Laplace(network, likelihood.task, hessian_structure=form, **subset)
            approximation.fit(Loader(self, job))
            maximize_evidence(approximation, self.config.prior_precision, likelihood)
        return FittedLaplaceTorch(likelihood, approximation)

    def _batch_predictor(self, fitted: FittedLaplaceTorch, *, covariance: bool) -> Callable[[Batch], Predictive]:
        def predict(batch: Batch) -> Predictive:
            outputs, x, approximation = self._answer(self.module, batch), one_tensor(batch), fitted.approximation
            likelihood, width = fitted.likelihood.to(outputs.device), outputs.shape[1:].numel()
            rows = rows_that_fit(width * approximation.n_params)
            # laplace-torch's own way to the Gaussian over the outputs: its public call gives class probabilities.
            parts = [approximation._glm_predictive_distribution(part)[1].double() for part in x.split(rows)]
            v = torch.cat(parts).reshape(-1, width, width)
            if isinstance(likelihood, Gaussian):
                v = v / torch.outer(likelihood.scale, likelihood.scale)
            return likelihood.predictive(outputs, DenseLatent(v), covariance=self._dense(covariance))

        return predict

    def save(self, path: str | os.PathLike[str]) -> None:
        """Raises: the approximation is laplace-torch's own object."""
        raise OptionError("A fit of laplace-torch cannot be saved: use Laplace, or fit it again.")


class FittedLaplaceTorch(Fitted):
    """laplace-torch's own object beside the likelihood."""

    def __init__(self, likelihood: Likelihood, approximation: Any) -> None:
        super().__init__(likelihood)
        self.approximation = approximation


class FlatOutputs(nn.Module):
    """A copy of a network whose output is one row for each point, as laplace-torch expects."""

    def __init__(self, method: LaplaceTorch, network: nn.Module) -> None:
        super().__init__()
        self.answer, self.network = method._answer, network

    def forward(self, x: Tensor) -> Tensor:  # (N, C)
        return self.answer(self.network, Batch((x,), {}, None)).flatten(1)


class Loader:
    """The data as laplace-torch reads them: batches of inputs and targets, and a `dataset` with a length."""

    def __init__(self, method: LaplaceTorch, job: Job) -> None:
        self.method, self.data, self.dataset = method, job.data, job.train

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        likelihood, weight = self.method._likelihood, next(self.method.module.parameters())
        for batch in self.method._batches(self.data, self.method.config.batch_size):
            x = one_tensor(batch)
            y = likelihood.check_targets(batch.target, weight.new_zeros(len(x), *self.dataset.outputs.shape[1:]))
            yield x, y if likelihood.task == "classification" else y.to(weight).reshape(len(x), -1)


def maximize_evidence(approximation: Any, prior: str | float, likelihood: Likelihood) -> None:
    """Sets the prior precision, unless it is given, and the noise of greatest marginal likelihood. laplace-torch itself
    ascends by gradients, which it lacks for the noise of a Kronecker product."""
    weights = getattr(approximation, "mean_subnet", approximation.mean)
    values, count = spectrum(approximation.H).double().reshape(1, -1), approximation.n_data * approximation.n_outputs
    square_norm, given = float(weights.double().square().sum()), prior if isinstance(prior, float) else None
    error = 2.0 * approximation.loss.double().reshape(1) if isinstance(likelihood, Gaussian) else None
    noise, precision = best_evidence(values, square_norm, count=count, square_error=error, precision=given)
    approximation.prior_precision = precision
    if isinstance(likelihood, Gaussian):
        approximation.sigma_noise = float(noise.sqrt())
        use_one_unit(likelihood)
        likelihood.set_noise(noise)


def spectrum(curvature: Any) -> Tensor:
    """The eigenvalues of a curvature in any of laplace-torch's forms: a matrix, its diagonal, Kronecker factors."""
    if isinstance(curvature, Tensor):
        values = torch.linalg.eigvalsh(curvature.double()) if curvature.ndim == 2 else curvature
    else:
        values = torch.cat([reduce(torch.kron, map(Tensor.double, factors)) for factors in curvature.eigenvalues])
    return values.clamp_min(0.0)


def one_tensor(batch: Batch) -> Tensor:
    """The input of a network that takes one tensor."""
    if len(batch.args) != 1 or not isinstance(batch.args[0], Tensor) or batch.kwargs:
        raise DataError("laplace-torch takes networks of one tensor, got more inputs or named ones: wrap the network.")
    return batch.args[0]
