"""`ClassificationPredictive`: predictions of classes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from posthoc.errors import OptionError, warn
from posthoc.predictive.base import By, Predictive, UncertaintyScore, apply_by_rows, row_means
from posthoc.validation import class_labels, integer

NO_VARIANCE = "This method gives the logits no variance (it is, or chose, temperature scaling)"


@dataclass(frozen=True, eq=False, repr=False)
class ClassificationPredictive(Predictive):
    """The probabilities of the classes at each of N points: softmax(f / temperature) averaged over the logits f.

    A classifier with a single logit z for two classes has the logits [0, z].

    Args:
        latent: The Gaussian over the logits; its mean is the network's output, bit for bit.
        log_probs: The logarithms of the class probabilities, (N, C).
        temperature: What logits are divided by, () or (N, 1).
        keeps_argmax: Whether the predicted class is always that of the largest mean logit.
        network_log_prob: The log-probability of the class of the largest mean logit, (N,), before any constraint on the
            predicted class; None where there is none.

    Example:
        >>> from posthoc.predictive.base import LatentGaussian
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> latent = LatentGaussian(logits, torch.ones(2, 2))
        >>> pred = ClassificationPredictive(latent, logits.log_softmax(-1), torch.ones(()))
        >>> pred.labels.tolist()
        [0, 1]
        >>> pred.sample(3).shape
        torch.Size([3, 2])
    """

    log_probs: Tensor
    temperature: Tensor
    keeps_argmax: bool = True
    network_log_prob: Tensor | None = None

    task: ClassVar[str] = "classification"
    uncertainty_scores: ClassVar[Mapping[str, UncertaintyScore]] = {
        # In float64, since float32 would lose the order of very certain predictions.
        "entropy": lambda pred: apply_by_rows(lambda part: entropy(part.log_probs.double().exp()), pred),
        "least_confidence": lambda pred: -torch.expm1(pred.log_probs.amax(-1).double()),
        "variance": lambda pred: row_means(pred.latent.variance),
        "mutual_information": lambda pred: pred.mutual_information(),
    }
    hints: ClassVar[Mapping[str, str]] = {
        "mean": "the network's output is pred.latent.mean, the class probabilities are pred.probs",
        **{name: f"that of the logits is pred.latent.{name}" for name in ("variance", "std", "covariance")},
        **dict.fromkeys(("latent_variance", "noise", "quantile", "interval", "cdf"), "that is for regression"),
    }

    @property
    def probs(self) -> Tensor:
        """The class probabilities, (N, C)."""
        probs = self.log_probs.exp()
        if not self.keeps_argmax:
            return probs
        top = self.latent.mean.argmax(-1, keepdim=True)
        # Two classes may round to one probability: the class of the largest logit stays first.
        moved, largest = probs.argmax(-1, keepdim=True) != top, probs.amax(-1, keepdim=True)
        above = torch.nextafter(largest, torch.full_like(largest, math.inf))
        return probs.scatter(-1, top, torch.where(moved, above, largest))

    @property
    def labels(self) -> Tensor:
        """The most probable class of each point, (N,) of int64."""
        if self.keeps_argmax:
            return self.latent.mean.argmax(-1)
        return apply_by_rows(lambda part: part.log_probs.exp().argmax(-1), self)

    @property
    def network_confidence(self) -> Tensor:
        """How likely the class of the largest mean logit is, (N,): the probability that the network's answer is right.

        It differs from the largest of `probs` where these are constrained to keep the network's class, or do not.
        """
        if self.network_log_prob is not None:
            return self.network_log_prob.exp()
        return self.log_probs.gather(-1, self.latent.mean.argmax(-1, keepdim=True)).squeeze(-1).exp()

    def uncertainty(self, by: By = None) -> Tensor:
        if by in ("variance", "mutual_information") and not self.latent.has_variance:
            raise OptionError(f'{NO_VARIANCE}: use by="entropy" or by="least_confidence".')
        return super().uncertainty(by)

    def tempered(self, factor: Tensor) -> ClassificationPredictive:
        """The same with each row's temperature, and the standard deviation of its logits, multiplied by a factor.

        Args:
            factor: The factors, (N, 1).
        """
        dtype, square, full = self.log_probs.dtype, factor.square(), self.latent.full_covariance
        full = (full * square[:, :, None]).to(dtype) if full is not None else None
        latent = replace(self.latent, variance=(self.latent.variance * square).to(dtype), full_covariance=full)
        log_probs = (self.log_probs.double() / factor).log_softmax(-1).to(dtype)
        return replace(self, latent=latent, log_probs=log_probs, temperature=(self.temperature * factor).to(dtype))

    def entropy(self) -> Tensor:
        """The entropy of the class probabilities in nats, (N,): the total uncertainty about the class."""
        return entropy(self.log_probs.exp())

    def mutual_information(self, samples: int = 256, generator: torch.Generator | None = None) -> Tensor:
        """The mutual information of class and function in nats (BALD), (N,), from draws of the logits.

        Args:
            samples: The number of draws of the logits.
            generator: The source of randomness; the default is seeded, so that equal calls give equal results.

        Returns:
            The part of the entropy that is due to the function; zeros, with a warning, if the logits have no variance.
        """
        samples = integer("samples", samples, 1)
        if not self.latent.has_variance:
            warn(f"{NO_VARIANCE}: the mutual information is zero.")
            return torch.zeros_like(self.log_probs[:, 0])
        if generator is None:
            generator = torch.Generator(self.log_probs.device).manual_seed(0)
        return apply_by_rows(lambda part: part._information(samples, generator), self, copies=samples)

    def _information(self, samples: int, generator: torch.Generator) -> Tensor:
        logits = self.latent.draws  # (N, S, C); the average over them does not depend on their order
        logits = self.latent.sample(samples, generator) if logits is None else logits.transpose(0, 1)
        p = (logits / self.temperature).softmax(-1)
        return (entropy(p.mean(0)) - entropy(p).mean(0)).clamp_min(0.0)

    def log_prob(self, y: Any) -> Tensor:
        """The log-probability of class labels, (N,)."""
        labels = class_labels(y, self.log_probs)
        return self.log_probs.gather(-1, labels[:, None]).squeeze(-1)

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Draws of class labels, (n, N) of int64; draws of the logits are `pred.latent.sample`."""
        n = integer("n, the number of draws,", n, 1)

        def draw(part: ClassificationPredictive) -> Tensor:
            return torch.multinomial(part.log_probs.double().exp(), n, replacement=True, generator=generator)

        return apply_by_rows(draw, self).T

    def columns(self) -> dict[str, Tensor]:
        """Class probabilities, labels and entropy."""
        return {"probs": self.probs, "labels": self.labels, "entropy": self.entropy()}


def entropy(probs: Tensor) -> Tensor:
    """The entropy of probabilities (..., C)."""
    return torch.special.entr(probs).sum(-1)
