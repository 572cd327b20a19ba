"""`ResidualMixture`, against numerical integration."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats
from torch import Tensor

from posthoc import LatentGaussian, RegressionPredictive
from posthoc.evaluate.metrics import coverage, cqm, crps, crps_of_draws
from posthoc.predictive import residual_mixture as mixture_module
from posthoc.predictive.residual_mixture import NORMAL, ResidualMixture, grid_of_normals, zero_mean_weights

LEVELS = (0.001, 0.025, 0.5, 0.9, 0.9999)


def two_outputs() -> ResidualMixture:
    """A skewed mixture and a peaked one, with mean zero and unit variance."""
    weights = torch.tensor([[0.6, 0.3, 0.1], [0.7, 0.2, 0.1]], dtype=torch.float64)
    shifts = torch.tensor([[-0.5, 0.2, 2.4], [0.0, 0.1, -0.2]], dtype=torch.float64)
    spreads = torch.tensor([[0.2, 0.7, 1.5], [0.1, 1.0, 4.0]], dtype=torch.float64)
    return (found := ResidualMixture(weights, shifts, spreads)).divided(found.variance.sqrt())


def density_and_cdf(mixture: ResidualMixture, output: int) -> tuple[Callable[[float], float], Callable[[float], float]]:
    """Written with SciPy."""
    weights, normals = mixture.weights[output], stats.norm(mixture.shifts[output], mixture.spreads[output])
    return lambda z: float(weights.numpy() @ normals.pdf(z)), lambda z: float(weights.numpy() @ normals.cdf(z))


def integral(function: Callable[[float], float], low: float = -60.0, high: float = 60.0) -> float:
    points = [low, *(p for p in (-0.5, 0.0, 0.5, 1.0, 3.0) if low < p < high), high]
    return float(sum(integrate.quad(function, a, b, limit=400, epsabs=1e-12)[0] for a, b in pairwise(points)))


@pytest.mark.parametrize("output", [0, 1])
def test_density_moments_and_cdf_are_those_of_numerical_integration(output: int) -> None:
    mixture = two_outputs()
    density, _ = density_and_cdf(mixture, output)
    for z in (-1.3, 0.0, 2.2):
        both = torch.full((1, 2), z, dtype=torch.float64)
        assert float(mixture.log_density(both)[0, output]) == pytest.approx(np.log(density(z)), rel=1e-12)
        assert float(mixture.cdf(both)[0, output]) == pytest.approx(integral(density, high=z), abs=1e-9)
    for power, moment in enumerate((1.0, 0.0, 1.0)):
        assert integral(lambda v, k=power: v**k * density(v)) == pytest.approx(moment, abs=1e-9)  # type: ignore[misc]
    assert float(mixture.variance[output]) == pytest.approx(1.0)


@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("z", [-1.3, 0.0, 2.2, 9.0])
def test_crps_is_the_integral_of_the_squared_distance_of_distributions(output: int, z: float) -> None:
    mixture = two_outputs()
    _, cdf = density_and_cdf(mixture, output)
    expected = integral(lambda v: cdf(v) ** 2, high=z) + integral(lambda v: (1.0 - cdf(v)) ** 2, low=z)
    assert float(mixture.crps(torch.full((2,), z, dtype=torch.float64))[output]) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("output", [0, 1])
def test_quantiles_are_those_of_a_root_finder(output: int) -> None:
    found = two_outputs().quantile(torch.tensor(LEVELS, dtype=torch.float64)[:, None])
    _, cdf = density_and_cdf(two_outputs(), output)
    roots = [optimize.brentq(lambda v, q=level: cdf(v) - q, -60, 60, xtol=1e-13) for level in LEVELS]
    assert found[:, output].tolist() == pytest.approx(roots, abs=1e-9)


def test_parts_of_many_values_are_those_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture, levels = two_outputs(), torch.rand(50, 2, generator=torch.Generator().manual_seed(0))
    whole = mixture.cdf(levels), mixture.quantile(levels)
    monkeypatch.setattr(mixture_module, "rows_that_fit", lambda numbers: 20 // numbers)
    torch.testing.assert_close((mixture.cdf(levels), mixture.quantile(levels)), whole)


def test_draws_have_the_mixture() -> None:
    mixture = two_outputs()
    draws = mixture.sample((200_000, 2), torch.Generator().manual_seed(0))
    for level in (0.05, 0.5, 0.95):
        below = draws <= mixture.quantile(torch.full((2,), level))
        assert below.double().mean(0).tolist() == pytest.approx([level, level], abs=0.003)


def test_balancing_is_the_constrained_maximum() -> None:
    shifts, rows = np.array([-1.0, 0.0, 0.5, 2.0]), np.array([10.0, 5.0, 40.0, 7.0])
    balanced = {"type": "eq", "fun": lambda w: np.array([w.sum() - 1.0, w @ shifts])}
    options = {"bounds": [(1e-9, 1.0)] * 4, "constraints": balanced, "options": {"ftol": 1e-14, "maxiter": 500}}
    found = optimize.minimize(lambda w: -float(rows @ np.log(w)), np.full(4, 0.25), **options)
    np.testing.assert_allclose(zero_mean_weights(*map(torch.tensor, (rows, shifts))), found.x, atol=1e-5)


def test_likelihood_never_falls_in_em(monkeypatch: pytest.MonkeyPatch) -> None:
    z = skewed(400)
    shifts, spreads = grid_of_normals().T
    prior, scores = torch.zeros_like(shifts), []
    prior[len(prior) // 2] = mixture_module.PRIOR_ROWS
    for rounds in (0, 1, 2, 3, 4, 8, 15, 16, 30):
        monkeypatch.setattr(mixture_module, "EM_STEPS", rounds)
        weights = mixture_module.fitted_weights(z, shifts, spreads, prior)
        mixture = ResidualMixture(weights[None], shifts[None], spreads[None])
        expected = prior.max() * weights[len(prior) // 2].log()  # rows known to be of one normal
        scores.append(float(mixture.log_density(z).sum() + expected))
        assert float((weights * shifts).sum()) == pytest.approx(0.0, abs=1e-9)
    assert all(after >= before - 1e-7 for before, after in pairwise(scores))
    assert scores[-1] > scores[0] + 10.0


def skewed(n: int, seed: int = 0) -> Tensor:
    """Of a Gumbel mixture with mean zero and unit variance."""
    draws = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (-(-draws.log()).log() - np.euler_gamma) / (np.pi / np.sqrt(6.0))


def test_em_finds_a_known_mixture() -> None:
    truth = two_outputs()
    found = ResidualMixture.fit(truth.sample((20_000, 2), torch.Generator().manual_seed(1)))
    torch.testing.assert_close((found.weights * found.shifts).sum(-1), torch.zeros(2, dtype=torch.float64))
    new = truth.sample((20_000, 2), torch.Generator().manual_seed(2))
    lost, gaussian = ((truth.log_density(new) - each.log_density(new)).mean(0) for each in (found, NORMAL))
    assert (lost < 0.01).all()
    assert (gaussian > 0.1).all()
    for level in (0.05, 0.25, 0.5, 0.75, 0.95):
        q = found.quantile(torch.full((2,), level))
        assert (new <= q).double().mean(0).tolist() == pytest.approx([level, level], abs=0.012)


@pytest.mark.parametrize("n", [200, 2000])
def test_gaussian_residuals_have_nearly_the_normal_mixture(n: int) -> None:
    z = torch.randn(n, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mixture = ResidualMixture.fit((z - z.mean()) / z.std())
    new = torch.randn(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert float((NORMAL.log_density(new) - mixture.log_density(new)).mean()) < 0.02


def predictive(mixture: ResidualMixture | None, n: int = 7) -> RegressionPredictive:
    generator = torch.Generator().manual_seed(3)
    mean, latent, noise = (torch.rand(n, 2, generator=generator, dtype=torch.float64) for _ in range(3))
    return RegressionPredictive(LatentGaussian(mean, latent), noise, residuals=mixture)


def test_the_normal_mixture_is_the_gaussian_predictive() -> None:
    gaussian, same = predictive(None), predictive(NORMAL)
    y = gaussian.mean + torch.randn(7, 2, dtype=torch.float64)
    levels = torch.rand(7, 2, dtype=torch.float64)
    torch.testing.assert_close(same.quantile(levels), gaussian.quantile(levels), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(same.interval(0.9), gaussian.interval(0.9))
    for ask in (RegressionPredictive.cdf, RegressionPredictive.log_prob, crps, cqm, coverage):
        torch.testing.assert_close(ask(same, y), ask(gaussian, y))


def test_a_predictive_is_consistent_with_its_mixture() -> None:
    pred = predictive(two_outputs())
    lower, upper = pred.interval(0.8)
    for end, level in ((lower, 0.1), (upper, 0.9)):
        torch.testing.assert_close(pred.cdf(end), torch.full_like(end, level))
    levels = torch.rand(7, 2, dtype=torch.float64)
    torch.testing.assert_close(pred.cdf(pred.quantile(levels)), levels)
    y, h = pred.mean + torch.randn(7, 2, dtype=torch.float64), 1e-5
    slope = (pred.cdf(y + h) - pred.cdf(y - h)) / (2 * h)
    torch.testing.assert_close(pred.log_prob(y), slope.log().sum(-1), rtol=1e-4, atol=1e-4)
    draws = pred.sample(40_000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(draws.mean(0), pred.mean, rtol=0.0, atol=0.03)
    torch.testing.assert_close(draws.var(0), pred.variance, rtol=0.06, atol=0.0)
    by_draws = crps_of_draws(draws[:4000], y, fair=True).mean()
    torch.testing.assert_close(crps(pred, y), by_draws, rtol=0.02, atol=0.0)
    joined = RegressionPredictive.cat([pred[:3], pred[3:]])
    torch.testing.assert_close(joined.interval(0.8), (lower, upper))
    assert pred.to("meta").residuals.weights.is_meta  # type: ignore[union-attr]


def test_draws_with_a_covariance_have_it() -> None:
    mean = torch.zeros(1, 2, dtype=torch.float64)
    latent = torch.tensor([[[1.0, 0.6], [0.6, 2.0]]], dtype=torch.float64)
    noise = torch.full_like(mean, 0.5)
    gaussian = LatentGaussian(mean, latent.diagonal(dim1=1, dim2=2), latent, False)
    pred = RegressionPredictive(gaussian, noise, two_outputs())
    draws = pred.sample(200_000, torch.Generator().manual_seed(0))[:, 0]
    torch.testing.assert_close(draws.T.cov(), pred.covariance[0], rtol=0.05, atol=0.02)
