"""Columns of Parquet and CSV tables, found by name, as outputs, targets, features and inputs."""

from __future__ import annotations

import sys
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from posthoc import FMGP, DataError, FileError, MissingExtraError, OptionError, Outputs
from posthoc.cli import main
from posthoc.collect import open_outputs, save_outputs
from posthoc.evaluate.evaluate import evaluate
from tests.cases import reloaded
from tests.test_cli import run_main
from tests.test_files import some

COLUMNS: dict[str, list[Any]] = {
    "id": ["a", "b", "c"],
    "p_dog": [0.25, 0.5, 0.125],
    "p_cat": [0.75, 0.5, 0.875],
    "label": [1, 0, 1],
    "age": [3, 4, 5],
    "weight": [1.5, 2.5, 3.5],
    "breed": ["x", "y", "z"],
    "a.b": [1.0, 2.0, 3.0],
    "sure": [True, False, True],
}


@pytest.fixture(params=["Parquet", "CSV"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def path(kind: str, tmp_path: Path) -> Path:
    return table(kind, tmp_path, COLUMNS)


def table(kind: str, folder: Path, columns: dict[str, list[Any]]) -> Path:
    if kind == "Parquet":
        path = folder / "table.parquet"
        parquet.write_table(pa.table(columns), path)
        return path
    path = folder / "table.csv"
    separator = {"CSV": ",", "semicolons": ";", "tabs": "\t"}[kind]
    lines = [separator.join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    path.write_text("\n".join([separator.join(columns), *lines, ""]).replace("True", "1").replace("False", "0"))
    return path


def parts(opened: Outputs) -> dict[str, tuple[torch.dtype, list[Any]]]:
    """The dtypes and values of outputs, targets, features and inputs."""
    return {name: (part.dtype, part.tolist()) for name, part in opened.parts().items()}


def test_columns_by_name(path: Path) -> None:
    names = {"outputs": ["p_cat", "p_dog"], "targets": "label", "features": ["age", "weight"], "inputs": "a.b"}
    outputs, targets, features, inputs = parts(open_outputs(path, columns=names)).values()
    assert outputs == (torch.float64, [[0.75, 0.25], [0.5, 0.5], [0.875, 0.125]])
    assert targets == (torch.int64, [1, 0, 1])
    assert features == (torch.float64, [[3, 1.5], [4, 2.5], [5, 3.5]])
    assert inputs == (torch.float64, [[1.0], [2.0], [3.0]])


def test_patterns_keep_the_order_of_the_file(path: Path, kind: str, tmp_path: Path) -> None:
    assert open_outputs(path, columns={"outputs": "p_*"}).outputs.tolist() == [[0.25, 0.75], [0.5, 0.5], [0.125, 0.875]]
    assert open_outputs(path, columns={"outputs": ["weight", "p_???"]}).outputs[0].tolist() == [1.5, 0.25, 0.75]
    path = table(kind, tmp_path, {**{f"logit_{i}": [float(i)] for i in (10, 2, 1, 0)}, "logit_[0]": [7.0]})
    assert open_outputs(path, columns={"outputs": "logit_?*"}).outputs.tolist() == [[10.0, 2.0, 1.0, 0.0, 7.0]]
    assert open_outputs(path, columns={"outputs": "logit_[0]"}).outputs.tolist() == [7.0]  # a real name, no pattern


def test_one_name_is_a_vector_and_a_list_of_one_a_matrix(path: Path) -> None:
    assert open_outputs(path, columns={"outputs": "weight", "targets": "age"}).outputs.shape == (3,)
    columns = parts(open_outputs(path, columns={"outputs": ["weight"], "targets": ["p_cat"]}))
    assert columns["outputs"] == (torch.float64, [[1.5], [2.5], [3.5]])
    assert columns["targets"] == (torch.float64, [[0.75], [0.5], [0.875]])
    assert open_outputs(path, columns={"outputs": "weigh*"}).outputs.shape == (3, 1)


def test_columns_with_our_names_need_not_be_named(kind: str, tmp_path: Path) -> None:
    path = table(kind, tmp_path, {"other": ["x", "y"], "targets": [0.5, 1.0], "outputs": [1.5, 2.5]})
    assert parts(open_outputs(path)) == {"outputs": (torch.float64, [1.5, 2.5]), "targets": (torch.float64, [0.5, 1.0])}
    numbered = {f"outputs_{i}": [float(i)] for i in (0, 10, 9, 2, 1, 3, 4, 5, 6, 7, 8)}
    opened = open_outputs(table(kind, tmp_path, {**numbered, "outputs_x": [5.0], "targets": [3]}))
    assert opened.outputs.tolist() == [[float(i) for i in range(11)]]
    path = table(kind, tmp_path, {"a": [0.5], "outputs_0": [1.5], "outputs_1": [2.5], "targets": [1]})
    named = open_outputs(path, columns={"features": ["a"]})  # the others have our names
    assert parts(named)["outputs"] == (torch.float64, [[1.5, 2.5]])
    assert parts(named)["targets"] == (torch.int64, [1])
    assert (named.columns, named.feature_columns) == (None, ("a",))


def test_whole_numbers_are_classes_only_among_the_targets(path: Path) -> None:
    found = parts(open_outputs(path, columns={"outputs": "age", "targets": "sure", "features": ["label"]}))
    expected = {"outputs": (torch.float64, [3.0, 4.0, 5.0]), "targets": (torch.int64, [1, 0, 1])}
    assert found == {**expected, "features": (torch.float64, [[1.0], [0.0], [1.0]])}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"outputs": "p_rat"}, r"'p_rat'\. The columns are: id, p_dog, p_cat, label"),
        ({"outputs": ["p_cat", "q_*"]}, r"for outputs, got 'q_\*'\. The columns are: id"),
        ({"targets": "label"}, r"Expected columns for outputs, .* got none\. The columns are: id"),
        ({"outputs": "p_*", "labels": "label"}, "outputs, targets, features, inputs, claimed_std, got some for labels"),
        ({"outputs": ["p_*", "p_cat"]}, "each once, got p_dog, p_cat, p_cat"),
        ({"outputs": []}, "one or more columns for outputs"),
        ({"outputs": "[lw]*", "targets": "label"}, "columns of their own, got label as outputs too"),
        (None, r"outputs_0.*got none\. The columns are: id, p_dog.*columns=\{\"outputs\""),
    ],
)
def test_columns_that_are_not_there_are_refused(path: Path, columns: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        open_outputs(path, columns=columns)


def test_tables_are_checked(path: Path, kind: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"numbers in column 'breed', got .*x.*map the classes to integers"):
        open_outputs(path, columns={"outputs": "p_*", "targets": "breed"})
    with pytest.raises(DataError, match=r"Expected finite outputs, got nan in row 1.*table"):
        open_outputs(table(kind, tmp_path, {"outputs": [1.0, float("nan")]}))
    empty = table(kind, tmp_path, {"outputs_0": [], "outputs_1": [], "targets": []})
    for columns in (None, {"outputs": "outputs_0"}):
        with pytest.raises(DataError, match=r"at least one row, got none.*table"):
            open_outputs(empty, columns=columns)


def test_other_separators_and_long_lists_of_columns(tmp_path: Path) -> None:
    for kind in ("semicolons", "tabs"):
        assert open_outputs(table(kind, tmp_path, COLUMNS), columns={"outputs": "p_*"}).outputs.shape == (3, 2)
    with pytest.raises(OptionError, match=r"c39 and 960 more\. Say which"):
        open_outputs(table("CSV", tmp_path, {f"c{i}": [0] for i in range(1000)}))


def test_csv_as_spreadsheets_write_it(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes('\ufeff"outputs","targets", note \r\n"1.5",0,"a, b\nc"\r\n\r\n-2e3, 1 ,\r\n'.encode())
    found = parts(open_outputs(path, columns={"outputs": "outputs", "targets": "targets"}))
    assert found == {"outputs": (torch.float64, [1.5, -2000.0]), "targets": (torch.int64, [0, 1])}
    with pytest.raises(OptionError, match=", note\\."):
        open_outputs(path, columns={"outputs": "notes"})


@pytest.mark.parametrize(("last", "dtype"), [("3", torch.int64), ("3.0", torch.int64), ("2.5", torch.float64)])
def test_csv_targets_are_classes_if_all_are_whole(last: str, dtype: torch.dtype, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f"outputs,targets\n0.5,1\n\n\n1.0,{last}\n")
    found = parts(open_outputs(tmp_path / "t.csv"))
    assert found == {"outputs": (torch.float64, [0.5, 1.0]), "targets": (dtype, [1, float(last)])}


NO_NUMBERS = ("1_000", "٣", "1,5", "0x10", "1e", "")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("1.0,2.0\n3.0,4.0\n", FileError, "names of columns in the first line"),
        ("\n\n", FileError, "names of columns in the first line"),
        ("outputs,targets\n1.0,2\n3.0\n", FileError, "Expected 2 values in every line .*found 1 in row 1"),
        ("outputs,targets\n1.0,2,3\n", FileError, "found 3 in row 0"),
        ("outputs,targets,outputs\n1.0,2,3\n", FileError, "different names.*outputs more than once"),
        ('outputs,targets\n1.0,"2\n', FileError, "Expected a CSV table"),
        ("outputs,targets\n" + "1.0,2\n" * 2000 + "\udce9,3\n", FileError, "Expected a CSV table in UTF-8"),
        ("outputs,targets\n0.5,1\n1.0,inf\n", DataError, "Expected finite targets, got inf in row 1"),
        *(
            (
                f"outputs;targets\n1.5;2\n.5;{no}\n",
                DataError,
                f"Expected numbers in column 'targets', got '{no}' in row 1",
            )
            for no in NO_NUMBERS
        ),
    ],
)
def test_csv_that_cannot_be_read_is_refused(text: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(error, match=message):
        open_outputs(tmp_path / "t.csv")


def test_parquet_of_other_tools(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    columns = {
        "logits": pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], pa.list_(pa.float32())),
        "label": pa.array([0, 1, 0], pa.int8()).dictionary_encode(),
        "price": pa.array([Decimal("1.00"), Decimal("2.00"), Decimal("3.00")]),
    }
    parquet.write_table(pa.table(columns), path, row_group_size=2)
    opened = open_outputs(path, columns={"outputs": "logits", "targets": "label", "features": ["price", "logits"]})
    outputs, targets, features = parts(opened).values()
    assert outputs == (torch.float32, [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    assert targets == (torch.int64, [0, 1, 0])
    assert features == (torch.float64, [[1.0, 1.0, 2.0], [2.0, 3.0, 4.0], [3.0, 5.0, 6.0]])
    assert opened.outputs.numpy().flags.writeable


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([[1.0], [1.0, 2.0]], r"lists of one length in column 'outputs', got lengths \[1, 2\]"),
        ([1.0, None], "a number in every row of column 'outputs', got 1 nulls"),
        ([[1.0], None], "a number in every row of column 'outputs', got 1 nulls"),
        ([[1.0], [None]], "a number in every row of column 'outputs', got 1 nulls"),
        ([b"a", b"b"], "Expected numbers in column 'outputs', got binary"),
    ],
)
def test_parquet_columns_that_are_not_numbers_are_refused(column: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        open_outputs(table("Parquet", tmp_path, {"outputs": column}))


def test_parquet_needs_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_outputs(some(), tmp_path / "data.parquet")
    for name in [name for name in sys.modules if name.split(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    for call, name in ((open_outputs, "data.parquet"), (partial(save_outputs, some()), "new.parquet")):
        with pytest.raises(MissingExtraError, match=r"pip install 'posthoc\[tables\]'"):
            call(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["data.parquet"]


def test_columns_are_only_for_tables(tmp_path: Path) -> None:
    for form in (".npz", ".safetensors", ""):
        save_outputs(some(), tmp_path / f"data{form}")
        with pytest.raises(OptionError, match="Expected a Parquet or CSV table to take columns from"):
            open_outputs(tmp_path / f"data{form}", columns={"outputs": "outputs"})


def test_a_head_knows_its_columns(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    classes = ["cat", "dog", "horse"]
    logits = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    columns = dict(zip(classes, logits.double().T.tolist(), strict=True))
    path = table(kind, tmp_path, {**columns, "ox": [0.5] * 30, "y": [0, 1, 2] * 10})
    named = {"outputs": classes, "targets": "y"}
    head = FMGP(None, "classification", steps=2, num_inducing=5).fit(open_outputs(path, columns=named))
    turned = open_outputs(path, columns={"outputs": ["horse", "dog", "cat"], "targets": "y"})
    other = open_outputs(path, columns={"outputs": ["cat", "dog", "ox"], "targets": "y"})
    order = r"Expected outputs in the order of the fit, got horse, dog, cat: .* --outputs cat,dog,horse \("
    names = "from the columns of the fit, cat, dog, horse, got cat, dog, ox"
    for method in (head, reloaded(head, tmp_path)):
        for rows, message in ((turned, order), (other, names)):
            for refused in (method.predict, method.conformal, partial(evaluate, method)):
                with pytest.raises(DataError, match=message):
                    refused(rows)
        alike = method.predict(open_outputs(path, columns=named)[:10]).probs
        assert torch.equal(method.predict(Outputs(logits[:10].double())).probs, alike)
    with pytest.raises(DataError, match=order):
        head.fit(open_outputs(path, columns=named), val=turned)
    fit = ("--task", "classification", "--outputs", "cat,dog,horse", "--targets", "y", "--method", "map")
    assert run_main(monkeypatch, main, "fit", str(path), *fit, "-o", str(tmp_path / "new")) == 0
    predict = ("predict", str(tmp_path / "new"), str(path), "-o", str(tmp_path / "p.csv"), "--outputs")
    assert run_main(monkeypatch, main, *predict, "horse,dog,cat") == 1
    assert "--outputs cat,dog,horse" in capsys.readouterr().err
    assert run_main(monkeypatch, main, *predict, "cat,dog,horse") == 0
