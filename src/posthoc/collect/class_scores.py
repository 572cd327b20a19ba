"""What a classifier says, be it logits, probabilities or their logarithms, as logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posthoc.errors import DataError
from posthoc.validation import choice, require_finite

__all__ = ["KINDS", "as_logits"]

KINDS = ("logits", "log-probs", "probs")

SUM_ROUNDING = 1e-3
"""How far from 1 probabilities may sum to."""

RANGE_ROUNDING = 1e-6
"""How far outside [0, 1] a probability may lie."""

LOG_ROUNDING = 1e-2
"""How far from 0 the logarithm of their sum may be, and above it a logarithm: they may have been rounded to float16."""


def as_logits(outputs: Tensor, kind: str) -> Tensor:  # (N, C), C > 1
    """Logits whose softmax is the classes' probabilities; one column speaks of class 1 of two.

    A probability of 0 becomes the smallest normal number, so that every logit is finite. Logarithms of probabilities
    are logits, and both are returned as they are; what is computed is not in half precision.
    """
    choice("kind", kind, KINDS)
    if outputs.ndim not in (1, 2) or not outputs.shape[1:].numel() or not outputs.is_floating_point():
        raise DataError(
            "Expected real outputs of shape (N, C), or (N,) for two classes, got "
            f"{outputs.dtype} of shape {tuple(outputs.shape)}."
        )
    columns = outputs[:, None] if outputs.ndim == 1 else outputs
    convert = {"logits": from_logits, "log-probs": from_log_probs, "probs": from_probs}[kind]
    return convert(columns)


def from_logits(z: Tensor) -> Tensor:
    require_finite(z, "logits")
    return z if z.shape[1] > 1 else beside_zero(z)


def from_probs(p: Tensor) -> Tensor:
    refuse(p, (p < -RANGE_ROUNDING) | (p > 1.0 + RANGE_ROUNDING) | p.isnan(), "probabilities from 0 to 1")
    p = p.to(working(p)).clamp(0.0, 1.0)
    floor = lowest(p)
    if p.shape[1] == 1:
        # z = log p − log(1 − p)
        return beside_zero(p.log().clamp_min(floor) - torch.log1p(-p).clamp_min(floor))
    total = p.sum(1, keepdim=True)
    refuse(total, (total - 1.0).abs() > SUM_ROUNDING, "probabilities that sum to 1 in every row")
    return p.log().clamp_min(floor)


def from_log_probs(l: Tensor) -> Tensor:  # noqa: E741
    floor = lowest(l)
    refuse(l, (l > LOG_ROUNDING) | l.isnan(), "logarithms of probabilities, at most 0")
    if l.shape[1] == 1:
        l = l.to(working(l)).clamp(max=0.0)  # noqa: E741
        # log(1 − eˡ), by the form that is exact on either side of one half
        complement = torch.where(l > -math.log(2.0), (-torch.expm1(l)).log(), torch.log1p(-l.exp()))
        return beside_zero(l.masked_fill(l.isneginf(), floor) - complement.clamp_min(floor))
    total = l.to(working(l)).logsumexp(1, keepdim=True)
    refuse(total, total.abs() > LOG_ROUNDING, "logarithms of probabilities that sum to 1 (to 0 in logarithms)")
    return l.masked_fill(l.isneginf(), floor)


def beside_zero(z: Tensor) -> Tensor:  # (N, 2)
    return torch.cat([torch.zeros_like(z), z], dim=1)


def working(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def lowest(values: Tensor) -> float:
    """The logarithm that stands for that of 0."""
    return math.log(torch.finfo(working(values)).tiny)


def refuse(values: Tensor, wrong: Tensor, expected: str) -> None:
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise DataError(
            f"Expected {expected}, got {float(values[row, column]):.6g} in row {row}. Are these logits, or of another "
            f"kind than you said? The kinds are {', '.join(KINDS)}."
        )
