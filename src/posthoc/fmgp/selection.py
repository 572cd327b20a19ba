"""Selection of the form of a classifier's variance, by the log-probability of held-out rows.

`select_form` is the whole of it, in the order of this file: the forms that are candidates, the folds they are trained
and scored on, the corrections of the mean, and the verdict. Temperature scaling is always a candidate, and another form
or correction has to be clearly better than it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from posthoc.base import Job
from posthoc.collect.augmentation import Augmented
from posthoc.collect.data_warnings import warn_if_refit_is_better
from posthoc.collect.outputs import Outputs
from posthoc.errors import warn
from posthoc.fmgp.ood import best_exponent
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.mean_correction import CorrectionForm, MeanCorrection, keep_class
from posthoc.likelihoods.recalibration import NONE, Recalibration
from posthoc.numerics import rows_that_fit
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
    """With fewer rows the forms of the variance are not compared."""
    min_corrected_rows: int = 50
    """With fewer rows the mean is not corrected."""
    rows_per_corrected_class: int = 5
    """With fewer rows per class the mean is not corrected."""
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
    """Standard errors that make a difference clear,"""
    significance_of_few: float = 2.5
    """and those where there are too few rows for a process."""
    futility: float = -0.5
    """A form whose gain on the folds so far is at most this many standard errors is not tried on further folds."""
    calibration_slack: float = 0.005
    """Calibration error above temperature scaling's that costs nothing."""
    calibration_price: float = 20.0
    """Price of further calibration error: 0.005 more of it has to save a tenth of the loss."""
    corrections: tuple[CorrectionForm, ...] = (
        CorrectionForm(),
        CorrectionForm(10.0),
        CorrectionForm(1.0),
        CorrectionForm(10.0, 100.0),
        CorrectionForm(3.0, 30.0),
        CorrectionForm(1.0, 1.0),
    )
    """Corrections of the mean, from the simplest on. A weaker penalty is not tried where the last one did not help."""
    correction_folds: int = 3
    """Number of folds of the held-out rows on which corrections are compared."""
    process_advantage: float = 0.01
    """Where an out-of-distribution variance is used, a correction that reads the network's logits has to gain this
    share of the loss more: logits stay certain far from the data."""
    bias_accuracy: float = 0.02
    """Gain in accuracy from which on the network is said to favor a class."""
    max_matrix: int = 150
    """With more classes no matrix is tried."""
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
        correction: The form of the correction of the mean, if there is one.
        fitted_correction: That correction, while the fit goes on; then `FittedFMGP` holds it.
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
    correction: CorrectionForm | None = None
    fitted_correction: MeanCorrection | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        form = f"{self.form}, {self.correction}" if self.correction is not None else str(self.form)
        return "; ".join([f"{form}: {self.reason}", *filter(None, (self.residuals, self.scale))])

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
        correction = CorrectionForm(*saved["correction"]) if saved["correction"] is not None else None
        known = {"form": form, "recalibration": recalibration, "candidates": candidates, "correction": correction}
        return cls(**{**saved, **known})


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
    labels = job.train.targets
    if labels is not None and int(labels.min()) == int(labels.max()):
        return Selection(cautious, "one class alone is no basis to compare forms")
    augmented, mean = isinstance(job.data, Augmented), config.mean
    if rows < SELECTION.min_rows:
        simple = Selection(cautious, f"{rows:,} rows are too few to compare forms")
        return simple if mean == "network" or augmented else with_probabilities(simple, job, trainer, mean)
    if mean != "network" and not augmented:
        warn_if_refit_is_better(job.train)
    learns_exponent = config.ood_strength is None and not augmented
    exponent = Ranks().agree(best_exponent(job.train)) if learns_exponent else 0.0
    forms = [CAUTIOUS] if augmented else candidates(rows, num_outputs)
    forms = [replace(form, kl=config.kl or form.kl, ood_exponent=exponent) for form in forms]
    selection = compare(job, forms, trainer.fit_and_score, "network" if augmented else mean)
    # Corrections learned from augmented images do not hold for plain ones.
    return replace(selection, recalibration=NONE, ood_strength=0.0) if augmented else selection


def with_probabilities(simple: Selection, job: Job, trainer: Trainer, mean: str) -> Selection:
    """A selection for few rows, with class probabilities by temperature scaling or a correction that is clearly better.

    A process that is trained on few rows gives a variance; its probabilities may be worse than the network's.
    """
    train = job.train
    many = len(train) >= SELECTION.min_corrected_rows
    found = compare(job, [], trainer.fit_and_score, mean) if many else simple
    correction = found.fitted_correction
    if correction is None:
        assert train.targets is not None
        correction = MeanCorrection.temperature(train.outputs, train.targets.long())
    return replace(simple, rows=found.rows, correction=correction.form, fitted_correction=correction)


def candidates(rows: int, num_outputs: int) -> list[VarianceForm]:
    """The forms to compare with temperature scaling."""
    if rows < SELECTION.rows_per_class * num_outputs:
        return [VarianceForm("shared")]
    if rows < SELECTION.rows_per_own_variance * num_outputs or num_outputs > SELECTION.max_own_variances:
        return [VarianceForm("separable", prior=prior) for prior in SELECTION.priors]
    return [VarianceForm(variance, prior=SELECTION.priors[0]) for variance in ("separable", "per_output")]


def compare(
    job: Job,
    forms: list[VarianceForm],
    fit_and_score: Callable[[Job, VarianceForm, Outputs], HeldOut],
    mean: str = "network",
) -> Selection:
    """The best of some forms and temperature scaling, on rows that they were not trained on.

    Args:
        job: The data of the fit.
        forms: The candidates.
        fit_and_score: Trains a form on a job and scores rows that are not in it.
        mean: What may become of the mean: see `FMGP`.
    """
    baseline = replace(TEMPERATURE_SCALING, ood_exponent=forms[0].ood_exponent if forms else 0.0)
    held_out: dict[VarianceForm, HeldOut] = {form: {} for form in (baseline, *forms)}
    scores: dict[VarianceForm, CandidateScore] = {}
    remaining, targets, outputs = list(forms), list[Tensor](), list[Tensor]()
    for part, unseen in held_out_parts(job):
        for form in [*remaining, baseline]:
            for strength, log_p in fit_and_score(part, form, unseen).items():
                parts = [held_out[form][strength]] if strength in held_out[form] else []
                held_out[form][strength] = torch.cat([*parts, log_p.float()])
        assert unseen.targets is not None
        scaled = held_out[baseline][0.0]
        targets.append(unseen.targets.long().to(scaled.device))  # rows may stay on the host
        outputs.append(unseen.outputs.to(scaled))
        y = torch.cat(targets)
        # Forms that are unlikely to become clearly better than temperature scaling are dropped. The others are not
        # compared with each other: one fold does not show which of them is better calibrated.
        for form in remaining:
            log_p = held_out[form][0.0]
            log_p = Recalibration.of(log_p, y, bends=(0.0,)).log_probs(log_p)
            scores[form] = score_of(form, log_p, scaled, y)
        remaining = [form for form in remaining if scores[form].significance > SELECTION.futility]
        remaining = sorted(remaining, key=lambda form: -scores[form].gain)[:1] if mean != "network" else remaining
    scores[baseline] = score_of(baseline, scaled, scaled, y)
    plain = verdict(held_out, scores, baseline, remaining, y)
    plain = with_ood(plain, held_out[plain.form], y, max_loss=float(losses(scaled, y).mean()))
    few = max(SELECTION.min_corrected_rows, SELECTION.rows_per_corrected_class * scaled.shape[1])
    if mean == "network" or len(y) < few:
        return plain
    rows = HeldOutRows(torch.cat(outputs), y, scaled, fixed=mean == "fixed")
    return with_correction(plain, held_out, remaining, rows)


def held_out_parts(job: Job) -> Iterator[tuple[Job, Outputs]]:
    """Jobs with rows to score that are not in them: the validation data, or one fold after the other."""
    if job.val is not None:
        yield replace(job, data=job.train, checkpoint=None), job.val.spread(held_out_rows(job.val))
        return
    rows = job.train.spread(SELECTION.max_rows)
    limit, seen = held_out_rows(rows), 0
    for part, unseen in folds(job, rows, fold_rows(rows, SELECTION.folds), limit):
        yield part, unseen
        seen += len(unseen)
        if seen >= limit:
            return


def held_out_rows(rows: Outputs) -> int:
    """How many rows to hold out in all."""
    return max(1, min(SELECTION.enough_rows, SELECTION.max_log_probs // rows.outputs[0].numel()))


def fold_rows(rows: Outputs, count: int) -> list[Tensor]:
    """The numbers of the rows of each fold, which has its share of every class."""
    order = content_order(rows)
    if rows.targets is not None and not rows.targets.is_floating_point():
        order = order[rows.targets[order].argsort(stable=True)]
    return [order[k::count] for k in range(count)]


def folds(
    job: Job, rows: Outputs, parts: Sequence[Tensor], max_held_out: int | None = None
) -> Iterator[tuple[Job, Outputs]]:
    """For each fold, the job of fitting to the other rows, and the rows of the fold.

    Args:
        job: The job of fitting to all rows.
        rows: The rows.
        parts: The numbers of the rows of each fold.
        max_held_out: The largest number of rows of a fold that are held out.
    """
    for part in parts:
        held_out = part
        if max_held_out is not None and len(part) > max_held_out:
            held_out = part[torch.arange(max_held_out, device=part.device) * len(part) // max_held_out]
        others = torch.ones(len(rows), dtype=torch.bool, device=part.device).index_fill(0, held_out, False)
        train = rows[others.nonzero().squeeze(-1)]
        num_data = max(1, round(job.num_data * len(train) / len(job.train)))
        yield replace(job, train=train, num_data=num_data, data=train, checkpoint=None), rows[held_out]


def content_order(rows: Outputs, seed: int = 0) -> Tensor:  # (N,)
    """An order of rows that depends on their outputs and targets, and not on the order in which they come; of very many
    rows, which may be in a file, a random one."""
    if len(rows) > SELECTION.max_rows:
        return torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).to(rows.outputs.device)
    direction = torch.randn(rows.outputs[0].numel(), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    direction, size = direction.to(rows.outputs.device), rows_that_fit(direction.numel())
    parts = (rows.outputs[start : start + size] for start in range(0, len(rows), size))
    keys = torch.cat([part.double().reshape(len(part), -1) @ direction for part in parts])
    order = torch.arange(len(rows), device=keys.device)
    if rows.targets is not None:
        order = rows.targets.reshape(len(rows), -1)[:, 0].argsort(stable=True)
    return order[keys[order].argsort(stable=True)]


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
    best, least = Selection(baseline, "nothing was clearly better"), 1.0
    for form in forms:
        correction = Recalibration.of(held_out[form][0.0], y)
        log_p = correction.log_probs(held_out[form][0.0])
        scores[form] = score = score_of(form, log_p, scaled, y)
        loss = priced_loss(log_p, scaled, y)
        if score.significance > SELECTION.significance and loss < least:
            best = Selection(form, f"{score.gain:.3f} nats a row better than temperature scaling", correction)
            least = loss
    reason = f"{best.reason} on {len(y):,} held-out rows"
    return replace(best, reason=reason, rows=len(y), candidates=tuple(scores[form] for form in held_out))


def priced_loss(log_p: Tensor, scaled: Tensor, y: Tensor) -> float:
    """The loss of log-probabilities as a share of temperature scaling's, with a price for worse calibration."""
    excess = calibration_error(log_p, y) - calibration_error(scaled, y) - SELECTION.calibration_slack
    return mean_loss(log_p, y) / mean_loss(scaled, y) + SELECTION.calibration_price * max(0.0, excess)


@dataclass(frozen=True)
class HeldOutRows:
    """Rows on which corrections of the mean are compared.

    Args:
        outputs: The network's logits (N, C).
        y: The classes (N,).
        scaled: Log-probabilities (N, C) by temperature scaling.
        fixed: Whether the network's class has to stay.
    """

    outputs: Tensor
    y: Tensor
    scaled: Tensor
    fixed: bool

    def constrained(self, log_p: Tensor) -> Tensor:
        """The log-probabilities as they would be predicted."""
        return keep_class(log_p, self.outputs.argmax(-1)) if self.fixed else log_p

    def cross_fitted(self, form: CorrectionForm, log_p: Tensor, start: Sequence[Tensor] | None) -> Tensor:
        """Log-probabilities (N, C) by corrections that were each fitted to other rows."""
        order = content_order(Outputs.trusted(outputs=self.outputs), seed=1)
        order = order[self.y[order].argsort(stable=True)]
        found = torch.empty_like(log_p, dtype=torch.float64)
        for k in range(SELECTION.correction_folds):
            inside = torch.zeros(len(order), dtype=torch.bool, device=order.device)
            inside[order[k :: SELECTION.correction_folds]] = True
            correction = MeanCorrection.fit(form, log_p[~inside], self.outputs[~inside], self.y[~inside], start)
            found[inside] = correction(log_p[inside], self.outputs[inside])
        return found


def with_correction(
    plain: Selection, held_out: dict[VarianceForm, HeldOut], processes: list[VarianceForm], rows: HeldOutRows
) -> Selection:
    """The selection with the correction of the mean that is best on other rows, or `plain` if none is clearly better.

    Args:
        plain: The best form without a correction.
        held_out: Log-probabilities of all candidates.
        processes: The candidates with a variance that were not dropped.
        rows: The rows that these log-probabilities are of.
    """
    y, scaled = rows.y, rows.scaled
    simple = plain.form.variance == TEMPERATURE_SCALING.variance
    uncorrected = plain.recalibration.log_probs(held_out[plain.form][plain.ood_strength])
    best_log_p = best_free = uncorrected
    enough = SELECTION.significance if len(y) >= SELECTION.min_rows else SELECTION.significance_of_few
    best, least, unit = plain, priced_loss(uncorrected, scaled, y), mean_loss(scaled, y)
    advantage = SELECTION.process_advantage if plain.ood_strength else 0.0
    least += advantage * simple
    forms = [
        form for form in SELECTION.corrections if form.matrix_ridge is None or scaled.shape[1] <= SELECTION.max_matrix
    ]

    def attempts(variance: VarianceForm, terms: str, forms: Sequence[CorrectionForm]) -> dict[CorrectionForm, float]:
        """Tries corrections, from the simplest on, and returns their losses."""
        nonlocal best, least, best_log_p, best_free
        strength = plain.ood_strength if variance == plain.form else 0.0
        log_p = held_out[variance][strength]
        found: dict[CorrectionForm, float] = {}
        start, last = None, math.inf
        for form in forms:
            fitted = MeanCorrection.fit(form := form._replace(terms=terms), log_p, rows.outputs, y, start)
            start = fitted.parameters_of_fit
            free = rows.cross_fitted(form, log_p, start)
            if mean_loss(free, y) < mean_loss(best_free, y):
                best_free = free
            cross_fitted = rows.constrained(free)
            score, caution = score_of(variance, cross_fitted, scaled, y), standard_error(cross_fitted, uncorrected, y)
            loss = priced_loss(cross_fitted, scaled, y) + caution / unit + advantage * (terms != "process")
            found[form] = loss
            if score.significance > enough and loss < least:
                reason = f"{score.gain:.3f} nats a row better than temperature scaling on {len(y):,} held-out rows"
                best = replace(plain, form=variance, reason=reason, recalibration=NONE, ood_strength=strength)
                best = replace(best, correction=form, fitted_correction=fitted)
                least, best_log_p = loss, cross_fitted
            if form.matrix_ridge is not None:
                if (now := mean_loss(cross_fitted, y)) > last:
                    break
                last = now
        return found

    found = attempts(plain.form, "network" if simple else "process", forms)
    # Those that read both are tried near the best of the others.
    near = min(range(len(found)), key=list(found.values()).__getitem__)
    for process in processes if simple else [plain.form]:
        attempts(process, "both", forms[near : near + 2])
    if rows.fixed:
        warn_of_bias(best_log_p, best_free, rows)
    return best


def warn_of_bias(fixed: Tensor, free: Tensor, rows: HeldOutRows) -> None:
    """Warns where predictions that may change the class are much better than those that keep the network's.

    Args:
        fixed: Log-probabilities (N, C) of the selected form, which keeps the class.
        free: Log-probabilities (N, C) of the best one that may change it.
        rows: The rows that they are of.
    """
    y, own = rows.y, rows.outputs.argmax(-1)
    accuracies = [float((label == y).double().mean()) for label in (own, free.argmax(-1))]
    gain = mean_loss(fixed, y) - mean_loss(free, y)
    if accuracies[1] - accuracies[0] < SELECTION.bias_accuracy or gain < 3.0 * standard_error(free, fixed, y):
        return
    classes = rows.outputs.shape[1]
    shares = [torch.bincount(label, minlength=classes) / len(y) for label in (own, y)]
    favored = int((shares[0] - shares[1]).argmax())
    predicted, true = (float(share[favored]) for share in shares)
    warn(
        f"The network favors class {favored}: it predicts it for {predicted:.0%} of the held-out rows, and it is true "
        f'for {true:.0%}. mean="calibrated" would lower the negative log-likelihood from {mean_loss(fixed, y):.3g} to '
        f"{mean_loss(free, y):.3g} and raise the accuracy from {accuracies[0]:.0%} to {accuracies[1]:.0%}."
    )


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
    gain = float(gains.mean())
    return CandidateScore(form, gain - float(base.mean()), gain, standard_error(log_p, scaled, y), len(y))


def standard_error(log_p: Tensor, other: Tensor, y: Tensor) -> float:
    """The standard error of the difference of two mean losses."""
    difference = losses(log_p, y) - losses(other, y)
    return float(difference.std() / len(y) ** 0.5) if len(y) > 1 else 0.0


def losses(log_p: Tensor, y: Tensor) -> Tensor:  # (N,)
    """The negative log-likelihood of each row."""
    return -log_p.double().gather(-1, y[:, None]).squeeze(-1)


def mean_loss(log_p: Tensor, y: Tensor) -> float:
    """The mean negative log-likelihood, above zero."""
    return max(float(losses(log_p, y).mean()), 1e-12)


def calibration_error(log_p: Tensor, y: Tensor) -> float:
    """The expected calibration error of log-probabilities (N, C) for labels (N,)."""
    confidence, label = log_p.double().exp().max(-1)
    return float(expected_calibration_error(confidence, label == y))
