"""SNGP: its covariance against the dense Laplace of its feature regression, its bound, its start, its draws."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from posthoc import Categorical, Gaussian, LayerError
from posthoc.io import read_head
from posthoc.methods.weights.sngp import SNGP, RandomFeatures, SpectralBound, bound_layers, settle_bounds
from tests.cases import Noisy, answers, in_eval, inputs, labels, mlp, same, values
from tests.oracles import kernel_matrix

QUICK: dict[str, Any] = {"steps": 5, "num_features": 16, "batch_size": 10}
G = torch.Generator


@pytest.fixture(autouse=True)
def same_first_weights() -> None:
    torch.manual_seed(0)


def norm(weight: Tensor) -> float:
    return float(torch.linalg.matrix_norm(weight.detach().flatten(1).double(), 2))


def features(method, x):  # (N, D)
    """φ computed by hand from what the fitted copy of an `mlp` holds."""
    head, h = method.network[-1][0], method.network[:-1](x).double()
    angle = h @ head.frequency.double().mT / float(head.lengthscale) + head.phase.double()
    return (2.0 / len(head.phase)) ** 0.5 * angle.cos()


def test_random_features_stand_for_the_rbf_kernel():
    h = torch.randn(5, 3, generator=G().manual_seed(0))
    layer = RandomFeatures(3, 40_000, G().manual_seed(1))
    layer.lengthscale.fill_(1.7)
    expected = kernel_matrix("rbf", h.double(), h.double(), torch.tensor(1.7), 1.0)
    torch.testing.assert_close((layer(h) @ layer(h).mT).double(), expected, rtol=0, atol=0.03)


@pytest.mark.parametrize(
    "make", [partial(nn.Linear, 5, 4), partial(nn.Conv2d, 2, 4, 3), partial(nn.Conv1d, 6, 2, 3, groups=2)]
)
def test_a_weight_is_scaled_only_if_its_norm_exceeds_the_bound(make):
    layer = make()
    before, size = layer.weight.detach().clone(), norm(layer.weight)
    for bound in (0.5 * size, 2.0 * size):
        network = nn.Sequential(layer, nn.Linear(2, 2))
        bound_layers(network, "1", bound, G().manual_seed(0))
        scaled = before * min(1.0, bound / size)
        torch.testing.assert_close(layer.weight.detach(), scaled, rtol=1e-2, atol=1e-4)
        settle_bounds(network)
        assert norm(layer.weight) <= bound * (1 + 1e-6)
        assert isinstance(layer._parameters["weight"], nn.Parameter)
        if bound > size:
            assert torch.equal(layer.weight, before)
        assert not hasattr(layer, "parametrizations")
        layer.weight.data = before.clone()


def test_power_iterations_follow_a_weight_that_changes():
    weight = torch.randn(6, 4, generator=G().manual_seed(0))
    bound, other = SpectralBound(weight, 1.0, G().manual_seed(1)), torch.randn(6, 4, generator=G().manual_seed(2))
    for _ in range(60):
        scaled = bound(other)
    assert norm(scaled) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("noise", ["shared", "per_output"])
def test_the_covariance_of_regression_is_the_inverse_of_the_hessian(noise):
    """Of the penalised negative log-likelihood, by automatic differentiation, for each output."""
    network, x, y = mlp(2), inputs(40), values(40, 2) * torch.tensor([1.0, 50.0])
    method = SNGP(network, Gaussian(noise), num_features=8, steps=20, prior_precision=0.7).fit((x, y), num_data=80)
    pred = method.predict(x)
    phi, said = features(method, x), in_eval(network, x).double()
    spread = said.var(0, unbiased=False)

    def joint(beta, c):
        residual = y[:, c].double() - phi @ beta
        return residual.square().sum() / pred.noise[0, c] + 0.35 * beta.square().sum() / spread[c]

    for c in range(2):
        hessian = torch.autograd.functional.hessian(partial(joint, c=c), torch.zeros(8, dtype=torch.float64))
        expected = ((phi @ torch.linalg.inv(hessian)) * phi).sum(-1)
        torch.testing.assert_close(pred.latent_variance[:, c].double(), expected, rtol=1e-3, atol=0)
    residuals, own = (y - pred.mean).square().mean(0), (y - said).square().mean(0)
    if noise == "per_output":
        torch.testing.assert_close(pred.noise[0], residuals)
    else:  # one number in units of each output's own residuals
        torch.testing.assert_close(pred.noise[0].double(), own * (residuals / own).mean())


def test_the_covariance_of_classification_is_the_inverse_of_the_weighted_gram_matrix():
    network, x, y = mlp(3), inputs(40), labels(40)
    method = SNGP(network, Categorical(temperature=1.5), num_features=8, steps=20, prior_precision=0.7).fit((x, y))
    pred = method.predict(x)
    p = (pred.latent.mean.double() / 1.5).softmax(-1).amax(-1)
    said, phi = in_eval(network, x).double(), features(method, x)
    precision = 0.7 / said.var(0, unbiased=False).mean() * torch.eye(8).double()
    precision = precision + sum(q * (1 - q) / 1.5**2 * torch.outer(row, row) for q, row in zip(p, phi, strict=True))
    expected = ((phi @ torch.linalg.inv(precision)) * phi).sum(-1, keepdim=True).expand(40, 3)
    torch.testing.assert_close(pred.latent.variance.double(), expected, rtol=1e-4, atol=0)
    mean_field = (pred.latent.mean.double() / (1.5**2 + math.pi / 8 * expected).sqrt()).softmax(-1)
    torch.testing.assert_close(pred.probs.double(), mean_field, rtol=1e-4, atol=0)


def test_the_first_weights_say_what_the_network_says_and_training_does_better():
    network, x = mlp(2), inputs(200)
    network[2].bias.data += 100.0
    said = in_eval(network, x)
    y = said + 0.1 * values(200, 2)
    start = SNGP(network, "regression", num_features=256, steps=0).fit((x, y)).predict(x)
    assert ((start.mean - said).square().mean(0) < 0.02 * said.var(0)).all()
    y = y + torch.sin(3 * x[:, :2])  # which the network knows nothing of
    before, after = (
        SNGP(network, "regression", num_features=256, steps=n, lr=0.01).fit((x, y)).predict(x).log_prob(y).mean()
        for n in (0, 200)
    )
    assert after > before + 0.2


def test_a_convolutional_network_is_bounded_where_it_is_not_frozen():
    body = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 8)
    network = nn.Sequential(*body, nn.Tanh(), nn.Linear(8, 3))
    images = torch.randn(30, 1, 4, 4, generator=G().manual_seed(0))
    method = SNGP(network, "classification", **QUICK, norm_bound=0.3).fit((images, labels()))
    for i in (0, 4):
        assert norm(network[i].weight) > 0.3 >= norm(method.network[i].weight) / (1 + 1e-6)
    assert torch.equal(method.network[1].running_mean, network[1].running_mean)
    assert (method.predict(images).latent.variance > 0).all()
    network[4].requires_grad_(False)
    frozen = SNGP(network, "classification", **QUICK, norm_bound=0.3).fit((images, labels())).network[4]
    assert same(dict(frozen.state_dict()), dict(network[4].state_dict()))


def test_variance_grows_to_the_priors_away_from_the_data():
    network, x = mlp(1), inputs(200)
    network[1] = nn.Identity()
    y = in_eval(network, x) + 0.1 * values(200)
    method = SNGP(network, "regression", num_features=512, steps=0).fit((x, y))
    h = method.network[:-1](x)
    distance = torch.cdist(h, h).square().mean().sqrt()  # of all pairs: the lengthscale if none is given
    torch.testing.assert_close(method.network[-1][0].lengthscale, distance)
    near, far = method.predict(x).latent_variance, method.predict(x + 100.0).latent_variance
    prior = in_eval(network, x).var(0, unbiased=False)
    assert near.mean() < 0.05 * prior
    torch.testing.assert_close(far.mean(), prior[0], rtol=0.2, atol=0)


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_monte_carlo_converges_to_the_analytic_predictive(task):
    network, x = mlp(3), inputs()
    y = labels() if task == "classification" else values(30, 3)
    options, errors = {**QUICK, "steps": 10, "prior_precision": 0.2}, []
    exact = SNGP(network, task, **options).fit((x, y)).predict(x, covariance=True)
    for samples in (30, 3000):
        drawn = SNGP(network, task, **options, prediction="monte_carlo", samples=samples).fit((x, y)).predict(x)
        errors.append(float((drawn.latent.variance / exact.latent.variance - 1).abs().mean()))
        assert ((drawn.latent.mean - exact.latent.mean).square() / exact.latent.variance).mean() < 5 / samples
    assert errors[1] < 0.05
    assert errors[1] < 0.4 * errors[0]
    if task == "classification":
        torch.testing.assert_close(drawn.probs, exact.probs, rtol=0, atol=0.02)
    else:
        torch.testing.assert_close(drawn.log_prob(y), exact.log_prob(y), rtol=0, atol=0.2)


def test_a_single_logit_stands_for_two_classes():
    x, y = inputs(), labels(classes=2)
    torch.use_deterministic_algorithms(True)  # which fills memory that was not written to with NaN
    try:
        pred = SNGP(mlp(1), "classification", **QUICK).fit((x, y)).predict(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (pred.latent.mean[:, 0] == 0).all()
    assert (pred.latent.variance[:, 0] == 0).all()
    expected = (pred.latent.mean[:, 1] / (1 + math.pi / 8 * pred.latent.variance[:, 1]).sqrt()).sigmoid()
    torch.testing.assert_close(pred.probs[:, 1], expected)
    drawn = SNGP(mlp(1), "classification", **QUICK, prediction="monte_carlo").fit((x, y)).predict(x)
    assert (drawn.latent.variance[:, 1] > 0).all()


@pytest.mark.parametrize("prediction", ["mean_field", "monte_carlo"])
def test_outputs_without_a_second_axis(prediction):
    network, x, y = Noisy(1, flat=True), inputs(), values().squeeze(-1)
    pred = SNGP(network, "regression", **QUICK, prediction=prediction).fit((x, y)).predict(x)
    assert pred.mean.shape == pred.latent_variance.shape == (30,)


def test_same_seed_same_numbers_with_a_loader_that_shuffles():
    loader = DataLoader(TensorDataset(inputs(), labels()), batch_size=7, shuffle=True)
    fits = (SNGP(mlp(3), "classification", **QUICK, seed=s).fit(loader) for s in (1, 1, 2))
    a, b, c = (answers(method.predict(inputs())) for method in fits)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(a["variance"], c["variance"])


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Linear(3, 3), nn.Softplus()),
        nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Linear(3, 4), nn.Flatten(), nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 3, 1), nn.Flatten()),
    ],
)
def test_a_last_layer_that_is_not_linear_is_refused(network):
    with pytest.raises(LayerError, match="Expected the layer '0' to give the outputs"):
        SNGP(network, "classification", **QUICK).fit((inputs(), labels()))


def test_the_file_holds_the_whole_copy(tmp_path):
    network, x = Noisy(2), inputs()
    method = SNGP(network, "regression", **QUICK, lengthscale=2.0).fit((x, values(30, 2)))
    method.save(tmp_path / "head")
    again = SNGP.load(tmp_path / "head", model=network)
    assert same(answers(again.predict(x)), answers(method.predict(x)))
    tensors, _ = read_head(tmp_path / "head")
    assert {"network.body.0.weight", "network.body.1.running_mean", "network.last.0.frequency"} <= tensors.keys()
