"""Reading a folder of results: both kinds of documents, and all that may be in such a folder beside them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from posthoc.errors import FileError
from posthoc.evaluate.report.records import read_curves
from posthoc.evaluate.report.summary import read_results
from tests.report_cases import compared, document, write


def test_both_kinds_of_documents_are_read_alike(tmp_path):
    write(tmp_path, document(experiment="cifar10", case="resnet20", title="MAP", curves={"lines": {}}))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "map-0.json").write_text(json.dumps(compared()))
    (tmp_path / "map-0.json").write_text(json.dumps(compared(seed=4)))
    at_root, reproduced, of_folder = sorted(read_results(tmp_path).records, key=lambda r: (r.path.count("/"), r.path))
    assert (reproduced.experiment, reproduced.case, reproduced.title) == ("cifar10", "resnet20", "MAP")
    assert reproduced.path == "cifar10/resnet20-map-0.json"
    assert reproduced.figures == {"nll": 0.5, "accuracy": 0.9, "fit_seconds": 1.0, "predict_seconds": 0.5}
    assert reproduced.data == {"test": "the rest of it"}
    assert (of_folder.experiment, at_root.experiment) == ("mine", tmp_path.name)
    costs = {"fit_seconds": 0.1, "predict_seconds": 0.2, "peak_memory": 2e6}
    assert of_folder.figures == {"nll": 0.5, "accuracy": 0.9, "ece": 0.02} | costs
    assert of_folder.data == {"train": "fit.npz", "test": "test.npz"}
    assert of_folder.configuration["device"] == "cpu"
    assert at_root.seed == 4


def test_other_files_are_left_out_and_told_of(tmp_path):
    write(tmp_path, document())
    texts = {
        "broken.json": '{"method": "map", "se',
        "list.json": "[1, 2]",
        "foreign.json": '{"name": "something else"}',
        "bytes.json": "\udcff",
        "deep.json": "[" * 200_000,
        "old.json": json.dumps(document(format=0)),
        "words.json": json.dumps(document(seed=7, metrics={"nll": "low"})),
        "neither.json": json.dumps({"method": "map", "seed": 0, "task": "regression"}),
        "flag.json": json.dumps(document(seed=True)),
        "task.json": json.dumps(compared(task=[])),
    }
    for name, content in texts.items():
        (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    (tmp_path / ".map-0.json.tmp.json").write_text("half of a run that is being written")
    (tmp_path / "table.csv").write_text("method,nll")
    found = read_results(tmp_path)
    assert [record.path for record in found.records] == ["toy/map-0.json"]
    assert sorted(warning.split()[0] for warning in found.warnings) == sorted(texts)
    reasons = {warning.split()[0]: warning for warning in found.warnings}
    assert "not JSON" in reasons["broken.json"]
    assert "not JSON" in reasons["bytes.json"]
    assert "not the document of a run" in reasons["foreign.json"]
    assert "format is 0" in reasons["old.json"]
    assert "metrics" in reasons["words.json"]


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(FileError, match=r"found no run's document.*python -m reproduction"):
        read_results(tmp_path)
    with pytest.raises(FileError, match="found nothing at"):
        read_results(tmp_path / "absent")
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(FileError, match=r"The first of 1 others: broken\.json"):
        read_results(tmp_path)
    with pytest.raises(FileError, match="found a file at"):
        read_results(path)


def test_two_documents_of_one_run_and_two_tasks_are_refused(tmp_path):
    write(tmp_path / "new", document())
    write(tmp_path / "old", document())
    with pytest.raises(FileError, match=r"found two, new/toy/map-0\.json and old/toy/map-0\.json"):
        read_results(tmp_path)
    write(tmp_path / "new", document(method="fmgp", task="regression"))
    with pytest.raises(FileError, match="one task"):
        read_results(tmp_path / "new")


def test_what_was_thrown_together_is_told(tmp_path):
    write(tmp_path, document())
    assert read_results(tmp_path).warnings == ()
    write(tmp_path, document(seed=1, versions={"posthoc": "0.2.0"}))
    write(tmp_path, document(seed=2, configuration={"quick": True, "data": {"test": "the rest of it"}}))
    versions, quick = read_results(tmp_path).warnings
    assert "several versions of posthoc (2 of 0.1.0, 1 of 0.2.0)" in versions
    assert "1 quick runs" in quick
    write(tmp_path, document(experiment="other", configuration={"data": {"test": "some"}}))
    write(tmp_path, document(experiment="other", seed=1, configuration={"data": {"test": "others"}}))
    write(tmp_path, document(experiment="third", configuration={"data": {"sha256": "12"}}))
    write(tmp_path, document(experiment="third", seed=1, configuration={"data": {"sha256": "34"}}))
    assert [warning for warning in read_results(tmp_path).warnings if "different data" in warning] == [
        "other mixes runs on different data: see how it was run."
    ]


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (document(problem="not a finite number: nll", metrics={"nll": None}), "not a finite number: nll"),
        (document(metrics={"nll": float("nan"), "ece": 0.1}), "not a finite number: nll"),
        (document(metrics={"nll": 10**400}), "not a finite number: nll"),
        (document(metrics={"nll": 1e308}), "not a finite number: nll"),
        (document(metrics={}), "it has no figures"),
        (compared(nll=None), "not a finite number: nll"),
        (compared(error="out of memory", nll=None), "out of memory"),
        (document(), None),
        (compared(), None),
    ],
)
def test_a_run_that_came_to_nothing_is_kept_and_says_why(tmp_path, run, problem):
    (tmp_path / "run-0.json").write_text(json.dumps(run))
    (record,) = read_results(tmp_path).records
    assert record.problem == problem
    assert all(value == value and abs(value) < 1e300 for value in record.figures.values())


def test_a_method_that_does_not_apply_says_so(tmp_path):
    (tmp_path / "run-0.json").write_text(json.dumps(compared(error="for regression", applies=False)))
    assert not read_results(tmp_path).records[0].applies


def test_curves_are_read_or_named(tmp_path):
    good, lines, bad = read_curves(
        {
            "reliability": {"confidence": [None, 0.5], "accuracy": [None, 1], "share": [0, 1.0]},
            "entropy": {"edges": [0, 1, 2], "in": [0.5, 0.5], "out": [1, 0]},
            "risk_coverage": {"coverage": [0.5, 1.0], "risk": [0.1]},
            "calibration": {"level": ["a"], "coverage": [0.1]},
            "error_bars": {"target": [1.0]},
            "band": {"x": [0, 1], "mean": [0, 1], "low": [0, 1], "high": [0, 1], "points": [[0.1, 0.2]]},
            "lines": {"rotation": {"x": [0, 10], "nll": [0.1, None]}, "bad": {"nll": [1]}, "worse": 3},
            "unknown": 3,
        }
    )
    assert sorted(good) == ["band", "entropy", "reliability"]
    np.testing.assert_array_equal(good["reliability"]["confidence"], [np.nan, 0.5])
    np.testing.assert_array_equal(good["band"]["points"], [[0.1, 0.2]])
    np.testing.assert_array_equal(lines["rotation"]["nll"], [0.1, np.nan])
    assert bad == ["risk_coverage", "calibration", "error_bars", "bad", "worse"]
    for wrong in ({"edges": [0, 1], "in": [0.5, 0.5]}, {"edges": [0, 0, 1], "in": [1, 1]}, {"in": [1]}, [], "x"):
        assert read_curves({"entropy": wrong})[2] == ["entropy"]
    write(tmp_path, document(curves={"entropy": 3}))
    assert read_results(tmp_path).warnings == ("toy/map-0.json: its curve entropy cannot be drawn.",)
