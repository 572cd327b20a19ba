"""Predictors named by strings: each gives what calling the network gives, and none runs code that nobody trusted."""

from __future__ import annotations

import os
import pickle
import sys
from enum import Enum
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from posthoc import DataError, FileError, LayerError, MissingExtraError, OptionError, Outputs, PosthocWarning
from posthoc.collect.fingerprint import fingerprint
from posthoc.integrations.datasets import open_data
from posthoc.integrations.models import ONLY_TENSORS
from tests.collecting_cases import NET, TRANSFORM, TinyNet, assert_close, expected, images, outputs, predictor, raw

ROWS, NO_NET = 5, "tests.collecting_cases:mean_of_pixels"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An empty folder to work in, from which modules can be imported by name for as long as the test lasts."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("own_"):
            del sys.modules[name]


def test_a_module_in_the_current_folder(package):
    (package / "own_nets").mkdir()
    code = "from tests.collecting_cases import tiny_net as make\nready, number = make(), 3\ndef three(): return 3\n"
    (package / "own_nets" / "small.py").write_text(code)
    for name in ("make", "ready"):
        found = outputs(predictor(f"own_nets.small:{name}", weights="none", trust_code=True), images(ROWS))
        assert_close(found, expected(raw(ROWS)), "outputs", "features")
    absent = {"small:absent": "has no attribute 'absent'", "absent:make": "cannot be imported"}
    for name, message in {"small:number": "got int", "small:three": "got int", **absent}.items():
        with pytest.raises(OptionError, match=message):
            predictor(f"own_nets.{name}", weights="none", trust_code=True)


def test_code_is_not_run_unless_it_is_trusted(package, fake_libraries):
    (package / "own_nets.py").write_text("raise SystemExit('this ran')")
    (package / "net.pt").write_bytes(b"")
    (package / "net.pt2").write_bytes(b"")
    for name in ("own_nets:make", "net.pt", "net.pt2", "torchvision:tiny"):
        with pytest.raises(OptionError, match=r"could do anything.*--trust-code"):
            predictor(name, transform="own_nets:f" if name == "torchvision:tiny" else None)
    assert "own_nets" not in sys.modules
    with pytest.raises(OptionError, match=r"package\.module:function"):
        predictor("torchvision:tiny", transform="resize")


def test_any_callable_has_outputs_but_no_layers():
    opened = predictor(NO_NET, trust_code=True)
    wanted = raw(ROWS).flatten(1).mean(1, keepdim=True)
    assert_close(outputs(opened, images(ROWS)), Outputs(wanted), "outputs")
    assert opened.identity["network"] is None
    with pytest.raises(LayerError, match=r"Expected an nn.Module"):
        predictor(NO_NET, trust_code=True, layer="fc")


def test_the_identity_tells_weights_layers_and_transforms_apart():
    with pytest.warns(PosthocWarning, match=r"may be a random network: give --weights FILE, or --weights none"):
        predictor(NET, trust_code=True)
    options = {"weights": "none", "trust_code": True}
    net = predictor(NET, **options).identity
    assert net["network"] == fingerprint(TinyNet())
    assert predictor("tests.collecting_cases:other_net", **options).identity["network"] != net["network"]
    other = predictor(NET, layer="conv", transform=TRANSFORM, **options).identity
    assert (other["layer"], other["transform"]) == ("conv", TRANSFORM)
    assert (net["layer"], net["transform"]) == ("input of fc", "none")


def test_what_names_no_predictor_is_refused(tmp_path):
    for name in ("resnet50", "torchvision:", "net.h5"):
        with pytest.raises(OptionError, match="Expected a predictor such as torchvision:resnet50"):
            predictor(name, trust_code=True)
    with pytest.raises(FileError, match="found none at"):
        predictor(str(tmp_path / "absent.onnx"))
    for device in ("abacus", "cuda:99"):
        with pytest.raises(OptionError, match="Expected a device"):
            predictor(NET, weights="none", trust_code=True, device=device)


def test_weights_from_a_file(tmp_path):
    trained = TinyNet(seed=9)
    state = trained.state_dict()
    torch.save(state, tmp_path / "w.pt")
    torch.save({"epoch": 3, "state_dict": state}, tmp_path / "checkpoint.pt")
    torch.save({f"module.{name}": value for name, value in state.items()}, tmp_path / "parallel.pth")
    save_file(state, tmp_path / "w.safetensors")
    for path in tmp_path.iterdir():
        opened = predictor(NET, weights=str(path), trust_code=True)
        assert_close(outputs(opened, images(ROWS)), expected(raw(ROWS), net=trained), "outputs", "features")
        assert opened.identity["network"] == fingerprint(trained)


class Bomb:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, (os.environ["POSTHOC_TEST_BOMB"],)


def test_weights_are_never_unpickled(tmp_path, monkeypatch):
    monkeypatch.setenv("POSTHOC_TEST_BOMB", str(tmp_path / "exploded"))
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"fc.weight": Bomb()}, tmp_path / "bomb.pt")
    (tmp_path / "bomb.pth").write_bytes(pickle.dumps(Bomb()))
    for name in ("bomb.pt", "bomb.pth"):
        with pytest.raises(FileError, match="could run code"):
            predictor(NET, weights=str(tmp_path / name), trust_code=True)
    for name, value in ONLY_TENSORS.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(pickle.UnpicklingError):  # torchvision downloads in this way
        torch.hub.load_state_dict_from_url((tmp_path / "bomb.pt").as_uri(), str(tmp_path / "cache"))
    assert not (tmp_path / "exploded").exists()


def test_weights_that_do_not_fit_are_refused(tmp_path):
    save_file(TinyNet(num_classes=7).state_dict(), tmp_path / "seven.safetensors")
    save_file({"fc.weight": torch.ones(3, 4), "stem": torch.ones(1)}, tmp_path / "other.safetensors")
    (tmp_path / "text.safetensors").write_text("no")
    torch.save([1, 2], tmp_path / "list.pt")
    for net, weights, error, message in [
        (NET, "seven.safetensors", FileError, r"size mismatch for fc.weight: .*\[7, 4\]"),
        (NET, "other.safetensors", FileError, r"Missing key.* \"conv.weight\".* Unexpected key.*stem"),
        (NET, "text.safetensors", FileError, "Expected tensors by name"),
        (NET, "list.pt", FileError, "found list"),
        (NET, "absent.safetensors", FileError, "found none at"),
        (NET, "DEFAULT", OptionError, "got the name 'DEFAULT'"),
        (NO_NET, "seven.safetensors", OptionError, r"to return an nn\.Module, got function"),
    ]:
        with pytest.raises(error, match=message):
            predictor(net, weights=weights if weights == "DEFAULT" else str(tmp_path / weights), trust_code=True)


class Brighter:
    """A transform whose representation shows its settings, as those of torchvision do."""

    def __init__(self, *, by: float, is_training: bool = False) -> None:
        self.by = by
        assert not is_training

    def __repr__(self) -> str:
        return f"Brighter(\n    by={self.by}\n)"

    def __call__(self, image: Any) -> torch.Tensor:
        return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy()) / 255.0 + self.by


class TinyWeights(Enum):
    V1 = 1  # the seed of the network
    V2 = 2
    DEFAULT = 2

    def transforms(self) -> Brighter:
        return Brighter(by=self.value / 10)


def build(seed: int | None, num_classes: int) -> TinyNet:
    """The network with published weights of a seed, which are loaded without running code, or with none."""
    assert seed is None or os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1"
    return TinyNet(num_classes, seed=seed or 0)


@pytest.fixture
def fake_libraries(monkeypatch):
    def create_model(name: str, pretrained: bool = False, num_classes: int = 3) -> TinyNet:
        return build({"tiny": 2, "tiny.v1": 1, "tiny.v2": 2}[name] if pretrained else None, num_classes)

    for name, functions in {
        "torchvision": {},
        "torchvision.models": {
            "get_model": lambda name, weights=None, num_classes=3: build(weights and weights.value, num_classes),
            "get_model_weights": lambda name: TinyWeights,
            "list_models": lambda: ["tiny"],
        },
        "timm": {
            "create_model": create_model,
            "list_models": lambda filter="", include_tags=False: ["tiny.v1", "tiny.v2"] if include_tags else ["tiny"],
        },
        "timm.data": {"resolve_model_data_config": lambda model: {"by": 0.2}, "create_transform": Brighter},
    }.items():
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("name", "weights", "seed", "bright"),
    [
        *(("torchvision:tiny", weights, 2, 0.2) for weights in (None, "DEFAULT", "V2")),
        *(("torchvision:tiny", weights, 1, 0.1) for weights in ("V1", "TinyWeights.V1")),
        *(("timm:tiny", weights, 2, 0.2) for weights in (None, "DEFAULT")),
        ("timm:tiny", "v1", 1, 0.2),
        ("timm:tiny.v1", None, 1, 0.2),
        ("timm:tiny.v1", "v2", 2, 0.2),
    ],
)
def test_published_weights(fake_libraries, name, weights, seed, bright):
    opened = predictor(name, weights=weights)
    wanted = expected(raw(ROWS) + bright, net=TinyNet(seed=seed))
    assert_close(outputs(opened, images(ROWS)), wanted, "outputs", "features")
    assert opened.identity["transform"] == f"Brighter( by={bright} )"
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


@pytest.mark.parametrize("name", ["torchvision:tiny", "timm:tiny"])
def test_a_file_of_weights_with_and_without_the_transform(fake_libraries, tmp_path, name):
    trained = TinyNet(num_classes=7, seed=5)
    save_file(trained.state_dict(), tmp_path / "w.safetensors")
    for transform, bright in [(None, 0.2), ("none", 0.0)]:
        opened = predictor(name, weights=str(tmp_path / "w.safetensors"), transform=transform)
        assert_close(outputs(opened, images(ROWS)), expected(raw(ROWS) + bright, net=trained), "outputs", "features")


def test_names_and_inputs_that_do_not_fit_are_refused(fake_libraries):
    for name, weights, message in [
        ("torchvision:tinny", None, "Do you mean tiny"),
        ("torchvision:tiny", "V3", "The weights are: V1, V2, DEFAULT"),
        ("timm:tinny", None, r"Do you mean .*tiny"),
        ("timm:tiny", "v3", r"Do you mean .*tiny"),
    ]:
        with pytest.raises(OptionError, match=message):
            predictor(name, weights=weights)
    with pytest.raises(DataError, match="Expected an image a row for this predictor, got numbers"):
        outputs(predictor("torchvision:tiny"), [np.ones(3)])


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_the_real_library(library, tmp_path):
    try:
        real: Any = import_module(library)
    except Exception as error:  # a torchvision for another torch fails in its own ways
        pytest.skip(f"{library} cannot be imported: {error}")
    if library == "torchvision":
        net, transform = real.models.resnet18(num_classes=4), real.models.ResNet18_Weights.DEFAULT.transforms()
    else:
        net = real.create_model("resnet18", num_classes=4)
        transform = real.data.create_transform(**real.data.resolve_model_data_config(net), is_training=False)
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    opened = predictor(f"{library}:resnet18", weights=str(tmp_path / "w.safetensors"))
    found = outputs(opened, images(ROWS))
    with torch.no_grad():
        wanted = net.eval()(torch.stack([transform(picture) for picture in images(ROWS)]))
    torch.testing.assert_close(found.outputs, wanted)
    assert found.features is not None
    torch.testing.assert_close(net.fc(found.features), wanted)
    with pytest.raises(OptionError, match="resnet18"):
        predictor(f"{library}:resnet_18")


@pytest.mark.parametrize(
    ("opened", "name", "library", "extra"),
    [
        (predictor, "torchvision:resnet50", "torchvision", "torchvision"),
        (predictor, "timm:resnet50", "timm", "timm"),
        (predictor, "hf:some/model", "transformers", "hf"),
        (predictor, "net.onnx", "onnxruntime", "onnx"),
        (open_data, ".", "PIL", "images"),
        (open_data, "net.csv", "datasets", "hf"),
    ],
)
def test_a_missing_library_says_what_to_install(package, monkeypatch, opened, name, library, extra):
    for suffix in ("onnx", "csv"):
        (package / f"net.{suffix}").write_bytes(b"")
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"{library}.models", raising=False)
    with pytest.raises(MissingExtraError, match=rf"pip install 'posthoc\[{extra}\]'"):
        opened(name)
