"""A small network for images and data for it, which the tests of collecting share; named there by import strings."""

import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from posthoc import Outputs
from posthoc.collect.network import Backbone
from posthoc.collect.outputs import join
from posthoc.collect.to_folder import collect_to_folder
from posthoc.integrations.models import Plan, Predictor, open_predictor
from posthoc.integrations.transforms import PLAIN, Collate

SIDE, CLASSES, FEATURES = 8, 3, 4
NET, TRANSFORM = "tests.collecting_cases:tiny_net", "tests.collecting_cases:centred"


class TinyNet(nn.Module):
    """A convolution, a batch norm that matters, a pool of four features and a linear layer."""

    def __init__(self, num_classes: int = CLASSES, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.conv = nn.Conv2d(3, FEATURES, 3, padding=1)
            self.norm = nn.BatchNorm2d(FEATURES)
            nn.init.normal_(self.norm.running_mean)
            self.pool = nn.AdaptiveAvgPool2d(1)
            self.fc = nn.Linear(FEATURES, num_classes)

    def features(self, x: Tensor) -> Tensor:
        return self.pool(self.norm(self.conv(x)).relu()).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x))


tiny_net, other_net = TinyNet, partial(TinyNet, seed=1)


class WithFeatures(nn.Module):
    """The same, returning its features by name as compiled networks must."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TinyNet()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.net.features(x)
        return {"logits": self.net.fc(features), "pooled": features}


class Pair(nn.Module):
    """The same, returning its features and then its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TinyNet()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.net.features(x)
        return features, self.net.fc(features)


def mean_of_pixels() -> Any:
    """A predictor that is no module."""
    return lambda x: x.flatten(1).mean(1, keepdim=True)


def centred(image: Any) -> Tensor:
    """A transform of one image."""
    return torch.from_numpy(np.asarray(image, np.float32).transpose(2, 0, 1) / 255.0 - 0.5)


def image(row: int) -> Any:
    """A noisy image of a size that fits; its first red value is its row."""
    from PIL import Image

    pixels = np.random.default_rng(row).integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8)
    pixels[0, 0, 0] = row
    return Image.fromarray(pixels)


def png(row: int) -> bytes:
    buffer = io.BytesIO()
    image(row).save(buffer, "PNG")
    return buffer.getvalue()


def raw(rows: int) -> Tensor:
    """The images as a network sees them without a transform."""
    pixels = np.stack([np.asarray(image(row)) for row in range(rows)])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous() / 255.0


def images(rows: int) -> list[Any]:
    return [image(row) for row in range(rows)]


def predictor(name: str, **options: Any) -> Predictor:
    """The predictor that a string names, on the CPU also where there is a GPU."""
    return open_predictor(Plan(name, **{"device": "cpu", **options}))


def outputs(predictor: Predictor, inputs: list[Any]) -> Outputs:
    """What a predictor says of some inputs."""
    batch = predictor.collate([(value, None) for value in inputs])
    with predictor.backbone.reading(features=True, inputs=False) as read:
        return join(list(read([batch])))


def collected(data: Any, folder: Path, **options: Any) -> Outputs:
    """The small network's outputs for rows of data, in a folder."""
    options = {"identity": data.identity, "batch_size": 4, "collate": Collate(PLAIN, torch.float32), **options}
    return collect_to_folder(Backbone(TinyNet(), None, None), data, folder, **options)


def image_folder(folder: Path, rows: int) -> Tensor:
    """Writes the images in class folders, so that row after row is in order of names; returns the classes."""
    labels = torch.arange(rows) * CLASSES // rows
    for row, label in enumerate(labels.tolist()):
        path = folder / f"class_{label}" / f"{row:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(row))
    return labels


def write_parquet(path: Path, columns: dict[str, Any], group: int | None = None) -> Path:
    """A Parquet file of some columns, in groups of so many rows."""
    table = pytest.importorskip("pyarrow").table(columns)
    pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=group)
    return path


def expected(x: Tensor, targets: Tensor | None = None, net: TinyNet | None = None) -> Outputs:
    """What the network says of inputs, worked out by hand."""
    net = (net or TinyNet()).eval()
    with torch.no_grad():
        features = net.features(x)
        return Outputs(net.fc(features), targets, features, x.flatten(1))


def assert_close(found: Outputs, wanted: Outputs, *names: str) -> None:
    """The same parts, to rounding; no others."""
    for name in ("outputs", "targets", "features", "inputs"):
        part = getattr(found, name)
        assert (part is not None) == (name in names), name
        if part is not None:
            torch.testing.assert_close(part, getattr(wanted, name), rtol=1e-5, atol=1e-5, check_dtype=name != "targets")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file in a folder but the lock."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}
