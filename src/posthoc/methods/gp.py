"""Gaussian process regression: what one would use without a network, or on what a network leaves unexplained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from posthoc.base import CHUNK, TYPICAL_ROWS, Fitted, Job, Method
from posthoc.collect.outputs import Outputs
from posthoc.config import FeatureConfig, TrainingConfig, option
from posthoc.fmgp.inducing_points import kmeans
from posthoc.fmgp.points import Coordinates, DrawnBatches, PointView, TrainingBatch
from posthoc.kernels import RBF
from posthoc.likelihoods.base import Likelihood, columns
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.methods.laplace.last_layer import require_last_layer
from posthoc.numerics import rows_that_fit
from posthoc.optional import require
from posthoc.predictive.base import Predictive, working_dtype
from posthoc.predictive.latent import IndependentLatent
from posthoc.training import History, Ranks, train

if TYPE_CHECKING:
    from posthoc.methods.gp_processes import Posterior, Process

DEFAULTS: dict[str, dict[str, Any]] = {
    "exact": {"steps": 100, "lr": 0.1, "batch_size": 100},
    "sparse": {"steps": 2000, "lr": 0.02, "batch_size": 256},
}
"""Training options of each kind of process. An exact process takes all the data in each step."""


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


class GP(Method):
    """A Gaussian process with a squared exponential kernel, whose hyper-parameters maximize the marginal likelihood.

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
        require("gpytorch", "gp", "A Gaussian process")

    def _fit(self, job: Job) -> FittedGP:
        fitted, view = self._untrained(job.train, job.device)
        kind, config = fitted.process.kind, self.config
        missing = {name: value for name, value in DEFAULTS[kind].items() if getattr(config, name) is None}
        training = replace(config, **missing).training
        size = len(view) if kind == "exact" else training.batch_size

        def objective(batch: TrainingBatch) -> Tensor:
            return fitted.process.loss(batch.points[config.on], batch.target, fitted.likelihood, job.num_data)

        self.history = train(
            objective,
            fitted.parameters(),
            DrawnBatches(view, fitted.likelihood, size, training.seed, Ranks()),
            training,
            score=partial(fitted.validation_score, job.val) if job.val is not None else None,
            checkpoint=job.checkpoint,
            cuda_graph=False,  # a Cholesky factor that fails has to warn or raise
        )
        return fitted

    def _untrained(self, train: Outputs, device: torch.device) -> tuple[FittedGP, PointView]:
        """An untrained process in the units of the data, and the data as it sees them."""
        from posthoc.methods.gp_processes import Exact, Sparse

        on, typical = self.config.on, train.spread(TYPICAL_ROWS).to(device)
        coordinates = Coordinates.of(typical, RBF(on=on), standardize=True)
        residual, center = train.only(on), None
        if self.config.mean == "zero":
            assert typical.targets is not None
            center = columns(typical.targets).mean(0)
            means = center.to(train.outputs.device).expand(len(train), -1)
            residual = residual.with_outputs(means.reshape(train.outputs.shape))
        likelihood = self._start_likelihood(residual, device)
        view, outputs = PointView(residual, coordinates), train.outputs[0].numel()
        process: Process
        if len(train) ** 2 * outputs <= self.config.exact_up_to**2:
            everything = view.batch(likelihood, view.outputs)
            process = Exact(everything.points[on], everything.target)
        else:
            generator = torch.Generator().manual_seed(self.config.seed)
            process = Sparse(kmeans(view, self.config.num_inducing, generator)[on].to(device), outputs)
        return FittedGP(process, coordinates, likelihood, center), view

    def _reads(self) -> tuple[str, ...]:
        if self.config.on == "features":
            require_last_layer(self.backbone)
        return (self.config.on,)

    def _blank(self, shapes: Mapping[str, Any]) -> FittedGP:
        from posthoc.methods.gp_processes import Exact, Sparse

        points, width, outputs = shapes["shape"]
        x = torch.zeros(points, width, dtype=torch.float64)
        center = x.new_zeros(outputs) if self.config.mean == "zero" else None
        process = Exact(x, x.new_zeros(points, outputs)) if shapes["kind"] == "exact" else Sparse(x, outputs)
        return FittedGP(process, Coordinates({self.config.on: width}, self.config.on), self._blank_likelihood(), center)


class FittedGP(Fitted):
    """A process, the units of its coordinates, and the mean of its prior (C,), or None where that is the network."""

    likelihood: Gaussian
    process: Process
    coordinates: Coordinates
    center: Tensor | None

    posterior: Posterior | None = None  # computed once: that of an exact process takes as long as a step of the fit

    def __init__(self, process: Process, units: Coordinates, likelihood: Likelihood, center: Tensor | None) -> None:
        shapes = {"kind": process.kind, "shape": list(process.shape)}
        super().__init__(likelihood, shapes, process=process, coordinates=units, center=center)
        self.reads = units.spaces

    def rows_at_once(self, outputs: int, *, dense: bool) -> int:
        return rows_that_fit(self.process.shape[0] * outputs)

    def predictive(self, outputs: Outputs, *, covariance: bool = False) -> Predictive:
        """The predictive distribution of some rows, in the user's units."""
        if self.posterior is None:
            self.posterior = self.process.posterior(self.likelihood)
        (points,) = self.coordinates.points(outputs).values()
        mean, variance = self.posterior(points)
        prior = columns(outputs.outputs) if self.center is None else self.center
        moved = (prior + self.likelihood.scale * mean).to(working_dtype(outputs.outputs)).reshape_as(outputs.outputs)
        return self.likelihood.predictive(moved, IndependentLatent(variance), covariance=covariance)

    def validation_score(self, val: Outputs) -> float:
        """Minus the mean log-probability of the validation targets, while the process is trained."""
        parts = (val[rows].to(self.device) for rows in torch.arange(len(val)).split(CHUNK))
        self.posterior = None
        total = sum(float(self.predictive(part).log_prob(part.targets).sum()) for part in parts)
        self.posterior = None
        return -total / len(val)
