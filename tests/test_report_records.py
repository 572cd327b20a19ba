"""Reading a folder of results: both kinds of documents, what else is in such a folder, and means over seeds."""

import json
import statistics

import numpy as np
import pytest

from posthoc.errors import FileError
from posthoc.evaluate.report.charts import mean_curve, pooled_reliability
from posthoc.evaluate.report.summary import estimate, natural, read_results
from posthoc.evaluate.report.tables import columns_of
from tests.report_cases import compared, document, write


def test_both_kinds_of_documents_are_read_alike(tmp_path):
    write(tmp_path, document(experiment="cifar10", case="resnet20", title="MAP", curves={"lines": {}}))
    (tmp_path / "mine").mkdir()
    for path, run in (("mine/map-0.json", compared()), ("map-0.json", compared(seed=4))):
        (tmp_path / path).write_text(json.dumps(run))
    records = {record.path: record for record in read_results(tmp_path).records}
    reproduced, of_folder, at_root = (records.pop(f"{name}map-0.json") for name in ("cifar10/resnet20-", "mine/", ""))
    assert not records
    assert (reproduced.experiment, reproduced.case, reproduced.title) == ("cifar10", "resnet20", "MAP")
    assert reproduced.figures == {"nll": 0.5, "accuracy": 0.9, "fit_seconds": 1.0, "predict_seconds": 0.5}
    assert reproduced.data == {"test": "the rest of it"}
    assert (of_folder.experiment, at_root.experiment, at_root.seed) == ("mine", tmp_path.name, 4)
    costs = {"fit_seconds": 0.1, "predict_seconds": 0.2, "peak_memory": 2e6}
    assert of_folder.figures == {"nll": 0.5, "accuracy": 0.9, "ece": 0.02} | costs
    assert of_folder.data == {"train": "fit.npz", "test": "test.npz"}
    assert of_folder.configuration["device"] == "cpu"


def test_other_files_are_left_out_and_named_with_the_reason(tmp_path):
    write(tmp_path, document())
    texts = {
        "broken.json": ('{"method": "map", "se', "not JSON"),
        "bytes.json": ("\udcff", "not JSON"),
        "list.json": ("[1, 2]", "not the document of a run"),
        "foreign.json": ('{"name": "something else"}', "not the document of a run"),
        "old.json": (json.dumps(document(format=0)), "its format is 0"),
        "lacks.json": (json.dumps(document(curves={"entropy": {"in": [1]}})), "its curve entropy lacks edges"),
        "curve.json": (json.dumps(document(curves={"entropy": 3})), "its curve entropy cannot be read"),
        "words.json": (json.dumps(document(curves={"lines": {"a": {"x": ["b"]}}})), "its curve a cannot be read"),
        "neither.json": (json.dumps({"method": "map", "seed": 0, "task": "regression"}), "neither of an experiment"),
    }
    for name, (content, _) in texts.items():
        (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    (tmp_path / ".map-0.json.tmp.json").write_text("half of a run that is being written")
    (tmp_path / "table.csv").write_text("method,nll")
    found = read_results(tmp_path)
    assert [record.path for record in found.records] == ["toy/map-0.json"]
    assert sorted(warning.split()[0] for warning in found.warnings) == sorted(texts)
    assert all(texts[warning.split()[0]][1] in warning for warning in found.warnings)


def test_a_folder_without_runs_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text("{")
    for name, message in (
        ("empty", r"posthoc compare or python -m reproduction in .*, found none\.$"),
        ("absent", "found nothing at"),
        (".", r"found none\. broken\.json is left out: it is not JSON"),
        ("broken.json", "found a file at"),
    ):
        with pytest.raises(FileError, match=message):
            read_results(tmp_path / name)


def test_two_documents_of_one_run_and_two_tasks_are_refused(tmp_path):
    write(tmp_path / "new", document())
    write(tmp_path / "old", document())
    with pytest.raises(FileError, match=r"found two: new/toy/map-0\.json and old/toy/map-0\.json"):
        read_results(tmp_path)
    write(tmp_path / "new", document(method="fmgp", task="regression"))
    with pytest.raises(FileError, match="one task"):
        read_results(tmp_path / "new")


def test_runs_that_do_not_belong_together_are_named(tmp_path):
    write(tmp_path, document())
    assert read_results(tmp_path).warnings == ()
    write(tmp_path, document(seed=1, versions={"posthoc": "0.2.0"}))
    write(tmp_path, document(seed=2, configuration={"quick": True, "data": {"test": "the rest of it"}}))
    versions, quick = read_results(tmp_path).warnings
    assert "several versions of posthoc: 0.1.0, 0.2.0." in versions
    assert "1 quick runs" in quick
    for seed, test, digest in ((0, "some", "12"), (1, "others", "34")):
        write(tmp_path, document(experiment="other", seed=seed, configuration={"data": {"test": test}}))
        write(tmp_path, document(experiment="third", seed=seed, configuration={"data": {"sha256": digest}}))
    (mixed,) = (warning for warning in read_results(tmp_path).warnings if "different data" in warning)
    assert mixed == "other mixes runs on different data: see how it was run."


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (document(problem="not a finite number: nll", metrics={"nll": None}), "not a finite number: nll"),
        (document(metrics={"nll": float("nan"), "ece": 0.1}), "not a finite number: nll"),
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
    assert (record.problem, record.applies) == (problem, True)
    assert all(abs(value) < 1e300 for value in record.figures.values())


def test_curves_are_read(tmp_path):
    curves = {
        "reliability": {"confidence": [None, 0.5], "accuracy": [None, 1], "share": [0, 1.0], "count": None},
        "band": {"x": [0, 1], "mean": [0, 1e300], "low": [0, 1], "high": [0, 1], "points": [[0.1, 0.2]]},
        "lines": {"rotation": {"x": [0, 10], "nll": [0.1, None]}},
        "unknown": 3,
    }
    write(tmp_path, document(curves=curves))
    (record,) = read_results(tmp_path).records
    assert list(record.curves) == ["reliability", "band", "by rotation"]
    assert list(record.curves["reliability"]) == ["confidence", "accuracy", "share"]
    np.testing.assert_array_equal(record.curves["reliability"]["confidence"], [np.nan, 0.5])
    np.testing.assert_array_equal(record.curves["band"]["mean"], [0, np.nan])
    np.testing.assert_array_equal(record.curves["band"]["points"], [[0.1, 0.2]])
    np.testing.assert_array_equal(record.curves["by rotation"]["nll"], [0.1, np.nan])


def test_mean_and_standard_error():
    found = estimate([1.0, 2.0, 4.0], [0.1, 0.1, 0.1])
    assert (found.mean, found.error) == pytest.approx((7 / 3, statistics.stdev([1.0, 2.0, 4.0]) / 3**0.5))
    assert (estimate([5.0]).error, estimate([5.0]).count) == (None, 1)
    assert estimate([5.0], [0.01]).error == 0.01  # that of the test set
    assert estimate([1e9 + 1, 1e9 + 2, 1e9 + 3]).error == pytest.approx(1 / 3**0.5)


def test_runs_with_a_problem_are_kept_and_left_out_of_the_means(tmp_path):
    for method, values in (("map", (0.5, 0.6, 0.7)), ("fmgp", (0.1, None, 0.3)), ("ella", (None,))):
        for seed, value in enumerate(values):
            data = {"train": {"source": "flights", "rows": 10}, "sha256": str(seed)}
            metrics = {"nll": value, "accuracy": 0.9}
            write(tmp_path, document(method=method, seed=seed, metrics=metrics, configuration={"data": data}))
    case = read_results(tmp_path).experiments[0].cases[0]
    assert case.sources == ["train: source: flights; rows: 10"]
    bare, ella, ours = case.methods
    assert [method.method for method in case.methods] == ["map", "ella", "fmgp"]
    nll = ours.estimates["nll"]
    assert (nll.mean, nll.error, ours.estimates["accuracy"].count) == pytest.approx((0.2, 0.1, 2))
    assert [run.seed for run in ours.excluded] == [1]
    assert (bare.excluded, bare.missing, bare.estimates["nll"].count) == ([], [], 3)
    assert (ella.counted, ella.missing, ella.estimates) == ([], [1, 2], {})
    assert case.notes() == [
        "ella, seed 0 (left out of the means): not a finite number: nll",
        "ella: no run with seed 1, 2",
        "fmgp, seed 1 (left out of the means): not a finite number: nll",
    ]


def test_cases_and_methods_are_in_the_order_people_expect(tmp_path):
    for case in ("resnet110", "resnet20", "resnet56"):
        for method in ("fmgp", "fmgp-paper", "zeta", "laplace-kfac", "laplace", "map"):
            write(tmp_path, document(case=case, method=method))
    (experiment,) = read_results(tmp_path).experiments
    assert [case.case for case in experiment.cases] == ["resnet20", "resnet56", "resnet110"]
    assert list(experiment.numbers) == ["map", "laplace", "laplace-kfac", "zeta", "fmgp", "fmgp-paper"]
    assert sorted(["0.5", "0.25", "1", "x²", "10 a", "9 b"], key=natural) == ["0.25", "0.5", "1", "9 b", "10 a", "x²"]


def test_columns_are_in_their_order_and_two_tables():
    metrics = {"amplitude": 2.0, "mae": 1.0, "cqm": 0.1, "nll": 0.5, "width_90": 1.0, "coverage_90": 0.9}
    main, further = columns_of([*metrics, "predict_seconds", "fit_seconds"])
    named = ["nll", "cqm", "coverage_90", "width_90", "amplitude"]
    assert [column.figure for column in main] == [*named, "fit_seconds", "predict_seconds"]
    assert [column.heading for column in main[:4]] == ["NLL ↓", "CQM ↓", "cover 90 % → 0.9", "width 90 %"]
    assert [column.figure for column in further] == ["mae"]


def arrays(**columns):
    return {name: np.array(values) for name, values in columns.items()}


def test_reliability_is_pooled_by_the_points_of_each_bin():
    first = arrays(confidence=[0.2, 0.8], accuracy=[0.0, 0.5], share=[0.25, 0.75])
    second = arrays(confidence=[np.nan, 0.6], accuracy=[np.nan, 1.0], share=[0.0, 1.0])
    pooled = pooled_reliability([first, second])
    assert pooled["share"] == pytest.approx([0.125, 0.875])
    assert pooled["confidence"] == pytest.approx([0.2, (0.75 * 0.8 + 0.6) / 1.75])
    assert pooled["accuracy"] == pytest.approx([0.0, (0.75 * 0.5 + 1.0) / 1.75])


def test_curves_are_averaged_where_they_are_along_the_same_places():
    curves = [arrays(x=[0.0, 1.0], y=[1.0, np.nan]), arrays(x=[0.0, 1.0], y=[3.0, 5.0]), arrays(x=[0.0, 2.0], y=[9, 9])]
    means, errors = mean_curve(curves, "x")
    assert {name: column.tolist() for name, column in means.items()} == {"x": [0.0, 1.0], "y": [2.0, 5.0]}
    assert errors["y"] == pytest.approx([1.0, 0.0])
