"""Gaussian process regression: what one would use without a network, or on what a network leaves unexplained."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from posthoc.base import FeatureConfig, Fitted, Job, Method, TrainingConfig, option
from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError, LayerError
from posthoc.fmgp.coordinates import Coordinates, location_and_scale
from posthoc.fmgp.inducing_points import kmeans
from posthoc.fmgp.minibatches import DrawnBatches, PointView
from posthoc.fmgp.objective import TrainingBatch
from posthoc.likelihoods.base import Likelihood, columns
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.numerics import rows_that_fit
from posthoc.optional import require
from posthoc.predictive.base import Predictive, working_dtype
from posthoc.predictive.latent import IndependentLatent
from posthoc.training import History, Ranks, Training, train

if TYPE_CHECKING:
    from posthoc.methods.gp_processes import Posterior, Process

__all__ = ["GP"]

DEFAULTS: dict[str, dict[str, Any]] = {
    "exact": {"steps": 100, "lr": 0.1},
    "sparse": {"steps": 2000, "lr": 0.02, "batch_size": 256},
}
"""Training options that were not given: few steps on all the data, or many on mini-batches."""
TYPICAL = 2**16
"""Rows that units are taken from."""


@dataclass(frozen=True, kw_only=True)
class GPConfig(FeatureConfig, TrainingConfig):
    """Options of `GP`."""

    mean: Literal["network", "zero"] = "network"
    on: Literal["inputs", "features"] = "inputs"
    exact_up_to: int = option(5000, least=0)
    num_inducing: int = option(500, least=1)
    steps: int | None = option(None, least=0)  # type: ignore[assignment]
    batch_size: int | None = option(None, least=1)  # type: ignore[assignment]
    lr: float | None = option(None, above=0.0)  # type: ignore[assignment]

    def resolved(self, kind: str) -> Training:
        """The training options of an "exact" or a "sparse" process."""
        given = {name: value for name in DEFAULTS["sparse"] if (value := getattr(self, name)) is not None}
        return replace(self, **{"batch_size": 100, **DEFAULTS[kind], **given}).training


class GP(Method):
    """A Gaussian process with a squared exponential kernel, its hyper-parameters by marginal likelihood.

    It is exact, or has inducing points where there are more data than it can hold. Its mean is not the network's.
    (`num_data` of `fit` is for inducing points: an exact process counts every point once.) The file of an exact process
    holds all the data of the fit, inputs and residuals; of a sparse one, inducing points, which are close to them.
    Needs GPyTorch: pip install 'posthoc[gp]'.

    Args:
        model: An `nn.Module`, a callable that returns a tensor, or None to work from `Outputs` with inputs.
        likelihood: "regression" (the default), or a `Gaussian`.
        mean: The mean of the prior: "network" (the process is then of the network's residuals), or "zero" (the mean of
            the targets, so that their origin does not matter).
        on: What the kernel is a function of, standardized: "inputs" or "features".
        exact_up_to: The largest number of points of an exact process, whose covariance is a matrix of as many rows
            and columns. With C outputs there are C of these, so the limit is √C times lower.
        num_inducing: The number of inducing points beyond that.
        layer: The module whose output is taken as features. By default the input of the last `nn.Linear` is.
        steps: By default 100 of an exact process, and 2,000 of a sparse one.
        batch_size: Points in a step of a sparse process (256 by default); an exact one uses all of them.
        lr: By default 0.1 of an exact process, and 0.02 of a sparse one.
        seed, eval_every, patience, progress: See `TrainingConfig`.
        device: Where the fitted method computes.
    """

    name = "gp"
    Config = GPConfig
    config: GPConfig
    tasks = ("regression",)
    fixed_mean = False
    trains = True
    history = History()
    """The losses and validation scores of the last fit."""

    def __init__(self, model: Any = None, likelihood: str | Likelihood | None = None, **options: Any) -> None:
        super().__init__(model, likelihood, **options)
        self._posterior: Posterior | None = None
        require("gpytorch", "gp", "A Gaussian process")

    def _fit(self, job: Job) -> FittedGP:
        if job.train.space(self.config.on) is None:
            other = "features" if self.config.on == "inputs" else "inputs"
            raise DataError(
                f'Expected {self.config.on} for the kernel to look at, got none. Give them, or use on="{other}".'
            )
        device = self._home(job.train.outputs.device)
        outputs = job.train.only(self.config.on)
        fitted = self._started(outputs, device)
        kind = fitted.process.shape()["kind"]
        training = self.config.resolved(kind)
        view = PointView(with_prior(outputs, fitted.centre), fitted.coordinates)
        size = len(outputs) if kind == "exact" else training.batch_size
        source = DrawnBatches(view, fitted.likelihood, size, training.seed, Ranks())

        def objective(batch: TrainingBatch) -> Tensor:
            return fitted.process.loss(batch.points[self.config.on], batch.target, fitted.likelihood, job.num_data)

        history = train(
            objective,
            fitted.parameters(),
            source,
            training,
            score=validation_score(fitted, job.val) if job.val is not None else None,
            checkpoint=job.checkpoint,
            cuda_graph=False,  # a Cholesky factor that fails has to warn or raise
        )
        self.history, self._posterior = history, None
        return fitted

    def _started(self, outputs: Outputs, device: torch.device) -> FittedGP:
        """An untrained process in the units of the data."""
        from posthoc.methods.gp_processes import Exact, Sparse

        typical = outputs.spread(TYPICAL).to(device)
        points = typical.space(self.config.on)
        assert points is not None
        assert typical.targets is not None
        coordinates = Coordinates({self.config.on: points.shape[1]}, self.config.on).to(device)
        location, scale = location_and_scale(points)
        coordinates.get_buffer(f"{self.config.on}_location").copy_(location)
        coordinates.get_buffer(f"{self.config.on}_scale").copy_(scale)
        centre = columns(typical.targets).mean(0) if self.config.mean == "zero" else None
        likelihood = copy.deepcopy(self._likelihood).to(device)
        assert isinstance(likelihood, Gaussian)
        likelihood.initialize(with_prior(typical, centre).outputs, typical.targets)
        num_outputs = outputs.outputs[0].numel()
        view = PointView(with_prior(outputs, centre), coordinates)
        process: Process
        if len(outputs) ** 2 * num_outputs <= self.config.exact_up_to**2:
            everything = view.batch(likelihood, slice(None))
            process = Exact(everything.points[self.config.on], everything.target)
        else:
            generator = torch.Generator().manual_seed(self.config.seed)
            process = Sparse(kmeans(view, self.config.num_inducing, generator)[self.config.on].to(device), num_outputs)
        return FittedGP(process, coordinates, likelihood, centre)

    def _predictor(self, fitted: FittedGP, *, covariance: bool) -> Callable[[Outputs], Predictive]:
        if self._posterior is None:  # computed once: that of an exact process takes as long as a step of the fit
            self._posterior = fitted.posterior()
        posterior = self._posterior

        def predict(outputs: Outputs) -> Predictive:
            home = outputs.outputs.device
            predictive = fitted.predictive(outputs.to(fitted.device), posterior, covariance=covariance)
            return predictive if fitted.device == home else predictive.to(home)

        return predict

    def _rows_at_once(self) -> int:
        assert isinstance(self._fitted, FittedGP)
        shapes = self._fitted.shapes()
        return min(super()._rows_at_once(), rows_that_fit(shapes["points"] * shapes["outputs"]))

    def _needs(self, *, fitted: bool) -> tuple[bool, bool]:
        features = self.config.on == "features"
        if features and self.backbone is not None and not self.backbone.has_features:
            raise LayerError(
                "Expected a model with a layer to take features from; found none. Name one with layer=..., or use "
                'on="inputs".'
            )
        return features, not features

    def _blank(self, shapes: Mapping[str, Any]) -> FittedGP:
        from posthoc.methods.gp_processes import rebuilt

        likelihood = self._blank_likelihood()
        assert isinstance(likelihood, Gaussian)
        centre = torch.zeros(shapes["outputs"], dtype=torch.float64) if self.config.mean == "zero" else None
        coordinates = Coordinates({self.config.on: shapes["width"]}, self.config.on)
        return FittedGP(rebuilt(**shapes), coordinates, likelihood, centre)


class FittedGP(Fitted):
    """A process, the units of its coordinates, and the mean of its prior."""

    likelihood: Gaussian

    def __init__(self, process: Process, coordinates: Coordinates, likelihood: Gaussian, centre: Tensor | None) -> None:
        super().__init__(likelihood)
        self.process, self.coordinates = process, coordinates
        self.register_buffer("centre", centre)  # (C,), or None where the network is the prior
        self.centre: Tensor | None

    def shapes(self) -> dict[str, Any]:
        return self.process.shape()

    def posterior(self) -> Posterior:
        return self.process.posterior(self.likelihood)

    def predictive(self, outputs: Outputs, posterior: Posterior, *, covariance: bool = False) -> Predictive:
        """What the posterior says of some rows, in the user's units."""
        mean, variance = posterior(self.coordinates.points(outputs)[self.coordinates.default])
        prior, dtype = with_prior(outputs, self.centre).outputs, working_dtype(outputs.outputs)
        moved = (columns(prior) + self.likelihood.scale * mean).to(dtype).reshape(outputs.outputs.shape)
        return self.likelihood.predictive(moved, IndependentLatent(variance), covariance=covariance)


def with_prior(outputs: Outputs, centre: Tensor | None) -> Outputs:
    """The outputs, replaced by the mean of the prior where that is not the network's."""
    if centre is None:
        return outputs
    shape, device = outputs.outputs.shape, outputs.outputs.device
    return outputs.with_outputs(centre.to(device).expand(len(outputs), -1).reshape(shape))


def validation_score(fitted: FittedGP, val: Outputs) -> Callable[[], float]:
    """Minus the mean log-probability of the validation data, as `predict` would give it."""

    @torch.no_grad()
    def score() -> float:
        posterior, total = fitted.posterior(), 0.0
        for rows in torch.arange(len(val)).split(1024):
            part = val[rows].to(fitted.device)
            total -= float(fitted.predictive(part, posterior).log_prob(part.targets).sum())
        return total / len(val)

    return score
