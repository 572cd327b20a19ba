"""ELLA against the linearized Laplace approximation computed densely, and against laplace-torch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from posthoc import Outputs
from posthoc.errors import DataError
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.methods.ntk.ella import ELLA, NOISES, leading
from tests.cases import labels, recorded
from tests.linearized import case, covariance, hessians, jacobian, last_only, without_bias

EVERYTHING: dict[str, Any] = {"num_inducing": 10_000, "num_features": 10_000, "prior_precision": 3.0}
"""All pairs of a point and an output, and all directions: the approximation is then exact."""


def dense(method: ELLA, model: nn.Sequential, x: Tensor, new: Tensor) -> Tensor:
    """The covariance of the linearized network's outputs at new points, by the definition."""
    weights, likelihood = model if method.config.weights == "all" else last_only(model), method.likelihood
    if isinstance(likelihood, Gaussian):
        noise = (likelihood.noise * likelihood.scale.square()).detach()
        curvature = torch.diag_embed((1.0 / noise).expand(len(x), -1))
    else:
        assert isinstance(likelihood, Categorical)
        curvature = hessians(model(x).detach() / likelihood.temperature) / likelihood.temperature.square()
    return covariance(jacobian(weights, x), curvature, jacobian(weights, new), method.prior_precision)


@pytest.mark.parametrize("likelihood", ["regression", "classification", Categorical(temperature=2.0)])
@pytest.mark.parametrize("weights", ["last", "all"])
@pytest.mark.parametrize("bias", [True, False])
def test_with_all_points_and_directions_it_is_the_linearized_laplace_approximation(likelihood, weights, bias):
    model, x, y, new = case(likelihood if likelihood == "regression" else "classification", 40)
    model = model if bias else without_bias(model[-1].out_features)
    method = ELLA(model, likelihood, weights=weights, **EVERYTHING).fit((x, y))
    pred = method.predict(new, covariance=True)
    torch.testing.assert_close(pred.latent.full_covariance, dense(method, model, x, new), rtol=1e-6, atol=1e-9)
    assert torch.equal(pred.latent.mean, model(new).detach())


@pytest.mark.parametrize("weights", ["last", "all"])
def test_it_is_what_laplace_torch_gives(weights):
    laplace = pytest.importorskip("laplace")
    model, x, y, new = case("classification", 40)
    subset = {"last": "last_layer", "all": "all"}[weights]
    theirs = laplace.Laplace(model, "classification", subset_of_weights=subset, hessian_structure="full")
    theirs.prior_precision = torch.tensor(3.0, dtype=torch.float64)
    theirs.fit(DataLoader(TensorDataset(x, y), batch_size=16))
    _, expected = theirs._glm_predictive_distribution(new)
    pred = ELLA(model, "classification", weights=weights, **EVERYTHING).fit((x, y)).predict(new, covariance=True)
    torch.testing.assert_close(pred.latent.full_covariance, expected.detach(), rtol=1e-4, atol=1e-7)
    probit = theirs(new, pred_type="glm", link_approx="probit").detach()
    torch.testing.assert_close(pred.probs, probit, rtol=1e-4, atol=1e-6)


def test_without_validation_data_the_prior_is_that_of_greatest_evidence():
    laplace = pytest.importorskip("laplace")
    model, x, y, _ = case("classification", 40)
    theirs = laplace.Laplace(model, "classification", subset_of_weights="all", hessian_structure="full")
    theirs.fit(DataLoader(TensorDataset(x, y), batch_size=16))
    method = ELLA(model, "classification", weights="all", **{**EVERYTHING, "prior_precision": None}).fit((x, y))
    around = torch.tensor([0.8, 1.0, 1.25]) * method.prior_precision
    below, at, above = (float(theirs.log_marginal_likelihood(precision)) for precision in around)
    assert below < at > above


def test_few_directions_are_a_projection():
    """With fewer directions the weights move in a subspace: the leading one of the tangent kernel."""
    model, x, y, new = case("classification", 40)
    method = ELLA(model, "classification", weights="all", **{**EVERYTHING, "num_features": 5}).fit((x, y))
    j = jacobian(model, x)
    basis = torch.linalg.svd(j.flatten(0, 1), full_matrices=False).Vh[:5]
    expected = covariance(j @ basis.mT, hessians(model(x).detach()), jacobian(model, new) @ basis.mT, 3.0)
    found = method.predict(new, covariance=True).latent.full_covariance
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_leading_directions_are_orthonormal_and_leave_out_what_is_rounding():
    j = torch.randn(6, 30, generator=torch.Generator().manual_seed(0))
    j = torch.cat([j, 2.0 * j[:3]])
    directions, found = leading(j, 20)
    assert len(directions) == 6
    torch.testing.assert_close(directions @ directions.mT, torch.eye(6), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.float(), torch.linalg.svdvals(j)[:6].square())
    with pytest.raises(DataError, match="zero"):
        leading(torch.zeros(4, 3), 2)


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_validation_data_choose_what_makes_them_likeliest(task):
    """The choice is the best of those that were tried, found again by fits with each prior, and in regression noise."""
    model, x, y, _ = case(task, 60)
    train, val = (x[:30], y[:30]), (x[30:], y[30:])
    options = {"weights": "all", "early_stop": False}
    method = ELLA(model, task, **options).fit(train, val=val)
    best = float(method.predict(val[0]).log_prob(val[1]).mean())
    for factor in (1e-2, 10**-0.5, 10**0.5, 1e2):
        other = ELLA(model, task, **options, prior_precision=method.prior_precision * factor).fit(train, val=val)
        assert best >= float(other.predict(val[0]).log_prob(val[1]).mean()) - 1e-9
    if isinstance(method.likelihood, Gaussian):
        assert min(abs(float(method.likelihood.noise.detach()) - noise) for noise in NOISES) < 1e-7


def test_it_stops_early_where_validation_data_say_so():
    """Targets at random: the more rows, the surer it would be of what it cannot know."""
    model, x, y, _ = case("classification", 400)
    model[-1].weight.data *= 6.0
    y = labels(400)
    train, val = (x[:300], y[:300]), (x[300:], y[300:])
    options = {"num_features": 30, "prior_precision": 1.0 / 3.0}
    stopped = ELLA(model, "classification", **options).fit(train, val=val)
    full = ELLA(model, "classification", early_stop=False, **options).fit(train, val=val)
    assert stopped.rows_used < full.rows_used == 300
    assert stopped.predict(val[0]).log_prob(val[1]).mean() > full.predict(val[0]).log_prob(val[1]).mean()
    assert (stopped.predict(val[0]).latent.variance >= full.predict(val[0]).latent.variance - 1e-9).all()


def test_num_data_is_how_many_points_the_data_stand_for():
    model, x, y, new = case("regression", 40)
    options = {"prior_precision": 2.0, "num_inducing": 10_000}
    once = ELLA(model, "regression", **options).fit((x, y), num_data=80).predict(new)
    twice = ELLA(model, "regression", **options).fit((x.repeat(2, 1), y.repeat(2, 1))).predict(new)
    torch.testing.assert_close(once.latent_variance, twice.latent_variance, rtol=1e-6, atol=1e-9)


def test_loaders_and_arrays_agree():
    model, x, y, new = case("classification", 40)
    method, loader = ELLA(model, "classification", weights="all"), DataLoader(TensorDataset(x, y), batch_size=7)
    first, second = (method.fit(data, val=data).predict(new).latent.variance for data in ((x, y), loader))
    torch.testing.assert_close(first, second)


def test_other_features_than_those_of_the_fit_are_refused():
    model, x, y, _ = case("classification", 40)
    fitted = ELLA(None, "classification").fit(recorded(model, x, y))
    with pytest.raises(DataError, match="width 6"):
        fitted.predict(Outputs(model(x).detach(), y, x))
    with pytest.raises(DataError, match="features"):
        fitted.predict(Outputs(model(x).detach()))
