"""`Categorical`: classes, from logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from posthoc.errors import DataError, OptionError
from posthoc.likelihoods.base import Likelihood, columns
from posthoc.likelihoods.temperature import suitable_temperature
from posthoc.predictive.base import LatentGaussian, Predictive
from posthoc.predictive.classification import ClassificationPredictive
from posthoc.predictive.latent import Latent
from posthoc.validation import choice, class_labels, integer, number

Approximation = Literal["pairwise", "logit_scaling", "monte_carlo"]


class Categorical(Likelihood):
    """Classes: p(y|f) = softmax(f/τ) with a temperature τ.

    The expectation of a softmax under a Gaussian has no closed form. `training` and `prediction` name approximations:
    "pairwise" does not depend on a constant added to all logits and cannot change the predicted class; "logit_scaling"
    is the paper's and can change it; "monte_carlo" averages over draws and is the only one for α ≠ 1.

    Args:
        temperature: A fixed τ (the paper's is 1.0), or None to learn it.
        training: The approximation of the energy.
        prediction: The approximation of the class probabilities.
        samples: The number of draws of "monte_carlo".
        seed: The seed of the draws that predict.

    Example:
        >>> from posthoc import FMGP, Categorical
        >>> FMGP(None, Categorical(temperature=1.0))
        FMGP(classification, RBF, not fitted)
    """

    task: ClassVar[str] = "classification"
    samples_latent: ClassVar[bool] = True

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
        self.chooses_form = fixed is None and not self.draws
        self.samples, self.seed = integer("samples", samples, 1), integer("seed", seed, 0)
        start = torch.tensor(math.log(fixed or 1.0), dtype=torch.float64)
        self.log_temperature = nn.Parameter(start, requires_grad=fixed is None)
        self.register_buffer("unit", torch.ones((), dtype=torch.float64))
        self.unit: Tensor  # (), of the logits in training

    @property
    def temperature(self) -> Tensor:
        """τ for the network's logits, ()."""
        return self.unit * self.relative_temperature

    @property
    def relative_temperature(self) -> Tensor:
        """τ in the units of training, ()."""
        return self.log_temperature.exp()

    def set_unit(self, outputs: Tensor, targets: Tensor) -> None:
        """Takes the best temperature of the bare network as the unit of the logits, if τ is learned; then training does
        not depend on the scale of the network's logits."""
        if self.fixed_temperature is None:
            self.unit = torch.full_like(self.unit, suitable_temperature(outputs, targets))

    def reset(self) -> None:
        if self.fixed_temperature is None:
            nn.init.zeros_(self.log_temperature)

    def bare(self) -> Categorical:
        return Categorical()

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

    def standardize(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.double() / self.unit, targets

    def energy(self, mean: Tensor, latent: Latent, target: Tensor, alpha: float, generator: Any = None) -> Tensor:
        label = target[:, None]
        if self.training_form != "monte_carlo":
            log_p = APPROXIMATIONS[self.training_form](mean, latent, self.relative_temperature)
            return log_p.gather(-1, label).squeeze(-1)
        draws = self._log_softmax_draws(mean, latent, len(mean), generator)
        log_p = draws.gather(-1, label.expand(self.samples, -1, -1)).squeeze(-1)
        if alpha == 0.0:
            return log_p.mean(0)
        return ((alpha * log_p).logsumexp(0) - math.log(self.samples)) / alpha

    def predictive(
        self, outputs: Tensor, latent: Latent, *, covariance: bool = False, logit_scale: Tensor | None = None
    ) -> ClassificationPredictive:
        """The class probabilities; `logit_scale`, (N, 1), multiplies the unit of the logits at each point."""
        unit = self.unit if logit_scale is None else self.unit * logit_scale
        gaussian = LatentGaussian.around(outputs, latent, unit, covariance=covariance)
        mean, dtype = outputs.double() / unit, gaussian.variance.dtype
        if self.prediction_form == "monte_carlo":
            generator = torch.Generator(outputs.device).manual_seed(self.seed)
            # Every row has the same draws, so that its prediction does not depend on the rows beside it.
            log_p = self._log_softmax_draws(mean, latent, 1, generator)
            log_probs = log_p.logsumexp(0) - math.log(self.samples)
        else:
            log_probs = APPROXIMATIONS[self.prediction_form](mean, latent, self.relative_temperature)
        return ClassificationPredictive(
            gaussian,
            log_probs=log_probs.to(dtype),
            temperature=(self.relative_temperature * unit).to(dtype),
            keeps_argmax=self.prediction_form == "pairwise",
        )

    def predictive_from_draws(self, draws: Tensor, *, covariance: bool = False) -> Predictive:
        """The class probabilities averaged over the draws."""
        latent, temperature = LatentGaussian.of_draws(draws, covariance=covariance), self.temperature.detach()
        log_p = torch.full_like(draws[0], -math.inf, dtype=torch.float64)
        for f in draws:  # one at a time: all of them in float64 would be many times their size
            log_p = torch.logaddexp(log_p, (f.double() / temperature).log_softmax(-1))
        dtype = latent.mean.dtype
        log_probs = (log_p - math.log(len(draws))).to(dtype)
        return ClassificationPredictive(latent, log_probs, temperature.to(dtype), keeps_argmax=False)

    def curvature(self, outputs: Tensor) -> Tensor:
        temperature = self.temperature.detach()
        p = (columns(outputs) / temperature).softmax(-1)
        return (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) / temperature.square()

    def metrics(self) -> tuple[str, ...]:
        return ("nll", "accuracy", "ece", "smooth_ece", "brier", "aurc", "ood_auc", "ood_fpr95", "ood_score_auc")

    def spec(self) -> dict[str, Any]:
        return {
            "type": "categorical",
            "temperature": self.fixed_temperature,
            "training": self.training_form,
            "prediction": self.prediction_form,
            "samples": self.samples,
            "seed": self.seed,
        }

    def _log_softmax_draws(self, mean: Tensor, latent: Latent, rows: int, generator: torch.Generator | None) -> Tensor:
        """log softmax(f/τ) for draws of f, (S, N, C), from normal draws for so many rows: N, or 1 for all of them."""
        shape = (self.samples, rows, mean.shape[1])
        noise = torch.randn(shape, dtype=mean.dtype, device=mean.device, generator=generator)
        f = mean + latent.perturb(noise.expand(self.samples, *mean.shape))
        return (f / self.relative_temperature).log_softmax(-1)


def pairwise(mean: Tensor, latent: Latent, temperature: Tensor) -> Tensor:
    """Logit scaling of the differences to the top class: softmax of (μ_c - μ_t) / √(τ² + (π/16) Var(f_c - f_t))."""
    top = mean.argmax(-1)
    margin = mean - mean.gather(-1, top[:, None])
    square = torch.add(temperature.square(), latent.difference(top), alpha=math.pi / 16.0)
    return (margin * square.rsqrt()).log_softmax(-1)


def logit_scaling(mean: Tensor, latent: Latent, temperature: Tensor) -> Tensor:
    """The paper's form: softmax of μ_c / √(τ² + (π/8) V_cc)."""
    return (mean / (temperature.square() + math.pi / 8.0 * latent.variance).sqrt()).log_softmax(-1)


APPROXIMATIONS: dict[str, Callable[[Tensor, Latent, Tensor], Tensor]] = {
    "pairwise": pairwise,
    "logit_scaling": logit_scaling,
}
