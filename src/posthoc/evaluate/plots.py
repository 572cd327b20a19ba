"""Plots of predictions on matplotlib (extra `plots`): reliability, intervals, risk and coverage, entropy, quantiles.

`reliability_diagram`, `intervals`, `risk_coverage`, `entropy_histogram` and `quantile_calibration` take a predictive
and targets and return matplotlib Axes. The functions that begin with `draw_` take the curves of
`posthoc.evaluate.evaluate.Evaluation.curves`; reports draw with them too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from posthoc.errors import OptionError, WrongTaskError
from posthoc.evaluate import metrics as m
from posthoc.evaluate.evaluate import reliability, shown_intervals
from posthoc.io import atomic_path
from posthoc.optional import require
from posthoc.predictive.base import By, Predictive

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#1f5f9e", "#c4500b", "#14805e", "#a14a86", "#9a7400", "#2f93c7", "#5a6068", "#8a1f3c")
"""Of lines; told apart with dashes and markers too, for gray print and color blindness."""
DASHES = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1.5, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P")
INK, SOFT, RULE, BAND, POINTS = "#1d2125", "#5c646d", "#e3e0d8", COLORS[0], COLORS[1]
FEWEST = 10
"""Points below which a bin of confidence is drawn faintly: its accuracy is known to ±0.16 or worse."""
SMALLEST_SHARE = 0.002
"""The same, for results that hold only the share of points in a bin."""

Curve = Mapping[str, Any]
"""Columns of numbers by name."""


def plot(pred: Predictive, targets: Any = None, ax: Axes | None = None) -> Axes:
    """The usual plot of predictions, which `pred.plot` draws.

    Args:
        pred: Predictions of classes or of real numbers.
        targets: What was observed. With targets: the reliability diagram, or intervals against targets. Without: the
            histogram of entropies, or intervals against their means.
        ax: Where to draw; by default in a new figure.
    """
    if hasattr(pred, "log_probs"):
        return entropy_histogram(pred, ax=ax) if targets is None else reliability_diagram(pred, targets, ax)
    if not hasattr(pred, "interval"):
        raise WrongTaskError(f"Expected predictions of classes or of a regression, got a {type(pred).__name__}.")
    return intervals(pred, targets, ax)


def reliability_diagram(pred: Predictive, targets: Any, ax: Axes | None = None, *, bins: int = 15) -> Axes:
    """Accuracy against confidence in bins of equal width, with bars of two standard errors.

    Bins of few points are faint; the gray columns are the share of points in each.

    Args:
        pred: Class predictions for N rows.
        targets: (N,) class labels.
        ax: Where to draw; by default in a new figure.
        bins: Number of bins.

    Example:
        >>> from posthoc import MAP, Outputs
        >>> data = Outputs(2 * torch.eye(3), torch.arange(3))
        >>> ax = reliability_diagram(MAP(None, "classification").fit(data).predict(data), data.targets)
        >>> ax.get_xlabel()
        'confidence'
    """
    ax = axes(ax)
    confidence, hits = (m.scores(score, pred, targets) for score in (m.confidence, m.hit))
    draw_reliability(ax, reliability(confidence, hits, bins))
    return ax


def intervals(
    pred: Predictive, targets: Any = None, ax: Axes | None = None, *, level: float = 0.9, most: int = 100
) -> Axes:
    """Central intervals against targets: those that cross the diagonal hold the target, the others are marked.

    Args:
        pred: Predictions of a regression for N rows.
        targets: The N targets; without them, intervals against their own means.
        ax: Where to draw; by default in a new figure.
        level: Of the intervals.
        most: Points that are drawn, evenly spread over the rows.
    """
    ax = axes(ax)
    low, high = pred.interval(level)
    truth = pred.mean if targets is None else m.real_targets(pred, targets)
    draw_intervals(ax, shown_intervals(torch.stack([truth, pred.mean, low, high], -1).detach(), most=most))
    ax.set(xlabel="mean" if targets is None else "target", ylabel=f"prediction, {level:.0%} interval")
    return ax


def risk_coverage(pred: Predictive, targets: Any, ax: Axes | None = None, *, by: By = None) -> Axes:
    """The error rate (or mean squared error) of the rows that are kept, for every share of rows kept.

    Args:
        pred: Predictions for N rows.
        targets: The N targets.
        ax: Where to draw; by default in a new figure.
        by: The uncertainty by which rows are withheld, as in `pred.uncertainty(by)`.
    """
    ax = axes(ax)
    kept, risk = m.risk_coverage(pred, targets, by)
    label = "error rate" if hasattr(pred, "log_probs") else "mean squared error"
    ax.plot(kept.cpu(), risk.cpu(), color=BAND, linewidth=1.6)
    ax.set(xlabel="share of rows kept, the most certain first", xlim=(0, 1), ylabel=label)
    ax.set_ylim(0, range_of([risk[len(risk) // 20 :].cpu()])[1])
    return ax


def entropy_histogram(
    pred: Predictive, targets: Any = None, ax: Axes | None = None, *, outside: Predictive | None = None, bins: int = 30
) -> Axes:
    """The distribution of the entropies of class probabilities.

    Args:
        pred: Class predictions.
        targets: If given, wrong predictions are drawn apart from right ones.
        ax: Where to draw; by default in a new figure.
        outside: Predictions for out-of-distribution data, drawn as a second histogram.
        bins: Number of bins.
    """
    ax = axes(ax)
    edges, counts = m.entropy_histogram(pred, bins)
    curve, labels = {"edges": edges.tolist(), "in": (counts / len(pred)).tolist()}, ["these data", "outside"]
    if outside is None and targets is not None:
        wrong = m.scores(m.hit, pred, targets) == 0
        outside, labels = (pred[wrong] if bool(wrong.any()) else None), ["all", "wrong predictions"]
    if outside is not None:
        curve["out"] = (m.entropy_histogram(outside, bins)[1] / len(outside)).tolist()
    draw_entropy(ax, curve)
    ax.set_ylabel("share of rows")
    if outside is not None:
        ax.legend(labels, frameon=False)
    return ax


def quantile_calibration(pred: Predictive, targets: Any, ax: Axes | None = None, *, bins: int = 20) -> Axes:
    """The histogram of the probability integral transform, cdf(target): flat if the quantiles are right.

    A hump in the middle shows intervals that are too wide, a valley those that are too narrow, a slope a bias. The gray
    band holds 95 % of the heights that right quantiles would have.

    Args:
        pred: Predictions of a regression for N rows.
        targets: The N targets.
        ax: Where to draw; by default in a new figure.
        bins: Number of bins.
    """
    ax = axes(ax)
    below = m.scores(m.probability_below, pred, targets).reshape(-1).cpu()
    edges, counts = m.histogram(below, 1.0, bins)
    density = counts * bins / len(below)
    ax.stairs(density, edges, fill=True, color=BAND, alpha=0.35)
    ax.stairs(density, edges, color=BAND, linewidth=1.4)
    half = 1.96 * math.sqrt((bins - 1) / len(below))
    ax.axhspan(max(0.0, 1 - half), 1 + half, color=SOFT, alpha=0.18, linewidth=0)
    ax.axhline(1.0, color=SOFT, linestyle="dashed", linewidth=1)
    ax.set(xlabel="predicted probability of a value below the target", ylabel="density", xlim=(0, 1), ylim=(0, None))
    return ax


def prediction_bands(
    path: str | os.PathLike[str], x: Tensor, panels: Sequence[tuple[str, Predictive]], data: tuple[Tensor, Tensor]
) -> None:
    """Writes a PNG with a panel a prediction along x, (N, 1): mean, one and two standard deviations, data as dots."""
    figure = require("matplotlib.figure", "plots", "Drawing figures").Figure((5.2 * len(panels), 3.6), layout="tight")
    across, points = x.squeeze(-1).cpu(), torch.stack([part.reshape(-1).cpu() for part in data], 1)
    for ax, (title, pred) in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        mean, std = pred.mean.squeeze(-1).cpu(), pred.std.squeeze(-1).cpu()
        draw_band(ax, {"x": across, "mean": mean, "low": mean - 2 * std, "high": mean + 2 * std, "points": points})
        inner = ax.fill_between(across, mean - std, mean + std, color=BAND, alpha=0.45, linewidth=0)
        ax.set_title(title, loc="left", fontsize=11)
    names = {ax.lines[0]: "data", ax.lines[1]: "the network", inner: "±1 standard deviation"}
    names[ax.collections[0]] = "±2 standard deviations"
    ax.legend([*names], [*names.values()], frameon=False, fontsize=8, loc="lower right")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")


def draw_reliability(ax: Axes, curve: Curve) -> None:
    """Confidence and accuracy of bins; `count`, or else `share`, says which bins hold few points."""
    confidence, accuracy, share = (np.asarray(curve[name], float) for name in ("confidence", "accuracy", "share"))
    ax.bar((np.arange(len(share)) + 0.5) / len(share), share, 1 / len(share), color=SOFT, alpha=0.16, linewidth=0)
    ax.plot([0, 1], [0, 1], color=SOFT, linestyle="dashed", linewidth=1)
    filled = np.isfinite(confidence) & np.isfinite(accuracy)
    many = filled & (np.asarray(curve["count"]) >= FEWEST if "count" in curve else share >= SMALLEST_SHARE)
    if "count" in curve:
        # Two standard errors by Wilson's interval, which has a length at accuracies of 0 and 1 too.
        n = np.asarray(curve["count"], float)[many]
        center = (accuracy[many] + 2 / n) / (1 + 4 / n)
        half = 2 / (1 + 4 / n) * np.sqrt(accuracy[many] * (1 - accuracy[many]) / n + 1 / n**2)
        ax.vlines(confidence[many], center - half, center + half, color=BAND, alpha=0.5, linewidth=2)
    few = filled & ~many
    ax.plot(confidence[few], accuracy[few], "o", color=SOFT, alpha=0.5, markersize=2.5)
    ax.plot(confidence[many], accuracy[many], "o-", color=BAND, markersize=4, linewidth=1.4)
    ax.set(xlim=(0, 1), ylim=(0, 1), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1), xlabel="confidence", ylabel="accuracy")


def draw_entropy(ax: Axes, curve: Curve, top: float = 0.0) -> None:
    """Shares of rows by entropy, test data filled, others (`out`) as a line; heights by their square root."""
    heights = {name: np.nan_to_num(np.asarray(curve[name], float)) for name in ("in", "out") if name in curve}
    top = top or max(float(values.max()) for values in heights.values())
    ax.set_yscale("function", functions=(lambda v: np.sqrt(np.maximum(v, 0)), np.square))
    ax.stairs(heights["in"], curve["edges"], fill=True, color=BAND, alpha=0.4)
    if "out" in heights:
        ax.stairs(heights["out"], curve["edges"], color=POINTS, linewidth=1.8)
    levels = [level for level in (0.01, 0.1, 0.5, 1.0) if level <= 1.05 * top]
    ax.set_yticks(levels, [f"{level:.0%}" for level in levels])
    ax.set(xlabel="entropy, nats", xlim=(curve["edges"][0], curve["edges"][-1]), ylim=(0, 1.05 * max(top, 0.01)))


def draw_intervals(ax: Axes, curve: Curve, span: tuple[float, float] | None = None) -> None:
    """Intervals against targets; those that miss them are marked."""
    target, mean, low, high = (np.asarray(curve[name], float) for name in ("target", "mean", "low", "high"))
    span = span or range_of([target, mean])
    ax.plot(span, span, color=SOFT, linestyle="dashed", linewidth=1)
    held, missed = (low <= target) & (target <= high), (target < low) | (high < target)
    ax.vlines(target[held], low[held], high[held], color=BAND, alpha=0.45, linewidth=1.3)
    ax.vlines(target[missed], low[missed], high[missed], color=POINTS, linewidth=1.6)
    ax.plot(target[missed], mean[missed], "o", color=POINTS, markersize=3)
    ax.set(xlim=span, ylim=span, xlabel="target", ylabel="prediction")
    ax.locator_params(nbins=4)


def draw_band(ax: Axes, curve: Curve, span: tuple[float, float] | None = None) -> None:
    """A mean and its interval along x, and the data."""
    ax.fill_between(curve["x"], curve["low"], curve["high"], color=BAND, alpha=0.25, linewidth=0)
    if "points" in curve:
        ax.plot(*np.transpose(curve["points"]), ".", color=POINTS, markersize=2.5, alpha=0.5)
    ax.plot(curve["x"], curve["mean"], color=INK, linewidth=1.5)
    ax.set(xlabel="x", ylabel="y", ylim=span)
    ax.margins(x=0)
    ax.locator_params(nbins=5)
    bare(ax)


def draw_line(ax: Axes, index: int, x: Any, y: Any, error: Any = None) -> None:
    """One of several lines that look different by color, dashes and markers; `index` is also its group's id."""
    looks = {"color": COLORS, "linestyle": DASHES, "marker": MARKERS}
    style: dict[str, Any] = {name: values[index % len(values)] for name, values in looks.items()}
    style |= {"markevery": max(1, math.ceil(len(x) / 6)), "markersize": 4, "markerfacecolor": "white"}
    error = error if error is not None and np.any(error) else None
    for artist in ax.errorbar(x, y, error, linewidth=1.7, elinewidth=1, **style).get_children():
        artist.set_gid(f"series-{index}")


def axes(ax: Axes | None) -> Axes:
    """The axes to draw into, by default those of a new figure."""
    pyplot = require("matplotlib.pyplot", "plots", "Drawing figures")
    if ax is None:
        ax = pyplot.subplots(figsize=(4.6, 3.8), layout="constrained")[1]
    if not hasattr(ax, "plot"):
        raise OptionError(f"Expected ax to be matplotlib Axes, got a {type(ax).__name__}.")
    bare(ax)
    return ax


def bare(ax: Axes) -> None:
    """Without a frame at the top and right."""
    ax.spines[["top", "right"]].set_visible(False)


def range_of(values: Iterable[Any], room: float = 0.05) -> tuple[float, float]:
    """The range of the finite values of several columns, with some room around it."""
    known = np.concatenate([np.asarray(column, float) for column in values])
    known = known[np.isfinite(known)] if np.isfinite(known).any() else np.array([0.0, 1.0])
    low, high = float(known.min()), float(known.max())
    margin = room * (high - low) if high > low else 0.5
    return low - margin, high + margin
