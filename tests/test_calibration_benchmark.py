"""The calibration benchmark on small data: its results, its cache, and the targets."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from benchmarks import calibration
from benchmarks.calibration_rows import CASES, OURS, PEERS, Job, Place, work
from benchmarks.calibration_targets import few_checks, row_checks, variants
from tests.cases import seeded

ROW = "llm_emotion/mistral7b"
LAST = next(iter(OURS))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with data for one row; processes are threads, to save time."""
    g = seeded(0)
    logits = 2.0 * torch.randn(5060, 4, generator=g)
    y = torch.multinomial((0.5 * logits + torch.linspace(0.0, 2.0, 4)).softmax(-1), 1, generator=g).squeeze(1)
    (tmp_path / "llm_emotion").mkdir()
    np.savez(tmp_path / f"{ROW}.npz", outputs=logits.numpy(), targets=y.numpy())
    monkeypatch.setattr(calibration, "ProcessPoolExecutor", lambda jobs, **_: ThreadPoolExecutor(jobs))
    return tmp_path


def run(folder, *options):
    out = folder / "out.json"
    calibration.main(["--quick", "--data-dir", str(folder), "--out", str(out), "--only", ROW, *options])
    return json.loads(out.read_text())["runs"]


def test_rows_are_scored_cached_and_resumed(folder, monkeypatch):
    names = ["bare", "temperature", "beta", LAST]
    options = ["--methods", *names, "--cache", str(folder / "cache")]
    found = run(folder, *options)[ROW]
    assert list(found["methods"]) == [LAST, "bare", "temperature", "beta"]
    figures = found["methods"]["beta"]
    with np.load(folder / "cache" / "llm_emotion--mistral7b--beta.npz") as file:
        kept = {name: file[name] for name in file}
    with np.load(folder / f"{ROW}.npz") as file:
        logits, y = file["outputs"][5000:], file["targets"][5000:]
    assert figures["nll"] == pytest.approx(-kept["log_probs"][np.arange(60), y].mean(), rel=1e-5)
    assert figures["classes_moved"] == np.mean(kept["log_probs"].argmax(1) != logits.argmax(1)) > 0
    difference, error = found["pairs"][LAST]["beta"]
    assert difference == pytest.approx(found["methods"][LAST]["nll"] - figures["nll"])
    assert error > 0.0
    assert found["checks"]["fixed"]["classes moved"]["met"]

    used = []
    monkeypatch.setattr("benchmarks.calibration_rows.fitted", lambda job, *_: used.append(job.method))
    work(Job(ROW, "beta"), Place(folder, folder / "cache", "cpu", {}))
    assert not used  # from the cache
    monkeypatch.setattr(calibration, "attempt", None)
    assert run(folder, *options, "--resume")[ROW] == found


def test_methods_that_fail_have_their_error_and_the_others_go_on(folder, monkeypatch):
    def fail(job, *_):
        raise ZeroDivisionError("one over nothing")

    monkeypatch.setattr("benchmarks.calibration_rows.fitted", fail)
    found = run(folder, "--methods", "bare")[ROW]
    assert "one over nothing" in found["methods"]["bare"]["error"]


def test_few_rows(folder):
    found = run(folder, "--few-rows", "--methods", "bare", "temperature")[ROW]
    assert found["nll"].keys() == {"20"}
    first, second = found["nll"]["20"]["temperature"]
    assert first != second
    assert found["nll"]["20"]["bare"] == [found["nll"]["20"]["bare"][0]] * 2


def method(nll: float, ece: float = 0.01, moved: float = 0.0, **more: float) -> dict[str, float]:
    return {"nll": nll, "ece": ece, "classes_moved": moved, "ece_error": 0.001, **more}


def test_targets_of_a_row():
    ours = variants(OURS)["fixed"]
    methods = {"temperature": method(1.0), "dirichlet": method(0.8), ours: method(0.9, nll_spread=0.01)}
    pairs = {ours: {"temperature": [-0.1, 0.01], "dirichlet": [0.1, 0.01]}}
    checks = row_checks(ROW, {"methods": methods, "pairs": pairs})
    assert {name: each["met"] for name, each in checks["fixed"].items()} == {
        "classes moved": True,
        "nll against temperature": True,
        "ece": True,
        "nll as required": False,
    }
    assert not checks["order"][ours]["met"]
    methods[ours] |= {"classes_moved": 0.1, "ece": 0.02, "nll_spread": 0.001}
    checks = row_checks(ROW, {"methods": methods, "pairs": pairs})
    assert not checks["fixed"]["classes moved"]["met"]
    assert not checks["fixed"]["ece"]["met"]
    assert checks["order"][ours]["met"]
    if variants(OURS)["calibrated"] == ours:
        assert not checks["calibrated"]["nll against dirichlet"]["met"]


@pytest.mark.parametrize(("ours", "met"), [([0.95, 1.05], True), ([0.9, 1.2], False)])
def test_targets_of_twenty_rows(ours, met):
    nlls = {"bare": [1.0, 1.0], "temperature": [1.5, 1.0], LAST: ours}
    assert all(each["met"] for each in few_checks(ROW, 20, nlls).values()) == met


def test_targets_of_a_hundred_rows():
    nlls = {"bare": [1.0, 1.0], "temperature": [0.9, 0.9], "structured-matrix": [0.5, 0.5], LAST: [0.9, 0.93]}
    checks = few_checks("cifar10_resnet20", 100, nlls)
    assert [each["value"] for each in checks.values()] == pytest.approx([0.015, 0.03])
    assert not any(each["met"] for each in checks.values())
    if variants(OURS)["calibrated"] == LAST:
        share = few_checks(ROW, 100, {**nlls, LAST: [0.54, 0.54]})[f"{LAST}: share of structured scaling's gain"]
        assert share == {"value": pytest.approx(0.9), "limit": 0.85, "met": True}


def test_every_row_has_its_methods_and_names_its_files():
    assert set(calibration.FEW) <= set(CASES)
    assert set(calibration.FEW_METHODS) <= {*PEERS, *OURS}
    assert all(limits.keys() <= {"fixed", "calibrated", "network"} for limits in (c.limits for c in CASES.values()))
