"""Many methods on one model: the figures, the table, and the command."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

from posthoc import FMGP, MAP, DataError, Ensemble, OptionError, Outputs, PosthocError, Temperature, save_outputs
from posthoc.base import Job
from posthoc.cli import app
from posthoc.cli import compare as command
from posthoc.evaluate.compare import Comparison, Row, compare, task_of
from posthoc.evaluate.evaluate import evaluate
from posthoc.evaluate.report.summary import Estimate
from posthoc.evaluate.report.tables import COLUMNS, Column, digits, places_of
from posthoc.methods import REGISTRY
from tests.cases import QUICK, Noisy, inputs, labels, mlp, recorded, same, seeded, values


def classified(n: int = 200, scale: float = 3.0, seed: int = 0) -> Outputs:
    """Logits that are `scale` times too sure."""
    g = seeded(seed)
    logits = torch.randn(n, 4, generator=g, dtype=torch.float64)
    return Outputs(scale * logits, torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(1))


REALS = recorded(mlp(), inputs(), values())


def fail(self: object, job: object) -> None:
    raise ZeroDivisionError("one over nothing")


def test_figures_are_those_that_evaluate_gives():
    train, test, ood = classified(), classified(seed=1), classified(scale=0.1, seed=2)
    found = compare(None, train, test, ["map", "temperature"], ood=ood)
    assert found.task == "classification"
    expected = evaluate(Temperature(None, "classification").fit(train), test, ood=ood)
    for name in ("nll", "accuracy", "ece", "brier", "aurc", "ood_auc", "ood_fpr95"):
        assert found["temperature"].figures[name] == pytest.approx(expected[name], rel=1e-12)
        assert found["map"].figures[name] == pytest.approx(expected[f"base_{name}"], rel=1e-12)
    nll = float(torch.nn.functional.cross_entropy(test.outputs, test.targets))
    assert found["map"].figures["nll"] == pytest.approx(nll, rel=1e-12)
    assert torch.equal(found["temperature"].fitted.predict(test).latent.mean, test.outputs)


def test_time_is_of_the_fit_and_of_the_predictions(monkeypatch):
    """By a clock that the method itself moves."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    class Slow(MAP):
        name = "slow"

        def _fit(self, job: Job) -> Any:
            now[0] += 7.0
            return super()._fit(job)

        def _predictor(self, fitted: Any, *, covariance: bool) -> Any:
            plain = super()._predictor(fitted, covariance=covariance)

            def predict(outputs: Outputs) -> Any:
                now[0] += 2.0
                return plain.predict(outputs)

            return plain._replace(predict=predict)

    monkeypatch.setattr("posthoc.evaluate.scores.Scores.compute", lambda self: now.__setitem__(0, now[0] + 100.0) or {})
    figures = compare(None, classified(), classified(1500), [Slow])["slow"].figures
    assert figures["fit_seconds"] == 7.0
    assert figures["predict_seconds"] == 4.0  # two chunks of rows, and nothing of the scoring


@pytest.mark.skipif(sys.platform != "linux", reason="the peak can be reset on Linux alone")
def test_memory_is_what_was_added_at_the_peak():
    class Hungry(MAP):
        name = "hungry"

        def _fit(self, job: Job) -> Any:
            np.ones(200_000_000, dtype=np.uint8).sum()
            return super()._fit(job)

    found = compare(None, classified(), classified(), [Hungry, MAP])
    figures = found["hungry"].figures
    assert 190e6 < figures["fit_memory"] == figures["peak_memory"] < 240e6
    assert figures["predict_memory"] < 50e6
    assert found["map"].figures["fit_memory"] < 50e6  # not what another method has needed


def test_one_failure_does_not_stop_the_rest(monkeypatch):
    monkeypatch.setattr(Temperature, "_fit", fail)
    found = compare(None, classified(), classified(), ["temperature", "gp", "map"])
    broken, refused, fine = found.rows
    assert (broken.error, broken.applies, broken.figures) == ("ZeroDivisionError: one over nothing", True, {})
    assert "in fail" in broken.traceback
    assert refused.error is not None
    assert (refused.applies, fine.error) == (False, None)
    assert "temperature (failed): ZeroDivisionError: one over nothing" in str(found)
    assert "gp (does not apply):" in str(found)
    assert "Traceback" not in str(found)


def test_a_network_and_raw_data_serve_the_methods_that_need_it():
    model, other, x, y = Noisy(3), Noisy(3), inputs(60), labels(60)
    other.last.bias.data += 1.0
    loader, pair = DataLoader(TensorDataset(x, y), batch_size=20), Ensemble([model, other], "classification")
    found = compare(model, loader, (x, y), ["map", "dropout", pair, (FMGP, QUICK)], val=(x, y), ood=inputs(30, seed=9))
    assert [row.method for row in found.rows] == ["map", "dropout", "ensemble", "fmgp"]
    assert all(row.error is None for row in found.rows), [row.error for row in found.rows]
    assert found["ensemble"].fitted is pair
    nll = -float(pair.predict(x).log_prob(y).double().mean())
    assert found["ensemble"].figures["nll"] == pytest.approx(nll, rel=1e-9)
    assert "ood_auc" in found["dropout"].figures
    assert model.training
    assert same(dict(model.state_dict()), dict(Noisy(3).state_dict()))


def test_all_is_every_method_of_the_registry_that_applies_to_a_regression():
    data = recorded(mlp(2), inputs(80), values(80, 2))
    found = compare(None, data, data)
    assert found.task == "regression"
    assert [row.method for row in found.rows] == list(REGISTRY)
    assert all(REGISTRY[row.method].black_box or not row.applies for row in found.rows)
    rmse = float((data.targets - data.outputs).double().square().mean().sqrt())
    assert found["map"].figures["rmse"] == pytest.approx(rmse, rel=1e-6)
    assert "for classification, not for regression" in found["temperature"].error


def test_methods_by_name_by_class_as_objects_and_with_options():
    data = recorded(mlp(3), inputs(), labels())
    made = FMGP(None, "classification", **{**QUICK, "num_inducing": 7})
    methods = ["map", Temperature, ("fmgp", QUICK), made, ("fmgp", {**QUICK, "seed": 9})]
    found = compare(None, data, data, methods, seed=5)
    assert [row.method for row in found.rows] == ["map", "temperature", "fmgp", "fmgp 2", "fmgp 3"]
    config = found["fmgp"].fitted.config
    assert (config.num_inducing, config.seed) == (QUICK["num_inducing"], 5)
    assert found["fmgp 2"].fitted is made
    assert found["fmgp 3"].fitted.config.seed == 9
    mine = compare(None, data, data, {"bare": "map", "ours": made})
    assert [row.method for row in mine.rows] == ["bare", "ours"]
    with pytest.raises(OptionError, match="Expected one of bare, ours, got 'map'"):
        mine["map"]


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (["map", "laplase"], "got 'laplase'"),
        ([("fmgp", {"stepz": 3})], "stepz"),
        ([("map", {"steps": 3})], "Unknown option 'steps' of map"),
        ([], "at least one method"),
        ([3], "by name, by class or as objects, got a int"),
    ],
)
def test_slips_are_told_before_the_work(methods, message, monkeypatch):
    monkeypatch.setattr(MAP, "fit", lambda *a, **k: pytest.fail("work was done before the check"))
    with pytest.raises(OptionError, match=message):
        compare(None, classified(), classified(), methods)


def test_data_that_cannot_be_compared_on_are_refused():
    data = classified()
    with pytest.raises(DataError, match="Expected test data with targets"):
        compare(None, data, Outputs(data.outputs), "map")
    with pytest.raises(DataError, match="Expected train data to be read by one method after the other"):
        compare(mlp(), iter([(inputs(), values())]), data, "map")
    with pytest.raises(OptionError, match="leave them out for regression"):
        compare(None, REALS, REALS, "map", ood=data)
    with pytest.raises(DataError, match="no model to run"):
        compare(None, (inputs(), values()), data, "map")
    row = compare(None, data, data, [MAP(None, "classification"), MAP(None, "regression")])["map 2"]
    assert row.error == "Expected a method for classification, got one for regression."


def test_the_task_is_known_from_targets_and_outputs():
    two, one, integers = torch.zeros(5, 2), torch.zeros(5), torch.zeros(5, dtype=torch.long)
    for targets in (integers, integers[:, None]):
        assert task_of(None, Outputs(two, targets)) == "classification"
    for outputs in (two, one, one[:, None]):
        assert task_of(None, Outputs(outputs, outputs.squeeze())) == "regression"
    for outputs, targets in ((one, integers), (two, two.long())):
        with pytest.raises(OptionError, match="Give task="):
            task_of(None, Outputs(outputs, targets))
    with pytest.raises(DataError, match="Expected targets"):
        task_of(None, Outputs(two))


@pytest.mark.parametrize(
    ("best", "values", "places"),
    [
        (-math.inf, {"x": 0.3, "y": 0.1, "z": 0.2}, {"y": 1, "z": 2}),
        (math.inf, {"x": 0.3, "y": 0.1, "z": 0.2}, {"x": 1, "z": 2}),
        (0.22, {"x": 0.3, "y": 0.1, "z": 0.2}, {"z": 1, "x": 2}),
        (None, {"x": 0.3, "y": 0.1, "z": 0.2}, {}),
        # What is written the same shares a place.
        (-math.inf, {"x": 0.101, "y": 0.102, "z": 0.2, "w": 0.3}, {"x": 1, "y": 1}),
        (-math.inf, {"x": 0.1, "y": 0.201, "z": 0.2, "w": 0.3}, {"x": 1, "y": 2, "z": 2}),
        (-math.inf, {"x": 0.101, "y": 0.102}, {}),
        (-math.inf, {"x": 0.1, "y": math.nan, "z": math.inf}, {"x": 1, "z": 2}),
    ],
)
def test_best_and_second_best(best, values, places):
    column = Column("a", "A", "{:.2f}".format, best)
    assert places_of(column, {name: Estimate(value) for name, value in values.items()}) == places


def test_tables_for_the_screen_for_a_page_and_for_a_program():
    bare = {"nll": 0.28151, "accuracy": 0.9262, "fit_seconds": 0.004, "peak_memory": 2e6, "aurc": 1 / 3}
    ours = {"nll": 0.2212, "accuracy": 0.9262, "fit_seconds": 123.4, "peak_memory": 1.5e9}
    rows = Row("map", bare, {"nll": 0.00121}), Row("fmgp", ours), Row("gp", error="no")
    found = Comparison("classification", rows)
    assert found.markdown() == (
        "| method | NLL ↓ | accuracy ↑ | fit, s ↓ | memory, MB ↓ |\n"
        "|---|---:|---:|---:|---:|\n"
        "| map | *0.2815 ± 0.0012* | 0.9262 | **0.00** | **2** |\n"
        "| fmgp | **0.2212** | 0.9262 | *123* | *1,500* |\n"
        "\n- gp (failed): no\n"
    )
    first, second = csv.DictReader(found.csv().splitlines())
    assert float(first["aurc"]) == 1 / 3
    expected = {"method": "fmgp", "nll": "0.2212", "nll_se": "", "accuracy": "0.9262", "fit_seconds": "123.4"}
    assert second == expected | {"peak_memory": "1500000000.0", "aurc": ""}
    assert all(words in str(found) for words in ("0.2212¹", "0.2815²", "¹ best, ² second best"))
    assert "OOD" not in str(found)  # there is no such figure
    assert repr(found) == "Comparison(classification; map, fmgp; 1 without figures)"
    assert repr(found["map"]).startswith("Row(map: nll=")
    assert all(len(repr(row)) < 300 for row in found.rows)
    assert "<td>0.2815 ± 0.0012</td>" in found._repr_html_()
    four_digits = [digits(value) for value in (0.00212045, 4.5, 45678.9, 1.23456e9)]
    assert four_digits == ["0.002120", "4.500", "45,679", "1.235e+09"]


def test_every_figure_has_a_column_and_most_an_error():
    for rows, ood in ((classified(), classified()), (REALS, None)):
        found = compare(None, rows, rows, "map", ood=ood)
        row = found["map"]
        assert row.figures.keys() <= COLUMNS.keys()
        assert row.errors.keys() == {name for name in row.figures if not name.endswith(("_seconds", "_memory"))}
        assert all(0.0 <= error < 1.0 for error in row.errors.values())
    assert {"coverage_90", "width_90"} <= {column.figure for column in found.columns}


def posthoc(line: str, code: int = 0) -> str:
    """What the command prints for a line of arguments."""
    result = CliRunner().invoke(app, ["compare", *line.split()])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


TRAIN, TEST, ODD = classified(60), classified(60, seed=1), classified(60, 0.1, seed=2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Outputs of a classifier and of a regression; methods run in this process, which is quicker."""
    for name, data in {"train": TRAIN, "test": TEST, "odd": ODD, "reals": REALS}.items():
        save_outputs(data, tmp_path / f"{name}.npz")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "in_fresh_process", lambda function, *args: function(*args))
    return tmp_path


def test_command_in_processes_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    out = posthoc("train.npz --test test.npz --ood odd.npz -o r/s --methods temperature,dropout")
    assert "temperature" in out
    assert "dropout (does not apply): needs the network itself" in out
    record = json.loads((folder / "r/s/temperature-0.json").read_text())
    expected = evaluate(Temperature(None, "classification").fit(TRAIN), TEST, ood=ODD)
    for name in ("nll", "accuracy", "ece", "brier", "ood_auc"):
        assert record[name] == pytest.approx(expected[name], rel=1e-9)
    assert min(record["fit_seconds"], record["machine"]["cores"]) > 0
    assert record["method"] == record["configuration"]["method"] == "temperature"
    assert record["data"] == {"train": "train.npz", "test": "test.npz", "ood": "odd.npz"}
    assert (record["seed"], record["error"]) == (0, None)
    assert {"posthoc", "torch", "python"} <= record["versions"].keys()
    assert set(os.listdir(folder / "r/s")) == {"temperature-0.json", "table.md", "table.csv"}


def test_command_writes_tables_and_takes_options_for_each_method(folder: Path) -> None:
    (folder / "c.toml").write_text('[fmgp]\nsteps = 3\nnum_inducing = 5\n[fmgp.kernel]\ntype = "matern"\n')
    options = "--seed 3 --config c.toml --set fmgp.steps=4 --set fmgp.alpha=1.0"
    out = posthoc(f"reals.npz --test reals.npz -o r --methods fmgp,temperature {options}")
    row, table = json.loads((folder / "r/fmgp-3.json").read_text()), (folder / "r/table.md").read_text()
    assert all(f"{row['nll']:.4f}" in text for text in (out, table))
    assert "- temperature (does not apply): temperature is for classification" in table
    (line,) = csv.DictReader((folder / "r/table.csv").read_text().splitlines())
    assert float(line["crps"]) == row["crps"]
    options = row["configuration"]["options"]
    assert [options[name] for name in ("num_inducing", "steps", "seed", "alpha")] == [5, 4, 3, 1.0]
    assert options["kernel"]["type"] == "matern"


def test_command_keeps_failures_and_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(function: Any, name: str, *args: Any) -> Any:
        if name == "vector":
            raise BrokenProcessPool
        return function(name, *args)

    monkeypatch.setattr(Temperature, "_fit", fail)
    monkeypatch.setattr(command, "in_fresh_process", killed)
    out = posthoc("train.npz --test test.npz -o r --methods temperature,vector,map")
    assert "temperature (failed): ZeroDivisionError: one over nothing" in out
    assert "vector (failed): its process was killed" in out
    assert "Traceback" not in out
    broken, fine = (json.loads((folder / f"r/{name}-0.json").read_text()) for name in ("temperature", "map"))
    assert broken["error"] == "ZeroDivisionError: one over nothing"
    assert "in fail" in broken["traceback"]
    assert ("nll" in broken, "nll" in fine) == (False, True)


def test_a_process_that_is_killed_is_noticed():
    with pytest.raises(BrokenProcessPool):
        command.in_fresh_process(os._exit, 9)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_process_ends_with_its_parent(tmp_path: Path, end: signal.Signals) -> None:
    os.mkfifo(tmp_path / "pipe")
    # A shell may have started the tests with the signal ignored, as it starts jobs in the background.
    imports = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    imports += "from posthoc.cli.compare import in_fresh_process\nfrom tests.cases import hold_open\n"
    code = f"if __name__ == '__main__': in_fresh_process(hold_open, {str(tmp_path / 'pipe')!r})"
    (tmp_path / "parent.py").write_text(imports + code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent.parent)])}
    parent = subprocess.Popen([sys.executable, str(tmp_path / "parent.py")], env=environment, stderr=-3)
    with parent, (tmp_path / "pipe").open("rb") as pipe:  # waits for the child
        assert pipe.read(1)
        parent.send_signal(end)
        assert pipe.read() == b""  # waits until the child has ended


def test_command_says_so_where_nothing_applies(folder: Path) -> None:
    out = posthoc("reals.npz --test reals.npz -o r --methods dropout,temperature", code=1)
    assert "no method could be fitted" in out
    assert not (folder / "r").exists()


def test_an_interrupted_command_keeps_what_was_done(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Temperature, "_fit", Mock(side_effect=KeyboardInterrupt))
    posthoc("train.npz --test test.npz -o r --methods map,temperature", code=130)
    assert "| map |" in (folder / "r/table.md").read_text()
    assert set(os.listdir(folder / "r")) == {"map-0.json", "table.md", "table.csv"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train.npz --test test.npz -o taken --methods map", "found taken/table.md there already"),
        ("train.npz --test test.npz -o train.npz --methods map", "Expected a folder, found a file"),
        ("taken/table.csv --test test.npz -o taken --methods map --force", "than the input taken/table.csv"),
        ("train.npz --test test.npz -o r --methods map,laplase", "got 'laplase'"),
        ("train.npz --test test.npz -o r --methods map --set steps=3", "Expected options of a method that is compared"),
        ("train.npz --test test.npz -o r --methods map --set fmgp.steps=3", "The methods are: map"),
        ("train.npz --test test.npz -o r --methods fmgp --set fmgp.stepz=3", "stepz"),
        ("train.npz --test none.npz -o r", "none.npz"),
        ("train.npz --test reals.npz -o r", "Expected outputs of shape|class label"),
        ("train.npz --test test.npz --ood reals.npz -o r", "Expected outputs of shape"),
        ("reals.npz --test reals.npz --ood reals.npz -o r", "leave --ood out"),
        ("odd.npz --test bare.npz -o r", "Expected test data with targets"),
    ],
)
def test_bad_input_is_told_before_the_work(folder: Path, arguments: str, message: str) -> None:
    np.savez(folder / "bare.npz", outputs=np.zeros((5, 4)))
    (folder / "taken").mkdir()
    (folder / "taken/table.md").write_text("mine")
    shutil.copy(folder / "train.npz", folder / "taken/table.csv")
    before = sorted(str(path) for path in folder.rglob("*"))
    with pytest.raises(PosthocError, match=message):
        posthoc(arguments)
    assert sorted(str(path) for path in folder.rglob("*")) == before
    assert (folder / "taken/table.md").read_text() == "mine"


def test_files_serve_as_data_and_force_replaces_results(folder: Path) -> None:
    found = compare(None, "train.npz[:40]", folder / "test.npz", "map")
    hits = torch.eq(TEST.outputs.argmax(-1), TEST.targets)
    assert found["map"].figures["accuracy"] == pytest.approx(float(hits.double().mean()))
    line = "train.npz --test test.npz -o r --methods map"
    posthoc(line)
    (folder / "r/map-0.json").write_text("old")
    posthoc(f"{line} --force")
    assert json.loads((folder / "r/map-0.json").read_text())["method"] == "map"
