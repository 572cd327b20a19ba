"""`LaplaceTorch`: linearized Laplace approximations over other weights than the last layer's, by laplace-torch."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
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

COPIES = 4
"""Matrices over all weights that exist at once."""


@dataclass(frozen=True, kw_only=True)
class LaplaceTorchConfig(MethodConfig):
    """Options of `LaplaceTorch`."""

    curvature: Literal["kron", "full", "diag"] = "kron"
    subnetwork: Any = None
    prior_precision: Literal["marglik"] | float = option("marglik", above=0.0)
    batch_size: int = option(256, least=1)
    max_gigabytes: float = option(8.0, above=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.subnetwork is not None and self.curvature == "kron":
            raise OptionError('Expected curvature="full" or "diag" for a subnetwork, got "kron".')


class LaplaceTorch(NetworkMethod):
    """The linearized Laplace approximation over all weights that are not frozen, or some of them, by laplace-torch.

    For the last layer alone `Laplace` gives the same numbers in less time and memory. A fit cannot be saved.

    Args:
        model: An `nn.Module` that takes one tensor.
        likelihood: As for `Laplace`; the noise is shared by all outputs, and the temperature is 1.
        curvature: "kron", "full" or "diag"; "full" or "diag" of a subnetwork.
        subnetwork: The number of the largest weights, or the names of modules or parameters; None for all weights.
        prior_precision: "marglik" (it and the noise maximize the marginal likelihood), or the precision itself.
        batch_size: Rows of arrays that the network is run on at a time.
        max_gigabytes: The most memory that the matrices of a full curvature may take.
        device: Where a network without weights computes.
    """

    name = "laplace-torch"
    Config = LaplaceTorchConfig
    config: LaplaceTorchConfig
    needs_classes = True

    def __init__(self, model: Any = None, likelihood: str | Likelihood | None = None, **options: Any) -> None:
        super().__init__(model, likelihood, **options)
        self.indices = subnetwork_indices(self.module, self.config.subnetwork)
        free = sum(p.numel() for p in self.module.parameters() if p.requires_grad)
        self.num_weights = len(self.indices) if self.indices is not None else free
        allowed = self.config.max_gigabytes
        needed = COPIES * 4 * self.num_weights**2 / 1e9
        if self.config.curvature == "full" and needed > allowed:
            raise OptionError(
                f'Expected curvature="full" to fit into {allowed:g} GB, found that {self.num_weights} weights need '
                f'{needed:.3g} GB. Use curvature="kron" or "diag", a smaller subnetwork, or a larger max_gigabytes.'
            )

    def _suited(self, likelihood: Any) -> Likelihood:
        suited = linearized(likelihood)
        spec = suited.spec()
        if spec.get("temperature", 1.0) != 1.0 or spec.get("noise", "shared") != "shared":
            raise OptionError(
                "laplace-torch has a temperature of 1 and one noise for all outputs: use Categorical(temperature=1.0) "
                'or Gaussian("shared").'
            )
        return suited

    @property
    def prior_precision(self) -> float:
        """The fitted precision of the weights' prior."""
        return float(self._require_fitted("prior_precision").approximation.prior_precision)

    def _fit(self, job: Job) -> FittedLaplaceTorch:
        laplace = require("laplace", "laplace", "A Laplace approximation over these weights")
        likelihood = self._start_likelihood(job.train, job.train.outputs.device)
        network = FlatOutputs(copy.deepcopy(self.module).eval(), self._answer)
        subset: dict[str, Any] = {"subset_of_weights": "all"}
        if self.indices is not None:
            subset = {"subset_of_weights": "subnetwork", "subnetwork_indices": self.indices}
        with warnings.catch_warnings(action="ignore"):  # the user can do nothing about what laplace-torch warns of
            form = self.config.curvature
            approximation = laplace.Laplace(network, self._likelihood.task, hessian_structure=form, **subset)
            approximation.fit(Loader(self, job))
            maximize_evidence(approximation, self.config.prior_precision, likelihood)
        return FittedLaplaceTorch(likelihood, approximation)

    def _batch_predictor(self, fitted: FittedLaplaceTorch, *, covariance: bool) -> Callable[[Batch], Predictive]:
        def predict(batch: Batch) -> Predictive:
            outputs, x = self._answer(self.module, batch), one_tensor(batch)
            likelihood, width = fitted.likelihood.to(outputs.device), outputs.shape[1:].numel()
            rows = rows_that_fit(width * self.num_weights)
            # laplace-torch's own way to the Gaussian over the outputs: its public call gives class probabilities.
            parts = [fitted.approximation._glm_predictive_distribution(part)[1].double() for part in x.split(rows)]
            v = torch.cat(parts).reshape(-1, width, width)
            if isinstance(likelihood, Gaussian):
                v = v / torch.outer(likelihood.scale, likelihood.scale)
            return likelihood.predictive(outputs, DenseLatent(v), covariance=self._dense(covariance))

        return predict

    def save(self, path: str | os.PathLike[str]) -> None:
        """Raises: the approximation is laplace-torch's own object."""
        raise OptionError("A fit of laplace-torch cannot be saved: use posthoc.methods.Laplace, or fit it again.")


class FittedLaplaceTorch(Fitted):
    """laplace-torch's own object beside the likelihood."""

    def __init__(self, likelihood: Likelihood, approximation: Any) -> None:
        super().__init__(likelihood)
        self.approximation = approximation


class FlatOutputs(nn.Module):
    """A network whose output is one row for each point, as laplace-torch expects."""

    def __init__(self, network: nn.Module, answer: Callable[[nn.Module, Batch], Tensor]) -> None:
        super().__init__()
        self.network, self.answer = network, answer

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
            outputs = weight.new_zeros(len(x), *self.dataset.outputs.shape[1:])
            y = likelihood.check_targets(batch.target, outputs)
            yield x, y if likelihood.task == "classification" else y.to(weight).reshape(len(x), -1)


def subnetwork_indices(module: nn.Module, subnetwork: int | Sequence[str] | None) -> Tensor | None:
    """The numbers of a subnetwork's weights among all that are not frozen."""
    free = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    if not free:
        raise OptionError("laplace-torch needs weights that are not frozen: call requires_grad_() on some of them.")
    if subnetwork is None:
        return None
    if isinstance(subnetwork, int):
        size = torch.cat([p.reshape(-1).abs() for p in free.values()])
        return size.argsort(descending=True, stable=True)[: max(1, subnetwork)].sort().values.cpu()
    chosen: set[str] = set()
    for name in subnetwork:
        parts = {parameter for parameter in free if f"{parameter}.".startswith(f"{name}.")}
        if not parts:
            raise OptionError(
                f"Expected subnetwork to name modules or parameters that are not frozen, got {name!r}. The "
                f"parameters are: {', '.join(free)}."
            )
        chosen |= parts
    return torch.cat([torch.full((p.numel(),), name in chosen) for name, p in free.items()]).nonzero().squeeze(-1)


def maximize_evidence(approximation: Any, prior: str | float, likelihood: Likelihood) -> None:
    """Sets the prior precision, unless it is given, and the noise of greatest marginal likelihood.

    laplace-torch ascends by gradients, which it lacks for the noise of a Kronecker product.
    """
    weights = approximation.mean_subnet if hasattr(approximation, "mean_subnet") else approximation.mean
    noise, precision = best_evidence(
        spectrum(approximation.H).double().reshape(1, -1),
        float(weights.double().square().sum()),
        count=approximation.n_data * approximation.n_outputs,
        square_error=2.0 * approximation.loss.double().reshape(1) if isinstance(likelihood, Gaussian) else None,
        precision=prior if isinstance(prior, float) else None,
    )
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
        raise DataError(
            f"laplace-torch takes networks of one tensor, got {len(batch.args)} inputs and {len(batch.kwargs)} named "
            "ones: wrap the network, or use a method that needs outputs alone."
        )
    return batch.args[0]
