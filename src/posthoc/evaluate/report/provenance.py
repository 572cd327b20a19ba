"""How it was run: data, options, times, versions, machines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from posthoc.evaluate.report.markup import element, text
from posthoc.evaluate.report.records import Record
from posthoc.evaluate.report.summary import CaseSummary, ExperimentSummary, described

__all__ = ["how_it_was_run"]

LONGEST = 160
"""Characters of an option's value."""
VARIES = "varies with the seed"


def how_it_was_run(experiment: ExperimentSummary) -> str:
    """What decided the numbers of an experiment, folded away."""
    runs = [run for case in experiment.cases for run in case.runs]
    seconds = sum(
        cost for run in runs for name, cost in run.costs.items() if name in ("fit_seconds", "predict_seconds")
    )
    seeds = sorted({run.seed for run in runs})
    rows = [
        ("Runs", [f"{len(runs)}, of seeds {', '.join(map(str, seeds))}"]),
        ("Time", [f"{duration(seconds)} of fitting and predicting in all"]),
        ("Versions", distinct(run.versions for run in runs)),
        ("Machine", distinct(run.machine for run in runs)),
    ]
    facts = "".join(
        element("dt", name) + "".join(element("dd", text(line)) for line in lines) for name, lines in rows if lines
    )
    cases = "".join(case_options(case, several=len(experiment.cases) > 1) for case in experiment.cases)
    told = list(dict.fromkeys(f"{run.title}: {warning}" for run in runs for warning in run.warnings))
    warned = element("h5", "Warnings while it ran") + listed(told) if told else ""
    return element(
        "details", element("summary", "How it was run") + element("dl", facts) + cases + warned, class_="how"
    )


def case_options(case: CaseSummary, *, several: bool) -> str:
    """The data of a case, and the options of its methods: those that all share once, then each method's own."""
    head = element("h5", text(case.case)) if several else ""
    found = [(method.title, options(method.runs)) for method in case.methods]
    shared = {
        name: value
        for name, value in found[0][1].items()
        if len(found) > 1 and all(each.get(name) == value for _, each in found)
    }
    listing = [("All methods", shared)] if shared else []
    listing += [(title, {name: each[name] for name in each if name not in shared}) for title, each in found]
    rows = "".join(
        element("tr", element("th", text(title), scope="row") + element("td", codes(each))) for title, each in listing
    )
    table = element("table", element("caption", "Options of each method") + element("tbody", rows), class_="options")
    return head + (listed(case.sources) if case.sources else "") + element("div", table, class_="scroll")


def options(runs: Iterable[Record]) -> dict[str, str]:
    """The options of a method's runs, those that differ between seeds said to."""
    values: dict[str, list[str]] = {}
    for run in runs:
        for name, value in flat(run.configuration).items():
            values.setdefault(name, []).append(value)
    return {name: found[0] if len(set(found)) == 1 else VARIES for name, found in values.items()}


def codes(values: Mapping[str, str]) -> str:
    return " ".join(element("code", text(f"{name} = {short(value)}")) for name, value in values.items()) or "–"


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested options under dotted names, values as JSON."""
    found: dict[str, str] = {}
    for name, value in nested.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = json.dumps(value, ensure_ascii=False)
    return found


def distinct(facts: Iterable[dict[str, Any]]) -> list[str]:
    """Each set of facts once, on a line."""
    lines = (" · ".join(described({k: v for k, v in fact.items() if v is not None})) for fact in facts)
    return [line for line in dict.fromkeys(lines) if line]


def listed(lines: Iterable[str]) -> str:
    return element("ul", "".join(element("li", text(line)) for line in lines))


def short(value: str) -> str:
    return value if len(value) <= LONGEST else value[: LONGEST - 1] + "…"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
