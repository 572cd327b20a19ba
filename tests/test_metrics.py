"""Metrics against direct integrals."""

from __future__ import annotations

import pytest
import torch

from posthoc.metrics import CQM, CRPS, NLL, Coverage
from posthoc.predictive import RegressionPredictive
from tests import oracles


def case(n=40):
    g = torch.Generator().manual_seed(0)
    mean, spread = (torch.rand(n, 1, dtype=torch.float64, generator=g) for _ in range(2))
    pred = RegressionPredictive(mean, spread, 0.1 * torch.ones_like(mean))
    return pred, mean + torch.randn(n, 1, dtype=torch.float64, generator=g)


def test_crps_is_its_integral():
    pred, y = case(5)
    grid = torch.linspace(-12, 12, 400_001, dtype=torch.float64)
    total = 0.0
    for n in range(5):
        normal = torch.distributions.Normal(pred.mean[n], pred.std[n])
        total += float((normal.cdf(grid) - (grid >= y[n]).double()).square().sum() * (grid[1] - grid[0]))
    assert float(CRPS()(pred, y)) == pytest.approx(total / 5, abs=1e-4)


def test_cqm_is_its_integral():
    pred, y = case()
    assert float(CQM()(pred, y)) == pytest.approx(oracles.cqm_by_grid(pred.cdf(y).squeeze(-1)), abs=1e-5)


def test_cqm_of_the_extremes():
    pred, _ = case(1000)
    assert float(CQM()(pred, pred.mean)) == pytest.approx(0.5)
    assert float(CQM()(pred, pred.sample(1, torch.Generator().manual_seed(0))[0])) < 0.03


def test_nll_and_coverage():
    pred, y = case()
    assert float(NLL()(pred, y)) == pytest.approx(-float(pred.log_prob(y).mean()))
    lower, upper = pred.interval(0.8)
    assert float(Coverage(0.8)(pred, y)) == pytest.approx(float(((y > lower) & (y < upper)).double().mean()))


@pytest.mark.parametrize("metric", [NLL, CRPS, CQM, Coverage])
def test_metrics_stream(metric):
    pred, y = case()
    streamed = metric()
    for rows in (slice(0, 7), slice(7, 40)):
        streamed.update(pred[rows], y[rows])
    assert float(streamed.compute()) == pytest.approx(float(metric()(pred, y)))
