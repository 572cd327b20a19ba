"""ELLA: the linearized Laplace approximation in the few directions of weight space that matter (Deng et al., 2022)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from posthoc.base import Fitted, Job
from posthoc.collect.loaders import Batch
from posthoc.collect.outputs import Outputs
from posthoc.config import option
from posthoc.errors import DataError
from posthoc.likelihoods.base import Likelihood, columns
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.methods.laplace.curvature import eigen
from posthoc.methods.laplace.laplace import linearized
from posthoc.methods.laplace.last_layer import features_of, find_last_layer, with_one
from posthoc.methods.laplace.marginal_likelihood import best_evidence
from posthoc.methods.ntk.base import NTKConfig, NTKMethod
from posthoc.methods.ntk.ntk import products
from posthoc.numerics import rows_that_fit
from posthoc.predictive.base import Predictive
from posthoc.predictive.latent import FactorLatent

PRIORS = tuple(10.0 ** (step / 2) for step in range(-6, 9))
"""Prior variances that are tried, in units that give the outputs a mean prior variance of one."""
NOISES = (1.0, 0.8, 0.6, 0.4, 0.2, 0.1, 0.03, 0.01)
"""Shares of the mean squared residual that are tried as the noise of a regression."""
STOPS = tuple(0.5**halvings for halvings in range(13))
"""Shares of the data after which G may stop early."""
WORK = 2**33
"""Numbers computed in a search. Where all validation rows would need more, some of them are used."""


@dataclass(frozen=True, kw_only=True)
class ELLAConfig(NTKConfig):
    """Options of `ELLA`."""

    num_inducing: int = option(2000, least=1)
    num_features: int = option(20, least=1)
    early_stop: bool = True


class ELLA(NTKMethod):
    """The posterior of a linearized network in K directions of its weights.

    It is N(θ, (G + δI)⁻¹) with G the Gauss-Newton matrix, along the leading eigenvectors of the tangent kernel among M
    random pairs of a training point and an output. The mean stays the network's. G takes one pass over the data. The
    prior precision δ (and in regression the noise) is chosen from a grid by the likelihood of `val`, or without it by
    the marginal likelihood of the data.

    Args:
        model: An `nn.Module`, or with `weights="last"` any callable, or None to work from `Outputs` with features.
        likelihood: "regression", "classification", or a `Gaussian` or `Categorical` with options of its own. Classes
            are predicted by logit scaling at temperature 1, as by `Laplace`, unless a `Categorical` says otherwise.
        weights: "last" for those of the last linear layer, in closed form, or "all" that are not frozen, by
            `torch.func`.
        num_inducing: The largest number M of pairs.
        num_features: The largest number K of directions. With `weights="last"` a direction is of one output, and
            outputs without one have no variance: choose it well above the number of classes.
        prior_precision: δ. By default it is chosen.
        early_stop: Whether `val` may also choose after how many rows to stop adding to G.
        max_gigabytes: The most memory that gradients and features may take with `weights="all"`.
        layer: The module whose output the last layer reads. By default the input of the last `nn.Linear` is.
        seed: The seed of the pairs and of the order of the rows.
        device: Where the fitted method computes.

    Example:
        >>> import torch
        >>> from posthoc import ELLA
        >>> x, y = torch.randn(20, 2), torch.randn(20, 1)
        >>> ELLA(torch.nn.Sequential(torch.nn.Linear(2, 1)), "regression").fit(x, y).predict(x).std.shape
        torch.Size([20, 1])
    """

    name = "ella"
    Config = ELLAConfig
    config: ELLAConfig

    def _suited(self, likelihood: Any) -> Likelihood:
        return linearized(likelihood)

    @property
    def prior_precision(self) -> float:
        """The precision of the weights' prior, as chosen or given."""
        return float(self._require_fitted("prior_precision").prior_precision)

    @property
    def rows_used(self) -> int:
        """The number of rows that G was summed over."""
        return int(self._require_fitted("rows_used").rows_used)

    @torch.no_grad()
    def _fit(self, job: Job) -> FittedELLA:
        device, most = job.device, self.config.num_features
        likelihood = self._start_likelihood(job.val if job.val is not None else job.train, device)
        if self.config.weights == "all":
            directions, classes = leading(self._draw_gradients(job, most)[0], most)[0], None
            job = self._with_features(job, directions)
            theta = torch.cat([weight.reshape(-1) for weight in self.jacobian.weights.values()])
            along = (directions.to(theta) @ theta).double()
        else:
            directions, classes, along = self._last_layer_directions(job.train, device)
        fitted = FittedELLA(likelihood, directions, classes).to(device)
        sums = self._gauss_newton(job, fitted, early_stop=job.val is not None and self.config.early_stop)
        spectra = {rows: eigen(g) for rows, g in sums.items()}
        if job.val is not None:
            rows, precision, noise = best_on(job.val, fitted, spectra, self._precisions(job.train, fitted))
        else:
            rows = len(job.train)
            values, square_norm = spectra[rows][0][None], float(along.square().sum())
            # The residuals of a regression have unit mean square.
            count = float(job.num_data * len(likelihood.scale)) if isinstance(likelihood, Gaussian) else 0.0
            error, given = along.new_tensor([count]) if count else None, self.config.prior_precision
            noises, precision = best_evidence(values, square_norm, count=count, square_error=error, precision=given)
            noise = float(noises)
        values, vectors = spectra[rows]
        set_relative_noise(likelihood, noise)
        fitted.factor = vectors * scales(values, precision, noise)
        fitted.prior_precision.fill_(precision)
        fitted.rows_used.fill_(rows)
        return fitted

    def _last_layer_directions(self, train: Outputs, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """K directions in the weights of the last layer, their outputs, and how far the weights lie along each. The
        gradients of two outputs are orthogonal, so every eigenvector belongs to one output."""
        layer = find_last_layer(self.backbone, train, device)
        outputs, most = len(layer.weight), self.config.num_features
        bias = layer.bias if layer.bias is not None else torch.zeros(outputs, dtype=torch.float64, device=device)
        theta = torch.cat([layer.weight, bias[:, None]], 1)
        pairs = self._draw_pairs(len(train), outputs)
        rows, owners = pairs // outputs, (pairs % outputs).to(device)
        features = train[rows.to(train.outputs.device)].features
        assert features is not None
        j = with_one(features.to(device).double())
        j[:, -1] *= layer.bias is not None  # directions that leave alone a bias that is not there
        present = owners.unique()
        parts, values = zip(*(leading(j[owners == c], most) for c in present), strict=True)
        best = torch.cat(values).argsort(descending=True, stable=True)[:most]
        classes = present.repeat_interleave(torch.tensor([len(part) for part in parts], device=device))[best]
        directions = torch.cat(parts)[best]
        return directions, classes, (theta[classes] * directions).sum(-1)

    def _gauss_newton(self, job: Job, fitted: FittedELLA, *, early_stop: bool) -> dict[int, Tensor]:  # of (K, K)
        """G over the first rows of the data, in random order, for each number of rows at which it may stop."""
        train, n = job.train, len(job.train)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(self.config.seed)).to(train.outputs.device)
        ends = sorted({max(1, round(share * n)) for share in (STOPS if early_stop else STOPS[:1])})
        sums, total = {}, torch.zeros((), dtype=torch.float64)
        for start, end in pairwise([0, *ends]):
            for rows in order[start:end].split(fitted.rows_at_once(train.outputs[0].numel())):
                total = total + fitted.gauss_newton(train[rows].to(fitted.device))
            sums[end] = total * (job.num_data / n)
        return sums

    def _precisions(self, train: Outputs, fitted: FittedELLA) -> list[float]:
        """The prior precisions that are tried."""
        if self.config.prior_precision is not None:
            return [self.config.prior_precision]
        some = train.spread(fitted.rows_at_once(train.outputs[0].numel())).to(fitted.device)
        size = float(fitted.features(some).square().sum(-1).mean())
        return [(size or 1.0) / prior for prior in PRIORS]

    def _tangent_features(self, tangents: Tensor, batch: Batch) -> Tensor:  # (N, C K)
        return self.jacobian.push(batch, tangents).flatten(1)

    def _blank(self, shapes: Mapping[str, Any]) -> FittedELLA:
        k, size = shapes["directions"]
        last = self.config.weights == "last"
        dtype = torch.float64 if last else next(iter(self.jacobian.weights.values())).dtype
        classes = torch.zeros(k, dtype=torch.long) if last else None
        return FittedELLA(self._blank_likelihood(), torch.zeros(k, size, dtype=dtype), classes)


class FittedELLA(Fitted):
    """Directions in the space of weights, and a root of the covariance of the weights along them."""

    reads = ("features",)
    tangents: Tensor  # (K, P)
    classes: Tensor | None  # (K,), the output of each direction of a last layer
    factor: Tensor  # (K, K)
    prior_precision: Tensor  # ()
    rows_used: Tensor  # (), that G was summed over

    def __init__(self, likelihood: Likelihood, tangents: Tensor, classes: Tensor | None) -> None:
        k, shapes = len(tangents), {"directions": list(tangents.shape)}
        numbers = {"prior_precision": torch.zeros((), dtype=torch.float64), "rows_used": torch.zeros(()).long()}
        factor = torch.zeros(k, k, dtype=torch.float64)
        super().__init__(likelihood, shapes, tangents=tangents, classes=classes, factor=factor, **numbers)

    def rows_at_once(self, outputs: int, *, dense: bool = False) -> int:
        return rows_that_fit(outputs * len(self.factor))

    def features(self, part: Outputs) -> Tensor:  # (N, C, K)
        """J(x) along the directions, in the units of training."""
        outputs, (k, size) = part.outputs[0].numel(), self.tangents.shape
        if self.classes is None:
            phi = features_of(part, outputs * k).unflatten(1, (outputs, -1))
        else:
            along = with_one(features_of(part, size - 1)) @ self.tangents.mT  # (N, K)
            phi = along[:, None] * (torch.arange(outputs, device=along.device)[:, None] == self.classes)
        return phi / self.likelihood.scale[:, None] if isinstance(self.likelihood, Gaussian) else phi

    def predictive(self, part: Outputs, *, covariance: bool = False) -> Predictive:
        """The predictive distribution of some rows."""
        latent = FactorLatent(self.features(part) @ self.factor)
        return self.likelihood.predictive(part.outputs, latent, covariance=covariance)

    def gauss_newton(self, part: Outputs) -> Tensor:  # (K, K)
        """Σ φᵀ Λ φ over some rows, Λ the Hessian of the negative log-likelihood in the outputs; for a noise of one."""
        phi = self.features(part)
        if not isinstance(self.likelihood, Categorical):
            flat = phi.flatten(0, 1)
            return flat.mT @ flat
        temperature = self.likelihood.temperature
        p = (columns(part.outputs) / temperature).softmax(-1)[..., None]
        weighted, mean = (p.sqrt() * phi).flatten(0, 1), (p * phi).sum(1)
        return (weighted.mT @ weighted - mean.mT @ mean) / temperature.square()


def leading(j: Tensor, most: int) -> tuple[Tensor, Tensor]:  # (K, P), (K,)
    """Orthonormal directions that explain most of J Jᵀ, and how much: Jᵀ U Λ^(-½) of its leading eigenvectors."""
    values, vectors = torch.linalg.eigh(products(j, j))
    # What is below the rounding of J is no direction of its own.
    kept = values > values[-1].clamp_min(0.0) * len(j) * torch.finfo(j.dtype).eps
    values, vectors = values[kept].flip(0)[:most], vectors[:, kept].flip(1)[:, :most]
    if not len(values):
        raise DataError("Expected outputs that depend on the weights, got gradients that are all zero.")
    return (vectors * values.rsqrt()).mT.to(j.dtype) @ j, values


def best_on(
    val: Outputs, fitted: FittedELLA, spectra: Mapping[int, tuple[Tensor, Tensor]], precisions: list[float]
) -> tuple[int, float, float]:
    """The rows that G is summed over, the prior precision and the noise under which validation rows are likeliest.
    `spectra` are the eigenvalues (K,) and eigenvectors (K, K) of G over each number of rows, for a noise of one."""
    likelihood = fitted.likelihood
    grid = list(product(precisions, NOISES if isinstance(likelihood, Gaussian) else NOISES[:1]))
    work = len(spectra) * len(grid) * val.outputs[0].numel() * len(fitted.factor)
    some = val.spread(max(1000, WORK // work))
    scores: dict[tuple[int, float, float], float] = defaultdict(float)
    size = fitted.rows_at_once(some.outputs[0].numel())
    for start in range(0, len(some), size):
        part = some[start : start + size].to(fitted.device)
        phi = fitted.features(part)
        for rows, (values, vectors) in spectra.items():
            along = phi @ vectors
            for precision, noise in grid:
                set_relative_noise(likelihood, noise)
                latent = FactorLatent(along * scales(values, precision, noise))
                log_p = likelihood.predictive(part.outputs, latent).log_prob(part.targets)
                scores[rows, precision, noise] += float(log_p.double().sum())
    return max(scores, key=lambda candidate: scores[candidate])


def scales(values: Tensor, precision: float, noise: float) -> Tensor:  # (K,)
    """Standard deviations along the eigenvectors of G, of a posterior (G/σ² + δI)⁻¹."""
    return (values / noise + precision).rsqrt()


def set_relative_noise(likelihood: Likelihood, noise: float) -> None:
    """Sets the σ² of a regression, in units of the mean squared residual."""
    if isinstance(likelihood, Gaussian):
        likelihood.set_noise(noise * likelihood.scale.square())
