"""Networks saved as programs (TorchScript, torch.export, ONNX): each says what the network says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from posthoc import DataError, FileError, LayerError, OptionError
from posthoc.integrations.models import open_predictor
from tests.collecting_cases import Pair, TinyNet, WithFeatures, assert_close, expected, images, outputs, raw

ROWS = 5


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    """The small network as TorchScript, scripted and traced, and as exported by torch.export."""
    folder = tmp_path_factory.mktemp("programs")
    net, x = TinyNet().eval(), raw(ROWS)
    torch.jit.script(net).save(folder / "scripted.ts")
    torch.jit.trace(net, x).save(folder / "traced.pt")
    torch.jit.script(WithFeatures().eval()).save(folder / "named.ts")
    torch.jit.script(Pair().eval()).save(folder / "pair.ts")
    batch = torch.export.Dim("batch")
    torch.export.save(torch.export.export(net, (x,), dynamic_shapes=({0: batch},)), folder / "exported.pt2")
    return folder


@pytest.mark.parametrize("name", ["scripted.ts", "traced.pt", "exported.pt2"])
def test_programs_say_what_the_network_says(programs, name):
    predictor = open_predictor(str(programs / name), trust_code=True)
    assert_close(outputs(predictor, images(ROWS)), expected(raw(ROWS)), "outputs")
    assert predictor.identity["predictor"] == name


def test_numbers_are_cast_to_what_a_program_computes_in(programs):
    doubles = list(raw(ROWS).double().numpy())
    for name in ("scripted.ts", "exported.pt2"):
        predictor = open_predictor(str(programs / name), trust_code=True)
        assert_close(outputs(predictor, doubles), expected(raw(ROWS)), "outputs")


def test_an_exported_program_has_its_layers(programs):
    predictor = open_predictor(str(programs / "exported.pt2"), layer="pool", trust_code=True)
    assert_close(outputs(predictor, images(ROWS)), expected(raw(ROWS)), "outputs", "features")
    with pytest.raises(LayerError, match=r"The layers are: .*pool"):
        open_predictor(str(programs / "exported.pt2"), layer="nowhere", trust_code=True)


def test_torchscript_gives_features_by_name(programs):
    predictor = open_predictor(str(programs / "named.ts"), layer="pooled", trust_code=True)
    assert_close(outputs(predictor, images(ROWS)), expected(raw(ROWS)), "outputs", "features")
    assert predictor.identity["layer"] == "pooled"
    assert_close(
        outputs(open_predictor(str(programs / "named.ts"), trust_code=True), images(ROWS)),
        expected(raw(ROWS)),
        "outputs",
    )
    pair = open_predictor(str(programs / "pair.ts"), layer="0", trust_code=True)
    assert_close(outputs(pair, images(ROWS)), expected(raw(ROWS)), "outputs", "features")
    for name, returned in [("named.ts", "logits, pooled"), ("scripted.ts", "0"), ("pair.ts", "0, 1")]:
        with pytest.raises(LayerError, match=f"It returns: {returned}"):
            outputs(open_predictor(str(programs / name), layer="conv", trust_code=True), images(ROWS))


def test_a_program_is_known_by_its_bytes(programs, tmp_path):
    for name in ("scripted.ts", "exported.pt2"):
        mark = open_predictor(str(programs / name), trust_code=True).identity["network"]
        copy = tmp_path / name
        copy.write_bytes((programs / name).read_bytes())
        assert open_predictor(str(copy), trust_code=True).identity["network"] == mark
    torch.jit.script(TinyNet(seed=1)).save(tmp_path / "scripted.ts")
    assert (
        open_predictor(str(tmp_path / "scripted.ts"), trust_code=True).identity["network"]
        != (open_predictor(str(programs / "scripted.ts"), trust_code=True).identity["network"])
    )


def test_files_that_are_no_programs_are_refused(tmp_path):
    torch.save(TinyNet().state_dict(), tmp_path / "weights.pt")
    (tmp_path / "text.pt2").write_text("no")
    for name, message in [("weights.pt", "--weights FILE"), ("text.pt2", "torch.export.save")]:
        with pytest.raises(FileError, match=message):
            open_predictor(str(tmp_path / name), trust_code=True)
    with pytest.raises(OptionError, match="has them"):
        open_predictor(str(tmp_path / "weights.pt"), trust_code=True, weights="w.pt")


@pytest.fixture(scope="module")
def onnx_graphs(tmp_path_factory) -> Path:
    """The small network as an ONNX graph with its features as a second output: for batches of any size, and of two."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("onnx")
    torch.onnx.export(
        WithFeatures().eval(),
        (raw(2),),
        folder / "any.onnx",
        input_names=["x"],
        output_names=["logits", "pooled"],
        dynamic_shapes={"x": {0: torch.export.Dim("batch")}},
        dynamo=True,
        verbose=False,
    )
    graph = onnx.load(folder / "any.onnx")
    graph.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    onnx.save(graph, folder / "two.onnx")
    return folder


@pytest.mark.parametrize("name", ["any.onnx", "two.onnx"])
def test_onnx_says_what_the_network_says(onnx_graphs, name):
    path = str(onnx_graphs / name)
    assert_close(outputs(open_predictor(path), images(ROWS)), expected(raw(ROWS)), "outputs")
    predictor = open_predictor(path, layer="pooled")
    assert_close(outputs(predictor, images(ROWS)), expected(raw(ROWS)), "outputs", "features")
    assert_close(outputs(predictor, list(raw(ROWS).double().numpy())), expected(raw(ROWS)), "outputs", "features")


def test_onnx_is_known_by_its_graph_and_the_weights_beside_it(onnx_graphs, tmp_path):
    mark = open_predictor(str(onnx_graphs / "any.onnx")).identity["network"]
    for file in onnx_graphs.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert open_predictor(str(tmp_path / "any.onnx")).identity["network"] == mark
    (tmp_path / "any.onnx.data").write_bytes(np.zeros(10_000).tobytes())
    assert open_predictor(str(tmp_path / "any.onnx")).identity["network"] != mark


def test_onnx_errors_are_ours(onnx_graphs, tmp_path):
    with pytest.raises(LayerError, match="The outputs are: logits, pooled"):
        open_predictor(str(onnx_graphs / "any.onnx"), layer="conv")
    (tmp_path / "text.onnx").write_text("no")
    with pytest.raises(FileError, match="Expected an ONNX graph"):
        open_predictor(str(tmp_path / "text.onnx"))
    with pytest.raises(DataError, match="inputs that the graph can be run on"):
        outputs(open_predictor(str(onnx_graphs / "any.onnx")), [np.ones((3, 2), np.float32)] * 2)
