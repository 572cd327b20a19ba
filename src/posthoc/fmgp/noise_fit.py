"""The distribution of a regression's standardized residuals, estimated by cross-fitting.

The variance is fitted to the residuals of its own rows, which therefore look smaller than those of new rows. So
each fold is standardized by a variance that was fitted to the other folds. With very many rows that makes no
difference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from posthoc.base import Job
from posthoc.collect.outputs import Outputs
from posthoc.fmgp.fitted import FittedFMGP
from posthoc.fmgp.selection import folds
from posthoc.likelihoods.learned_noise import MixtureNoise
from posthoc.training import History, Ranks, run_parallel

__all__ = ["fit_residuals"]

FOLDS = 3
"""Number of folds."""
MANY_ROWS = 30_000
"""From this number of rows on, residuals of the fitted rows themselves are used."""
MAX_ROWS = 60_000
"""Residuals that the distribution is estimated from, at most."""

Trained = tuple[FittedFMGP, History]


def fit_residuals(job: Job, train: Callable[[Job], Trained], parallel: bool) -> Trained:
    """Trains on a job, and on its folds where there are few rows; then sets the distribution of the residuals.

    Args:
        job: The data.
        train: Trains on a job.
        parallel: Whether the folds are trained at the same time, by a thread each.
    """
    parts: list[Job] = []
    held_out: list[Outputs] = []
    if len(job.train) < MANY_ROWS:
        for part, unseen in folds(job, job.train, FOLDS):
            parts.append(part)
            held_out.append(unseen)
    (fitted, history), *others = run_parallel([partial(train, part) for part in (job, *parts)], parallel)
    if held_out:
        residuals = [standardized(other, rows) for (other, _), rows in zip(others, held_out, strict=True)]
    else:
        residuals = [standardized(fitted, job.train.spread(MAX_ROWS))]
    if isinstance(fitted.likelihood, MixtureNoise):
        fitted.likelihood.set_residuals(torch.cat(residuals))
    Ranks().share(list(fitted.buffers()))
    return fitted, history


@torch.no_grad()
def standardized(fitted: FittedFMGP, rows: Outputs) -> Tensor:  # (N, C), float64
    """Residuals of some rows in units of their predicted standard deviation."""
    parts = []
    for pred, part in fitted.predictives(rows, fitted.prepared()):
        assert part.targets is not None
        z = (part.targets.double() - pred.mean.double()) / pred.std.double()
        parts.append(z.reshape(len(part), -1))
    return torch.cat(parts)
