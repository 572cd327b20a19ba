"""The paper's networks for tables, three layers of 200 tanh units, and their data."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import pairwise

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from posthoc.evaluate.cost import versions
from posthoc.io import atomic_path, require_folder
from reproduction.data import load
from reproduction.data.files import cache_folder
from reproduction.experiments.experiment import Request

__all__ = ["Problem", "learn", "mlp", "problem"]

EPOCHS, BATCH = 30, 512
QUICK_ROWS = 300
STAND_INS_SHUFFLED = ("airline", "taxi")
"""Whose rows are in the order of time, over more months than the paper's: their order is not the paper's either."""

Rows = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """A trained network, and the rows that it has learnt from, that methods choose by, and that they are judged by."""

    network: nn.Sequential
    train: Rows
    val: Rows
    test: Rows
    source: str


def problem(name: str, seed: int, request: Request) -> Problem:
    """A data set in its three parts, one split for all seeds, and the network of a seed, trained on the first."""
    data = load(name, request.data_dir)
    source = data.source
    if name in STAND_INS_SHUFFLED:
        data, source = data.shuffled(0), f"{source}; rows shuffled"
    if request.quick:
        data = data[:QUICK_ROWS]
    parts = data.split().standardized()
    device = torch.device(request.device)
    train, val, test = ((part.inputs.to(device), part.targets[:, None].to(device)) for part in parts)
    network = trained(train, seed, source, epochs=2 if request.quick else EPOCHS)
    return Problem(network, train, val, test, source)


def trained(train: Rows, seed: int, source: str, epochs: int) -> nn.Sequential:
    """The network of a seed. It is kept in the cache, since several experiments look at the same."""
    x, _ = train
    recipe = json.dumps([source, list(x.shape), seed, epochs, BATCH, x.device.type, versions()], sort_keys=True)
    path = cache_folder() / "networks" / f"mlp-{hashlib.sha256(recipe.encode()).hexdigest()[:24]}.safetensors"
    network = mlp(x.shape[1], seed)
    if path.exists():
        network.load_state_dict(load_file(path))
        return network.to(x.device).eval()
    learn(network.to(x.device), train, seed, epochs=epochs)
    require_folder(path.parent)
    with atomic_path(path) as temporary:
        save_file(network.state_dict(), temporary)
    return network.eval()


def mlp(width: int, seed: int) -> nn.Sequential:
    """Three layers of 200 tanh units."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        hidden = [layer for a, b in pairwise([width, 200, 200, 200]) for layer in (nn.Linear(a, b), nn.Tanh())]
        return nn.Sequential(*hidden, nn.Linear(200, 1))


def learn(network: nn.Sequential, rows: Rows, seed: int, *, epochs: int = EPOCHS, batch_size: int = BATCH) -> None:
    """Adam with a cosine schedule on the squared error."""
    x, y = rows
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs * -(-len(x) // batch_size))
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).to(x.device).split(batch_size):
            optimiser.zero_grad()
            (network(x[batch]) - y[batch]).square().mean().backward()
            optimiser.step()
            schedule.step()
