"""`Law`: how standardised residuals z = (y - mean) / std are spread, as a mixture of normals that all points share.

Residuals are rarely Gaussian: those of delays and prices are skewed and have long tails. A law has mean zero, since the
predictive mean is the network's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["NORMAL", "Law"]

SPREADS = torch.logspace(-4.0, 5.0, 19, base=2.0, dtype=torch.float64)
STEP, REACH, FAR = 0.25, 2.0, 3.0
"""The normals that a mixture is made of, in units of z: each spread s at shifts of up to REACH or FAR · s, one every
STEP or s, whichever is more. A long tail is made of normals far out; wide ones in the middle would make two."""
PRIOR_ROWS = 50.0
"""How many rows of data what is known before counts for."""
ROUNDS = 150
"""Rounds of EM; more would follow the sample rather than the law."""
TAIL, GROUPS = 250, 500
"""EM sees the so many lowest and highest values one by one, and those between in so many groups."""
NEGLIGIBLE = 1e-6
"""Normals of less weight are left out."""
TINY = 1e-9
"""A shift that is none."""
AT_ONCE = 2**21
"""Numbers in the largest tensor, values x normals: 16 MB."""


@dataclass(frozen=True, eq=False)
class Law:
    """For each of C outputs, Σ_k weights_k N(shifts_k, spreads_k²), with mean zero. Values have shape (..., C), or any
    if C is 1."""

    weights: Tensor  # (C, K), float64; each row sums to 1
    shifts: Tensor  # (C, K)
    spreads: Tensor  # (C, K)

    @classmethod
    def of(cls, z: Tensor, prior: Law | None = None) -> Law:
        """The law that made some residuals (N, C), by EM for the weights of a grid of normals and of those of the law
        that is expected, which counts for some rows: the standard normal, if no other."""
        prior = prior if prior is not None else NORMAL
        prior = prior.to(z.device).expanded(z.shape[1])
        grid = normals().to(z.device)
        shifts = torch.cat([grid[:, 0].expand(z.shape[1], -1), prior.shifts], -1)
        spreads = torch.cat([grid[:, 1].expand(z.shape[1], -1), prior.spreads], -1)
        rows = torch.nn.functional.pad(PRIOR_ROWS * prior.weights, (len(grid), 0))
        columns = zip(z.double().T, shifts, spreads, rows, strict=True)
        weights = torch.stack([mixed(*column) for column in columns])
        kept = (weights > NEGLIGIBLE).any(0)
        weights = weights[:, kept] / weights[:, kept].sum(-1, keepdim=True)
        shifts = shifts[:, kept] - (weights * shifts[:, kept]).sum(-1, keepdim=True)  # as those left out had some
        return cls(weights, shifts, spreads[:, kept])

    def expanded(self, outputs: int, copies: int = 1) -> Law:
        """The same law for so many outputs, if it was for one, each normal in so many equal parts."""
        parts = (self.weights / copies, self.shifts, self.spreads)
        return Law(*(part.repeat_interleave(copies, -1).expand(outputs, -1) for part in parts))

    @property
    def variance(self) -> Tensor:  # (C,)
        """The variance of z."""
        return (self.weights * (self.shifts.square() + self.spreads.square())).sum(-1)

    def divided(self, scale: Tensor) -> Law:
        """The law of z / scale, with a scale (C,) for each output."""
        return Law(self.weights, self.shifts / scale[:, None], self.spreads / scale[:, None])

    def to(self, device: str | torch.device) -> Law:
        """The same on another device."""
        return Law(self.weights.to(device), self.shifts.to(device), self.spreads.to(device))

    def log_density(self, z: Tensor) -> Tensor:
        """log p(z), as all that follows in float64."""
        return self._of_parts(self._log_density, z)

    def cdf(self, z: Tensor) -> Tensor:
        """The probability of a residual of at most z."""
        return self._of_parts(self._cdf, z)

    def crps(self, z: Tensor) -> Tensor:
        """The continuous ranked probability score: E|X - z| - ½ E|X - X'|."""
        apart, wide = (
            self.shifts[:, :, None] - self.shifts[:, None],
            self.spreads[:, :, None].hypot(self.spreads[:, None]),
        )
        pairs = torch.einsum("cj,ck,cjk->c", self.weights, self.weights, size(apart, wide))
        return (
            self._of_parts(lambda part: (self.weights * size(part - self.shifts, self.spreads)).sum(-1), z)
            - 0.5 * pairs
        )

    def quantile(self, level: Tensor) -> Tensor:
        """The z whose `cdf` is the level, for levels (..., C) in (0, 1), by Newton's method within a bracket."""
        level = level.double().broadcast_to(torch.broadcast_shapes(level.shape, self.weights.shape[:1]))
        return self._of_parts(self._quantile, level)

    def sample(self, shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Independent draws of shape (..., C)."""
        device = self.weights.device
        draw = torch.rand(shape, dtype=torch.float64, device=device, generator=generator)
        noise = torch.randn(shape, dtype=torch.float64, device=device, generator=generator)
        ends = self.weights.cumsum(-1)[:, :-1].contiguous()
        columns = draw.reshape(-1, len(ends)).T.contiguous()
        k = torch.searchsorted(ends, columns, right=True)
        shift, spread = (part.gather(-1, k).T.reshape(shape) for part in (self.shifts, self.spreads))
        return shift + spread * noise

    def _log_density(self, z: Tensor) -> Tensor:  # z (..., C, 1) -> (..., C)
        fit = ((z - self.shifts) / self.spreads).square() + math.log(2.0 * math.pi)
        return (self.weights.log() - self.spreads.log() - 0.5 * fit).logsumexp(-1)

    def _cdf(self, z: Tensor) -> Tensor:
        return (self.weights * torch.special.ndtr((z - self.shifts) / self.spreads)).sum(-1)

    def _quantile(self, level: Tensor) -> Tensor:
        # The quantile of a mixture lies among those of its parts.
        parts = self.shifts + self.spreads * torch.special.ndtri(level)
        low, high, level = parts.amin(-1), parts.amax(-1), level.squeeze(-1)
        z = 0.5 * (low + high)
        for _ in range(200):
            over = self._cdf(z[..., None]) - level
            low, high = torch.where(over < 0, z, low), torch.where(over < 0, high, z)
            newton = z - over / self._log_density(z[..., None]).exp()
            following = torch.where((newton > low) & (newton < high), newton, 0.5 * (low + high))
            if bool(((following - z).abs() <= 1e-14 * (1.0 + z.abs())).all()):
                break
            z = following
        return following

    def _of_parts(self, function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
        """function(z) in parts, so that values x normals stay small."""
        outputs, k = self.weights.shape
        rows = z.double().reshape(-1, outputs, 1)
        parts = rows.split(max(1, AT_ONCE // (outputs * k)))
        return torch.cat([function(part) for part in parts]).reshape(z.shape)


NORMAL = Law(*(torch.tensor([[value]], dtype=torch.float64) for value in (1.0, 0.0, 1.0)))
"""The standard normal."""


def size(mean: Tensor, std: Tensor) -> Tensor:
    """E|X| of a normal."""
    z = mean / std
    return mean * torch.erf(z / math.sqrt(2.0)) + std * math.sqrt(2.0 / math.pi) * torch.exp(-0.5 * z.square())


def normals() -> Tensor:  # (K, 2)
    """Shifts and spreads of the grid."""
    found = []
    for spread in SPREADS.tolist():
        step = max(STEP, spread)
        count = int(max(REACH, FAR * spread) / step)
        found += [(step * i, spread) for i in range(-count, count + 1)]
    return torch.tensor(found, dtype=torch.float64)


def mixed(z: Tensor, shifts: Tensor, spreads: Tensor, prior: Tensor) -> Tensor:  # (K,)
    """The weights of normals under which z are most likely, among those with mean zero. `prior` says of how many more
    rows it is known which of the normals they come from; others that reach further than z are left out."""
    values, counts = grouped(z)
    fit = -0.5 * ((values[:, None] - shifts) / spreads).square() - spreads.log()
    possible = (torch.maximum(shifts.abs(), spreads) <= z.abs().max()) | (prior > 0)
    weights = balanced(prior + prior.sum() / len(prior) * possible, shifts)
    for _ in range(ROUNDS):
        share = (weights.log() + fit).softmax(-1)
        weights = balanced(counts @ share + prior, shifts)
    return weights


def balanced(rows: Tensor, shifts: Tensor) -> Tensor:  # (K,)
    """The weights w that are most likely given how many rows each normal has, Σ n_k log w_k, among those with Σ w_k = 1
    and Σ w_k m_k = 0: n_k / (1 + λ m_k), the λ found among many at a time."""
    share = rows / rows.sum()
    places, where = shifts.unique(return_inverse=True)
    mass = torch.zeros_like(places).index_add(0, where, share)
    places, mass = places[mass > 0], mass[mass > 0]
    low, high = -1.0 / places.max().clamp_min(TINY), -1.0 / places.min().clamp_max(-TINY)
    parts = torch.linspace(0.0, 1.0, 2**7 + 1, dtype=rows.dtype, device=rows.device)
    for _ in range(9):
        tried = low + (high - low) * parts
        heavy = (mass * places / (1.0 + tried[:, None] * places)).sum(-1) > 0  # it falls as λ grows
        first = heavy.long().sum().clamp(1, len(parts) - 1)  # that is not
        low, high = tried[first - 1], tried[first]
    weights = share / (1.0 + 0.5 * (low + high) * shifts)
    return weights / weights.sum()


def grouped(z: Tensor) -> tuple[Tensor, Tensor]:
    """Values and how many each stands for."""
    z = z.sort().values
    if len(z) <= 2 * TAIL + GROUPS:
        return z, torch.ones_like(z)
    groups = z[TAIL:-TAIL].tensor_split(GROUPS)
    middle = torch.stack([group.mean() for group in groups])
    counts = torch.tensor([len(group) for group in groups], dtype=z.dtype, device=z.device)
    ones = torch.ones(TAIL, dtype=z.dtype, device=z.device)
    return torch.cat([z[:TAIL], middle, z[-TAIL:]]), torch.cat([ones, counts, ones])
