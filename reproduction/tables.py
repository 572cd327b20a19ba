"""Tables of an experiment as Markdown, CSV and LaTeX: means and standard errors over seeds, the best two marked."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from posthoc.evaluate.report.summary import (
    CaseSummary,
    Estimate,
    ExperimentSummary,
    MethodSummary,
    read_results,
)
from posthoc.evaluate.report.tables import (
    Column,
    columns_of,
    csv_table,
    escape_markdown,
    figures_and_errors,
    markdown_table,
    places_of,
    spread,
)
from posthoc.io import atomic_path

__all__ = ["csv_means", "latex_means", "markdown_means", "write_tables"]


def write_tables(folder: str | os.PathLike[str]) -> list[Path]:
    """Writes table.md, table.csv and table.tex of all runs in a folder, and returns their paths."""
    results = read_results(folder)
    warnings = "".join(f"\n> {escape_markdown(warning)}\n" for warning in results.warnings)
    texts = {
        "table.md": "\n".join(map(markdown_means, results.experiments)) + warnings,
        "table.csv": csv_means(results.experiments),
        "table.tex": "\n".join(map(latex_means, results.experiments)),
    }
    for name, text in texts.items():
        with atomic_path(Path(folder) / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return [Path(folder) / name for name in texts]


def markdown_means(experiment: ExperimentSummary) -> str:
    """A table a case, and below it the data and the runs it is without."""
    return "\n".join(markdown_case(case, several=len(experiment.cases) > 1) for case in experiment.cases)


def markdown_case(case: CaseSummary, *, several: bool) -> str:
    title = f"### {escape_markdown(case.case)}\n\n" if several else ""
    rows = {each.title: each.estimates | {"seeds": Estimate(len(each.counted))} for each in case.methods}
    table = markdown_table([*columns_of(case.figures)[0], Column("seeds", "seeds", str)], rows)
    notes = [*(f"Data, {source}" for source in case.sources), *case.notes()]
    return title + table + ("\n" if notes else "") + "".join(f"- {escape_markdown(note)}\n" for note in notes)


def csv_means(experiments: Iterable[ExperimentSummary]) -> str:
    """A row a method: every figure's mean and standard error with all their digits, and where the data come from."""
    rows = []
    for case in (case for experiment in experiments for case in experiment.cases):
        for method in case.methods:
            about = {
                "experiment": case.experiment,
                "case": case.case,
                "method": method.method,
                "seeds": len(method.counted),
                "excluded": len(method.excluded),
                "data": " | ".join(method.sources),
            }
            rows.append(about | figures_and_errors(method.estimates))
    return csv_table(rows)


def latex_means(experiment: ExperimentSummary) -> str:
    """One table (packages: booktabs), a block a case: the best in bold, the second best underlined."""
    columns = list(dict.fromkeys(column for case in experiment.cases for column in columns_of(case.figures)[0]))
    width = len(columns) + 1
    lines = [
        f"\\begin{{tabular}}{{l{'r' * len(columns)}}}",
        "\\toprule",
        " & ".join(("Method", *(escape_latex(column.heading) for column in columns))) + " \\\\",
    ]
    for case in experiment.cases:
        lines.append("\\midrule")
        if len(experiment.cases) > 1:
            lines.append(f"\\multicolumn{{{width}}}{{l}}{{\\emph{{{escape_latex(case.case)}}}}} \\\\")
        lines += [latex_row(columns, method, case) for method in case.methods]
    lines.append("\\bottomrule")
    notes = dict.fromkeys(
        line for case in experiment.cases for line in (*(f"Data, {source}" for source in case.sources), *case.notes())
    )
    for note in notes:
        text = f"\\footnotesize {escape_latex(note)}"
        lines.append(f"\\multicolumn{{{width}}}{{p{{0.9\\linewidth}}}}{{{text}}} \\\\")
    return "\n".join((*lines, "\\end{tabular}")) + "\n"


def latex_row(columns: list[Column], method: MethodSummary, case: CaseSummary) -> str:
    cells = []
    for column in columns:
        known = case.estimates(column.figure)
        cells.append(latex_cell(column, known.get(method.method), places_of(column, known).get(method.method)))
    return " & ".join((escape_latex(method.title), *cells)) + " \\\\"


def latex_cell(column: Column, found: Estimate | None, place: int | None) -> str:
    if found is None:
        return "--"
    mean = {1: "\\textbf{%s}", 2: "\\underline{%s}", None: "%s"}[place] % column.write(found.mean)
    return mean if found.error is None else f"{mean} $\\pm$ {spread(column, found)}"


LATEX = {
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "–": "--",
    "±": "$\\pm$",
    "↓": "$\\downarrow$",
    "↑": "$\\uparrow$",
    "→": "$\\to$",
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
