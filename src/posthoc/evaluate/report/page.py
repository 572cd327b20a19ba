"""The report: one HTML page, self-contained, of all that a folder of results holds."""

from __future__ import annotations

import base64
import binascii
import hashlib
import inspect
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from posthoc.evaluate.report.charts import Charts
from posthoc.evaluate.report.records import Record, Results, mapping, read_results
from posthoc.evaluate.report.tables import (
    COLUMNS,
    CaseSummary,
    Column,
    Estimate,
    MethodSummary,
    columns_of,
    described,
    order,
    places_of,
    spread,
    summarize,
    written,
)
from posthoc.io import atomic_path

__all__ = ["render", "write_report"]

LONGEST_OPTION, LARGEST_PICTURE, EXAMPLES = 160, 60_000, 8
"""Characters of an option, base64 characters of a picture, examples of each kind."""
CLEAR = 2.0
"""Standard errors that make a difference clear."""
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def write_report(folder: str | os.PathLike[str], out: str | os.PathLike[str]) -> Results:
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
    results = read_results(folder)
    page = render(results)
    with atomic_path(out) as temporary:
        temporary.write_text(page, encoding="utf-8", newline="\n")
    return results


def render(results: Results) -> str:
    """The page as text."""
    from jinja2 import Environment, StrictUndefined

    style, script = asset("style.css"), asset("page.js")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    functions = (columns_of, distinct, duration, examples_of, methods_explained, options_of, picture_of, places_in)
    environment.globals |= {function.__name__: function for function in (*functions, spread, verdict_of)}
    return environment.from_string(asset("template.html")).render(
        style=style,
        script=script,
        policy=f"default-src 'none'; style-src {digest(style)}; script-src {digest(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        experiments=summarize(results.records),
        records=results.records,
        warnings=results.warnings,
        charts=Charts(),
        columns=COLUMNS,
        inf=math.inf,
    )


def asset(name: str) -> str:
    """A file of the page's own."""
    return resources.files("posthoc.evaluate.report").joinpath(name).read_text(encoding="utf-8")


def digest(content: str) -> str:
    """How a content security policy names a text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode('ascii')}'"


# What the template asks for.


def places_in(columns: Iterable[Column], methods: list[MethodSummary]) -> dict[str, dict[str, int]]:
    """The first (1) and second (2) methods of each column."""
    return {column.figure: places_of(column, estimates_of(column.figure, methods)) for column in columns}


def estimates_of(figure: str, methods: Iterable[MethodSummary]) -> dict[str, Estimate]:
    return {method.method: method.estimates[figure] for method in methods if figure in method.estimates}


def verdict_of(methods: list[MethodSummary]) -> str:
    """A sentence or two: the best method by NLL, how clearly, against the bare network, and by calibration."""
    titles = {method.method: method.title for method in methods}
    nll = estimates_of("nll", methods)
    ranked = sorted(nll, key=lambda method: nll[method].mean)
    if len(ranked) < 2:
        return ""
    column = COLUMNS["nll"]
    best = nll[ranked[0]]
    first = [method for method in ranked if column.write(nll[method].mean) == column.write(best.mean)]
    words = "predicts best" if len(first) == 1 else "predict equally well"
    text = f"{' and '.join(titles[method] for method in first)} {words}: NLL {written(column, best)}"
    if "map" in nll and "map" not in first:
        text += f", against {column.write(nll['map'].mean)} of the network alone"
    if len(first) < len(ranked):
        second = ranked[len(first)]
        text += f"; next is {titles[second]} with {written(column, nll[second])}"
        errors = [error for method in (first[0], second) if (error := nll[method].error) is not None]
        if len(errors) == 2:
            clear = nll[second].mean - best.mean > CLEAR * math.hypot(*errors)
            text += ", a clear difference" if clear else ", a difference within the uncertainty"
    text += "."
    calibration = {"ece": "calibration error (ECE)", "cqm": "coverage error (CQM)"}
    for figure, words in calibration.items():
        if found := estimates_of(figure, methods):
            least = min(found, key=lambda method: found[method].mean)
            text += f" The lowest {words} is {titles[least]}'s, {written(COLUMNS[figure], found[least])}."
    return text


def examples_of(methods: list[MethodSummary]) -> tuple[str, dict[str, list[Any]]] | None:
    """The examples of the first run of the method with the lowest NLL that has any, and its title."""
    nll = estimates_of("nll", methods)
    for method in sorted(methods, key=lambda each: nll[each.method].mean if each.method in nll else math.inf):
        for run in method.counted:
            found = {
                kind: [example for example in run.examples.get(kind, ()) if isinstance(example, dict)][:EXAMPLES]
                for kind in ("most_certain", "least_certain")
            }
            if any(found.values()):
                return method.title, {kind: group for kind, group in found.items() if group}
    return None


def picture_of(png: Any) -> str:
    """A small PNG as base64, or nothing."""
    if not isinstance(png, str) or len(png) > LARGEST_PICTURE:
        return ""
    try:
        decoded = base64.b64decode(png, validate=True)
    except (binascii.Error, ValueError):
        return ""
    return png if decoded.startswith(PNG_SIGNATURE) else ""


def distinct(facts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Each set of facts once, on a line."""
    known = (described({name: value for name, value in fact.items() if value is not None}) for fact in facts)
    lines = (" · ".join(f"{name} {value}" for name, value in fact.items()) for fact in known)
    return [line for line in dict.fromkeys(lines) if line]


def options_of(case: CaseSummary) -> list[tuple[str, dict[str, str]]]:
    """Options in words: those that all methods share once, then each method's own."""
    found = [(method.title, options(method.runs)) for method in case.methods if method.applies]
    shared = {
        name: value
        for name, value in (found[0][1].items() if len(found) > 1 else ())
        if all(each.get(name) == value for _, each in found)
    }
    own = [(title, {name: each[name] for name in each if name not in shared}) for title, each in found]
    return ([("All methods", shared)] if shared else []) + own


def options(runs: Iterable[Record]) -> dict[str, str]:
    """The options of a method's runs that are set, by name; those that differ between seeds say so."""
    values: dict[str, dict[str, None]] = {}
    for run in runs:
        own = mapping(run.configuration.get("options"))
        parts = {f"{name}, {key}": value for name, part in own.items() for key, value in mapping(part).items()}
        for name, value in {**run.configuration, **own, **parts}.items():
            if isinstance(value, str | int | float) and name != "method":
                values.setdefault(name.replace("_", " "), {})[in_words(value)] = None
    return {name: next(iter(found)) if len(found) == 1 else "varies with the seed" for name, found in values.items()}


def in_words(value: str | float) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)
    return text if len(text) <= LONGEST_OPTION else text[: LONGEST_OPTION - 1] + "…"


def duration(runs: Sequence[Record]) -> str:
    """The time of all fits and predictions."""
    seconds = math.fsum(run.costs.get(name, 0.0) for run in runs for name in ("fit_seconds", "predict_seconds"))
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def methods_explained(records: Iterable[Record]) -> list[tuple[str, str]]:
    """The methods on the page and the first sentence of their class's documentation."""
    from posthoc.methods import REGISTRY

    titles = {record.method: record.title for record in records}
    found = []
    for method in sorted(titles, key=order):
        names = [name for name in REGISTRY if method == name or method.startswith((f"{name}-", f"{name}_"))]
        if names:
            summary = (inspect.getdoc(REGISTRY[names[-1]]) or "").partition("\n\n")[0].replace("\n", " ")
            sentence = re.split(r"(?<=[.:]) (?=[A-Z])", summary)[0].replace("`", "")
            found.append((titles[method], sentence))
    return found
