"""ImageNet: the whole experiment on a folder of a few images a class, with a stand-in for torchvision."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from posthoc import DataError, FileError, PosthocError
from reproduction.experiments import Request, experiment_named, imagenet, variants
from tests.collecting_cases import TinyNet, image

CLASSES = ("n01", "n02", "n03")
TRAIN, VAL = 4, 10
"""Images a class."""


class Halved(nn.Module):
    """A transform as torchvision's are."""

    def forward(self, picture: Any) -> Tensor:
        return torch.from_numpy(np.asarray(picture).transpose(2, 0, 1).copy()) / 255.0 - 0.5


class Weights(Enum):
    IMAGENET1K_V1 = 1
    IMAGENET1K_V2 = 2
    DEFAULT = 2

    def transforms(self) -> Halved:
        return Halved()


def sharp_net(seed: int) -> TinyNet:
    """One whose logits matter."""
    net = TinyNet(len(CLASSES), seed=seed)
    nn.init.normal_(net.fc.weight, std=3.0, generator=torch.Generator().manual_seed(seed))
    return net


@pytest.fixture
def torchvision(monkeypatch, tmp_path) -> Iterator[ModuleType]:
    """A library with two tiny networks, and a cache of one's own."""
    pytest.importorskip("PIL.Image")
    monkeypatch.delenv("POSTHOC_DATA", raising=False)
    monkeypatch.setenv("POSTHOC_CACHE", str(tmp_path / "cache"))
    module, models = ModuleType("torchvision"), ModuleType("torchvision.models")
    vars(models).update(
        get_model=lambda name, weights: sharp_net(weights.value),
        get_model_weights=lambda name: Weights,
        list_models=lambda: ["resnet18", "resnet34"],
    )
    monkeypatch.setitem(sys.modules, "torchvision", module)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    imagenet.images_of.cache_clear()
    yield models
    imagenet.images_of.cache_clear()


def number(part: str, label: int, row: int) -> int:
    """A different image for each place."""
    return (100 if part == "val" else 0) + 20 * label + row


@pytest.fixture
def data(tmp_path) -> Path:
    folder = tmp_path / "data"
    for part, rows in (("train", TRAIN), ("val", VAL)):
        for label, name in enumerate(CLASSES):
            place = folder / "imagenet" / part / name
            place.mkdir(parents=True)
            for row in range(rows):
                image(number(part, label, row)).save(place / f"{row:02}.png")
    return folder


def quick(data: Path, out: Path, **options: Any) -> Request:
    return Request(**{"out": out, "data_dir": data, "cases": ("resnet18",), "quick": True, **options})


def scored_by_hand() -> tuple[Tensor, Tensor]:
    """The network's logits and the classes of all validation images but every fifth."""
    rows = [(label, row) for label in range(len(CLASSES)) for row in range(VAL)]
    rows = [place for i, place in enumerate(rows) if i % 5]
    x = torch.stack([Halved()(image(number("val", *place))) for place in rows])
    with torch.no_grad():
        return sharp_net(1).eval()(x), torch.tensor([label for label, _ in rows])


def test_the_whole_experiment(torchvision, data, tmp_path, monkeypatch):
    experiment = experiment_named("imagenet")
    documents = experiment.reproduce(quick(data, tmp_path / "out"))
    found = {run["method"]: run for run in documents}
    assert list(found) == ["map", "temperature", "ella", "mfvi", "fmgp-paper", "fmgp"]
    logits, y = scored_by_hand()
    nll = float(nn.functional.cross_entropy(logits, y))
    assert found["map"]["metrics"]["nll"] == pytest.approx(nll, rel=1e-4)
    assert found["map"]["metrics"]["accuracy"] == pytest.approx(float((logits.argmax(1) == y).float().mean()))
    # With so few rows the probabilities of FMGP are those of temperature scaling.
    assert len({run["metrics"]["nll"] for run in documents}) == 5
    assert found["fmgp-paper"]["configuration"]["data"]["fit"] == "ImageNet, training images"
    assert found["fmgp"]["configuration"]["data"] == {
        "fit": "ImageNet, one in 5 of the validation images",
        "test": "ImageNet, the other validation images",
    }
    assert found["map"]["configuration"]["network"] == "torchvision's resnet18, IMAGENET1K_V1"
    for run in documents:
        times, runs_it = run["times"], run["method"] == "mfvi"
        assert times["predict_seconds_with_network"] == pytest.approx(
            times["predict_seconds"] + (0.0 if runs_it else times["network_seconds"])
        )
        assert ("fit_seconds_with_network" in times) != runs_it
    names = {path.name for path in (tmp_path / "out" / "imagenet").iterdir()}
    assert {"table.md", "figure.png", "resnet18-mfvi-0.json"} <= names

    # The network is not run again for other seeds, nor where all is there.
    def refuse(*args, **kwargs):
        pytest.fail("the network was run again")

    monkeypatch.setattr(variants, "collect_to_folder", refuse)
    imagenet.images_of.cache_clear()
    again = experiment.reproduce(quick(data, tmp_path / "out", seeds=(0, 1), methods=("map", "fmgp-paper")))
    assert again[:2] == [found["map"], found["fmgp-paper"]]


def test_what_methods_are_fitted_on(torchvision, data, tmp_path):
    images = imagenet.Images("resnet18", quick(data, tmp_path))
    train, held_out, test = (images.outputs(part).outputs for part in ("train", "held out", "test"))
    assert train.targets.tolist() == [0] * TRAIN + [1] * TRAIN + [2] * TRAIN
    assert (len(held_out), len(test)) == (6, 24)
    for part in (held_out, test):
        assert part.targets.bincount().tolist() == [len(part) // 3] * 3  # as many of every class
    given = {name: images.fit_data(variant) for name, variant in imagenet.VARIANTS.items()}
    for name in ("map", "temperature", "fmgp"):
        assert torch.equal(given[name].data.outputs, held_out.outputs)
        assert given[name].val is None
    assert torch.equal(given["fmgp-paper"].data.outputs, train.outputs)
    assert torch.equal(given["ella"].data.outputs, train.outputs)
    assert torch.equal(given["ella"].val.outputs, held_out.outputs)
    x, y = map(torch.cat, zip(*given["mfvi"].data, strict=True))
    assert sorted(y.tolist()) == sorted(train.targets.tolist())
    assert y.tolist() != sorted(y.tolist())  # classes do not come one after the other
    with torch.no_grad():
        logits = sharp_net(1).eval()(x)
    torch.testing.assert_close(logits.sort(0).values, train.outputs.sort(0).values)
    assert given["mfvi"].num_data == len(train)
    loader, _ = images.test(imagenet.VARIANTS["mfvi"])
    assert torch.equal(torch.cat([y for _, y in loader]), test.targets)


def test_a_quick_run_looks_at_images_from_all_over(torchvision, data, tmp_path, monkeypatch):
    monkeypatch.setattr(imagenet, "QUICK_IMAGES", 6)
    images = imagenet.Images("resnet18", quick(data, tmp_path))
    assert images.outputs("val").outputs.targets.tolist() == [0, 0, 1, 1, 2, 2]
    whole = imagenet.Images("resnet18", quick(data, tmp_path, quick=False))
    monkeypatch.setattr(variants, "worker_count", lambda: 0)
    assert len(whole.outputs("val").outputs) == 30


def test_without_training_images_the_others_are_made(torchvision, data, tmp_path):
    (data / "imagenet" / "train").rename(data / "imagenet" / "elsewhere")
    lines: list[str] = []
    request = quick(data, tmp_path / "out", cases=("resnet34",), log=lines.append)
    with pytest.raises(PosthocError, match=r"2 of 5 runs failed.*imagenet/train.*resnet50-files needs no"):
        experiment_named("imagenet").reproduce(request)
    made = [line.split(",")[1].strip() for line in lines if line.startswith("resnet34")]
    assert made == ["map", "temperature", "fmgp"]


def test_what_is_not_there_or_of_other_classes_is_refused(torchvision, data, tmp_path, monkeypatch):
    def images(folder: Path | None) -> imagenet.Images:
        return imagenet.Images("resnet18", quick(folder, tmp_path))

    for folder in (None, tmp_path):
        with pytest.raises(FileError, match=r"Expected ImageNet's images in imagenet/val"):
            images(folder).outputs("test")
    # Folders of fewer classes would be numbered wrongly.
    (data / "imagenet" / "val" / "n02").rename(tmp_path / "n02")
    with pytest.raises(DataError, match=r"Expected 3 folders of classes in .*val, found 2"):
        images(data).outputs("test")

    def refuse(name, weights):
        raise URLError("no network")

    monkeypatch.setattr(torchvision, "get_model", refuse)
    with pytest.raises(FileError, match=r"weights of resnet18.*no network.*TORCH_HOME.*resnet50-files needs no"):
        images(data).outputs("test")


def test_outputs_in_files(tmp_path, monkeypatch):
    monkeypatch.delenv("POSTHOC_DATA", raising=False)
    folder = tmp_path / "imagenet_resnet50"
    folder.mkdir()
    weight = np.random.default_rng(9).normal(size=(6, 5))
    for seed, name in enumerate(("sample", "nips2017")):
        features = np.random.default_rng(seed).normal(size=(40, 6))
        arrays = {"outputs": features @ weight, "features": features, "targets": np.arange(40) % 5}
        np.savez(folder / f"{name}.npz", **arrays)
    request = quick(tmp_path, tmp_path / "out", cases=("resnet50-files",))
    found = {run["method"]: run for run in experiment_named("imagenet").reproduce(request)}
    assert list(found) == ["map", "temperature", "ella", "fmgp-paper", "fmgp"]
    logits, targets = torch.from_numpy(arrays["outputs"]), torch.from_numpy(arrays["targets"])  # of the last file
    assert found["map"]["metrics"]["nll"] == pytest.approx(float(nn.functional.cross_entropy(logits, targets)))
    assert found["fmgp"]["configuration"]["fitted_on"] == "sample"
    assert found["fmgp"]["configuration"]["data"] == {
        "fit": "ResNet50's outputs on 40 ImageNet images probably seen in its training (sample.npz)",
        "test": "ResNet50's outputs on 40 ImageNet images unseen in its training (nips2017.npz)",
    }
    assert found["map"]["times"].keys() == {"fit_seconds", "predict_seconds"}
