"""The report: one HTML page, self-contained, of all that a folder of results holds."""

from __future__ import annotations

import base64
import hashlib
import inspect
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from posthoc.evaluate.report import charts, summary, tables
from posthoc.evaluate.report.records import Record
from posthoc.io import atomic_path
from posthoc.methods import REGISTRY

CLEAR = 2.0
"""Standard errors that make a difference clear."""


def write_report(folder: str | os.PathLike[str], out: str | os.PathLike[str]) -> summary.Results:
    """Writes the page of a folder of results, whole or not at all; the same results give the same bytes.

    Args:
        folder: Results of `posthoc compare` or `python -m reproduction`.
        out: The page to write.

    Returns:
        What was read, with its warnings.

    Raises:
        FileError: If the folder holds no results.
        MissingExtraError: If matplotlib is not installed.
    """
    results = summary.read_results(folder)
    page = render(results)
    with atomic_path(out) as temporary:
        temporary.write_text(page, encoding="utf-8", errors="replace", newline="\n")
    return results


def render(results: summary.Results) -> str:
    """The page as text."""
    from jinja2 import Environment, StrictUndefined

    folder = resources.files("posthoc.evaluate.report")
    template, style, script = (folder.joinpath(f).read_text("utf-8") for f in ("template.html", "style.css", "page.js"))
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    return environment.from_string(template).render(
        style=style,
        script=script,
        policy=f"default-src 'none'; style-src {digest(style)}; script-src {digest(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        results=results,
        page=sys.modules[__name__],
        charts=charts,
        tables=tables,
    )


def digest(content: str) -> str:
    """How a content security policy names a text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode('ascii')}'"


# What the template asks for.


def verdict_of(case: summary.CaseSummary) -> str:
    """A sentence or two: the best method by NLL, how clearly, against the bare network, and by calibration."""
    titles = {method.method: method.title for method in case.methods}
    column, nll = tables.COLUMNS["nll"], case.estimates("nll")
    if len(nll) < 2:
        return ""
    ranked = sorted(nll, key=lambda method: nll[method].mean)
    first, *others = summary.group_by(ranked, lambda method: column.write(nll[method].mean)).values()
    best = nll[first[0]]
    words = "predicts best" if len(first) == 1 else "predict equally well"
    text = f"{' and '.join(titles[method] for method in first)} {words}: NLL {tables.written(column, best)}"
    if "map" in nll and "map" not in first:
        text += f", against {column.write(nll['map'].mean)} of the network alone"
    if others:
        second = nll[others[0][0]]
        text += f"; next is {titles[others[0][0]]} with {tables.written(column, second)}"
        if best.error is not None and second.error is not None:
            clear = second.mean - best.mean > CLEAR * math.hypot(best.error, second.error)
            text += ", a clear difference" if clear else ", a difference within the uncertainty"
    text += "."
    for figure, words in (("ece", "calibration error (ECE)"), ("cqm", "coverage error (CQM)")):
        if found := case.estimates(figure):
            least = min(found, key=lambda method: found[method].mean)
            text += f" {titles[least]} has the lowest {words}, {tables.written(tables.COLUMNS[figure], found[least])}."
    return text


def pictured(case: summary.CaseSummary) -> Record | None:
    """The run of lowest NLL that has pictures."""
    runs = [run for run in case.runs if run.examples and run.problem is None]
    return min(runs, key=lambda run: run.figures.get("nll", math.inf), default=None)


def distinct(facts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Each set of facts once, on a line."""
    return list(dict.fromkeys(" · ".join(map(" ".join, summary.described(fact).items())) for fact in facts if fact))


def options_of(method: summary.MethodSummary) -> dict[str, str]:
    """The configuration of a method's first run, by name."""
    configuration = method.runs[0].configuration
    own = {name: value for name, value in configuration.items() if not isinstance(value, dict | list)}
    return summary.described(own | configuration.get("options", {}))


def duration(runs: Sequence[Record]) -> str:
    """The time of all fits and predictions."""
    seconds = math.fsum(run.figures.get(name, 0.0) for run in runs for name in ("fit_seconds", "predict_seconds"))
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:,.0f} min"


def methods_explained(records: Iterable[Record]) -> list[tuple[str, str]]:
    """The methods on the page and the first sentence of their class's documentation."""
    titles = {record.method: record.title for record in records}
    explained = []
    for method in sorted(titles, key=summary.registry_order):
        if name := summary.registered(method):
            first = (inspect.getdoc(REGISTRY[name]) or "").partition("\n\n")[0].replace("\n", " ")
            sentence = re.split(r"(?<=[.:]) (?=[A-Z])", first)[0].replace("`", "")
            explained.append((titles[method], sentence))
    return explained
