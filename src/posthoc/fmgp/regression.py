"""A fit of a regression: the unit of the residuals, the kernel's block, the process, and the distribution of what
remains. `train_regression` is the whole of it; what there is to choose is chosen on held-out rows."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posthoc.base import Job
from posthoc.collect.network import TABLE_WIDTH
from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError, MissingExtraError, warn
from posthoc.fmgp.build import Trainer
from posthoc.fmgp.fitted import FittedFMGP
from posthoc.fmgp.residual_scale import (
    LEAST_SHARE,
    MAX_SCORED,
    ResidualScale,
    ScaleCandidate,
    best_scale,
    log_claimed,
    predictable_share,
    row_losses,
    total_loss,
)
from posthoc.fmgp.selection import Selection, VarianceForm, fold_rows, folds
from posthoc.kernels import RBF, Kernel
from posthoc.likelihoods.base import columns
from posthoc.likelihoods.learned_noise import MixtureNoise
from posthoc.optional import require
from posthoc.training import History, Ranks

if TYPE_CHECKING:
    from posthoc.fmgp.estimator import FMGPConfig

RESIDUAL_FOLDS, MANY_RESIDUALS, MAX_RESIDUALS = 3, 30_000, 60_000
"""The distribution of residuals is learned from this many folds; from this number of rows on, from residuals of the
fitted rows themselves, and from no more than so many."""
CLEAR = 1.0
"""A learned scale has to be better than none by this many standard errors, and trees alone better than trees with a
process. "No scale" is dropped after the first fold if it is worse by as many."""


@dataclass(frozen=True, eq=False)
class RegressionForm:
    """A candidate: the process is trained on residuals in units of the scale.

    Args:
        scale: The unit of the residuals; None is one unit for all.
        kernel: The kernel in place of the default one; None: the option's.
        process: Whether there is a process: without one all that varies is the scale.
    """

    scale: ScaleCandidate | None = None
    kernel: Kernel | None = None
    process: bool = True

    def __str__(self) -> str:
        scale = f"scale of {self.scale}" if self.scale is not None else "no scale"
        if not self.process:
            return f"{scale}, no process"
        if self.kernel is None:
            return scale
        return f"{scale}, kernel on {' and '.join(sorted(space or '' for space in self.kernel.spaces()))}"

    def trainer(self, trainer: Trainer) -> Trainer:
        """The same trainer with the form's kernel."""
        return trainer if self.kernel is None else replace(trainer, config=replace(trainer.config, kernel=self.kernel))

    def rows(self, train: Outputs, residuals: Tensor, fold: int | None = None) -> Outputs:
        """The rows with residuals in units of the cross-fitted scale, or of the one that has not seen a fold."""
        if self.scale is None:
            return train
        unseen = self.scale.unseen
        return in_units(train, residuals, unseen[fold] if fold is not None and unseen else self.scale.log_scale)


def train_regression(job: Job, selection: Selection, trainer: Trainer) -> tuple[FittedFMGP, History]:
    """Selects a form on held-out rows, trains it on all rows, and learns the distribution of the residuals.

    The variance is fitted to the residuals of its own rows, which therefore look smaller than those of new rows.
    So the residuals of each fold are standardized by a scale and a variance that were fitted to the other folds. With
    very many rows that makes no difference to the variance.
    """
    config, rows = trainer.config, len(job.train)
    requested = config.residuals == "gaussian"
    likelihood = None if requested else trainer.likelihood.with_learned_noise(rows, config.alpha)
    residuals = residuals_of(job.train)
    parts = [part.to(residuals.device) for part in fold_rows(job.train, RESIDUAL_FOLDS)]
    learns, note = scale_options(job, trainer, learned_noise=likelihood is not None)
    if likelihood is None:
        why = "as requested" if requested else f"as {rows:,} rows are too few to learn them"
        claimed = ScaleCandidate(log_claimed(job.train), claimed=1.0) if config.scale == "claimed" else None
        fitted, fitted_scale, history = finish(job, RegressionForm(claimed), residuals, trainer, selection.form)
        fitted.residual_scale = fitted_scale
        note = f"scale of {claimed}" if claimed is not None else note
        fitted.selection = replace(selection, residuals=f"Gaussian residuals, {why}", scale=note)
        return fitted, history
    trainer = replace(trainer, likelihood=likelihood)
    if learns:
        share = predictable_share(job.train, residuals, parts)
        if share >= LEAST_SHARE:
            warn(
                f"{share:.0%} of the squared error can be predicted from the inputs: the network's mean is off. Its "
                "predictions stay as they are and the intervals are wider for it; train the network for longer, or "
                "correct its mean."
            )
    found = None
    if config.scale == "claimed":
        found = ScaleCandidate(log_claimed(job.train), claimed=1.0)
    elif config.scale != "none":
        found = best_scale(job.train, residuals, parts, boosted=learns)
    forms = [RegressionForm()] if config.scale != "claimed" else []
    if found is not None:
        forms += [RegressionForm(found, kernel) for kernel in kernels_to_try(job, config, compare=learns)]
        forms += [RegressionForm(found, process=False)] if config.scale != "claimed" else []
    elif learns:
        note = "no scale is clearly better on held-out rows"
    kind, many = selection.form, rows >= MANY_RESIDUALS
    trials = [Trial(form, job, residuals, parts, trainer, kind) for form in forms]
    done = finish(job, forms[0], residuals, trainer, kind) if len(forms) == 1 else None
    trials[0].start = done[0] if done is not None else None
    best = choose(trials, len(parts) if not many else len(forms) > 1)
    fitted, scale, history = done or finish(job, best.form, residuals, trainer, kind)
    if many or not best.form.process:
        z = standardized(fitted, best.form.rows(job.train, residuals).spread(MAX_RESIDUALS))[0]
    else:
        z = torch.cat(best.z)
    assert isinstance(fitted.likelihood, MixtureNoise)
    fitted.likelihood.set_residuals(z)
    Ranks().share(list(fitted.buffers()))
    fitted.residual_scale, fitted.chosen_kernel = scale, best.form.kernel is not None
    if len(forms) > 1 or found is not None:
        note = str(best.form)
    scores = {str(trial.form): mean_loss(trial) for trial in trials if len(forms) > 1}
    learned = f"residuals with a learned distribution, from {rows:,} rows"
    fitted.selection = replace(selection, residuals=learned, scale=note, scales=scores)
    return fitted, history


def scale_options(job: Job, trainer: Trainer, *, learned_noise: bool) -> tuple[bool, str | None]:
    """Whether boosted scales are tried, and if not, why not, where that is worth a word."""
    option = trainer.config.scale
    if option == "claimed" and job.train.claimed_std is None:
        raise DataError('Expected Outputs with claimed_std for scale="claimed", got none.')
    if option in ("none", "claimed") or not learned_noise:
        return False, None
    if trainer.fresh is not None or not Ranks().alone:
        return False, "no scale is learned from data that are read anew at every step, or in several processes"
    try:
        require("sklearn.ensemble", "scale", "A learned scale of the residuals")
    except MissingExtraError as error:
        if option == "learned":
            warn(f"{error} The fit goes on without.")
        return False, "no learned scale, which needs scikit-learn: pip install 'posthoc[scale]'"
    return True, None


def kernels_to_try(job: Job, config: FMGPConfig, *, compare: bool) -> list[Kernel | None]:
    """The default kernel, and that on the inputs beside features, where no other kernel was requested."""
    train = job.train
    both = train.features is not None and train.inputs is not None and train.inputs.shape[1] <= TABLE_WIDTH
    if not compare or not both or config.kernel.recipe() != RBF().recipe():
        return [None]
    return [None, RBF(on="inputs")]


class Trial:
    """A form and its predictions for held-out rows, fold by fold.

    Attributes:
        start: A fit whose kernel and inducing points the next one goes on from, in a third of the steps: that of all
            rows, or of the first fold.
        z: Standardized residuals of the held-out rows so far.
        log_unit: The logarithms of their predicted standard deviations.
    """

    def __init__(
        self,
        form: RegressionForm,
        job: Job,
        residuals: Tensor,
        parts: list[Tensor],
        trainer: Trainer,
        kind: VarianceForm,
    ) -> None:
        self.form, self.residuals, self.parts, self.kind = form, residuals, parts, kind
        self.trainer = form.trainer(replace(trainer, training=trainer.candidate_training))
        self.job = replace(job, val=job.val if form.scale is None else None)
        self.start: FittedFMGP | None = None
        self.z: list[Tensor] = []
        self.log_unit: list[Tensor] = []

    def next_fold(self) -> None:
        """Trains on all folds but the next, and predicts it."""
        fold, scale = len(self.z), self.form.scale
        held_out = self.parts[fold]
        log_scale = scale.log_scale[held_out] if scale is not None else self.residuals.new_zeros(1, 1)
        z, std = self.residuals[held_out] / log_scale.exp(), torch.ones_like(self.residuals[held_out])
        if self.form.process:
            rows = self.form.rows(self.job.train, self.residuals, fold)
            part, unseen = next(folds(replace(self.job, train=rows), rows, [held_out]))
            fitted, _ = self.trainer.fit(part, self.kind, start=self.start)
            z, std = standardized(fitted, unseen)
            self.start = self.start or fitted
        self.z.append(z)
        self.log_unit.append(std.log() + log_scale)

    def losses(self) -> Tensor:
        """The loss of each held-out row, less that of a constant scale."""
        rows = torch.cat(self.parts[: len(self.z)])[:MAX_SCORED]
        residuals = self.residuals[rows]
        constant = row_losses(torch.zeros_like(residuals), residuals)
        losses = row_losses(torch.cat(self.log_unit)[:MAX_SCORED], residuals)
        return total_loss(losses, constant) - total_loss(constant, constant)


def choose(trials: list[Trial], folds: int) -> Trial:
    """The best form on held-out rows. A learned scale has to be clearly better than none, and a scale without a process
    clearly better than with one.

    Args:
        trials: The candidates, which are given their predictions here.
        folds: The number of folds to predict.
    """
    remaining = trials
    for fold in range(folds):
        for trial in remaining:
            trial.next_fold()
        if fold == 0 and len(trials) > 1:
            scaled = min((t for t in remaining if t.form.scale and t.form.process), key=mean_loss)
            kept = [t for t in remaining if t is scaled or not t.form.process]
            plain = [t for t in remaining if t.form.scale is None and not clearly_worse(t, scaled)]
            remaining = [*plain, *kept]
    if len(remaining) == 1:
        return remaining[0]
    best = next(t for t in remaining if t.form.scale and t.form.process)
    for other in (t for t in remaining if not t.form.process):
        best = other if clearly_worse(best, other) else best
    plain = [t for t in remaining if t.form.scale is None]
    return plain[0] if plain and not clearly_worse(plain[0], best) else best


def mean_loss(trial: Trial) -> float:
    """The mean loss of the held-out rows."""
    return float(trial.losses().mean())


def clearly_worse(trial: Trial, other: Trial) -> bool:
    """Whether the mean loss is larger than that of another by more than `CLEAR` standard errors."""
    excess = trial.losses() - other.losses()
    return float(excess.mean()) > CLEAR * float(excess.std()) / math.sqrt(len(excess))


def finish(
    job: Job, form: RegressionForm, residuals: Tensor, trainer: Trainer, kind: VarianceForm
) -> tuple[FittedFMGP, ResidualScale | None, History]:
    """Trains the process of a form on all rows, in units of the scale, which is returned beside it."""
    scale = form.scale.fit(job.train, residuals) if form.scale is not None else None
    if scale is not None:
        scale.widens = not form.process
    val = job.val
    if scale is not None and val is not None:
        val = in_units(val, residuals_of(val), scale(val).log())
    job = replace(job, train=form.rows(job.train, residuals), val=val)
    if form.process:
        fitted, history = form.trainer(trainer).fit(job, kind)
        return fitted, scale, history
    likelihood = copy.deepcopy(trainer.likelihood).to(job.device)
    assert job.train.targets is not None
    likelihood.initialize(job.train.outputs, job.train.targets)
    return FittedFMGP(None, None, likelihood), scale, History()


def residuals_of(rows: Outputs) -> Tensor:
    """The targets minus the outputs, (N, C) in float64."""
    assert rows.targets is not None
    return columns(rows.targets) - columns(rows.outputs)


def in_units(rows: Outputs, residuals: Tensor, log_scale: Tensor) -> Outputs:
    """Rows whose residuals are divided by a scale, while their outputs stay as they are."""
    targets = columns(rows.outputs) + residuals / log_scale.exp()
    return rows.with_targets(targets.reshape(rows.outputs.shape))


@torch.no_grad()
def standardized(fitted: FittedFMGP, rows: Outputs) -> tuple[Tensor, Tensor]:
    """The residuals of some rows in units of their predicted standard deviation, and that, (N, C) in float64."""
    z, std = [], []
    for pred, part in fitted.predictives(rows):
        std.append(columns(pred.std))
        z.append(residuals_of(part) / std[-1])
    return torch.cat(z), torch.cat(std)
