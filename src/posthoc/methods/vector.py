"""Vector scaling: a scale and a bias for each class, as far from temperature scaling as the data warrant."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from posthoc.base import Job
from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError, OptionError
from posthoc.likelihoods.base import Categorical, Likelihood
from posthoc.likelihoods.temperature import limit_reached, parts
from posthoc.methods.temperature import Temperature
from posthoc.predictive.base import Predictive, working_dtype
from posthoc.saved import Saved
from posthoc.validation import integer

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


class Vector(Temperature):
    """softmax(a∘f + b), f without its mean over the classes, by penalised likelihood. `mean` is a∘f + b, so that the
    predicted class can move.

    The penalty, ridge · (|u|² + |v|²)/2, is on what temperature scaling lacks: a = (1 + u)/τ, b = ρv, where τ is its
    temperature and ρ the root mean square of f/τ. The `ridge` is the one that predicts best on `val` or, without it, in
    five-fold cross-validation; one that is infinite, which leaves temperature scaling, is among those tried, so
    that few rows a class do little harm.
    """

    name = "vector"
    wants_unseen = True
    fixed_mean = False

    def __init__(
        self,
        model: nn.Module | Callable[..., Any] | None,
        likelihood: str | Likelihood,
        *,
        ridge: float | None = None,
        layer: str | None = None,
        outputs_are: str = "logits",
        device: str | torch.device | None = None,
        seed: int = 0,
        progress: bool | None = None,
    ) -> None:
        super().__init__(model, likelihood, layer=layer, outputs_are=outputs_are, device=device)
        if ridge is not None and not ridge > 0.0:
            raise OptionError(f"Expected a ridge above 0, or None to choose it by the data, got {ridge!r}.")
        self.ridge, self.seed = ridge, integer("seed", seed, 0)
        self.scale: Tensor | None = None  # (C,): a
        self.bias: Tensor | None = None  # (C,): b
        self.chosen_ridge: float | None = None

    def _fit_likelihood(self, likelihood: Likelihood, job: Job) -> None:
        super()._fit_likelihood(likelihood, job)
        assert isinstance(likelihood, Categorical)
        assert job.train.targets is not None
        if bool((job.train.targets == job.train.targets[0]).all()):
            raise DataError(f"Expected labels of several classes, got {int(job.train.targets[0])} in every row.")
        base = Base.of(job.train, 1.0 / likelihood.temperature.item())
        limited = limit_reached(job.train, base.inverse) is not None
        ridge = math.inf if limited else self.ridge  # what has a limit is not to be refined
        if ridge is None:
            ridge = best_ridge(base, job, self.seed)
        moved = base.fit(job.train, ridge, CLOSELY) if math.isfinite(ridge) else base.start(job.train)
        nn.init.zeros_(likelihood.log_temperature)  # it is in the scale now
        self.scale, self.bias = base.inverse * (1.0 + moved[0]), base.size * moved[1]
        self.chosen_ridge = ridge

    def _predictor(self, *, covariance: bool) -> Callable[[Outputs], Predictive]:
        plain = super()._predictor(covariance=covariance)
        scale, bias = self.scale, self.bias
        assert scale is not None
        assert bias is not None

        def predict(outputs: Outputs) -> Predictive:
            f = centred(outputs.outputs.double())
            moved = scale.to(f.device) * f + bias.to(f.device)
            return plain(outputs.with_outputs(moved.to(working_dtype(outputs.outputs))))

        return predict

    def _tensors(self) -> dict[str, Tensor]:
        assert self.scale is not None
        assert self.bias is not None
        ridge = torch.tensor(self.chosen_ridge, dtype=torch.float64)
        return {**super()._tensors(), "scale": self.scale, "bias": self.bias, "ridge": ridge}

    def _options(self) -> dict[str, Any]:
        return {"ridge": self.ridge, "seed": self.seed}

    def _recipe(self) -> dict[str, Any]:
        return self._options()

    @classmethod
    def _rebuild(cls, saved: Saved) -> Self:
        shapes = {"scale": saved.width, "bias": saved.width, "ridge": ()}
        saved.check_some(shapes)
        own = {name: saved.tensors[name] for name in shapes}
        rest = {name: tensor for name, tensor in saved.tensors.items() if name not in shapes}
        method = super()._rebuild(replace(saved, tensors=rest))
        method.ridge, method.seed = saved.options["ridge"], saved.options["seed"]
        method.scale, method.bias, method.chosen_ridge = own["scale"], own["bias"], float(own["ridge"])
        return method


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
    return ((centred(f), y) for f, y in parts(rows))
