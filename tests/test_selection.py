"""The form of a classifier's variance, where none was requested."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from posthoc import FMGP, Categorical, NotFittedError, Outputs, PosthocWarning, Temperature
from posthoc.base import Job
from posthoc.collect.augmentation import Augmented
from posthoc.fmgp import selection
from posthoc.fmgp.build import shortened
from posthoc.fmgp.selection import SELECTION, TEMPERATURE_SCALING, HeldOut, Selection, VarianceForm, candidates, compare
from posthoc.likelihoods.recalibration import NONE, Recalibration
from posthoc.training import Training
from tests.cases import reloaded, seeded

QUICK: dict[str, Any] = {"steps": 60, "lr": 0.02, "num_inducing": 20}
ONE, TEN = VarianceForm("separable", prior=1.0), VarianceForm("separable", prior=10.0)
NAMED = {"scaled": TEMPERATURE_SCALING, "one": ONE, "ten": TEN}
WITHOUT, WITH = 0.0, SELECTION.ood_strength


def data(n: int = 1200, *, wrong: bool = False, classes: int = 3, seed: int = 0) -> Outputs:
    """Logits that are right on average, or that mean nothing in one half of the features' space."""
    g = seeded(seed)
    logits = 2.0 * torch.randn(n, classes, generator=g)
    features = torch.randn(n, 2, generator=g)
    y = torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(1)
    noise = torch.randint(classes, (n,), generator=g)
    return Outputs(logits, torch.where(features[:, 0] > 0, noise, y) if wrong else y, features)


def change(monkeypatch: pytest.MonkeyPatch, **constants: float) -> None:
    monkeypatch.setattr(selection, "SELECTION", replace(SELECTION, **constants))


def job(train: Outputs, val: Outputs | None = None) -> Job:
    return Job(train, val, len(train), torch.device("cpu"), train)


class Trials(list[tuple[VarianceForm, Job, Outputs]]):
    """Notes what is tried, and gives log-probabilities that say nothing."""

    def __call__(self, trial: Job, form: VarianceForm, unseen: Outputs) -> HeldOut:
        self.append((form, trial, unseen))
        return {WITHOUT: torch.zeros(len(unseen), unseen.outputs.shape[1]).log_softmax(-1)}


def knowing(y: torch.Tensor, sureness: float, *, off: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Favors the true class, more or less: the greater the sureness, the better."""
    scores = torch.randn(len(y), 3, generator=seeded(seed)) * off
    return (scores + sureness * torch.nn.functional.one_hot(y, 3)).log_softmax(-1)


def too_sure_in_places(y: torch.Tensor) -> torch.Tensor:
    """Sure of half its rows, which are right, and too sure of the others, beyond what a temperature can mend."""
    rows = torch.arange(len(y)) % 4
    top, sure = torch.where(rows < 3, y, (y + 1) % 3), torch.where(rows < 2, 6.0, 1.5)
    return (sure[:, None] * torch.nn.functional.one_hot(top, 3)).log_softmax(-1)


def right(y: torch.Tensor, share: int = 3) -> torch.Tensor:
    """One row in `share` is wrong, and the confidence says so."""
    top = torch.where(torch.arange(len(y)) % share > 0, y, (y + 1) % 3)
    return torch.full((len(y), 3), 0.5 / share).scatter(-1, top[:, None], 1.0 - 1.0 / share).log()


def unsteady(y: torch.Tensor, size: float) -> torch.Tensor:
    """As `right`, but too sure of every other row and too unsure of the rest, which no temperature mends."""
    sureness = 1.0 + size * (-1.0) ** (torch.arange(len(y)) // 3)
    return (sureness[:, None] * right(y)).log_softmax(-1)


def decide(n: int = 900, **log_p: Any) -> Selection:
    """The selection among candidates whose log-probabilities are functions of the targets, by name."""

    def attempt(trial: Job, form: VarianceForm, unseen: Outputs) -> HeldOut:
        given = log_p[next(name for name, known in NAMED.items() if known == form)](unseen.targets)
        return given if isinstance(given, dict) else {WITHOUT: given}

    return compare(job(data(n)), [NAMED[name] for name in log_p if name != "scaled"], attempt)


@pytest.mark.parametrize(
    ("winner", "log_p"),
    [
        ("one", {"scaled": lambda y: knowing(y, 0.5), "one": lambda y: knowing(y, 1.0), "ten": lambda y: right(y, 2)}),
        ("ten", {"scaled": lambda y: knowing(y, 0.5), "one": lambda y: right(y, 2), "ten": lambda y: knowing(y, 1.0)}),
        ("scaled", {"scaled": lambda y: knowing(y, 1.0, seed=1), "one": lambda y: knowing(y, 1.0, seed=2)}),
        ("scaled", {"scaled": lambda y: knowing(y, 1.0), "one": lambda y: knowing(y, 0.5)}),
    ],
)
def test_the_best_on_held_out_rows_wins_if_it_is_clearly_better_than_temperature_scaling(winner, log_p):
    assert decide(**log_p).form == NAMED[winner]


def test_being_better_does_not_buy_being_badly_calibrated(monkeypatch):
    flat = lambda y: knowing(y, 0.3, off=0.0)  # noqa: E731
    assert decide(scaled=flat, one=too_sure_in_places).form == ONE
    change(monkeypatch, calibration_price=1e6, calibration_slack=-1.0)
    assert decide(scaled=flat, one=too_sure_in_places).form == TEMPERATURE_SCALING
    change(monkeypatch, calibration_price=1e6)  # a badly calibrated candidate does not remove a well calibrated one
    assert decide(scaled=lambda y: right(y, 2), one=too_sure_in_places, ten=right).form == TEN


def test_too_much_confidence_is_corrected():
    def attempt(trial: Job, form: VarianceForm, unseen: Outputs) -> HeldOut:
        return {WITHOUT: (unseen.outputs * (0.05 if form == TEMPERATURE_SCALING else 2.0)).log_softmax(-1)}

    found = compare(job(data(3000)), [ONE], attempt)
    assert found.form == ONE
    assert found.recalibration.temperature == pytest.approx(2.0, rel=0.15)


@pytest.mark.parametrize(
    ("strength", "log_p"),
    [
        (WITH, {"scaled": lambda y: right(y, 2), "one": lambda y: {WITHOUT: right(y), WITH: unsteady(y, 0.05)}}),
        (WITHOUT, {"scaled": lambda y: right(y, 2), "one": lambda y: {WITHOUT: right(y), WITH: unsteady(y, 0.5)}}),
        (WITHOUT, {"scaled": right}),
        # Temperature scaling must not lose to itself.
        (WITHOUT, {"n": 9000, "scaled": lambda y: {WITHOUT: right(y), WITH: unsteady(y, 0.01)}}),
        (WITH, {"scaled": lambda y: {WITHOUT: unsteady(y, 0.5), WITH: right(y)}}),
    ],
)
def test_ood_variance_may_cost_known_rows_next_to_nothing(strength, log_p):
    found = decide(**log_p)
    assert (found.form, found.ood_strength) == (ONE if "one" in log_p else TEMPERATURE_SCALING, strength)


def test_confidence_is_corrected_for_the_ood_strength_that_is_taken():
    def too_unsure(y: torch.Tensor) -> HeldOut:
        return {WITHOUT: knowing(y, 1.0), WITH: (0.5 * knowing(y, 1.1)).log_softmax(-1)}

    found, plain = (decide(scaled=lambda y: knowing(y, 0.5), one=p) for p in (too_unsure, lambda y: knowing(y, 1.0)))
    assert (found.form, found.ood_strength, plain.ood_strength) == (ONE, WITH, WITHOUT)
    assert found.recalibration.temperature == pytest.approx(0.5 * plain.recalibration.temperature, rel=0.1)


def test_confidence_is_corrected_anew_or_as_before_whichever_is_better():
    bends = set()
    for seed in range(12):
        g = seeded(seed)
        log_p = (2.0 * torch.randn(600, 4, generator=g, dtype=torch.float64)).log_softmax(-1)
        y = torch.multinomial(Recalibration(1.0, 0.3).log_probs(log_p).exp(), 1, generator=g).squeeze(1)
        plain = Selection(ONE, "", Recalibration(1.0, 0.4))
        anew, before = Recalibration.of(log_p, y), Recalibration.of(log_p, y, bends=(0.4,))
        found = selection.with_ood(plain, {WITHOUT: log_p, WITH: log_p}, y, max_loss=10.0)
        losses = [float(selection.losses(c.log_probs(log_p), y).mean()) for c in (anew, before)]
        extra = [((c != NONE) + (c.bend != 0.0)) / len(y) for c in (anew, before)]  # the price of each number
        assert found.recalibration == (anew if losses[0] + extra[0] <= losses[1] + extra[1] else before)
        bends.add("before" if found.recalibration == before else "anew")
    assert bends == {"before", "anew"}


def test_each_row_is_held_out_once_and_never_fitted_on_then():
    n, tried = 601, Trials()
    compare(job(Outputs(torch.arange(n)[:, None].double().expand(n, 2).clone(), torch.arange(n) % 2)), [ONE], tried)
    parts = [(trial, unseen) for form, trial, unseen in tried if form == ONE]
    numbers = [[set(rows.outputs[:, 0].long().tolist()) for rows in (trial.train, unseen)] for trial, unseen in parts]
    assert len(parts) == SELECTION.folds
    assert all(trial.num_data == len(trial.train) for trial, _ in parts)
    assert all(not fitted & unseen and fitted | unseen == set(range(n)) for fitted, unseen in numbers)
    assert set.union(*(unseen for _, unseen in numbers)) == set(range(n))


def test_many_rows_are_held_out_only_once(monkeypatch):
    change(monkeypatch, enough_rows=100)
    tried = Trials()
    compare(job(data(1000)), [ONE], tried)
    assert [form for form, *_ in tried] == [ONE, TEMPERATURE_SCALING]
    assert all((len(trial.train), len(unseen)) == (900, 100) for _, trial, unseen in tried)


def test_validation_data_decide_where_there_are_any():
    train, val, tried = data(SELECTION.min_rows), data(50, seed=1), Trials()
    compare(job(train, val), [], tried)
    assert [(trial.train, trial.val, unseen) for _, trial, unseen in tried] == [(train, val, val)]


def test_candidates_depend_on_the_rows_for_each_output():
    assert candidates(99, 10) == [VarianceForm("shared")]
    for sizes, forms in (((100, 10), "separable"), ((1000, 10), "separable per_output"), ((100_000, 33), "separable")):
        assert {form.variance for form in candidates(*sizes)} == set(forms.split())


def test_candidates_and_augmented_images_are_trained_for_a_third_of_the_steps():
    method, trial = FMGP(None, "classification", steps=1000, lr=0.01), job(data())
    augmented = replace(trial, data=Augmented([torch.zeros(2, 3, 8, 8)], "crops"))
    for trainer, steps in ((method._trainer(trial), 1000), (method._trainer(augmented), 334)):
        assert trainer.training.steps == steps
        assert trainer.candidate_training.steps == 334
        assert trainer.candidate_training.lr == pytest.approx(0.03)
    assert shortened(Training(lr=0.2)).lr == 0.2
    assert shortened(Training(steps=0)).steps == 0


@pytest.mark.parametrize("classes", [3, 100])
def test_a_network_that_is_right_everywhere_keeps_temperature_scaling(classes, tmp_path: Path):
    train, test = (data(1200, classes=classes, seed=seed) for seed in (0, 1))
    found = FMGP(None, "classification", ood_strength=0.0, mean="network", **QUICK).fit(train)
    scaled = Temperature(None, "classification").fit(train)
    torch.testing.assert_close(found.predict(test).probs, scaled.predict(test).probs, rtol=1e-5, atol=1e-7)
    for method in (found, scaled):
        assert torch.equal(reloaded(method, tmp_path).predict(test).probs, method.predict(test).probs)


@pytest.mark.parametrize("classes", [3, 40])
def test_a_network_that_is_wrong_in_places_gets_a_variance(classes, tmp_path):
    train, test = (data(2000, wrong=True, classes=classes, seed=seed) for seed in (0, 1))
    found = FMGP(None, "classification", **{**QUICK, "steps": 200}).fit(train)
    assert found.head.process.separable
    assert float(found.predict(test).latent.variance.std()) > 0.01
    assert torch.equal(found.predict(test).probs.argmax(-1), test.outputs.argmax(-1))
    scaled = Temperature(None, "classification").fit(train)
    nll = [-float(m.predict(test).log_prob(test.targets).mean()) for m in (found, scaled)]
    assert nll[0] < nll[1] - 0.01
    again = reloaded(found, tmp_path)
    assert again.selection_.recalibration == found.selection_.recalibration
    assert again.selection_.correction == found.selection_.correction
    assert torch.equal(again.predict(test).probs, found.predict(test).probs)


@pytest.mark.parametrize(
    ("options", "rows", "sentence"),
    [
        ({"variance": "shared"}, 1200, "shared variance: as requested"),
        ({"variance": "per_output"}, 1200, "per_output variance: as requested"),
        ({"variance": "separable"}, 1200, "separable variance (prior 3): as requested"),
        ({"likelihood": Categorical(temperature=1.0)}, 1200, "per_output variance: the default for this likelihood"),
        (
            {},
            SELECTION.min_rows - 1,
            "shared variance, probabilities by temperature scaling: 199 rows are too few to compare forms",
        ),
    ],
)
def test_what_was_requested_and_what_suits_few_rows_is_not_selected(options, rows, sentence):
    bayes = FMGP(None, **{"likelihood": "classification", **options}, **QUICK).fit(data(rows))
    process = bayes.head.process
    assert str(bayes.selection_) == sentence
    assert ((process.coupling is None), process.separable) == ("shared" in sentence, "separable" in sentence)
    assert bayes.selection_.recalibration == NONE
    if "likelihood" in options:
        assert float(bayes.likelihood.temperature.detach()) == 1.0


def test_one_class_alone_is_worth_a_warning_and_no_selection(monkeypatch):
    monkeypatch.setattr(selection, "compare", lambda *args: pytest.fail("forms were compared"))
    train = data(SELECTION.min_rows)
    with pytest.warns(PosthocWarning, match="got class 1 in all 200 rows") as caught:
        found = FMGP(None, "classification", **QUICK).fit(train.with_targets(torch.ones_like(train.targets)))
    assert caught[0].filename == __file__
    assert found.selection_.form.variance == "shared"


def test_the_selection_tells_the_gain_over_temperature_scaling():
    found = decide(scaled=right, one=lambda y: right(y, 9), ten=lambda y: knowing(y, -1.0))
    scaled, one, ten = found.candidates
    assert (scaled.form, one.form, ten.form) == (TEMPERATURE_SCALING, ONE, TEN)
    assert (scaled.gain, scaled.standard_error, scaled.rows) == (0.0, 0.0, 900)
    assert one.gain == pytest.approx(one.log_prob - scaled.log_prob)
    assert (found.gain, found.standard_error, found.rows) == (one.gain, one.standard_error, 900)
    assert one.gain > SELECTION.significance * one.standard_error > 0
    assert (ten.gain < 0, ten.rows) == (True, 300)  # clearly worse on the first fold, and not tried again
    assert str(found) == (
        f"separable variance (prior 1): {one.gain:.3f} nats a row better than temperature scaling on 900 held-out rows"
    )
    kept = decide(scaled=lambda y: knowing(y, 1.0, seed=1), one=lambda y: knowing(y, 1.0, seed=2))
    assert str(kept) == "temperature scaling: nothing was clearly better on 900 held-out rows"
    assert kept.gain == 0.0


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_the_selection_is_shown_saved_and_loaded(task, tmp_path):
    train = data(400, wrong=True)
    if task == "regression":
        train = train.with_targets(train.outputs + torch.randn(400, 3, generator=seeded(1)))
    bayes = FMGP(None, task, **QUICK)
    with pytest.raises(NotFittedError):
        _ = bayes.selection_
    bayes.fit(train)
    assert str(bayes.selection_) in repr(bayes)
    assert reloaded(bayes, tmp_path).selection_ == bayes.selection_
    if task == "regression":
        assert bayes.selection_.residuals == "residuals with a learned distribution, from 400 rows"
        gaussian = FMGP(None, task, residuals="gaussian", **QUICK).fit(train)
        assert gaussian.selection_.residuals == "Gaussian residuals, as requested"
    else:
        assert bayes.selection_.ood_strength == (0.0 if bayes.head.ood is None else 1.0)


def test_the_requested_ood_strength_is_in_the_selection():
    for strength, train in ((0.5, data()), (0.0, data()), (0.5, data().only())):
        bayes = FMGP(None, "classification", variance="separable", ood_strength=strength, **QUICK).fit(train)
        assert bayes.selection_.ood_strength == (strength if train.features is not None else 0.0)
