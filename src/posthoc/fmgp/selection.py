"""Selection of the form of a classifier's variance, by the log-probability of held-out rows.

`select_form` is the whole of it, in the order of this file: the forms that are candidates, the folds they are trained
and scored on, the verdict, and the corrections of the winner's confidence. Temperature scaling is always a candidate,
and another form has to be clearly better than it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor

from posthoc.base import Job
from posthoc.collect.augmentation import Augmented
from posthoc.collect.outputs import Outputs
from posthoc.fmgp.ood import best_exponent
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.recalibration import NONE, Recalibration
from posthoc.predictive.calibration_error import expected_calibration_error
from posthoc.training import Ranks, Training, run_parallel

if TYPE_CHECKING:
    from posthoc.fmgp.estimator import FMGPConfig

__all__ = [
    "SELECTION",
    "CandidateScore",
    "Selection",
    "SelectionConfig",
    "VarianceForm",
    "folds",
    "select_form",
    "shortened",
]

T = TypeVar("T")


@dataclass(frozen=True)
class SelectionConfig:
    """Constants of the selection. They were tuned by cross-validation inside the rows to fit on of the data sets of
    docs/ablation.md ("The form of the covariance V(x)", "Correcting confidence from rows held out")."""

    min_rows: int = 200
    """With fewer rows the forms are not compared."""
    folds: int = 3
    """Number of folds."""
    enough_rows: int = 10_000
    """No further fold is tried once this many rows have been held out."""
    max_rows: int = 60_000
    """Rows that the selection looks at, at most."""
    max_log_probs: int = 2**22
    """Log-probabilities kept of each candidate, at most: limits the held-out rows where there are many classes."""
    rows_per_class: int = 10
    """With fewer rows per class the covariance B between classes is not learned."""
    rows_per_own_variance: int = 100
    """With this many rows per class, each class may have a variance of its own,"""
    max_own_variances: int = 32
    """if there are at most this many classes."""
    priors: tuple[float, ...] = (3.0, 10.0, 100.0)
    """Weights of the prior that holds B near the identity; few rows per class need more of it."""
    significance: float = 2.0
    """Standard errors that make a difference clear."""
    calibration_slack: float = 0.005
    """Calibration error above temperature scaling's that costs nothing."""
    calibration_price: float = 20.0
    """Price of further calibration error: 0.005 more of it has to save a tenth of the loss."""
    ood_strength: float = 1.0
    """Strength of the out-of-distribution variance that is tried; fitted rows cannot show which strength is best."""
    ood_price: float = 0.003
    """Share of the loss on held-out rows that the out-of-distribution variance may add."""


SELECTION = SelectionConfig()


@dataclass(frozen=True)
class VarianceForm:
    """A form of the variance.

    Args:
        variance: "shared", "separable", "per_output", or "none" for temperature scaling.
        kl: Whether the KL of each output's copy counts ("copies"), or of one ("once").
        prior: Weight of the prior that holds B near the identity.
        ood_exponent: Power of the out-of-distribution distance that the scale of the logits follows.
    """

    variance: str
    kl: str = "once"
    prior: float = 0.0
    ood_exponent: float = 0.0

    def __str__(self) -> str:
        if self.variance == TEMPERATURE_SCALING.variance:
            return "temperature scaling"
        return f"{self.variance} variance" + (f" (prior {self.prior:g})" if self.prior else "")

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        return cls(str(saved["variance"]), str(saved["kl"]), float(saved["prior"]), float(saved["ood_exponent"]))


TEMPERATURE_SCALING = VarianceForm("none")
CAUTIOUS = VarianceForm("shared", "copies")
"""The form for few rows; and for augmented images, where a form that can vary more learns what tells them from plain
ones."""


@dataclass(frozen=True)
class CandidateScore:
    """How a candidate did on held-out rows.

    Args:
        form: The candidate.
        log_prob: Mean log-probability of the targets in nats, after recalibration of the confidence.
        gain: By how much that exceeds temperature scaling's on the same rows.
        standard_error: Standard error of the gain.
        rows: Number of held-out rows. A candidate that was clearly worse is not tried on further folds.
    """

    form: VarianceForm
    log_prob: float
    gain: float
    standard_error: float
    rows: int

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        log_prob, gain, error = (float(saved[name]) for name in ("log_prob", "gain", "standard_error"))
        return cls(VarianceForm.from_dict(saved["form"]), log_prob, gain, error, int(saved["rows"]))


@dataclass(frozen=True)
class Selection:
    """What a fit of `FMGP` chose, and why; `str` gives it in one sentence.

    Args:
        form: The form of the variance.
        reason: Why it was chosen.
        recalibration: Temperature and bend by which the confidence is corrected.
        ood_strength: Strength of the out-of-distribution variance.
        rows: Number of held-out rows; 0 where nothing was compared.
        candidates: Scores of all candidates, temperature scaling first.
        residuals: For a regression, the distribution of its residuals and why.
    """

    form: VarianceForm
    reason: str
    recalibration: Recalibration = NONE
    ood_strength: float = 0.0
    rows: int = 0
    candidates: tuple[CandidateScore, ...] = ()
    residuals: str | None = None

    def __str__(self) -> str:
        return f"{self.form}: {self.reason}" + (f"; {self.residuals}" if self.residuals else "")

    @property
    def gain(self) -> float:
        """Mean gain in held-out log-probability over temperature scaling, in nats a row; 0 if nothing was compared."""
        return sum(score.gain for score in self.candidates if score.form == self.form)

    @property
    def standard_error(self) -> float:
        """Standard error of the gain."""
        return sum(score.standard_error for score in self.candidates if score.form == self.form)

    def to_dict(self) -> dict[str, Any]:
        """As values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        residuals = saved["residuals"]
        return cls(
            VarianceForm.from_dict(saved["form"]),
            str(saved["reason"]),
            Recalibration(*map(float, saved["recalibration"])),
            float(saved["ood_strength"]),
            int(saved["rows"]),
            tuple(CandidateScore.from_dict(score) for score in saved["candidates"]),
            None if residuals is None else str(residuals),
        )


HeldOut = dict[float, Tensor]
"""Log-probabilities (N, C) of held-out rows, by the strength of the out-of-distribution variance."""
FitAndScore = Callable[[Job, VarianceForm, Outputs], HeldOut]
"""Trains a form on a job and scores rows that are not in it."""


def select_form(
    job: Job, config: FMGPConfig, likelihood: Likelihood, fit_and_score: FitAndScore, parallel: bool
) -> Selection:
    """Selects the form of the variance: the requested one, the default one, or the best on held-out rows.

    Args:
        job: The data of the fit.
        config: Options of the estimator.
        likelihood: The likelihood, before the fit.
        fit_and_score: Trains a form on a job and scores rows that are not in it.
        parallel: Whether candidates are trained at the same time, by a thread each.
    """
    rows, num_outputs = len(job.train), job.train.outputs[0].numel()
    if config.variance != "auto":
        kl = config.kl or ("copies" if config.variance == "shared" else "once")
        prior = SELECTION.priors[0] if config.variance == "separable" else 0.0
        return Selection(VarianceForm(config.variance, kl, prior), "as requested")
    if not likelihood.chooses_form:
        few = num_outputs <= SELECTION.max_own_variances
        form = VarianceForm("per_output") if few else VarianceForm("shared", config.kl or "copies")
        return Selection(form, "the default for this likelihood")
    cautious = replace(CAUTIOUS, kl=config.kl or CAUTIOUS.kl)
    if rows < SELECTION.min_rows:
        return Selection(cautious, f"{rows:,} rows are too few to compare forms")
    if int(job.targets.min()) == int(job.targets.max()):
        return Selection(cautious, "one class alone is no basis to compare forms")
    augmented = isinstance(job.data, Augmented)
    learns_exponent = config.ood_strength is None and not augmented
    exponent = Ranks().agree(best_exponent(job.train)) if learns_exponent else 0.0
    forms = [CAUTIOUS] if augmented else candidates(rows, num_outputs)
    forms = [replace(form, kl=config.kl or form.kl, ood_exponent=exponent) for form in forms]
    selection = compare(job, forms, fit_and_score, parallel)
    # Corrections learned from augmented images do not hold for plain ones.
    return replace(selection, recalibration=NONE, ood_strength=0.0) if augmented else selection


def candidates(rows: int, num_outputs: int) -> list[VarianceForm]:
    """The forms to compare with temperature scaling."""
    if rows < SELECTION.rows_per_class * num_outputs:
        return [VarianceForm("shared")]
    weak, medium, _ = SELECTION.priors
    if rows < SELECTION.rows_per_own_variance * num_outputs or num_outputs > SELECTION.max_own_variances:
        return [VarianceForm("separable", prior=prior) for prior in SELECTION.priors]
    return [
        VarianceForm("separable", prior=weak),
        VarianceForm("separable", prior=medium),
        VarianceForm("per_output", prior=weak),
    ]


def compare(job: Job, forms: list[VarianceForm], fit_and_score: FitAndScore, parallel: bool = False) -> Selection:
    """The best of some forms and temperature scaling, on rows that they were not trained on."""
    baseline = replace(TEMPERATURE_SCALING, ood_exponent=forms[0].ood_exponent if forms else 0.0)
    records = {form: Record(form) for form in (baseline, *forms)}
    remaining = list(records)
    targets: list[Tensor] = []
    for group in grouped(held_out_parts(job), parallel):
        tried = remaining
        tasks = [partial(fit_and_score, part, form, unseen) for part, unseen in group for form in tried]
        results = iter(run_parallel(tasks, parallel))
        for _, unseen in group:
            for form, log_probs in zip(tried, results, strict=False):
                if form in remaining:
                    records[form].add(log_probs)
            assert unseen.targets is not None
            device = records[baseline].plain.device  # where the fitted parameters are; rows may stay on the host
            targets.append(unseen.targets.long().to(device))
            remaining = promising(records, remaining, torch.cat(targets))
            if len(remaining) == 1:
                return verdict(records, remaining, torch.cat(targets))
    return verdict(records, remaining, torch.cat(targets))


def shortened(training: Training) -> Training:
    """How to train a candidate: a third of the steps, with up to three times the learning rate."""
    return replace(training, steps=-(-training.steps // 3), lr=min(3.0 * training.lr, max(training.lr, 0.05)))


class Record:
    """Held-out log-probabilities of a candidate so far, and its score on them."""

    def __init__(self, form: VarianceForm) -> None:
        self.parts: dict[float, list[Tensor]] = {}
        self.score = CandidateScore(form, 0.0, 0.0, 0.0, 0)

    def add(self, log_probs: HeldOut) -> None:
        for strength, log_p in log_probs.items():
            self.parts.setdefault(strength, []).append(log_p.float())

    def __getitem__(self, strength: float) -> Tensor:  # (N, C)
        return torch.cat(self.parts[strength])

    @property
    def plain(self) -> Tensor:  # (N, C)
        """Without out-of-distribution variance."""
        return self[0.0]

    def significance(self, log_p: Tensor, base: Tensor, y: Tensor) -> float:
        """Scores log-probabilities; returns the gain over the losses of temperature scaling in standard errors."""
        gains = base - losses(log_p, y)
        gain, error = float(gains.mean()), float(gains.std() / len(gains) ** 0.5)
        log_prob, error_or_zero = gain - float(base.mean()), error if math.isfinite(error) else 0.0  # of a single row
        self.score = CandidateScore(self.score.form, log_prob, gain, error_or_zero, len(y))
        return gain / max(error, 1e-300)


def held_out_parts(job: Job) -> Iterator[tuple[Job, Outputs]]:
    """Jobs with rows to score that are not in them: the validation data, or one fold after the other."""
    if job.val is not None:
        yield replace(job, data=job.train, checkpoint=None), job.val.spread(held_out_rows(job.val))
        return
    rows = job.train.spread(SELECTION.max_rows)
    limit, seen = held_out_rows(rows), 0
    for part, unseen in folds(job, rows, SELECTION.folds, limit):
        yield part, unseen
        seen += len(unseen)
        if seen >= limit:
            return


def held_out_rows(rows: Outputs) -> int:
    """How many rows to hold out in all."""
    return max(1, min(SELECTION.enough_rows, SELECTION.max_log_probs // rows.outputs[0].numel()))


def folds(job: Job, rows: Outputs, count: int, max_held_out: int | None = None) -> Iterator[tuple[Job, Outputs]]:
    """Splits rows into folds; for each, the job of fitting to the other rows, and the rows of the fold."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).to(rows.outputs.device)
    for fold in order.tensor_split(count):
        held_out = fold[:max_held_out]
        others = torch.ones(len(rows), dtype=torch.bool, device=order.device).index_fill(0, held_out, False)
        yield job.part(rows[others.nonzero().squeeze(-1)]), rows[held_out]


def grouped(parts: Iterable[T], parallel: bool) -> Iterator[list[T]]:
    """One part after the other; in parallel, the first alone, as some candidates may end there, and then all others."""
    rest = iter(parts)
    for first in rest:
        yield [first]
        if parallel and (others := list(rest)):
            yield others


def promising(records: dict[VarianceForm, Record], forms: list[VarianceForm], y: Tensor) -> list[VarianceForm]:
    """The forms without those that are clearly worse than temperature scaling, which comes first. They are not
    compared with each other: one fold does not show which of them is better calibrated."""
    baseline, *others = forms
    base = losses(records[baseline].plain, y)
    records[baseline].significance(records[baseline].plain, base, y)

    def is_promising(record: Record) -> bool:
        log_p = NONE.again(record.plain, y).log_probs(record.plain)
        return record.significance(log_p, base, y) > -SELECTION.significance

    return [baseline, *(form for form in others if is_promising(records[form]))]


def verdict(records: dict[VarianceForm, Record], forms: list[VarianceForm], y: Tensor) -> Selection:
    """The form with the least loss, calibration considered, if it is clearly better than temperature scaling."""
    baseline, *others = forms
    scaled = records[baseline].plain
    base = losses(scaled, y)
    best, best_score, rows = Selection(baseline, "nothing was clearly better"), 1.0, f"{len(y):,} held-out rows"
    for form in others:
        record = records[form]
        correction = Recalibration.of(record.plain, y)
        log_p = correction.log_probs(record.plain)
        score = float(losses(log_p, y).mean() / base.mean()) + calibration_cost(log_p, scaled, y)
        if record.significance(log_p, base, y) > SELECTION.significance and score < best_score:
            reason = f"{record.score.gain:.3f} nats a row better than temperature scaling"
            best, best_score = Selection(form, reason, correction), score
    scores = tuple(record.score for record in records.values())
    best = replace(best, reason=f"{best.reason} on {rows}", rows=len(y), candidates=scores)
    return with_ood(best, records[best.form], y, max_loss=float(base.mean()))


def calibration_cost(log_p: Tensor, scaled: Tensor, y: Tensor) -> float:
    """The price of being worse calibrated than temperature scaling, as a share of its loss."""
    excess = calibration_error(log_p, y) - calibration_error(scaled, y)
    return SELECTION.calibration_price * max(0.0, excess - SELECTION.calibration_slack)


def with_ood(plain: Selection, record: Record, y: Tensor, max_loss: float) -> Selection:
    """Adds the out-of-distribution variance, and the recalibration that goes with it, if it costs held-out rows next
    to nothing and leaves no more loss than `max_loss`."""
    strength = SELECTION.ood_strength
    if strength not in record.parts:
        return plain
    log_p = record[strength]
    corrections = Recalibration.of(log_p, y), plain.recalibration.again(log_p, y)  # a new bend, or the same
    selections = [replace(plain, recalibration=correction, ood_strength=strength) for correction in corrections]
    best = min(selections, key=lambda selection: expected_loss(selection, record, y))
    allowed = min((1.0 + SELECTION.ood_price) * expected_loss(plain, record, y), max_loss)
    return best if expected_loss(best, record, y) <= allowed else plain


def expected_loss(selection: Selection, record: Record, y: Tensor) -> float:
    """The loss on other rows: each number fitted to these rows makes them look better by 1/N (AIC: Akaike, 1974)."""
    correction = selection.recalibration
    numbers = (correction != NONE) + (correction.bend != 0.0)
    return float(losses(correction.log_probs(record[selection.ood_strength]), y).mean()) + numbers / len(y)


def losses(log_p: Tensor, y: Tensor) -> Tensor:  # (N,)
    return -log_p.double().gather(-1, y[:, None]).squeeze(-1)


def calibration_error(log_p: Tensor, y: Tensor) -> float:
    confidence, label = log_p.double().exp().max(-1)
    return float(expected_calibration_error(confidence, label == y))
