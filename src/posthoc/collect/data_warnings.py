"""Data that can be used but look wrong: a warning in plain words, before a fit that would go wrong quietly."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError, warn
from posthoc.numerics import minimize

ROWS = 2**14
"""Rows that are looked at."""
FEWEST = 500
"""Fewer are no sign of anything."""
RIGHT, LOSS = 0.998, 0.01
"""A network that is right this often, and this sure of it, has hardly met these data for the first time."""
SHARE = 0.5
"""Errors on the data of the fit that are smaller than this share of those on validation data."""
ROWS_PER_CLASS = 50
"""Rows for each class from which on a class that is never true is reported. Half of them suffice to try a refit."""
MAX_COMPARED, MAX_WORK, MUCH_BETTER = 5000, 2 * 10**8, 0.1
"""Rows and multiplications of a pass that a refit is tried with, at most, and the gain in accuracy worth a warning."""


def warn_if_half(outputs: Tensor) -> None:
    """Warns of outputs in half precision."""
    if outputs.dtype in (torch.float16, torch.bfloat16):
        rest = "the uncertainty is computed in float64 and returned in float32"
        warn(f"The outputs are {outputs.dtype}: means stay as they are, {rest}.")


def check_classes(train: Outputs, *, required: bool) -> None:
    """Warns of labels of one class alone; an error if several are `required`."""
    labels = train.targets
    assert labels is not None
    if int(labels.min()) < int(labels.max()) or (len(labels) == 1 and not required):
        warn_of_unused_classes(train)
        return
    found = f"Expected labels of at least two classes, got class {int(labels[0])} in all {len(labels)} rows"
    if required:
        raise DataError(f"{found}: such data say nothing about what separates classes.")
    warn(f"{found}: the fit is of no use for the other classes.")


def warn_of_unused_classes(train: Outputs) -> None:
    """Warns of classes that are never true, where rows are many enough to show that."""
    some, classes = train.only().spread(ROWS), train.outputs.shape[1]
    assert some.targets is not None
    if len(some) < ROWS_PER_CLASS * classes:
        return
    unused = (torch.bincount(some.targets.long(), minlength=classes) == 0).nonzero().squeeze(-1).tolist()
    if unused:
        names = ", ".join(map(str, unused[:10])) + (", ..." if len(unused) > 10 else "")
        which = f"class {names} is" if len(unused) == 1 else f"classes {names} are"
        warn(f"Of {classes} classes, {which} never true in {len(some):,} rows of the fit.")


@torch.no_grad()
def warn_if_refit_is_better(train: Outputs, seed: int = 0) -> None:
    """Warns where a logistic regression on the features is much more accurate on other rows than the network."""
    if train.features is None or train.targets is None:
        return
    some = train.only("features").spread(MAX_COMPARED)
    assert some.features is not None
    assert some.targets is not None
    classes, width = some.outputs.shape[1], some.features.shape[1]
    if len(some) < ROWS_PER_CLASS // 2 * classes or len(some) * width * classes > MAX_WORK:
        return
    x, y = some.features.double(), some.targets.long()
    x = (x - x.mean(0)) / x.std(0).clamp_min(1e-12)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device)
    fit, other = order[::2], order[1::2]
    weight = torch.zeros(width, classes, dtype=torch.float64, device=x.device)
    x_fit, y_fit = x[fit], y[fit]

    def loss() -> Tensor:
        return F.cross_entropy(x_fit @ weight, y_fit, reduction="sum") + weight.square().sum()

    minimize(loss, [weight], steps=30, tolerance=1.0)
    refitted = float(((x[other] @ weight).argmax(-1) == y[other]).double().mean())
    network = float((some.outputs[other].argmax(-1) == y[other]).double().mean())
    if refitted - network >= MUCH_BETTER:
        warn(
            f"A logistic regression on the features is right for {refitted:.0%} of other rows, the network for "
            f"{network:.0%}: refit the last layer rather than calibrate it."
        )


def warn_if_probabilities(*collected: Tensor) -> None:
    """Warns of outputs that look like probabilities where logits are expected."""
    if any(map(look_like_probabilities, collected)):
        advice = 'if they are, say outputs_are="probs" (--outputs-are probs)'
        warn(f"These outputs look like probabilities and are taken for logits: {advice}.")


def look_like_probabilities(outputs: Tensor) -> bool:
    """Whether the first rows are in [0, 1] and sum to 1."""
    if outputs.ndim > 2:
        return False
    some = outputs[:1024].double().reshape(min(len(outputs), 1024), -1)
    sums = some.sum(-1) if some.shape[1] > 1 else torch.ones_like(some[:, 0])
    return bool(((some >= 0.0) & (some <= 1.0)).all() and ((sums - 1.0).abs() < 1e-3).all())


def warn_if_memorized(train: Outputs, val: Outputs | None, task: str) -> None:
    """Warns of data that the network has seen in training: its errors there say nothing of those to come."""
    if len(train) < FEWEST:
        return
    accuracy, loss = fit_quality(train, task)
    _, val_loss = fit_quality(val, task) if val is not None and len(val) >= FEWEST else (0.0, 0.0)
    if accuracy >= RIGHT and loss <= LOSS:
        sign = f"the network is right on {accuracy:.1%} of them, with a mean loss of {loss:.2g}"
    elif loss < SHARE * val_loss:
        sign = f"its mean error is {loss:.3g} here and {val_loss:.3g} on the validation data"
    else:
        return
    advice = 'Fit on data that were kept apart or, for images, on changed views: fit(..., augment="crops")'
    warn(f"The network seems to have seen these data in training: {sign}. The fit is too sure of new data. {advice}.")


def fit_quality(outputs: Outputs, task: str) -> tuple[float, float]:
    """The accuracy and the mean log loss of a classifier; 0 and the root mean squared error in regression."""
    rows = outputs.spread(ROWS)
    assert rows.targets is not None
    if task != "classification":
        return 0.0, float((rows.targets.double() - rows.outputs.double()).square().mean().sqrt())
    log_p, y = rows.outputs.double().log_softmax(-1), rows.targets.long()
    return float((log_p.argmax(-1) == y).double().mean()), -float(log_p.gather(-1, y[:, None]).mean())
