"""Figures, on matplotlib (extra `plots`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from posthoc.errors import MissingExtraError
from posthoc.io import atomic_path
from posthoc.predictive.base import Predictive

__all__ = ["error_bar_figure", "require_matplotlib"]

INK, BAND, POINTS = "#1b1b1f", "#3b6fb6", "#b4532a"


def require_matplotlib() -> Any:
    """matplotlib's `pyplot` without a screen, or an error that says how to install it."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plots", "Drawing figures") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def error_bar_figure(
    path: str | os.PathLike[str],
    x: Tensor,  # (N, 1), increasing
    panels: Sequence[tuple[str, Predictive]],
    data: tuple[Tensor, Tensor],
) -> None:
    """One panel a prediction: the mean in black, one and two standard deviations shaded, the data as dots."""
    pyplot = require_matplotlib()
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5.2 * len(panels), 3.6), sharey=True, squeeze=False)
    across = x.squeeze(-1).cpu()
    for axis, (title, pred) in zip(axes[0], panels, strict=True):
        mean, std = pred.mean.squeeze(-1).cpu(), pred.std.squeeze(-1).cpu()
        for width, shade in ((2.0, 0.18), (1.0, 0.28)):
            axis.fill_between(across, mean - width * std, mean + width * std, color=BAND, alpha=shade, linewidth=0)
        axis.plot(data[0].cpu(), data[1].cpu(), ".", color=POINTS, markersize=3, alpha=0.55, label="data")
        axis.plot(across, mean, color=INK, linewidth=1.6, label="the network")
        axis.fill_between([], [], [], color=BAND, alpha=0.4, linewidth=0, label="±1 and ±2 standard deviations")
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel("x")
        axis.margins(x=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("y")
    axes[0][0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.tight_layout()
    try:
        with atomic_path(path) as temporary:
            figure.savefig(temporary, dpi=150, format="png")
    finally:
        pyplot.close(figure)
