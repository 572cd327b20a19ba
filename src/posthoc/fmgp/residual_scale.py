"""`ResidualScale`: the unit s(x) of a regression's residuals, and how it is learned from the errors of other rows.

A Gaussian process finds variances that change smoothly. Boosted trees find edges. The process is therefore trained on
residuals divided by a scale that two boosted models of |r| give: of its mean, and of its .9-quantile. Geometric
blends of the two, shrunk by an exponent, are compared on rows that the models were not fitted to. A standard deviation
that the network claims is a scale as well; boosted models then describe what it misses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from posthoc.collect.network import TABLE_WIDTH
from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError
from posthoc.fmgp.trees import MAX_TREES, Trees
from posthoc.likelihoods.base import columns

MODELS: dict[str, dict[str, Any]] = {"mean": {"loss": "gamma"}, "quantile": {"loss": "quantile", "quantile": 0.9}}
"""The boosted models of |r|."""
BLENDS, EXPONENTS, SIZES = (0.5, 0.0, 1.0), (1.0, 0.75, 0.5), (MAX_TREES, MAX_TREES // 2)
"""What is compared: the weight of the second model, the exponent of the scale, the number of trees of each model."""
CLAIMED_EXPONENTS = (1.0, 0.5)
"""Powers of a claimed standard deviation that are compared."""
TINY, FLOOR = 1e-3, 0.05
"""Added to |r| in units of its median, since the gamma deviance takes positive numbers; and the least quantile."""
MAX_FITTED, MAX_SCORED = 100_000, 20_000
"""Rows that a boosted model is fitted to, and that candidates are compared on, at most."""
LEVELS = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
"""Levels of the quantiles that stand for the distribution in `row_losses`: from the first to the last is 90 %."""
MAX_MEANS, LEAST_SHARE = 4, 0.1
"""Outputs whose mean is checked, at most, and the share of the squared error that is worth a warning."""
SPREADS, EM_STEPS = torch.logspace(-3.0, 4.0, 8, base=2.0, dtype=torch.float64), 30
"""Standard deviations of the normals of `log_density`, in units of the median size, and the steps of their fit."""


class ResidualScale(nn.Module):
    """The scale of the residuals at each point, in a unit that the noise of the likelihood accounts for.

    Trees are constant outside the range of the rows of the fit. Where no process adds variance there, the scale is
    multiplied by √(1 + d), where d is the largest distance of a column from its range, in its standard deviations.

    Args:
        blocks: The blocks whose columns the boosted models read, in this order, with their widths.
        models: The names of the boosted models and their shapes (see `Trees`).
        claimed: The power of the claimed standard deviation that the scale is proportional to.
        widens: Whether the scale grows outside the range of the rows of the fit.
    """

    def __init__(
        self,
        blocks: Iterable[tuple[str, int]],
        models: Sequence[tuple[str, Sequence[int]]] = (),
        claimed: float = 0.0,
        widens: bool = False,
    ) -> None:
        super().__init__()
        self.blocks, self.claimed, self.widens = dict(blocks), claimed, widens
        self.kinds = [kind for kind, _ in models]
        self.models = nn.ModuleList(Trees(*shape) for _, shape in models)
        self.register_buffer("exponents", torch.ones(len(models), dtype=torch.float64))
        for name in ("low", "high", "spread"):
            self.register_buffer(name, torch.ones(sum(self.blocks.values()), dtype=torch.float64))
        self.exponents: Tensor
        self.low: Tensor
        self.high: Tensor
        self.spread: Tensor

    @property
    def reads(self) -> set[str]:
        """The blocks that it reads besides the outputs."""
        return set(self.blocks) - {"outputs"} | ({"claimed_std"} if self.claimed else set())

    def forward(self, rows: Outputs) -> Tensor:
        """The scale of some rows, (N, 1) for all outputs or (N, C)."""
        log_scale = self.exponents.new_zeros(len(rows), 1)
        if self.claimed:
            log_scale = log_scale + self.claimed * log_claimed(rows)
        if len(self.models):
            x = block_columns(rows, self.blocks)
            for exponent, kind, model in zip(self.exponents, self.kinds, trees_of(self), strict=True):
                log_scale = log_scale + exponent * log_prediction(kind, model(x))[:, None]
            if self.widens:
                outside = torch.maximum(self.low - x, x - self.high).clamp_min(0.0) / self.spread
                log_scale = log_scale + 0.5 * outside.amax(-1, keepdim=True).log1p()
        return log_scale.exp()

    def set_range(self, x: Tensor) -> None:
        """Sets the range of the rows of the fit, (N, D)."""
        self.low, self.high = x.amin(0), x.amax(0)
        spread = x.std(0)
        self.spread = torch.where(spread > 0, spread, torch.ones_like(spread))

    def shapes(self) -> dict[str, Any]:
        """The arguments of the constructor, as JSON."""
        models = [[kind, model.shape()] for kind, model in zip(self.kinds, trees_of(self), strict=True)]
        return {"blocks": list(self.blocks.items()), "models": models, "claimed": self.claimed, "widens": self.widens}


def log_claimed(rows: Outputs) -> Tensor:
    """The logarithm of the claimed standard deviations, (N, C)."""
    if rows.claimed_std is None:
        raise DataError("Expected claimed_std, which the scale of the residuals is made of, got outputs without it.")
    return columns(rows.claimed_std).log()


def block_columns(rows: Outputs, blocks: Mapping[str, int]) -> Tensor:
    """The columns of some blocks side by side, (N, D) in float64."""
    parts = []
    for name, width in blocks.items():
        block = rows.space(name)
        if block is None or block.shape[1] != width:
            found = "none" if block is None else f"{block.shape[1]}"
            raise DataError(f"Expected {name} of width {width}, which the scale of the residuals reads, got {found}.")
        parts.append(block.double())
    return torch.cat(parts, -1)


def readable_blocks(rows: Outputs) -> dict[str, int]:
    """The blocks for boosted models, with their widths: the outputs, and the inputs or, without them, the features."""
    widths = {name: block.shape[1] for name in ("inputs", "features") if (block := rows.space(name)) is not None}
    narrow = [name for name, width in widths.items() if width <= TABLE_WIDTH]
    return {"outputs": rows.outputs[0].numel(), **{name: widths[name] for name in narrow[:1]}}


@dataclass(frozen=True, eq=False)
class ScaleCandidate:
    """A scale whose values at the rows of the fit were predicted without their own residuals.

    Args:
        log_scale: Its logarithm at all rows, (N, 1) or (N, C).
        unseen: For each fold, the same without the residuals of that fold, to judge on it what is trained in units of
            the scale; empty where the scale follows from no residuals.
        claimed: The power of the claimed standard deviation.
        blend: The weight of the second boosted model; None without boosted models.
        exponent: The power of the boosted scale.
        trees: The number of trees of each model.
    """

    log_scale: Tensor
    unseen: tuple[Tensor, ...] = ()
    claimed: float = 0.0
    blend: float | None = None
    exponent: float = 1.0
    trees: int = MAX_TREES

    def __str__(self) -> str:
        parts = [f"the claimed standard deviation to the power {self.claimed:g}"] if self.claimed else []
        if self.blend is not None:
            of = {0.0: "the mean of |r|", 1.0: "the .9-quantile of |r|"}.get(self.blend, "mean and .9-quantile of |r|")
            parts.append(f"{self.trees} trees for {of}, to the power {self.exponent:g}")
        return " times ".join(parts)

    def fit(self, rows: Outputs, residuals: Tensor) -> ResidualScale:
        """The scale, with boosted models of all rows."""
        if self.blend is None:
            scale = ResidualScale((), claimed=self.claimed).to(residuals.device)
        else:
            blocks, some = readable_blocks(rows), spread_rows(len(rows), MAX_FITTED).to(residuals.device)
            x, y = block_columns(rows[some], blocks), sizes_of(rows, residuals, self.claimed)[some]
            weights = {"mean": self.exponent * (1.0 - self.blend), "quantile": self.exponent * self.blend}
            kept = {kind: weight for kind, weight in weights.items() if weight}
            models = {kind: Trees.fit(x, y, trees=self.trees, **MODELS[kind]) for kind in kept}
            shapes = [(kind, model.shape()) for kind, model in models.items()]
            scale = ResidualScale(blocks.items(), shapes, self.claimed).to(residuals.device)
            scale.models = nn.ModuleList(models.values())
            scale.exponents.copy_(torch.tensor(list(kept.values()), dtype=torch.float64))
            scale.set_range(block_columns(rows, blocks))
        return scale


def best_scale(rows: Outputs, residuals: Tensor, folds: Sequence[Tensor], *, boosted: bool) -> ScaleCandidate | None:
    """The scale that describes residuals best on rows that it was not fitted to; None where a constant does as well.

    Args:
        rows: The rows of the fit.
        residuals: Their residuals, (N, C) in float64.
        folds: The numbers of the rows of each fold.
        boosted: Whether to fit boosted models; else only a claimed standard deviation is compared with a constant.
    """
    scored = torch.cat(list(folds))[: max(1, MAX_SCORED // residuals.shape[1])]
    constant = torch.zeros(len(rows), 1, dtype=torch.float64, device=residuals.device)
    reference = row_losses(constant[scored], residuals[scored])

    def loss(candidate: ScaleCandidate) -> float:
        return float(total_loss(row_losses(candidate.log_scale[scored], residuals[scored]), reference).mean())

    candidates = [ScaleCandidate(constant)]
    if rows.claimed_std is not None:
        candidates += [ScaleCandidate(power * log_claimed(rows), claimed=power) for power in CLAIMED_EXPONENTS]
    best = base = min(candidates, key=loss)
    if boosted:
        x, y = block_columns(rows, readable_blocks(rows)), sizes_of(rows, residuals, base.claimed)
        predicted = cross_fitted(x, y, folds)

        def blended(blend: float, exponent: float, trees: int) -> ScaleCandidate:
            log_scale = base.log_scale + exponent * mixed(predicted, blend, trees)
            return ScaleCandidate(log_scale, (), base.claimed, blend, exponent, trees)

        # One choice after the other: the whole grid would show no more.
        trees = min(SIZES, key=lambda trees: loss(blended(BLENDS[0], EXPONENTS[0], trees)))
        blend = min(BLENDS, key=lambda blend: loss(blended(blend, EXPONENTS[0], trees)))
        best = min([base, *(blended(blend, exponent, trees) for exponent in EXPONENTS)], key=loss)
        if best.blend is not None:
            unseen = []
            for i in range(len(folds)):
                others = cross_fitted(x, y, [fold for j, fold in enumerate(folds) if j != i], blend, [trees])
                log_scale = base.log_scale + best.exponent * mixed(others, blend, trees)
                rest = torch.cat([fold for j, fold in enumerate(folds) if j != i])
                log_scale = log_scale + (best.log_scale - log_scale)[rest].mean()  # the level is that of all rows
                unseen.append(log_scale.index_copy(0, folds[i], best.log_scale[folds[i]]))
            best = replace(best, unseen=tuple(unseen))
    return best if best.claimed or best.blend is not None else None


Predicted = dict[tuple[str, int], Tensor]
"""The logarithm of the size of each residual, (N,), by both boosted models with each number of trees."""


def cross_fitted(
    x: Tensor, y: Tensor, folds: Sequence[Tensor], blend: float = BLENDS[0], sizes: Sequence[int] = SIZES
) -> Predicted:
    """What models of the other folds predict for each row, from columns (N, D) and sizes (N,): those models that a
    blend has, with each number of trees."""
    predicted = {(kind, trees): torch.zeros_like(y) for kind in MODELS for trees in sizes}
    for held_out, others in splits(folds):
        for kind, options in MODELS.items():
            if blend == (0.0 if kind == "quantile" else 1.0):
                continue
            model = Trees.fit(x[others], y[others], trees=max(sizes), **options)
            leaves = model.leaves(x[held_out])
            for trees in sizes:
                value = model.baseline + leaves[:, :trees].sum(-1)
                predicted[kind, trees][held_out] = log_prediction(kind, value)
    return predicted


def mixed(predicted: Predicted, blend: float, trees: int) -> Tensor:
    """A blend of both models, (N, 1)."""
    return ((1.0 - blend) * predicted["mean", trees] + blend * predicted["quantile", trees])[:, None]


def predictable_share(rows: Outputs, residuals: Tensor, folds: Sequence[Tensor]) -> float:
    """The share of the squared error that boosted trees predict on rows that they were not fitted to; 0 unless it is
    clearly above zero."""
    x, unit = block_columns(rows, readable_blocks(rows)), residuals.square().mean(0).sqrt()
    before, after = [], []
    for held_out, others in splits(folds):
        for r in (residuals / unit).T[:MAX_MEANS]:
            before.append(r[held_out].square())
            after.append((r[held_out] - Trees.fit(x[others], r[others])(x[held_out])).square())
        if float(torch.cat(after).sum()) > (1.0 - LEAST_SHARE / 2.0) * float(torch.cat(before).sum()):
            return 0.0  # no hope: other folds need not be tried
    gain = torch.cat(before) - torch.cat(after)
    clear = float(gain.mean()) > 3.0 * float(gain.std()) / math.sqrt(len(gain))
    return float(gain.mean() / torch.cat(before).mean()) if clear else 0.0


def splits(folds: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """For each fold, its rows and those of the others, up to `MAX_FITTED`."""
    for i, held_out in enumerate(folds):
        yield held_out, torch.cat([fold for j, fold in enumerate(folds) if j != i])[:MAX_FITTED]


def spread_rows(rows: int, most: int) -> Tensor:
    """Evenly spaced row numbers, no more than `most`."""
    return torch.linspace(0, rows - 1, min(rows, most), dtype=torch.float64).long()


def log_prediction(kind: str, value: Tensor) -> Tensor:
    """The logarithm of what a boosted model predicts."""
    return value if kind == "mean" else value.clamp_min(FLOOR).log()


def trees_of(scale: ResidualScale) -> list[Trees]:
    """The boosted models of a scale."""
    return [model for model in scale.models if isinstance(model, Trees)]


def sizes_of(rows: Outputs, residuals: Tensor, claimed: float) -> Tensor:
    """|r| + tiny, (N,), in units of the claimed standard deviation to a power and of the median; of several outputs,
    the root mean square of each in its own unit."""
    if claimed:
        residuals = residuals / (claimed * log_claimed(rows)).exp()
    unit = residuals.square().mean(0).sqrt()
    sizes = (residuals / torch.where(unit > 0, unit, 1.0)).square().mean(-1).sqrt()
    return sizes / sizes.median().clamp_min(TINY) + TINY


def row_losses(log_scale: Tensor, residuals: Tensor) -> Tensor:
    """Three proper scores of each row, (3, N): minus a log-density, the CRPS, and the score of the 90 % interval.

    The distribution of r / s is that of these rows: a mixture of normals around zero, and the quantiles.
    """
    scale = log_scale.exp()
    z = residuals / scale
    levels = LEVELS.to(z.device)
    error = z - z.quantile(levels, dim=0)[:, None]  # (levels, N, C)
    pinball = 2.0 * torch.maximum(levels[:, None, None] * error, (levels[:, None, None] - 1.0) * error)
    interval = (pinball[0] + pinball[-1]) / (2.0 * float(levels[0]))
    return torch.stack([log_scale - log_density(z), pinball.mean(0) * scale, interval * scale]).mean(-1)


def log_density(z: Tensor) -> Tensor:
    """The log-density of z, (N, C), by a mixture of normals around zero that is fitted to each column."""
    unit = z.abs().median(0).values
    unit = torch.where(unit > 0, unit, 1.0)
    spreads = SPREADS.to(z.device)
    fit = -0.5 * (z / unit)[..., None].div(spreads).square() - spreads.log() - 0.5 * math.log(2.0 * math.pi)
    log_weights = torch.full_like(fit[:1], -math.log(len(spreads)))
    for _ in range(EM_STEPS):
        log_weights = (fit + log_weights).log_softmax(-1).logsumexp(0, keepdim=True) - math.log(len(z))
    return (fit + log_weights).logsumexp(-1) - unit.log()


def total_loss(losses: Tensor, reference: Tensor) -> Tensor:
    """The sum of the three scores of each row, (N,); CRPS and interval score in units of the reference's mean."""
    return losses[0] + losses[1] / reference[1].mean() + losses[2] / reference[2].mean()
