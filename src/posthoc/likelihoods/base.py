"""Likelihoods: how an observation comes from the latent outputs, as an energy to train on and a `Predictive` to return.

The energy of a point is the data term of the Black-Box alpha objective (paper, section 3.5), (1/α) log E_q[p(y|f)^α];
its limit at α = 0 is E_q[log p(y|f)], the ELBO's.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError, OptionError
from posthoc.likelihoods.temperature import suitable_temperature
from posthoc.predictive.base import LatentGaussian, Predictive, working_dtype
from posthoc.predictive.classification import ClassificationPredictive
from posthoc.predictive.latent import Latent
from posthoc.predictive.regression import RegressionPredictive
from posthoc.validation import choice, class_labels, integer, number, regression_targets

__all__ = ["Categorical", "Gaussian", "Likelihood", "make_likelihood"]

Approximation = Literal["pairwise", "logit_scaling", "monte_carlo"]

NOISE_FLOOR = 1e-8
"""The least noise variance, in units of the residuals' variance: at α = 1 real data drive it to zero."""


class Likelihood(nn.Module, ABC):
    """One task: its parameters, its units, its energy and its predictive."""

    task: str
    draws = False
    """Whether its energy is estimated from draws."""

    @abstractmethod
    def check_alpha(self, alpha: float) -> None:
        """Refuses an α that this likelihood's training form cannot serve."""

    @abstractmethod
    def check_outputs(self, outputs: Tensor) -> None:
        """Refuses outputs of a shape that this task cannot have."""

    @abstractmethod
    def check_targets(self, targets: Any, outputs: Tensor) -> Tensor:
        """The targets as a tensor that fits the outputs, or an error."""

    @abstractmethod
    def start(self, outputs: Tensor, targets: Tensor) -> None:
        """Sets units and first values from the data."""

    @abstractmethod
    def standardise(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the target that `energy` takes, both float64 (labels aside), in the units of training."""

    @abstractmethod
    def energy(
        self, mean: Tensor, latent: Latent, target: Tensor, alpha: float, generator: torch.Generator | None = None
    ) -> Tensor:  # (N,)
        """(1/α) log E[p(y|f)^α] of each point, f ~ N(mean, latent)."""

    @abstractmethod
    def predictive(self, outputs: Tensor, latent: Latent, *, covariance: bool = False) -> Predictive:
        """What the latent Gaussian says of a new observation, in the user's units."""

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """What `make_likelihood` needs to build it again."""


class Gaussian(Likelihood):
    """Gaussian noise: y = f(x) + ε. `noise` is "shared" (one variance, in units of each output's residuals) or
    "per_output"; σ² is learnt.

    With several outputs the energy is the sum of the outputs' own (the factorised form; the joint one differs for
    α > 0), and `Predictive.log_prob` is the same sum.
    """

    task = "regression"

    def __init__(self, noise: Literal["shared", "per_output"] = "shared") -> None:
        super().__init__()
        choice("noise", noise, ("shared", "per_output"))
        self.noise_form = noise
        self.log_noise = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.scale: Tensor

    @property
    def noise(self) -> Tensor:  # () or (C,)
        """σ² in the units of training, where residuals have unit mean square."""
        return self.log_noise.exp() + NOISE_FLOOR

    def check_alpha(self, alpha: float) -> None:
        """Every α in [0, 1] is in closed form."""

    def check_outputs(self, outputs: Tensor) -> None:
        if outputs.ndim not in (1, 2):
            raise DataError(
                f"Expected regression outputs of shape (N,) or (N, outputs), got {tuple(outputs.shape)}: "
                "wrap the model so that it returns one row a point."
            )

    def check_targets(self, targets: Any, outputs: Tensor) -> Tensor:
        return regression_targets(targets, outputs)

    def start(self, outputs: Tensor, targets: Tensor) -> None:
        residual = columns(targets) - columns(outputs)
        scale = residual.square().mean(0).sqrt()
        # A network that fits these data exactly leaves no residual to measure in: the targets' spread is next best.
        spread = columns(targets).std(0, unbiased=False)
        scale = torch.where(scale > 1e-12 * spread.clamp_min(1e-300), scale, spread)
        self.scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        shape = self.scale.shape if self.noise_form == "per_output" else ()
        start = torch.full(shape, math.log(0.25), dtype=torch.float64, device=outputs.device)
        self.log_noise = nn.Parameter(start, requires_grad=self.log_noise.requires_grad)

    def standardise(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        residual = (columns(targets) - columns(outputs)) / self.scale
        return torch.zeros_like(residual), residual

    def energy(
        self, mean: Tensor, latent: Latent, target: Tensor, alpha: float, generator: torch.Generator | None = None
    ) -> Tensor:
        return gaussian_energy(target - mean, latent.variance, self.noise, alpha).sum(-1)

    def predictive(self, outputs: Tensor, latent: Latent, *, covariance: bool = False) -> Predictive:
        dtype, shape = working_dtype(outputs), outputs.shape
        unit = self.scale.square()
        full = (latent.covariance() * torch.outer(self.scale, self.scale)).to(dtype) if covariance else None
        return RegressionPredictive(
            LatentGaussian(
                outputs,
                (latent.variance * unit).to(dtype).reshape(shape),
                full_covariance=full,
                independent=latent.independent,
                has_variance=latent.has_variance,
            ),
            noise=(self.noise * unit).expand(len(outputs), len(unit)).to(dtype).reshape(shape).clone(),
        )

    def spec(self) -> dict[str, Any]:
        return {"type": "gaussian", "noise": self.noise_form}


class Categorical(Likelihood):
    """Classes: p(y|f) = softmax(f/τ), with τ learnt (`temperature=None`) or fixed (1.0 is the paper's).

    The expectation of a softmax under a Gaussian has no closed form. `training` and `prediction` name what stands for
    it: "pairwise" (the default: indifferent to a constant added to all logits, and unable to move the predicted
    class), "logit_scaling" (the paper's, which can move it) or "monte_carlo" (`samples` draws; the only one for α ≠ 1).
    """

    task = "classification"

    def __init__(
        self,
        temperature: float | None = None,
        training: Approximation = "pairwise",
        prediction: Approximation = "pairwise",
        samples: int = 128,
        seed: int = 0,
    ) -> None:
        super().__init__()
        choice("training", training, (*APPROXIMATIONS, "monte_carlo"))
        choice("prediction", prediction, (*APPROXIMATIONS, "monte_carlo"))
        fixed = number(temperature) if temperature is not None else None
        if fixed is not None and not 0.0 < fixed < math.inf:
            raise OptionError(f"Expected a positive temperature, or None to learn it, got {temperature!r}.")
        self.fixed_temperature, self.training_form, self.prediction_form = fixed, training, prediction
        self.draws = training == "monte_carlo"
        self.samples, self.seed = integer("samples", samples, 1), integer("seed", seed, 0)
        start = torch.tensor(math.log(fixed or 1.0), dtype=torch.float64)
        self.log_temperature = nn.Parameter(start, requires_grad=fixed is None)
        self.register_buffer("unit", torch.ones((), dtype=torch.float64))
        self.unit: Tensor  # (), of the logits in training

    @property
    def temperature(self) -> Tensor:  # ()
        """τ, for logits as they come."""
        return self.unit * self.relative_temperature

    @property
    def relative_temperature(self) -> Tensor:  # ()
        """τ in the units of training."""
        return self.log_temperature.exp()

    def take_unit(self, rows: Outputs) -> None:
        """Measures logits by the temperature that suits some rows, so that training need not care how large a network
        makes them; unless τ is not to be learnt."""
        if self.fixed_temperature is None:
            self.unit = torch.full_like(self.unit, suitable_temperature(rows))

    def check_alpha(self, alpha: float) -> None:
        if alpha != 1.0 and self.training_form != "monte_carlo":
            raise OptionError(
                f'training="{self.training_form}" approximates log E[p], the energy at alpha = 1 only, '
                f'got alpha = {alpha}. Use Categorical(training="monte_carlo"), or alpha=1.0.'
            )

    def check_outputs(self, outputs: Tensor) -> None:
        if outputs.ndim != 2 or outputs.shape[1] < 2:
            raise DataError(
                f"Expected logits of shape (N, classes) with at least 2 classes, got {tuple(outputs.shape)}. "
                "A single logit z for two classes can be given as the columns [0, z]."
            )

    def check_targets(self, targets: Any, outputs: Tensor) -> Tensor:
        return class_labels(targets, outputs)

    def start(self, outputs: Tensor, targets: Tensor) -> None:
        pass

    def standardise(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.double() / self.unit, targets

    def energy(
        self, mean: Tensor, latent: Latent, target: Tensor, alpha: float, generator: torch.Generator | None = None
    ) -> Tensor:
        label = target[:, None]
        if self.training_form != "monte_carlo":
            log_p = APPROXIMATIONS[self.training_form](mean, latent, self.relative_temperature)
            return log_p.gather(-1, label).squeeze(-1)
        draws = log_softmax_draws(mean, latent, self.relative_temperature, self.samples, generator)  # (S, N, C)
        log_p = draws.gather(-1, label.expand(self.samples, -1, -1)).squeeze(-1)
        if alpha == 0.0:
            return log_p.mean(0)
        return ((alpha * log_p).logsumexp(0) - math.log(self.samples)) / alpha

    def predictive(
        self,
        outputs: Tensor,
        latent: Latent,
        *,
        covariance: bool = False,
        stretch: Tensor | None = None,  # (N, 1)
    ) -> ClassificationPredictive:
        """`stretch` is what the unit of logits is multiplied by at each point."""
        unit = self.unit if stretch is None else self.unit * stretch
        mean, square, dtype = outputs.double() / unit, unit.square(), working_dtype(outputs)
        if self.prediction_form == "monte_carlo":
            generator = torch.Generator(outputs.device).manual_seed(self.seed)
            # Every row has the same draws, so that its prediction does not depend on the rows beside it.
            draws = log_softmax_draws(mean, latent, self.relative_temperature, self.samples, generator, common=True)
            log_probs = draws.logsumexp(0) - math.log(self.samples)
        else:
            log_probs = APPROXIMATIONS[self.prediction_form](mean, latent, self.relative_temperature)
        return ClassificationPredictive(
            LatentGaussian(
                outputs,
                (latent.variance * square).to(dtype).expand(outputs.shape).clone(),
                full_covariance=(latent.covariance() * square[..., None]).to(dtype) if covariance else None,
                independent=latent.independent,
                has_variance=latent.has_variance,
            ),
            log_probs=log_probs.to(dtype),
            temperature=(self.relative_temperature * unit).to(dtype),
            keeps_argmax=self.prediction_form == "pairwise",
        )

    def spec(self) -> dict[str, Any]:
        return {
            "type": "categorical",
            "temperature": self.fixed_temperature,
            "training": self.training_form,
            "prediction": self.prediction_form,
            "samples": self.samples,
            "seed": self.seed,
        }


def gaussian_energy(
    residual: Tensor,  # (N, C)
    variance: Tensor,  # (N, C)
    noise: Tensor,  # () or (C,)
    alpha: float,
) -> Tensor:  # (N, C)
    """(1/α) log E[N(y | f, σ²)^α] in closed form (paper, appendix A.2), its exact limit at α = 0."""
    total = noise + (variance if alpha == 1.0 else alpha * variance)
    if alpha == 1.0:  # log N(y | g, σ² + v), written so that σ² → 0 does no harm
        return _GaussianLogProb.apply(residual, total)  # type: ignore[no-untyped-call]
    if alpha == 0.0:  # (1/α) log(1 + αv/σ²) → v/σ²
        log_part = noise.log() + variance / noise
    else:
        log_part = noise.log() + torch.log1p(alpha * variance / noise) / alpha
    return -0.5 * (log_part + residual.square() / total + math.log(2.0 * math.pi))


class _GaussianLogProb(torch.autograd.Function):
    """log N(r | 0, t) with its backward pass in one node: these vectors are so short that each node counts."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, total: Tensor) -> Tensor:
        fit = residual.square().div_(total)
        ctx.save_for_backward(residual, total, fit)
        return total.log().add_(fit).add_(math.log(2.0 * math.pi)).mul_(-0.5)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor]:
        residual, total, fit = ctx.saved_tensors
        share = grad / total
        residual_grad = residual * share.neg() if ctx.needs_input_grad[0] else None
        return residual_grad, (fit - 1.0).mul_(share).mul_(0.5)


def pairwise(mean: Tensor, latent: Latent, temperature: Tensor) -> Tensor:
    """Logit scaling of the differences to the top class: softmax of (μ_c - μ_t) / √(τ² + (π/16) Var(f_c - f_t))."""
    top = mean.argmax(-1)
    margin = mean - mean.gather(-1, top[:, None])
    return (margin / (temperature.square() + math.pi / 16.0 * latent.difference(top)).sqrt()).log_softmax(-1)


def logit_scaling(mean: Tensor, latent: Latent, temperature: Tensor) -> Tensor:
    """The paper's form: softmax of μ_c / √(τ² + (π/8) V_cc)."""
    return (mean / (temperature.square() + math.pi / 8.0 * latent.variance).sqrt()).log_softmax(-1)


APPROXIMATIONS = {"pairwise": pairwise, "logit_scaling": logit_scaling}


def log_softmax_draws(
    mean: Tensor,  # (N, C)
    latent: Latent,
    temperature: Tensor,
    samples: int,
    generator: torch.Generator | None,
    *,
    common: bool = False,
) -> Tensor:  # (S, N, C)
    """log softmax(f/τ) for draws of f; with `common`, all rows share the standard normal draws behind theirs."""
    shape = (samples, 1 if common else len(mean), mean.shape[1])
    noise = torch.randn(shape, dtype=mean.dtype, device=mean.device, generator=generator)
    return ((mean + latent.perturb(noise.expand(samples, *mean.shape))) / temperature).log_softmax(-1)


def columns(values: Tensor) -> Tensor:  # (N, C), float64
    return values.double().reshape(len(values), -1)


def make_likelihood(likelihood: str | Likelihood | dict[str, Any]) -> Likelihood:
    """A likelihood from its task's name, from its `spec()`, or as it is."""
    if isinstance(likelihood, Likelihood):
        return likelihood
    spec = dict(likelihood) if isinstance(likelihood, Mapping) else {"type": likelihood}
    kinds: dict[Any, type[Likelihood]] = {
        "regression": Gaussian,
        "gaussian": Gaussian,
        "classification": Categorical,
        "categorical": Categorical,
    }
    kind = spec.pop("type", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise OptionError(
            f'Expected likelihood="regression" or "classification" (or an object, Gaussian() or Categorical()), '
            f"got {kind!r}."
        )
    try:
        return kinds[kind](**spec)
    except TypeError as error:
        raise OptionError(f"Expected a likelihood that this version knows, got {kind!r} with {spec}.") from error
