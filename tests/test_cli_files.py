"""fit, predict and evaluate on files, as someone without Python would use them."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from posthoc import FMGP, OptionError, PosthocError, load, open_outputs, save_outputs
from posthoc.cli import app
from posthoc.cli.shared import read_value
from posthoc.cli.table import write_predictions

N, C, D = 120, 4, 6
QUICK = "--set steps=5 --set num_inducing=6"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the outputs of a classifier and of a regression, and those of the classifier on odd data."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(N, C)).astype("float32")
    features = rng.normal(size=(N, D)).astype("float32")
    labels = (logits + rng.gumbel(size=(N, C))).argmax(1)
    np.savez(tmp_path / "classes.npz", outputs=2 * logits, targets=labels, features=features)
    np.savez(tmp_path / "odd.npz", outputs=0.1 * logits, features=5 * features)
    y = rng.normal(size=N).astype("float32")
    np.savez(tmp_path / "reals.npz", outputs=y, targets=y + rng.normal(size=N), features=features)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def posthoc(*lines: str) -> str:
    result = CliRunner().invoke(app, " ".join(lines).split())
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def fit(task: str = "classification", *more: str) -> str:
    data = "classes.npz" if task == "classification" else "reals.npz"
    return posthoc(f"fit {data}[:80] --task {task} -o head.safetensors {QUICK}", *more)


def test_from_outputs_to_a_table_and_figures(folder: Path) -> None:
    assert "fitted fmgp on 80 rows (4 outputs, 6 features)" in fit()
    posthoc("predict head.safetensors classes.npz[80:] -o predictions.parquet")
    assert "40 rows" in posthoc("evaluate head.safetensors classes.npz[80:] --ood odd.npz --json metrics.json")
    pq = pytest.importorskip("pyarrow.parquet")
    table = pq.read_table("predictions.parquet")
    assert table.column_names == ["row", "label", "probs", "entropy", "std"]
    test = open_outputs("classes.npz[80:]")
    pred = load("head.safetensors").predict(test)
    top = pred.latent.mean.argmax(-1)
    assert table["row"].to_pylist() == list(range(40))
    assert table["label"].to_pylist() == top.tolist()
    expected = {"probs": pred.probs, "entropy": pred.entropy(), "std": pred.latent.std[torch.arange(40), top]}
    for name, column in expected.items():
        np.testing.assert_allclose(np.array(table[name].to_pylist()), column.numpy())
    figures = json.loads((folder / "metrics.json").read_text())
    names = {"nll", "accuracy", "ece", "brier", "ood_auc"}
    assert names | {f"base_{name}" for name in names} <= figures.keys()
    assert all(isinstance(value, float) for value in figures.values())
    assert figures["nll"] == pytest.approx(-float(pred.log_prob(test.targets).double().mean()), rel=1e-6)
    base = torch.nn.functional.cross_entropy(test.outputs, test.targets)
    assert figures["base_nll"] == pytest.approx(float(base), rel=1e-6)


def test_regression(folder: Path) -> None:
    y = 1.7e9 + np.arange(40.0)  # all digits of which are kept
    np.savez(folder / "large.npz", outputs=y, targets=y + np.random.default_rng(0).normal(size=40), inputs=y[:, None])
    posthoc("fit large.npz -o map --method map")
    posthoc("predict map large.npz -o predictions.csv")
    rows = list(csv.DictReader((folder / "predictions.csv").open()))
    assert list(rows[0]) == ["row", "mean", "std"]
    assert [float(row["mean"]) for row in rows] == y.tolist()
    assert [float(row["std"]) for row in rows] == load("map").predict(open_outputs("large.npz")).std.tolist()
    fit("regression")
    posthoc("evaluate head.safetensors reals.npz[80:] --json metrics.json")
    figures = json.loads((folder / "metrics.json").read_text())
    names = {"nll", "rmse", "crps", "cqm", "coverage_90"}
    assert names | {f"base_{name}" for name in names} <= figures.keys()
    assert figures["rmse"] == figures["base_rmse"]
    with pytest.raises(OptionError, match="Out-of-distribution data are for classification"):
        posthoc("evaluate head.safetensors reals.npz --ood reals.npz")


def test_table_of_probabilities_with_named_columns(folder):
    data = open_outputs("classes.npz")
    probs = data.outputs.double().softmax(-1)
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", *(f"p_{c}" for c in range(C)), "truth"])
        writer.writerows([i, *p.tolist(), int(y)] for i, (p, y) in enumerate(zip(probs, data.targets, strict=True)))
    named = "--outputs p_* --targets truth"
    posthoc(f"fit table.csv --task classification --outputs-are probs {named} -o h {QUICK}")
    (folder / "odd.csv").write_text("p_0,p_1,p_2,p_3\n0.2,0.3,0.1,0.4\n0.25,0.25,0.25,0.25\n")  # without targets
    posthoc(f"evaluate h table.csv {named} --ood odd.csv --json m.json")
    figures = json.loads((folder / "m.json").read_text())
    base = -probs.log()[torch.arange(N), data.targets].mean()
    assert figures["base_nll"] == pytest.approx(float(base), rel=1e-6)
    posthoc("predict h table.csv --outputs p_* -o p.csv")
    assert len((folder / "p.csv").read_text().splitlines()) == N + 1


def test_a_table_is_written_part_by_part(folder: Path) -> None:
    fit()
    pred = load("head.safetensors").predict("classes.npz")
    assert write_predictions(iter([pred[:50], pred[50:]]), "parts.csv") == N
    posthoc("predict head.safetensors classes.npz -o once.csv")
    assert (folder / "parts.csv").read_bytes() == (folder / "once.csv").read_bytes()
    pq = pytest.importorskip("pyarrow.parquet")
    write_predictions(iter([pred[:50], pred[50:]]), "parts.parquet")
    assert pq.read_table("parts.parquet")["row"].to_pylist() == list(range(N))


def test_options_from_a_file_and_from_the_line(folder: Path) -> None:
    general = 'steps = 3\nnum_inducing = 5\nvariance = "shared"\nkernel = {type = "matern", nu = 1.5}\n'
    (folder / "c.toml").write_text(general + '[likelihood]\nprediction = "logit_scaling"\n')
    posthoc("fit classes.npz -o h --config c.toml --set steps=4 --seed 7")
    head, config = FMGP.load("h"), FMGP.load("h").config
    assert (config.steps, config.seed, config.num_inducing, config.variance) == (4, 7, 5, "shared")
    assert head.kernel.spec() == {"type": "matern", "on": "features", "nu": 1.5}
    assert head.likelihood.spec()["prediction"] == "logit_scaling"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("fit classes.npz -o odd.npz", "found odd.npz there already: use --force"),
        ("fit classes.npz -o classes.npz --force", "another file to write than the input"),
        ("fit classes.npz[:9] -o link --force", "found a link or a device: link"),
        ("fit classes.npz -o fifo --force", "found a link or a device: fifo"),
        ("fit classes.npz -o outputs/h", "outside folders of outputs, got outputs/h"),
        ("fit classes.npz -o h --checkpoint outputs", "outside folders of outputs, got outputs"),
        ("fit classes.npz -o h --checkpoint outputs/a/b", "outside folders of outputs, got outputs/a/b"),
        ("fit classes.npz -o h --config fifo", "found a pipe or a device: fifo"),
        ("evaluate head.safetensors classes.npz --json head.safetensors --force", "than the input head.safetensors"),
        ("predict head.safetensors table.csv -o table.csv --force", "than the input table.csv"),
        ("fit none.npz -o h", "found nothing at none.npz"),
        ("fit classes.npz -o no/h", "Expected a folder to write h into"),
        ("fit classes.npz -o h --method fgmp", "Expected a method among beta, dirichlet"),
        ("fit classes.npz -o h --set stepps=3", "Unknown option 'stepps'"),
        ("fit classes.npz -o h --method map --set steps=3", "Unknown option 'steps' of map"),
        ("fit classes.npz -o h --set steps", "Expected --set name=value"),
        ("fit classes.npz --task regression -o h --method temperature", "temperature is for classification"),
        ("fit classes.npz -o h --config bad.toml", "Expected TOML in bad.toml"),
        ("fit classes.npz -o h --resume", "--resume goes on from a checkpoint"),
        ("fit classes.npz -o h --outputs a", "Expected a Parquet or CSV table"),
        ("fit odd.npz -o h", "Expected targets: batches"),
        ("fit classes.npz[500:] -o h", "Expected a range with rows in it"),
        ("fit classes.npz[:" + 5000 * "9" + "] -o h", r"Expected rows as in classes.npz\[:5000\]"),
        ("fit named.csv -o h", "--outputs p_cat,p_dog --targets label"),
        ("fit bad.toml -o h", "bad.toml"),
        ("fit classes.npz -o h --task ranks", "Expected the likelihood .* got 'ranks'. The registered names are"),
        ("collect a:b classes.npz -o outputs/o", "outside folders of outputs, got .*outputs"),
        ("collect a:b classes.npz -o classes.npz", "a folder to write, found a file: classes.npz"),
        ("predict head.safetensors classes.npz -o p.json", "a .parquet or a .csv"),
        ("predict head.safetensors classes.npz -o table.csv", "there already"),
        ("predict head.safetensors narrow.npz -o p.csv", "Expected features of width 6 as in fit, got 3"),
        ("predict head.safetensors reals.npz -o p.csv", r"outputs of shape"),
        ("predict classes.npz classes.npz -o p.csv", "Expected a head that posthoc saved"),
        ("evaluate head.safetensors odd.npz", "Expected targets: batches"),
        ("evaluate none classes.npz", "found no file at none"),
        ("evaluate head.safetensors classes.npz --json odd.npz", "there already"),
        ("fit classes.npz -o h --set kernel={type='sum'}", "kernel 'sum' with options of left, right"),
        ("fit classes.npz -o h --set kernel={type='sum',left='rbf',right='white'}", "its type and options, got 'rbf'"),
        ("fit classes.npz -o h --set kernel={type='rbf',foo=3}", "'rbf' with options of on, lengthscale.* got .*foo"),
        ("fit classes.npz -o h --set kernel={type='rbf',lengthscale='a'}", "length-scales above zero, got 'a'"),
        ("fit classes.npz -o h --set kernel={type=['rbf']}", r"Expected a kernel of rbf, .* got \['rbf'\]"),
        ("fit classes.npz -o h --set kernel=gpytorch", "Expected a kernel of rbf, .* got 'gpytorch'"),
        ("fit classes.npz -o h --set kernel={type='rbf',start=3}", "a start as its recipe has it; got .*'start': 3"),
    ],
)
def test_bad_input_gives_a_message_and_leaves_nothing(folder: Path, arguments: str, message: str) -> None:
    fit()
    (folder / "bad.toml").write_text("steps = = 3")
    (folder / "table.csv").write_text("outputs_0,outputs_1\n1,2\n")
    (folder / "named.csv").write_text("id,cat,dog,label\n1,0.5,0.5,0\n")
    (folder / "link").symlink_to("classes.npz")
    os.mkfifo(folder / "fifo")
    save_outputs(open_outputs("classes.npz"), "outputs")
    np.savez(folder / "narrow.npz", outputs=np.zeros((5, C)), features=np.zeros((5, 3)))
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(PosthocError, match=message):
        posthoc(arguments)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_values_of_set_are_read_as_people_write_them() -> None:
    assert all(read_value(text) is True for text in ("true", "True", "yes", "y", "on"))
    assert all(read_value(text) is False for text in ("false", "False", "no", "N", "Off"))
    texts = ("3", "0.5", "shared", "'a'", "[1, 2]", "yes!")
    assert [read_value(text) for text in texts] == [3, 0.5, "shared", "a", [1, 2], "yes!"]
    assert type(read_value("3")) is int


def test_the_task_is_known_from_the_targets_and_other_methods_can_be_fitted(folder: Path) -> None:
    printed = posthoc("fit classes.npz -o a --method temperature --seed 3 --set device=cpu")
    assert "taken as classification" in printed
    assert "temperature" in posthoc("evaluate a classes.npz")
    assert "taken as regression" in posthoc("fit reals.npz -o b --method map --val reals.npz[80:]")
    assert load("b").name == "map"
    assert "taken as" not in posthoc("fit reals.npz -o c --method map --task regression")


def test_an_interrupted_fit_says_how_to_resume(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FMGP, "fit", Mock(side_effect=KeyboardInterrupt))
    for options, code, text in [
        ("", 130, "with --checkpoint FOLDER"),
        (" --checkpoint c", 130, "--resume"),
        (" --seed 4294967296", 2, "4294967295"),
    ]:
        result = CliRunner().invoke(app, f"fit classes.npz -o h{options}")
        assert result.exit_code == code
        assert text in result.output


def test_errors_and_warnings_are_one_line_each(folder: Path) -> None:
    command = [sys.executable, *["-m", "posthoc", "fit", "classes.npz[:4]", "--task", "classification", "-o", "h"]]
    done = subprocess.run([*command, "--set", "steps=2"], capture_output=True, text=True, check=True)
    assert done.stderr == "posthoc: Asked for 100 inducing points but there are only 4 data points: using 4.\n"
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr == "posthoc: Expected a new file to write, found h there already: use --force, or another.\n"
