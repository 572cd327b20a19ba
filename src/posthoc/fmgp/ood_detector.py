"""`OODDetector`: how unlike the rows of the fit a point is, with a p-value from rows that were held out.

A point is compared with a bank of rows of the fit in whitened coordinates. Of features these are the direction
x / |x| and, as one more coordinate, the length of the standardized features: of inputs without meaning for a network,
features keep the direction less than the length, and rows far away on a known direction are still far. Of inputs they
are the standardized columns themselves.

The score is the distance to the tenth nearest row of the bank ("knn": Sun et al., Out-of-Distribution Detection with
Deep Nearest Neighbors, ICML 2022), or to the mean ("mahalanobis": Lee et al., NeurIPS 2018, with one class).

The p-value of a score is (1 + number of held-out scores that are at least as large) / (1 + number of held-out scores).
Neither the bank nor the whitening has seen the held-out rows. So for a new point exchangeable with them, the p-value is
at most u with a probability of at most u, for any u.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError
from posthoc.fmgp.ood import MAX_ROWS, principal_directions
from posthoc.numerics import rows_that_fit

NEIGHBORS = 10
"""The score is the distance to the neighbor of this rank."""
HELD_OUT_SHARE, MIN_HELD_OUT, MAX_HELD_OUT = 5, 200, 2048
"""One row in five is held out: at least 200 rows where that is at most half of them, and never more than 2,048."""
MAX_BANK_ROWS, MAX_BANK_NUMBERS = 2**13, 2**21
"""Rows and numbers (float32) of the bank, at most: 8 MB."""
MAX_FITTED_ROWS, MAX_FITTED_NUMBERS, FEW_ROWS = 2**14, 2**21, 1000
"""The largest number of rows and of numbers that are read, and the number of rows that are read in any case."""
WIDE_ROWS = 512
"""Rows that the directions are computed from where there are fewer rows than columns, or very many columns."""
FLOOR = 1e-6
"""The smallest variance of a direction, as a share of the largest, and the smallest standard deviation of a column, as
a share of its size."""

CACHED = 2**22
"""Bytes of the squared distances that are computed together: they stay in a processor's cache."""
ROUNDING = 1e-13
"""Squared distances below this share of the squared length are zero but for rounding."""

Kind = Literal["knn", "mahalanobis"]
Space = Literal["features", "inputs"]


class OODDetector(nn.Module):
    """Scores of rows by their distance from a bank of rows, and p-values of these scores.

    Args:
        space: The block that it reads: "features" or "inputs".
        width: The number D of columns of this block.
        directions: The number r of directions with a variance of their own; all others share one.
        bank: The number of rows of the bank.
        held_out: The number m of held-out scores.

    Example:
        >>> x = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
        >>> detector = OODDetector.of(Outputs(torch.zeros(1000), inputs=x))
        >>> near, far = detector.pvalue(detector.score(torch.tensor([[0.0, 0.0, 0.0], [9.0, 0.0, 0.0]])))
        >>> bool(near > 0.5), bool(far < 0.01)
        (True, True)
    """

    location: Tensor  # (D,), means of the columns
    scale: Tensor  # (D,), their standard deviations
    center: Tensor  # (W,), the mean of the coordinates; W = D + 1 of features, D of inputs
    basis: Tensor  # (W, r), orthonormal columns
    deviations: Tensor  # (r,), standard deviations along them
    other_deviation: Tensor  # (), along any other direction
    bank: Tensor  # (B, W) of float32, whitened
    held_out: Tensor  # (m,), rising scores

    def __init__(self, space: Space, width: int, directions: int, bank: int, held_out: int) -> None:
        super().__init__()
        self.space = space
        coordinates = width + 1 if space == "features" else width
        of_columns = {"location": (width,), "scale": (width,), "center": (coordinates,)}
        of_directions = {"basis": (coordinates, directions), "deviations": (directions,), "other_deviation": ()}
        for name, shape in {**of_columns, **of_directions, "held_out": (held_out,)}.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("bank", torch.zeros(bank, coordinates))

    @classmethod
    @torch.no_grad()
    def of(cls, rows: Outputs, kind: Kind = "knn", device: torch.device | None = None) -> OODDetector | None:
        """The detector of the features of some rows, or of their inputs if they have no features.

        A fifth of the rows is held out (see `HELD_OUT_SHARE`); which, does not depend on their order up to 16,384 rows.

        Returns:
            None if the rows have neither features nor inputs.
        """
        space: Space = "features" if rows.features is not None else "inputs"
        block = rows.space(space)
        if block is None:
            return None
        width = block.shape[1]
        most = min(MAX_FITTED_ROWS, max(FEW_ROWS, MAX_FITTED_NUMBERS // width), rows_that_fit(width))
        block = block if len(block) <= most else rows.only(space).spread(most).space(space)
        assert block is not None
        x = shuffled(block.to(device or block.device).double())
        held_out = min(max(len(x) // HELD_OUT_SHARE, min(len(x) // 2, MIN_HELD_OUT)), MAX_HELD_OUT)
        known = x[held_out:]
        detector = cls.whitening(known, space)
        most = min(MAX_BANK_ROWS, max(NEIGHBORS, MAX_BANK_NUMBERS // len(detector.center)))
        bank = detector.whitened(known[:most]).float() if kind == "knn" else torch.zeros_like(detector.bank[:1])
        detector.bank = bank
        detector.held_out = detector.score(x[:held_out]).double().sort().values
        return detector

    @classmethod
    def whitening(cls, known: Tensor, space: Space) -> Self:
        """A detector with the mean and the covariance of some rows (N, D), and an empty bank."""
        location, deviation = known.mean(0), known.std(0, correction=0)
        size = known.square().mean(0).sqrt()
        blank = cls(space, known.shape[1], 0, 1, 0).to(known.device)
        blank.location = location
        blank.scale = torch.where(size > 0.0, deviation.clamp_min(FLOOR * size), torch.ones_like(size))
        coordinates = blank.coordinates(known)
        center = coordinates.mean(0)
        wide = len(center) > min(len(known), MAX_ROWS)
        away = (coordinates - center)[: WIDE_ROWS if wide else len(known)]
        variances, vectors = principal_directions(away)
        # More directions than half of the rows would have variances that are far too small.
        count = min(int((variances > FLOOR * variances[-1]).sum()), max(1, len(away) // 2))
        detector = cls(space, known.shape[1], count, 1, 0).to(known.device)
        detector.location, detector.scale, detector.center = location, blank.scale, center
        detector.basis = vectors[:, len(variances) - count :].contiguous()
        detector.deviations = variances[len(variances) - count :].sqrt()
        others = variances[: len(variances) - count].sum() / max(1, len(center) - count)
        least = FLOOR * variances[-1] if float(variances[-1]) > 0.0 else torch.ones_like(others)
        detector.other_deviation = torch.maximum(others, least).sqrt()
        return detector

    def coordinates(self, x: Tensor) -> Tensor:  # (N, W)
        """What is compared, before whitening, of rows (N, D) of float64."""
        standardized = (x - self.location) / self.scale
        if self.space == "inputs":
            return standardized
        length = standardized.norm(dim=-1, keepdim=True) / x.shape[1] ** 0.5
        return torch.cat([F.normalize(x, dim=-1), length], -1)

    def whitened(self, x: Tensor) -> Tensor:  # (N, W)
        """The coordinates of rows (N, D), with unit variance along each direction."""
        away = self.coordinates(x.double()) - self.center
        along = away @ self.basis
        excess = 1.0 / self.deviations - 1.0 / self.other_deviation
        return away / self.other_deviation + (along * excess) @ self.basis.mT

    @torch.no_grad()
    def score(self, x: Tensor) -> Tensor:
        """Scores (N,) in float32 of rows (N, D), on their device; larger is stranger.

        Rounding to float32 gives equal rows equal scores, in any batch.

        Raises:
            DataError: The rows have another width than those of the fit.
        """
        if x.shape[1:] != self.location.shape:
            raise DataError(f"Expected {self.space} of width {len(self.location)} as in fit, got {x.shape[1]}.")
        bank = self.bank.double()
        parts = x.split(min(rows_that_fit(len(bank), CACHED), rows_that_fit(len(self.center))))
        return torch.cat([self._distance(part, bank) for part in parts]).to(x.device)

    def _distance(self, x: Tensor, bank: Tensor) -> Tensor:
        rows = self.whitened(x.to(bank.device))
        size = rows.square().sum(-1)
        squares = torch.addmm(size[:, None] + bank.square().sum(-1), rows, bank.mT, alpha=-2.0)
        nearest = squares.topk(min(NEIGHBORS, len(bank)), largest=False).values[:, -1].nan_to_num(torch.inf)
        return torch.where(nearest < ROUNDING * size, 0.0, nearest).sqrt().float()  # rounding may leave less than 0

    def pvalue(self, score: Tensor) -> Tensor:
        """The p-values (N,) of scores, in float64: from 1 / (m + 1) to 1, with m held-out scores."""
        below = torch.searchsorted(self.held_out, score.to(self.held_out))
        m = len(self.held_out)
        return ((1 + m - below).double() / (m + 1)).to(score.device)

    def shapes(self) -> dict[str, Any]:
        """The arguments that build a detector with tensors of the same shapes."""
        width, directions, held_out = len(self.location), self.basis.shape[1], len(self.held_out)
        found = {"width": width, "directions": directions, "bank": len(self.bank), "held_out": held_out}
        return {"space": self.space, **found}


def shuffled(x: Tensor) -> Tensor:
    """Rows (N, D) in an order that is random but does not depend on the order they come in."""
    g = torch.Generator().manual_seed(0)
    key = x.cpu() @ torch.randn(x.shape[1], generator=g, dtype=torch.float64)
    return x[key.argsort()[torch.randperm(len(x), generator=g)].to(x.device)]
