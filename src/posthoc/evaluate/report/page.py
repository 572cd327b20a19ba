"""The report: one HTML page that needs nothing else, with all that a folder of results has to show."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from importlib import resources

from posthoc.evaluate.report.aggregates import Measure, measures_of, places_of, spread
from posthoc.evaluate.report.charts import charts_of
from posthoc.evaluate.report.examples import Gallery
from posthoc.evaluate.report.markup import element, text
from posthoc.evaluate.report.provenance import how_it_was_run
from posthoc.evaluate.report.records import Results, read_results
from posthoc.evaluate.report.summary import CaseSummary, ExperimentSummary, MethodSummary, summarise
from posthoc.io import atomic_path

__all__ = ["render", "write_report"]

MARKS = {1: ("¹", "best"), 2: ("²", "second best")}


def write_report(folder: str | os.PathLike[str], out: str | os.PathLike[str]) -> Results:
    """Writes the page of a folder of results, whole or not at all; the same results give the same bytes."""
    results = read_results(folder)
    page = render(results)
    with atomic_path(out) as temporary:
        temporary.write_text(page, encoding="utf-8", newline="\n")
    return results


def render(results: Results) -> str:
    """The page as text."""
    experiments = summarise(results.records)
    gallery = Gallery(sum(len(experiment.cases) for experiment in experiments))
    anchors = anchored(experiments)
    alone = len(experiments) == 1
    sections = "".join(section(experiment, anchors, gallery, alone=alone) for experiment in experiments)
    body = (
        element("a", "Skip to the results", href="#results", class_="skip")
        + header(results, experiments, anchors)
        + element("main", notices(results.warnings) + sections, id="results")
        + gallery.definitions()
    )
    title = f"{', '.join(experiment.name for experiment in experiments)}: posthoc report"
    return f'<!doctype html>\n<html lang="en">\n{head(title)}\n<body>{body}{scripts()}</body>\n</html>\n'


def head(title: str) -> str:
    """The policy allows this very style, these very scripts and pictures inside the page; nothing can be loaded."""
    style = asset("style.css")
    script_hashes = " ".join(digest(asset(name)) for name in SCRIPTS)
    policy = (
        f"default-src 'none'; style-src {digest(style)}; script-src {script_hashes}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,">{element("title", text(title))}<style>{style}</style></head>'
    )


SCRIPTS = ("sort.js", "pick.js")


def scripts() -> str:
    return "".join(f"<script>{asset(name)}</script>" for name in SCRIPTS)


def asset(name: str) -> str:
    """A file of the page's own."""
    return resources.files("posthoc.evaluate.report").joinpath("assets", name).read_text(encoding="utf-8")


def digest(content: str) -> str:
    """How a policy names a text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode('ascii')}'"


def anchored(experiments: Sequence[ExperimentSummary]) -> dict[tuple[str, str | None], str]:
    """Anchors of experiments (case None) and of their cases: readable, and each only once."""
    found: dict[tuple[str, str | None], str] = {}
    for experiment in experiments:
        for case in (None, *(case.case for case in experiment.cases)):
            words = re.sub(r"[^a-z0-9]+", "-", " ".join((experiment.name, case or "")).lower()).strip("-") or "results"
            anchor, number = f"at-{words}", 2
            while anchor in found.values():
                anchor, number = f"at-{words}-{number}", number + 1
            found[experiment.name, case] = anchor
    return found


def header(
    results: Results, experiments: Sequence[ExperimentSummary], anchors: Mapping[tuple[str, str | None], str]
) -> str:
    versions = sorted({str(record.versions["posthoc"]) for record in results.records if "posthoc" in record.versions})
    methods = {record.method for record in results.records}
    seeds = {record.seed for record in results.records}
    counts = [counted(len(results.records), "run"), counted(len(methods), "method"), counted(len(seeds), "seed")]
    line = " · ".join((*counts, *(f"posthoc {version}" for version in versions)))
    names = [experiment.name for experiment in experiments]
    title = names[0] if len(names) == 1 else counted(len(names), "experiment")
    links = (
        [(anchors[e.name, None], e.name) for e in experiments]
        if len(experiments) > 1
        else case_links(experiments[0], anchors)
    )
    return element("header", element("h1", text(title)) + element("p", text(line), class_="counts")) + navigation(
        links, "Experiments" if len(experiments) > 1 else "Cases"
    )


def case_links(experiment: ExperimentSummary, anchors: Mapping[tuple[str, str | None], str]) -> list[tuple[str, str]]:
    return [(anchors[experiment.name, case.case], case.case or experiment.name) for case in experiment.cases]


def navigation(links: Sequence[tuple[str, str]], label: str, class_: str = "top") -> str:
    if len(links) < 2:
        return ""
    anchors = (element("a", text(name), href=f"#{anchor}") for anchor, name in links)
    return element("nav", "".join(anchors), aria_label=label, class_=class_)


def notices(warnings: Sequence[str]) -> str:
    """What a reader must know before the figures."""
    if not warnings:
        return ""
    items = element("ul", "".join(element("li", text(warning)) for warning in warnings))
    return element("aside", element("h2", "Read this first") + items, class_="notice", aria_label="Warnings")


def section(
    experiment: ExperimentSummary, anchors: Mapping[tuple[str, str | None], str], gallery: Gallery, *, alone: bool
) -> str:
    """An experiment: its cases, then how it was run. One that is alone has its name and its cases at the top of the
    page already."""
    numbers = {method: number for number, method in enumerate(experiment.methods)}
    several = len(experiment.cases) > 1
    cases = "".join(
        element(
            "section",
            (element("h3", text(case.case or experiment.name)) if several or case.case else "")
            + sources(case)
            + tables(case)
            + charts_of(case, numbers)
            + gallery.of(case),
            id=anchors[experiment.name, case.case],
            class_="case",
        )
        for case in experiment.cases
    )
    cases_of = navigation(case_links(experiment, anchors), f"Cases of {experiment.name}", "inner")
    # Hidden it still is the step between the page's heading and a case's, for those who listen to the page.
    top = element("h2", text(experiment.name), class_="aside" if alone else None) + ("" if alone else cases_of)
    content = top + cases + how_it_was_run(experiment)
    return element("section", content, id=anchors[experiment.name, None], class_="experiment")


def sources(case: CaseSummary) -> str:
    """Where the data come from, stand-ins named, before any figure of theirs."""
    return (
        element("p", " ".join(element("span", text(s)) for s in case.sources), class_="sources") if case.sources else ""
    )


def tables(case: CaseSummary) -> str:
    """The comparison, the runs it is without, and the further figures."""
    measures, further = measures_of(case)
    counts = {len(method.counted) for method in case.methods if method.counted}
    over = "Mean ± standard error over seeds" if max(counts, default=0) > 1 else "One run a method"
    caption = f"{over}. ¹ best, ² second best. Click a heading to sort."
    notes = "".join(element("li", text(note)) for note in case.notes())
    folded = ""
    if further:
        folded = element("details", element("summary", "Further figures") + table(case, further, f"{over}."))
    return table(case, measures, caption) + (element("ul", notes, class_="notes") if notes else "") + folded


def table(case: CaseSummary, measures: Sequence[Measure], caption: str) -> str:
    """A table that can be sorted; it scrolls inside its own box, where the keyboard can reach it."""
    heads = [heading("method", "text", "ascending"), heading("seeds", "number", "descending")]
    for measure in measures:
        first = "descending" if measure.best == float("inf") else "ascending"
        heads.append(heading(measure.heading, "number", first))
    places = {measure: places_of(measure, case) for measure in measures}
    rows = []
    for method in case.methods:
        cells = (cell(method, measure, places[measure].get(method.method)) for measure in measures)
        rows.append(element("tr", method_cells(method) + "".join(cells), class_=None if method.counted else "empty"))
    content = (
        element("caption", text(caption))
        + element("thead", element("tr", "".join(heads)))
        + element("tbody", "".join(rows))
    )
    label = " ".join(filter(None, ("Table of", case.experiment, case.case)))
    return element(
        "div",
        element("table", content, class_="figures"),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=label,
    )


def heading(title: str, kind: str, first: str) -> str:
    button = element("button", text(title), type="button")
    return element("th", button, scope="col", data_kind=kind, data_first=first, class_=kind)


def method_cells(method: MethodSummary) -> str:
    """The name, and the number of runs that count."""
    flag = ""
    if method.excluded or method.missing:
        verdict = "runs left out" if method.counted else "failed"
        if not method.counted and not any(run.applies for run in method.excluded):
            verdict = "does not apply"
        flag = " " + element("span", f"⚠ {verdict}", class_="flag")
    total = len(method.runs) + len(method.missing)
    seeds = str(len(method.counted)) if len(method.counted) == total else f"{len(method.counted)} of {total}"
    return element("th", text(method.title) + flag, scope="row", data_v=method.title) + element(
        "td", seeds, data_v=len(method.counted)
    )


def cell(method: MethodSummary, measure: Measure, place: int | None) -> str:
    found = method.estimates.get(measure.figure)
    if found is None:
        return element("td", '–<span class="aside"> no figure</span>', data_v="")
    content = element("span", measure.write(found.mean), class_="mean")
    if place is not None:
        sign, words = MARKS[place]
        content += f'<sup aria-hidden="true">{sign}</sup><span class="aside"> {words}</span>'
    else:
        content += '<sup aria-hidden="true"></sup>'
    if found.error is not None:
        content += element("span", f" ± {spread(measure, found)}", class_="error")
    if found.count < len(method.counted):
        content += element("span", f" ({found.count} runs)", class_="error")
    names = {1: "best", 2: "second", None: None}
    return element("td", content, data_v=repr(found.mean), class_=names[place])


def counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
