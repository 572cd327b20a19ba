"""Tables of means and standard errors over seeds, as Markdown, CSV and LaTeX, the best and second best marked."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from posthoc.evaluate.report.records import read_results
from posthoc.evaluate.report.summary import (
    CaseSummary,
    Estimate,
    ExperimentSummary,
    MethodSummary,
    described,
    summarise,
)
from posthoc.evaluate.report.tables import COLUMNS, COSTS, decimals, digits, megabytes, seconds
from posthoc.io import atomic_path

__all__ = ["Measure", "csv_means", "latex_means", "markdown_means", "measures_of", "places_of", "write_tables"]


@dataclass(frozen=True)
class Measure:
    """A figure, how it is called and written, and which way it is better."""

    figure: str
    title: str
    write: Callable[[float], str]
    best: float | None = None
    """Where it is best: minus or plus infinity, a value to be near to, or None where there is no better."""

    @property
    def arrow(self) -> str:
        """To where it is better."""
        if self.best is None:
            return ""
        return {float("-inf"): "↓", float("inf"): "↑"}.get(self.best, f"→ {self.best:g}")

    @property
    def heading(self) -> str:
        return f"{self.title} {self.arrow}".strip()

    def badness(self, value: float) -> float:
        """By which the best is least."""
        if self.best is None:
            raise ValueError(f"{self.figure} has no better or worse")
        return {float("-inf"): value, float("inf"): -value}.get(self.best, abs(value - self.best))


LOW, HIGH = float("-inf"), float("inf")
MEASURES = {
    task: tuple(Measure(c.figure, c.title, c.write, HIGH if c.better == "high" else LOW) for c in columns)
    for task, columns in COLUMNS.items()
}
"""What a comparison is about, by task."""
FURTHER = (
    Measure("mae", "MAE", digits, LOW),
    Measure("coverage_50", "coverage of 50 %", decimals, 0.5),
    Measure("coverage_90", "coverage of 90 %", decimals, 0.9),
    Measure("coverage_95", "coverage of 95 %", decimals, 0.95),
    Measure("width_90", "width of 90 %", digits),
    Measure("aurc", "AURC", digits, LOW),
    Measure("ood_fpr95", "OOD FPR at 95 %", decimals, LOW),
    Measure("fit_memory", "fit, MB", megabytes, LOW),
    Measure("predict_memory", "predict, MB", megabytes, LOW),
)
"""What else is usually known."""


def measures_of(case: CaseSummary) -> tuple[list[Measure], list[Measure]]:
    """What there is to show of a case: first what a comparison is about, with the figures that only this experiment
    has before the costs; then the further ones."""
    there = dict.fromkeys(figure for method in case.methods for figure in method.estimates)
    usual, costs = MEASURES[case.task], {column.figure for column in COSTS}
    known = {measure.figure for measure in (*usual, *FURTHER)}
    metrics = {figure for run in case.runs for figure in run.metrics}
    own = [Measure(figure, figure.replace("_", " "), digits) for figure in there if figure not in known]
    times = [
        Measure(own_.figure, own_.title.removesuffix(" seconds") + ", s", seconds, LOW)
        for own_ in own
        if own_.figure not in metrics and own_.figure.endswith("_seconds")
    ]
    main = [
        *(measure for measure in usual if measure.figure not in costs),
        *(measure for measure in own if measure.figure in metrics),
        *(measure for measure in usual if measure.figure in costs),
        *times,
    ]
    rest = [measure for measure in own if measure.figure not in {shown.figure for shown in main}]
    return [m for m in main if m.figure in there], [m for m in (*FURTHER, *rest) if m.figure in there]


def places_of(measure: Measure, case: CaseSummary) -> dict[str, int]:
    """The methods that are first (1) and second (2). What is written the same shares a place, and the places after it
    are then missing; where all are the same there is none."""
    if measure.best is None:
        return {}
    means = {m.method: m.estimates[measure.figure].mean for m in case.methods if measure.figure in m.estimates}
    ranked = sorted(means, key=lambda method: measure.badness(means[method]))
    written = [measure.write(means[method]) for method in ranked]
    if len(set(written)) < 2:
        return {}
    places = {method: 1 + written.index(text) for method, text in zip(ranked, written, strict=True)}
    return {method: place for method, place in places.items() if place < 3}


def write_tables(folder: str | os.PathLike[str]) -> list[Path]:
    """Writes table.md, table.csv and table.tex of all runs in a folder, and tells where."""
    results = read_results(folder)
    experiments = summarise(results.records)
    warnings = "".join(f"\n> {escape_markdown(warning)}\n" for warning in results.warnings)
    texts = {
        "table.md": "\n".join(map(markdown_means, experiments)) + warnings,
        "table.csv": csv_means(experiments),
        "table.tex": "\n".join(map(latex_means, experiments)),
    }
    for name, text in texts.items():
        with atomic_path(Path(folder) / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return [Path(folder) / name for name in texts]


def markdown_means(experiment: ExperimentSummary) -> str:
    """A table a case: the best in bold, the second best in italics; below it the data and the runs it is without."""
    return "\n".join(markdown_case(case, several=len(experiment.cases) > 1) for case in experiment.cases)


def markdown_case(case: CaseSummary, *, several: bool) -> str:
    measures, _ = measures_of(case)
    places = {measure.figure: places_of(measure, case) for measure in measures}
    around = {1: "**", 2: "*", None: ""}
    lines = [f"### {escape_markdown(case.case)}", ""] if several else []
    lines += [
        f"| method | {' | '.join(escape_markdown(measure.heading) for measure in measures)} | seeds |",
        "|---|" + "---:|" * (len(measures) + 1),
    ]
    for method in case.methods:
        cells = []
        for measure in measures:
            mark = around[places[measure.figure].get(method.method)]
            cells.append(mark + written(measure, method.estimates.get(measure.figure)) + mark)
        lines.append(f"| {' | '.join((escape_markdown(method.title), *cells, str(len(method.counted))))} |")
    told = [*(f"Data, {source}" for source in case.sources), *case.notes()]
    lines += ["", *(f"- {escape_markdown(line)}" for line in told)] if told else []
    return "\n".join(lines) + "\n"


def csv_means(experiments: list[ExperimentSummary]) -> str:
    """A row a method: every figure's mean and standard error with all their digits, and where the data come from."""
    cases = [case for experiment in experiments for case in experiment.cases]
    figures = dict.fromkeys(figure for case in cases for method in case.methods for figure in method.estimates)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = [name for figure in figures for name in (figure, f"{figure}_se")]
    writer.writerow(["experiment", "case", "method", "seeds", "excluded", *columns, "data"])
    for case in cases:
        for method in case.methods:
            found = [method.estimates.get(figure) for figure in figures]
            numbers = [n for e in found for n in ((e.mean, e.error) if e is not None else ("", ""))]
            counts = (len(method.counted), len(method.excluded))
            head = (case.experiment, case.case, method.method, *counts)
            writer.writerow([*head, *("" if n is None else n for n in numbers), " | ".join(sources_of(method))])
    return text.getvalue()


def sources_of(method: MethodSummary) -> list[str]:
    """Where the data of one method come from."""
    return list(dict.fromkeys(f"{part}: {of}" for run in method.runs for part, of in described(run.data).items()))


def latex_means(experiment: ExperimentSummary) -> str:
    """One table (packages: booktabs), a block a case: the best in bold, the second best underlined."""
    measures = list(dict.fromkeys(measure for case in experiment.cases for measure in measures_of(case)[0]))
    width = len(measures) + 1
    lines = [
        f"\\begin{{tabular}}{{l{'r' * len(measures)}}}",
        "\\toprule",
        " & ".join(("Method", *(latex_heading(measure) for measure in measures))) + " \\\\",
    ]
    for case in experiment.cases:
        lines.append("\\midrule")
        if len(experiment.cases) > 1:
            lines.append(f"\\multicolumn{{{width}}}{{l}}{{\\emph{{{escape_latex(case.case)}}}}} \\\\")
        places = {measure: places_of(measure, case) for measure in measures}
        for method in case.methods:
            cells = (
                latex_cell(measure, method.estimates.get(measure.figure), places[measure].get(method.method))
                for measure in measures
            )
            lines.append(" & ".join((escape_latex(method.title), *cells)) + " \\\\")
    lines.append("\\bottomrule")
    told = dict.fromkeys(
        line for case in experiment.cases for line in (*(f"Data, {source}" for source in case.sources), *case.notes())
    )
    for line in told:
        text = f"\\footnotesize {escape_latex(line)}"
        lines.append(f"\\multicolumn{{{width}}}{{p{{0.9\\linewidth}}}}{{{text}}} \\\\")
    return "\n".join((*lines, "\\end{tabular}")) + "\n"


def latex_heading(measure: Measure) -> str:
    arrows = {"↓": "$\\downarrow$", "↑": "$\\uparrow$", "": ""}
    arrow = arrows.get(measure.arrow) if measure.arrow in arrows else f"$\\to {measure.best:g}$"
    return f"{escape_latex(measure.title)} {arrow}".strip()


def latex_cell(measure: Measure, found: Estimate | None, place: int | None) -> str:
    if found is None:
        return "--"
    mean = {1: "\\textbf{%s}", 2: "\\underline{%s}", None: "%s"}[place] % measure.write(found.mean)
    return mean if found.error is None else f"{mean} $\\pm$ {spread(measure, found)}"


def written(measure: Measure, found: Estimate | None) -> str:
    """Mean ± standard error."""
    if found is None:
        return "–"
    mean = measure.write(found.mean)
    return mean if found.error is None else f"{mean} ± {spread(measure, found)}"


def spread(measure: Measure, found: Estimate) -> str:
    """The standard error, with as many decimals as the mean is written with."""
    if found.error is None:
        raise ValueError("one run has no standard error")
    if measure.write is megabytes:
        return megabytes(found.error)
    _, _, fraction = measure.write(found.mean).partition(".")
    if "e" in fraction:
        return f"{found.error:.1e}"
    if not fraction and found.error < 1:
        return f"{found.error:.1g}"  # rather than none
    return f"{found.error:,.{len(fraction)}f}"


def escape_markdown(text: str) -> str:
    """Text that stays what it is inside a table."""
    return re.sub(r"([\\`*_{}\[\]<>|#~$])", r"\\\1", " ".join(text.split()))


LATEX = {
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "–": "--",
    "±": "$\\pm$",
    "α": "$\\alpha$",
    "×": "$\\times$",
    "°": "$^\\circ$",
    "<": "\\textless{}",
    ">": "\\textgreater{}",
    "|": "\\textbar{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}


def escape_latex(text: str) -> str:
    """Text that stays what it is between commands."""
    return "".join(LATEX.get(sign, sign) for sign in " ".join(text.split()))
