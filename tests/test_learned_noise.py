"""FMGP on residuals that are not Gaussian."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from posthoc import FMGP, Gaussian, Outputs, RegressionPredictive
from posthoc.evaluate.metrics import coverage, crps, nll
from posthoc.fmgp.build import Trainer
from posthoc.likelihoods.learned_noise import MixtureNoise
from posthoc.predictive.latent import IndependentLatent

ROWS, SEED = 2000, 100
EDGE = 0.015
"""Normals cannot begin abruptly, as the gamma mixture does: intervals may hold this much more than they should."""


def skewed(n: int, seed: int, outputs: int = 1) -> Outputs:
    """Gamma distributed residuals, of either sign by turns, whose spread grows with x."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 1, generator=generator, dtype=torch.float64)
    draws = torch.rand(n, outputs, 2, generator=generator, dtype=torch.float64)
    noise = (-draws.log().sum(-1) - 2.0) / math.sqrt(2.0)
    sign = 1.0 - 2.0 * (torch.arange(outputs) % 2)
    mean = torch.sin(6.0 * x).repeat(1, outputs)
    return Outputs(mean, mean + sign * (0.1 + x) * noise, features=x)


def fitted(data: Outputs, **options: Any) -> FMGP:
    return FMGP(None, "regression", progress=False, num_inducing=10, scale="none", **options).fit(data)


def shares(pred: RegressionPredictive, y: Tensor, level: float) -> tuple[float, float]:
    """Of targets below and above an interval."""
    lower, upper = pred.interval(level)
    return float((y < lower).double().mean()), float((y > upper).double().mean())


@pytest.fixture(scope="module")
def model() -> FMGP:
    return fitted(skewed(ROWS, SEED))


@pytest.fixture(scope="module")
def test_rows() -> Outputs:
    return skewed(20_000, 1)


def test_intervals_cover_on_both_sides_where_those_of_a_gaussian_do_not(model, test_rows):
    learned, gaussian = model.predict(test_rows), fitted(skewed(ROWS, SEED), residuals="gaussian").predict(test_rows)
    assert gaussian.residuals is None
    for level in (0.5, 0.9, 0.95):
        tail, error = 0.5 - 0.5 * level, math.sqrt(level * (1.0 - level) * (1 / ROWS + 1 / 20_000))
        assert abs(float(coverage(learned, test_rows.targets, level)) - level) <= 2.0 * error + EDGE
        worst = [max(abs(share - tail) for share in shares(p, test_rows.targets, level)) for p in (learned, gaussian)]
        assert worst[0] < 0.75 * worst[1], (level, worst)
    for metric in (nll, crps):
        assert metric(learned, test_rows.targets) < metric(gaussian, test_rows.targets)


def test_the_mean_is_the_networks_and_the_variance_that_of_a_new_observation(model, test_rows):
    pred = model.predict(test_rows)
    assert torch.equal(pred.mean, test_rows.outputs)
    torch.testing.assert_close(pred.residuals.variance, torch.ones(1, dtype=torch.float64))
    assert float((pred.residuals.weights * pred.residuals.shifts).sum()) == pytest.approx(0.0, abs=1e-12)
    true = (0.1 + test_rows.features).square()
    assert float(pred.variance.mean() / true.mean()) == pytest.approx(1.0, abs=0.1)


def test_each_output_has_its_own_mixture():
    data, new = skewed(1000, 0, outputs=2), skewed(5000, 1, outputs=2)
    pred = fitted(data, steps=100).predict(new)
    lower, upper = (end - pred.mean for end in pred.interval(0.9))
    assert bool((upper[:, 0] > -1.3 * lower[:, 0]).all())
    assert bool((upper[:, 1] < -lower[:, 1] / 1.3).all())
    error = new.targets - pred.mean
    assert ((error >= lower) & (error <= upper)).double().mean(0).tolist() == pytest.approx([0.9, 0.9], abs=0.05)


def test_many_outputs_share_one(monkeypatch, tmp_path):
    monkeypatch.setattr("posthoc.likelihoods.learned_noise.MAX_MIXTURES", 1)
    data = skewed(300, 0, outputs=3)
    model = fitted(data, steps=20)
    pred = model.predict(data)
    assert len(pred.residuals.weights) == 1
    assert pred.interval()[0].shape == (300, 3)
    model.save(tmp_path / "head.safetensors")
    assert FMGP.load(tmp_path / "head.safetensors").digest() == model.digest()


def test_the_outputs_may_have_one_dimension():
    data = skewed(300, 0)
    flat = Outputs(data.outputs[:, 0], data.targets[:, 0], data.features)
    pred, wide = fitted(flat, steps=20).predict(flat), fitted(data, steps=20).predict(data)
    torch.testing.assert_close(pred.interval(0.9), tuple(end[:, 0] for end in wide.interval(0.9)))
    assert pred.sample(3).shape == (3, 300)
    assert pred.quantile([0.3, 0.4]).shape == (2, 300)


def test_few_rows_are_gaussian_as_are_others_on_request():
    for rows, options in ((199, {}), (500, {"residuals": "gaussian"})):
        model = fitted(skewed(rows, 0), steps=5, **options)
        assert model.predict(skewed(5, 1)).residuals is None
        assert type(model.likelihood) is Gaussian


def test_very_many_residuals_need_no_other_fit(monkeypatch):
    monkeypatch.setattr("posthoc.fmgp.regression.MANY_RESIDUALS", 300)
    monkeypatch.setattr("posthoc.fmgp.regression.folds", lambda *job: pytest.fail("rows were held out"))
    assert fitted(skewed(300, 0), steps=5).predict(skewed(5, 1)).residuals is not None


def test_folds_start_from_the_kernel_and_the_points_of_all_rows(monkeypatch):
    build, starts = Trainer.build, []

    def spy(self, job, form, likelihood, start=None):
        found, view = build(self, job, form, likelihood, start)
        starts.append((start, copy.deepcopy(found), len(view)))
        return found, view

    monkeypatch.setattr(Trainer, "build", spy)
    model = fitted(skewed(300, 0), steps=20)
    (start, untrained, rows), *others = starts
    assert (start, rows) == (None, 300)
    assert [rows for *_, rows in others] == [200] * 3
    for start, found, _ in others:
        assert start is model.head
        for name, value in found.process.named_parameters():
            expected = untrained if name == "l_raw" else model.head
            assert torch.equal(value, expected.process.get_parameter(name)), name
        assert torch.equal(found.likelihood.log_noise, untrained.likelihood.log_noise)
    assert not torch.equal(model.head.process.l_raw, untrained.process.l_raw)  # the folds trained copies


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_at_other_alpha_a_gaussian_is_trained_and_a_mixture_learned_after(alpha):
    data, new = skewed(1000, 0), skewed(5000, 1)
    model = fitted(data, alpha=alpha, steps=100)
    gaussian = fitted(data, alpha=alpha, steps=100, residuals="gaussian")
    assert model.history.losses == gaussian.history.losses
    assert nll(model.predict(new), new.targets) < nll(gaussian.predict(new), new.targets) - 0.05


def test_the_energy_is_the_log_density_of_the_mixture():
    likelihood = MixtureNoise(Gaussian())
    data = skewed(300, 0)
    likelihood.initialize(data.outputs, data.targets)
    mixture = likelihood.residuals
    torch.testing.assert_close(mixture.variance.detach(), torch.ones(1, dtype=torch.float64))
    assert float((mixture.weights * mixture.shifts).sum().detach()) == pytest.approx(0.0, abs=1e-12)
    mean, target = likelihood.standardize(data.outputs, data.targets)
    total = likelihood.noise + 0.7
    found = likelihood.energy(mean, IndependentLatent(torch.full_like(mean, 0.7)), target, 1.0)
    parts = torch.distributions.Normal(total.sqrt() * mixture.shifts, total.sqrt() * mixture.spreads)
    expected = (mixture.weights * parts.log_prob(target).exp()).sum(-1).log()
    torch.testing.assert_close(found, expected)
