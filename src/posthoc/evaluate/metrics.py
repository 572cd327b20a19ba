"""Metrics: functions of a predictive and the targets.

A score (`log_loss`, `confidence`, `squared_error`, ...) gives one number a row, (N,). A figure (`nll`, `ece`, `rmse`,
...) gives one number for all rows. All are in float64. `posthoc.evaluate.scores.Scores` computes the figures of a task
batch by batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from posthoc.errors import DataError, WrongTaskError
from posthoc.predictive.base import By, Predictive, apply_by_rows, row_means
from posthoc.predictive.calibration_error import expected_calibration_error, smooth_calibration_error
from posthoc.validation import class_labels, integer, regression_targets

Score = Callable[[Predictive, Any], Tensor]


# Scores: one number a row.


def log_loss(pred: Predictive, y: Any) -> Tensor:  # (N,)
    """Negative log-likelihood in nats; in regression that of the density in the user's units."""
    return -pred.log_prob(y)


def confidence(pred: Predictive, y: Any = None) -> Tensor:  # (N,)
    """The probability of the predicted class."""
    return pred.log_probs.gather(-1, pred.labels[:, None]).squeeze(-1).double().exp()


def class_probabilities(pred: Predictive, y: Any = None) -> Tensor:  # (N, C)
    """The probabilities of all classes."""
    return pred.log_probs.double().exp()


def hit(pred: Predictive, y: Any) -> Tensor:  # (N,)
    """1 where the predicted class is the true one, else 0."""
    return (class_labels(y, pred.log_probs) == pred.labels).double()


def squared_distance(pred: Predictive, y: Any) -> Tensor:  # (N,)
    """The Brier score, Σ_c (p_c - 1[y = c])²: from 0 to 2."""
    labels = class_labels(y, pred.log_probs)
    true = pred.log_probs.gather(-1, labels[:, None]).squeeze(-1).double().exp()
    all_squares = apply_by_rows(lambda part: part.log_probs.double().exp().square().sum(-1), pred)
    return all_squares - true.square() + (1.0 - true).square()


def squared_error(pred: Predictive, y: Any) -> Tensor:  # (N,)
    """(target - mean)², averaged over the outputs."""
    return row_means(errors(pred, y).square())


def absolute_error(pred: Predictive, y: Any) -> Tensor:  # (N,)
    """|target - mean|, averaged over the outputs."""
    return row_means(errors(pred, y).abs())


def ranked_probability_score(pred: Predictive, y: Any) -> Tensor:  # (N,)
    """The continuous ranked probability score in closed form, averaged over the outputs."""
    error, std = errors(pred, y), pred.std.double()
    z = error / std.clamp_min(1e-300)  # at a standard deviation of zero the score is the absolute error
    if pred.residuals is not None:
        return row_means(std * pred.residuals.crps(z))
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2.0 * math.pi)
    # σ [z (2Φ(z) - 1) + 2φ(z) - 1/√π]
    return row_means(error * torch.erf(z / math.sqrt(2.0)) + std * (2.0 * density - 1.0 / math.sqrt(math.pi)))


def probability_below(pred: Predictive, y: Any) -> Tensor:  # as mean
    """The predicted probability of a value below the target: the probability integral transform."""
    return pred.cdf(real_targets(pred, y)).double()


def covered(pred: Predictive, y: Any, level: float) -> Tensor:  # (N,)
    """The share of a row's outputs whose target is inside the central interval."""
    y = real_targets(pred, y)
    lower, upper = pred.interval(level)
    return row_means((y >= lower) & (y <= upper))


def interval_width(pred: Predictive, y: Any, level: float) -> Tensor:  # (N,)
    """The width of the central interval, averaged over the outputs."""
    real_targets(pred, y)
    lower, upper = pred.interval(level)
    return row_means(upper.double() - lower.double())


def winkler_score(pred: Predictive, y: Any, level: float) -> Tensor:  # (N,)
    """The interval score of the central interval, averaged over the outputs: its width, and 2/(1 - level) times the
    distance by which it misses the target (Gneiting and Raftery, 2007)."""
    y = real_targets(pred, y).double()
    lower, upper = (end.double() for end in pred.interval(level))
    missed = (lower - y).clamp_min(0.0) + (y - upper).clamp_min(0.0)
    return row_means(upper - lower + 2.0 / (1.0 - level) * missed)


def uncertainty(pred: Predictive, y: Any = None, by: By = None) -> Tensor:  # (N,)
    """`pred.uncertainty(by)`, by default the entropy of classes or the standard deviation of real numbers."""
    return pred.uncertainty(by)


def ood_score(pred: Predictive, y: Any = None) -> Tensor:  # (N,)
    """`pred.ood_score`: how unlike the rows of the fit each point is."""
    return pred.ood_score


def default_loss(pred: Predictive, y: Any) -> Tensor:  # (N,)
    """1 for a wrong class; the squared error of real numbers."""
    return 1.0 - hit(pred, y) if hasattr(pred, "log_probs") else squared_error(pred, y)


# Figures: one number for all rows.


def nll(pred: Predictive, y: Any) -> Tensor:
    """Negative log-likelihood of a point in nats (regression: of its density in the user's units).

    Args:
        pred: Predictions for N rows, of any task.
        y: The N targets.
    """
    return scores(log_loss, pred, y).mean()


def accuracy(pred: Predictive, y: Any) -> Tensor:
    """The share of points whose most probable class is the true one."""
    return scores(hit, pred, y).mean()


def ece(pred: Predictive, y: Any, bins: int = 15, *, equal_mass: bool = False) -> Tensor:
    """Expected calibration error of the predicted class.

    Args:
        pred: Class predictions for N rows.
        y: (N,) class labels.
        bins: Number of bins of confidence.
        equal_mass: Bins of equal numbers of points instead of equal width.

    Example:
        >>> from posthoc import MAP, Outputs
        >>> data = Outputs(2 * torch.eye(3), torch.arange(3))
        >>> pred = MAP(None, "classification").fit(data).predict(data)
        >>> round(float(ece(pred, data.targets)), 3)
        0.213
    """
    bins = integer("bins", bins, 1)
    return expected_calibration_error(scores(confidence, pred, y), scores(hit, pred, y), bins, equal_mass=equal_mass)


def smooth_ece(pred: Predictive, y: Any) -> Tensor:
    """Smooth calibration error of the predicted class: without bins (see `smooth_calibration_error`)."""
    return smooth_calibration_error(scores(confidence, pred, y), scores(hit, pred, y))


def classwise_ece(pred: Predictive, y: Any, bins: int = 15) -> Tensor:
    """The expected calibration error of the probability of each class, averaged over the classes (Kull et al., 2019).

    Args:
        pred: Class predictions for N rows.
        y: (N,) class labels.
        bins: Number of bins of equal width.
    """
    bins, labels = integer("bins", bins, 1), class_labels(y, pred.log_probs)
    columns = scores(class_probabilities, pred, y).mT.contiguous()
    return torch.stack([expected_calibration_error(p, labels == c, bins) for c, p in enumerate(columns)]).mean()


def brier(pred: Predictive, y: Any) -> Tensor:
    """The multi-class Brier score, summed over classes and averaged over points: from 0 to 2."""
    return scores(squared_distance, pred, y).mean()


def rmse(pred: Predictive, y: Any) -> Tensor:
    """Root of the mean squared error of the mean."""
    return scores(squared_error, pred, y).mean().sqrt()


def mae(pred: Predictive, y: Any) -> Tensor:
    """Mean absolute error of the mean."""
    return scores(absolute_error, pred, y).mean()


def crps(pred: Predictive, y: Any) -> Tensor:
    """Continuous ranked probability score in closed form; see `crps_of_draws` for predictions known by draws."""
    return scores(ranked_probability_score, pred, y).mean()


def crps_of_draws(draws: Tensor, y: Any, *, fair: bool = False) -> Tensor:  # (N, ...)
    """The CRPS of each point's draws.

    Args:
        draws: (S, N, ...), S draws for each of N points, such as `pred.sample(S)`.
        y: (N, ...), the targets.
        fair: False scores the empirical distribution of the draws. True gives an unbiased estimate of the CRPS of the
            distribution they were drawn from, which is lower.

    Raises:
        DataError: If there are no draws, or with `fair` fewer than two.
    """
    least = 2 if fair else 1
    if draws.ndim < 2 or len(draws) < least:
        raise DataError(f"Expected draws of shape (S, N) with S at least {least}, got {tuple(draws.shape)}.")
    s = len(draws)
    distance = (draws.double() - regression_targets(y, draws[0]).double()).sort(0).values
    # E|X - y| - ½ E|X - X'|, the second from order statistics: ½ Σᵢⱼ |xᵢ - xⱼ| = Σᵢ (2i - S - 1) x₍ᵢ₎, i = 1, …, S.
    rank = torch.arange(1 - s, s, 2, dtype=torch.float64, device=draws.device)
    spread = torch.einsum("s,s...->...", rank, distance) / (s * (s - 1) if fair else s * s)
    return distance.abs().mean(0) - spread


def coverage(pred: Predictive, y: Any, level: float = 0.95) -> Tensor:
    """The share of targets inside the central interval of the given level; best is the level itself."""
    return scores(partial(covered, level=level), pred, y).mean()


def width(pred: Predictive, y: Any, level: float = 0.95) -> Tensor:
    """The mean width of the central interval of the given level: smaller is better if the coverage is right."""
    return scores(partial(interval_width, level=level), pred, y).mean()


def interval_score(pred: Predictive, y: Any, level: float = 0.9) -> Tensor:
    """The mean interval score (Winkler score) of the central interval of the given level: smaller is better."""
    return scores(partial(winkler_score, level=level), pred, y).mean()


def pit_error(pred: Predictive, y: Any) -> Tensor:
    """The calibration error of the probability integral transform, ∫₀¹ |share of targets below the u-quantile - u| du,
    from 0 to 0.5."""
    return distance_to_uniform(scores(probability_below, pred, y))


def cqm(pred: Predictive, y: Any) -> Tensor:
    """The centered quantile metric, ∫₀¹ |share of targets inside the central α-interval - α| dα, from 0 to 0.5."""
    return cqm_of(scores(probability_below, pred, y))


def cqm_of(below: Tensor) -> Tensor:
    """The centered quantile metric from predicted probabilities of values below the targets.

    A target is inside the central α-interval as soon as α reaches |2 cdf(y) - 1|, so the share is the empirical
    distribution of these.
    """
    return distance_to_uniform((2.0 * below - 1.0).abs())


def distance_to_uniform(values: Tensor) -> Tensor:
    """∫₀¹ |F(t) - t| dt, F the empirical distribution of values in [0, 1]: a step function, so the integral is exact.

    Args:
        values: A tensor of any shape.
    """
    u = values.reshape(-1).sort().values
    edges = torch.cat([u.new_zeros(1), u, u.new_ones(1)])
    heights = torch.arange(len(u) + 1, dtype=u.dtype, device=u.device) / len(u)  # between consecutive edges
    # ∫|h - t| over [a, b] is a sum of triangles: with G(t) = t|t|/2, it is G(b - h) - G(a - h).
    ends, starts = edges[1:] - heights, edges[:-1] - heights
    return 0.5 * (ends * ends.abs() - starts * starts.abs()).sum()


def entropy_histogram(pred: Predictive, bins: int = 50) -> tuple[Tensor, Tensor]:  # (bins + 1,), (bins,)
    """The edges of equal bins of entropy from 0 to log C, and the number of points in each."""
    return histogram(scores(partial(uncertainty, by="entropy"), pred), math.log(pred.log_probs.shape[1]), bins)


def histogram(values: Tensor, top: float, bins: int) -> tuple[Tensor, Tensor]:  # (bins + 1,), (bins,)
    """Edges of equal bins from 0 to `top`, and counts; values that rounding puts above `top` are in the last bin."""
    bins = integer("bins", bins, 1)
    edges = torch.linspace(0.0, top, bins + 1, dtype=torch.float64, device=values.device)
    return edges, torch.bincount((values * (bins / top)).long().clamp(0, bins - 1), minlength=bins)


def risk_coverage(pred: Predictive, y: Any, by: By = None) -> tuple[Tensor, Tensor]:  # (N,), (N,)
    """The risk that remains if the most uncertain points are withheld, for every share of points kept.

    Args:
        pred: Predictions for N rows.
        y: The targets.
        by: The uncertainty that orders the points, as in `pred.uncertainty(by)`.

    Returns:
        The coverages 1/N, ..., 1, and the error rate (classification) or mean squared error (regression) at each.
    """
    risk = selective_risk(scores(partial(uncertainty, by=by), pred), scores(default_loss, pred, y))
    return torch.arange(1, len(risk) + 1, dtype=risk.dtype, device=risk.device) / len(risk), risk


def aurc(pred: Predictive, y: Any, by: By = None) -> Tensor:
    """The area under the risk-coverage curve: the mean risk over the N coverages (see `risk_coverage`)."""
    return risk_coverage(pred, y, by)[1].mean()


def selective_risk(score: Tensor, loss: Tensor) -> Tensor:  # (N,)
    """The mean loss of the k points of lowest score, for k = 1, ..., N; both are (N,).

    Points of equal score are in random order: each is given their mean loss, which is the expectation.
    """
    _, group, size = score.unique(return_inverse=True, return_counts=True)
    mean_loss = loss.new_zeros(len(size)).index_add(0, group, loss) / size
    kept = torch.arange(1, len(loss) + 1, dtype=loss.dtype, device=loss.device)
    return mean_loss.repeat_interleave(size).cumsum(0) / kept


def ood_detection(pred: Predictive, outside: Predictive, by: By = None) -> dict[str, Tensor]:
    """Detection of out-of-distribution data, the positives, by an uncertainty.

    Args:
        pred: Predictions for in-distribution data.
        outside: Predictions for out-of-distribution data.
        by: The uncertainty, as in `pred.uncertainty(by)`.

    Returns:
        `auc`, the area under the ROC curve (ties counted half), and `fpr95`, the share of in-distribution data above
        the threshold that 95 % of the others reach.
    """
    inside, other = (scores(partial(uncertainty, by=by), each) for each in (pred, outside))
    return {"auc": auroc(inside, other), "fpr95": fpr_at(0.95, inside, other)}


def auroc(inside: Tensor, outside: Tensor) -> Tensor:
    """The probability that an outside score exceeds an inside one, ties counted half: the area under the ROC curve."""
    ordered = inside.sort().values
    below, at_most = (torch.searchsorted(ordered, outside, right=right) for right in (False, True))
    return (below + at_most).sum().double() / (2 * len(inside) * len(outside))


def fpr_at(tpr: float, inside: Tensor, outside: Tensor) -> Tensor:
    """The share of inside scores at or above the highest threshold that a share `tpr` of outside scores reach."""
    reaching = math.ceil(tpr * len(outside) - 1e-9)  # 0.95 · 20 is 19, despite rounding
    threshold = outside.sort(descending=True).values[reaching - 1]
    return (inside >= threshold).double().mean()


# What they share.


def scores(score: Score, pred: Predictive, y: Any = None) -> Tensor:  # (N,) or (N, ...)
    """`score(pred, y)` in float64.

    Raises:
        DataError: If there are no rows, or the score of one is NaN.
    """
    if not len(pred):
        raise DataError("Expected predictions for at least one row to score, got none.")
    values = score(pred, y).detach().double()
    if bool(values.isnan().any()):
        row = int(values.isnan().nonzero()[0, 0])
        name = getattr(score, "func", score).__name__
        raise DataError(f"The {name} is NaN in row {row} of the batch: look for NaN or no variance in its prediction.")
    return values


def real_targets(pred: Predictive, y: Any) -> Tensor:  # as mean
    """Targets of a regression in the shape of the mean; raises `WrongTaskError` for other tasks."""
    if not hasattr(pred, "interval"):
        raise WrongTaskError(f"Expected the predictions of a regression, got a {type(pred).__name__}.")
    return regression_targets(y, pred.mean)


def errors(pred: Predictive, y: Any) -> Tensor:  # as mean
    """Target minus mean, in float64."""
    return real_targets(pred, y).double() - pred.mean.double()
