"""Methods that must coincide do: FMGP at special parameters is an exact GP, SVGP, Laplace, temperature scaling."""

import math

import gpytorch
import pytest
import torch

from posthoc import FMGP, RBF, Categorical, Constant, Linear, Outputs
from posthoc.fmgp.output_covariance import marginal_variance
from posthoc.fmgp.process import correction
from posthoc.kernels import gram
from posthoc.likelihoods.gaussian import gaussian_energy
from tests import oracles
from tests.cases import seeded

DOUBLE = torch.float64
EXACT = {"rtol": 0, "atol": 1e-6}
NOISE = 0.09


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=DOUBLE, generator=seeded(seed))


def covariances(x, z, t, kernel=None):
    kernel = kernel or RBF(lengthscale=0.8, amplitude=1.4)
    x, z, t = ({"inputs": p} for p in (x, z, t))
    kernel.initialize(x, "inputs")
    with torch.no_grad():
        return gram(kernel, x), gram(kernel, z), kernel(z, x), kernel(t, z), kernel.diag(t)


def test_inducing_points_at_the_data_give_the_exact_gp():
    x, t = normal(30, 2), normal(10, 2, seed=1)
    kxx, _, _, ktx, k_diag = covariances(x, x, t)
    variance = marginal_variance(k_diag, ktx, correction(torch.eye(30, dtype=DOUBLE) / math.sqrt(NOISE), kxx).w)
    torch.testing.assert_close(variance, oracles.exact_gp_variance(k_diag, ktx, kxx, NOISE), **EXACT)


def test_last_layer_linear_kernel_is_linearised_laplace():
    """Regression with a full Gauss-Newton matrix and a bias: Σ = (ΨᵀΨ/σ² + δI)⁻¹ over features with a 1."""
    psi, t, precision = normal(20, 3), normal(10, 3, seed=1), 2.5
    kernel = Linear(variance=1 / precision) + Constant(variance=1 / precision)
    kxx, _, _, ktx, k_diag = covariances(psi, psi, t, kernel)
    variance = marginal_variance(k_diag, ktx, correction(torch.eye(20, dtype=DOUBLE) / math.sqrt(NOISE), kxx).w)
    one, one_t = (torch.cat([p, torch.ones(len(p), 1, dtype=DOUBLE)], -1) for p in (psi, t))
    sigma = torch.linalg.inv(one.mT @ one / NOISE + precision * torch.eye(4, dtype=DOUBLE))
    torch.testing.assert_close(variance, (one_t @ sigma @ one_t.mT).diagonal(), **EXACT)


def optimal_factor(kzz, kzx):
    """L with LLᵀ = Ã* = σ⁻² K⁻¹ K_zx K_xz K⁻¹."""
    inverse = torch.linalg.inv(kzz)
    return torch.linalg.cholesky(inverse @ kzx @ kzx.mT @ inverse / NOISE)


def test_the_optimum_at_zero_alpha_is_svgp():
    """Titsias's closed form, which is also where the ELBO's gradient vanishes."""
    x, z, t, y = normal(30, 2), normal(6, 2, seed=1), normal(10, 2, seed=2), normal(30, 1, seed=3)
    kxx, kzz, kzx, ktz, k_diag = covariances(x, z, t)
    chol = optimal_factor(kzz, kzx).requires_grad_()
    c = correction(chol, kzz)
    variance = marginal_variance(k_diag, ktz, c.w).detach()
    torch.testing.assert_close(variance, oracles.titsias_variance(k_diag, ktz, kzz, kzx, NOISE), **EXACT)
    v = marginal_variance(kxx.diagonal(), kzx.mT, c.w)
    elbo = gaussian_energy(y, v[:, None], torch.tensor(NOISE, dtype=DOUBLE), 0.0).sum() - c.kl
    elbo.backward()
    torch.testing.assert_close(chol.grad, torch.zeros_like(chol), **EXACT)


class SVGP(gpytorch.models.ApproximateGP):
    def __init__(self, z, covariance):
        distribution = gpytorch.variational.CholeskyVariationalDistribution(len(z))
        strategy = gpytorch.variational.UnwhitenedVariationalStrategy(self, z, distribution, False)
        super().__init__(strategy)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.double()
        strategy.variational_params_initialized.fill_(1)
        distribution.variational_mean.data.zero_()
        distribution.chol_variational_covar.data.copy_(torch.linalg.cholesky(covariance))
        self.covar_module.outputscale, self.covar_module.base_kernel.lengthscale = 1.4, 0.8

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def test_variance_is_gpytorchs_svgp_and_kl_that_of_its_gaussians():
    z, t = normal(6, 2, seed=1), normal(10, 2, seed=2)
    _, kzz, kzx, ktz, k_diag = covariances(normal(30, 2), z, t)
    c = correction(optimal_factor(kzz, kzx), kzz)
    posterior = kzz - kzz @ c.w.mT @ c.w @ kzz  # q(u)'s covariance
    jitter = gpytorch.settings.variational_cholesky_jitter(double_value=0.0)
    with torch.no_grad(), jitter, gpytorch.settings.cholesky_jitter(double_value=0.0):
        expected = SVGP(z, posterior).eval()(t).variance
    torch.testing.assert_close(marginal_variance(k_diag, ktz, c.w), expected, **EXACT)
    # GPyTorch's own KL adds a jitter of 1e-3 to its prior; torch's is between the Gaussians as they are.
    normals = [torch.distributions.MultivariateNormal(torch.zeros(6, dtype=DOUBLE), k) for k in (posterior, kzz)]
    torch.testing.assert_close(c.kl, torch.distributions.kl_divergence(*normals), **EXACT)


@pytest.mark.parametrize("alpha", [1e-6, 1e-9])
def test_small_alpha_tends_to_the_elbo(alpha):
    x, y, noise = normal(30, 2), normal(30, 1, seed=3), torch.tensor(NOISE, dtype=DOUBLE)
    kxx, kzz, kzx, _, _ = covariances(x, x[:5], x)
    v = marginal_variance(kxx.diagonal(), kzx.mT, correction(torch.eye(5, dtype=DOUBLE), kzz).w)[:, None]
    elbo = (-0.5 * (math.log(2 * math.pi * NOISE) + (y**2 + v) / NOISE)).sum()
    torch.testing.assert_close(gaussian_energy(y, v, noise, 0.0).sum(), elbo, **EXACT)
    # the difference to the limit is of order α
    assert abs(float(gaussian_energy(y, v, noise, alpha).sum() - elbo)) < 1e5 * alpha


def test_a_constant_shared_variance_is_temperature_scaling():
    """The whole estimator: with a constant kernel and L = 0, probs are softmax(logits / √(τ² + πv/8))."""
    logits = 3 * normal(40, 4)
    outputs, options = Outputs(logits, torch.arange(40) % 4), {"variance": "shared", "num_inducing": 3, "steps": 0}
    bayes = FMGP(None, Categorical(temperature=0.7), kernel=Constant(variance=1.9), **options).fit(outputs)
    bayes.head.process.l_raw.data.zero_()
    expected = (logits / math.sqrt(0.7**2 + math.pi * 1.9 / 8)).softmax(-1)
    torch.testing.assert_close(bayes.predict(outputs).probs, expected, **EXACT)


def test_a_fitted_shared_constant_finds_the_best_temperature():
    logits = 3 * normal(2000, 4)
    labels = torch.multinomial((logits / 2.0).softmax(-1), 1, generator=seeded(1)).squeeze(1)
    outputs = Outputs(logits, labels)
    options = {"num_inducing": 2, "batch_size": 2000, "steps": 400, "lr": 0.05}
    bayes = FMGP(None, "classification", kernel=Constant(), variance="shared", **options).fit(outputs)
    ours = -bayes.predict(outputs).log_prob(labels).mean()
    temperatures = torch.linspace(1.0, 4.0, 3001, dtype=DOUBLE)
    nll = [float(torch.nn.functional.cross_entropy(logits / t, labels)) for t in temperatures]
    assert float(ours) == pytest.approx(min(nll), abs=1e-4)
