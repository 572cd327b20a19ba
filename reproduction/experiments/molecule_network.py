"""The network of QM9: message passing between the atoms of a molecule, and the numbers that methods see of it.

The paper follows PyTorch Geometric's tutorial: NNConv and a GRU, three times, on complete graphs with distances and
chemical bonds, then Set2Set and two linear layers. This one is made of the same library's parts, and differs where that
learns the dipole moment in about a minute instead of hours:

- There are no bonds, which would need another library to be found: elements and distances say it all.
- A distance is spread over Gaussians, and messages are SchNet's (CFConv): a filter of numbers an edge, not a matrix.
- Beside Set2Set's summary the embedding has the lengths of sums of charges times positions, as SchNet's dipole has
  them: the dipole moment is one such length, where the charges are right.

What enters the last two linear layers is the embedding, as in the paper.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError, MissingExtraError, OptionError, TrainingError
from posthoc.validation import integer, known_device
from reproduction.data.molecules import ELEMENTS, Molecules

__all__ = ["EMBEDDING", "MoleculeNetwork", "complete_graphs", "embed", "head_of", "train_network"]

EMBEDDING, HIDDEN = 128, 64
"""How many numbers the embedding has, and the layer after it: the tutorial's."""
GAUSSIANS, NEAR, FAR = 32, 0.8, 8.0
"""How many a distance is spread over, and between which distances, in Å."""
CUTOFF = 15.0
"""Å beyond which messages would end; the atoms of QM9's molecules are at most 12 apart."""
WARM_UP = 0.02
"""The share of the training in which the learning rate rises."""
REPORTS = 10
"""Lines about a training."""


class MoleculeNetwork(nn.Module):
    """A number for each molecule; the same however its atoms are numbered and wherever it is in space."""

    places: Tensor
    centres: Tensor

    def __init__(self, *, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        integer("width", width, 1)
        integer("layers", layers, 1)
        geometric = require_geometric()
        half = EMBEDDING // 2
        self.atoms = nn.Embedding(len(ELEMENTS), width)
        self.messages = nn.ModuleList(
            geometric.models.schnet.CFConv(width, width, width, filters(width), CUTOFF) for _ in range(layers)
        )
        self.updates = nn.ModuleList(nn.Sequential(nn.SiLU(), nn.Linear(width, width)) for _ in range(layers))
        self.summarised, self.summary = nn.Linear(width, half // 2), geometric.Set2Set(half // 2, processing_steps=3)
        self.charges = nn.Linear(width, EMBEDDING - half)
        self.head = nn.Sequential(nn.Linear(EMBEDDING, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
        places = torch.zeros(max(ELEMENTS.values()) + 1, dtype=torch.int64)
        places[list(ELEMENTS.values())] = torch.arange(len(ELEMENTS))
        self.register_buffer("places", places, persistent=False)
        self.register_buffer("centres", torch.linspace(NEAR, FAR, GAUSSIANS), persistent=False)

    def forward(self, molecules: Molecules) -> Tensor:  # (N, 1)
        return self.head(self.features(molecules))

    def features(self, molecules: Molecules) -> Tensor:  # (N, 128)
        """The embedding: what enters the last two linear layers."""
        owners = torch.arange(len(molecules), device=molecules.sizes.device).repeat_interleave(molecules.sizes)
        edges = complete_graphs(molecules.sizes)
        distances = (molecules.positions[edges[0]] - molecules.positions[edges[1]]).norm(dim=1)
        spread = torch.exp(-0.5 * ((distances[:, None] - self.centres) * (GAUSSIANS - 1) / (FAR - NEAR)) ** 2)
        states = self.atoms(self.places[molecules.kinds.long()])
        for message, update in zip(self.messages, self.updates, strict=True):
            states = states + update(message(states, edges, distances, spread))
        summary = self.summary(self.summarised(states), owners, dim_size=len(molecules))
        return torch.cat([summary, self.dipoles(self.charges(states), molecules, owners)], 1)

    def dipoles(self, charges: Tensor, molecules: Molecules, owners: Tensor) -> Tensor:  # (N, K) from (A, K)
        """|Σᵢ qᵢ rᵢ| for each kind of charge, with positions from the middle of the molecule."""

        def total(values: Tensor) -> Tensor:
            return values.new_zeros(len(molecules), *values.shape[1:]).index_add(0, owners, values)

        middles = total(molecules.positions) / molecules.sizes[:, None]
        vectors = total(charges[:, :, None] * (molecules.positions - middles[owners])[:, None, :])
        return (vectors.square().sum(2) + 1e-6).sqrt()  # a length has no slope at zero


def filters(width: int) -> nn.Module:
    """From a distance, spread over Gaussians, to what a message is multiplied by."""
    return nn.Sequential(nn.Linear(GAUSSIANS, width), nn.SiLU(), nn.Linear(width, width))


def require_geometric() -> Any:
    """PyTorch Geometric's `nn`, or an error that says how to install it."""
    try:
        from torch_geometric import nn as geometric
    except ImportError as error:
        raise MissingExtraError("torch-geometric", "reproduction", "The network for molecules") from error
    return geometric


def complete_graphs(sizes: Tensor) -> Tensor:  # (2, E) from (N,)
    """Every atom of a molecule to every other of it, in order of the atom that is told."""
    firsts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)  # of an atom: the first of its molecule
    others = (sizes - 1).repeat_interleave(sizes)  # of an atom: to how many it is joined
    told = torch.arange(len(others), device=sizes.device).repeat_interleave(others)
    place = torch.arange(len(told), device=sizes.device) - (others.cumsum(0) - others)[told]
    teller = firsts[told] + place
    return torch.stack([teller + (teller >= told), told])  # past the atom itself


def train_network(
    molecules: Molecules,
    *,
    seed: int,
    device: str | torch.device = "cpu",
    steps: int | None = None,
    seconds: float | None = None,
    batch: int = 256,
    learning_rate: float = 2e-3,
    width: int = 128,
    layers: int = 3,
    say: Callable[[str], None] = lambda line: None,
) -> MoleculeNetwork:
    """The network, trained by Adam on squared errors for so many steps or for so long; the learning rate falls as a
    cosine. With `steps` the seed decides all of it; on a GPU up to rounding, since sums are in no fixed order there."""
    length = length_of(steps, seconds)
    integer("batch", batch, 1)
    on = known_device(device) or torch.device("cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = MoleculeNetwork(width=width, layers=layers)
    spread = start_from(network, molecules.targets)
    network.to(on).train()
    data, optimiser = molecules.to(on), torch.optim.Adam(network.parameters(), learning_rate, fused=on.type == "cuda")
    begin, reported = time.perf_counter(), 0
    errors: list[Tensor] = []  # since the last report
    for step, rows in enumerate(batches(len(molecules), batch, seed)):
        elapsed = time.perf_counter() - begin
        share = (step if steps is not None else elapsed) / length
        if step and share * REPORTS >= reported + 1:
            reported, error = int(share * REPORTS), float(torch.stack(errors).mean()) * spread
            if not math.isfinite(error):
                raise TrainingError(f"Expected finite errors, found {error} before step {step}: lower learning_rate.")
            say(f"step {step}, {elapsed:.0f} s: mean absolute error {error:.4f} in training")
            errors.clear()
            if share >= 1:
                break
        for group in optimiser.param_groups:
            group["lr"] = learning_rate * scheduled(share)
        chosen = data[rows.to(on)]
        residuals = (network(chosen).squeeze(1) - chosen.targets) / spread
        optimiser.zero_grad()
        residuals.square().mean().backward()
        optimiser.step()
        errors.append(residuals.detach().abs().mean())
    return network.eval()


def length_of(steps: int | None, seconds: float | None) -> float:
    """How long a training is, in steps or in seconds, whichever is given."""
    if steps is not None and seconds is None:
        return integer("steps", steps, 1)
    if steps is None and seconds is not None and 0 < seconds < math.inf:
        return seconds
    raise OptionError(
        f"Expected either steps or a positive number of seconds, got steps={steps} and seconds={seconds}."
    )


def start_from(network: MoleculeNetwork, targets: Tensor) -> float:
    """Has the last layer begin at the targets' mean and in their spread, which it returns: what the network says is in
    their units, and its weights need not grow to reach them."""
    mean, spread = float(targets.double().mean()), float(targets.double().std(unbiased=False))
    if not (math.isfinite(spread) and spread > 0):
        raise DataError(f"Expected targets that differ, got a spread of {spread}.")
    last = network.head[-1]
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.weight.mul_(spread)
        last.bias.fill_(mean)
    return spread


def batches(count: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Rows, every one once before any comes again, in orders that follow from the seed; without end."""
    generator = torch.Generator().manual_seed(seed)
    whole = max(count // batch, 1) * batch  # a last batch of a few rows would be a noisy step
    while True:
        yield from torch.randperm(count, generator=generator)[:whole].split(batch)


def scheduled(share: float) -> float:
    """What the learning rate is multiplied by after this share of the training."""
    return min(1.0, (share + 1e-3) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * share))


@torch.no_grad()
def embed(
    network: MoleculeNetwork, molecules: Molecules, device: str | torch.device = "cpu", batch: int = 1024
) -> Outputs:
    """What methods see of the molecules: the embedding as inputs, the hidden layer after it as features, what the
    network says and what is true."""
    integer("batch", batch, 1)
    on = known_device(device) or torch.device("cpu")
    network.to(on).eval()
    parts = []
    for rows in torch.arange(len(molecules)).split(batch):
        inputs = network.features(molecules[rows].to(on))
        features = network.head[:-1](inputs)
        parts.append((network.head[-1](features).cpu(), features.cpu(), inputs.cpu()))
    outputs, features, inputs = (torch.cat(part) for part in zip(*parts, strict=True))
    return Outputs(outputs, molecules.targets.cpu()[:, None], features, inputs)


def head_of(network: MoleculeNetwork) -> nn.Sequential:
    """A copy of the last two linear layers: a network from the embedding to the dipole moment."""
    return copy.deepcopy(network.head).cpu().eval()
