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
from dataclasses import dataclass
from importlib import resources
from typing import Any

from posthoc.evaluate.report.charts import Block, Charts
from posthoc.evaluate.report.records import Record, Results, mapping, read_results
from posthoc.evaluate.report.tables import (
    COLUMNS,
    CaseSummary,
    Column,
    Estimate,
    ExperimentSummary,
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

LONGEST_OPTION, LONGEST_TEXT, LARGEST_PICTURE, EXAMPLES = 160, 400, 60_000, 8
"""Characters of an option and of a text, base64 characters of a picture, examples of each kind."""
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

    experiments = summarize(results.records)
    style, script = asset("style.css"), asset("page.js")
    charts, anchors = Charts(), Anchors()
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["plain"] = plain
    return environment.from_string(asset("template.html")).render(
        style=style,
        script=script,
        policy=f"default-src 'none'; style-src {digest(style)}; script-src {digest(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        title=title_of(experiments),
        counts=counts_of(results),
        warnings=results.warnings,
        experiments=[section(experiment, charts, anchors) for experiment in experiments],
        figures_shown=glossary_of_figures(experiments),
        inf=math.inf,
        methods=glossary_of_methods(results.records),
    )


def asset(name: str) -> str:
    """A file of the page's own."""
    return resources.files("posthoc.evaluate.report").joinpath(name).read_text(encoding="utf-8")


def digest(content: str) -> str:
    """How a content security policy names a text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode('ascii')}'"


class Anchors:
    """Anchors of sections: readable, and each only once."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def new(self, *names: str) -> str:
        words = re.sub(r"[^a-z0-9]+", "-", " ".join(names).lower()).strip("-") or "results"
        anchor, number = f"at-{words}", 2
        while anchor in self._taken:
            anchor, number = f"at-{words}-{number}", number + 1
        self._taken.add(anchor)
        return anchor


def title_of(experiments: Sequence[ExperimentSummary]) -> str:
    return experiments[0].name if len(experiments) == 1 else f"{len(experiments)} experiments"


def counts_of(results: Results) -> str:
    """How many runs, methods, seeds, and the versions."""
    versions = sorted({str(record.versions["posthoc"]) for record in results.records if "posthoc" in record.versions})
    numbers = {
        "run": len(results.records),
        "method": len({record.method for record in results.records}),
        "seed": len({record.seed for record in results.records}),
    }
    counts = [f"{number} {word}{'' if number == 1 else 's'}" for word, number in numbers.items()]
    return " · ".join((*counts, *(f"posthoc {version}" for version in versions)))


# Sections.


@dataclass(frozen=True)
class Cell:
    """A figure in a table."""

    value: float | None
    mean: str = ""
    error: str = ""
    place: int | None = None
    count: int | None = None
    """Of runs, where some of the method's have no such figure."""


@dataclass(frozen=True)
class Table:
    """Columns, and a row of cells a method; `seeds` says whether any method has several."""

    columns: list[Column]
    rows: list[tuple[MethodSummary, list[Cell]]]
    seeds: bool


@dataclass(frozen=True)
class Case:
    """What the page shows of one case."""

    anchor: str
    summary: CaseSummary
    verdict: str
    selections: list[tuple[str, str]]
    table: Table
    further: Table | None
    notes: list[str]
    blocks: list[Block]
    examples: tuple[str, dict[str, list[dict[str, Any]]]] | None
    options: list[tuple[str, dict[str, str]]]


@dataclass(frozen=True)
class Section:
    """What the page shows of one experiment."""

    anchor: str
    name: str
    cases: list[Case]
    facts: list[tuple[str, list[str]]]
    warnings: list[str]


def section(experiment: ExperimentSummary, charts: Charts, anchors: Anchors) -> Section:
    numbers = {method: number for number, method in enumerate(experiment.methods)}
    runs = [run for case in experiment.cases for run in case.runs]
    warned = dict.fromkeys(f"{run.title}: {warning}" for run in runs for warning in run.warnings)
    anchor = anchors.new(experiment.name)
    cases = [
        case_of(case, charts.of(case, numbers), anchors.new(experiment.name, case.case)) for case in experiment.cases
    ]
    return Section(anchor, experiment.name, cases, facts_of(runs), list(warned))


def case_of(case: CaseSummary, blocks: list[Block], anchor: str) -> Case:
    main, further = columns_of(case)
    shown = [method for method in case.methods if method.applies]
    refused = [method.title for method in case.methods if not method.applies]
    notes = [note for note in case.notes() if " (does not apply): " not in note]
    if refused:
        notes.append(f"Not for this task or these data: {', '.join(refused)}.")
    selections = {
        (method.title, run.selection): None for method in case.methods for run in method.counted if run.selection
    }
    return Case(
        anchor,
        case,
        verdict_of(shown),
        list(selections),
        table_of(main, shown),
        table_of(further, shown) if further else None,
        notes,
        blocks,
        examples_of(shown),
        options_of(case),
    )


def table_of(columns: list[Column], methods: list[MethodSummary]) -> Table:
    places = {column: places_of(column, estimates_of(column.figure, methods)) for column in columns}

    def cell(method: MethodSummary, column: Column) -> Cell:
        found = method.estimates.get(column.figure)
        if found is None:
            return Cell(None)
        error = "" if found.error is None else spread(column, found)
        count = found.count if found.count < len(method.counted) else None
        return Cell(found.mean, column.write(found.mean), error, places[column].get(method.method), count)

    rows = [(method, [cell(method, column) for column in columns]) for method in methods]
    return Table(columns, rows, any(len(method.runs) + len(method.missing) > 1 for method in methods))


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


def examples_of(methods: list[MethodSummary]) -> tuple[str, dict[str, list[dict[str, Any]]]] | None:
    """The examples of the first run of the method with the lowest NLL that has any, and its title."""
    nll = estimates_of("nll", methods)
    for method in sorted(methods, key=lambda each: nll[each.method].mean if each.method in nll else math.inf):
        for run in method.counted:
            kinds = {"most_certain": "Most certain", "least_certain": "Least certain"}
            found = {
                title: [example_of(each) for each in run.examples.get(kind, ()) if isinstance(each, dict)][:EXAMPLES]
                for kind, title in kinds.items()
            }
            if any(found.values()):
                return method.title, {title: group for title, group in found.items() if group}
    return None


def example_of(example: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of one example, in words."""

    def words(key: str, longest: int = 80) -> str:
        return shortened(str(example[key]), longest) if example.get(key) is not None else ""

    numbers = [
        f"{value:.3f} {unit}"
        for key, unit in (("probability", "confident"), ("entropy", "nats"))
        if isinstance(value := example.get(key), int | float)
    ]
    return {
        "picture": picture_of(example.get("png")),
        "text": words("text", LONGEST_TEXT),
        "row": words("row"),
        "label": words("said"),
        "target": words("target"),
        "numbers": numbers,
    }


def picture_of(png: Any) -> str:
    """A small PNG as base64, or nothing."""
    if not isinstance(png, str) or len(png) > LARGEST_PICTURE:
        return ""
    try:
        decoded = base64.b64decode(png, validate=True)
    except (binascii.Error, ValueError):
        return ""
    return png if decoded.startswith(PNG_SIGNATURE) else ""


# How it was run.


def facts_of(runs: Sequence[Record]) -> list[tuple[str, list[str]]]:
    """Runs, time, versions and machines of an experiment."""
    spent = math.fsum(run.costs.get(name, 0.0) for run in runs for name in ("fit_seconds", "predict_seconds"))
    seeds = sorted({run.seed for run in runs})
    runs_of = f"{len(runs)}, with seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    return [
        ("Runs", [runs_of]),
        ("Time", [f"{duration(spent)} of fitting and predicting in all"]),
        ("Versions", distinct(run.versions for run in runs)),
        ("Machine", distinct(run.machine for run in runs)),
    ]


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
    """The options of a method's runs; those that differ between seeds say so."""
    values: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, value in flat(run.configuration).items():
            values.setdefault(name, {})[value] = None
    return {
        plain(name): next(iter(found)) if len(found) == 1 else "varies with the seed" for name, found in values.items()
    }


def flat(configuration: Mapping[str, Any]) -> dict[str, str]:
    """The options that are set, those of a part (such as a kernel) under a dotted name; without what nests deeper."""
    options = mapping(configuration.get("options"))
    parts = {f"{name}.{key}": value for name, part in options.items() for key, value in mapping(part).items()}
    found = {**{name: value for name, value in configuration.items() if name != "method"}, **options, **parts}
    return {
        name: shortened(value_in_words(value), LONGEST_OPTION)
        for name, value in found.items()
        if value is not None and not is_nested(value)
    }


def is_nested(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(is_nested, value)))


def value_in_words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(value_in_words, value))
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)


def plain(name: Any) -> str:
    """A name of code in words."""
    return str(name).replace("_", " ").replace(".", ", ")


def shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# Glossary.


def glossary_of_figures(experiments: Iterable[ExperimentSummary]) -> list[Column]:
    """The figures on the page that have a meaning to tell."""
    shown = {
        column.figure for each in experiments for case in each.cases for part in columns_of(case) for column in part
    }
    return [column for name, column in COLUMNS.items() if name in shown and column.meaning]


def glossary_of_methods(records: Iterable[Record]) -> list[tuple[str, str]]:
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
