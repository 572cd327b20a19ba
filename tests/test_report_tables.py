"""Means and standard errors over seeds, the best two of a column, and the curves of several seeds as one."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from posthoc.evaluate.report.charts import mean_curve, pooled_reliability
from posthoc.evaluate.report.summary import estimate, natural, read_results
from posthoc.evaluate.report.tables import columns_of, places_of
from tests.report_cases import document, write


def one(folder):
    (experiment,) = read_results(folder).experiments
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
    experiment = one(tmp_path)
    assert [case.case for case in experiment.cases] == ["resnet20", "resnet56", "resnet110"]
    assert list(experiment.numbers) == ["map", "laplace", "laplace-kfac", "zeta", "fmgp", "fmgp-paper"]
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
    main, further = columns_of(case.figures)
    named = ["nll", "cqm", "coverage_90", "width_90", "amplitude"]
    assert [column.figure for column in main] == [*named, "fit_seconds", "predict_seconds"]
    assert further == []

    by_name = {column.figure: places_of(column, case.estimates(column.figure)) for column in main}
    assert by_name["nll"] == {"map": 1, "temperature": 1}  # written the same
    assert by_name["coverage_90"] == {"ella": 1, "temperature": 2}
    assert by_name["cqm"] == by_name["width_90"] == by_name["amplitude"] == {}
    assert [column.heading for column in main[:4]] == ["NLL ↓", "CQM ↓", "cover 90 % → 0.9", "width 90 %"]
    assert all(case.methods[0].estimates[column.figure].count == 1 for column in main)


def test_one_seed_has_the_error_of_its_test_set_and_several_that_of_the_seeds():
    assert estimate([0.5], [0.01]).error == 0.01
    assert estimate([0.5, 0.7], [0.01, 0.01]).error == pytest.approx(0.1)


def test_data_are_named_in_words_and_once(tmp_path):
    for seed in (0, 1):
        data = {"train": {"source": "flights", "rows": 10}, "sha256": str(seed)}
        write(tmp_path, document(seed=seed, configuration={"data": data}))
    assert one(tmp_path).cases[0].sources == ["train: source: flights; rows: 10"]


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
    assert means["x"].tolist() == [0.0, 1.0]
    assert means["y"].tolist() == [2.0, 5.0]
    assert errors["y"] == pytest.approx([1.0, 0.0])
