"""SNGP: a Gaussian process of random features in place of the last layer, on layers of bounded spectral norm."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from posthoc.base import Fitted, Job
from posthoc.collect.class_scores import as_logits
from posthoc.collect.loaders import Batch
from posthoc.collect.network import evaluating, exclusive
from posthoc.config import TrainingConfig, option
from posthoc.likelihoods.base import Likelihood, columns
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.methods.laplace.last_layer import find_last_layer
from posthoc.methods.weights.network import FinetunedMethod, normal
from posthoc.numerics import cholesky
from posthoc.predictive.base import Predictive
from posthoc.predictive.latent import IndependentLatent

START_NOISE = 0.01
"""The first weights reproduce the network's outputs but for about this share of their variance."""
FIRST_ITERATIONS = 30
"""Power iterations before training; one more at every step."""


@dataclass(frozen=True, kw_only=True)
class SNGPConfig(TrainingConfig):
    """Options of `SNGP`."""

    num_features: int = option(1024, least=1)
    lengthscale: float | None = option(None, above=0.0)
    norm_bound: float = option(6.0, above=0.0)
    prior_precision: float = option(1.0, above=0.0)
    prediction: Literal["mean_field", "monte_carlo"] = "mean_field"
    samples: int = option(64, least=2)
    lr: float = option(1e-5, above=0.0)


class SNGP(FinetunedMethod):
    """Spectral-normalized neural Gaussian process (Liu et al. 2020), from a trained network.

    In a copy of the network, the last `nn.Linear` is replaced by a linear layer on random Fourier features of its
    input, and the spectral norms of the other layers' weights are bounded. The new layer starts at the ridge
    regression of the network's own outputs; the copy is fine-tuned, and a Laplace approximation gives the covariance of
    the new layer's weights in one last pass:

        (τI + Σ p(1-p) φφᵀ)⁻¹, p the top class's probability (one covariance for all classes, as in the paper), or
        (τI + Σ φφᵀ/σ²)⁻¹ in regression, σ² the mean squared residual.

    The mean is the copy's output, not the network's. Frozen parameters stay as they are, and are not bounded.

    Args:
        model: An `nn.Module` whose output is that of its last `nn.Linear`.
        likelihood: "regression", "classification", or a `Gaussian` or `Categorical`.
        num_features: The number of random features.
        lengthscale: Of the kernel that they approximate. By default the root mean square distance between features.
        norm_bound: The largest spectral norm of a weight; a convolution's is that of its (out, in × kernel) matrix.
        prior_precision: τ, in units of the variance of the network's outputs over the data.
        prediction: "mean_field", softmax(f/√(1 + π/8 variance)) and in regression the exact Gaussian, or
            "monte_carlo".
        samples: Draws of the last layer's weights for "monte_carlo".
        steps, batch_size, lr, seed, eval_every, patience, progress: See `TrainingConfig`. The learning rate is small
            since BatchNorm keeps its statistics: with 0.001 a ResNet20 fell from 93 % to 10 % accuracy.
        device: Where a network without weights computes.

    Example:
        >>> import torch
        >>> from posthoc import SNGP
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        >>> x, y = torch.randn(20, 2), torch.randn(20, 1)
        >>> SNGP(model, "regression", steps=2, num_features=8).fit(x, y).predict(x).std.shape
        torch.Size([20, 1])
    """

    name = "sngp"
    Config = SNGPConfig
    config: SNGPConfig

    def _check_parts(self) -> None:
        self._require_layers(self.backbone.takes_input, "a last Linear layer")
        self._last = str(self.backbone.layer)

    @property
    def network(self) -> nn.Module:
        """The fine-tuned copy."""
        network: nn.Module = self._require_fitted("network").network
        return network

    def _reads(self) -> tuple[str, ...]:
        return ("features",)

    def _finetune(self, job: Job) -> Fitted:
        find_last_layer(self.backbone, job.train, job.device)  # refuses a network that does not end in this layer
        likelihood = self._start(job).requires_grad_(False)
        generator = torch.Generator().manual_seed(self.config.seed)
        network = copy.deepcopy(self.module).eval()
        bound_layers(network, self._last, self.config.norm_bound, generator)
        features, linear = self._replace_last(network, generator)
        outputs = columns(job.train.outputs)[:, -linear.out_features :]  # a single logit is the last of two
        with torch.no_grad():
            self._ridge(network, features, linear, outputs.mean(0), job)
        variance = outputs.var(0, unbiased=False)
        if isinstance(likelihood, Categorical):
            variance = variance.mean().expand_as(variance)
        prior = self.config.prior_precision / torch.where(variance > 0, variance, 1.0)
        self.history = self._minimize(
            job,
            likelihood,
            [p for p in network.parameters() if p.requires_grad],
            answer=lambda batch: self._answer(network, batch),
            penalty=lambda: 0.5 * (prior[:, None] * linear.weight.double().square()).sum(),
            draw=lambda batch: self._answer(network, batch)[None],
        )
        settle_bounds(network)
        with torch.no_grad():
            basis, variances = self._laplace(network, linear, likelihood, prior, job)
        return Fitted(likelihood, network=network.requires_grad_(False), basis=basis, variances=variances)

    def _run(self, network: nn.Module, layer: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:  # (N, F), (N, ...)
        """The input of a layer, in float64, and the output of the network."""
        inputs: list[Tensor] = []
        with layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].double())):
            outputs = self._answer(network, batch)
        return inputs[0], outputs

    def _replace_last(self, network: nn.Module, generator: Any = None) -> tuple[RandomFeatures, nn.Linear]:
        """Puts random features and a linear layer of zeros in place of the last layer."""
        old: Any = network.get_submodule(self._last)
        features = RandomFeatures(old.in_features, self.config.num_features, generator)
        linear = nn.utils.skip_init(nn.Linear, self.config.num_features, old.out_features)
        for parameter in linear.parameters():
            nn.init.zeros_(parameter)
        network.set_submodule(self._last, nn.Sequential(features, linear).to(old.weight).eval())
        return features, linear

    def _ridge(self, network: nn.Module, features: RandomFeatures, linear: nn.Linear, mean: Tensor, job: Job) -> None:
        """Sets the lengthscale and, by ridge regression, first weights that reproduce the network's outputs."""
        lengthscale = self.config.lengthscale
        if lengthscale is None:
            h = torch.cat([self._run(network, features, batch)[0] for batch in self._batches(job.data)])
            lengthscale = float((2.0 * h.var(0, unbiased=False).sum()).sqrt()) or 1.0
        features.lengthscale.fill_(lengthscale)
        gram = torch.zeros(linear.in_features, linear.in_features, dtype=torch.float64, device=mean.device)
        cross = gram.new_zeros(len(gram), len(mean))
        with evaluating(self.module), exclusive(self.module):
            for batch in self._batches(job.data):
                phi, _ = self._run(network, linear, batch)
                outputs = columns(self._answer(self.module, batch))[:, -len(mean) :]
                gram += phi.mT @ phi
                cross += phi.mT @ (outputs - mean)
        gram.diagonal().add_(START_NOISE * self.config.prior_precision)
        linear.bias.copy_(mean)
        linear.weight.copy_(torch.cholesky_solve(cross, cholesky(gram, "the random features' Gram matrix")).mT)

    def _laplace(
        self, network: nn.Module, linear: nn.Linear, likelihood: Likelihood, prior: Tensor, job: Job
    ) -> tuple[Tensor, Tensor]:  # (D, D), (D, C)
        """The covariance U diag(v_c) Uᵀ of the last layer's weights for output c; sets the noise in regression."""
        gram = torch.zeros(linear.in_features, linear.in_features, dtype=torch.float64, device=prior.device)
        squares, rows = torch.zeros_like(prior), len(job.train)
        for batch in self._batches(job.data):
            phi, outputs = self._run(network, linear, batch)
            weight = torch.ones_like(phi[:, 0])
            if isinstance(likelihood, Categorical):
                p = (outputs.double() / likelihood.temperature).softmax(-1).amax(-1)
                weight = p * (1.0 - p) / likelihood.temperature.square()
            else:
                squares += columns(likelihood.check_targets(batch.target, outputs) - outputs).square().sum(0)
            gram += (weight[:, None] * phi).mT @ phi
        precision = torch.ones_like(prior)
        if isinstance(likelihood, Gaussian):
            likelihood.set_noise(squares / rows)
            precision = 1.0 / (likelihood.noise * likelihood.scale.square()).expand_as(prior)
        # The Gram matrix is the same for all outputs: one eigendecomposition serves them.
        values, basis = torch.linalg.eigh(gram * (job.num_data / rows))
        return basis, 1.0 / (prior + values.clamp_min(0.0)[:, None] * precision)

    def _features(self, fitted: Any, batch: Batch) -> tuple[Tensor, Tensor]:  # (N, D), (N, ...)
        """The random features of a batch in the basis of the covariance, and the outputs of the copy."""
        fitted.to(self.backbone.device)
        phi, outputs = self._run(fitted.network, fitted.network.get_submodule(f"{self._last}.1"), batch)
        return phi @ fitted.basis, outputs

    def _batch_predictor(self, fitted: Any, *, covariance: bool) -> Callable[[Batch], Predictive]:
        if self.config.prediction == "monte_carlo":
            return super()._batch_predictor(fitted, covariance=covariance)
        likelihood = copy.deepcopy(fitted.likelihood).to(self.backbone.device)
        unit = likelihood.scale.square() if isinstance(likelihood, Gaussian) else 1.0
        if isinstance(likelihood, Categorical):
            likelihood.prediction_form = "logit_scaling"

        def predict(batch: Batch) -> Predictive:
            phi, outputs = self._features(fitted, batch)
            variance = in_shape(phi.square() @ fitted.variances, outputs)
            return likelihood.predictive(outputs, IndependentLatent(variance / unit), covariance=covariance)

        return predict

    def _draws(self, fitted: Any, batch: Batch) -> Tensor:  # (S, N, ...)
        phi, outputs = self._features(fitted, batch)
        generator = torch.Generator(phi.device).manual_seed(self.config.seed)
        std = fitted.variances.sqrt()
        weights = (normal(std, generator) for _ in range(self.config.samples))  # the same for every batch
        return torch.stack([outputs + in_shape(phi @ w, outputs).reshape(outputs.shape).to(outputs) for w in weights])

    def _blank(self, shapes: Mapping[str, Any]) -> Fitted:
        network = copy.deepcopy(self.module).eval().requires_grad_(False)
        _, linear = self._replace_last(network)
        basis, variances = (torch.zeros(linear.in_features, n).double() for n in linear.weight.T.shape)
        return Fitted(self._blank_likelihood(), network=network, basis=basis, variances=variances)


class RandomFeatures(nn.Module):
    """φ(h) = √(2/D) cos(W h / lengthscale + b), W standard normal, b uniform: φ(h)ᵀφ(h') ≈ exp(-|h - h'|² / 2ℓ²)."""

    def __init__(self, width: int, num_features: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.register_buffer("frequency", torch.randn(num_features, width, generator=generator))
        self.register_buffer("phase", 2.0 * math.pi * torch.rand(num_features, generator=generator))
        self.register_buffer("lengthscale", torch.ones(()))
        self.frequency: Tensor  # (D, F)
        self.phase: Tensor  # (D,)
        self.lengthscale: Tensor  # ()

    def forward(self, h: Tensor) -> Tensor:  # (N, F) -> (N, D)
        angle = nn.functional.linear(h / self.lengthscale, self.frequency, self.phase)
        return math.sqrt(2.0 / len(self.phase)) * angle.cos()


class SpectralBound(nn.Module):
    """A parametrization that scales a weight down to a spectral norm of `bound` where it has a greater one, by power
    iteration. A convolution's weight is taken as the matrix (out, in × kernel), as is usual."""

    def __init__(self, weight: Tensor, bound: float, generator: torch.Generator) -> None:
        super().__init__()
        self.bound = bound
        self.register_buffer("left", torch.randn(len(weight), generator=generator).to(weight))
        self.left: Tensor  # (out,)
        self._iterate(weight, FIRST_ITERATIONS)

    @torch.no_grad()
    def _iterate(self, weight: Tensor, times: int) -> Tensor:  # (in × kernel,)
        """Updates the singular vectors, and returns the right one."""
        matrix, left = weight.flatten(1), self.left
        for _ in range(times):
            right = nn.functional.normalize(matrix.mT @ left, dim=0)
            left = nn.functional.normalize(matrix @ right, dim=0)
        self.left = left  # a new tensor: the graph of an earlier use keeps its own
        return right

    def forward(self, weight: Tensor) -> Tensor:
        right = self._iterate(weight, 1)
        norm = self.left @ (weight.flatten(1) @ right)
        return weight / (norm / self.bound).clamp_min(1.0)


def bound_layers(network: nn.Module, last: str, bound: float, generator: torch.Generator) -> None:
    """Bounds the weights of the Linear and convolution layers of a network, except the last one and frozen ones."""
    for name, layer in list(network.named_modules()):
        if name != last and isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            weight = layer._parameters.get("weight")
            if weight is not None and weight.requires_grad:
                parametrize.register_parametrization(layer, "weight", SpectralBound(weight, bound, generator))


@torch.no_grad()
def settle_bounds(network: nn.Module) -> None:
    """Replaces bounded weights by ordinary ones that are exactly within the bound."""
    layers: list[Any] = [layer for layer in network.modules() if parametrize.is_parametrized(layer, "weight")]
    for layer in layers:
        if isinstance(bound := layer.parametrizations.weight[0], SpectralBound):
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
            weight = layer.get_parameter("weight")
            norm = torch.linalg.matrix_norm(weight.flatten(1).double(), 2)
            weight.div_((norm / bound.bound).clamp_min(1.0).to(weight.dtype))


def in_shape(values: Tensor, outputs: Tensor) -> Tensor:
    """Values of the last layer's outputs as values of the network's: a single logit is the second of two, after 0."""
    return as_logits(values, "logits") if outputs.shape[1:].numel() > values.shape[1] else values
