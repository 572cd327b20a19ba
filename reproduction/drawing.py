"""What the experiments' figures share, on matplotlib (extra `plots`): colours, means over seeds, files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posthoc.evaluate.report.figures import require_matplotlib
from posthoc.evaluate.report.summary import Estimate, estimate
from posthoc.io import atomic_path

__all__ = ["COLOURS", "DASHES", "MARKS", "by", "mean_and_error", "save_figure", "titles"]

Documents = Sequence[Mapping[str, Any]]

COLOURS = (
    "#1b1b1f", "#b4532a", "#3b6fb6", "#2f8f6b", "#c79a1e", "#7a5bb5",
    "#c2588a", "#5a7d2a", "#4aa3c7", "#8a6f5a", "#9a9aa5", "#d0021b",
)  # fmt: skip
DASHES = ("-", "--", "-.", ":")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
KINDS = ("png", "pdf")


def by(documents: Documents, key: str) -> dict[Any, list[Mapping[str, Any]]]:
    """Documents by one of their entries, in the order in which they come."""
    found: dict[Any, list[Mapping[str, Any]]] = {}
    for document in documents:
        found.setdefault(document[key], []).append(document)
    return found


def titles(documents: Documents) -> dict[str, str]:
    """How each method is called."""
    return {document["method"]: document.get("title", document["method"]) for document in documents}


def mean_and_error(values: Iterable[float | None]) -> tuple[float, float]:
    """The mean over seeds and its standard error (0 of one seed), of those that are numbers; NaN where none is."""
    known = [value for value in values if value is not None]
    found = estimate(known) if known else Estimate(float("nan"), None, 0)
    return found.mean, found.error or 0.0


def save_figure(path: Path, draw: Callable[[Any], Any]) -> list[Path]:
    """Writes a figure, drawn by `draw` from pyplot, as PNG and as PDF."""
    pyplot = require_matplotlib()
    figure = draw(pyplot)
    paths = [path.with_suffix(f".{kind}") for kind in KINDS]
    try:
        figure.tight_layout()
        for place, kind in zip(paths, KINDS, strict=True):
            metadata = {"CreationDate": None} if kind == "pdf" else None  # the same figure is the same file
            with atomic_path(place) as temporary:
                figure.savefig(temporary, dpi=150, format=kind, metadata=metadata, bbox_inches="tight")
    finally:
        pyplot.close(figure)
    return paths
