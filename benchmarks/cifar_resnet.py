"""The residual networks for CIFAR-10 of 20, 32, 44 and 56 layers, whose pretrained weights the paper uses."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
"""Of the pixels, by colour: what the networks were trained on is normalised by them."""
BLOCKS = {20: 3, 32: 5, 44: 7, 56: 9}


class Block(nn.Module):
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
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(Block(channels, out, stride), *(Block(out, out, 1) for _ in range(BLOCKS[depth] - 1)))
            for channels, out, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2))
        )
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.fc(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))


def pretrained(depth: int, folder: Path) -> CifarResNet:
    """A network with its weights, from `weights/cifar10_resnet20.pt` and the like."""
    network = CifarResNet(depth)
    network.load_state_dict(torch.load(folder / "weights" / f"cifar10_resnet{depth}.pt", weights_only=True))
    return network.eval()


def normalised(images: Tensor) -> Tensor:
    """Pixels from 0 to 1 as the networks take them."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    return (images - mean) / std
