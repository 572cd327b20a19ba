"""The residual networks for CIFAR-10 of 20, 32, 44 and 56 layers, whose pretrained weights the paper uses."""

from __future__ import annotations

import os
import pickle

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posthoc.errors import FileError, OptionError
from reproduction.data.files import DataFolder, RemoteFile

__all__ = ["CifarResNet", "normalised", "pretrained"]

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
"""Of the pixels, by colour: what the networks were trained on is normalised by them."""
BLOCKS = {20: 3, 32: 5, 44: 7, 56: 9}
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
"""As the authors published them."""


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        plain = stride == 1 and channels == out
        shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.downsample = None if plain else shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class CifarResNet(nn.Module):
    """A convolution, three stages of blocks, the mean over the picture, and a linear layer on 64 features."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(Block(channels, out, stride), *(Block(out, out, 1) for _ in range(BLOCKS[depth] - 1)))
            for channels, out, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2))
        )
        self.fc = nn.Linear(64, 10)

    def features(self, x: Tensor) -> Tensor:  # (N, 64)
        """What the last layer reads."""
        x = F.relu(self.bn1(self.conv1(x)))
        return self.layer3(self.layer2(self.layer1(x))).mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x))


def pretrained(depth: int, data_dir: str | os.PathLike[str] | None = None) -> CifarResNet:
    """A network with its weights: `cifar10_resnet20.pt` and the like from the folder `weights`, or a download."""
    if depth not in WEIGHTS:
        raise OptionError(f"Expected a depth among {', '.join(map(str, WEIGHTS))}, got {depth}.")
    shelf = DataFolder("weights", data_dir)
    found = shelf.find(f"cifar10_resnet{depth}.pt", WEIGHTS[depth].filename)
    path = found[0] if found else shelf.get(WEIGHTS[depth])
    network = CifarResNet(depth)
    try:
        network.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        raise FileError(f"Expected the weights of a ResNet{depth} in {path}, found otherwise ({error}).") from error
    return network.eval()


def normalised(images: Tensor) -> Tensor:
    """Pixels from 0 to 1 as the networks take them."""
    mean, std = (images.new_tensor(values)[:, None, None] for values in (MEAN, STD))
    return (images - mean) / std
