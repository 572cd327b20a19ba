"""A classifier's outputs as logits, whether they are logits, probabilities or log-probabilities.

Example:
    >>> import torch
    >>> as_logits(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), "probs").softmax(1)
    tensor([[0.5000, 0.5000],
            [0.2500, 0.7500]])
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from posthoc.errors import DataError, warn
from posthoc.validation import choice, require_finite

KINDS = ("logits", "log-probs", "probs")

SUM_ERROR = 0.0101
"""Largest deviation from 1 of a row's sum where nothing is known of the rounding."""

ROUNDED_SUM_ERROR = 0.5
"""Largest deviation from 1 of a row's sum that rounding to few decimals may explain."""

RANGE_ERROR = 1e-6
"""Largest distance of a probability from [0, 1] that is floating-point error."""

LOG_ERROR = 1e-2
"""Largest deviation from 0 of the logarithm of a row's sum: log-probabilities may be rounded to float16."""

GRIDS = torch.tensor([*range(2, 1001), 10**4, 10**5], dtype=torch.float64)
"""Candidate numbers of steps between 0 and 1: one to five decimals, and averages over up to 1,000 votes or trees."""

FEWEST_VALUES = 10
"""A unit of rounding is only derived from this many probabilities strictly between 0 and 1, or more."""

MOST_VALUES = 4096
"""Number of probabilities, evenly spaced in the data, that a unit of rounding is derived from."""


class Rounding(NamedTuple):
    """How coarse the probabilities of a data set are."""

    floor: float  # the probability that an exact 0 stands for
    unit: float  # the unit that all probabilities are multiples of, or 0 if they are not rounded

    @property
    def zero(self) -> float:
        """The largest probability that counts as 0."""
        return RANGE_ERROR * self.unit or (self.floor if self.floor <= torch.finfo(torch.float32).eps else 0.0)

    def sum_error(self, classes: int) -> float:
        """How far the sum of a row may deviate from 1."""
        return max(SUM_ERROR, min(classes * self.unit / 2.0 * (1.0 + RANGE_ERROR), ROUNDED_SUM_ERROR))


def as_logits(outputs: Tensor, kind: str, rounding: Rounding | None = None) -> Tensor:
    """Converts a classifier's outputs to logits whose softmax is the probabilities of the classes.

    Logits and log-probabilities are returned as they are, apart from logarithms of 0. Results are never in half
    precision unless the outputs were log-probabilities or logits in half precision.

    Args:
        outputs: Real tensor of shape (N, C), or (N,) or (N, 1) with the score of class 1 of two.
        kind: `"logits"`, `"probs"` or `"log-probs"`.
        rounding: Result of `find_rounding` on the data that a method was fitted on, so that predictions treat zeros as
            the fit did. By default it is derived from `outputs`, with a warning if zeros are replaced.

    Returns:
        Finite logits of shape (N, C) with C > 1.

    Raises:
        DataError: If the outputs are not of this kind.
    """
    columns = as_columns(outputs, kind)
    if kind == "logits":
        return torch.cat([torch.zeros_like(columns), columns], 1) if columns.shape[1] == 1 else columns
    rounding = rounding or find_rounding(outputs, kind)
    log_p = log_of_probs(columns, rounding) if kind == "probs" else checked_log_probs(columns, rounding)
    return log_p - log_p[:, :1] if columns.shape[1] == 1 else log_p


def find_rounding(outputs: Tensor, kind: str, loss: Callable[[Tensor], float] | None = None) -> Rounding:
    """Derives from probabilities how coarse they are, and which probability an exact 0 stands for; warns of zeros.

    If all values lie on a grid (two decimals, or tenths of a forest of ten trees), a 0 stands for half its unit;
    otherwise for half of the smallest positive value. With fewer than ten values strictly between 0 and 1 neither is
    known, and a 0 stands for the machine epsilon.

    Probabilities that are not rounded may underflow, as those of naive Bayes do. If the loss is lower when all
    probabilities below the machine epsilon are raised to it, a 0 stands for the machine epsilon as well.

    Args:
        outputs: As in `as_logits`. Of logits nothing is derived.
        kind: As in `as_logits`.
        loss: The loss of logits (N, C) after calibration.
    """
    columns = as_columns(outputs, kind)
    limits = torch.finfo(torch.promote_types(columns.dtype, torch.float32))
    unit, floor = 0.0, limits.eps
    if kind == "logits" or not len(columns):
        return Rounding(floor, unit)
    values = columns.double().exp() if kind == "log-probs" else columns.double()
    zeros = columns.isneginf() if kind == "log-probs" else columns <= 0.0
    if columns.shape[1] == 1:
        zeros = zeros | (columns >= (0.0 if kind == "log-probs" else 1.0))  # the other class has what is left
    inner = values[(values > 0.0) & (values < 1.0)]
    if len(inner) >= FEWEST_VALUES:
        unit = find_unit(inner, columns.dtype)
        floor = (unit or float(inner.min())) / 2.0
    floor = max(floor, limits.tiny)
    if bool(zeros.any()):
        if loss is not None and not unit and floor < limits.eps:
            floor = min((floor, limits.eps), key=lambda each: loss(as_logits(outputs, kind, Rounding(each, unit))))
        smallest = "like smaller ones" if len(inner) and floor > float(inner.min()) else "less than any other"
        reason = f"half of their unit of rounding, {unit:.3g}" if unit else smallest
        counts = f"{int(zeros.sum()):,} of {values.numel():,}"
        advice = "Give logits, or unrounded probabilities, if you have them."
        warn(f"{counts} probabilities are 0 and are taken as {floor:.3g} ({reason}). {advice}")
    return Rounding(floor, unit)


def find_unit(values: Tensor, dtype: torch.dtype) -> float:
    """The coarsest unit that all values (float64) are multiples of, up to floating-point error; 0 if there is none."""
    values = values[:: max(1, len(values) // MOST_VALUES)]
    error = max(0.6 * torch.finfo(dtype).eps, 8.0 * torch.finfo(torch.float32).eps)  # half precision: of rounding alone
    grids = GRIDS[error * GRIDS < 0.1].to(values.device)
    for part in (values[:FEWEST_VALUES], values):
        steps = part[:, None] * grids
        grids = grids[((steps - steps.round()).abs() <= error * steps.clamp_min(1.0)).all(0)]
    return 1.0 / float(grids[0]) if len(grids) else 0.0


def as_columns(outputs: Tensor, kind: str) -> Tensor:  # (N, C)
    """Outputs as a matrix; raises `DataError` for values that are not of this kind."""
    choice("kind", kind, KINDS)
    if outputs.ndim not in (1, 2) or not outputs.shape[1:].numel() or not outputs.is_floating_point():
        found = f"{outputs.dtype} of shape {tuple(outputs.shape)}"
        raise DataError(f"Expected real outputs of shape (N, C), or (N,) for two classes, got {found}.")
    values = outputs[:, None] if outputs.ndim == 1 else outputs
    if kind == "logits":
        require_finite(values, "logits")
    elif kind == "probs":
        wrong = (values < -RANGE_ERROR) | (values > 1.0 + RANGE_ERROR) | values.isnan()
        refuse(values, wrong, "probabilities from 0 to 1")
    else:
        refuse(values, (values > LOG_ERROR) | values.isnan(), "logarithms of probabilities, at most 0")
    return values


def log_of_probs(p: Tensor, rounding: Rounding) -> Tensor:  # (N, C)
    """The logarithms of probabilities, with zeros raised to half of their unit of rounding."""
    dtype, precision = p.dtype, torch.finfo(p.dtype).eps
    p = p.to(torch.promote_types(dtype, torch.float32)).clamp(0.0, 1.0)
    p = torch.cat([1.0 - p, p], 1) if p.shape[1] == 1 else p
    total = p.sum(1, keepdim=True)
    wrong = (total - 1.0).abs() > rounding.sum_error(p.shape[1]) + precision
    zeros = not rounding.unit and bool((p == 0.0).any())
    inner = p[(p > 0.0) & (p < 1.0)] if zeros or bool(wrong.any()) else p[:0, 0]
    if len(inner) >= FEWEST_VALUES:  # these rows may be rounded more than those of the fit
        unit = find_unit(inner.double(), dtype)
        wrong &= (total - 1.0).abs() > Rounding(0.0, unit).sum_error(p.shape[1]) + precision
        if zeros and unit / 2.0 > rounding.floor:
            said = f"These probabilities are rounded to {unit:.3g} and those of the fit were not"
            warn(f"{said}: a 0 is taken as {rounding.floor:.3g}. Fit on data that are rounded in the same way.")
    refuse(total, wrong, "probabilities that sum to 1 in every row", "Or are they of several labels a row?")
    log_p = torch.where(p > rounding.zero, p.log(), math.log(rounding.floor))
    return log_p - torch.where((total - 1.0).abs() > SUM_ERROR, total.log(), 0.0)


def checked_log_probs(log_p: Tensor, rounding: Rounding) -> Tensor:  # (N, C)
    """Log-probabilities, normalized; raises `DataError` where they do not sum to 1 within rounding."""
    wide = log_p.to(torch.promote_types(log_p.dtype, torch.float32))
    if log_p.shape[1] == 1:
        wide = wide.clamp(max=0.0)
        # log(1 − p) has two forms, one accurate for p above one half and one below
        other = torch.where(wide > -math.log(2.0), (-torch.expm1(wide)).log(), torch.log1p(-wide.exp()))
        log_p = wide = torch.cat([other, wide], 1)
    total = wide.logsumexp(1, keepdim=True)
    wrong = total.abs() > max(LOG_ERROR, rounding.sum_error(log_p.shape[1]))
    refuse(total, wrong, "logarithms of probabilities that sum to 1 (to 0 in logarithms)")
    return log_p.masked_fill(log_p.isneginf(), math.log(rounding.floor))


def refuse(values: Tensor, wrong: Tensor, expected: str, hint: str = "") -> None:
    """Raises `DataError` that names the first row where `wrong` is true."""
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        advice = f"Are these logits, or of another kind than you said? The kinds are {', '.join(KINDS)}. {hint}"
        raise DataError(f"Expected {expected}, got {float(values[row, column]):.6g} in row {row}. {advice}".rstrip())
