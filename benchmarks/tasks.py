"""The problems that the speed benchmark is about: a network, and data it has not memorised."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posthoc import FMGP, Outputs
from posthoc.kernels import RBF, Space

__all__ = ["Task", "cifar10", "protein", "synthetic_classification", "synthetic_regression"]

POINTS = 5000


@dataclass
class Task:
    """A network, data to fit on and data to score on."""

    name: str
    likelihood: str
    network: nn.Sequential
    fit: tuple[Tensor, ...]  # (x, y), or (outputs, features, y) where the outputs are known
    score: tuple[Tensor, ...]
    note: str = ""

    @property
    def space(self) -> Space:
        return "inputs" if self.likelihood == "regression" else "features"

    @property
    def known(self) -> bool:
        """Whether the outputs are given and there is no network to run."""
        return len(self.fit) == 3

    def method(self, **options: Any) -> FMGP:
        """Our method as the reference is, the paper's: its kernel on the inputs (regression) or the features, inducing
        points for each class, Gaussian residuals."""
        options = {"kernel": RBF(on=self.space), "progress": False, **options}
        options |= {"variance": "per_output"} if self.likelihood == "classification" else {"residuals": "gaussian"}
        return FMGP(None if self.known else self.network, self.likelihood, **options)

    def default(self, **options: Any) -> FMGP:
        """Our method with nothing chosen."""
        return FMGP(None if self.known else self.network, self.likelihood, progress=False, **options)

    def data(self, rows: tuple[Tensor, ...]) -> Outputs | tuple[Tensor, ...]:
        """Rows in the form that `fit` and `predict` take."""
        return Outputs(rows[0], rows[2], features=rows[1]) if self.known else rows

    def look(self, *x: Tensor) -> tuple[Tensor, Tensor]:
        """The network's outputs and the kernel's raw coordinates, by running the network."""
        if self.known:
            self.network(x[1])  # a stand-in: it costs what a small network costs, its result is not used
            return x[0], x[1]
        if self.likelihood == "regression":
            return self.network(x[0]), x[0]
        features = self.network[:-1](x[0])
        return self.network[-1](features), features

    @torch.no_grad()
    def outputs(self) -> Outputs:
        """The network's outputs on the data to fit on, cached."""
        outputs, coordinates = self.look(*self.fit[:-1])
        return Outputs(outputs, self.fit[-1], **{self.space: coordinates})

    def double(self) -> Task:
        """The same in float64, network and all."""
        columns = ((c.double() if c.is_floating_point() else c for c in rows) for rows in (self.fit, self.score))
        fit, score = (tuple(c) for c in columns)
        return replace(self, network=copy.deepcopy(self.network).double(), fit=fit, score=score)

    def to(self, device: torch.device) -> Task:
        self.network.to(device)
        self.fit = tuple(t.to(device) for t in self.fit)
        self.score = tuple(t.to(device) for t in self.score)
        return self


def synthetic_regression(epochs: int = 10) -> Task:
    """9 inputs, a smooth function and noise whose spread depends on two of them."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3 * POINTS, 9, generator=g)
    spread = 0.1 + 0.9 * torch.sigmoid(3.0 * x[:, :1] - 2.0 * x[:, 1:2])
    y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + spread * torch.randn(len(x), 1, generator=g)
    network = tanh_network(9)
    train_network(network, x[:POINTS], y[:POINTS], F.mse_loss, epochs)
    fit, score = (x[POINTS:-POINTS], y[POINTS:-POINTS]), (x[-POINTS:], y[-POINTS:])
    return Task("regression", "regression", network, fit, score, "synthetic, heteroscedastic noise")


def synthetic_classification(epochs: int = 10) -> Task:
    """10 clusters in 32 dimensions. The network learns from clean labels; in one half of the space, the labels it then
    meets are wrong more and more often: its confidence is right in some places only."""
    g = torch.Generator().manual_seed(0)
    y = torch.randint(10, (3 * POINTS,), generator=g)
    x = 0.6 * torch.randn(10, 32, generator=g)[y] + torch.randn(len(y), 32, generator=g)
    network = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    train_network(network, x[:POINTS], y[:POINTS], F.cross_entropy, epochs)
    wrong = torch.rand(len(y), generator=g) < 0.5 * torch.sigmoid(3.0 * x[:, 0])
    y = torch.where(wrong, torch.randint(10, y.shape, generator=g), y)
    fit, score = (x[POINTS:-POINTS], y[POINTS:-POINTS]), (x[-POINTS:], y[-POINTS:])
    return Task("classification", "classification", network, fit, score, "synthetic, labels wrong in places")


def protein(root: Path, epochs: int = 20) -> Task:
    """UCI protein: the network learns from the first 80 %, we fit on the next 10 % and score on the last."""
    file = np.load(root / "uci" / "protein.npz")
    x, y = torch.from_numpy(file["inputs"]).float(), torch.from_numpy(file["targets"]).float()[:, None]
    first, second = int(0.8 * len(x)), int(0.9 * len(x))
    x = (x - x[:first].mean(0)) / x[:first].std(0)
    y = (y - y[:first].mean(0)) / y[:first].std(0)
    network = tanh_network(x.shape[1])
    train_network(network, x[:first], y[:first], F.mse_loss, epochs)
    fit, score = (x[first:second], y[first:second]), (x[second:], y[second:])
    return Task("protein", "regression", network, fit, score, "UCI protein")


def cifar10(root: Path, network: str) -> Task:
    """CIFAR-10 by a ResNet, as its outputs and features: fit on 5,000 test images, score on the other 5,000."""
    file = np.load(root / f"cifar10_{network}" / "test.npz")
    rows = [torch.from_numpy(file[key]).float() for key in ("outputs", "features")]
    rows.append(torch.from_numpy(file["targets"]).long())
    fit, score = tuple(r[:POINTS] for r in rows), tuple(r[POINTS:] for r in rows)
    stand_in = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    note = f"CIFAR-10, {network}, outputs known; the reference runs a small stand-in network whose result is ignored"
    return Task(f"cifar10 {network}", "classification", stand_in, fit, score, note)


def tanh_network(width: int) -> nn.Sequential:
    layers = (nn.Linear(width, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(200, 1))


def train_network(
    network: nn.Sequential, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor], epochs: int
) -> None:
    """Adam for some epochs, from weights that do not depend on what ran before."""
    g = torch.Generator().manual_seed(0)
    for layer in network:
        if isinstance(layer, nn.Linear):
            bound = 1.0 / math.sqrt(layer.in_features)
            nn.init.uniform_(layer.weight, -bound, bound, generator=g)
            nn.init.zeros_(layer.bias)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=g).split(128):
            optimizer.zero_grad()
            loss(network(x[rows]), y[rows]).backward()
            optimizer.step()
    network.requires_grad_(False).eval()
