"""`ResidualMixture`: the distribution of standardized residuals z = (y - mean) / std, a mixture of normals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps

import torch
from torch import Tensor

from posthoc.numerics import rows_that_fit

SPREADS = torch.logspace(-4.0, 5.0, 19, base=2.0, dtype=torch.float64)
"""Standard deviations of the normals of the grid, in units of z."""
STEP = 0.25
"""The least distance between the means of normals of one spread; it is the spread where that is larger."""
REACH, FAR = 2.0, 3.0
"""The means of normals of spread s lie within the larger of REACH and FAR · s. A long tail consists of normals far from
zero; wide normals around zero would make two tails."""
PRIOR_ROWS = 50.0
"""The number of rows that the prior counts for."""
EM_STEPS = 150
"""Steps of EM; more would overfit the sample."""
TAIL, BINS = 250, 500
"""EM takes this many of the lowest and of the highest values exactly, and those between in this many bins."""
NEGLIGIBLE = 1e-6
"""Normals of less weight are left out."""
TINY_SHIFT = 1e-9
"""The lower limit of the largest shift that the search for the multiplier of the zero mean divides by."""
NEWTON_STEPS = 200
"""The most steps of the search for a quantile."""


def by_rows(function: Callable[[ResidualMixture, Tensor], Tensor]) -> Callable[[ResidualMixture, Tensor], Tensor]:
    """Applies a function from (n, C, 1) to (n, C) to values (..., C), some rows at a time, to save memory."""

    @wraps(function)
    def wrapped(self: ResidualMixture, values: Tensor) -> Tensor:
        outputs, k = self.weights.shape
        values = values.double().broadcast_to(torch.broadcast_shapes(values.shape, (outputs,)))
        parts = values.reshape(-1, outputs, 1).split(rows_that_fit(outputs * k))
        return torch.cat([function(self, part) for part in parts]).reshape(values.shape)

    return wrapped


@dataclass(frozen=True, eq=False, repr=False)
class ResidualMixture:
    """For each of C outputs the mixture Σ_k weights_k N(shifts_k, spreads_k²), with mean zero, for all points.

    Values have shape (..., C), or any shape if C is 1; results are float64.

    Args:
        weights: (C, K) in float64; each row sums to 1.
        shifts: The means of the normals, (C, K).
        spreads: The standard deviations of the normals, (C, K).

    Example:
        >>> z = torch.randn(1000, 1, generator=torch.Generator().manual_seed(0)).exp()
        >>> mixture = ResidualMixture.fit((z - z.mean()) / z.std())
        >>> low, high = mixture.quantile(torch.tensor([[0.05], [0.95]])).squeeze(1).tolist()
        >>> -low < high  # the right tail is longer
        True
    """

    weights: Tensor
    shifts: Tensor
    spreads: Tensor

    @classmethod
    def fit(cls, z: Tensor, prior: ResidualMixture | None = None) -> ResidualMixture:
        """The mixture of greatest posterior probability for residuals, by EM.

        Its normals are those of a grid and of the prior.

        Args:
            z: Standardized residuals, (N, C).
            prior: The expected mixture, which counts for `PRIOR_ROWS` rows; default: the standard normal.
        """
        prior = (prior if prior is not None else NORMAL).to(z.device).expanded(z.shape[1])
        grid = grid_of_normals().to(z.device)
        shifts = torch.cat([grid[:, 0].expand(z.shape[1], -1), prior.shifts], -1)
        spreads = torch.cat([grid[:, 1].expand(z.shape[1], -1), prior.spreads], -1)
        rows = torch.nn.functional.pad(PRIOR_ROWS * prior.weights, (len(grid), 0))
        columns = zip(z.double().T, shifts, spreads, rows, strict=True)
        weights = torch.stack([fitted_weights(*column) for column in columns])
        kept = (weights > NEGLIGIBLE).any(0)
        weights = weights[:, kept] / weights[:, kept].sum(-1, keepdim=True)
        shifts = shifts[:, kept] - (weights * shifts[:, kept]).sum(-1, keepdim=True)  # the mean is zero again
        return cls(weights, shifts, spreads[:, kept])

    def expanded(self, outputs: int, copies: int = 1) -> ResidualMixture:
        """The same for several outputs, if it is for one, with each normal split into equal copies."""
        parts = (self.weights / copies, self.shifts, self.spreads)
        return ResidualMixture(*(part.repeat_interleave(copies, -1).expand(outputs, -1) for part in parts))

    @property
    def variance(self) -> Tensor:
        """The variance of z, (C,)."""
        return (self.weights * (self.shifts.square() + self.spreads.square())).sum(-1)

    def divided(self, scale: Tensor) -> ResidualMixture:
        """The distribution of z / scale, with a scale (C,)."""
        return ResidualMixture(self.weights, self.shifts / scale[:, None], self.spreads / scale[:, None])

    def to(self, device: str | torch.device) -> ResidualMixture:
        """A copy on another device."""
        return ResidualMixture(self.weights.to(device), self.shifts.to(device), self.spreads.to(device))

    @by_rows
    def log_density(self, z: Tensor) -> Tensor:
        """log p(z)."""
        fit = ((z - self.shifts) / self.spreads).square() + math.log(2.0 * math.pi)
        return (self.weights.log() - self.spreads.log() - 0.5 * fit).logsumexp(-1)

    @by_rows
    def cdf(self, z: Tensor) -> Tensor:
        """The probability of a residual of at most z."""
        return (self.weights * torch.special.ndtr((z - self.shifts) / self.spreads)).sum(-1)

    @by_rows
    def crps(self, z: Tensor) -> Tensor:
        """The continuous ranked probability score, E|X - z| - ½ E|X - X'|."""
        between = self.shifts[:, :, None] - self.shifts[:, None]
        spread = self.spreads[:, :, None].hypot(self.spreads[:, None])
        pairs = torch.einsum("cj,ck,cjk->c", self.weights, self.weights, mean_absolute(between, spread))
        return (self.weights * mean_absolute(z - self.shifts, self.spreads)).sum(-1) - 0.5 * pairs

    @by_rows
    def quantile(self, level: Tensor) -> Tensor:
        """The z at which `cdf` is the level, in (0, 1)."""
        # Newton's method within a bracket: the quantile of a mixture lies among those of its normals.
        parts = self.shifts + self.spreads * torch.special.ndtri(level)
        low, high, level = parts.amin(-1), parts.amax(-1), level.squeeze(-1)
        z = 0.5 * (low + high)
        for _ in range(NEWTON_STEPS):
            over = self.cdf(z) - level
            low, high = torch.where(over < 0, z, low), torch.where(over < 0, high, z)
            newton = z - over / self.log_density(z).exp()
            following = torch.where((newton > low) & (newton < high), newton, 0.5 * (low + high))
            if bool(((following - z).abs() <= 1e-14 * (1.0 + z.abs())).all()):
                break
            z = following
        return following

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


NORMAL = ResidualMixture(*(torch.tensor([[value]], dtype=torch.float64) for value in (1.0, 0.0, 1.0)))
"""The standard normal."""


def mean_absolute(mean: Tensor, std: Tensor) -> Tensor:
    """E|X| of a normal."""
    z = mean / std
    return mean * torch.erf(z / math.sqrt(2.0)) + std * math.sqrt(2.0 / math.pi) * torch.exp(-0.5 * z.square())


def grid_of_normals() -> Tensor:
    """Shifts and spreads of the grid, (K, 2)."""
    pairs = []
    for spread in SPREADS.tolist():
        step = max(STEP, spread)
        count = int(max(REACH, FAR * spread) / step)
        pairs += [(step * i, spread) for i in range(-count, count + 1)]
    return torch.tensor(pairs, dtype=torch.float64)


def fitted_weights(z: Tensor, shifts: Tensor, spreads: Tensor, prior: Tensor) -> Tensor:
    """The weights, (K,), of the most probable mixture with mean zero.

    Args:
        z: Residuals of one output, (N,).
        shifts: The means of the normals, (K,).
        spreads: Their standard deviations, (K,).
        prior: The number of prior rows of each normal. Normals with none that reach further than z are left out.
    """
    values, counts = binned(z)
    fit = -0.5 * ((values[:, None] - shifts) / spreads).square() - spreads.log()
    possible = (torch.maximum(shifts.abs(), spreads) <= z.abs().max()) | (prior > 0)
    weights = zero_mean_weights(prior + prior.sum() / len(prior) * possible, shifts)
    fit = fit.masked_fill(~possible, -math.inf)
    density = (fit - fit.amax(-1, keepdim=True)).exp()  # in units of each row's largest
    for _ in range(EM_STEPS):
        share = weights * ((counts / (density @ weights)) @ density)
        weights = zero_mean_weights(share + prior, shifts)
    return weights


def zero_mean_weights(rows: Tensor, shifts: Tensor) -> Tensor:
    """The weights w that maximize Σ n_k log w_k for n = `rows` under Σ w_k = 1 and Σ w_k m_k = 0.

    They are n_k / (1 + λ m_k); the multiplier λ is found by repeated search on a grid, which runs on a GPU as well.
    """
    share = rows / rows.sum()
    places, mass = shifts[share > 0], share[share > 0]
    low, high = -1.0 / places.max().clamp_min(TINY_SHIFT), -1.0 / places.min().clamp_max(-TINY_SHIFT)
    parts = torch.linspace(0.0, 1.0, 2**7 + 1, dtype=rows.dtype, device=rows.device)
    for _ in range(9):
        tried = low + (high - low) * parts
        positive = (mass * places / (1.0 + tried[:, None] * places)).sum(-1) > 0  # the mean decreases in λ
        first = positive.long().sum().clamp(1, len(parts) - 1)
        low, high = tried[first - 1], tried[first]
    weights = share / (1.0 + 0.5 * (low + high) * shifts)
    return weights / weights.sum()


def binned(z: Tensor) -> tuple[Tensor, Tensor]:
    """The values that EM uses and the number of residuals each stands for."""
    z = z.sort().values
    groups = z.split(1)
    if len(z) > 2 * TAIL + BINS:
        groups = (*groups[:TAIL], *z[TAIL:-TAIL].tensor_split(BINS), *groups[-TAIL:])
    counts = torch.tensor([len(group) for group in groups], dtype=z.dtype, device=z.device)
    return torch.stack([group.mean() for group in groups]), counts
