"""Where inducing points start: k-means (mini-batch, streaming), random rows, per class, or given.

All randomness comes from one seeded generator and everything is in torch, so that no installed extra changes a number.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posthoc.errors import DataError, OptionError
from posthoc.fmgp.points import PointView
from posthoc.validation import as_numbers

PASSES, MAX_MINIBATCHES = 10, 100
"""k-means passes over the rows this often, but takes no more mini-batches than that."""


class Inducing(NamedTuple):
    """M starting places, and the output each belongs to."""

    z: dict[str, Tensor]  # blocks of (M, D_block)
    z_class: Tensor  # (M,)


@dataclass(frozen=True)
class NotKept:
    """Stands for a user's own inducing points in the options of a loaded head, whose file holds their hash alone."""

    digest: Any


def initial_inducing(
    inducing: Any, classes: Any, number: int, view: PointView, num_outputs: int, generator: torch.Generator
) -> Inducing:
    """The inducing points as training starts.

    Args:
        inducing: "kmeans", "random", "per_class", or points of the user: a tensor (M, D), or one for each block.
        classes: The output that each of the user's points belongs to; None: outputs at random, as in the paper, but
            evenly.
        number: M, for points that are chosen. No more than there are rows.
        view: The points of the fit.
        num_outputs: C.
        generator: Source of randomness.
    """
    if isinstance(inducing, NotKept):
        raise OptionError(
            "Expected the inducing points that were given to the first fit, which the head's file does not hold: "
            "to fit again, build FMGP(..., inducing=points)."
        )
    number = min(number, len(view))
    if isinstance(inducing, str) and inducing == "per_class":
        return per_class(view, number, generator)
    if isinstance(inducing, str):
        z = {"kmeans": kmeans, "random": random_points}[inducing](view, number, generator)
    else:
        spaces = view.coordinates.spaces
        z = view.coordinates.standardize(
            given_points(inducing, {space: view.coordinates.width(space) for space in spaces})
        )
    z = {space: block.to(view.coordinates.device) for space, block in z.items()}
    m = len(next(iter(z.values())))
    if classes is None:
        order = torch.randperm(num_outputs, generator=generator)
        return Inducing(z, order[torch.arange(m) % num_outputs][torch.randperm(m, generator=generator)])
    owners = as_numbers(classes, torch.long)
    if owners is None or owners.shape != (m,) or int(owners.min()) < 0 or int(owners.max()) >= num_outputs:
        raise OptionError(f"Expected {m} inducing_classes from 0 to {num_outputs - 1}, got {reprlib.repr(classes)}.")
    return Inducing(z, owners)


def random_points(source: PointView, m: int, generator: torch.Generator) -> dict[str, Tensor]:
    """m different rows."""
    return source.points(distinct(len(source), m, generator))


def kmeans(source: PointView, m: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Centers of m clusters, by mini-batch k-means (each center a running mean of what it was nearest to) from a
    k-means++ start on a sample. Where the kernel reads several blocks, each center is replaced by its nearest row of
    the sample, so that its blocks come from one data point."""
    n = len(source)
    if m >= n:
        return source.points(torch.arange(n))
    sample_rows = distinct(n, min(n, max(20 * m, 2000)), generator)
    # On the CPU: sums by index come in any order on a GPU, and the same seed must give the same numbers.
    sample = {space: block.cpu() for space, block in source.points(sample_rows).items()}
    joined = torch.cat(list(sample.values()), -1)
    centers = joined[plus_plus(joined, m, generator)].clone()
    weights = torch.zeros(m, dtype=joined.dtype)
    batch = min(n, max(10 * m, 1000))
    for _ in range(min(MAX_MINIBATCHES, max(1, PASSES * n // batch))):
        rows = torch.arange(n) if batch >= n else torch.randint(n, (batch,), generator=generator)
        x = torch.cat(list(source.points(rows).values()), -1).cpu()
        nearest = torch.cdist(x, centers).argmin(-1)
        counts = nearest.bincount(minlength=m).to(weights)
        sums = torch.zeros_like(centers).index_add_(0, nearest, x)
        weights += counts
        centers += (sums - counts[:, None] * centers) / weights.clamp_min(1.0)[:, None]
    if len(sample) == 1:
        (space,) = sample
        return {space: centers}
    closest = torch.cdist(centers, joined).argmin(-1)
    return {space: block[closest] for space, block in sample.items()}


def per_class(view: PointView, m: int, generator: torch.Generator) -> Inducing:
    """m rows spread evenly over the classes that occur, each inducing point owned by the class of its row. With fewer
    points than classes, some classes (drawn at random) have none and keep the prior's variance where B leaves them
    alone."""
    if view.outputs.targets is None:
        raise DataError('inducing="per_class" needs the targets of the points.')
    targets = view.outputs.targets.cpu()
    members = [(targets == c).nonzero().squeeze(1) for c in targets.unique()]
    shuffled = [rows[torch.randperm(len(rows), generator=generator)] for rows in members]
    order = torch.randperm(len(members), generator=generator).tolist()
    turns = [(turn, place, row) for place, c in enumerate(order) for turn, row in enumerate(shuffled[c].tolist())]
    rows = torch.tensor([row for _, _, row in sorted(turns)[:m]])
    return Inducing(view.points(rows), targets[rows].long())


def given_points(z: Any, widths: Mapping[str, int]) -> dict[str, Tensor]:
    """The user's own inducing points: a tensor (M, D), or one for each block that the kernel reads."""
    blocks = dict(z) if isinstance(z, Mapping) else {next(iter(widths)): z}
    if sorted(blocks) != sorted(widths):
        raise OptionError(
            f"Expected inducing points for {', '.join(widths)}, got them for {', '.join(sorted(blocks))}."
        )
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
    points = as_numbers(z, torch.float64)
    if points is None:
        raise OptionError(
            'Expected inducing to say where the points start ("kmeans" or "random"; of classes, "per_class"), or to be '
            f"points of your own, numbers of shape (M, D), got {reprlib.repr(z)}."
        )
    return points


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
        if float(ladder[-1]) <= 0.0:  # every row is already a center: duplicates fill the rest
            row = len(chosen) % len(x)
        else:
            row = min(int(torch.searchsorted(ladder, u * ladder[-1], right=True)), len(x) - 1)
        chosen.append(row)
        distance = torch.minimum(distance, (x - x[row]).square().sum(-1))
    return torch.tensor(chosen, device=x.device)
