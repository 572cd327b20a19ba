"""The residual networks for CIFAR-10 of 20, 32, 44 and 56 layers with the paper's weights, and their outputs."""

from __future__ import annotations

import os
import pickle
import time
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posthoc.collect.augmentation import random_crops
from posthoc.collect.outputs import Outputs
from posthoc.errors import FileError, OptionError
from posthoc.evaluate.cost import synchronize
from reproduction.data import cifar10, svhn
from reproduction.data.files import DataFolder, RemoteFile
from reproduction.experiments.experiment import Request
from reproduction.experiments.variants import NetworkOutputs

__all__ = ["CROPS", "Cifar", "CifarResNet", "Images", "normalize", "pretrained"]

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
"""Mean and standard deviation of the colors, by which the training images were normalized."""
BLOCKS = {20: 3, 32: 5, 44: 7, 56: 9}
"""Blocks in each stage, by depth."""
RELEASES = "https://github.com/chenyaofo/pytorch-cifar-models/releases/download/resnet"
WEIGHTS = {
    depth: RemoteFile(f"{RELEASES}/{name}", name)
    for depth, name in {
        20: "cifar10_resnet20-4118986f.pt",
        32: "cifar10_resnet32-ef93fc4d.pt",
        44: "cifar10_resnet44-2a3cabcb.pt",
        56: "cifar10_resnet56-187c023a.pt",
    }.items()
}
CROPS = 5000
"""Random crops of training images for early stopping and for choices, as in the paper."""
QUICK_IMAGES = 24
BATCH = 1000


class Block(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        identity = stride == 1 and channels == out
        projection = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.downsample = None if identity else projection

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class CifarResNet(nn.Module):
    """A convolution, three stages of blocks, average pooling, and a linear layer on 64 features.

    Args:
        depth: 20, 32, 44 or 56.
    """

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(Block(channels, out, stride), *(Block(out, out, 1) for _ in range(BLOCKS[depth] - 1)))
            for channels, out, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2))
        )
        self.fc = nn.Linear(64, 10)

    def features(self, x: Tensor) -> Tensor:  # (N, 64)
        """The input of the last layer."""
        x = F.relu(self.bn1(self.conv1(x)))
        return self.layer3(self.layer2(self.layer1(x))).mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x))


def pretrained(depth: int, data_dir: str | os.PathLike[str] | None = None) -> CifarResNet:
    """A network with its weights, from `cifar10_resnet20.pt` (and so on) in the folder `weights`, or downloaded.

    Raises:
        OptionError: There is no network of this depth.
        FileError: The file holds other weights.
    """
    if depth not in WEIGHTS:
        raise OptionError(f"Expected a depth among {', '.join(map(str, WEIGHTS))}, got {depth}.")
    folder = DataFolder("weights", data_dir)
    own = folder.find(f"cifar10_resnet{depth}.pt", WEIGHTS[depth].filename)
    path = own[0] if own else folder.get(WEIGHTS[depth])
    network = CifarResNet(depth)
    try:
        network.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        raise FileError(
            f"Expected the weights of a ResNet{depth} in {path}, found otherwise ({str(error)[:400]})."
        ) from error
    return network.eval()


def normalize(images: Tensor) -> Tensor:
    """Pixels from 0 to 1, normalized as the networks expect them."""
    mean, std = (images.new_tensor(values)[:, None, None] for values in (MEAN, STD))
    return (images - mean) / std


class Images(NamedTuple):
    """Images in uint8, (N, 3, 32, 32), their classes, and their source."""

    pixels: Tensor
    targets: Tensor
    source: str


class Cifar:
    """The data and the networks of one request, loaded or computed when they are first used."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.device = torch.device(request.device)
        self.images = cache(self._images)
        self.network = cache(self._network)
        self.outputs = cache(self._outputs)

    def _images(self, part: str) -> Images:
        folder = self.request.data_dir
        data = svhn(folder, "test") if part == "svhn" else cifar10(folder, part)
        count = QUICK_IMAGES if self.request.quick else len(data)
        return Images(data.inputs[:count], data.targets[:count], data.source)

    def _network(self, depth: int) -> CifarResNet:
        return pretrained(depth, self.request.data_dir).to(self.device)

    def _outputs(self, depth: int, part: str) -> NetworkOutputs:
        return self.compute(depth, *self.rows(part))

    def to_inputs(self, pixels: Tensor) -> Tensor:
        """Images in uint8 as inputs of the networks, on the device."""
        return normalize(pixels.to(self.device).float() / 255.0)

    def rows(self, part: str) -> tuple[Tensor, Tensor]:
        """Inputs and classes of "train", "test" or "svhn"."""
        images = self.images(part)
        return self.to_inputs(images.pixels), images.targets.to(self.device)

    def crops(self, seed: int) -> tuple[Tensor, Tensor]:
        """Random crops of random training images."""
        inputs, targets = self.rows("train")
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(inputs), generator=generator)[:CROPS].to(self.device)
        return random_crops(inputs[rows], generator), targets[rows]

    @torch.no_grad()
    def compute(self, depth: int, inputs: Tensor, targets: Tensor) -> NetworkOutputs:
        """Outputs and features of a network; the inputs of the rows are the flattened images."""
        network, parts = self.network(depth), []
        synchronize(self.device)
        begin = time.perf_counter()
        for batch in inputs.split(BATCH):
            features = network.features(batch)
            parts.append((network.fc(features), features))
        synchronize(self.device)
        seconds = time.perf_counter() - begin
        outputs, features = (torch.cat(column) for column in zip(*parts, strict=True))
        return NetworkOutputs(Outputs(outputs, targets, features, inputs.flatten(1)), seconds)
