"""Vector scaling: a scale and a bias for each class, as far from temperature scaling as the data warrant."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posthoc.base import Fitted, Job, ScoreConfig, SeedConfig, option
from posthoc.collect.outputs import Outputs
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.temperature import blocks, limit_reached
from posthoc.methods.temperature import Temperature
from posthoc.predictive.base import Predictive, working_dtype

__all__ = ["Vector"]

RIDGES = (1000.0, 100.0, 10.0, 1.0, 0.1)
"""From hardly moving a class to hardly holding it back."""
PATIENCE = 2
"""Ridges that may be no better than the best one before weaker ones are left alone."""
FOLDS, CHOSEN_ON = 5, 10_000
"""The ridge is chosen by so many folds of at most so many rows."""
STEPS = 1000
ROUGHLY, CLOSELY = 1e-3, 1e-7
"""Gradients at which a fit is done, in coordinates where the curvature is about one: to choose a ridge, and to keep."""


@dataclass(frozen=True, kw_only=True)
class VectorConfig(ScoreConfig, SeedConfig):
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
    fixed_mean = False
    needs_classes = True

    @property
    def chosen_ridge(self) -> float:
        """The ridge of the fit."""
        self._require_fitted("chosen_ridge")
        assert isinstance(self._fitted, FittedVector)
        return self._fitted.ridge

    def _fit(self, job: Job) -> FittedVector:
        likelihood = copy.deepcopy(self._likelihood)
        self._fit_likelihood(likelihood, job)
        assert isinstance(likelihood, Categorical)
        base = Base.of(job.train, 1.0 / likelihood.temperature.item())
        limited = limit_reached(job.train.outputs, base.inverse) is not None
        ridge = math.inf if limited else self.config.ridge  # a temperature at its limit is not to be refined
        if ridge is None:
            ridge = best_ridge(base, job, self.config.seed)
        moved = base.fit(job.train, ridge, CLOSELY) if math.isfinite(ridge) else base.start(job.train)
        nn.init.zeros_(likelihood.log_temperature)  # the scale contains it now
        return FittedVector(likelihood, base.inverse * (1.0 + moved[0]), base.size * moved[1], ridge)

    def _predictor(self, fitted: FittedVector, *, covariance: bool) -> Callable[[Outputs], Predictive]:
        predict_moved = super()._predictor(fitted, covariance=covariance)

        def predict(outputs: Outputs) -> Predictive:
            fitted.to(outputs.outputs.device)
            moved = fitted.scale * centred(outputs.outputs.double()) + fitted.bias
            return predict_moved(outputs.with_outputs(moved.to(working_dtype(outputs.outputs))))

        return predict

    def _blank(self, shapes: Mapping[str, Any]) -> FittedVector:
        zeros = torch.zeros(shapes["classes"], dtype=torch.float64)
        return FittedVector(self._blank_likelihood(), zeros, zeros.clone(), shapes["ridge"])


class FittedVector(Fitted):
    """The scale a and the bias b of each class, and the ridge that they were found with."""

    def __init__(self, likelihood: Likelihood, scale: Tensor, bias: Tensor, ridge: float) -> None:
        super().__init__(likelihood)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self.scale: Tensor  # (C,)
        self.bias: Tensor  # (C,)
        self.ridge = ridge

    def shapes(self) -> dict[str, Any]:
        return {"classes": len(self.scale), "ridge": self.ridge}


class Base(NamedTuple):
    """Temperature scaling, from which u and v depart: logits z(1 + u) + ρv, where z = f/τ. Of a fit they are one
    tensor (2, C), zero where nothing departs."""

    inverse: float  # 1/τ
    size: float  # ρ

    @classmethod
    def of(cls, rows: Outputs, inverse: float) -> Base:
        """In the units of these rows."""
        square = sum(float((inverse * f).square().sum()) for f, _ in centred_parts(rows))
        return cls(inverse, math.sqrt(square / rows.outputs.numel()))

    def start(self, rows: Outputs) -> Tensor:  # (2, C)
        """No departure."""
        return torch.zeros(2, rows.outputs.shape[1], dtype=torch.float64, device=rows.outputs.device)

    def loss(self, rows: Outputs, moved: Tensor) -> tuple[float, Tensor]:  # (), (2, C)
        """The negative log-likelihood of all rows, and its gradient."""
        total, slope = 0.0, torch.zeros_like(moved)
        for f, y in centred_parts(rows):
            z = self.inverse * f
            log_p = (z * (1.0 + moved[0]) + self.size * moved[1]).log_softmax(-1)
            total -= float(log_p.gather(-1, y[:, None]).sum())
            away = log_p.exp_()
            away[torch.arange(len(y), device=y.device), y] -= 1.0
            slope += torch.stack([torch.einsum("nc,nc->c", away, z), self.size * away.sum(0)])
        return total, slope

    def curvature(self, rows: Outputs) -> Tensor:  # (C, 2, 2)
        """The second derivatives of the loss within each class, where nothing departs."""
        blocks = torch.zeros(rows.outputs.shape[1], 2, 2, dtype=torch.float64, device=rows.outputs.device)
        for f, _ in centred_parts(rows):
            z = self.inverse * f
            p = z.softmax(-1)
            acts = torch.stack([z, torch.full_like(z, self.size)], -1)  # (N, C, 2)
            blocks += torch.einsum("nc,nci,ncj->cij", p * (1.0 - p), acts, acts)
        return blocks

    def fit(
        self,
        rows: Outputs,
        ridge: float,
        tolerance: float,
        *,
        start: Tensor | None = None,
        curvature: Tensor | None = None,
    ) -> Tensor:  # (2, C)
        """The departure of the least loss with its penalty: there is one, since both are convex."""
        moved = start if start is not None else self.start(rows)
        curvature = curvature if curvature is not None else self.curvature(rows)
        # Coordinates in which each class has unit curvature: L-BFGS needs tens of steps there and hundreds elsewhere.
        factor = torch.linalg.cholesky(curvature + ridge * torch.eye(2, dtype=torch.float64, device=curvature.device))
        whitened = torch.einsum("cij,ic->jc", factor, moved).contiguous().requires_grad_()
        optimiser = torch.optim.LBFGS(
            [whitened], max_iter=STEPS, tolerance_grad=tolerance, tolerance_change=1e-14, line_search_fn="strong_wolfe"
        )

        def colour() -> Tensor:
            return torch.linalg.solve_triangular(factor.mT, whitened.detach().T[..., None], upper=True).squeeze(-1).T

        def step() -> float:
            at = colour()
            loss, slope = self.loss(rows, at)
            slope = (slope + ridge * at).T[..., None]
            whitened.grad = torch.linalg.solve_triangular(factor, slope, upper=False).squeeze(-1).T.contiguous()
            return loss + 0.5 * ridge * float(at.square().sum())

        optimiser.step(step)
        return colour()


def best_ridge(base: Base, job: Job, seed: int) -> float:
    """The ridge whose fits predict best what they have not seen, from infinity downwards."""
    splits = list(folds(job.train, seed)) if job.val is None else [(job.train, job.val)]
    curvatures = [base.curvature(seen) for seen, _ in splits]
    moved = [base.start(seen) for seen, _ in splits]
    best, least, since = (
        math.inf,
        sum(base.loss(unseen, at)[0] for (_, unseen), at in zip(splits, moved, strict=True)),
        0,
    )
    for ridge in RIDGES:
        moved = [
            base.fit(seen, ridge, ROUGHLY, start=at, curvature=curvature)
            for (seen, _), at, curvature in zip(splits, moved, curvatures, strict=True)
        ]
        score = sum(base.loss(unseen, at)[0] for (_, unseen), at in zip(splits, moved, strict=True))
        since += 1
        if score < least:
            best, least, since = ridge, score, 0
        elif since == PATIENCE:
            break
    return best


def folds(rows: Outputs, seed: int) -> Iterator[tuple[Outputs, Outputs]]:
    """Rows to fit on and rows to judge by, several times over."""
    rows = rows.only().spread(CHOSEN_ON)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).to(rows.outputs.device)
    count = min(FOLDS, len(rows))
    for fold in range(count):
        inside = torch.arange(len(rows), device=order.device) % count == fold
        yield rows[order[~inside]], rows[order[inside]]


def centred(outputs: Tensor) -> Tensor:
    """Logits without their mean over the classes: what is added to all of them means nothing, and must not here."""
    return outputs - outputs.mean(-1, keepdim=True)


def centred_parts(rows: Outputs) -> Iterator[tuple[Tensor, Tensor]]:
    assert rows.targets is not None
    return ((centred(f), y) for f, y in blocks(rows.outputs, rows.targets))
