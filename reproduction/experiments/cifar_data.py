"""What the experiments on CIFAR-10 share: images, networks, and what the networks say of the images."""

from __future__ import annotations

import time
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from posthoc.collect.augmentation import random_crops
from posthoc.collect.outputs import Outputs
from posthoc.evaluate.cost import synchronize
from reproduction.data import cifar10, svhn
from reproduction.experiments.cifar_networks import CifarResNet, normalised, pretrained
from reproduction.experiments.experiment import Request

__all__ = ["Cifar", "Images", "Said"]

CROPS = 5000
"""Random crops of training images, by which some methods are stopped or chosen: the paper's number."""
QUICK_IMAGES = 24
AT_ONCE = 1000


class Images(NamedTuple):
    """Images as bytes, their classes, and where they come from."""

    pixels: Tensor  # (N, 3, 32, 32) in uint8
    targets: Tensor  # (N,)
    source: str


class Said(NamedTuple):
    """What a network says of images, and the seconds that took."""

    outputs: Outputs
    seconds: float


class Cifar:
    """The data and the networks of one request: each is read, or run, when it is first asked for."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.device = torch.device(request.device)
        self.images = cache(self._images)
        self.network = cache(self._network)
        self.said = cache(self._said)

    def _images(self, part: str) -> Images:
        folder = self.request.data_dir
        found = svhn(folder, "test") if part == "svhn" else cifar10(folder, part)
        most = QUICK_IMAGES if self.request.quick else len(found)
        return Images(found.inputs[:most], found.targets[:most], found.source)

    def _network(self, depth: int) -> CifarResNet:
        return pretrained(depth, self.request.data_dir).to(self.device)

    def ready(self, pixels: Tensor) -> Tensor:
        """Images as the networks take them, on the device."""
        return normalised(pixels.to(self.device).float() / 255.0)

    def pair(self, part: str) -> tuple[Tensor, Tensor]:
        """Images and classes to fit on or to score by."""
        images = self.images(part)
        return self.ready(images.pixels), images.targets.to(self.device)

    def crops(self, seed: int) -> tuple[Tensor, Tensor]:
        """Random crops of random training images."""
        images, targets = self.pair("train")
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(images), generator=generator)[:CROPS].to(self.device)
        return random_crops(images[rows], generator), targets[rows]

    def _said(self, depth: int, part: str) -> Said:
        return self.run(depth, *self.pair(part))

    @torch.no_grad()
    def run(self, depth: int, images: Tensor, targets: Tensor) -> Said:
        """Outputs, features and inputs of images: the last are the pixels, one row an image."""
        network, parts = self.network(depth), []
        synchronize(self.device)
        begin = time.perf_counter()
        for batch in images.split(AT_ONCE):
            features = network.features(batch)
            parts.append((network.fc(features), features))
        synchronize(self.device)
        seconds = time.perf_counter() - begin
        outputs, features = (torch.cat(column) for column in zip(*parts, strict=True))
        return Said(Outputs(outputs, targets, features, images.flatten(1)), seconds)
