"""A one-dimensional regression problem in the manner of the paper's Figure 1: three clusters, two gaps, and noise whose
spread is a sinusoid."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SPANS = ((-7.2, -4.8), (-1.6, 1.6), (4.8, 7.2))
"""Where there are data; between them are the gaps."""


def heteroscedastic(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """n points (x, y), each (n, 1) in float32: x uniform over the spans, y the signal and its noise."""
    starts, ends = torch.tensor(SPANS).unbind(-1)
    lengths = ends - starts
    span = torch.multinomial(lengths, n, replacement=True, generator=generator)
    x = (starts[span] + lengths[span] * torch.rand(n, generator=generator))[:, None]
    signal = 0.8 * torch.sin(0.45 * x) + 0.15 * torch.cos(1.5 * x)
    noise_std = 0.03 + 0.22 * torch.sin(1.3 * x + 0.6).square()
    return x, signal + noise_std * torch.randn(n, 1, generator=generator)


def untrained(seed: int) -> nn.Sequential:
    """Two hidden layers of 50 tanh units."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))


def train_network(x: Tensor, y: Tensor, seed: int, *, steps: int = 1500) -> nn.Module:
    """The network of the figure, trained on all the points."""
    model = untrained(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        schedule.step()
    return model
