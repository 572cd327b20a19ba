"""Energies and predictives against quadrature, Monte Carlo and each other; likelihoods of other packages."""

import json
import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats  # type: ignore[import-untyped]
from typer.testing import CliRunner

from posthoc import (
    FMGP,
    MAP,
    Categorical,
    DataError,
    Gaussian,
    OptionError,
    Outputs,
    WrongTaskError,
    compare,
    save_outputs,
)
from posthoc.cli.app import app
from posthoc.evaluate.evaluate import evaluate
from posthoc.fmgp.output_covariance import Widened
from posthoc.likelihoods.gaussian import gaussian_energy
from posthoc.likelihoods.registry import LIKELIHOODS, make_likelihood
from posthoc.predictive import latent as latents
from posthoc.predictive.latent import FactorLatent, IndependentLatent, ZeroLatent
from tests import oracles
from tests.cases import QUICK
from tests.likelihoods.bernoulli import BernoulliLikelihood
from tests.likelihoods.poisson import PoissonLikelihood, PoissonPredictive, quadrature
from tests.oracles import DenseLatent

DOUBLE = torch.float64


def random_latent(n: int, c: int, seed: int = 0, scale: float = 1.0) -> DenseLatent:
    g = torch.Generator().manual_seed(seed)
    factor = scale * torch.randn(n, c, c, dtype=DOUBLE, generator=g)
    return DenseLatent(factor @ factor.mT)


def logits(n: int, c: int, seed: int = 0) -> torch.Tensor:
    return 3.0 * torch.randn(n, c, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def test_latents_are_those_of_their_matrices():
    v, more, top = random_latent(5, 4), torch.rand(5, dtype=DOUBLE), torch.tensor([0, 1, 2, 3, 0])
    alone, noise = IndependentLatent(v.variance), torch.randn(7, 5, 4, dtype=DOUBLE)
    extra = torch.diag_embed(more[:, None].expand(5, 4))
    diagonal, factor = torch.diag_embed(v.variance), torch.randn(5, 4, 3, dtype=DOUBLE)
    for latent, matrix in (
        (alone, diagonal),
        (FactorLatent(factor), factor @ factor.mT),
        (latents.DenseLatent(v.covariance()), v.covariance()),
        (Widened(v, more), v.covariance() + extra),
        (Widened(alone, more), diagonal + extra),
    ):
        expected = DenseLatent(matrix)
        torch.testing.assert_close(latent.covariance(), matrix)
        torch.testing.assert_close(latent.variance, expected.variance)
        torch.testing.assert_close(latent.difference(top), expected.difference(top))
        torch.testing.assert_close(latent.perturb(noise), expected.perturb(noise))


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(("residual", "variance", "noise"), [(0.7, 0.5, 0.3), (-2.0, 3.0, 0.1), (0.0, 1e-3, 1.0)])
def test_gaussian_energy_is_its_integral(alpha, residual, variance, noise):
    tensors = (torch.tensor([[v]], dtype=DOUBLE) for v in (residual, variance))
    ours = gaussian_energy(*tensors, torch.tensor(noise, dtype=DOUBLE), alpha)
    expected = oracles.gaussian_energy_by_quadrature(residual, variance, noise, alpha)
    assert float(ours) == pytest.approx(expected, abs=1e-6)


def test_energy_at_zero_alpha_is_the_limit():
    """Trap 2: an own branch, continuous with the rest."""
    args = (torch.tensor([[0.7]], dtype=DOUBLE), torch.tensor([[2.0]], dtype=DOUBLE), torch.tensor(0.3, dtype=DOUBLE))
    exact = gaussian_energy(*args, 0.0)
    for alpha in (1e-7, 1e-12, 1e-300):
        torch.testing.assert_close(gaussian_energy(*args, alpha), exact, rtol=0, atol=1e-5 if alpha > 1e-8 else 1e-9)


def test_energy_survives_a_noise_of_zero():
    """Trap 2: at α = 1 the noise goes to zero on real data."""
    one, tiny = torch.ones(1, 1, dtype=DOUBLE), torch.tensor(0.0, dtype=DOUBLE)
    expected = torch.distributions.Normal(0.0, 1.0).log_prob(torch.tensor(1.0, dtype=DOUBLE))
    torch.testing.assert_close(gaussian_energy(one, one, tiny, 1.0).squeeze(), expected)
    likelihood = Gaussian()
    likelihood.log_noise.data.fill_(-1000.0)
    assert likelihood.noise > 0


def test_several_outputs_train_on_what_log_prob_reports():
    """Trap 2: the factorised form, in both places and in the user's units."""
    likelihood = Gaussian(noise="per_output")
    g = torch.Generator().manual_seed(0)
    outputs, targets = (torch.randn(5, 3, dtype=DOUBLE, generator=g) * torch.tensor([1.0, 10.0, 0.1]) for _ in range(2))
    likelihood.initialize(outputs, targets)
    latent = random_latent(5, 3)
    mean, target = likelihood.standardize(outputs, targets)
    energy = likelihood.energy(mean, latent, target, 1.0) - likelihood.scale.log().sum()
    torch.testing.assert_close(energy, likelihood.predictive(outputs, latent).log_prob(targets))


def test_regression_units_come_back():
    """Scaling and shifting y scales what is predicted, and nothing else."""
    data, latent, predictions = torch.randn(2, 6, 1, dtype=DOUBLE), random_latent(6, 1), []
    for outputs, targets in (data, 1000.0 * data - 5.0):
        likelihood = Gaussian()
        likelihood.initialize(outputs, targets)
        predictions.append(likelihood.predictive(outputs, latent))
    torch.testing.assert_close(predictions[1].std, 1000.0 * predictions[0].std)
    torch.testing.assert_close(predictions[1].noise, 1e6 * predictions[0].noise)


def test_temperature_scaling_is_the_shared_constant_variance():
    """A shared constant v and likelihood temperature τ: softmax(μ/T), T = √(τ² + πv/8)."""
    mu, v, tau = logits(8, 5), 1.7, 0.6
    latent = IndependentLatent(torch.full((8, 5), v, dtype=DOUBLE))
    expected = (mu / math.sqrt(tau**2 + math.pi * v / 8)).log_softmax(-1)
    for form in ("pairwise", "logit_scaling"):
        pred = Categorical(temperature=tau, prediction=form).predictive(mu, latent)
        torch.testing.assert_close(pred.log_probs, expected, rtol=0, atol=1e-6)


def test_pairwise_form_is_gauge_invariant_and_the_papers_is_not():
    """Trap 7: softmax ignores c·1 added to the logits and 11ᵀ added to their covariance."""
    mu, latent = logits(8, 5), random_latent(8, 5)
    shifted, wider = mu + torch.randn(8, 1, dtype=DOUBLE), DenseLatent(latent.covariance() + 3.0)
    for form, same in (("pairwise", True), ("logit_scaling", False)):
        predictive = Categorical(prediction=form).predictive
        for other in (predictive(shifted, latent), predictive(mu, wider)):
            assert torch.allclose(other.log_probs, predictive(mu, latent).log_probs, atol=1e-9) == same


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0, 1000.0])
def test_pairwise_form_never_moves_the_argmax_nor_raises_the_top_probability(scale):
    """Traps 5 and 7; the paper's form does move it."""
    mu, latent = logits(500, 6), random_latent(500, 6, scale=scale)
    pred = Categorical(temperature=1.0).predictive(mu, latent)
    assert torch.equal(pred.probs.argmax(-1), mu.argmax(-1))
    assert (pred.probs.amax(-1) <= mu.softmax(-1).amax(-1) + 1e-12).all()
    if scale >= 10.0:
        raw = Categorical(temperature=1.0, prediction="logit_scaling").predictive(mu, latent)
        assert (raw.probs.argmax(-1) != mu.argmax(-1)).any()


def test_argmax_survives_rounding_to_float32():
    mu = torch.tensor([[1.0, 1.0000001, 0.0]] * 3)
    pred = Categorical().predictive(mu, IndependentLatent(torch.full((3, 3), 1e8, dtype=DOUBLE)))
    assert pred.probs.dtype == torch.float32
    assert torch.equal(pred.probs.argmax(-1), mu.argmax(-1))


def test_monte_carlo_converges_to_brute_force():
    mu, latent = logits(3, 4), random_latent(3, 4)
    pred = Categorical(temperature=0.8, prediction="monte_carlo", samples=200_000).predictive(mu, latent)
    factor = torch.linalg.cholesky(latent.covariance())
    noise = torch.randn(400_000, 3, 4, dtype=DOUBLE, generator=torch.Generator().manual_seed(123))
    expected = ((mu + torch.einsum("ncd,snd->snc", factor, noise)) / 0.8).softmax(-1).mean(0)
    torch.testing.assert_close(pred.probs, expected, rtol=0, atol=5e-3)
    # It is seeded, and does not depend on the rows beside it.
    few = Categorical(prediction="monte_carlo")
    alone = few.predictive(mu[2:3], DenseLatent(latent.covariance()[2:3]))
    torch.testing.assert_close(few.predictive(mu, latent).probs[2:3], alone.probs)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_monte_carlo_energy_is_the_alpha_energy(alpha):
    mu, latent, y = logits(3, 4), random_latent(3, 4), torch.tensor([0, 1, 3])
    likelihood = Categorical(temperature=1.0, training="monte_carlo", samples=400)
    energy = likelihood.energy(mu, latent, y, alpha, torch.Generator().manual_seed(5))
    noise = torch.randn((400, 3, 4), dtype=DOUBLE, generator=torch.Generator().manual_seed(5))
    for n in range(3):
        factor = torch.linalg.cholesky(latent.covariance()[n])
        p = torch.stack([(mu[n] + factor @ noise[s, n]).softmax(-1)[y[n]] for s in range(400)])
        expected = p.log().mean() if alpha == 0 else (p**alpha).mean().log() / alpha
        assert float(energy[n]) == pytest.approx(float(expected), abs=1e-6)


def test_energy_gradients_agree_with_finite_differences():
    mu, y = logits(3, 4), torch.tensor([0, 1, 3])
    factor = torch.randn(3, 4, 4, dtype=DOUBLE, generator=torch.Generator().manual_seed(2)).requires_grad_()
    likelihood, drawn = Categorical(), Categorical(training="monte_carlo", samples=16)

    def energy(factor, log_temperature):
        likelihood.log_temperature = log_temperature
        return likelihood.energy(mu, DenseLatent(factor @ factor.mT), y, 1.0)

    def drawn_energy(variance):
        return drawn.energy(mu[:2], IndependentLatent(variance), y[1:], 0.5, torch.Generator().manual_seed(0))

    assert torch.autograd.gradcheck(energy, (factor, likelihood.log_temperature), atol=1e-7)
    assert torch.autograd.gradcheck(drawn_energy, (torch.rand(2, 4, dtype=DOUBLE).requires_grad_(),), atol=1e-7)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Categorical(training="pairwise").check_alpha(0.5), "monte_carlo"),  # trap 6
        (lambda: Categorical(training="logit_scaling").check_alpha(0.5), "monte_carlo"),
        (lambda: Gaussian(noise="none"), "per_output"),
        (lambda: Categorical(temperature=0.0), "positive temperature"),
        (lambda: Categorical(training="magic"), "pairwise"),
        (lambda: Categorical(samples=0), "samples to be an integer of at least 1, got 0"),
    ],
)
def test_impossible_likelihoods_are_refused(make, message):
    with pytest.raises(OptionError, match=message):
        make()
    for form, alpha in (("pairwise", 1.0), ("logit_scaling", 1.0), ("monte_carlo", 0.5)):
        Categorical(training=form).check_alpha(alpha)


@pytest.mark.parametrize("likelihood", [Gaussian("per_output"), Categorical(temperature=1.7)])
def test_the_curvature_is_the_hessian_of_the_negative_log_likelihood(likelihood):
    g = torch.Generator().manual_seed(0)
    outputs, targets = torch.randn(2, 4, 3, dtype=DOUBLE, generator=g)
    likelihood.initialize(outputs, targets)
    likelihood.reset()
    y = targets if likelihood.task == "regression" else targets.argmax(-1)

    def loss(f, row):
        return -likelihood.predictive(f[None], ZeroLatent(f[None])).log_prob(y[row : row + 1]).sum()

    expected = [torch.autograd.functional.hessian(lambda f, r=row: loss(f, r), outputs[row]) for row in range(4)]
    torch.testing.assert_close(likelihood.curvature(outputs), torch.stack(expected))


def counts(n: int = 400, seed: int = 0) -> Outputs:
    """Counts of two kinds whose log rates the network gets wrong by more for larger x."""
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 3, dtype=DOUBLE, generator=g)
    f = torch.stack([x[:, 0] + 1.0, 1.0 - x[:, 1]], -1)
    wrong = f + 1.5 * x[:, 2:] * torch.randn(n, 2, dtype=DOUBLE, generator=g)
    return Outputs(f, torch.poisson(wrong.exp(), g), features=x)


def marks(n: int = 400, seed: int = 0) -> Outputs:
    """Three labels a row, from logits that are too large."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=g)
    return Outputs(4.0 * x, torch.bernoulli((0.7 * x).sigmoid(), generator=g), features=x)


MEAN = torch.tensor([[0.7]], dtype=DOUBLE)
CASES = [(PoissonLikelihood, counts), (BernoulliLikelihood, marks)]


@pytest.mark.parametrize(("kind", "data"), CASES)
def test_a_likelihood_of_another_package_fits_predicts_better_than_the_bare_network_and_is_saved(kind, data, tmp_path):
    bayes = FMGP(None, kind(), num_inducing=10, steps=200).fit(data())
    new = data(seed=1)
    figures = evaluate(bayes, new)
    assert figures["nll"] < figures["base_nll"] - 0.05
    pred = bayes.predict(new)
    assert torch.equal(pred.latent.mean, new.outputs)
    assert pred.sample(5, torch.Generator().manual_seed(0)).shape == (5, *new.outputs.shape)
    assert int(pred.defer(0.1).sum()) == len(new) // 10
    assert np.asarray(pred).shape == new.outputs.shape
    assert json.loads(json.dumps(pred[:2].to_dict()))
    assert len(repr(pred)) < 120
    bayes.save(tmp_path / "head.safetensors")
    again = FMGP.load(tmp_path / "head.safetensors")
    assert type(again.likelihood) is kind
    assert torch.equal(again.predict(new).log_prob(new.targets), pred.log_prob(new.targets))


@pytest.mark.parametrize(("kind", "data"), CASES)
def test_a_likelihood_of_another_package_is_compared_with_others(kind, data):
    methods = {"bare": MAP, "fmgp": (FMGP, {**QUICK, "steps": 50, "lr": 0.05}), "temperature": "temperature"}
    found = compare(None, data(), data(seed=1), methods, task=kind(), progress=False)
    rows = {row.method: row for row in found.rows}
    assert rows["fmgp"].figures["nll"] < rows["bare"].figures["nll"]
    assert not rows["temperature"].applies
    if kind is PoissonLikelihood:
        assert rows["fmgp"].figures["squared_error"] > 0.0


def fixed_variance(variance: float) -> IndependentLatent:
    return IndependentLatent(torch.full((1, 1), variance, dtype=DOUBLE))


def test_the_energies_of_counts_are_integrals():
    likelihood, variance = PoissonLikelihood(), 0.4

    def integral(alpha):
        def integrand(f):
            log_p = stats.poisson(np.exp(f)).logpmf(3)
            return stats.norm(0.7, variance**0.5).pdf(f) * (log_p if alpha == 0.0 else np.exp(alpha * log_p))

        value = integrate.quad(integrand, -5, 7)[0]
        return value if alpha == 0.0 else float(np.log(value) / alpha)

    assert float(likelihood.predictive(MEAN, fixed_variance(variance)).latent.variance) == variance
    for alpha in (0.0, 0.5, 1.0):
        energy = likelihood.energy(MEAN, fixed_variance(variance), torch.tensor([[3.0]], dtype=DOUBLE), alpha)
        assert float(energy) == pytest.approx(integral(alpha), rel=1e-6)


def test_the_moments_of_counts_are_those_of_draws():
    pred = PoissonLikelihood().predictive(MEAN, fixed_variance(0.2))
    assert isinstance(pred, PoissonPredictive)
    draws = pred.sample(200_000, torch.Generator().manual_seed(0)).flatten()
    assert float(draws.mean()) == pytest.approx(float(pred.rate), rel=0.01)
    assert float(draws.var()) == pytest.approx(float(pred.variance), rel=0.03)
    nodes, log_weights = quadrature(pred.latent.mean, pred.latent.variance)
    assert float((log_weights.exp() * nodes.exp()).sum()) == pytest.approx(float(pred.rate), rel=1e-8)


def test_targets_of_another_kind_are_refused():
    for likelihood, y, message in [(PoissonLikelihood(), 0.5, "counts"), (BernoulliLikelihood(), 2.0, "0 or 1")]:
        with pytest.raises(DataError, match=message):
            FMGP(None, likelihood, **QUICK).fit(Outputs(torch.zeros(9, 2), torch.full((9, 2), y)))
    with pytest.raises(OptionError, match="alpha = 1"):
        FMGP(None, BernoulliLikelihood(), alpha=0.5)


def test_names_are_those_of_the_registry():
    assert isinstance(make_likelihood("poisson"), PoissonLikelihood)
    assert LIKELIHOODS.group == "posthoc.likelihoods"
    with pytest.raises(OptionError, match="registered names are bernoulli, categorical"):
        make_likelihood("ranks")


def test_the_command_line_takes_registered_tasks(tmp_path):
    save_outputs(counts(60), tmp_path / "counts.npz")
    options = ["--task", "poisson", "--set", "steps=3", "--set", "num_inducing=5", "-o", str(tmp_path / "head")]
    result = CliRunner().invoke(app, ["fit", str(tmp_path / "counts.npz"), *options], catch_exceptions=False)
    assert result.exit_code == 0
    pred = FMGP.load(tmp_path / "head").predict(counts(60))
    assert isinstance(pred, PoissonPredictive)
    with pytest.raises(WrongTaskError, match="of classes or of a regression, got a PoissonPredictive"):
        pred.plot()
