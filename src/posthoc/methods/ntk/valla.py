"""VaLLA: the linearized Laplace approximation as a sparse variational Gaussian process (Ortega et al., 2024): FMGP
with the neural tangent kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from posthoc.base import Job
from posthoc.collect.loaders import Batch
from posthoc.collect.outputs import Outputs
from posthoc.config import TrainingConfig, option
from posthoc.errors import OptionError
from posthoc.fmgp.build import START, train_fitted
from posthoc.fmgp.estimator import decode_points, encode_classes, encode_points
from posthoc.fmgp.fitted import FittedFMGP
from posthoc.fmgp.inducing_points import Inducing, initial_inducing
from posthoc.fmgp.output_covariance import OutputCovariance
from posthoc.fmgp.points import Coordinates, PointView
from posthoc.fmgp.process import Correction, Process, correction
from posthoc.fmgp.selection import VarianceForm
from posthoc.kernels import Points
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.likelihoods.registry import make_likelihood
from posthoc.methods.laplace.laplace import set_best_power
from posthoc.methods.laplace.last_layer import find_last_layer
from posthoc.methods.ntk.base import NTKConfig, NTKMethod
from posthoc.methods.ntk.ntk import LastLayerNTK, products
from posthoc.numerics import rows_that_fit
from posthoc.predictive.latent import DenseLatent, Latent
from posthoc.training import History, Ranks
from posthoc.validation import choice

POWERS = range(-3, 6)
"""Powers of ten that the initial σ₀² is multiplied by, to find the best one on validation data."""


@dataclass(frozen=True, kw_only=True)
class VaLLAConfig(NTKConfig, TrainingConfig):
    """Options of `VaLLA`."""

    inducing: Any = option("kmeans", encode=encode_points, decode=decode_points)
    inducing_classes: Any = option(None, encode=encode_classes)
    alpha: float = option(1.0, least=0.0, most=1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.inducing, str):
            choice("inducing", self.inducing, ("kmeans", "random"))
        if self.weights == "all" and not (self.inducing_classes is None and isinstance(self.inducing, str)):
            raise OptionError('With weights="all" inducing points are drawn from the data: leave them out.')


class VaLLA(NTKMethod):
    """A Gaussian process around the network with its tangent kernel, σ₀² J(x) J(x')ᵀ, as covariance.

    This is the posterior of the linearized network, by M inducing points and M x M numbers that are learned as FMGP
    learns its own. It overfits: give `val`, and it starts with the σ₀² and stops at the step where that is likeliest.
    Each inducing point belongs to one output. For the last layer the points are learned, in the space of features.
    With `weights="all"` they stay random points of the data, and the kernel is evaluated once for each point.

    Args:
        model: An `nn.Module`, or with `weights="last"` any callable, or None to work from `Outputs` with features.
        likelihood: "regression", "classification", or a `Gaussian` or `Categorical` with options of its own. By name
            alone, a classifier's temperature is 1 and not learned.
        weights: "last" for those of the last linear layer, in closed form, or "all" that are not frozen, by
            `torch.func`.
        inducing: With `weights="last"`: "kmeans", "random", or your own points, (M, D).
        inducing_classes: The output of each inducing point, where the points are your own.
        num_inducing: The largest number M of inducing points.
        prior_precision: 1/σ₀². By default it is learned.
        alpha: The divergence, from 0 (the ELBO) to 1.
        max_gigabytes: The most memory that gradients and kernels may take with `weights="all"`.
        layer: The module whose output the last layer reads. By default the input of the last `nn.Linear` is.
        steps, batch_size, lr, seed, eval_every, patience, progress: See `TrainingConfig`.
        device: Where the fitted method computes.

    Example:
        >>> import torch
        >>> from posthoc import VaLLA
        >>> model, x, y = torch.nn.Sequential(torch.nn.Linear(2, 1)), torch.randn(20, 2), torch.randn(20, 1)
        >>> VaLLA(model, "regression", num_inducing=5, steps=3).fit(x, y).predict(x).std.shape
        torch.Size([20, 1])
    """

    name = "valla"
    Config = VaLLAConfig
    config: VaLLAConfig
    trains = True
    history = History()
    """The losses and validation scores of the last fit."""

    def _suited(self, likelihood: Any) -> Likelihood:
        suited = make_likelihood(likelihood)
        if isinstance(suited, Categorical) and not isinstance(likelihood, Likelihood):
            suited = Categorical(temperature=1.0)
        suited.check_alpha(self.config.alpha)
        return suited

    @property
    def prior_precision(self) -> float:
        """1/σ₀² as learned or given, in the units of the weights."""
        kernel = self._require_fitted("prior_precision").process.kernel
        return float(kernel.log_variance.detach().neg().exp())

    def _fit(self, job: Job) -> FittedVaLLA:
        if self._likelihood.draws and not Ranks().alone:
            raise OptionError('Monte Carlo training draws in one process: use training="pairwise" with several.')
        likelihood, tangents = self._start_likelihood(job.train, job.device), None
        if self.config.weights == "all":
            tangents = self._draw_gradients(job, self.config.num_inducing + job.train.outputs[0].numel())
            job = self._with_features(job, tangents[0])
        train = job.train.only("features")
        fitted = self._untrained(train, likelihood, tangents)
        if job.val is not None and self.config.prior_precision is None and self.config.steps:
            # Data that the network has memorized only ever ask for less variance: where training starts is then as
            # important as where it stops.
            log_variance = fitted.process.kernel.get_parameter("log_variance")
            set_best_power(log_variance, POWERS, fitted.validation_score(job.val))
        view, form = PointView(train, fitted.coordinates), VarianceForm("per_output")
        self.history = train_fitted(fitted, job, form, self.config.alpha, self.config.training, view)
        return fitted

    def _untrained(self, train: Outputs, likelihood: Likelihood, tangents: tuple[Tensor, Tensor] | None) -> FittedVaLLA:
        """The process before training. Its outputs have a mean prior variance of one, unless σ₀² is given.

        `tangents` are the gradients at the inducing points and their outputs, of a kernel of all weights.
        """
        config, device = self.config, next(likelihood.parameters()).device
        generator = torch.Generator().manual_seed(config.seed)
        units = torch.ones(train.outputs[0].numel(), dtype=torch.float64, device=device)
        units = units / likelihood.scale if isinstance(likelihood, Gaussian) else units
        # Also refuses features that are not the last layer's.
        bias = tangents is not None or find_last_layer(self.backbone, train, device).bias is not None
        kernel = LastLayerNTK(bias=bias).to(device)
        assert train.features is not None
        coordinates = Coordinates({"features": train.features.shape[1]}, "features").to(device)
        view = PointView(train, coordinates)
        sample = view.sample(1000, generator)
        process: Process
        if tangents is not None:
            gradients, owners = tangents
            process = TangentProcess(kernel, products(gradients, gradients).to(device), owners.to(device), units)
            size = process.split(sample["features"])[1].diagonal(dim1=1, dim2=2).mean(0)
        else:
            points, classes = config.inducing, config.inducing_classes
            inducing = initial_inducing(points, classes, config.num_inducing, view, len(units), generator)
            process = Process(kernel, inducing, len(units), independent_outputs(units), start=START)
            size = kernel.diag(sample).mean().detach()
        precision = config.prior_precision or float((size * units.square()).mean().clamp_min(1e-300))
        nn.init.constant_(kernel.log_variance, -math.log(precision))
        kernel.requires_grad_(config.prior_precision is None)
        return FittedVaLLA(process, coordinates, likelihood, gradients=tangents[0] if tangents is not None else None)

    def _tangent_features(self, tangents: Tensor, batch: Batch) -> Tensor:  # (N, C M + C C)
        """The tangent kernel of a point's outputs, with the inducing points and among themselves, for σ₀² = 1."""
        parts = []
        for j in self.jacobian.written(batch):
            cross = products(j.flatten(0, 1), tangents.to(j.device))
            parts.append(torch.cat([cross.reshape(len(j), -1), products(j, j).flatten(1)], -1))
        return torch.cat(parts)

    def _blank(self, shapes: Mapping[str, Any]) -> FittedVaLLA:
        likelihood, outputs = self._blank_likelihood(), math.prod(self._width or ())
        kernel = LastLayerNTK(bias=shapes["kernel"]["bias"])
        if self.config.weights == "last":
            return FittedVaLLA.blank(shapes, kernel, likelihood, outputs)
        owners, units = torch.tensor(shapes["owners"]), torch.ones(outputs, dtype=torch.float64)
        process = TangentProcess(kernel, units.new_zeros(len(owners), len(owners)), owners, units)
        gradients = next(iter(self.jacobian.weights.values())).new_zeros(len(owners), self.jacobian.size)
        return FittedVaLLA(process, Coordinates(shapes["spaces"], "features"), likelihood, gradients=gradients)


class FittedVaLLA(FittedFMGP):
    """A fitted process and, with `weights="all"`, the gradients at its inducing points."""

    def __init__(self, *parts: Any, gradients: Tensor | None = None, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.register_buffer("tangents", gradients)  # (M, P)
        self.tangents: Tensor

    def rows_at_once(self, outputs: int, *, dense: bool) -> int:
        expanded = outputs if dense or self.tangents is not None else 1
        return rows_that_fit(expanded * len(self.process.l_raw))


class TangentProcess(Process):
    """A process whose points come with their kernels, as `VaLLA._tangent_features` gives them. `among` (M, M) is the
    tangent kernel among the inducing points, in the place of their coordinates; `owners` (M,) are their outputs, in
    ascending order; `units` (C,) turn outputs into units of training."""

    coupling: OutputCovariance

    def __init__(self, kernel: LastLayerNTK, among: Tensor, owners: Tensor, units: Tensor) -> None:
        inducing = Inducing({"features": among}, owners)
        super().__init__(kernel, inducing, len(units), independent_outputs(units), start=START)
        self.z.requires_grad_(False)

    def split(self, features: Tensor) -> tuple[Tensor, Tensor]:  # (N, C, M) and (N, C, C)
        """The kernels of points with the inducing points, and among their outputs."""
        c = self.num_outputs
        cross, prior = features.split([c * len(self.l_raw), c * c], -1)
        return cross.unflatten(-1, (c, -1)), prior.unflatten(-1, (c, c))

    def forward(self, x: Points) -> tuple[Latent, Tensor]:
        w, kl = self._correction(self.z["features"])
        return self._tangent_latent(x, w), kl

    def latent(self, x: Points) -> Latent:
        return self._tangent_latent(x, self.prepared().w)

    def _among(self) -> Tensor:
        return self.z["features"]

    def _tangent_latent(self, x: Points, w: Tensor) -> Latent:
        (cross, prior), scale = self.split(x["features"]), self._scale()
        known = (scale[:, None] * scale[self.z_class] * cross) @ w.mT  # (N, C, M)
        return DenseLatent(scale[:, None] * scale * prior - known @ known.mT)

    def _correction(self, kzz: Tensor) -> Correction:
        scale = self._scale()[self.z_class]
        return correction(self.chol, scale[:, None] * scale * kzz)

    def _scale(self) -> Tensor:  # (C,)
        """σ₀ in the units of training of each output."""
        return (self.coupling.diagonal() * self.kernel.get_parameter("log_variance").exp()).sqrt()


def independent_outputs(units: Tensor) -> OutputCovariance:
    """B as the tangent kernel of a last layer has it: outputs that are independent, each in its unit of training."""
    coupling = OutputCovariance(len(units), 1).to(units.device).requires_grad_(False)
    coupling.factor.zero_()
    coupling.log_diagonal.copy_(units.square().log())
    return coupling
