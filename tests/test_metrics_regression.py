"""Scores of real numbers against scikit-learn, quadrature and definitions written as loops."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import sklearn.metrics as sk  # type: ignore[import-untyped]
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats  # type: ignore[import-untyped]

from posthoc import DataError, WrongTaskError
from posthoc.evaluate.metrics import CQM, CRPS, MAE, NLL, RMSE, Coverage, SampleCRPS, Width, crps_of_draws
from posthoc.predictive.base import RegressionPredictive
from tests import oracles
from tests.test_metrics import real_case


def value(metric, *batch) -> float:
    metric.update(*batch)
    return float(metric.compute())


@pytest.mark.parametrize("outputs", [1, 3])
def test_errors_of_the_mean(outputs):
    pred, y = real_case(outputs=outputs)
    assert value(RMSE(), pred, y) == pytest.approx(sk.mean_squared_error(y.ravel(), pred.mean.ravel()) ** 0.5)
    assert value(MAE(), pred, y) == pytest.approx(sk.mean_absolute_error(y, pred.mean))


@pytest.mark.parametrize("outputs", [1, 3])
def test_nll_is_the_density_of_a_point(outputs):
    pred, y = real_case(outputs=outputs)
    density = stats.norm(pred.mean.numpy(), pred.std.numpy()).logpdf(y.numpy()).sum(-1)
    assert value(NLL(), pred, y) == pytest.approx(-density.mean())


def test_coverage_and_width():
    pred, y = real_case(outputs=2)
    lower, upper = stats.norm(pred.mean.numpy(), pred.std.numpy()).interval(0.8)
    inside = (lower < y.numpy()) & (y.numpy() < upper)
    assert 0.3 < inside.mean() < 0.8  # neither all nor none
    assert value(Coverage(0.8), pred, y) == pytest.approx(inside.mean())
    assert value(Width(0.8), pred, y) == pytest.approx((upper - lower).mean())


def crps_by_quadrature(cdf, y: float) -> float:
    below = integrate.quad(lambda t: cdf(t) ** 2, -np.inf, y)[0]
    return below + integrate.quad(lambda t: (1 - cdf(t)) ** 2, y, np.inf)[0]


def test_crps_is_its_integral():
    pred, y = real_case(8)
    expected = [
        crps_by_quadrature(stats.norm(float(m), float(s)).cdf, float(t))
        for m, s, t in zip(pred.mean, pred.std, y, strict=True)
    ]
    assert value(CRPS(), pred, y) == pytest.approx(np.mean(expected), rel=1e-7)


def test_crps_without_doubt_is_the_absolute_error():
    mean, y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.5, 2.0, -1.0])
    for variance in (0.0, 1e-30):
        pred = RegressionPredictive(mean, torch.full_like(mean, variance), torch.zeros_like(mean))
        assert value(CRPS(), pred, y) == pytest.approx(4.5 / 3)


def test_the_closed_form_is_for_gaussians_only():
    y = torch.tensor([0.5, 1.0, -2.0])
    pred = SimpleNamespace(
        mean=torch.zeros(3), interval=lambda level: (torch.full((3,), -1.0), torch.full((3,), level))
    )
    assert value(Coverage(0.9), pred, y) == pytest.approx(1 / 3)
    with pytest.raises(WrongTaskError, match="predictions of a regression, got a SimpleNamespace"):
        CRPS().update(pred, y)


def test_crps_of_draws_is_the_integral_of_their_staircase():
    g = torch.Generator().manual_seed(0)
    draws = torch.randn(6, 4, dtype=torch.float64, generator=g)
    y = torch.tensor([-3.0, 0.1, 0.4, 3.0], dtype=torch.float64)
    grid = torch.linspace(-5, 5, 1_000_001, dtype=torch.float64)
    for n in range(4):
        staircase = (draws[:, n, None] <= grid).double().mean(0)
        area = float((staircase - (y[n] <= grid).double()).square().mean() * 10)
        assert float(crps_of_draws(draws, y)[n]) == pytest.approx(area, abs=1e-4)


def test_crps_of_draws_by_all_pairs():
    pred, y = real_case(5, outputs=2)
    draws = pred.sample(7, torch.Generator().manual_seed(0))
    pairs = (draws[:, None] - draws[None]).abs()
    for fair, count in ((False, 7 * 7), (True, 7 * 6)):
        expected = (draws - y).abs().mean(0) - 0.5 * pairs.sum((0, 1)) / count
        torch.testing.assert_close(crps_of_draws(draws, y, fair=fair), expected)
        assert value(SampleCRPS(fair=fair), draws, y) == pytest.approx(float(expected.mean()))


def test_crps_of_draws_estimates_that_of_the_distribution():
    pred, y = real_case(5)
    exact = value(CRPS(), pred, y)
    generator = torch.Generator().manual_seed(0)
    assert value(SampleCRPS(), pred.sample(100_000, generator), y) == pytest.approx(exact, rel=0.01)
    few = pred.sample(3 * 20_000, generator).reshape(3, 20_000, 5, 1)
    fair, plain = (crps_of_draws(few, y.expand(20_000, 5, 1), fair=f).mean() for f in (True, False))
    assert float(fair) == pytest.approx(exact, rel=0.01)
    assert float(plain) > 1.2 * exact


def test_crps_needs_draws():
    with pytest.raises(DataError, match=r"S at least 2, got \(1, 3\)"):
        crps_of_draws(torch.zeros(1, 3), torch.zeros(3), fair=True)
    with pytest.raises(DataError, match="not broadcast"):
        crps_of_draws(torch.zeros(5, 3), torch.zeros(1))


@pytest.mark.parametrize("seed", range(3))
def test_cqm_is_its_integral(seed):
    pred, y = real_case(13, seed=seed)
    assert value(CQM(), pred, y) == pytest.approx(oracles.cqm_by_grid(pred.cdf(y).squeeze(-1)), abs=1e-5)


def test_cqm_of_two_points_by_hand():
    """Levels 0.2 and 0.6: |0 - α| to 0.2, |0.5 - α| to 0.6, |1 - α| to 1."""
    pred = RegressionPredictive(torch.zeros(2).double(), torch.ones(2).double(), torch.zeros(2).double())
    y = pred.quantile(torch.tensor([0.6, 0.2], dtype=torch.float64))
    assert value(CQM(), pred, y) == pytest.approx(0.02 + (0.045 + 0.005) + 0.08, abs=1e-12)


def test_cqm_of_the_extremes():
    pred, _ = real_case(1000)
    assert value(CQM(), pred, pred.mean) == pytest.approx(0.5)
    assert value(CQM(), pred, pred.mean + 100 * pred.std) == pytest.approx(0.5)
    assert value(CQM(), pred, pred.sample(1, torch.Generator().manual_seed(0))[0]) < 0.03


@settings(max_examples=50, deadline=None)
@given(
    errors=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8),
    shift=st.floats(-1e3, 1e3),
    scale=st.floats(1e-2, 1e2),
)
def test_units_go_through(errors, shift, scale):
    """y → a + by moves no CQM or coverage, and multiplies RMSE, MAE, CRPS and width by b."""
    error = torch.tensor(errors, dtype=torch.float64)
    zero, one = torch.zeros_like(error), torch.ones_like(error)
    plain = RegressionPredictive(zero, 0.5 * one, 0.5 * one)
    other = RegressionPredictive(zero + shift, 0.5 * scale**2 * one, 0.5 * scale**2 * one)
    moved = shift + scale * error
    for metric, factor in ((RMSE, scale), (MAE, scale), (CRPS, scale), (Width, scale), (CQM, 1.0)):
        assert value(metric(), other, moved) == pytest.approx(
            factor * value(metric(), plain, error), rel=1e-6, abs=1e-7
        )
    assert 0.0 <= value(CQM(), plain, error) <= 0.5 + 1e-12
    assert value(CRPS(), plain, error) <= value(MAE(), plain, error) + 0.24
