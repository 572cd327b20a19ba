"""Selection of the form of a classifier's variance, by the log-probability of held-out rows.

`select_form` is the whole of it, in the order of this file: the forms that are candidates, the folds they are trained
and scored on, the verdict, and the corrections of the winner's confidence. Temperature scaling is always a candidate,
and another form has to be clearly better than it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from posthoc.base import Job
from posthoc.collect.augmentation import Augmented
from posthoc.collect.outputs import Outputs
from posthoc.fmgp.ood import best_exponent
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.recalibration import NONE, Recalibration
from posthoc.predictive.calibration_error import expected_calibration_error
from posthoc.training import Ranks

if TYPE_CHECKING:
    from posthoc.fmgp.build import Trainer
    from posthoc.fmgp.estimator import FMGPConfig


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
    futility: float = -0.5
    """A form whose gain on the folds so far is at most this many standard errors is not tried on further folds."""
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
        rows: Number of held-out rows. A candidate that was dropped after a fold has fewer.
    """

    form: VarianceForm
    log_prob: float
    gain: float
    standard_error: float
    rows: int

    @property
    def significance(self) -> float:
        """The gain in standard errors; 0 for a single row, which shows nothing."""
        return self.gain / max(self.standard_error, 1e-300) if self.rows > 1 else 0.0


@dataclass(frozen=True, repr=False)
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
        scale: For a regression, the unit of its residuals and the kernel's block, or why none was learned.
        scales: The loss of each candidate for these on held-out rows, less that of a constant scale; lower is better.
    """

    form: VarianceForm
    reason: str
    recalibration: Recalibration = NONE
    ood_strength: float = 0.0
    rows: int = 0
    candidates: tuple[CandidateScore, ...] = ()
    residuals: str | None = None
    scale: str | None = None
    scales: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        return "; ".join([f"{self.form}: {self.reason}", *filter(None, (self.residuals, self.scale))])

    @property
    def gain(self) -> float:
        """Mean gain in held-out log-probability over temperature scaling, in nats a row; 0 if nothing was compared."""
        return sum(score.gain for score in self.candidates if score.form == self.form)

    @property
    def standard_error(self) -> float:
        """Standard error of the gain."""
        return sum(score.standard_error for score in self.candidates if score.form == self.form)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`."""
        scores = [{**score, "form": VarianceForm(**score["form"])} for score in saved["candidates"]]
        form, candidates = VarianceForm(**saved["form"]), tuple(CandidateScore(**score) for score in scores)
        recalibration = Recalibration(*map(float, saved["recalibration"]))
        return cls(**{**saved, "form": form, "recalibration": recalibration, "candidates": candidates})


HeldOut = dict[float, Tensor]
"""Log-probabilities (N, C) of held-out rows, by the strength of the out-of-distribution variance."""


def select_form(job: Job, config: FMGPConfig, likelihood: Likelihood, trainer: Trainer) -> Selection:
    """Selects the form of the variance: the requested one, the default one, or the best on held-out rows.

    Args:
        job: The data of the fit.
        config: Options of the estimator.
        likelihood: The likelihood, before the fit.
        trainer: Trains the candidates.
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
    labels = job.train.targets
    if labels is not None and int(labels.min()) == int(labels.max()):
        return Selection(cautious, "one class alone is no basis to compare forms")
    augmented = isinstance(job.data, Augmented)
    learns_exponent = config.ood_strength is None and not augmented
    exponent = Ranks().agree(best_exponent(job.train)) if learns_exponent else 0.0
    forms = [CAUTIOUS] if augmented else candidates(rows, num_outputs)
    forms = [replace(form, kl=config.kl or form.kl, ood_exponent=exponent) for form in forms]
    selection = compare(job, forms, trainer.fit_and_score)
    # Corrections learned from augmented images do not hold for plain ones.
    return replace(selection, recalibration=NONE, ood_strength=0.0) if augmented else selection


def candidates(rows: int, num_outputs: int) -> list[VarianceForm]:
    """The forms to compare with temperature scaling."""
    if rows < SELECTION.rows_per_class * num_outputs:
        return [VarianceForm("shared")]
    if rows < SELECTION.rows_per_own_variance * num_outputs or num_outputs > SELECTION.max_own_variances:
        return [VarianceForm("separable", prior=prior) for prior in SELECTION.priors]
    return [VarianceForm(variance, prior=SELECTION.priors[0]) for variance in ("separable", "per_output")]


def compare(
    job: Job, forms: list[VarianceForm], fit_and_score: Callable[[Job, VarianceForm, Outputs], HeldOut]
) -> Selection:
    """The best of some forms and temperature scaling, on rows that they were not trained on.

    Args:
        job: The data of the fit.
        forms: The candidates.
        fit_and_score: Trains a form on a job and scores rows that are not in it.
    """
    baseline = replace(TEMPERATURE_SCALING, ood_exponent=forms[0].ood_exponent if forms else 0.0)
    held_out: dict[VarianceForm, HeldOut] = {form: {} for form in (baseline, *forms)}
    scores: dict[VarianceForm, CandidateScore] = {}
    remaining, targets = list(forms), list[Tensor]()
    for part, unseen in held_out_parts(job):
        for form in [*remaining, baseline]:
            for strength, log_p in fit_and_score(part, form, unseen).items():
                parts = [held_out[form][strength]] if strength in held_out[form] else []
                held_out[form][strength] = torch.cat([*parts, log_p.float()])
        assert unseen.targets is not None
        scaled = held_out[baseline][0.0]
        targets.append(unseen.targets.long().to(scaled.device))  # rows may stay on the host
        y = torch.cat(targets)
        # Forms that are unlikely to become clearly better than temperature scaling are dropped. The others are not
        # compared with each other: one fold does not show which of them is better calibrated.
        for form in remaining:
            log_p = held_out[form][0.0]
            log_p = Recalibration.of(log_p, y, bends=(0.0,)).log_probs(log_p)
            scores[form] = score_of(form, log_p, scaled, y)
        remaining = [form for form in remaining if scores[form].significance > SELECTION.futility]
    scores[baseline] = score_of(baseline, scaled, scaled, y)
    return verdict(held_out, scores, baseline, remaining, y)


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
        train = rows[others.nonzero().squeeze(-1)]
        num_data = max(1, round(job.num_data * len(train) / len(job.train)))
        yield replace(job, train=train, num_data=num_data, data=train, checkpoint=None), rows[held_out]


def verdict(
    held_out: dict[VarianceForm, HeldOut],
    scores: dict[VarianceForm, CandidateScore],
    baseline: VarianceForm,
    forms: list[VarianceForm],
    y: Tensor,
) -> Selection:
    """The form with the least loss, calibration considered, if it is clearly better than temperature scaling.

    Args:
        held_out: Log-probabilities of all candidates.
        scores: Their scores; those of `forms` are computed anew.
        baseline: Temperature scaling.
        forms: The candidates that are not clearly worse.
        y: The classes (N,) of the held-out rows.
    """
    scaled = held_out[baseline][0.0]
    base = losses(scaled, y).mean()
    best, least = Selection(baseline, "nothing was clearly better"), 1.0
    for form in forms:
        correction = Recalibration.of(held_out[form][0.0], y)
        log_p = correction.log_probs(held_out[form][0.0])
        scores[form] = score = score_of(form, log_p, scaled, y)
        # The price of being worse calibrated than temperature scaling, as a share of its loss.
        excess = calibration_error(log_p, y) - calibration_error(scaled, y) - SELECTION.calibration_slack
        loss = float(losses(log_p, y).mean() / base) + SELECTION.calibration_price * max(0.0, excess)
        if score.significance > SELECTION.significance and loss < least:
            best = Selection(form, f"{score.gain:.3f} nats a row better than temperature scaling", correction)
            least = loss
    reason = f"{best.reason} on {len(y):,} held-out rows"
    best = replace(best, reason=reason, rows=len(y), candidates=tuple(scores[form] for form in held_out))
    return with_ood(best, held_out[best.form], y, max_loss=float(base))


def with_ood(plain: Selection, held_out: HeldOut, y: Tensor, max_loss: float) -> Selection:
    """Adds the out-of-distribution variance, and the recalibration that goes with it, if it costs held-out rows next
    to nothing and leaves no more loss than `max_loss`."""

    def expected_loss(selection: Selection) -> float:
        """The loss on other rows: each number fitted to these makes them look better by 1/N (AIC: Akaike, 1974)."""
        correction = selection.recalibration
        numbers = (correction != NONE) + (correction.bend != 0.0)
        return float(losses(correction.log_probs(held_out[selection.ood_strength]), y).mean()) + numbers / len(y)

    if SELECTION.ood_strength not in held_out:
        return plain
    log_p = held_out[SELECTION.ood_strength]
    same_bend = Recalibration.of(log_p, y, bends=(plain.recalibration.bend,))
    corrections = Recalibration.of(log_p, y), same_bend
    selections = [replace(plain, recalibration=c, ood_strength=SELECTION.ood_strength) for c in corrections]
    best = min(selections, key=expected_loss)
    allowed = min((1.0 + SELECTION.ood_price) * expected_loss(plain), max_loss)
    return best if expected_loss(best) <= allowed else plain


def score_of(form: VarianceForm, log_p: Tensor, scaled: Tensor, y: Tensor) -> CandidateScore:
    """The score of log-probabilities (N, C), given those of temperature scaling."""
    base = losses(scaled, y)
    gains = base - losses(log_p, y)
    gain, error = float(gains.mean()), float(gains.std() / len(gains) ** 0.5) if len(gains) > 1 else 0.0
    return CandidateScore(form, gain - float(base.mean()), gain, error, len(y))


def losses(log_p: Tensor, y: Tensor) -> Tensor:  # (N,)
    """The negative log-likelihood of each row."""
    return -log_p.double().gather(-1, y[:, None]).squeeze(-1)


def calibration_error(log_p: Tensor, y: Tensor) -> float:
    """The expected calibration error of log-probabilities (N, C) for labels (N,)."""
    confidence, label = log_p.double().exp().max(-1)
    return float(expected_calibration_error(confidence, label == y))
