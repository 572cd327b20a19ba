"""`Outputs` behaves as a sequence of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from posthoc import FMGP, MAP, DataError, Outputs
from posthoc.collect.outputs import join


def test_rows_end() -> None:
    outputs = Outputs(torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 1]))
    assert [row.outputs.tolist() for row in outputs] == [[[0.0, 1.0]], [[2.0, 3.0]], [[4.0, 5.0]]]
    assert len(outputs[-1]) == 1
    for row in (3, -4):
        with pytest.raises(IndexError, match="a row from 0 to 2"):
            outputs[row]
    for mask in ([False], [True]):
        assert len(outputs[:1][torch.tensor(mask)]) == sum(mask)
    assert np.asarray(outputs).tolist() == outputs.outputs.tolist()
    assert np.asarray(outputs, dtype=np.float64).dtype == np.float64


def test_names_of_columns_stay_with_the_outputs() -> None:
    named = Outputs(torch.zeros(4, 2), torch.arange(4), columns=("cat", "dog"))
    unnamed = named.with_outputs(named.outputs.double()).with_targets(torch.zeros(4)).clone().spread(3).only()[:2]
    assert unnamed.columns == named.to(torch.device("meta")).columns == join([named, named]).columns == ("cat", "dog")
    assert join([named, Outputs(torch.zeros(4, 2), torch.arange(4))]).columns is None
    frame = pandas.DataFrame({"cat": [0.5, 0.1], "dog": [0.5, 0.9]})
    assert Outputs(frame).columns == ("cat", "dog")
    assert Outputs(frame.to_numpy()).columns is Outputs(pandas.DataFrame(frame.to_numpy())).columns is None
    method = MAP(None, "classification", outputs_are="probs").fit(Outputs(frame, [0, 1]))
    with pytest.raises(DataError, match="in the order of the fit, got dog, cat"):
        method.predict(Outputs(frame[["dog", "cat"]]))
    with pytest.raises(DataError, match="a name for every column of outputs, got cat"):
        Outputs(torch.zeros(4, 2), columns=("cat",))


def test_repr_shows_shapes() -> None:
    outputs = Outputs(torch.zeros(10_000, 3), torch.zeros(10_000, dtype=torch.long), features=torch.zeros(10_000, 8))
    assert repr(outputs) == "Outputs(outputs=(10000, 3), targets=(10000,), features=(10000, 8), float32)"
    assert outputs._repr_html_() == f"<code>{outputs!r}</code>"


def test_parts_have_columns() -> None:
    for part in ("outputs", "features"):
        with pytest.raises(DataError, match=rf"at least one column of {part}, got shape \(20, 0\)"):
            Outputs(**{"outputs": torch.zeros(20, 2), part: torch.zeros(20, 0)})


def test_rows_are_taken_by_one_index() -> None:
    outputs = Outputs(torch.arange(6.0)[:, None], torch.arange(6))
    for rows, kept in ROWS:
        assert outputs[rows].outputs[:, 0].tolist() == kept
    for wrong in ((slice(2), 0), (0, 1), None, ..., "a", 0.5, [0.5], np.zeros((2, 2), int)):
        with pytest.raises(IndexError, match="Expected rows by number, slice, list or mask, got"):
            outputs[wrong]
    assert np.asarray(Outputs(torch.ones(2, 1, dtype=torch.bfloat16))).tolist() == [[1.0], [1.0]]


ROWS: list[tuple[Any, list[int]]] = [
    (np.int64(-1), [5]),
    (slice(None, None, -1), [5, 4, 3, 2, 1, 0]),
    ([4, 0], [4, 0]),
    ([], []),
    ([False, True, False, False, False, False], [1]),
    (np.array([2, 2]), [2, 2]),
]


def test_names_of_features_and_inputs_are_compared_with_those_of_the_fit(tmp_path: Path) -> None:
    frame = pandas.DataFrame(np.random.default_rng(0).normal(size=(60, 3)), columns=list("abc"))
    data = Outputs(torch.zeros(60, 1), torch.randn(60, 1), features=frame)
    assert data[:5].feature_columns == join([data, data]).only("features").feature_columns == ("a", "b", "c")
    method = FMGP(None, "regression", steps=3, num_inducing=5).fit(data)
    method.save(tmp_path / "head.st")
    swapped = Outputs(torch.zeros(60, 1), features=frame[["c", "b", "a"]])
    for fitted in (method, FMGP.load(tmp_path / "head.st")):
        assert len(fitted.predict(Outputs(torch.zeros(2, 1), features=frame.to_numpy()[:2]))) == 2
        with pytest.raises(DataError, match=r"features in the order of the fit, got c, b, a: .*--features a,b,c"):
            fitted.predict(swapped)
        with pytest.raises(DataError, match="features from the columns of the fit, a, b, c, got a, b, z"):
            fitted.predict(Outputs(torch.zeros(60, 1), features=frame.set_axis(list("abz"), axis=1)))
    assert len(MAP(None, "regression").fit(data).predict(swapped)) == 60  # which reads no features


def test_names_of_the_columns_a_network_reads_are_compared_too() -> None:
    frame = pandas.DataFrame(np.ones((20, 2), np.float32), columns=["b", "a"])
    method = MAP(torch.nn.Linear(2, 1), "regression").fit(frame, np.arange(20.0)[:, None])
    assert len(method.predict(frame)) == len(method.predict(frame.to_numpy())) == 20
    with pytest.raises(DataError, match="inputs in the order of the fit, got a, b"):
        method.predict(frame[["a", "b"]])
