"""Data that can be used but look wrong: a warning in plain words, before a fit that would go wrong quietly."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from posthoc.collect.outputs import Outputs
from posthoc.errors import PosthocWarning

__all__ = ["doubt_logits", "doubt_memorised"]

ROWS = 2**14
"""Rows that are looked at."""
FEWEST = 500
"""Fewer are no sign of anything."""
RIGHT, LOSS = 0.998, 0.01
"""A network that is right this often, and this sure of it, has hardly met these data for the first time."""
SHARE = 0.5
"""Errors on the data of the fit that are smaller than this share of those on validation data."""


def doubt_logits(said: Tensor) -> None:
    """Warns of what look like probabilities where logits are expected."""
    if said.ndim > 2:
        return
    some = said[:1024].double().reshape(min(len(said), 1024), -1)
    sums = some.sum(-1) if some.shape[1] > 1 else torch.ones_like(some[:, 0])
    if bool(((some >= 0.0) & (some <= 1.0)).all()) and bool(((sums - 1.0).abs() < 1e-3).all()):
        warn(
            'These outputs look like probabilities and are taken for logits: say outputs_are="probs" '
            "(--outputs-are probs) if they are."
        )


def doubt_memorised(train: Outputs, val: Outputs | None, task: str) -> None:
    """Warns of data that the network has seen in training: its errors there say nothing of those to come."""
    if len(train) < FEWEST:
        return
    here = train.spread(ROWS)
    there = val.spread(ROWS) if val is not None and len(val) >= FEWEST else None
    if task == "classification":
        right, loss = confidence(here)
        if right >= RIGHT and loss <= LOSS:
            suspect(f"the network is right on {right:.1%} of them, with a mean loss of {loss:.2g}")
        elif there is not None and loss < SHARE * confidence(there)[1]:
            suspect(f"its mean loss is {loss:.2g} here and {confidence(there)[1]:.2g} on the validation data")
    elif there is not None and size(here) < SHARE * size(there):
        suspect(f"its errors are of size {size(here):.3g} here and {size(there):.3g} on the validation data")


def suspect(sign: str) -> None:
    warn(
        f"The network seems to have seen these data in training: {sign}. What is learnt from so few errors is too sure "
        "of new data. Fit on data that were kept apart; or, for images, on changed views of them: "
        'fit(..., augment="crops").'
    )


def confidence(rows: Outputs) -> tuple[float, float]:
    """How often the network is right, and its mean loss."""
    assert rows.targets is not None
    log_p, y = rows.outputs.double().log_softmax(-1), rows.targets.long()
    return float((log_p.argmax(-1) == y).double().mean()), -float(log_p.gather(-1, y[:, None]).mean())


def size(rows: Outputs) -> float:
    """The root of the mean squared residual."""
    assert rows.targets is not None
    return float((rows.targets.double() - rows.outputs.double()).square().mean().sqrt())


def warn(message: str) -> None:
    warnings.warn(message, PosthocWarning, stacklevel=6)
