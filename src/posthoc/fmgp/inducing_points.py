"""Where inducing points start: k-means (mini-batch, streaming), random rows, per class, or given.

All randomness comes from one seeded generator and everything is in torch, so that no installed extra changes a number.
"""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from posthoc.errors import DataError, OptionError, PosthocWarning
from posthoc.validation import as_numbers

__all__ = [
    "Inducing",
    "NotKept",
    "PointSource",
    "as_points",
    "given",
    "kmeans",
    "per_class",
    "random_classes",
    "random_points",
]


class Inducing(NamedTuple):
    """M starting places, and the output each belongs to."""

    z: dict[str, Tensor]  # blocks of (M, D_block)
    z_class: Tensor  # (M,)


@dataclass(frozen=True)
class NotKept:
    """Stands for a user's own inducing points in the options of a loaded head, whose file holds their hash alone."""

    digest: Any


class PointSource(Protocol):
    """Rows of kernel coordinates, read a few at a time."""

    def __len__(self) -> int: ...

    def points(self, rows: Tensor) -> dict[str, Tensor]:
        """The coordinates of some rows, in float64."""
        ...


def random_points(source: PointSource, m: int, generator: torch.Generator) -> dict[str, Tensor]:
    """m different rows."""
    m = at_most(m, len(source))
    return source.points(distinct(len(source), m, generator))


def kmeans(source: PointSource, m: int, generator: torch.Generator, *, passes: int = 10) -> dict[str, Tensor]:
    """Centres of m clusters, by mini-batch k-means (each centre a running mean of what it was nearest to) from a
    k-means++ start on a sample. Where the kernel reads several blocks, each centre is replaced by its nearest row of
    the sample, so that its blocks come from one data point."""
    n = len(source)
    m = at_most(m, n)
    if m == n:
        return source.points(torch.arange(n))
    sample_rows = distinct(n, min(n, max(20 * m, 2000)), generator)
    # On the CPU: sums by index come in any order on a GPU, and the same seed must give the same numbers.
    sample = {space: block.cpu() for space, block in source.points(sample_rows).items()}
    joined = join(sample)
    centres = joined[plus_plus(joined, m, generator)].clone()
    weights = torch.zeros(m, dtype=joined.dtype, device=joined.device)
    batch = min(n, max(10 * m, 1000))
    for rows in minibatches(n, batch, passes, generator):
        x = join(source.points(rows)).cpu()
        nearest = torch.cdist(x, centres).argmin(-1)
        counts = torch.zeros_like(weights).index_add_(0, nearest, torch.ones_like(weights[:1]).expand(len(x)))
        sums = torch.zeros_like(centres).index_add_(0, nearest, x)
        weights += counts
        step = torch.where(counts > 0, 1.0 / weights.clamp_min(1.0), torch.zeros_like(weights))
        centres += step[:, None] * (sums - counts[:, None] * centres)
    if len(sample) == 1:
        (space,) = sample
        return {space: centres}
    closest = torch.cdist(centres, joined).argmin(-1)
    return {space: block[closest] for space, block in sample.items()}


def per_class(source: PointSource, targets: Tensor, m: int, generator: torch.Generator) -> Inducing:
    """m rows spread evenly over the classes that occur, each inducing point owned by the class of its row. With fewer
    points than classes, some classes (drawn at random) have none and keep the prior's variance where B leaves them
    alone."""
    m = at_most(m, len(source))
    targets = targets.cpu()
    queues = {
        int(c): iter(rows[torch.randperm(len(rows), generator=generator)].tolist())
        for c in targets.unique()
        for rows in [(targets == c).nonzero().squeeze(1)]
    }
    order = [list(queues)[i] for i in torch.randperm(len(queues), generator=generator)]
    chosen: list[int] = []
    while len(chosen) < m:
        for c in order:
            row = next(queues[c], None)
            if row is not None and len(chosen) < m:
                chosen.append(row)
    rows = torch.tensor(chosen)
    return Inducing(source.points(rows), targets[rows].long())


def random_classes(m: int, num_classes: int, generator: torch.Generator) -> Tensor:  # (m,)
    """A class for each inducing point, at random as in the paper, but evenly."""
    order = torch.randperm(num_classes, generator=generator)
    return order[torch.arange(m) % num_classes][torch.randperm(m, generator=generator)]


def given(z: Any, spaces: list[str], widths: Mapping[str, int]) -> dict[str, Tensor]:
    """The user's own inducing points: a tensor (M, D), or one for each block the kernel reads."""
    blocks = dict(z) if isinstance(z, Mapping) else dict.fromkeys(spaces[:1], z)
    if sorted(blocks) != sorted(spaces):
        wanted, found = ", ".join(spaces), ", ".join(sorted(blocks))
        raise OptionError(f"Expected inducing points for {wanted}, got them for {found}.")
    tensors = {space: as_points(block) for space, block in blocks.items()}
    for space, block in tensors.items():
        if block.ndim != 2 or block.shape[1] != widths[space] or not len(block):
            raise DataError(
                f"Expected inducing points of shape (M, {widths[space]}) for {space}, got {tuple(block.shape)}."
            )
        if not bool(block.isfinite().all()):
            raise DataError(f"Expected finite inducing points, got NaN or infinity in those for {space}.")
    if len({len(block) for block in tensors.values()}) > 1:
        raise DataError("Expected as many inducing points in every block.")
    return tensors


def as_points(z: Any) -> Tensor:
    """The user's own points in one block, float64."""
    found = as_numbers(z, torch.float64)
    if found is None:
        raise OptionError(
            'Expected inducing to say where the points start ("kmeans" or "random"; of classes, "per_class"), or to be '
            f"points of your own, numbers of shape (M, D), got {reprlib.repr(z)}."
        )
    return found


def at_most(m: int, n: int) -> int:
    if m > n:
        warnings.warn(
            f"Asked for {m} inducing points but there are only {n} data points: using {n}.",
            PosthocWarning,
            stacklevel=4,
        )
    return min(m, n)


def distinct(n: int, m: int, generator: torch.Generator) -> Tensor:  # (m,)
    """m different numbers below n, in time that does not grow with n where m is far below it."""
    if n <= 100 * m:
        return torch.randperm(n, generator=generator)[:m]
    chosen = torch.randint(n, (2 * m,), generator=generator).unique()
    return chosen[torch.randperm(len(chosen), generator=generator)[:m]]


def plus_plus(x: Tensor, m: int, generator: torch.Generator) -> Tensor:  # (m,)
    """k-means++: each next row is drawn with probability proportional to its squared distance to those drawn."""
    chosen = [int(torch.randint(len(x), (1,), generator=generator))]
    distance = (x - x[chosen[0]]).square().sum(-1)
    for u in torch.rand(m - 1, generator=generator, dtype=torch.float64).tolist():
        ladder = distance.cumsum(0)
        if float(ladder[-1]) <= 0.0:  # every row is already a centre: duplicates fill the rest
            row = len(chosen) % len(x)
        else:
            row = min(int(torch.searchsorted(ladder, u * ladder[-1], right=True)), len(x) - 1)
        chosen.append(row)
        distance = torch.minimum(distance, (x - x[row]).square().sum(-1))
    return torch.tensor(chosen, device=x.device)


def minibatches(n: int, batch: int, passes: int, generator: torch.Generator) -> Iterator[Tensor]:
    """About `passes` passes over n rows, and no more than 100 batches in all."""
    for _ in range(min(100, max(1, passes * n // batch))):
        yield torch.arange(n) if batch >= n else torch.randint(n, (batch,), generator=generator)


def join(points: Mapping[str, Tensor]) -> Tensor:
    return torch.cat(list(points.values()), dim=-1) if len(points) > 1 else next(iter(points.values()))
