"""SNGP: the last layer made a Gaussian process of random features, on a body whose layers cannot squash distances."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from posthoc.base import Job
from posthoc.collect.class_scores import as_logits
from posthoc.collect.loaders import Batch
from posthoc.collect.network import evaluating, exclusive
from posthoc.errors import OptionError
from posthoc.io import check_tensors
from posthoc.likelihoods.base import Likelihood, columns
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.methods.weights.finetuning import FinetunedMethod, positive
from posthoc.methods.weights.random_features import FeatureLaplace, RandomFeatures, bounded, listening, settle_bounds
from posthoc.methods.weights.sampling import set_noise
from posthoc.numerics import cholesky
from posthoc.predictive.base import Predictive
from posthoc.predictive.latent import IndependentLatent, ZeroLatent
from posthoc.saved import Saved
from posthoc.validation import choice, integer

__all__ = ["SNGP"]

START_NOISE = 0.01
"""The first weights reproduce the network's outputs but for about this share of their variance."""


class SNGP(FinetunedMethod):
    """Spectral-normalised neural Gaussian process (Liu et al. 2020), from a trained network: in a copy of it, the last
    `nn.Linear` gives way to a linear layer on random Fourier features of its input, and the spectral norms of the
    other layers' weights are bounded. The new layer starts at the ridge regression of the network's own outputs; the
    copy is fine-tuned, and a Laplace approximation gives the covariance of the new layer's weights in one last pass:

        (τI + Σ p(1-p) φφᵀ)⁻¹, p the top class's probability (one covariance for all classes, as in the paper), or
        (τI + Σ φφᵀ/σ²)⁻¹ in regression, σ² the mean squared residual.

    Its mean is the copy's output, not the network's. Frozen parameters stay as they are, and are not bounded.

    Parameters
    ----------
    num_features: how many random features.
    lengthscale: of the kernel they stand for; None: the root mean square distance between the data's features.
    norm_bound: the largest spectral norm of a weight; a convolution's is that of its (out, in × kernel) matrix.
    prior_precision: τ, in units of the variance of the network's outputs over the data.
    prediction: "mean_field", softmax(f/√(1 + π/8 variance)) and in regression the exact Gaussian, or "monte_carlo".
    samples: draws of the last layer's weights for "monte_carlo".
    layer: taken as other methods take it; it is the last `nn.Linear` that is replaced whatever it says.
    steps, batch_size, lr, seed, eval_every, patience, progress: see `posthoc.training.Training`; lr is 0.00001 here,
        since BatchNorm keeps its statistics: steps of 0.001 took a ResNet20 from 93 % to 10 % of the images in no time.
    """

    name = "sngp"
    defaults = {"lr": 1e-5}  # noqa: RUF012 (declared a ClassVar above)

    def __init__(
        self,
        model: nn.Module | Callable[..., Any] | None,
        likelihood: str | Likelihood,
        *,
        num_features: int = 1024,
        lengthscale: float | None = None,
        norm_bound: float = 6.0,
        prior_precision: float = 1.0,
        prediction: Literal["mean_field", "monte_carlo"] = "mean_field",
        samples: int = 64,
        layer: str | None = None,
        outputs_are: str = "logits",
        device: str | torch.device | None = None,
        **training: Any,
    ) -> None:
        super().__init__(model, likelihood, layer=layer, outputs_are=outputs_are, device=device, training=training)
        choice("prediction", prediction, ("mean_field", "monte_carlo"))
        self.prediction, self.samples = prediction, integer("samples", samples, 2)
        self.num_features = integer("num_features", num_features, 1)
        self.lengthscale = positive("lengthscale", lengthscale) if lengthscale is not None else None
        self.norm_bound = positive("norm_bound", norm_bound)
        self.prior_precision = positive("prior_precision", prior_precision)
        self._last = last_linear(self.module)
        self.network: nn.Module | None = None
        """The fine-tuned copy, once there is a fit."""
        self.covariance: FeatureLaplace | None = None
        """Of its last layer's weights."""

    def _finetune(self, job: Job) -> None:
        assert job.train.targets is not None
        if job.checkpoint is not None:
            raise OptionError("sngp cannot go on from a checkpoint (power iterations are not in it): leave it out.")
        with evaluating(self.module), torch.no_grad():
            self._check_last(self._first_batch(job.data))
        likelihood = self._start(job.train.outputs, job.train.targets).to(self.module_device).requires_grad_(False)
        generator = torch.Generator().manual_seed(self.training.seed)
        network = copy.deepcopy(self.module).eval()
        linear = network.get_submodule(self._last)
        assert isinstance(linear, nn.Linear)
        said = columns(job.train.outputs)[:, -linear.out_features :].to(self.module_device)  # of [0, z], z
        units = Units.of(said, likelihood)
        bounded(network, self._last, self.norm_bound, generator)
        head = self._replace_last(network, generator)
        with evaluating(self.module), torch.no_grad():
            self._place(network, head, units, job)
        prior = self.prior_precision / units.spread.square()
        history = self._minimise(
            job,
            likelihood,
            [p for p in network.parameters() if p.requires_grad],
            answer=lambda batch: self._answer(network, batch),
            penalty=lambda: 0.5 * (prior[:, None] * head.linear.weight.double().square()).sum(),
            predict=lambda batch: plain(likelihood, self._answer(network, batch)),
        )
        settle_bounds(network)
        with torch.no_grad():
            covariance = self._laplace(network, head, likelihood, prior, job)
        network.requires_grad_(False)
        self.network, self.covariance = network, covariance
        self._fitted, self.history = likelihood, history

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
        features = RandomFeatures(old.in_features, self.num_features, generator)
        linear = nn.utils.skip_init(nn.Linear, self.num_features, old.out_features)
        for parameter in linear.parameters():  # the network is run, to look at its features, before they have values
            nn.init.zeros_(parameter)
        network.set_submodule(self._last, nn.Sequential(features, linear).to(old.weight).eval())
        return Head(features, linear)

    def _place(self, network: nn.Module, head: Head, units: Units, job: Job) -> None:
        """A lengthscale from the data, and first weights that say what the network says."""
        if self.lengthscale is not None:
            head.features.lengthscale.fill_(self.lengthscale)
        else:
            inputs = (h.double() for h, *_ in self._heard(network, head.features, job.data))
            head.features.lengthscale.fill_(typical_distance(inputs))
        head.linear.bias.copy_(units.centre)
        head.linear.weight.zero_()
        size = self.num_features
        gram = torch.zeros(size, size, dtype=torch.float64, device=head.linear.weight.device)
        cross = gram.new_zeros(size, len(units.centre))
        for phi, _, batch in self._heard(network, head.linear, job.data):
            with exclusive(self.module):
                said = columns(self._answer(self.module, batch))[:, -len(units.centre) :]
            gram += phi.double().mT @ phi.double()
            cross += phi.double().mT @ (said - units.centre)
        gram.diagonal().add_(START_NOISE * self.prior_precision)
        head.linear.weight.copy_(torch.cholesky_solve(cross, cholesky(gram, "the random features' Gram matrix")).mT)

    def _laplace(
        self, network: nn.Module, head: Head, likelihood: Likelihood, prior: Tensor, job: Job
    ) -> FeatureLaplace:
        """The covariance of the last layer's weights at what was trained, and the noise in regression."""
        size = self.num_features
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
            set_noise(likelihood, squares / rows)
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

    def _features(self, batch: Batch) -> tuple[Tensor, Tensor, FeatureLaplace]:
        """The random features of a batch, what the copy says of it, and the covariance, all where the network is."""
        assert self.network is not None
        assert self.covariance is not None
        self.network, self.covariance = self.network.to(self.module_device), self.covariance.to(self.module_device)
        linear = self.network.get_submodule(f"{self._last}.1")
        return *self._listened(self.network, linear, batch), self.covariance

    def _old_predictor(self, *, covariance: bool) -> Callable[[Batch], Predictive]:
        if self.prediction == "monte_carlo":
            return super()._old_predictor(covariance=covariance)
        likelihood = copy.deepcopy(self.likelihood).to(self.module_device)
        unit = likelihood.scale.square() if isinstance(likelihood, Gaussian) else 1.0
        if isinstance(likelihood, Categorical):
            likelihood.prediction_form = "logit_scaling"

        def predict(batch: Batch) -> Predictive:
            phi, said, laplace = self._features(batch)
            variance = beside(said, laplace.variance(phi))
            return likelihood.predictive(said, IndependentLatent(variance / unit), covariance=covariance)

        return predict

    def _draws(self, batch: Batch) -> Tensor:  # (S, N, ...)
        phi, said, laplace = self._features(batch)
        generator = torch.Generator(phi.device).manual_seed(self.training.seed)
        drawn = laplace.deviations(phi, self.samples, generator)
        return torch.stack([said + beside(said, away).reshape(said.shape).to(said.dtype) for away in drawn])

    def _tensors(self) -> dict[str, Tensor]:
        assert self.network is not None
        assert self.covariance is not None
        covariance = {"basis": self.covariance.basis, "variances": self.covariance.variances}
        return {**super()._tensors(), **covariance, **named_tensors(self.network)}

    def _options(self) -> dict[str, Any]:
        names = ("num_features", "lengthscale", "norm_bound", "prior_precision", "prediction", "samples")
        return {**{name: getattr(self, name) for name in names}, **self._training()}

    def _recipe(self) -> dict[str, Any]:
        return self._options()

    @classmethod
    def _rebuild(cls, saved: Saved) -> Self:
        method, tensors = saved.unfitted(cls, **saved.options), saved.tensors
        network = copy.deepcopy(method.module).eval().requires_grad_(False)
        size, width = method.num_features, len(method._replace_last(network).linear.bias)
        expected = named_tensors(network)
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith("likelihood.")}
        check_tensors(saved.path, own, {**expected, "basis": (size, size), "variances": (size, width)})
        weights = {name.removeprefix("network."): tensors[name] for name in expected}
        network.load_state_dict(weights, strict=False)  # what is not a tensor is not in the file
        method.network, method.covariance = network, FeatureLaplace(tensors["basis"], tensors["variances"])
        method._fitted = cls._likelihood_from(saved)
        return method


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


def plain(likelihood: Likelihood, said: Tensor) -> Predictive:
    """The copy's own word, without the variance that it does not have yet."""
    return likelihood.predictive(said, ZeroLatent(said))


def beside(said: Tensor, values: Tensor) -> Tensor:
    """Values of the last layer's outputs as values of the network's: a single logit stands beside one that is 0."""
    return as_logits(values, "logits") if said[0].numel() > values.shape[1] else values


def named_tensors(network: nn.Module) -> dict[str, Tensor]:
    return {f"network.{name}": t for name, t in network.state_dict().items() if isinstance(t, Tensor)}
