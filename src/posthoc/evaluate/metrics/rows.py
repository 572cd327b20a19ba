"""One number for each point: the predicted class, and several answers to how uncertain a prediction is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from posthoc.predictive.base import Predictive
from posthoc.validation import choice

__all__ = [
    "UNCERTAINTIES",
    "Uncertainty",
    "by_rows",
    "entropy",
    "least_confidence",
    "mutual_information",
    "predicted_class",
    "row_means",
    "uncertainty",
    "variance",
]

AT_ONCE = 2**20
"""Numbers worked on at a time, so that what is made of many classes in float64 stays small beside the predictions."""


def by_rows(score: Callable[..., Tensor], pred: Predictive, *more: Tensor) -> Tensor:  # (N,)
    """score(pred, ...), worked out for some rows at a time."""
    size = max(1, AT_ONCE // max(1, pred.mean.shape[1:].numel()))
    if len(pred) <= size:
        return score(pred, *more)
    parts = (slice(start, start + size) for start in range(0, len(pred), size))
    return torch.cat([score(pred[rows], *(each[rows] for each in more)) for rows in parts])


def row_means(values: Tensor) -> Tensor:  # (N,)
    """The average over each point's outputs, where it has several, in float64."""
    return values.double() if values.ndim == 1 else values.double().flatten(1).mean(-1)


def predicted_class(pred: Predictive) -> Tensor:  # (N,)
    """The most probable class."""
    return by_rows(lambda part: part.probs.argmax(-1), pred)


def entropy(pred: Predictive) -> Tensor:  # (N,)
    """The entropy of the class, in nats. In float64: the order of very sure predictions is lost in float32."""
    return by_rows(lambda part: torch.special.entr(part.log_probs.double().exp()).sum(-1), pred)


def least_confidence(pred: Predictive) -> Tensor:  # (N,)
    """One minus the largest probability, without rounding it to zero."""
    return -torch.expm1(pred.log_probs.amax(-1).double())


def variance(pred: Predictive) -> Tensor:  # (N,)
    """`pred.variance` averaged over a point's outputs: of a new observation in regression, of the logits otherwise."""
    return row_means(pred.variance)


def mutual_information(pred: Predictive) -> Tensor:  # (N,)
    """How much the class would tell about the function, in nats (BALD), from seeded draws of the logits."""
    return pred.mutual_information()


Uncertainty = Callable[[Predictive], Tensor]

UNCERTAINTIES: dict[str, Uncertainty] = {
    "entropy": entropy,
    "least_confidence": least_confidence,
    "variance": variance,
    "mutual_information": mutual_information,
}


def uncertainty(score: str | Uncertainty) -> Uncertainty:
    """A score by its name, or a function of predictions that gives one number a row, larger where less is known."""
    if callable(score):
        return score
    choice("the uncertainty", score, tuple(UNCERTAINTIES))
    return UNCERTAINTIES[score]
