"""`Predictive`: what every method's `predict` returns. Means are the network's own; all in the user's units."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from operator import index
from typing import Any, Self

import torch
from torch import Tensor

from posthoc.errors import OptionError, WrongTaskError
from posthoc.predictive.latent import correlate
from posthoc.predictive.residual_mixture import Law
from posthoc.validation import as_numbers, as_rows, choice, class_labels, integer, number, regression_targets

__all__ = ["ClassificationPredictive", "Predictive", "RegressionPredictive", "by_rows", "draws_asked", "working_dtype"]

ONLY_FOR = {
    "regression": ("latent_variance", "noise", "quantile", "interval", "cdf"),
    "classification": ("probs", "log_probs", "entropy", "mutual_information", "temperature"),
}

DRAWN_AT_ONCE = 2**24
"""Numbers drawn at once by `mutual_information`, which is a mean over many draws of every logit."""

AT_ONCE = 2**21
"""Numbers worked on at a time, 16 MB for each tensor of them, where a few numbers are made of many classes."""


def working_dtype(mean: Tensor) -> torch.dtype:
    """The dtype of everything but the mean: the network's own, but never half precision."""
    return torch.promote_types(mean.dtype, torch.float32)


@dataclass(frozen=True, eq=False)
class Predictive(ABC):
    """Predictive distributions for N points; a row is a point, and `pred[rows]` selects some of them."""

    mean: Tensor  # (N, ...), exactly what the network said

    @property
    @abstractmethod
    def variance(self) -> Tensor:
        """The variance that goes with `mean`, of the same shape."""

    @property
    def std(self) -> Tensor:
        """√variance."""
        return self.variance.sqrt()

    @property
    @abstractmethod
    def covariance(self) -> Tensor:  # (N, C, C)
        """The covariance across outputs, `variance` on its diagonal; ask with `predict(..., covariance=True)`."""

    @abstractmethod
    def log_prob(self, y: Any) -> Tensor:  # (N,)
        """The log-probability (or density, in the user's units) of what was observed, one number a row."""

    @abstractmethod
    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:  # (n, N, ...)
        """n draws whose mean and variance are `mean` and `variance`."""

    def uncertainty(self, by: str | Callable[[Self], Tensor] | None = None) -> Tensor:  # (N,), float64
        """How unsure each row is, larger where less is known. Classification: "entropy" (the default),
        "least_confidence" (one minus the largest probability), "mutual_information" or "variance" (of the logits, on
        average over classes). Regression: "std" (the default) or "variance", on average over outputs. Or a function."""
        if callable(by):
            return by(self).double()
        by = by if by is not None else "entropy" if hasattr(self, "log_probs") else "std"
        choice("the uncertainty", by, tuple(UNCERTAINTIES))
        return UNCERTAINTIES[by](self).double()

    def defer(
        self,
        budget: float | None = None,
        *,
        threshold: float | None = None,
        by: str | Callable[[Self], Tensor] | None = None,
    ) -> Tensor:  # (N,), bool
        """The rows to hand to somebody who knows better: the most uncertain ones (see `uncertainty`), as many as the
        `budget` allows, which is a share of the rows such as 0.1 (rounded down) or, if it is an integer, a number of
        them; of equal ones the first. Or, where rows come one by one, those that are more uncertain than `threshold`.
        """
        if budget is not None and threshold is None:
            allowed, score = rows_allowed(budget, len(self)), self.uncertainty(by)
            chosen = score.argsort(stable=True, descending=True)[:allowed]
            return torch.zeros_like(score, dtype=torch.bool).index_fill(0, chosen, True)
        if threshold is None or budget is not None or math.isnan(number(threshold)):
            raise OptionError(f"Expected either a budget or a threshold, got {budget!r} and {threshold!r}.")
        return ~(self.uncertainty(by) <= threshold)  # so that what is not a number is deferred

    def __len__(self) -> int:
        return len(self.mean)

    def __getattr__(self, name: str) -> Any:
        for task, names in ONLY_FOR.items():
            if name in names:
                raise WrongTaskError(f"{name} is for {task}; this is a {type(self).__name__}.")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")

    def __getitem__(self, rows: Any) -> Self:
        rows = as_rows(rows)
        return self._map(lambda t: t[rows] if t.ndim else t)

    def to(self, device: str | torch.device) -> Self:
        """A copy on another device."""
        return self._map(lambda t: t.to(device))

    def cpu(self) -> Self:
        """A copy on the CPU."""
        return self.to("cpu")

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: change(v) for k, v in parts.items() if isinstance(v, Tensor)})

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Several batches, one after the other."""
        if len(parts) == 1:
            return parts[0]
        columns = {f.name: [getattr(p, f.name) for p in parts] for f in fields(parts[0])}
        rows = {k: torch.cat(v) for k, v in columns.items() if isinstance(v[0], Tensor) and v[0].ndim}
        return replace(parts[0], **rows)


@dataclass(frozen=True, eq=False)
class RegressionPredictive(Predictive):
    """The distribution of a new observation at each point, in the user's units: mean + std · z, with z Gaussian or of
    another law. Several outputs are taken as independent by `log_prob`, as they are in training, unless you use
    `covariance`; draws have that covariance where it is there, and then each output's law but roughly."""

    latent_variance: Tensor  # as mean: how unsure we are of the function
    noise: Tensor  # as mean: the variance of an observation around it
    latent_covariance: Tensor | None = None  # (N, C, C)
    law: Law | None = None  # of z, with unit variance, for each output; None: Gaussian

    @property
    def variance(self) -> Tensor:
        return self.latent_variance + self.noise

    @property
    def covariance(self) -> Tensor:
        if self.latent_covariance is None:
            if self.mean[0].numel() == 1:
                return self.variance.reshape(-1, 1, 1)
            raise OptionError("The covariance across outputs was not computed: call predict(..., covariance=True).")
        return self.latent_covariance + torch.diag_embed(self.noise.reshape(len(self), -1))

    def quantile(self, q: float | Tensor) -> Tensor:
        """The value below which a new observation falls with probability q, in (0, 1); a tensor q must broadcast
        against `mean`."""
        level = as_numbers(q, torch.float64)
        if level is None or not bool(((level > 0) & (level < 1)).all()):
            raise OptionError(f"Expected quantile levels strictly between 0 and 1, got {q!r}.")
        level = level.to(self.mean.device)
        return self._at(torch.special.ndtri(level) if self.law is None else self.law.quantile(level))

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval that holds a new observation with probability `level`: (lower, upper), beyond either of
        which it is as likely to be."""
        if not 0.0 < number(level) < 1.0:
            raise OptionError(f"Expected an interval level strictly between 0 and 1, got {level!r} (0.95 means 95 %).")
        if self.law is not None:
            return self.quantile(0.5 - 0.5 * level), self.quantile(0.5 + 0.5 * level)
        z = torch.special.ndtri(torch.tensor(0.5 + 0.5 * level, dtype=torch.float64, device=self.mean.device))
        return self._at(-z), self._at(z)

    def cdf(self, y: Any) -> Tensor:
        """The probability that a new observation is at most y."""
        z = self._standardised(y)
        return torch.special.ndtr(z) if self.law is None else self.law.cdf(z).to(z.dtype)

    def log_prob(self, y: Any) -> Tensor:
        z = self._standardised(y)
        if self.law is None:
            density = -0.5 * z.square() - self.std.log() - 0.5 * math.log(2.0 * math.pi)
        else:
            density = self.law.log_density(z).to(z.dtype) - self.std.log()
        return density.flatten(1).sum(-1) if density.ndim > 1 else density

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        n = draws_asked(n)
        shape = (n, *self.mean.shape)
        if self.law is None:
            noise = normal(shape, self.mean, generator)
        else:
            noise = self.law.sample(shape, generator).to(working_dtype(self.mean))
        if self.latent_covariance is None:
            return self.mean + self.std * noise
        return self.mean + correlate(self.covariance, noise.reshape(n, len(self), -1)).reshape(noise.shape)

    def to(self, device: str | torch.device) -> Self:
        """A copy on another device."""
        return replace(super().to(device), law=self.law.to(device) if self.law is not None else None)

    def _at(self, z: Tensor) -> Tensor:
        return self.mean + self.std * z.to(self.std.dtype)

    def _standardised(self, y: Any) -> Tensor:
        return (regression_targets(y, self.mean).to(self.std.dtype) - self.mean) / self.std


@dataclass(frozen=True, eq=False)
class ClassificationPredictive(Predictive):
    """Class probabilities, and the Gaussian over the logits behind them: `mean`, `variance` and `sample` are of the
    logits f, and `probs` are of softmax(f / temperature) averaged over them. The logits of a classifier that gives a
    single one, z, are [0, z]."""

    logit_variance: Tensor  # (N, C)
    log_probs: Tensor  # (N, C)
    temperature: Tensor  # () or (N, 1)
    keeps_argmax: bool = True  # whether the approximation behind log_probs cannot move the predicted class
    independent: bool = True  # whether logit_variance says everything about the covariance
    logit_covariance: Tensor | None = None  # (N, C, C)

    @property
    def variance(self) -> Tensor:
        return self.logit_variance

    @property
    def covariance(self) -> Tensor:
        if self.logit_covariance is not None:
            return self.logit_covariance
        if self.independent:
            return torch.diag_embed(self.logit_variance)
        raise OptionError("The covariance across classes was not computed: call predict(..., covariance=True).")

    @property
    def probs(self) -> Tensor:  # (N, C)
        """The class probabilities."""
        probs = self.log_probs.exp()
        top = self.mean.argmax(-1, keepdim=True)
        if self.keeps_argmax and bool((probs.argmax(-1, keepdim=True) != top).any()):
            # Two classes may round to one probability: the network's own choice stays first.
            winner = torch.nextafter(probs.amax(-1, keepdim=True), torch.full_like(probs[:, :1], math.inf))
            probs = torch.where(probs.argmax(-1, keepdim=True) != top, probs.scatter(-1, top, winner), probs)
        return probs

    def tempered(
        self,
        factor: Tensor,  # (N, 1)
    ) -> ClassificationPredictive:
        """With the temperature of each row, and the spread of its logits, multiplied by so much; means stay."""
        dtype, covariance = self.log_probs.dtype, self.logit_covariance
        return replace(
            self,
            log_probs=(self.log_probs.double() / factor).log_softmax(-1).to(dtype),
            logit_variance=(self.logit_variance * factor.square()).to(dtype),
            temperature=(self.temperature * factor).to(dtype),
            logit_covariance=None if covariance is None else (covariance * factor.square()[:, :, None]).to(dtype),
        )

    def entropy(self) -> Tensor:  # (N,)
        """The entropy of `probs`, in nats: all the uncertainty about the class."""
        return torch.special.entr(self.log_probs.exp()).sum(-1)

    def mutual_information(self, samples: int = 256, generator: torch.Generator | None = None) -> Tensor:  # (N,)
        """How much of the entropy comes from not knowing the function, in nats, from draws of the logits (with a
        generator of its own, so that the same question has the same answer)."""
        samples = integer("samples", samples, 1)
        if generator is None:
            generator = torch.Generator(self.mean.device).manual_seed(0)
        at_once = max(1, DRAWN_AT_ONCE // (samples * self.mean.shape[1]))
        parts = [self[start : start + at_once] for start in range(0, len(self), at_once)]
        return torch.cat([part._information(samples, generator) for part in parts])

    def _information(self, samples: int, generator: torch.Generator) -> Tensor:  # (N,)
        p = (self.sample(samples, generator) / self.temperature).softmax(-1)
        expected = torch.special.entr(p).sum(-1).mean(0)
        return (torch.special.entr(p.mean(0)).sum(-1) - expected).clamp_min(0.0)

    def log_prob(self, y: Any) -> Tensor:
        labels = class_labels(y, self.mean)
        return self.log_probs.gather(-1, labels[:, None]).squeeze(-1)

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        noise = normal((draws_asked(n), *self.mean.shape), self.mean, generator)
        if self.independent:
            return self.mean + self.std * noise
        return self.mean + correlate(self.covariance, noise)


def by_rows(ask: Callable[[Any], Tensor], pred: Predictive) -> Tensor:
    """ask(pred), worked out for some rows at a time, so that what is made of many classes in float64 stays small."""
    size = max(1, AT_ONCE // max(1, pred.mean.shape[1:].numel()))
    if len(pred) <= size:
        return ask(pred)
    return torch.cat([ask(pred[start : start + size]) for start in range(0, len(pred), size)])


def entropy(pred: ClassificationPredictive) -> Tensor:  # (N,)
    # In float64: the order of very sure predictions is lost in float32.
    return torch.special.entr(pred.log_probs.double().exp()).sum(-1)


def mean_variance(pred: Predictive) -> Tensor:  # (N,)
    variance = pred.variance.double()
    return variance.flatten(1).mean(-1) if variance.ndim > 1 else variance


UNCERTAINTIES: dict[str, Callable[[Any], Tensor]] = {
    "entropy": lambda pred: by_rows(entropy, pred),
    "least_confidence": lambda pred: -torch.expm1(pred.log_probs.amax(-1).double()),
    "mutual_information": lambda pred: pred.mutual_information(),
    "variance": mean_variance,
    "std": lambda pred: mean_variance(pred).sqrt(),
}


def rows_allowed(budget: Any, rows: int) -> int:
    """How many rows a share of them, or a number of them, is."""
    try:
        allowed = index(budget)
    except TypeError:
        share = number(budget)
        # As it was written: 0.29 × 100 is less than 29 in floating point.
        allowed = math.floor(Fraction(repr(share)) * rows) if 0.0 <= share <= 1.0 else -1
    if allowed < 0:
        raise OptionError(f"Expected a share of the rows from 0.0 to 1.0, or a number of rows, got {budget!r}.")
    return allowed


def normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(shape, dtype=working_dtype(like), device=like.device, generator=generator)


def draws_asked(n: Any) -> int:
    """How many draws are asked for, if that is a number of them."""
    try:
        asked = index(n)
    except TypeError:
        asked = 0
    if asked < 1:
        raise OptionError(f"Expected at least one draw, a whole number of them, got n = {n!r}.")
    return asked
