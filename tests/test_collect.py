"""Collecting into a folder: from Python and from the command line, killed and resumed, refused where it must be."""

import json
from dataclasses import dataclass, replace
from itertools import count
from typing import ClassVar

import numpy as np
import pytest
import torch
import typer
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

from posthoc import DataError, FileError, LayerError, OptionError
from posthoc.cli.collect import collect
from posthoc.collect import open_outputs, read_identity
from posthoc.collect.network import Backbone
from posthoc.collect.to_folder import collect_to_folder
from tests.collecting_cases import NET, TRANSFORM, TinyNet, assert_close, contents, expected, image_folder, raw

ROWS = 23
TRUSTED = ("--trust-code", "--weights", "none")


def run(*args: object, exit_code: int = 0) -> str:
    app = typer.Typer()
    app.command()(collect)
    done = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)
    assert done.exit_code == exit_code, done.output
    return done.output


def dataset(rows: int = ROWS) -> TensorDataset:
    return TensorDataset(raw(rows), torch.arange(rows) % 3)


class Counted(TensorDataset):
    """A dataset that remembers which of its rows were read."""

    read: ClassVar[list[int]] = []

    def __getitem__(self, row: int):
        self.read.append(row)
        return super().__getitem__(row)


@dataclass
class Stream:
    """Rows that can only be gone through, of an unknown number."""

    first: int = 0

    def skip(self, rows: int):
        return Stream(self.first + rows)

    def __iter__(self):
        return (dataset()[row] for row in range(self.first, ROWS))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("data", [dataset, Stream])
def test_a_dataset_becomes_a_mapped_folder(tmp_path, data, workers):
    net, options = TinyNet().train(), {"identity": {}, "inputs": True, "batch_size": 5, "workers": workers}
    found = collect_to_folder(Backbone(net, None, None), data(), tmp_path, **options)
    assert_close(found, expected(raw(ROWS), torch.arange(ROWS) % 3), "outputs", "targets", "features", "inputs")
    assert_close(open_outputs(tmp_path), found, "outputs", "targets", "features", "inputs")
    assert net.training


def test_a_resumed_run_reads_only_what_is_left(tmp_path):
    numbers, rest, net = count(1), Counted(*dataset().tensors), TinyNet().eval()
    fails = Backbone(lambda x: net(x) if next(numbers) != 3 else 1 / 0, None, None)
    with pytest.raises(ZeroDivisionError):
        collect_to_folder(fails, dataset(), tmp_path, identity={}, batch_size=5)
    found = collect_to_folder(fails, rest, tmp_path, identity={}, batch_size=5)
    assert rest.read == list(range(10, ROWS))
    assert_close(found, expected(raw(ROWS), torch.arange(ROWS) % 3), "outputs", "targets")


def test_another_network_layer_or_choice_of_inputs_is_refused(tmp_path):
    first, other = Backbone(TinyNet(), None, None), Backbone(TinyNet(seed=1), None, None)
    same, digest = {"identity": {"data": "a"}}, "'[0-9a-f]{8}:[0-9a-f]{8}'"
    collect_to_folder(first, dataset(), tmp_path, **same)
    before = contents(tmp_path)
    for backbone, options, message in [
        (other, same, rf"made with other weights or layers \(network: {digest} there, {digest} now\)\. Collect"),
        (Backbone(TinyNet(), "pool", None), same, "of something else .layer: 'input of fc' there, 'pool' now"),
        (Backbone(TinyNet(), "fc", None), same, "of something else .layer"),
        (first, {"identity": {"data": "b"}}, "of something else .data"),
        (first, {**same, "inputs": True}, "of something else .inputs: False there, True now"),
    ]:
        with pytest.raises(FileError, match=message):
            collect_to_folder(backbone, dataset(), tmp_path, **options)
    assert contents(tmp_path) == before
    found = collect_to_folder(other, dataset(), tmp_path, **same, force=True)
    assert_close(found, expected(raw(ROWS), torch.arange(ROWS) % 3, TinyNet(seed=1)), "outputs", "targets", "features")


def test_options_empty_data_and_lost_rows_are_refused(tmp_path):
    for network, data, options, error, message in [
        (TinyNet(), dataset(), {"batch_size": 0}, OptionError, "batch_size"),
        (TinyNet(), dataset(), {"workers": -1}, OptionError, "workers"),
        (TinyNet(), [], {}, DataError, "at least one row"),
        (lambda x: x[:1, 0, 0], raw(ROWS), {"batch_size": 5}, DataError, f"Expected {ROWS} rows of outputs, got 5"),
    ]:
        with pytest.raises(error, match=message):
            collect_to_folder(Backbone(network, None, None), data, tmp_path / "o", identity={}, **options)


def test_progress_is_shown_where_it_is_wanted(tmp_path, capfd):
    backbone = Backbone(TinyNet(), None, None)
    collect_to_folder(backbone, dataset(), tmp_path / "a", identity={}, progress=True)
    assert f"{ROWS}/{ROWS}" in capfd.readouterr().err
    collect_to_folder(backbone, dataset(), tmp_path / "b", identity={})
    assert capfd.readouterr().err == ""


def test_the_command_collects_a_folder_of_images(tmp_path):
    labels = image_folder(tmp_path / "images", ROWS)
    printed = run(NET, tmp_path / "images", "-o", tmp_path / "o", *TRUSTED, "--batch-size", 7, "--workers", 2)
    assert printed.strip() == f"wrote {tmp_path / 'o'}: 23 rows (3 outputs, 4 features) with targets"
    assert_close(open_outputs(tmp_path / "o"), expected(raw(ROWS), labels), "outputs", "features", "targets")
    identity = read_identity(tmp_path / "o")
    assert identity.items() >= {"predictor": NET, "layer": "input of fc", "transform": "none"}.items()
    assert identity["data"]["rows"] == ROWS
    assert str(tmp_path) not in json.dumps(identity)
    (tmp_path / "images" / "class_0" / "000.png").rename(tmp_path / "images" / "class_0" / "renamed.png")
    with pytest.raises(FileError, match=r"data: .* there"):
        run(NET, tmp_path / "images", "-o", tmp_path / "o", *TRUSTED, "--workers", 0)


def test_a_finished_folder_is_left_alone_unless_forced_and_none_is_begun_where_a_predictor_cannot_be_opened(tmp_path):
    np.savez(tmp_path / "d.npz", inputs=raw(4).numpy())
    args = (NET, tmp_path / "d.npz", "-o", tmp_path / "o", *TRUSTED, "--workers", 0)
    assert "without targets" in run(*args)
    with pytest.raises(FileError, match="complete"):
        run(*args)
    run(*args, "--force")
    for predictor, options, error in [
        (NET, (), OptionError),
        (NET, (*TRUSTED, "--layer", "nowhere"), LayerError),
        ("resnet50", (), OptionError),
    ]:
        with pytest.raises(error):
            run(predictor, tmp_path / "d.npz", "-o", tmp_path / "never", *options)
        assert not (tmp_path / "never").exists()


def test_an_interrupted_command_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    labels, forward, batches = image_folder(tmp_path / "images", ROWS), TinyNet.forward, count(1)

    def interrupted(net, x):
        if next(batches) == 4:
            raise KeyboardInterrupt
        return forward(net, x)

    options = ("--transform", TRANSFORM, "--layer", "conv", "--inputs", *TRUSTED, "--batch-size", 4, "--workers", 0)
    args = (NET, tmp_path / "images", *options)
    monkeypatch.setattr(TinyNet, "forward", interrupted)
    assert "run the same command again" in run(*args, "-o", tmp_path / "o", exit_code=130)
    assert json.loads((tmp_path / "o" / "outputs.json").read_text())["rows"] == 12
    run(*args, "-o", tmp_path / "o")
    run(*args, "-o", tmp_path / "whole")
    assert contents(tmp_path / "o") == contents(tmp_path / "whole")
    x = raw(ROWS) - 0.5
    wanted = replace(expected(x, labels), features=TinyNet().conv(x), inputs=x)
    assert_close(open_outputs(tmp_path / "o"), wanted, *vars(wanted))
