"""Vector scaling: a scale and a bias for each class."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posthoc.base import Fitted, Job, Predictor
from posthoc.collect.outputs import Outputs
from posthoc.config import SeedConfig, option
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.temperature import blocks, limit_reached
from posthoc.methods.temperature import Temperature, TemperatureConfig, remapped
from posthoc.predictive.base import Predictive

RIDGES = (math.inf, 1000.0, 100.0, 10.0, 1.0, 0.1)
"""The ridges that are compared, from the strongest to the weakest."""
PATIENCE = 2
"""Weaker ridges are not tried after this number in a row that are no better than the best one."""
FOLDS, MAX_ROWS = 5, 10_000
"""The number of folds by which the ridge is chosen, and the largest number of rows in all of them."""
MAX_STEPS = 1000
SEARCH_TOLERANCE, TOLERANCE = 1e-3, 1e-7
"""Gradients at which a fit ends, in coordinates of unit curvature: when ridges are compared, and in the final fit."""


@dataclass(frozen=True, kw_only=True)
class VectorConfig(TemperatureConfig, SeedConfig):
    """Options of `Vector`."""

    ridge: float | None = option(None, above=0.0, infinite=True)


class Vector(Temperature):
    """softmax(a∘f + b), f without its mean over the classes, by penalized likelihood; it can change the label.

    The penalty, ridge · (|u|² + |v|²)/2, is on the departure from temperature scaling: a = (1 + u)/τ, b = ρv, where τ
    is its temperature and ρ the root mean square of f/τ. An infinite ridge, which leaves temperature scaling, is among
    those tried, so that few rows a class do little harm.

    Args:
        model: A network, a callable, or None to work from `Outputs`.
        likelihood: "classification" (the default), or a `Categorical`.
        ridge: The weight of the penalty. By default the one that predicts best on `val` or, without it, in five-fold
            cross-validation.
        prior: The prior of the temperature that it departs from: see `Temperature`.
        outputs_are: What the outputs are: "logits", "log-probs" or "probs".
        seed: The seed of the folds.
        device: Where the fitted method computes.

    Example:
        >>> import torch
        >>> from posthoc import Outputs, Vector
        >>> logits = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
        >>> data = Outputs(logits, torch.where(torch.arange(200) % 4 == 0, 0, logits.argmax(1)))
        >>> Vector(ridge=1.0).fit(data).predict(data).probs.shape
        torch.Size([200, 3])
    """

    name = "vector"
    Config = VectorConfig
    config: VectorConfig
    needs_classes = True

    @property
    def chosen_ridge(self) -> float:
        """The ridge of the fit."""
        return float(self._require_fitted("chosen_ridge").metadata["ridge"])

    def _fit(self, job: Job) -> Fitted:
        likelihood = super()._fit(job).likelihood
        assert isinstance(likelihood, Categorical)
        base, ridge = Base.of(job.train, 1.0 / likelihood.temperature.item()), self.config.ridge
        if limit_reached(job.train.outputs, base.inverse) is not None:
            ridge = math.inf  # a temperature at its limit is left as it is
        elif ridge is None:
            ridge = best_ridge(base, job, self.config.seed)
        u, v = base.fit(job.train, ridge, TOLERANCE).unbind(1)
        nn.init.zeros_(likelihood.log_temperature)  # the scale contains it now
        return Fitted(likelihood, {"ridge": ridge}, scale=base.inverse * (1.0 + u), bias=base.size * v)

    def _predictor(self, fitted: Any, *, covariance: bool) -> Predictor:
        plain = super()._predictor(fitted, covariance=covariance)

        def predict(outputs: Outputs) -> Predictive:
            fitted.to(outputs.outputs.device)
            scaled = fitted.scale * centered(outputs.outputs.double()) + fitted.bias
            return remapped(plain.predict(outputs), scaled, keeps_argmax=False)

        return plain._replace(predict=predict)

    def _blank(self, shapes: Mapping[str, Any]) -> Fitted:
        zeros = torch.zeros(self._width or (), dtype=torch.float64)
        return Fitted(self._blank_likelihood(), shapes, scale=zeros, bias=zeros.clone())


class Base(NamedTuple):
    """Temperature scaling, from which u and v depart: logits z(1 + u) + ρv, where z = f/τ.

    A departure is one tensor (C, 2) of u and v, zero for temperature scaling itself.
    """

    inverse: float  # 1/τ
    size: float  # ρ

    @classmethod
    def of(cls, rows: Outputs, inverse: float) -> Base:
        square = sum(float(z.square().sum()) for z, _ in cls(inverse, 1.0).blocks(rows))
        return cls(inverse, math.sqrt(square / rows.outputs.numel()))

    def blocks(self, rows: Outputs) -> Iterator[tuple[Tensor, Tensor]]:
        """z and the labels of consecutive rows, as many at a time as fit into memory."""
        assert rows.targets is not None
        return ((self.inverse * centered(f), y) for f, y in blocks(rows.outputs, rows.targets))

    def losses(self, rows: Outputs, departure: Tensor) -> Iterator[Tensor]:  # of ()
        """The negative log-likelihoods of consecutive blocks of rows."""
        for z, y in self.blocks(rows):
            logits = z * (1.0 + departure[:, 0]) + self.size * departure[:, 1]
            yield nn.functional.cross_entropy(logits, y, reduction="sum")

    def fit(self, rows: Outputs, ridge: float, tolerance: float) -> Tensor:  # (C, 2)
        """The departure that minimizes the loss with its penalty; there is one, since both are convex."""
        classes, device = rows.outputs.shape[1], rows.outputs.device
        whitened = torch.zeros(classes, 2, 1, dtype=torch.float64, device=device, requires_grad=True)
        if math.isinf(ridge):
            return whitened.detach().squeeze(-1)
        # Coordinates in which each class has unit curvature: L-BFGS needs tens of steps there and hundreds elsewhere.
        curvature = ridge * torch.eye(2, dtype=torch.float64, device=device).repeat(classes, 1, 1)
        for z, _ in self.blocks(rows):
            p, slopes = z.softmax(-1), torch.stack([z, torch.full_like(z, self.size)], -1)  # (N, C), (N, C, 2)
            curvature += torch.einsum("nc,nci,ncj->cij", p * (1.0 - p), slopes, slopes)
        factor = torch.linalg.cholesky(curvature)
        optimizer = torch.optim.LBFGS(
            [whitened], 1.0, MAX_STEPS, tolerance_grad=tolerance, tolerance_change=1e-14, line_search_fn="strong_wolfe"
        )

        def penalized_loss() -> float:
            departure = torch.linalg.solve_triangular(factor.mT, whitened.detach(), upper=True).requires_grad_()
            penalty, total = 0.5 * ridge * departure.square().sum(), 0.0
            for part in chain([penalty], self.losses(rows, departure.squeeze(-1))):
                part.backward()
                total += part.item()
            assert departure.grad is not None
            whitened.grad = torch.linalg.solve_triangular(factor, departure.grad, upper=False)
            return total

        optimizer.step(penalized_loss)
        return torch.linalg.solve_triangular(factor.mT, whitened.detach(), upper=True).squeeze(-1)


def best_ridge(base: Base, job: Job, seed: int) -> float:
    """The ridge whose fits predict other rows best: those of `val`, or those left out in cross-validation."""
    splits = list(folds(job.train, seed)) if job.val is None else [(job.train, job.val)]
    scores: list[float] = []
    for ridge in RIDGES:
        fits = [(base.fit(train, ridge, SEARCH_TOLERANCE), test) for train, test in splits]
        scores.append(sum(float(loss) for departure, test in fits for loss in base.losses(test, departure)))
        if len(scores) - scores.index(min(scores)) > PATIENCE:
            break
    return RIDGES[scores.index(min(scores))]


def folds(rows: Outputs, seed: int) -> Iterator[tuple[Outputs, Outputs]]:
    """Rows to fit on and rows to test on, several times."""
    rows = rows.only().spread(MAX_ROWS)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).to(rows.outputs.device)
    count = min(FOLDS, len(rows))
    for fold in range(count):
        inside = torch.arange(len(rows), device=order.device) % count == fold
        yield rows[order[~inside]], rows[order[inside]]


def centered(outputs: Tensor) -> Tensor:
    """Logits without their mean over the classes: a constant added to all of them has no meaning, and no effect."""
    return outputs - outputs.mean(-1, keepdim=True)
