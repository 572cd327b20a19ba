"""Figures of an experiment from the documents of its runs: marks, lines and histograms, means over seeds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reproduction.drawing import COLOURS, DASHES, MARKS, Documents, by, mean_and_error, save_figure, titles

__all__ = ["dependence_figure", "dot_figure", "histogram_figure", "line_figure"]

OUTSIDE = "#b4532a"
BELOW = {"loc": "upper center", "ncol": 4, "frameon": False, "fontsize": 8, "bbox_to_anchor": (0.5, 0.0)}
"""Where a figure's legend is."""


def dot_figure(path: Path, documents: Documents, figures: Mapping[str, str]) -> list[Path]:
    """One panel a figure: a mark a method, in groups of cases, with standard errors over seeds. Marks, not bars: what
    is compared is how far apart they are, not how far from zero."""
    cases, names = by(documents, "case"), titles(documents)

    def draw(pyplot: Any) -> Any:
        canvas, axes = grid(pyplot, len(figures), 3, (4.6, 3.1))
        apart = 0.8 / len(names)
        for axis, (figure, title) in zip(axes, figures.items(), strict=True):
            for i, method in enumerate(names):
                found = {}
                for j, runs in enumerate(cases.values()):
                    values = [run["metrics"].get(figure) for run in runs if run["method"] == method]
                    if any(value is not None for value in values):
                        found[j + (i - (len(names) - 1) / 2) * apart] = mean_and_error(values)
                means, errors = ([pair[k] for pair in found.values()] for k in (0, 1))
                style = {"color": COLOURS[i % len(COLOURS)], "fmt": MARKS[i % len(MARKS)], "markersize": 5}
                axis.errorbar(list(found), means, errors, label=names[method], **style)
            axis.set_title(title, loc="left", fontsize=10)
            axis.set_xticks(range(len(cases)), list(cases))
            axis.set_xlim(-0.5, len(cases) - 0.5)
            axis.grid(axis="y", color="#e6e6ea", linewidth=0.7)
            axis.set_axisbelow(True)
        canvas.legend(*axes[0].get_legend_handles_labels(), **BELOW)
        return canvas

    return save_figure(path, draw)


def line_figure(path: Path, documents: Documents, along: str, figures: Mapping[str, str], label: str) -> list[Path]:
    """A row a figure, a column a case: a line a method along something, means over seeds."""
    cases, names = by(documents, "case"), titles(documents)

    def draw(pyplot: Any) -> Any:
        down, across = len(figures), len(cases)
        size = (3.8 * across, 3.0 * down)
        canvas, axes = pyplot.subplots(down, across, figsize=size, squeeze=False, sharex=True, sharey="row")
        for column, (case, runs) in enumerate(cases.items()):
            axes[0][column].set_title(case, loc="left", fontsize=10)
            axes[-1][column].set_xlabel(label)
            for axis, figure in zip(axes[:, column], figures, strict=True):
                axis.spines[["top", "right"]].set_visible(False)
                for i, method in enumerate(names):
                    lines = [run["curves"]["lines"][along] for run in runs if run["method"] == method]
                    if lines:
                        mean = means_of([line[figure] for line in lines])
                        style = {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i % len(DASHES)]}
                        axis.plot(lines[0]["x"], mean, linewidth=1.4, label=names[method], **style)
        for axis, title in zip(axes[:, 0], figures.values(), strict=True):
            axis.set_ylabel(title)
        canvas.legend(*axes[0][0].get_legend_handles_labels(), **BELOW)
        return canvas

    return save_figure(path, draw)


def dependence_figure(
    path: Path, documents: Documents, option: str, figures: Mapping[str, str], label: str
) -> list[Path]:
    """A panel a figure: how it depends on an option, a line a case, with standard errors."""
    cases = by(documents, "case")

    def draw(pyplot: Any) -> Any:
        canvas, axes = grid(pyplot, len(figures), len(figures), (3.0, 2.6))
        for axis, (figure, title) in zip(axes, figures.items(), strict=True):
            for i, (case, runs) in enumerate(cases.items()):
                at: dict[float, list[float]] = {}
                for run in runs:
                    at.setdefault(run["configuration"]["options"][option], []).append(run["metrics"][figure])
                means, errors = zip(*(mean_and_error(at[place]) for place in sorted(at)), strict=True)
                axis.errorbar(sorted(at), means, errors, color=COLOURS[2 + i], marker="o", markersize=3, label=case)
            axis.set_title(title, loc="left", fontsize=10)
            axis.set_xlabel(label)
        axes[0].legend(frameon=False, fontsize=8)
        return canvas

    return save_figure(path, draw)


def histogram_figure(path: Path, documents: Documents, inside: str, outside: str) -> list[Path]:
    """A panel a method: entropies on known data and on data from elsewhere, means over seeds, with the AUC."""
    methods, names = by(documents, "method"), titles(documents)

    def draw(pyplot: Any) -> Any:
        canvas, axes = grid(pyplot, len(methods), 4, (3.4, 2.5))
        for axis, (method, runs) in zip(axes, methods.items(), strict=True):
            found = [run["curves"]["entropy"] for run in runs]
            for part, colour, label in (("in", COLOURS[2], inside), ("out", OUTSIDE, outside)):
                mean = means_of([one[part] for one in found])
                axis.stairs(mean, found[0]["edges"], fill=True, color=colour, alpha=0.5, label=label)
            auc, _ = mean_and_error(run["metrics"]["ood_auc"] for run in runs)
            axis.set_title(f"{names[method]}: AUC {auc:.3f}", loc="left", fontsize=9)
            axis.set_yscale("log")
            axis.set_ylim(1e-3, 1.0)
            axis.set_xlabel("entropy, nats")
        axes[0].legend(frameon=False, fontsize=8)
        return canvas

    return save_figure(path, draw)


def grid(pyplot: Any, panels: int, most: int, size: tuple[float, float], **options: Any) -> tuple[Any, list[Any]]:
    """A canvas with so many panels, at most so many beside each other."""
    across = min(panels, most)
    down = -(-panels // across)
    canvas, axes = pyplot.subplots(down, across, figsize=(size[0] * across, size[1] * down), squeeze=False, **options)
    for axis in axes.flat[panels:]:
        axis.set_visible(False)
    for axis in axes.flat[:panels]:
        axis.spines[["top", "right"]].set_visible(False)
    return canvas, list(axes.flat[:panels])


def means_of(lines: list[list[float]]) -> list[float]:
    """Point by point."""
    return [mean_and_error(values)[0] for values in zip(*lines, strict=True)]
