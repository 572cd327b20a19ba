"""Logits in units of their own: of the temperature that suits them, and of how far features are from the data."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.optimize import minimize_scalar

from posthoc import FMGP, Categorical, Outputs, Temperature
from posthoc.base import Job
from posthoc.fmgp.ood import EXPONENTS, OutOfDistribution, best_exponent
from posthoc.fmgp.selection import VarianceForm, fold_rows, folds
from posthoc.likelihoods.temperature import best_inverse, suitable_temperature
from tests.cases import seeded

QUICK: dict[str, Any] = {"steps": 40, "num_inducing": 8, "batch_size": 50, "progress": False}


def classified(n: int = 300, *, temperature: float = 2.0, seed: int = 0) -> Outputs:
    """Logits that are too sure, in float64."""
    g = seeded(seed)
    x = torch.randn(n, 5, generator=g, dtype=torch.float64)
    logits = 3.0 * x @ torch.randn(5, 4, generator=seeded(9), dtype=torch.float64)
    return Outputs(logits, torch.multinomial((logits / temperature).softmax(-1), 1, generator=g).squeeze(1), x)


@pytest.mark.parametrize("variance", ["auto", "shared", "separable", "per_output"])
@pytest.mark.parametrize("factor", [1e-3, 1e4])
def test_a_fit_does_not_depend_on_the_size_of_logits(variance, factor):
    train, new = classified(), classified(50, seed=1)
    plain = FMGP(None, "classification", variance=variance, **QUICK).fit(train).predict(new)
    again = FMGP(None, "classification", variance=variance, **QUICK).fit(train.with_outputs(factor * train.outputs))
    large = again.predict(new.with_outputs(factor * new.outputs))
    torch.testing.assert_close(large.probs, plain.probs, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(large.latent.variance, factor**2 * plain.latent.variance, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(large.temperature, factor * plain.temperature, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(large.latent.covariance / factor**2, plain.latent.covariance, rtol=1e-6, atol=1e-9)
    assert torch.equal(large.latent.mean, factor * new.outputs)


def test_the_unit_is_the_best_temperature_of_the_rows_and_a_wrong_one():
    rows = classified(2000, temperature=3.0)
    gaps = rows.outputs.topk(2, -1)
    usual = (gaps.values[:, 0] - gaps.values[:, 1]).median(0).indices
    z = torch.cat([rows.outputs, rows.outputs[usual, None]])
    y = torch.cat([rows.targets, gaps.indices[usual, 1:]])

    def loss(log_temperature: float) -> float:
        return float(torch.nn.functional.cross_entropy(z / math.exp(log_temperature), y))

    best = minimize_scalar(loss, bounds=(-3.0, 3.0), method="bounded", options={"xatol": 1e-10}).x
    assert suitable_temperature(rows.outputs, rows.targets) == pytest.approx(math.exp(best), rel=1e-5)
    assert suitable_temperature(rows.outputs, rows.targets) == pytest.approx(3.0, rel=0.1)


def test_the_networks_own_temperature_stays_unless_another_is_clearly_better():
    for rows in (classified(2000, temperature=1.0), classified(3, temperature=2.0)):
        assert suitable_temperature(rows.outputs, rows.targets) == 1.0


def test_few_rows_that_are_all_right_are_no_reason_to_be_certain():
    rows = classified(40)
    right = (rows.outputs, rows.outputs.argmax(-1))
    assert 1.0 / best_inverse(*right) < 1e-3  # what suits them best
    p = (rows.outputs / suitable_temperature(*right)).softmax(-1).amax(-1)
    assert 0.9 < float(p.median()) < 0.999


def test_a_temperature_that_is_not_learnt_is_that_of_logits_as_they_come():
    train = classified()
    fixed = FMGP(None, Categorical(temperature=1.5), variance="separable", **QUICK).fit(train).likelihood
    assert (float(fixed.unit), fixed.temperature.item()) == (1.0, pytest.approx(1.5))
    learned = FMGP(None, "classification", variance="separable", **QUICK).fit(train)
    assert float(learned.likelihood.unit) == pytest.approx(suitable_temperature(train.outputs, train.targets))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_few_rows_do_not_end_worse_than_temperature_scaling(seed):
    rows, new = classified(120, seed=seed), classified(4000, seed=10)
    bayes, scaled = (kind(None, "classification").fit(rows) for kind in (FMGP, Temperature))
    losses = [-method.predict(new).log_prob(new.targets).mean() for method in (bayes, scaled)]
    assert float(losses[0]) < 1.03 * float(losses[1])
    assert bool((bayes.predict(new).latent.variance > 0).all())


def unusual(n: int, power: float, seed: int = 0) -> Outputs:
    """Logits whose temperature follows a power of how far the direction of features is from what is usual."""
    rows = classified(n, seed=seed)
    g = seeded(seed + 100)
    spread = torch.randn(n, 6, generator=g, dtype=torch.float64)
    features = 4.0 + 0.5 * spread * torch.rand(n, 1, generator=g, dtype=torch.float64).exp()
    ood = OutOfDistribution.of(features, power)
    assert ood is not None
    logits = rows.outputs / (2.0 * ood.logit_scale(ood.distance(features)))
    return Outputs(rows.outputs, torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(1), features)


@pytest.mark.parametrize("power", [0.0, 0.2, 0.35])
def test_the_exponent_is_that_of_the_networks_errors(power):
    found = best_exponent(unusual(20_000, power))
    assert found in EXPONENTS
    assert found == pytest.approx(power, abs=0.051)


def test_there_is_no_exponent_where_it_earns_nothing_or_nothing_is_known():
    rows = unusual(20_000, 0.3)
    assert best_exponent(Outputs(rows.outputs, rows.targets)) == 0.0
    assert best_exponent(rows[:90]) == 0.0
    shuffled = rows.features[torch.randperm(len(rows), generator=seeded(1))]
    assert best_exponent(Outputs(rows.outputs, rows.targets, shuffled)) <= 0.05


def test_a_fit_with_an_exponent_is_that_of_logits_divided_beforehand(monkeypatch):
    # Else it would be that of other logits for each.
    monkeypatch.setattr("posthoc.likelihoods.categorical.suitable_temperature", lambda *rows: 2.0)
    train, new = unusual(400, 0.3), unusual(150, 0.3, seed=3)
    ood = OutOfDistribution.of(train.features, 0.3)

    def divided(rows: Outputs) -> Outputs:
        return rows.with_outputs(rows.outputs / ood.logit_scale(ood.distance(rows.features)))

    def log_probs(train: Outputs, new: Outputs, exponent: float) -> torch.Tensor:
        job = Job(train, None, len(train), torch.device("cpu"), train)
        method, form = FMGP(None, "classification", **QUICK), VarianceForm("separable", "once", 1.0, exponent)
        return method._trainer(job).fit(job, form)[0].log_probs(new)

    scaled = log_probs(train, new, 0.3)
    torch.testing.assert_close(scaled, log_probs(divided(train), divided(new), 0.0), rtol=1e-8, atol=1e-8)
    assert float((scaled - log_probs(train, new, 0.0)).abs().max()) > 0.1


def test_a_fold_stands_for_its_share_of_the_points():
    rows = classified(300)
    job = Job(rows, None, 90_000, torch.device("cpu"), rows)
    assert [part.num_data for part, _ in folds(job, rows, fold_rows(rows, 3))] == [60_000] * 3
    assert [part.num_data for part, _ in folds(replace(job, num_data=1), rows, fold_rows(rows, 3))] == [1] * 3
