"""Zero-shot classifiers: CLIP's logits against its own library's, CIFAR-100's files, and the experiment, quickly."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posthoc import FileError, MissingExtraError
from reproduction.data import Dataset, images
from reproduction.data import files as data_files
from reproduction.experiments import Request, clip, experiment_named, variants

NAMES = tuple(f"kind_{i}" for i in range(100))
NAMES_FILE = "fine_label_names.txt"
CLASSES = ("cat", "aquarium_fish", "dog")


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """A cache of its own, no data but a test's, and no downloads."""
    monkeypatch.delenv("POSTHOC_DATA", raising=False)
    monkeypatch.setenv("POSTHOC_CACHE", str(tmp_path / "cache"))

    def refuse(remote, folder):
        raise FileError(f"asked for {remote.url}")

    monkeypatch.setattr(data_files, "fetch", refuse)
    clip.parts_of.cache_clear()
    yield
    clip.parts_of.cache_clear()


# CIFAR-100.


def records(rows: int, classes: int = 100) -> np.ndarray:
    found = np.random.default_rng(rows).integers(0, 256, (rows, 3074), dtype=np.uint8)
    found[:, 0], found[:, 1] = 7, np.arange(rows) % classes
    return found


def files(rows: int, names: tuple[str, ...] = NAMES) -> dict[str, bytes]:
    texts = "\n".join(names) + "\n"
    return {"train.bin": records(2 * rows).tobytes(), "test.bin": records(rows).tobytes(), NAMES_FILE: texts.encode()}


def write_cifar100(folder: Path, content: dict[str, bytes]) -> None:
    folder.mkdir(parents=True)
    with tarfile.open(folder / "cifar-100-binary.tar.gz", "w:gz") as archive:
        for name, data in content.items():
            entry = tarfile.TarInfo(f"cifar-100-binary/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


@pytest.fixture
def small(monkeypatch):
    """Files of three images to test with and six to train with."""
    monkeypatch.setattr(images, "CIFAR100_IMAGES", {"train": 6, "test": 3})


def test_cifar100_from_its_archive_and_from_its_files(small, tmp_path):
    write_cifar100(tmp_path / "a" / "cifar100", files(3))
    for name, data in files(3).items():
        path = tmp_path / "b" / "cifar100" / "cifar-100-binary" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for folder in ("a", "b"):
        for part, rows in (("train", 6), ("test", 3)):
            data = images.cifar100(tmp_path / folder, part)
            assert data.targets.tolist() == list(range(rows))  # the class, not the group of classes
            assert data.classes == NAMES
            assert data.source == f"CIFAR-100, {part}"
            # Red, then green, then blue, each row by row.
            raw = records(rows)[:, 2:]
            for row, color, y, x in [(0, 0, 0, 0), (1, 0, 2, 5), (2, 2, 31, 30)]:
                assert data.inputs[row, color, y, x] == raw[row, color * 1024 + y * 32 + x]


def test_cifar100_that_is_not_whole_is_refused(small, tmp_path):
    whole = files(3)
    for i, (change, message) in enumerate(
        [
            ({"test.bin": whole["test.bin"][:-1]}, "Expected 9222 bytes in test.bin"),
            ({NAMES_FILE: b"one two"}, "found 2 names"),
            ({"test.bin": b"\xff" * len(whole["test.bin"])}, "classes up to 255"),
        ]
    ):
        write_cifar100(tmp_path / str(i) / "cifar100", {**whole, **change})
        with pytest.raises(FileError, match=message):
            images.cifar100(tmp_path / str(i))
    with pytest.raises(FileError, match=r"asked for https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"):
        images.cifar100(None)


# CLIP.


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """A tiny CLIP in the folder `clip` of some data, saved as it is on the hub."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("PIL.Image")
    folder = tmp_path_factory.mktemp("data") / "clip"
    small: dict[str, Any] = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "projection_dim": 6,
    }
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    vocabulary = {word: i for i, word in enumerate(words)}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = transformers.CLIPConfig(
        text_config={**small, **ends, "vocab_size": len(words), "max_position_embeddings": 40},
        vision_config={**small, "image_size": 32, "patch_size": 16},
        projection_dim=6,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.CLIPModel(config)
        for p in model.parameters():  # as they are born, all texts are nearly the same
            if p.ndim > 1:
                torch.nn.init.normal_(p, std=0.5)
    model.save_pretrained(folder)
    folder.joinpath("vocab.json").write_text(json.dumps(vocabulary))
    folder.joinpath("merges.txt").write_text("#version: 0.2\n")
    folder.joinpath("tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CLIPTokenizer"}))
    settings = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 32},
        "crop_size": {"height": 32, "width": 32},
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.2, 0.25, 0.3],
    }
    folder.joinpath("preprocessor_config.json").write_text(json.dumps(settings))
    return folder.parent


def pictures(rows: int, seed: int = 0) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (rows, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return Dataset("tiny", f"tiny pictures {seed}", pixels, torch.arange(rows) % 3, classes=CLASSES)


def by_the_library(hub: Path, data: Dataset) -> Any:
    """What CLIP says when its library is given images and texts together."""
    import transformers

    model = transformers.CLIPModel.from_pretrained(hub / "clip").eval()
    tokenizer = transformers.CLIPTokenizer.from_pretrained(hub / "clip")
    texts = [tokenizer(f"this is a {name}", return_tensors="pt") for name in ("cat", "aquarium fish", "dog")]
    mean, std = (torch.tensor(values)[:, None, None] for values in ([0.5, 0.4, 0.3], [0.2, 0.25, 0.3]))
    with torch.no_grad():
        said = [model(pixel_values=(data.inputs / 255.0 - mean) / std, **text) for text in texts]  # one by one: no pads
    return torch.cat([one.logits_per_image for one in said], 1), said[0].image_embeds


def test_clip_says_what_its_library_says(hub):
    data = pictures(5)
    backbone, collate, words = clip.load_clip(CLASSES, hub, "cpu")
    rows = clip.PictureRows(data)
    found = variants.cached_outputs("tiny", backbone, rows, collate, {"data": rows.identity}, quick=True)
    logits, embeddings = by_the_library(hub, data)
    assert logits.std(0).min() > 0.1  # there is something to compare
    torch.testing.assert_close(found.outputs.outputs, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.outputs.features, embeddings, rtol=1e-4, atol=1e-4)
    assert found.outputs.targets.tolist() == [0, 1, 2, 0, 1]
    assert words == "the folder clip"


def test_what_was_said_is_kept_by_all_that_decides_it(hub, monkeypatch):
    backbone, collate, _ = clip.load_clip(CLASSES, hub, "cpu")

    def said(data, backbone=backbone):
        rows = clip.PictureRows(data)
        return variants.cached_outputs("tiny", backbone, rows, collate, {"data": rows.identity}, quick=True)

    first = said(pictures(4))
    assert first.seconds > 0
    half = first.subset(torch.tensor([1, 3]))
    assert half.seconds == first.seconds / 2
    assert torch.equal(half.outputs.outputs, first.outputs.outputs[[1, 3]])
    other, _, _ = clip.load_clip(("cat", "lion", "dog"), hub, "cpu")
    assert not torch.equal(said(pictures(4), other).outputs.outputs, first.outputs.outputs)
    assert not torch.equal(said(pictures(4, seed=1)).outputs.outputs, first.outputs.outputs)

    def refuse(*args, **kwargs):
        pytest.fail("the network was run again")

    monkeypatch.setattr(variants, "collect_to_folder", refuse)
    again = said(pictures(4))
    assert torch.equal(again.outputs.outputs, first.outputs.outputs)
    assert again.seconds == first.seconds


def test_a_run_that_was_killed_is_gone_on_with_and_has_no_time(hub):
    backbone, collate, _ = clip.load_clip(CLASSES, hub, "cpu")
    data = pictures(70)  # more than a batch

    class Broken(clip.PictureRows):
        def __getitem__(self, row):
            if row == 66:
                raise KeyboardInterrupt
            return super().__getitem__(row)

    rows = clip.PictureRows(data)
    arguments = (collate, {"data": rows.identity})
    with pytest.raises(KeyboardInterrupt):
        variants.cached_outputs("tiny", backbone, Broken(data), *arguments, quick=True)
    found = variants.cached_outputs("tiny", backbone, rows, *arguments, quick=True)
    assert found.seconds is None
    assert found.subset(torch.arange(3)).seconds is None
    torch.testing.assert_close(found.outputs.outputs, by_the_library(hub, data)[0], rtol=1e-4, atol=1e-4)


def test_weights_that_cannot_be_had_or_could_run_code(hub, tmp_path, monkeypatch):
    import transformers

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(clip, "MODEL", "no/such-model")
    for folder in (None, tmp_path):
        with pytest.raises(FileError, match=r"no/such-model are unavailable.*folder clip.*banking77 needs no weights"):
            clip.load_clip(CLASSES, folder, "cpu")
    unsafe = tmp_path / "clip"
    unsafe.mkdir()
    for path in (hub / "clip").iterdir():
        if path.suffix != ".safetensors":
            unsafe.joinpath(path.name).write_bytes(path.read_bytes())
    model = transformers.CLIPModel.from_pretrained(hub / "clip")
    torch.save(model.state_dict(), unsafe / "pytorch_model.bin")
    with pytest.raises(FileError, match="Expected CLIP's weights as safetensors"):
        clip.load_clip(CLASSES, tmp_path, "cpu")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"posthoc\[hf\]"):
        clip.load_clip(CLASSES, hub, "cpu")


# The experiment.


@pytest.fixture
def banking(tmp_path) -> Path:
    """Outputs of four classes in the two files."""
    folder = tmp_path / "data"
    (folder / "banking77_minilm").mkdir(parents=True)
    for seed, name in enumerate(("fit", "test")):
        generator = np.random.default_rng(seed)
        features = generator.normal(size=(120, 6))
        logits = 3.0 * features[:, :4]
        targets = np.array([generator.choice(4, p=np.exp(row) / np.exp(row).sum()) for row in logits])
        np.savez(folder / "banking77_minilm" / f"{name}.npz", outputs=logits, features=features, targets=targets)
    return folder


def test_the_text_twin(banking, tmp_path):
    request = Request(out=tmp_path / "out", cases=("banking77",), seeds=(0, 1), data_dir=banking, quick=True)
    found = experiment_named("clip").reproduce(request)
    assert [(run["method"], run["seed"]) for run in found] == [
        (method, seed) for seed in (0, 1) for method in ("map", "temperature", "fmgp-paper", "fmgp")
    ]
    with np.load(banking / "banking77_minilm" / "test.npz") as file:
        logits, targets = file["outputs"][:100], file["targets"][:100]
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    bare = found[0]
    assert bare["title"] == "Zero-shot"
    assert bare["metrics"]["nll"] == pytest.approx(-log_p[np.arange(100), targets].mean(), rel=1e-5)
    assert bare["metrics"]["accuracy"] == pytest.approx((log_p.argmax(1) == targets).mean())
    assert bare["configuration"]["data"] == {
        "fit": "Banking77, outputs of a MiniLM sentence encoder in place of CLIP's, 100 rows of fit.npz",
        "test": "Banking77, outputs of a MiniLM sentence encoder in place of CLIP's, 100 rows of test.npz",
    }
    paper = found[2]["configuration"]
    assert paper["options"]["kernel"] == {"type": "linear", "on": "features"}
    assert paper["likelihood"] == {"temperature": 1.0, "training": "logit_scaling", "prediction": "logit_scaling"}
    # Four methods, of which FMGP has the probabilities of temperature scaling, as rows are few.
    assert len({round(run["metrics"]["nll"], 9) for run in found[:4]}) == 3
    assert all(run["problem"] is None and {"reliability", "risk_coverage"} <= run["curves"].keys() for run in found)
    names = {path.name for path in (tmp_path / "out" / "clip").iterdir()}
    assert names >= {"table.md", "table.tex", "table.csv", "figure.png", "figure.pdf", "banking77-fmgp-1.json"}


def test_files_that_are_not_there_are_named(tmp_path):
    request = Request(cases=("banking77",), data_dir=tmp_path)
    with pytest.raises(FileError, match=r"fit\.npz in the folder banking77_minilm.*--data-dir"):
        experiment_named("clip").prepare("banking77", 0, request)


def test_images_seen_by_clip(hub, tmp_path, monkeypatch):
    asked = []

    def load_images(folder, part):
        asked.append((folder, part))
        return pictures(30, seed=len(part))

    monkeypatch.setitem(clip.IMAGES, "cifar100", load_images)
    request = Request(out=tmp_path / "out", cases=("cifar100",), data_dir=hub, quick=True)
    found = {run["method"]: run for run in experiment_named("clip").reproduce(request)}
    assert sorted(asked) == [(hub, "test"), (hub, "train")]
    test = pictures(30, seed=len("test"))[: clip.QUICK_IMAGES]
    log_p = by_the_library(hub, test)[0].log_softmax(1)
    nll = -float(log_p.gather(1, test.targets[:, None]).mean())
    assert found["map"]["metrics"]["nll"] == pytest.approx(nll, rel=1e-3)
    assert found["map"]["configuration"]["data"] == {
        "fit": "tiny pictures 5, seen by CLIP (the folder clip)",
        "test": "tiny pictures 4, seen by CLIP (the folder clip)",
    }
