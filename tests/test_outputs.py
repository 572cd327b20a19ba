"""`Outputs` behaves as a sequence of rows."""

from __future__ import annotations

import numpy as np
import pandas
import pytest
import torch

from posthoc import MAP, DataError, Outputs
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
