"""`Gaussian`: real-valued targets with Gaussian noise."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from posthoc.likelihoods.base import Likelihood, columns
from posthoc.predictive.base import LatentGaussian, Predictive, working_dtype
from posthoc.predictive.latent import Latent
from posthoc.predictive.regression import RegressionPredictive
from posthoc.validation import choice, regression_targets

NOISE_FLOOR = 1e-8
"""The lower limit of the noise variance, in units of the residuals' variance; at α = 1 data can drive it to zero."""
INITIAL_NOISE = 0.25
"""The noise variance at the start of training, in units of the residuals' variance."""
MIN_ROWS = 200
"""With fewer rows the distribution of the residuals is not learned."""


class Gaussian(Likelihood):
    """Gaussian noise: y = f(x) + ε with variance σ², which is learned.

    With several outputs the energy is the sum over outputs (the factorized form; the joint one differs for α > 0), and
    so is `Predictive.log_prob`.

    Args:
        noise: "shared": one σ² in units of each output's residuals; "per_output": one for each output.

    Example:
        >>> from posthoc import FMGP, Gaussian
        >>> FMGP(None, Gaussian(noise="per_output"))
        FMGP(regression, RBF, not fitted)
    """

    task: ClassVar[str] = "regression"

    def __init__(self, noise: Literal["shared", "per_output"] = "shared") -> None:
        super().__init__()
        choice("noise", noise, ("shared", "per_output"))
        self.noise_form: Literal["shared", "per_output"] = noise
        self.log_noise = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.scale: Tensor

    @property
    def noise(self) -> Tensor:
        """σ² in the units of training, where residuals have unit mean square, () or (C,)."""
        return self.log_noise.exp() + NOISE_FLOOR

    def check_targets(self, targets: Any, outputs: Tensor) -> Tensor:
        return regression_targets(targets, outputs)

    def initialize(self, outputs: Tensor, targets: Tensor) -> None:
        residual = columns(targets) - columns(outputs)
        scale = residual.square().mean(0).sqrt()
        # A network that fits these data exactly leaves no residuals to take a unit from: use the targets' spread.
        spread = columns(targets).std(0, unbiased=False)
        scale = torch.where(scale > 1e-12 * spread.clamp_min(1e-300), scale, spread)
        self.scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        shape = self.scale.shape if self.noise_form == "per_output" else ()
        start = torch.full(shape, math.log(INITIAL_NOISE), dtype=torch.float64, device=outputs.device)
        self.log_noise = nn.Parameter(start, requires_grad=self.log_noise.requires_grad)

    def reset(self) -> None:
        nn.init.constant_(self.log_noise, math.log1p(-NOISE_FLOOR))

    def bare(self) -> Gaussian:
        likelihood = Gaussian(self.noise_form)
        likelihood.scale = self.scale.detach().clone()
        likelihood.reset()
        return likelihood

    @torch.no_grad()
    def set_noise(self, variance: Tensor) -> None:
        """Sets σ² to a variance for each output, (C,), in the user's units; "shared" takes their mean in its units."""
        relative = variance / self.scale.square()
        relative = relative if self.noise_form == "per_output" else relative.mean()
        self.log_noise.copy_((relative - NOISE_FLOOR).clamp_min(1e-12).log())

    def standardize(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        residual = (columns(targets) - columns(outputs)) / self.scale
        return torch.zeros_like(residual), residual

    def energy(self, mean: Tensor, latent: Latent, target: Tensor, alpha: float, generator: Any = None) -> Tensor:
        return gaussian_energy(target - mean, latent.variance, self.noise, alpha).sum(-1)

    def predictive(self, outputs: Tensor, latent: Latent, *, covariance: bool = False) -> RegressionPredictive:
        gaussian = LatentGaussian.around(outputs, latent, self.scale, covariance=covariance)
        return RegressionPredictive(gaussian, self._noise_of(outputs))

    def predictive_from_draws(self, draws: Tensor, *, covariance: bool = False) -> Predictive:
        latent = LatentGaussian.of_draws(draws, covariance=covariance)
        return RegressionPredictive(latent, self._noise_of(latent.mean).detach())

    def curvature(self, outputs: Tensor) -> Tensor:
        noise = (self.noise * self.scale.square()).detach()
        return torch.diag_embed((1.0 / noise).expand(len(outputs), -1))

    def with_learned_noise(self, rows: int, alpha: float) -> Likelihood | None:
        """The noise as a learned mixture of normals, from enough rows; trained as Gaussian noise unless α = 1."""
        from posthoc.likelihoods.learned_noise import MixtureNoise

        if type(self) is not Gaussian or rows < MIN_ROWS:
            return None
        return MixtureNoise(self, None if alpha == 1.0 else 1)

    def metrics(self) -> tuple[str, ...]:
        coverages = ("coverage_50", "coverage_90", "coverage_95", "width_90", "interval_score_90")
        return ("nll", "rmse", "mae", "crps", "cqm", "pit_error", *coverages, "aurc")

    def spec(self) -> dict[str, Any]:
        return {"type": "gaussian", "noise": self.noise_form}

    def _noise_of(self, outputs: Tensor) -> Tensor:
        """σ² in the user's units, of the shape of the outputs."""
        noise = (self.noise * self.scale.square()).to(working_dtype(outputs))
        return noise.expand(len(outputs), -1).reshape(outputs.shape).clone()


def gaussian_energy(residual: Tensor, variance: Tensor, noise: Tensor, alpha: float) -> Tensor:
    """(1/α) log E[N(y | f, σ²)^α] in closed form (paper, appendix A.2), with its exact limit at α = 0.

    Args:
        residual: Target minus mean, (N, C).
        variance: The variance of f, (N, C).
        noise: σ², () or (C,).
        alpha: From 0 to 1.
    """
    total = noise + (variance if alpha == 1.0 else alpha * variance)
    if alpha == 1.0:  # log N(y | g, σ² + v), written so that σ² → 0 does no harm
        log_part = total.log()
    elif alpha == 0.0:  # (1/α) log(1 + αv/σ²) → v/σ²
        log_part = noise.log() + variance / noise
    else:
        log_part = noise.log() + torch.log1p(alpha * variance / noise) / alpha
    return -0.5 * (log_part + residual.square() / total + math.log(2.0 * math.pi))
