"""Several predictions of a function of one variable side by side, on matplotlib (extra `plots`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from posthoc.evaluate.report.figures import BAND, INK, POINTS, require_matplotlib
from posthoc.io import atomic_path

__all__ = ["Panel", "panel_figure"]

HEADROOM = 0.75
"""How far beyond the data the panels reach, in units of the data's range: bands that leave them are cut."""


class Panel(NamedTuple):
    """One method's curve and band."""

    title: str
    x: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def panel_figure(
    paths: Sequence[Path],
    panels: Sequence[Panel],
    data: tuple[Tensor, Tensor],
    *,
    columns: int = 3,
) -> None:
    """One panel a method: the mean in black, a band shaded, the data as dots; all to one scale. The
    form of each file follows from its name."""
    pyplot = require_matplotlib()
    across = min(columns, len(panels))
    down = -(-len(panels) // across)
    figure, axes = pyplot.subplots(
        down, across, figsize=(3.6 * across, 2.6 * down), sharex=True, sharey=True, squeeze=False
    )
    x, y = (part.squeeze(-1).cpu().numpy() for part in data)
    try:
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        for axis, panel in zip(axes.flat, panels, strict=False):
            axis.fill_between(panel.x, panel.low, panel.high, color=BAND, alpha=0.3, linewidth=0)
            axis.plot(x, y, ".", color=POINTS, markersize=2, alpha=0.5)
            axis.plot(panel.x, panel.mean, color=INK, linewidth=1.3)
            axis.set_title(panel.title, loc="left", fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
            axis.margins(x=0)
        room = HEADROOM * float(np.ptp(y))
        axes[0][0].set_ylim(float(y.min()) - room, float(y.max()) + room)
        figure.tight_layout()
        for path in paths:
            kind = path.suffix.removeprefix(".")
            # Without its date, the same figure is the same file.
            metadata = {"CreationDate": None} if kind == "pdf" else None
            with atomic_path(path) as temporary:
                figure.savefig(temporary, dpi=150, format=kind, metadata=metadata)
    finally:
        pyplot.close(figure)
