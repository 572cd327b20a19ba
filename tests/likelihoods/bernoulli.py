"""Several labels at once: C independent yes/no targets from C logits, with the logit-normal mean approximated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc.errors import DataError, OptionError
from posthoc.likelihoods.base import Likelihood, columns
from posthoc.likelihoods.registry import register
from posthoc.predictive.base import LatentGaussian, Predictive, UncertaintyScore, row_means, working_dtype
from posthoc.predictive.latent import Latent
from posthoc.validation import regression_targets


@dataclass(frozen=True, eq=False, repr=False)
class BernoulliPredictive(Predictive):
    """The probability of each of C labels at each of N points."""

    logits: Tensor  # (N, C), of the predicted probabilities

    task: ClassVar[str] = "multi-label"
    uncertainty_scores: ClassVar[Mapping[str, UncertaintyScore]] = {
        "entropy": lambda pred: row_means(torch.special.entr(pred.probs) + torch.special.entr(1.0 - pred.probs))
    }

    @property
    def probs(self) -> Tensor:
        return self.logits.sigmoid()

    @property
    def labels(self) -> Tensor:
        return self.logits > 0

    def log_prob(self, y: Any) -> Tensor:
        y = regression_targets(y, self.logits).to(self.logits.dtype)
        return -F.binary_cross_entropy_with_logits(self.logits, y, reduction="none").sum(-1)

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        return torch.bernoulli(self.probs.expand(n, *self.probs.shape), generator=generator)

    def columns(self) -> dict[str, Tensor]:
        return {"probs": self.probs, "labels": self.labels}


@register("bernoulli")
class BernoulliLikelihood(Likelihood):
    """p(y_c = 1 | f) = σ(f_c); E σ(f) is σ(μ / √(1 + π/8 v))."""

    task: ClassVar[str] = "multi-label"

    def check_alpha(self, alpha: float) -> None:
        if alpha != 1.0:
            raise OptionError(f"Expected alpha = 1 for the logit scaling of labels, got {alpha}.")

    def check_targets(self, targets: Any, outputs: Tensor) -> Tensor:
        y = regression_targets(torch.as_tensor(targets, dtype=outputs.dtype), outputs)
        if bool(((y != 0) & (y != 1)).any()):
            raise DataError("Expected labels that are 0 or 1.")
        return y

    def standardize(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return columns(outputs), columns(targets)

    def energy(self, mean: Tensor, latent: Latent, target: Tensor, alpha: float, generator: Any = None) -> Tensor:
        logits = scaled(mean, latent.variance)
        return -F.binary_cross_entropy_with_logits(logits, target, reduction="none").sum(-1)

    def predictive(self, outputs: Tensor, latent: Latent, *, covariance: bool = False) -> BernoulliPredictive:
        gaussian = LatentGaussian.around(outputs, latent, covariance=covariance)
        logits = scaled(outputs.double(), latent.variance.reshape(outputs.shape))
        return BernoulliPredictive(gaussian, logits.to(working_dtype(outputs)))

    def spec(self) -> dict[str, Any]:
        return {"type": "bernoulli"}


def scaled(mean: Tensor, variance: Tensor) -> Tensor:
    return mean / (1.0 + math.pi / 8.0 * variance).sqrt()
