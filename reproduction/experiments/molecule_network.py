"""The network for QM9: message passing between the atoms of a molecule, and the numbers that methods see of it.

The paper follows PyTorch Geometric's tutorial: NNConv and a GRU, three times, on complete graphs with distances and
chemical bonds, then Set2Set and two linear layers. This network uses parts of the same library. It differs in order to
learn the dipole moment in about a minute instead of hours:

- It has no bonds, which would need another library; elements and distances determine the molecule.
- A distance is expanded in Gaussians, and messages are SchNet's (CFConv): a vector for each edge, not a matrix.
- Besides Set2Set's summary, the embedding holds norms of sums of charges times positions, as in SchNet's dipole; with
  the right charges, the dipole moment is such a norm.

The embedding is the input of the last two linear layers, as in the paper.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor, nn
from torch_geometric import nn as geometric

from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError, TrainingError
from posthoc.validation import integer, known_device
from reproduction.data.molecules import ELEMENTS, Molecules

__all__ = ["EMBEDDING", "MoleculeNetwork", "complete_graphs", "embed", "head_of", "train_network"]

EMBEDDING, HIDDEN = 128, 64
"""Widths of the embedding and of the layer after it, as in the tutorial."""
GAUSSIANS, NEAR, FAR = 32, 0.8, 8.0
"""The number of Gaussians, and the range of their centers in Å."""
CUTOFF = 15.0
"""The cutoff of messages in Å; the atoms of a molecule of QM9 are at most 12 Å apart."""
WARM_UP = 0.02
"""The share of the training with an increasing learning rate."""
REPORTS = 10
"""Lines that a training logs."""


class MoleculeNetwork(nn.Module):
    """A network with one output a molecule, invariant to the order of atoms, to rotations and to translations.

    Args:
        width: The width of the atoms' states.
        layers: The number of rounds of messages.
    """

    element_rows: Tensor
    centers: Tensor

    def __init__(self, *, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        integer("width", width, 1)
        integer("layers", layers, 1)
        half = EMBEDDING // 2
        self.atoms = nn.Embedding(len(ELEMENTS), width)
        self.messages = nn.ModuleList(
            geometric.models.schnet.CFConv(width, width, width, filters(width), CUTOFF) for _ in range(layers)
        )
        self.updates = nn.ModuleList(nn.Sequential(nn.SiLU(), nn.Linear(width, width)) for _ in range(layers))
        self.to_summary, self.summary = nn.Linear(width, half // 2), geometric.Set2Set(half // 2, processing_steps=3)
        self.charges = nn.Linear(width, EMBEDDING - half)
        self.head = nn.Sequential(nn.Linear(EMBEDDING, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
        rows = torch.zeros(max(ELEMENTS.values()) + 1, dtype=torch.int64)
        rows[list(ELEMENTS.values())] = torch.arange(len(ELEMENTS))
        self.register_buffer("element_rows", rows, persistent=False)
        self.register_buffer("centers", torch.linspace(NEAR, FAR, GAUSSIANS), persistent=False)

    def forward(self, molecules: Molecules) -> Tensor:  # (N, 1)
        return self.head(self.features(molecules))

    def features(self, molecules: Molecules) -> Tensor:  # (N, 128)
        """The embedding, which is the input of the last two linear layers."""
        owners = torch.arange(len(molecules), device=molecules.sizes.device).repeat_interleave(molecules.sizes)
        edges = complete_graphs(molecules.sizes)
        distances = (molecules.positions[edges[0]] - molecules.positions[edges[1]]).norm(dim=1)
        expanded = torch.exp(-0.5 * ((distances[:, None] - self.centers) * (GAUSSIANS - 1) / (FAR - NEAR)) ** 2)
        states = self.atoms(self.element_rows[molecules.kinds.long()])
        for message, update in zip(self.messages, self.updates, strict=True):
            states = states + update(message(states, edges, distances, expanded))
        summary = self.summary(self.to_summary(states), owners, dim_size=len(molecules))
        return torch.cat([summary, self.dipoles(self.charges(states), molecules, owners)], 1)

    def dipoles(self, charges: Tensor, molecules: Molecules, owners: Tensor) -> Tensor:  # (N, K) from (A, K)
        """|Σᵢ qᵢ rᵢ| for each kind of charge, with positions relative to the center of the molecule."""

        def total(values: Tensor) -> Tensor:
            return values.new_zeros(len(molecules), *values.shape[1:]).index_add(0, owners, values)

        centers = total(molecules.positions) / molecules.sizes[:, None]
        vectors = total(charges[:, :, None] * (molecules.positions - centers[owners])[:, None, :])
        return (vectors.square().sum(2) + 1e-6).sqrt()  # a norm has no gradient at zero


def filters(width: int) -> nn.Module:
    """The network from an expanded distance to the factors of a message."""
    return nn.Sequential(nn.Linear(GAUSSIANS, width), nn.SiLU(), nn.Linear(width, width))


def complete_graphs(sizes: Tensor) -> Tensor:  # (2, E) from (N,)
    """Edges (source, target) from each atom of a molecule to every other, ordered by target."""
    firsts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)  # for each atom: the first atom of its molecule
    others = (sizes - 1).repeat_interleave(sizes)  # for each atom: the number of its edges
    target = torch.arange(len(others), device=sizes.device).repeat_interleave(others)
    place = torch.arange(len(target), device=sizes.device) - (others.cumsum(0) - others)[target]
    source = firsts[target] + place
    return torch.stack([source + (source >= target), target])  # without the atom itself


def train_network(
    molecules: Molecules,
    *,
    seed: int,
    device: str | torch.device = "cpu",
    steps: int,
    batch: int = 256,
    learning_rate: float = 2e-3,
    width: int = 128,
    layers: int = 3,
    log: Callable[[str], None] = lambda line: None,
) -> MoleculeNetwork:
    """Trains the network by Adam on squared errors with a cosine schedule.

    The seed determines the result; on a GPU only up to rounding, since the order of sums is not fixed.

    Args:
        molecules: The training molecules.
        seed: Seeds the weights and the batches.
        device: Where the network is trained.
        steps: The number of steps.
        batch: Molecules in a batch.
        learning_rate: The highest learning rate.
        width: See `MoleculeNetwork`.
        layers: See `MoleculeNetwork`.
        log: Is called with lines about the progress.
    """
    integer("steps", steps, 1)
    integer("batch", batch, 1)
    on = known_device(device) or torch.device("cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = MoleculeNetwork(width=width, layers=layers)
    scale = scale_last_layer(network, molecules.targets)
    network.to(on).train()
    data, optimizer = molecules.to(on), torch.optim.Adam(network.parameters(), learning_rate, fused=on.type == "cuda")
    errors: list[Tensor] = []  # since the last report
    for step, rows in enumerate(islice(batches(len(molecules), batch, seed), steps), 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * schedule((step - 1) / steps)
        chosen = data[rows.to(on)]
        residuals = (network(chosen).squeeze(1) - chosen.targets) / scale
        optimizer.zero_grad()
        residuals.square().mean().backward()
        optimizer.step()
        errors.append(residuals.detach().abs().mean())
        if step * REPORTS // steps > (step - 1) * REPORTS // steps:
            error = float(torch.stack(errors).mean()) * scale
            if not math.isfinite(error):
                raise TrainingError(f"Expected finite errors, found {error} at step {step}: lower learning_rate.")
            log(f"step {step}: mean absolute error {error:.4f} in training")
            errors.clear()
    return network.eval()


def scale_last_layer(network: MoleculeNetwork, targets: Tensor) -> float:
    """Initializes the last layer to the mean of the targets and scales it by their deviation, which it returns."""
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
    """Endless batches of row numbers, epoch by epoch, in orders that the seed determines."""
    generator = torch.Generator().manual_seed(seed)
    used = max(count // batch, 1) * batch  # a last batch of a few rows would be a noisy step
    while True:
        yield from torch.randperm(count, generator=generator)[:used].split(batch)


def schedule(share: float) -> float:
    """The factor of the learning rate after this share of the training."""
    return min(1.0, (share + 1e-3) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * share))


@torch.no_grad()
def embed(
    network: MoleculeNetwork, molecules: Molecules, device: str | torch.device = "cpu", batch: int = 1024
) -> Outputs:
    """Outputs for the methods: the embedding as inputs, the hidden layer after it as features, outputs and targets."""
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
    """A copy of the last two linear layers, which map the embedding to the dipole moment."""
    return copy.deepcopy(network.head).cpu().eval()
