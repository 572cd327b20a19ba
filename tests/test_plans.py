"""The form of a classifier's variance, where none was asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from posthoc import FMGP, Categorical, Outputs, Temperature, load
from posthoc.base import Job
from posthoc.fmgp import selection as plans
from posthoc.fmgp.selection import CALM, FEWEST, FOLDS, SCALED, WARY, Plan, Trial, candidates, choose, shortened
from posthoc.likelihoods.recalibration import NONE, Recalibration
from posthoc.training import Training

G = torch.Generator
QUICK: dict[str, Any] = {"steps": 60, "lr": 0.02, "num_inducing": 20}
ONE, TEN = Plan("separable", prior=1.0), Plan("separable", prior=10.0)


def data(n: int = 1200, *, wrong: bool = False, classes: int = 3, seed: int = 0) -> Outputs:
    """Logits that are right on average, or that mean nothing in one half of the features' space."""
    g = G().manual_seed(seed)
    logits = 2.0 * torch.randn(n, classes, generator=g)
    features = torch.randn(n, 2, generator=g)
    y = torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(1)
    noise = torch.randint(classes, (n,), generator=g)
    return Outputs(logits, torch.where(features[:, 0] > 0, noise, y) if wrong else y, features)


def job(train: Outputs, val: Outputs | None = None) -> Job:
    return Job(train, val, len(train), train, None)


def said(y: torch.Tensor, sureness: float, *, off: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Log-probabilities that favour what is true by so much, more or less: the more, the better they know."""
    scores = torch.randn(len(y), 3, generator=G().manual_seed(seed)) * off
    return (scores + sureness * torch.nn.functional.one_hot(y, 3)).log_softmax(-1)


def decide(n: int = 900, **log_p: Any) -> plans.Decision:
    """The decision among candidates with given losses: functions of the targets, by name."""
    named = {"scaled": SCALED, "one": ONE, "ten": TEN}

    def attempt(trial: Job, plan: Plan, unseen: Outputs) -> Trial:
        name = next(k for k, v in named.items() if v == plan)
        found = log_p[name](unseen.targets)
        return found if isinstance(found, dict) else {CALM: found}

    return choose(job(data(n)), [named[k] for k in log_p if k != "scaled"], attempt)


def too_sure_in_places(y: torch.Tensor) -> torch.Tensor:
    """Sure of half its rows, which are right, and too sure of the others, beyond what a temperature can mend."""
    rows = torch.arange(len(y))
    top = torch.where(rows % 4 < 3, y, (y + 1) % 3)
    sure = torch.where(rows % 4 < 2, 6.0, 1.5)
    return (sure[:, None] * torch.nn.functional.one_hot(top, 3)).log_softmax(-1)


def right(share: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """All rows but one in so many are right, and the confidence says so."""

    def found(y: torch.Tensor) -> torch.Tensor:
        top = torch.where(torch.arange(len(y)) % share > 0, y, (y + 1) % 3)
        p = torch.full((len(y), 3), 0.5 / share)
        return p.scatter(-1, top[:, None], 1.0 - 1.0 / share).log()

    return found


def test_the_best_on_rows_held_out_is_chosen():
    assert decide(scaled=lambda y: said(y, 0.5), one=lambda y: said(y, 1.0), ten=lambda y: said(y, 0.7)).plan == ONE
    assert decide(scaled=lambda y: said(y, 0.5), one=lambda y: said(y, 0.8), ten=lambda y: said(y, 1.0)).plan == TEN


def test_temperature_scaling_stays_unless_another_is_clearly_better():
    assert decide(scaled=lambda y: said(y, 1.0, seed=1), one=lambda y: said(y, 1.0, seed=2)).plan == SCALED
    assert decide(scaled=lambda y: said(y, 1.0), one=lambda y: said(y, 0.5)).plan == SCALED


def test_being_better_does_not_buy_being_badly_calibrated(monkeypatch):
    flat = lambda y: said(y, 0.3, off=0.0)  # noqa: E731
    assert decide(scaled=flat, one=too_sure_in_places).plan == ONE
    monkeypatch.setattr(plans, "CALIBRATION_PRICE", 1e6)
    monkeypatch.setattr(plans, "CALIBRATION_SLACK", -1.0)
    assert decide(scaled=flat, one=too_sure_in_places).plan == SCALED


def test_who_is_badly_calibrated_does_not_put_out_who_is_not(monkeypatch):
    """Else a great gain would be lost with the one that may not have it."""
    monkeypatch.setattr(plans, "CALIBRATION_PRICE", 1e6)
    found = decide(scaled=right(2), one=too_sure_in_places, ten=right(3))
    assert found.plan == TEN


def test_too_much_confidence_is_corrected():
    g = G().manual_seed(0)
    logits = 2.0 * torch.randn(3000, 3, generator=g)
    y = torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(1)
    rows = Outputs(logits, y)

    def attempt(trial: Job, plan: Plan, unseen: Outputs) -> Trial:
        return {CALM: (unseen.outputs * (0.05 if plan == SCALED else 2.0)).log_softmax(-1)}

    found = choose(job(rows), [ONE], attempt)
    assert found.plan == ONE
    assert found.recalibration.temperature == pytest.approx(2.0, rel=0.15)


def unsteady(size: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """`right(3)`, but too sure of every other row and too unsure of the rest: the worse the more, and no temperature
    mends it."""

    def found(y: torch.Tensor) -> torch.Tensor:
        sureness = 1.0 + size * (-1.0) ** (torch.arange(len(y)) // 3)
        return (sureness[:, None] * right(3)(y)).log_softmax(-1)

    return found


def test_wariness_may_cost_known_rows_next_to_nothing():
    for size, taken in ((0.05, WARY), (0.5, CALM)):
        wary = unsteady(size)
        found = decide(scaled=right(2), one=lambda y: {CALM: right(3)(y), WARY: wary(y)})  # noqa: B023
        assert (found.plan, found.wariness) == (ONE, taken)
    assert decide(scaled=right(3)).wariness == CALM


def test_temperature_scaling_pays_nothing_for_wariness():
    """Who falls back to it must not lose to it."""
    assert decide(n=9000, scaled=lambda y: {CALM: right(3)(y), WARY: unsteady(0.01)(y)}).wariness == CALM
    assert decide(scaled=lambda y: {CALM: unsteady(0.5)(y), WARY: right(3)(y)}).wariness == WARY


def test_confidence_is_corrected_for_the_wariness_that_is_taken():
    def too_unsure(y: torch.Tensor) -> Trial:
        return {CALM: said(y, 1.0), WARY: (0.5 * said(y, 1.1)).log_softmax(-1)}

    found = decide(scaled=lambda y: said(y, 0.5), one=too_unsure)
    plain = decide(scaled=lambda y: said(y, 0.5), one=lambda y: said(y, 1.0))
    assert (found.plan, found.wariness, plain.wariness) == (ONE, WARY, CALM)
    assert found.recalibration.temperature == pytest.approx(0.5 * plain.recalibration.temperature, rel=0.1)


def test_confidence_is_corrected_anew_or_as_before_whichever_is_better():
    bends = set()
    for seed in range(12):
        g = G().manual_seed(seed)
        log_p = (2.0 * torch.randn(600, 4, generator=g, dtype=torch.float64)).log_softmax(-1)
        y = torch.multinomial(Recalibration(1.0, 0.3).log_probs(log_p).exp(), 1, generator=g).squeeze(1)
        record, plain = plans.Record(), plans.Decision(ONE, Recalibration(1.0, 0.4))
        record.add({CALM: log_p, WARY: log_p})
        anew, before = Recalibration.of(log_p.float(), y), plain.recalibration.again(log_p.float(), y)
        found = plans.with_wariness(plain, record, y, most=10.0)
        losses = [plans.expected_loss(found._replace(recalibration=c), record, y) for c in (anew, before)]
        assert found.recalibration == (anew if losses[0] <= losses[1] else before)
        bends.add("before" if found.recalibration == before else "anew")
    assert bends == {"before", "anew"}


def test_each_row_is_held_out_once_and_never_fitted_on_then():
    n = 601
    numbered = Outputs(torch.arange(n)[:, None].double().expand(n, 2).clone(), torch.zeros(n, dtype=torch.long))
    seen: list[tuple[set[int], set[int]]] = []

    def attempt(trial: Job, plan: Plan, unseen: Outputs) -> Trial:
        if plan == SCALED:
            rows = tuple(set(part.outputs[:, 0].long().tolist()) for part in (trial.train, unseen))
            seen.append((rows[0], rows[1]))
            assert trial.num_data == len(trial.train)
        return {CALM: torch.zeros(len(unseen), 2).log_softmax(-1)}

    choose(job(numbered), [ONE], attempt)
    assert len(seen) == FOLDS
    for fitted, unseen in seen:
        assert not fitted & unseen
        assert fitted | unseen == set(range(n))
    assert set.union(*(unseen for _, unseen in seen)) == set(range(n))


def test_many_rows_are_held_out_only_once(monkeypatch):
    monkeypatch.setattr(plans, "ENOUGH", 100)
    sizes: list[tuple[int, int]] = []

    def attempt(trial: Job, plan: Plan, unseen: Outputs) -> Trial:
        sizes.append((len(trial.train), len(unseen)))
        return {CALM: torch.zeros(len(unseen), 3).log_softmax(-1)}

    choose(job(data(1000)), [], attempt)
    assert sizes == [(900, 100)]


def test_a_hopeless_candidate_is_not_tried_again():
    tries: list[Plan] = []

    def attempt(trial: Job, plan: Plan, unseen: Outputs) -> Trial:
        tries.append(plan)
        assert unseen.targets is not None
        return {CALM: said(unseen.targets, 1.0 if plan == SCALED else 0.2)}

    choose(job(data()), [ONE, TEN], attempt)
    assert tries == [SCALED, ONE, TEN]


def test_validation_data_decide_where_there_are_any():
    train, val = data(FEWEST), data(50, seed=1)
    asked: list[Any] = []

    def attempt(trial: Job, plan: Plan, unseen: Outputs) -> Trial:
        asked.append((trial.train, trial.val, unseen))
        return {CALM: torch.zeros(len(unseen), 3).log_softmax(-1)}

    choose(job(train, val), [], attempt)
    assert asked == [(train, val, val)]


def test_what_is_tried_depends_on_how_many_rows_there_are_for_an_output():
    assert candidates(99, 10) == [Plan("shared")]
    assert {plan.variance for plan in candidates(100, 10)} == {"separable"}
    assert {plan.variance for plan in candidates(1000, 10)} == {"separable", "per_output"}
    assert {plan.variance for plan in candidates(100_000, 33)} == {"separable"}


def test_candidates_are_trained_for_a_third_of_the_steps():
    short = shortened(Training(steps=1000, lr=0.01))
    assert (short.steps, short.lr) == (334, pytest.approx(0.03))
    assert shortened(Training(lr=0.2)).lr == 0.2
    assert shortened(Training(steps=0)).steps == 0


def test_a_network_that_is_right_everywhere_keeps_temperature_scaling(tmp_path: Path):
    train, test = data(), data(500, seed=1)
    found = FMGP(None, "classification", novelty=0.0, **QUICK).fit(train)
    scaled = Temperature(None, "classification").fit(train)
    torch.testing.assert_close(found.predict(test).probs, scaled.predict(test).probs, rtol=1e-5, atol=1e-7)
    found.save(tmp_path / "head")
    assert torch.equal(load(tmp_path / "head").predict(test).probs, found.predict(test).probs)


@pytest.mark.parametrize("classes", [3, 40])
def test_a_network_that_is_wrong_in_places_gets_a_variance(classes, tmp_path):
    train, test = (data(2000, wrong=True, classes=classes, seed=seed) for seed in (0, 1))
    found = FMGP(None, "classification", **{**QUICK, "steps": 200}).fit(train)
    assert found.head.process.separable
    assert float(found.predict(test).variance.std()) > 0.01
    assert torch.equal(found.predict(test).probs.argmax(-1), test.outputs.argmax(-1))
    scaled = Temperature(None, "classification").fit(train)
    nll = [-float(m.predict(test).log_prob(test.targets).mean()) for m in (found, scaled)]
    assert nll[0] < nll[1] - 0.01
    found.save(tmp_path / "head")
    again = load(tmp_path / "head")
    assert again.head.recalibration == found.head.recalibration != NONE
    assert torch.equal(again.predict(test).probs, found.predict(test).probs)


def test_what_was_asked_for_is_not_chosen():
    train = data()
    assert FMGP(None, "classification", variance="shared", **QUICK).fit(train).head.process.coupling is None
    own = FMGP(None, "classification", variance="per_output", **QUICK).fit(train).head
    assert own.process.coupling is not None
    assert not own.process.separable
    assert FMGP(None, "classification", variance="separable", **QUICK).fit(train).head.process.separable
    fixed = FMGP(None, Categorical(temperature=1.0), **QUICK).fit(train)
    assert float(fixed.likelihood.temperature.detach()) == 1.0
    assert fixed.head.process.coupling is not None
    assert fixed.head.recalibration == NONE


def test_few_rows_are_not_asked():
    found = FMGP(None, "classification", **QUICK).fit(data(FEWEST - 1))
    assert found.head.process.coupling is None  # one variance for all classes
    assert found.head.recalibration == NONE
