"""Networks saved as programs (TorchScript, torch.export, ONNX): each returns what the network returns."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posthoc import DataError, FileError, LayerError, OptionError
from tests.collecting_cases import Pair, TinyNet, WithFeatures, assert_close, expected, images, outputs, predictor, raw

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


@pytest.mark.parametrize("name", ["scripted.ts", "traced.pt", "named.ts", "exported.pt2"])
def test_programs_return_what_the_network_returns(programs, name):
    opened = predictor(str(programs / name), trust_code=True)
    for inputs in (images(ROWS), list(raw(ROWS).double().numpy())):  # real numbers are cast to the network's dtype
        assert_close(outputs(opened, inputs), expected(raw(ROWS)), "outputs")
    assert opened.identity["predictor"] == name


@pytest.mark.parametrize(
    ("name", "layer", "message"),
    [
        ("exported.pt2", "pool", r"The layers are: .*pool"),
        ("named.ts", "pooled", "It returns: logits, pooled"),
        ("pair.ts", "0", "It returns: 0, 1"),
        ("scripted.ts", None, "It returns: 0"),
    ],
)
def test_programs_give_features_by_name(programs, name, layer, message):
    opened = predictor(str(programs / name), layer=layer, trust_code=True)
    assert_close(outputs(opened, images(ROWS)), expected(raw(ROWS)), "outputs", *(["features"] if layer else []))
    assert opened.identity["layer"] == layer
    with pytest.raises(LayerError, match=message):
        outputs(predictor(str(programs / name), layer="nowhere", trust_code=True), images(ROWS))


def test_a_program_is_known_by_its_bytes(programs, tmp_path):
    def mark(path: Path) -> str:
        return predictor(str(path), trust_code=True).identity["network"]

    (tmp_path / "copy.ts").write_bytes((programs / "scripted.ts").read_bytes())
    torch.jit.script(TinyNet(seed=1)).save(tmp_path / "scripted.ts")
    assert mark(tmp_path / "copy.ts") == mark(programs / "scripted.ts")
    others = (programs / "scripted.ts", programs / "exported.pt2", tmp_path / "scripted.ts")
    assert len({mark(path) for path in others}) == 3


def test_files_that_are_no_programs_are_refused(tmp_path):
    torch.save(TinyNet().state_dict(), tmp_path / "weights.pt")
    (tmp_path / "text.pt2").write_text("no")
    for name, message in [("weights.pt", "--weights FILE"), ("text.pt2", "torch.export.save")]:
        with pytest.raises(FileError, match=message):
            predictor(str(tmp_path / name), trust_code=True)
    with pytest.raises(OptionError, match="has them"):
        predictor(str(tmp_path / "weights.pt"), trust_code=True, weights="w.pt")


@pytest.fixture(scope="module")
def onnx_graphs(tmp_path_factory) -> Path:
    """The small network as an ONNX graph with its features as a second output: for batches of any size, and of two."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("onnx")
    names: dict[str, Any] = {"input_names": ["x"], "output_names": ["logits", "pooled"]}
    shapes = {"x": {0: torch.export.Dim("batch")}}
    net = WithFeatures().eval()
    torch.onnx.export(net, (raw(2),), folder / "any.onnx", **names, dynamic_shapes=shapes, dynamo=True, verbose=False)
    graph = onnx.load(folder / "any.onnx")
    graph.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    onnx.save(graph, folder / "two.onnx")
    return folder


@pytest.mark.parametrize("name", ["any.onnx", "two.onnx"])
def test_onnx_returns_what_the_network_returns(onnx_graphs, name):
    path = str(onnx_graphs / name)
    assert_close(outputs(predictor(path), images(ROWS)), expected(raw(ROWS)), "outputs")
    for data in (images(ROWS), list(raw(ROWS).double().numpy())):
        assert_close(outputs(predictor(path, layer="pooled"), data), expected(raw(ROWS)), "outputs", "features")


def test_onnx_is_known_by_its_graph_and_the_weights_beside_it(onnx_graphs, tmp_path):
    mark = predictor(str(onnx_graphs / "any.onnx")).identity["network"]
    for file in onnx_graphs.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert predictor(str(tmp_path / "any.onnx")).identity["network"] == mark
    (tmp_path / "any.onnx.data").write_bytes(np.zeros(10_000).tobytes())
    assert predictor(str(tmp_path / "any.onnx")).identity["network"] != mark


def test_onnx_errors_are_ours(onnx_graphs, tmp_path):
    with pytest.raises(LayerError, match="The outputs are: logits, pooled"):
        predictor(str(onnx_graphs / "any.onnx"), layer="conv")
    (tmp_path / "text.onnx").write_text("no")
    with pytest.raises(FileError, match="Expected an ONNX graph"):
        predictor(str(tmp_path / "text.onnx"))
    with pytest.raises(DataError, match="inputs that the graph can be run on"):
        outputs(predictor(str(onnx_graphs / "any.onnx")), [np.ones((3, 2), np.float32)] * 2)
