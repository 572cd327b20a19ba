"""MFVI: flipout and the KL against their definitions, the fit against the closed form of linear regression."""

import copy
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.utils.data import DataLoader, TensorDataset

from posthoc.errors import OptionError
from posthoc.methods.weights.mfvi import MFVI, MeanField, draw_weights, flipout, noisy_parameters
from posthoc.training.loop import PlainSteps
from tests.cases import Attentive, Noisy, answers, inputs, labels, mlp, same, values

QUICK: dict[str, Any] = {"steps": 5, "samples": 4, "batch_size": 10}
G = torch.Generator


@pytest.fixture(autouse=True)
def same_first_weights() -> None:
    torch.manual_seed(0)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 4), (3,)),
    "linear without bias, over time": (lambda: nn.Linear(3, 2, bias=False), (4, 3)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 2, dilation=2), (2, 5)),
    "conv2d": (lambda: nn.Conv2d(4, 2, 3, stride=2, padding=1, groups=2), (4, 3, 4)),
    "conv2d reflected": (lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), (1, 2, 3)),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2), (1, 2, 2, 3)),
}


def stds(layer: nn.Module) -> dict[str, Tensor]:
    return {k: 0.1 + torch.rand(p.shape, generator=G().manual_seed(1)).to(p) for k, p in layer.named_parameters()}


def covariance_of(layer: nn.Module, x: Tensor, std: dict[str, Tensor]) -> Tensor:
    """Of the output for one example, which is linear in the weights: J diag(σ²) Jᵀ."""
    weights = {name: p.detach() for name, p in layer.named_parameters()}
    jacobians = torch.func.jacrev(lambda w: torch.func.functional_call(layer, w, x[None]).flatten())(weights)
    return sum((j.flatten(1) * std[name].flatten().square()) @ j.flatten(1).mT for name, j in jacobians.items())


@pytest.mark.parametrize("name", LAYERS)
def test_flipout_and_plain_draws_have_the_mean_and_covariance_of_noisy_weights(name):
    make, shape = LAYERS[name]
    layer = make().double()
    x = torch.randn(2, *shape, generator=G().manual_seed(2), dtype=torch.float64)
    std, generator, n = stds(layer), G().manual_seed(3), 1000
    means = {k: p.detach() for k, p in layer.named_parameters()}
    plain, flipped = [], []
    with torch.no_grad():
        expected = layer(x)
        for _ in range(n):
            plain.append(torch.func.functional_call(layer, draw_weights(means, std, generator), x))
            with flipout(layer, std, generator):
                flipped.append(layer(x))
    for draws in (plain, flipped):
        away = (torch.stack(draws) - expected).flatten(2)  # (S, 2, C)
        for i in range(2):
            covariance = covariance_of(layer, x[i], std)
            scale = covariance.diagonal().sqrt()
            assert (away[:, i].mean(0) / scale).abs().max() < 5 / n**0.5
            error = (away[:, i].mT @ away[:, i] / n - covariance) / torch.outer(scale, scale)
            assert error.abs().max() < 5 * (2 / n) ** 0.5
    assert torch.equal(layer(x), expected)


def test_flipout_decorrelates_the_examples_of_a_batch():
    layer, n, generator = nn.Linear(3, 4).double(), 2000, G().manual_seed(0)
    x, std, away = torch.ones(2, 3, dtype=torch.float64), stds(layer), []  # the same example twice
    for _ in range(n):
        with torch.no_grad(), flipout(layer, std, generator):
            away.append(layer(x) - layer.forward(x))
    first, second = torch.stack(away).unbind(1)
    correlation = (first * second).mean(0) / (first.square().mean(0) * second.square().mean(0)).sqrt()
    assert correlation.abs().max() < 5 / n**0.5
    assert not torch.allclose(first.abs(), second.abs())  # their inputs have signs of their own too


class Twice(nn.Module):
    """One layer run twice, or two with one weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.a = nn.Linear(3, 2, bias=False)
        self.b = nn.Linear(3, 2, bias=False) if tied else self.a
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_are_used_twice_have_one_noise(tied):
    network, x = Twice(tied=tied), inputs(4)
    assert list(noisy_parameters(network)) == ["a.weight"]
    with torch.no_grad(), flipout(network, {"a.weight": torch.ones(2, 3)}, G().manual_seed(0)):
        once = network.a(x) - network.a.forward(x)
        torch.testing.assert_close(network(x) - 2 * network.a.forward(x), 2 * once)
        assert once.abs().min() > 0


def test_flipout_leaves_no_hook_behind_and_goes_before_the_users():
    layer, seen = nn.Linear(3, 2), []
    layer.register_forward_hook(lambda _, args, output: seen.append(output))
    with flipout(layer, {"weight": torch.ones(2, 3)}, G()):
        said = layer(input=inputs(4))
    assert seen[0] is said
    assert len(layer._forward_hooks) == 1
    with pytest.raises(ZeroDivisionError), flipout(layer, {"bias": torch.ones(2)}, G()):
        raise ZeroDivisionError
    assert len(layer._forward_hooks) == 1


@pytest.mark.parametrize("moves", [False, True])
def test_the_kl_is_that_of_torch_distributions(moves):
    weights = {"a": torch.randn(3, 2, generator=G().manual_seed(0)), "b": torch.zeros(4)}
    q = MeanField(weights, 0.3, moves=moves)
    for i, p in enumerate([*q.log_std.values(), *q.shift.values()]):
        p.data += torch.randn(p.shape, generator=G().manual_seed(i))
    expected, prior = 0.0, Normal(torch.tensor(0.0).double(), torch.tensor(2.5).double() ** -0.5)
    for name, mean in q.mean().items():
        assert torch.equal(mean, weights[name]) != moves
        expected += kl_divergence(Normal(mean.double(), q.std()[name].double()), prior).sum()
    torch.testing.assert_close(q.kl(2.5), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("means", "weight", "count"), [("fixed", 1.0, 50), ("moved", 1.0, 50), ("fixed", 0.5, 100)])
def test_linear_regression_has_its_mean_field_posterior(means, weight, count):
    """With noise σ²: 1/s_j² = α + Σ x_j²/σ² (half the weight of the KL, or twice as many points that the data stand
    for, is data that count twice), the exact posterior mean if it moves, and the σ² that is best then. The same problem
    for each of many outputs, over which the noise of training averages out."""
    cold = weight * 50 / count
    generator, alpha, copies = G().manual_seed(0), 2.0, 40
    x = torch.randn(50, 3, generator=generator).double() * torch.tensor([0.3, 1.0, 2.0]).double()
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]).double() + 0.5 * torch.randn(50, 1, generator=generator).double()
    network = nn.Linear(3, copies, bias=False).double()
    trained = torch.linalg.lstsq(x, y).solution * (0.9 if means == "moved" else 1.0)
    network.weight.data = trained.mT.repeat(copies, 1)
    options = {"steps": 800, "lr": 0.03, "batch_size": 50, "prior_precision": alpha, "initial_std": 0.1 * cold}
    method = MFVI(network, "regression", means=means, kl_weight=weight, **options)
    method.fit((x, y.repeat(1, copies)), num_data=count)
    noise = float(method.predict(x).noise[0, 0])
    variance, mean = (2 * method.log_std["weight"].mean(0)).exp(), method.mean["weight"].detach().mean(0)
    torch.testing.assert_close(1 / variance, alpha + x.square().sum(0) / (cold * noise), rtol=0.06, atol=0)
    residual = (y[:, 0] - x @ mean).square().mean() + (x.square() @ variance).mean()
    assert noise == pytest.approx(float(residual), rel=0.01)
    if means == "fixed":
        assert torch.equal(method.mean["weight"], network.weight)
    else:
        posterior = torch.linalg.solve(alpha * torch.eye(3).double() + x.mT @ x / noise, x.mT @ y[:, 0] / noise)
        torch.testing.assert_close(mean, posterior, rtol=0, atol=0.005)


def test_predictions_are_averages_over_draws_of_all_noisy_weights():
    network, x = nn.Sequential(nn.Linear(3, 2)), inputs()
    method = MFVI(network, "regression", samples=3000, steps=3).fit((x, values(len(x), 2)))
    for value in method.log_std.values():
        value.fill_(-1.0)
    pred = method.predict(x, covariance=True)
    std = {name: value.exp() for name, value in method.log_std.items()}
    expected = torch.stack([covariance_of(network, row, std) for row in x])
    torch.testing.assert_close(pred.latent.full_covariance, expected, rtol=0.15, atol=0.15)
    with torch.no_grad():
        torch.testing.assert_close(pred.latent.mean, network(x), rtol=0, atol=0.1)


def test_a_fit_that_was_stopped_goes_on_to_the_same_numbers(tmp_path, monkeypatch):
    network, loader = mlp(3), DataLoader(TensorDataset(inputs(), labels()), batch_size=7, shuffle=True)
    checkpoint, step, calls = {"checkpoint": tmp_path, "checkpoint_every": 2}, PlainSteps.step, count()

    def fit(**more: Any) -> MFVI:
        torch.manual_seed(0)  # which the loader's order comes from
        return MFVI(network, "classification", **QUICK | {"steps": 12, "eval_every": 3}).fit(loader, val=loader, **more)

    whole = fit()
    monkeypatch.setattr(PlainSteps, "step", lambda *args: step(*args) if next(calls) != 7 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit(**checkpoint)
    resumed = fit(**checkpoint, resume=True)
    assert next(calls) < 18
    assert same(resumed.log_std, whole.log_std)
    assert resumed.history == whole.history
    assert whole.history.best_step is not None


def test_batchnorm_and_dropout_are_left_alone():
    network = Noisy(2)
    method = MFVI(network, "regression", **QUICK, means="moved").fit((inputs(), values(30, 2)))
    assert set(method.log_std) == {"body.0.weight", "body.0.bias", "last.weight", "last.bias"} == set(method.mean)
    for value in method.log_std.values():
        value.fill_(-30.0)
    moved = copy.deepcopy(network).eval()
    moved.load_state_dict({**network.state_dict(), **method.mean})
    with torch.no_grad():
        torch.testing.assert_close(method.predict(inputs()).latent.mean, moved(inputs()))
    assert not torch.equal(method.mean["last.weight"], network.last.weight)


def test_frozen_parameters_have_no_noise():
    network = mlp(2)
    for free in ("2.weight", "2.bias"):
        network.requires_grad_(False).get_parameter(free).requires_grad_(True)
        assert set(MFVI(network, "regression", **QUICK).fit((inputs(), values(30, 2))).log_std) == {free}
    network.requires_grad_(False)
    with pytest.raises(OptionError, match="all of them are frozen"):
        MFVI(network, "regression", **QUICK).fit((inputs(), values(30, 2)))


def test_weights_that_others_read_stay_at_their_means():
    """Attention reads the weights of a linear layer that is never run; an embedding shares those of another."""
    tokens = torch.randint(5, (30, 4), generator=G().manual_seed(0))
    method = MFVI(Attentive(), "classification", **QUICK).fit((tokens, labels(classes=5)))
    linears = {f"block.linear{i}.{part}" for i in (1, 2) for part in ("weight", "bias")}
    assert set(method.log_std) == {*linears, "tied.bias"}
    # In eval mode without gradients a fast path reads the weights itself: it must read the drawn ones.
    for value in method.log_std.values():
        value.fill_(0.0)
    assert (method.predict(tokens).latent.variance > 0.01).all()


def test_a_saved_fit_with_moved_means_predicts_the_same(tmp_path):
    network, x = mlp(2), inputs()
    method = MFVI(network, "regression", **QUICK, means="moved").fit((x, values(30, 2)))
    method.save(tmp_path / "head")
    network.requires_grad_(False)  # as people do who only predict
    again = MFVI.load(tmp_path / "head", model=network)
    assert same(answers(again.predict(x)), answers(method.predict(x)))
