"""GP regression against the closed forms, written out densely, and against GPyTorch's own exact model."""

from __future__ import annotations

import math
import sys

import gpytorch
import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import multivariate_normal
from torch import Tensor, nn

from posthoc import GP, DataError, Gaussian, LayerError, MissingExtraError, OptionError, Outputs, TrainingError
from posthoc.io import read_head
from posthoc.methods.gp_processes import Exact, Sparse
from tests.cases import AnyWidth, inputs, mlp, recorded, values
from tests.oracles import kernel_matrix

D = torch.float64


def wavy(n: int = 40, noise: float = 0.1, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs in two dimensions, of which one matters, and a sine with noise."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=g, dtype=D)
    return x, torch.sin(2.0 * x[:, :1]) + noise * torch.randn(n, 1, generator=g, dtype=D)


def dense(k_xx, k_tx, k_tt, residual, noise):  # (T,), (T,)
    """The posterior of a GP by an explicit inverse."""
    inverse = torch.linalg.inv(k_xx + noise * torch.eye(len(k_xx), dtype=D))
    return k_tx @ inverse @ residual, (k_tt - k_tx @ inverse @ k_tx.mT).diagonal()


def kernels(method, x, t, output):
    """The fitted kernel among data and new points, from its textbook formula."""
    kernel = method._fitted.process.kernel
    lengthscale = kernel.base_kernel.lengthscale[output, 0].detach()
    location, spread = x.mean(0), x.std(0, unbiased=False)
    a, b = (x - location) / spread, (t - location) / spread
    amplitude = float(kernel.outputscale[output].detach())
    return [kernel_matrix("rbf", *pair, lengthscale, amplitude) for pair in ((a, a), (b, a), (b, b))]


@pytest.mark.parametrize("noise", ["shared", "per_output"])
@pytest.mark.parametrize("mean", ["zero", "network"])
def test_exact_gps_are_the_closed_form(mean, noise):
    """Several outputs are processes of their own."""
    x, first = wavy()
    y, t = torch.cat([first, 30.0 * torch.cos(x[:, 1:]) + 5.0], 1), x[:15] + 0.1
    network = nn.Linear(2, 2).double()
    method = GP(network, Gaussian(noise), mean=mean, steps=40).fit((x, y))
    pred, likelihood = method.predict(t, covariance=True), method.likelihood
    with torch.no_grad():
        prior_x, prior_t = (network(x), network(t)) if mean == "network" else (y.mean(0), y.mean(0).expand(15, 2))
    for c in range(2):
        unit, sigma2 = float(likelihood.scale[c]), float(likelihood.noise.detach().expand(2)[c])
        residual = ((y - prior_x) / unit)[:, c]
        expected_mean, expected_variance = dense(*kernels(method, x, t, c), residual, sigma2)
        torch.testing.assert_close(pred.mean[:, c], prior_t[:, c] + unit * expected_mean, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(pred.latent_variance[:, c], unit**2 * expected_variance, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(pred.noise[:, c], torch.full((15,), sigma2 * unit**2, dtype=D))
    assert (pred.covariance[:, 0, 1] == 0).all()


def test_marginal_likelihood_and_posterior_are_gpytorchs():
    x, y = wavy(60)
    ours, likelihood = Exact(x, y), Gaussian()
    with torch.no_grad():
        likelihood.log_noise.fill_(math.log(0.03))
    theirs = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-8)).double()
    theirs.noise = 0.03 + 1e-8

    class Model(gpytorch.models.ExactGP):
        def __init__(self) -> None:
            super().__init__(x, y.squeeze(1), theirs)
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2)).double()
            self.kernel.outputscale, self.kernel.base_kernel.lengthscale = 1.7, torch.tensor([0.6, 2.0])

        def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
            return gpytorch.distributions.MultivariateNormal(torch.zeros(len(x), dtype=D), self.kernel(x))

    model = Model()
    ours.kernel.outputscale, ours.kernel.base_kernel.lengthscale = 1.7, torch.tensor([0.6, 2.0])
    expected = -gpytorch.mlls.ExactMarginalLogLikelihood(theirs, model)(model(x), y.squeeze(1))
    torch.testing.assert_close(ours.loss(x[:3], y[:3], likelihood, 60), expected, rtol=1e-5, atol=1e-8)
    t = x[:9] + 0.3
    mean, variance = ours.posterior(likelihood)(t)
    posterior = model.eval()(t)
    torch.testing.assert_close(mean.squeeze(1), posterior.mean, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(variance.squeeze(1), posterior.variance, rtol=1e-5, atol=1e-7)


def test_hyper_parameters_are_those_of_the_greatest_marginal_likelihood():
    x, y = wavy(60, noise=0.2)
    method = GP(nn.Linear(2, 1).double(), "regression", mean="zero").fit((x, y))
    a = ((x - x.mean(0)) / x.std(0, unbiased=False)).numpy()
    b = ((y - y.mean()) / y.std(unbiased=False)).squeeze(1).numpy()
    squares = (a[:, None] - a[None]) ** 2

    def loss(logs: np.ndarray) -> float:
        amplitude, noise, *scales = np.exp(logs)
        k = amplitude * np.exp(-0.5 * (squares / np.square(scales)).sum(-1)) + noise * np.eye(60)
        return -float(multivariate_normal(np.zeros(60), k).logpdf(b)) / 60

    best = minimize(loss, np.log([1.0, 0.1, 1.0, 3.0]), method="L-BFGS-B", bounds=[(-6, 6)] * 4)
    assert method.history.losses[0] > best.fun + 0.3
    assert method.history.losses[-1] == pytest.approx(best.fun, abs=5e-3)
    assert math.log(float(method.likelihood.noise.detach())) == pytest.approx(best.x[1], abs=0.1)


def test_sparse_gp_at_all_points_is_the_exact_one():
    """With Z = X the bound is tight: natural gradients would find the exact posterior in one step, Adam in many."""
    x, y = wavy(12)
    exact, sparse, likelihood = Exact(x, y), Sparse(x, 1), Gaussian()
    with torch.no_grad():
        likelihood.log_noise.fill_(math.log(0.1))
        sparse.kernel.load_state_dict(exact.kernel.state_dict())
        # The optimum in closed form, whitened by K = LLᵀ: covariance (I + LᵀL/σ²)⁻¹, mean that times Lᵀy/σ².
        noise = float(likelihood.noise)
        k = exact.kernel(x).to_dense()[0] + 1e-6 * torch.eye(12, dtype=D)  # GPyTorch's jitter
        chol = torch.linalg.cholesky(k)
        covariance = torch.linalg.inv(torch.eye(12, dtype=D) + chol.mT @ chol / noise)
        values = sparse.variational_strategy._variational_distribution
        values.variational_mean.copy_((covariance @ chol.mT @ y / noise).mT)
        values.chol_variational_covar.copy_(torch.linalg.cholesky(covariance)[None])
        t = x + 0.2
        for ours, expected in zip(sparse.posterior(likelihood)(t), exact.posterior(likelihood)(t), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4)
        # and the loss is the exact one's
        bound, evidence = (p.loss(x, y, likelihood, 12) for p in (sparse, exact))
        torch.testing.assert_close(bound, evidence, rtol=1e-4, atol=1e-4)


def test_many_points_are_fitted_with_inducing_points():
    x, y = wavy(300, noise=0.2)
    network = nn.Linear(2, 1).double()
    sparse = {"exact_up_to": 299, "num_inducing": 20, "batch_size": 100, "steps": 200, "lr": 0.1}
    t, truth = wavy(200, noise=0.0, seed=5)
    fits = (GP(network, "regression", mean="zero", **options).fit((x, y)) for options in (sparse, {"steps": 40}))
    a, b = (method.predict(t) for method in fits)
    assert (a.mean - b.mean).abs().mean() < 0.05
    assert (a.mean - truth).square().mean().sqrt() < 0.1
    assert abs(float(a.noise[0].sqrt()) - 0.2) < 0.05


def test_the_limit_counts_every_output_and_the_global_generator_stays():
    x, y = wavy(20)
    data = Outputs(torch.zeros(20, 4, dtype=D), y.expand(20, 4), inputs=x)
    before = torch.random.get_rng_state()
    for limit, kind in ((40, Exact), (39, Sparse)):
        method = GP(None, "regression", exact_up_to=limit, num_inducing=5, steps=2).fit(data)
        method.predict(data)
        assert isinstance(method._fitted.process, kind)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_num_data_scales_the_elbo():
    x, y = wavy(30)
    sparse, likelihood = Sparse(x[:5], 1), Gaussian()
    with torch.no_grad():
        sparse.variational_strategy._variational_distribution.variational_mean.fill_(0.7)
    few, many, all_ = (float(sparse.loss(x, y, likelihood, n).detach()) for n in (30, 60, 10**12))
    assert few - all_ == pytest.approx(2 * (many - all_), rel=1e-9)
    assert few > many


@pytest.mark.parametrize("exact_up_to", [5000, 0])
def test_features_files_and_validation(exact_up_to, tmp_path):
    model, x, y = mlp(), inputs(), values()
    options = {"on": "features", "steps": 20, "eval_every": 5, "lr": 0.5, "num_inducing": 8}
    val = inputs(20, seed=3), values(20, seed=4)
    method = GP(model, "regression", exact_up_to=exact_up_to, **options).fit((x, y), val=val)
    best = min(method.history.scores.values())
    assert best < list(method.history.scores.values())[-1]
    assert best == pytest.approx(-float(method.predict(val[0]).log_prob(val[1]).mean()), rel=1e-4)
    method.save(tmp_path / "head.safetensors")
    again = GP.load(tmp_path / "head.safetensors")
    from_outputs, from_network = again.predict(recorded(model, x)), method.predict(x)
    torch.testing.assert_close(from_outputs.mean, from_network.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(from_outputs.variance, from_network.variance, rtol=1e-5, atol=1e-7)
    # An exact process is its data, and the docstring says so; a sparse one has none.
    assert ("process.x" in read_head(tmp_path / "head.safetensors")[0]) == bool(exact_up_to)


def test_bad_input(monkeypatch):
    x, y = wavy()
    method = GP(AnyWidth().double(), "regression", steps=2).fit((x, y))
    for ask, error, message in (
        (lambda: GP(None, "classification"), OptionError, "regression, not for classification"),
        (lambda: GP(None, "regression").fit(Outputs(y, y, features=x)), DataError, 'Expected inputs .* on="features"'),
        (lambda: GP(nn.Identity(), "regression", on="features").fit((x, y)), LayerError, "layer="),
        (lambda: method.predict(x[:, :1]), DataError, "width 2"),
    ):
        with pytest.raises(error, match=message):
            ask()
    monkeypatch.setitem(sys.modules, "gpytorch", None)
    with pytest.raises(MissingExtraError, match=r"posthoc\[gp\]"):
        GP(None, "regression")


def test_a_failed_sparse_fit_says_so_and_leaves_nothing():
    x, y = wavy()
    method = GP(None, "regression", exact_up_to=0, num_inducing=5, steps=50, lr=1e200)
    with pytest.raises(TrainingError, match="learning rate"):
        method.fit(Outputs(torch.zeros(40, 1, dtype=D), y, inputs=x))
    assert not method.fitted
