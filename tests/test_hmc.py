"""Hamiltonian Monte Carlo against posteriors that can be had otherwise: in closed form, or by summing over a grid."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from posthoc.collect.loaders import Batch
from posthoc.errors import DataError, FileError, MissingExtraError, OptionError, PosthocWarning
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.methods.weights.hmc import HMC, MAX_NOISE, WeightPosterior, agreement
from tests.cases import in_eval, inputs, labels, mlp, values

D = torch.float64
QUICK = {"samples": 5, "warmup": 5, "chains": 2, "max_tree_depth": 2, "max_r_hat": None}
LONG = {"samples": 250, "warmup": 60, "max_tree_depth": 4}


def linear(outputs: int = 1, width: int = 2, seed: int = 1) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(width, outputs, bias=False).double()


def line(n: int = 25, noise: float = 0.5) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=g, dtype=D)
    truth = torch.tensor([[0.7], [-1.2]], dtype=D)
    return x, x @ truth + noise * torch.randn(n, 1, generator=g, dtype=D)


def conjugate(x: Tensor, y: Tensor, prior_std: float, bound: float) -> tuple[Tensor, Tensor, float, float]:
    """Bayesian linear regression with weights N(0, s²) and a uniform noise variance: given σ² all is Gaussian, and σ²
    itself is summed over a grid. Mean and covariance of the weights, mean and deviation of σ²."""
    grid = (torch.arange(2000, dtype=D) + 0.5) * bound / 2000
    variance = grid[:, None, None]
    covariance = torch.linalg.inv(x.mT @ x / variance + torch.eye(2, dtype=D) / prior_std**2)
    means = (covariance @ x.mT @ y / variance).squeeze(-1)
    evidence = prior_std**2 * x @ x.mT + variance * torch.eye(len(x), dtype=D)
    p = torch.distributions.MultivariateNormal(0.0 * y[:, 0], evidence).log_prob(y[:, 0]).softmax(0)
    mean, noise = p @ means, float(p @ grid)
    away = means - mean
    total = torch.einsum("s,sij->ij", p, covariance + away[:, :, None] * away[:, None, :])
    return mean, total, noise, float((p @ (grid - noise).square()).sqrt())


def test_the_energy_is_minus_the_log_density():
    """Its differences, from the distributions' own densities and the derivative of σ²(u)."""
    x, y = line()
    likelihood = Gaussian("per_output")
    likelihood.initialize(torch.zeros_like(y), y)
    data = [(Batch((x,), {}, None), y)]
    posterior = WeightPosterior(lambda w, batch: batch.args[0] @ w[:, None], data, likelihood, 1 / 0.3**2)

    def energy(w: Tensor, u: Tensor) -> Tensor:
        variance = posterior.noise(u) * likelihood.scale.square()
        slope = torch.autograd.functional.jacobian(posterior.noise, u).abs().log().sum()
        log_density = torch.distributions.Normal(x @ w[:, None], variance.sqrt()).log_prob(y).sum()
        return -(torch.distributions.Normal(0.0, 0.3).log_prob(w).sum() + log_density + slope)

    places = torch.randn(3, 3, generator=torch.Generator().manual_seed(1), dtype=D)
    ours = torch.stack([posterior({"weights": at[:2], "noise": at[2:]}) for at in places])
    expected = torch.stack([energy(at[:2], at[2:]) for at in places])
    torch.testing.assert_close(ours.diff(), expected.diff())
    assert float(posterior.max_noise) == pytest.approx(MAX_NOISE)  # no network: its residuals are the targets


def test_linear_regression_is_the_closed_form():
    x, y = line()
    method = HMC(linear(), "regression", **LONG, prior_precision=1 / 0.8**2).fit((x, y))
    error = float((in_eval(linear(), x) - y).square().mean())
    mean, covariance, variance, spread = conjugate(x, y, 0.8, MAX_NOISE * max(float(y.var(unbiased=False)), error))
    draws, noise = method._fitted.weights, method._fitted.noise
    assert draws.shape == (500, 2)
    ess = method.diagnostics["ess"]
    assert ess > 150
    assert method.diagnostics["r_hat"] < 1.05
    assert sum(method.diagnostics["divergences"]) == 0
    std = covariance.diagonal().sqrt()
    assert ((draws.mean(0) - mean) / std).abs().max() < 4.0 / math.sqrt(ess)
    relative = (draws.mT.cov() - covariance) / torch.outer(std, std)
    assert relative.abs().max() < 4.0 * math.sqrt(2.0 / ess)
    assert abs(float(noise.mean()) - variance) / spread < 4.0 / math.sqrt(ess)
    assert abs(float(noise.std()) / spread - 1.0) < 0.3
    # and so is the predictive
    t = torch.tensor([[1.0, 0.0], [2.0, 3.0]], dtype=D)
    pred = method.predict(t)
    expected = (t @ covariance @ t.mT).diagonal()[:, None]
    torch.testing.assert_close(pred.latent_variance, expected, rtol=0.3, atol=0)
    torch.testing.assert_close(pred.noise, noise.mean().expand(2, 1))
    torch.testing.assert_close(pred.latent.mean, t @ draws.mean(0)[:, None])


def test_classification_is_the_sum_over_a_grid():
    g = torch.Generator().manual_seed(3)
    x = torch.randn(15, 1, generator=g, dtype=D)
    y = (x[:, 0] + 0.5 * torch.randn(15, generator=g, dtype=D) > 0).long()
    method = HMC(linear(2, width=1), "classification", **LONG, prior_precision=1 / 1.5**2).fit((x, y))
    axis = torch.linspace(-8.0, 8.0, 161, dtype=D)
    weights = torch.cartesian_prod(axis, axis)  # (K, 2)
    log_likelihood = (weights[:, None, :] * x).log_softmax(-1)[:, torch.arange(15), y].sum(1)
    p = (log_likelihood - 0.5 * (weights / 1.5).square().sum(-1)).softmax(0)
    mean = p @ weights
    std = (p @ (weights - mean).square()).sqrt()
    draws, ess = method._fitted.weights, method.diagnostics["ess"]
    assert ess > 150
    assert ((draws.mean(0) - mean) / std).abs().max() < 4.0 / math.sqrt(ess)
    assert ((draws.std(0) / std) - 1.0).abs().max() < 0.2
    t = torch.tensor([[0.3], [-2.0]], dtype=D)
    expected = torch.einsum("k,knc->nc", p, (weights[:, None, :] * t[None]).softmax(-1))
    torch.testing.assert_close(method.predict(t).probs, expected, rtol=0, atol=0.04)


def test_loaders_and_num_data_have_the_posterior_of_arrays():
    (x, y), loader = line(), DataLoader(TensorDataset(*line()), batch_size=7)

    def drawn(data, **options):
        return HMC(linear(), "regression", **QUICK).fit(data, **options)._fitted.weights

    torch.testing.assert_close(drawn((x, y)), drawn(loader))
    torch.testing.assert_close(drawn((torch.cat([x, x]), torch.cat([y, y]))), drawn((x, y), num_data=50))


def test_a_warning_where_chains_do_not_agree():
    independent = torch.randn(3, 300, 2, generator=torch.Generator().manual_seed(0), dtype=D)
    assert agreement(independent)[0] < 1.02 < 2.0 < agreement(independent + 3.0 * torch.arange(3)[:, None, None])[0]
    assert agreement(torch.ones(2, 10, 1, dtype=D))[0] == math.inf  # chains that never moved
    method = HMC(linear(), "regression", samples=4, warmup=1, chains=3, max_tree_depth=1)
    with pytest.warns(PosthocWarning, match="R-hat is .* max_tree_depth"):
        method.fit(line())
    assert method.fitted


def test_frozen_weights_stay(tmp_path):
    model, x, y = mlp(2), inputs(), values(outputs=2)
    model[0].requires_grad_(False)
    method = HMC(model, Gaussian("per_output"), **QUICK).fit((x, y))
    assert method._fitted.metadata["names"] == ["2.weight", "2.bias"]
    assert method._fitted.weights.shape == (10, 14)
    assert method._fitted.noise.shape == (10, 2)
    hidden, pred = in_eval(model[:-1], x), method.predict(x)
    expected = torch.stack([hidden @ w[:12].view(2, 6).mT + w[12:] for w in method._fitted.weights]).mean(0)
    torch.testing.assert_close(pred.latent.mean, expected)
    # A network may be loaded with other weights frozen.
    method.save(tmp_path / "head.safetensors")
    again = HMC.load(tmp_path / "head.safetensors", model=model.requires_grad_(True))
    assert torch.equal(again.predict(x).latent.variance, pred.latent.variance)
    assert again.diagnostics == method.diagnostics
    with pytest.raises(OptionError, match="requires_grad_"):
        HMC(model.requires_grad_(False), "regression").fit((x, y))


def test_a_fixed_temperature_is_used():
    x, y = inputs(), labels()
    cold, warm = (HMC(mlp(3), Categorical(temperature=t), **QUICK).fit((x, y)) for t in (1.0, 5.0))
    assert not torch.equal(cold._fitted.weights, warm._fitted.weights)
    assert float(warm.predict(x).temperature) == pytest.approx(5.0)


def test_bad_input(monkeypatch, tmp_path):
    x, y = line()
    with pytest.raises(OptionError, match="checkpoint"):
        HMC(linear(), "regression").fit((x, y), checkpoint=tmp_path / "c")
    big = nn.Linear(2, 300_000, bias=False)
    with pytest.raises(OptionError, match=r"hours.*600,000 weights, 25 points.*fmgp, laplace or mfvi"):
        HMC(big, "classification", samples=1000, chains=4).fit((x.float(), torch.arange(25) % 2))
    with pytest.raises(DataError, match="targets"):
        HMC(linear(), "regression", **QUICK).fit(x)
    method = HMC(linear(), "regression", **QUICK).fit((x, y))
    method.save(tmp_path / "head.safetensors")
    with pytest.raises(FileError, match="another"):
        HMC.load(tmp_path / "head.safetensors", model=linear(seed=2))
    monkeypatch.setitem(sys.modules, "pyro", None)
    with pytest.raises(MissingExtraError, match=r"posthoc\[hmc\]"):
        HMC(linear(), "regression")
