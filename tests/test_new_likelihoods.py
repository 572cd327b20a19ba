"""A likelihood of another package is one file: it fits, predicts, saves, loads and is compared."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from scipy import integrate, stats  # type: ignore[import-untyped]

from posthoc import FMGP, MAP, DataError, OptionError, Outputs, compare
from posthoc.evaluate.evaluate import evaluate
from posthoc.likelihoods.registry import LIKELIHOODS, make_likelihood
from posthoc.predictive.latent import IndependentLatent
from tests.cases import QUICK
from tests.likelihoods.bernoulli import BernoulliLikelihood
from tests.likelihoods.poisson import PoissonLikelihood, PoissonPredictive, quadrature

DOUBLE = torch.float64


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


CASES = [(PoissonLikelihood, counts), (BernoulliLikelihood, marks)]


@pytest.mark.parametrize(("kind", "data"), CASES)
def test_it_fits_predicts_better_than_the_bare_network_and_is_saved(kind, data, tmp_path):
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
def test_it_is_compared_with_others(kind, data):
    methods = {"bare": MAP, "fmgp": (FMGP, {**QUICK, "steps": 50, "lr": 0.05}), "temperature": "temperature"}
    found = compare(None, data(), data(seed=1), methods, task=kind(), progress=False)
    rows = {row.method: row for row in found.rows}
    assert rows["fmgp"].figures["nll"] < rows["bare"].figures["nll"]
    assert not rows["temperature"].applies
    if kind is PoissonLikelihood:
        assert rows["fmgp"].figures["squared_error"] > 0.0


def test_the_energies_of_counts_are_integrals():
    likelihood, mean, variance = PoissonLikelihood(), torch.tensor([[0.7]], dtype=DOUBLE), 0.4

    def integral(alpha):
        def integrand(f):
            log_p = stats.poisson(np.exp(f)).logpmf(3)
            return stats.norm(0.7, variance**0.5).pdf(f) * (log_p if alpha == 0.0 else np.exp(alpha * log_p))

        value = integrate.quad(integrand, -5, 7)[0]
        return value if alpha == 0.0 else float(np.log(value) / alpha)

    latent = likelihood.predictive(mean, fixed_variance(variance)).latent
    assert float(latent.variance) == variance
    for alpha in (0.0, 0.5, 1.0):
        energy = likelihood.energy(mean, fixed_variance(variance), torch.tensor([[3.0]], dtype=DOUBLE), alpha)
        assert float(energy) == pytest.approx(integral(alpha), rel=1e-6)


def fixed_variance(variance: float) -> IndependentLatent:
    return IndependentLatent(torch.full((1, 1), variance, dtype=DOUBLE))


def test_the_moments_of_counts_are_those_of_draws():
    likelihood = PoissonLikelihood()
    pred = likelihood.predictive(torch.tensor([[0.7]], dtype=DOUBLE), fixed_variance(0.2))
    assert isinstance(pred, PoissonPredictive)
    draws = pred.sample(200_000, torch.Generator().manual_seed(0)).flatten()
    assert float(draws.mean()) == pytest.approx(float(pred.rate), rel=0.01)
    assert float(draws.var()) == pytest.approx(float(pred.variance), rel=0.03)
    nodes, log_weights = quadrature(pred.latent.mean, pred.latent.variance)
    assert float((log_weights.exp() * nodes.exp()).sum()) == pytest.approx(float(pred.rate), rel=1e-8)


def test_targets_of_another_kind_are_refused():
    with pytest.raises(DataError, match="counts"):
        FMGP(None, PoissonLikelihood(), **QUICK).fit(Outputs(torch.zeros(9), torch.full((9,), 0.5)))
    with pytest.raises(DataError, match="0 or 1"):
        FMGP(None, BernoulliLikelihood(), **QUICK).fit(Outputs(torch.zeros(9, 2), torch.full((9, 2), 2.0)))
    with pytest.raises(OptionError, match="alpha = 1"):
        FMGP(None, BernoulliLikelihood(), alpha=0.5)


def test_names_are_those_of_the_registry():
    assert isinstance(make_likelihood("poisson"), PoissonLikelihood)
    assert LIKELIHOODS.group == "posthoc.likelihoods"
    with pytest.raises(OptionError, match="registered names are bernoulli, categorical"):
        make_likelihood("ranks")
