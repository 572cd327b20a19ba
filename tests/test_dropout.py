"""Predictions from draws, the noise around them, and MC dropout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import softmax
from scipy.stats import entropy, norm
from torch import Tensor, nn

from posthoc import Categorical, Dropout, Gaussian, OptionError
from posthoc.methods.weights.network import likeliest_noise
from tests.cases import WIDTH, Attentive, Noisy, answers, in_eval, inputs, labels, same, values

S, N, C = 7, 5, 3


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gaussian() -> Gaussian:
    """Noise of 0.5 in units of each output's scale: 2, 4, 6."""
    likelihood = Gaussian()
    likelihood.initialize(torch.zeros(2, C), torch.tensor([2.0, 4.0, 6.0]).expand(2, C))
    likelihood.log_noise.data.fill_(np.log(0.5))
    return likelihood


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_moments_are_those_of_the_draws(task):
    draws, classes = drawn(S, N, C), task == "classification"
    likelihood = Categorical(1.0) if classes else gaussian()
    pred = likelihood.predictive_from_draws(draws, covariance=True)
    noise = np.zeros(C) if classes else 0.5 * np.array([2.0, 4.0, 6.0]) ** 2
    spread = pred.latent if classes else pred
    np.testing.assert_allclose(pred.latent.mean, draws.numpy().mean(0))
    np.testing.assert_allclose(spread.variance, draws.numpy().var(0) + noise, rtol=1e-6)
    for n in range(N):
        expected = np.cov(draws[:, n].numpy(), rowvar=False, bias=True) + np.diag(noise)
        np.testing.assert_allclose(spread.covariance[n], expected, rtol=1e-6, atol=1e-12)
    with pytest.raises(OptionError, match="covariance=True"):
        _ = likelihood.predictive_from_draws(draws).latent.covariance


def test_probabilities_are_averages_of_softmaxes():
    draws, y = 2.0 * drawn(S, N, C), torch.tensor([0, 1, 2, 0, 1])
    pred = Categorical(0.7).predictive_from_draws(draws)
    p = softmax(draws.numpy() / 0.7, -1)
    np.testing.assert_allclose(pred.probs.numpy(), p.mean(0), rtol=1e-12)
    np.testing.assert_allclose(pred.log_prob(y), np.log(p.mean(0)[range(N), y]))
    information = entropy(p.mean(0), axis=-1) - entropy(p, axis=-1).mean(0)
    np.testing.assert_allclose(pred.mutual_information(), information, rtol=1e-9)
    agreed = Categorical(1.0).predictive_from_draws(draws[:1].expand(S, -1, -1))
    np.testing.assert_allclose(agreed.mutual_information(), 0.0, atol=1e-12)


def test_samples_are_whole_functions():
    draws = drawn(S, N, C)
    some = Categorical(1.0).predictive_from_draws(draws).latent.sample(700, torch.Generator().manual_seed(1))
    which = [[torch.equal(f, draw) for draw in draws].index(True) for f in some]  # the same draw for every row
    assert np.bincount(which, minlength=S).min() > 50


def test_samples_of_a_regression_have_noise_around_the_functions():
    pred = gaussian().predictive_from_draws(drawn(S, N, C), covariance=True)
    some = pred.sample(40_000, torch.Generator().manual_seed(1)).numpy()
    np.testing.assert_allclose(some.mean(0), pred.mean, atol=0.1)
    for n in range(N):
        np.testing.assert_allclose(np.cov(some[:, n], rowvar=False), pred.covariance[n], rtol=0.05, atol=0.25)
    with pytest.raises(OptionError, match="number of draws"):
        pred.sample(0)


@pytest.mark.parametrize("likelihood", [Categorical(2.0), gaussian()])
def test_rows_batches_and_devices(likelihood):
    draws = drawn(S, N, C)
    whole = likelihood.predictive_from_draws(draws, covariance=True)
    parts = [likelihood.predictive_from_draws(draws[:, rows], covariance=True) for rows in (slice(0, 2), slice(2, N))]
    joined = type(whole).cat(parts)
    assert same(answers(joined), answers(whole))
    assert torch.equal(*(pred.sample(3, torch.Generator().manual_seed(0)) for pred in (joined, whole)))
    assert torch.equal(whole[3].latent.draws, draws[:, 3][None])
    assert torch.equal(whole[3].latent.covariance, whole.latent.covariance[3:4])
    moved = whole.to("meta").latent
    assert moved.draws.device.type == moved.mean.device.type == "meta"


def test_half_precision_is_worked_out_in_more():
    draws = (1000.0 + drawn(S, N, C)).to(torch.float16)
    pred = Categorical(1.0).predictive_from_draws(draws)
    assert {answers(pred)[name].dtype for name in ("mean", "variance", "log_probs", "draws")} == {torch.float32}
    np.testing.assert_allclose(pred.latent.variance, draws.double().numpy().var(0), rtol=1e-5)


def test_noise_is_the_likeliest():
    spread = drawn(400, 1, seed=1).square() + 0.1
    residual = drawn(400, 1, seed=2) * (spread + 0.7).sqrt()
    found = float(likeliest_noise(residual.square(), spread))

    def nll(noise: float) -> float:
        return -norm.logpdf(residual.numpy(), scale=np.sqrt(spread.numpy() + noise)).sum()

    best = minimize_scalar(nll, bounds=(1e-3, 10.0), method="bounded", options={"xatol": 1e-9})
    assert found == pytest.approx(best.x, rel=1e-5)
    assert found != pytest.approx(float((residual.square() - spread).mean()), rel=1e-2)  # which is easier, and worse
    wide = torch.full_like(spread, 100.0)  # no noise is left, but the least is kept
    torch.testing.assert_close(likeliest_noise(residual.square(), wide), 0.01 * residual.square().mean(0))


@pytest.mark.parametrize("form", ["shared", "per_output"])
def test_a_fit_finds_what_dropout_does_not_explain(form):
    x, model = inputs(200), Noisy(2)
    y = in_eval(model, x) + 3.0 * values(200, 2)
    method = Dropout(model, Gaussian(form), samples=200).fit((x, y))
    pred = method.predict(x)
    square, spread = (pred.mean - y).double().square(), pred.latent_variance.double()
    unit, width = method.likelihood.scale.square(), 1 if form == "shared" else 2
    expected = likeliest_noise((square / unit).reshape(-1, width), (spread / unit).reshape(-1, width)) * unit
    torch.testing.assert_close(pred.noise[0].double(), expected, rtol=1e-4, atol=0)


def test_mean_and_variance_are_those_of_dropout():
    """One linear layer on inputs of which each is dropped with probability p: known in closed form."""
    p, x = 0.3, inputs(20)
    model = nn.Sequential(nn.Dropout(p), nn.Linear(WIDTH, 1))
    pred = Dropout(model, "regression", samples=4000).fit((x, values(20))).predict(x)
    torch.testing.assert_close(pred.mean, in_eval(model, x), rtol=0, atol=0.06)
    expected = (x * model[1].weight.detach()).square().sum(-1, keepdim=True) * p / (1 - p)
    torch.testing.assert_close(pred.latent_variance, expected, rtol=0.1, atol=1e-3)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.GRU(1, 4, num_layers=2, dropout=0.5, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x[:, :, None])[0][:, -1])


@pytest.mark.parametrize("model", [Noisy(2), Attentive(), Recurrent()])
def test_dropout_is_on_wherever_it_is_in_a_network(model):
    fast = torch.backends.mha.get_fastpath_enabled()
    x = inputs() if not isinstance(model, Attentive) else torch.arange(120).reshape(30, 4) % 5
    pred = Dropout(model, "classification", samples=10).fit((x, labels(classes=2))).predict(x)
    assert (pred.latent.variance > 0).any(-1).all()
    assert torch.backends.mha.get_fastpath_enabled() == fast


def test_nothing_but_dropout_is_on():
    """BatchNorm keeps its statistics: with dropout that drops next to nothing the network answers as in eval mode."""
    model = Noisy(2)
    model.body[3].p = 1e-7
    pred = Dropout(model, "classification", samples=3).fit((inputs(), labels(classes=2))).predict(inputs())
    torch.testing.assert_close(pred.latent.mean, in_eval(model, inputs()))
