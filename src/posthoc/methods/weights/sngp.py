"""SNGP: the last layer made a Gaussian process of random features, on a body whose layers cannot squash distances."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from posthoc.base import Fitted, Job, TrainingConfig, option
from posthoc.collect.class_scores import as_logits
from posthoc.collect.loaders import Batch
from posthoc.collect.network import evaluating, exclusive
from posthoc.errors import OptionError
from posthoc.likelihoods.base import Likelihood, columns
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.methods.weights.finetuning import FinetunedMethod
from posthoc.methods.weights.random_features import FeatureLaplace, RandomFeatures, bounded, listening, settle_bounds
from posthoc.numerics import cholesky
from posthoc.predictive.base import Predictive
from posthoc.predictive.latent import IndependentLatent, ZeroLatent

__all__ = ["SNGP"]

START_NOISE = 0.01
"""The first weights reproduce the network's outputs but for about this share of their variance."""


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

    def __init__(self, model: Any = None, likelihood: str | Likelihood | None = None, **options: Any) -> None:
        super().__init__(model, likelihood, **options)
        self._last = last_linear(self.module)

    @property
    def network(self) -> nn.Module:
        """The fine-tuned copy."""
        self._require_fitted("network")
        assert isinstance(self._fitted, FittedSNGP)
        return self._fitted.network

    def _finetune(self, job: Job) -> FittedSNGP:
        with evaluating(self.module), torch.no_grad():
            self._check_last(self._first_batch(job.data))
        likelihood = self._start(job).to(self.module_device).requires_grad_(False)
        generator = torch.Generator().manual_seed(self.config.seed)
        network = copy.deepcopy(self.module).eval()
        linear = network.get_submodule(self._last)
        assert isinstance(linear, nn.Linear)
        outputs = columns(job.train.outputs)[:, -linear.out_features :].to(self.module_device)  # z of the logits [0, z]
        units = Units.of(outputs, likelihood)
        bounded(network, self._last, self.config.norm_bound, generator)
        head = self._replace_last(network, generator)
        with evaluating(self.module), torch.no_grad():
            self._place(network, head, units, job)
        prior = self.config.prior_precision / units.spread.square()
        history = self._minimize(
            job,
            likelihood,
            [p for p in network.parameters() if p.requires_grad],
            answer=lambda batch: self._answer(network, batch),
            penalty=lambda: 0.5 * (prior[:, None] * head.linear.weight.double().square()).sum(),
            predict=lambda batch: without_variance(likelihood, self._answer(network, batch)),
        )
        settle_bounds(network)
        with torch.no_grad():
            covariance = self._laplace(network, head, likelihood, prior, job)
        self.history = history
        return FittedSNGP(likelihood, network.requires_grad_(False), covariance)

    def _check_last(self, batch: Batch) -> None:
        """Refuses a network whose output is not what its last linear layer says."""
        with exclusive(self.module), listening(self.module.get_submodule(self._last)) as heard:
            said = self._answer(self.module, batch)
        own = heard[-1][1] if len(heard) == 1 else said[:0]
        if own.numel() == len(own) and self._likelihood.task == "classification":
            own = as_logits(own.reshape(-1, 1), "logits")
        if own.numel() != said.numel() or not torch.equal(own.reshape(said.shape), said):
            raise OptionError(
                f"sngp replaces the last layer, which must be Linear and give the network's output; here the last "
                f"Linear is {self._last!r}, and it does not. Wrap the network so that it returns what that layer "
                "says, or use another method, such as fmgp."
            )

    def _replace_last(self, network: nn.Module, generator: torch.Generator | None = None) -> Head:
        old = network.get_submodule(self._last)
        assert isinstance(old, nn.Linear)
        features = RandomFeatures(old.in_features, self.config.num_features, generator)
        linear = nn.utils.skip_init(nn.Linear, self.config.num_features, old.out_features)
        for parameter in linear.parameters():  # the network is run, to look at its features, before they have values
            nn.init.zeros_(parameter)
        network.set_submodule(self._last, nn.Sequential(features, linear).to(old.weight).eval())
        return Head(features, linear)

    def _place(self, network: nn.Module, head: Head, units: Units, job: Job) -> None:
        """A lengthscale from the data, and first weights that say what the network says."""
        if self.config.lengthscale is not None:
            head.features.lengthscale.fill_(self.config.lengthscale)
        else:
            inputs = (h.double() for h, *_ in self._heard(network, head.features, job.data))
            head.features.lengthscale.fill_(typical_distance(inputs))
        head.linear.bias.copy_(units.centre)
        head.linear.weight.zero_()
        size = self.config.num_features
        gram = torch.zeros(size, size, dtype=torch.float64, device=head.linear.weight.device)
        cross = gram.new_zeros(size, len(units.centre))
        for phi, _, batch in self._heard(network, head.linear, job.data):
            with exclusive(self.module):
                said = columns(self._answer(self.module, batch))[:, -len(units.centre) :]
            gram += phi.double().mT @ phi.double()
            cross += phi.double().mT @ (said - units.centre)
        gram.diagonal().add_(START_NOISE * self.config.prior_precision)
        head.linear.weight.copy_(torch.cholesky_solve(cross, cholesky(gram, "the random features' Gram matrix")).mT)

    def _laplace(
        self, network: nn.Module, head: Head, likelihood: Likelihood, prior: Tensor, job: Job
    ) -> FeatureLaplace:
        """The covariance of the last layer's weights at what was trained, and the noise in regression."""
        size = self.config.num_features
        gram = torch.zeros(size, size, dtype=torch.float64, device=prior.device)
        squares, rows = torch.zeros_like(prior), 0
        for phi, said, batch in self._heard(network, head.linear, job.data):
            if isinstance(likelihood, Categorical):
                p = (said.double() / likelihood.temperature).softmax(-1).amax(-1)
                weight = p * (1.0 - p) / likelihood.temperature.square()
            else:
                squares += columns(likelihood.check_targets(batch.target, said) - said).square().sum(0)
                weight = torch.ones_like(phi[:, 0], dtype=torch.float64)
            gram += (weight[:, None] * phi.double()).mT @ phi.double()
            rows += len(phi)
        precision = torch.ones_like(prior)
        if isinstance(likelihood, Gaussian):
            likelihood.set_noise(squares / rows)
            precision = 1.0 / (likelihood.noise * likelihood.scale.square()).expand_as(prior)
        return FeatureLaplace.of(gram * (job.num_data / rows), prior, precision)

    def _heard(self, network: nn.Module, layer: nn.Module, data: Any) -> Iterator[tuple[Tensor, Tensor, Batch]]:
        """What a layer of the copy is given, and what the copy says, batch by batch."""
        for batch in self._batches(data):
            yield *self._listened(network, layer, batch), batch

    def _listened(self, network: nn.Module, layer: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        with listening(layer) as heard:
            said = self._answer(network, batch)
        return heard[-1][0], said

    def _features(self, fitted: FittedSNGP, batch: Batch) -> tuple[Tensor, Tensor]:
        """The random features of a batch, and the outputs of the copy."""
        fitted.to(self.module_device)
        return self._listened(fitted.network, fitted.network.get_submodule(f"{self._last}.1"), batch)

    def _predictor(self, fitted: FittedSNGP, *, covariance: bool) -> Callable[[Batch], Predictive]:
        if self.config.prediction == "monte_carlo":
            return super()._predictor(fitted, covariance=covariance)
        likelihood = copy.deepcopy(fitted.likelihood).to(self.module_device)
        unit = likelihood.scale.square() if isinstance(likelihood, Gaussian) else 1.0
        if isinstance(likelihood, Categorical):
            likelihood.prediction_form = "logit_scaling"

        def predict(batch: Batch) -> Predictive:
            phi, outputs = self._features(fitted, batch)
            variance = beside(outputs, fitted.covariance.variance(phi))
            return likelihood.predictive(outputs, IndependentLatent(variance / unit), covariance=covariance)

        return predict

    def _draws(self, fitted: FittedSNGP, batch: Batch) -> Tensor:  # (S, N, ...)
        phi, outputs = self._features(fitted, batch)
        generator = torch.Generator(phi.device).manual_seed(self.config.seed)
        drawn = fitted.covariance.deviations(phi, self.config.samples, generator)
        return torch.stack([outputs + beside(outputs, away).reshape(outputs.shape).to(outputs.dtype) for away in drawn])

    def _blank(self, shapes: Mapping[str, Any]) -> FittedSNGP:
        network = copy.deepcopy(self.module).eval().requires_grad_(False)
        size, width = self.config.num_features, len(self._replace_last(network).linear.bias)
        zeros = torch.zeros(size, size + width, dtype=torch.float64)
        return FittedSNGP(self._blank_likelihood(), network, FeatureLaplace(zeros[:, :size], zeros[:, size:]))


class FittedSNGP(Fitted):
    """The fine-tuned copy of the network, and the covariance of its last layer's weights."""

    def __init__(self, likelihood: Likelihood, network: nn.Module, covariance: FeatureLaplace) -> None:
        super().__init__(likelihood)
        self.network, self.covariance = network, covariance


class Head(NamedTuple):
    """What takes the place of the last layer."""

    features: RandomFeatures
    linear: nn.Linear


class Units(NamedTuple):
    """Where the network's outputs are, and how far they spread: for each output, or for all classes together."""

    centre: Tensor  # (C,)
    spread: Tensor  # (C,)

    @classmethod
    def of(cls, outputs: Tensor, likelihood: Likelihood) -> Units:
        variance = outputs.var(0, unbiased=False)
        if isinstance(likelihood, Categorical):
            variance = variance.mean().expand_as(variance)
        return cls(outputs.mean(0), torch.where(variance > 0, variance, 1.0).sqrt())


def last_linear(network: nn.Module) -> str:
    """The name of the last linear layer."""
    names = [name for name, part in network.named_modules() if name and isinstance(part, nn.Linear)]
    if not names:
        raise OptionError(
            f"sngp replaces the last layer, which must be Linear, got a {type(network).__name__} without any Linear "
            "layer inside. Use another method, such as fmgp."
        )
    return names[-1]


def typical_distance(parts: Iterator[Tensor]) -> float:
    """The root mean square distance between two rows, √(2 Σ_j Var(h_j)), or 1 where all rows are equal."""
    rows, squares, mean = 0, 0.0, torch.zeros((), dtype=torch.float64)
    for part in parts:  # means and sums of squares of parts, put together without cancellation
        own = part.mean(0)
        step, share = own - mean, len(part) / (rows + len(part))
        squares += float((part - own).square().sum()) + rows * share * float(step.square().sum())
        rows, mean = rows + len(part), mean + share * step
    return (2.0 * squares / rows) ** 0.5 or 1.0


def without_variance(likelihood: Likelihood, outputs: Tensor) -> Predictive:
    """The copy's own prediction, which has no variance yet."""
    return likelihood.predictive(outputs, ZeroLatent(outputs))


def beside(said: Tensor, values: Tensor) -> Tensor:
    """Values of the last layer's outputs as values of the network's: a single logit stands beside one that is 0."""
    return as_logits(values, "logits") if said[0].numel() > values.shape[1] else values
