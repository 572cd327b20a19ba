"""ELLA against the linearised Laplace approximation computed densely, and against laplace-torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from posthoc import Outputs
from posthoc.errors import DataError, FileError, LayerError, OptionError
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.methods.ntk.ella import ELLA
from posthoc.methods.ntk.subspace import grid, leading, scores
from posthoc.predictive.latent import FactorLatent
from tests.cases import inputs, labels, mlp, recorded, values
from tests.linearised import covariance, hessians, jacobian, last_only
from tests.oracles import DenseLatent

EVERYTHING = {"num_points": 10_000, "num_features": 10_000}
"""All pairs of a point and an output, and all directions: the approximation is then exact."""


def case(task: str, n: int = 40) -> tuple[nn.Sequential, Tensor, Tensor, Tensor]:
    """A network, its data, and other points."""
    model = mlp(3 if task == "classification" else 2, dtype=torch.float64)
    y = labels(n) if task == "classification" else values(n, 2).double() + model(inputs(n).double()).detach()
    return model, inputs(n, dtype=torch.float64), y, inputs(9, dtype=torch.float64, seed=9)


def dense(method: ELLA, model: nn.Sequential, x: Tensor, new: Tensor) -> Tensor:
    """The covariance of the linearised network's outputs at new points, by the definition."""
    weights = model if method.weights == "all" else last_only(model, model[-1])
    curvature = hessians(model(x).detach())
    if isinstance(method.likelihood, Gaussian):
        noise = (method.likelihood.noise * method.likelihood.scale.square()).detach()
        curvature = torch.diag_embed((1.0 / noise).expand(len(x), -1))
    assert method.choice is not None
    return covariance(jacobian(weights, x), curvature, jacobian(weights, new), method.choice.prior_variance)


@pytest.mark.parametrize("task", ["regression", "classification"])
@pytest.mark.parametrize("weights", ["last", "all"])
def test_with_all_points_and_directions_it_is_the_linearised_laplace_approximation(task, weights):
    model, x, y, new = case(task)
    method = ELLA(model, task, weights=weights, prior_variance=0.3, **EVERYTHING).fit((x, y))
    pred = method.predict(new, covariance=True)
    found = pred.latent.full_covariance
    torch.testing.assert_close(found, dense(method, model, x, new), rtol=1e-6, atol=1e-9)
    assert torch.equal(pred.latent.mean, model(new).detach())


@pytest.mark.parametrize("weights", ["last", "all"])
def test_it_is_what_laplace_torch_gives(weights):
    laplace = pytest.importorskip("laplace")
    model, x, y, new = case("classification")
    subset = {"last": "last_layer", "all": "all"}[weights]
    theirs = laplace.Laplace(model, "classification", subset_of_weights=subset, hessian_structure="full")
    theirs.prior_precision = torch.tensor(1.0 / 0.3, dtype=torch.float64)
    theirs.fit(DataLoader(TensorDataset(x, y), batch_size=16))
    _, expected = theirs._glm_predictive_distribution(new)
    pred = (
        ELLA(model, "classification", weights=weights, prior_variance=0.3, **EVERYTHING)
        .fit((x, y))
        .predict(new, covariance=True)
    )
    torch.testing.assert_close(pred.latent.full_covariance, expected.detach(), rtol=1e-4, atol=1e-7)
    probit = theirs(new, pred_type="glm", link_approx="probit").detach()
    torch.testing.assert_close(pred.probs, probit, rtol=1e-4, atol=1e-6)


def test_without_validation_data_the_prior_is_that_of_greatest_evidence():
    laplace = pytest.importorskip("laplace")
    model, x, y, _ = case("classification")
    theirs = laplace.Laplace(model, "classification", subset_of_weights="all", hessian_structure="full")
    theirs.fit(DataLoader(TensorDataset(x, y), batch_size=16))
    method = ELLA(model, "classification", weights="all", **EVERYTHING).fit((x, y))
    around = [method.choice.prior_variance * factor for factor in (0.8, 1.0, 1.25)]
    below, at, above = (float(theirs.log_marginal_likelihood(torch.tensor(1.0 / prior))) for prior in around)
    assert at > below
    assert at > above


def test_few_directions_are_a_projection():
    """With fewer directions the weights move in a subspace: the leading one of the tangent kernel."""
    model, x, y, new = case("classification")
    method = ELLA(model, "classification", weights="all", num_features=5, num_points=10_000, prior_variance=0.3)
    found = method.fit((x, y)).predict(new, covariance=True).latent.full_covariance
    j = jacobian(model, x)
    basis = torch.linalg.svd(j.flatten(0, 1), full_matrices=False).Vh[:5]
    expected = covariance(j @ basis.mT, hessians(model(x).detach()), jacobian(model, new) @ basis.mT, 0.3)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    assert (method.predict(new).latent.variance < dense(method, model, x, new).diagonal(dim1=1, dim2=2)).all()


def test_leading_directions_are_orthonormal_and_leave_out_what_is_rounding():
    j = torch.randn(6, 30, generator=torch.Generator().manual_seed(0))
    j = torch.cat([j, 2.0 * j[:3]])
    directions, found = leading(j, 20)
    assert len(directions) == 6
    torch.testing.assert_close(directions @ directions.mT, torch.eye(6), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.float(), torch.linalg.svdvals(j)[:6].square())
    with pytest.raises(DataError, match="zero"):
        leading(torch.zeros(4, 3), 2)


def test_a_last_layer_without_a_bias():
    _, x, y, new = case("classification")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3, bias=False)).double()
    method = ELLA(model, "classification", prior_variance=0.3, **EVERYTHING).fit((x, y))
    found = method.predict(new, covariance=True).latent.full_covariance
    torch.testing.assert_close(found, dense(method, model, x, new), rtol=1e-6, atol=1e-9)


def test_a_file_of_outputs_and_features_is_enough_for_the_last_layer():
    model, x, y, new = case("classification")
    with_network = ELLA(model, "classification", num_points=50, seed=1).fit((x, y)).predict(new)
    from_outputs = ELLA(None, "classification", num_points=50, seed=1).fit(recorded(model, x, y))
    torch.testing.assert_close(from_outputs.predict(recorded(model, new)).latent.variance, with_network.latent.variance)


def test_the_latent_gaussian_is_its_covariance_written_out():
    factor = torch.randn(5, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    written, top = DenseLatent(factor @ factor.mT), torch.tensor([0, 1, 2, 3, 0])
    latent = FactorLatent(factor)
    torch.testing.assert_close(latent.variance, written.variance)
    torch.testing.assert_close(latent.covariance(), written.covariance())
    torch.testing.assert_close(latent.difference(top), written.difference(top), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_validation_data_choose_what_makes_them_likeliest(task):
    """The choice is the best of all that were tried, found again by refitting with each prior."""
    model, x, y, _ = case(task, 60)
    train, val = (x[:30], y[:30]), (x[30:], y[30:])
    method = ELLA(model, task, weights="all", early_stop=False).fit(train, val=val)

    def score(fitted: ELLA) -> float:
        return -float(fitted.predict(val[0]).log_prob(val[1]).mean())

    best, found = score(method), method.choice.prior_variance
    for factor in (1e-2, 10**-0.5, 10**0.5, 1e2):
        other = ELLA(model, task, weights="all", early_stop=False, prior_variance=found * factor)
        assert best <= score(other.fit(train, val=val)) + 1e-9


def test_it_stops_early_where_validation_data_say_so():
    """Targets at random: the more rows, the surer it would be of what it cannot know."""
    model, x, _, _ = case("classification", 400)
    model[-1].weight.data *= 6.0
    y = labels(400)
    train, val = (x[:300], y[:300]), (x[300:], y[300:])
    options = {"weights": "last", "num_features": 30, "prior_variance": 3.0}
    stopped = ELLA(model, "classification", **options).fit(train, val=val)
    full = ELLA(model, "classification", early_stop=False, **options).fit(train, val=val)
    assert stopped.choice.rows < full.choice.rows == 300
    assert stopped.predict(val[0]).log_prob(val[1]).mean() > full.predict(val[0]).log_prob(val[1]).mean()
    assert (stopped.predict(val[0]).latent.variance >= full.predict(val[0]).latent.variance - 1e-9).all()


def test_scores_are_those_of_predict():
    model, x, y, _ = case("regression")
    outputs = recorded(model, x, y)
    method = ELLA(None, "regression", prior_variance=0.5).fit(outputs)
    likelihood, phi = method.likelihood, torch.randn(40, 2, 3, dtype=torch.float64)
    tried = grid({40: torch.eye(3, dtype=torch.float64)}, [0.1, 1.0], likelihood)
    found = scores([(outputs[:30], phi[:30]), (outputs[30:], phi[30:])], likelihood, tried)
    at = tried[-1]
    v = phi.square().sum(-1) / (1.0 / at.noise + 1.0 / at.prior)
    total = (v + at.noise) * likelihood.scale.square()
    residual = (y - outputs.outputs).square()
    expected = 0.5 * (residual / total + total.log() + math.log(2.0 * math.pi)).sum(-1).mean()
    torch.testing.assert_close(found[-1], expected.detach())


def test_num_data_is_how_many_points_the_data_stand_for():
    model, x, y, new = case("regression")
    once = ELLA(model, "regression", prior_variance=0.5).fit((x, y), num_data=80).predict(new)
    twice = ELLA(model, "regression", prior_variance=0.5, num_points=10_000).fit((x.repeat(2, 1), y.repeat(2, 1)))
    torch.testing.assert_close(once.latent_variance, twice.predict(new).latent_variance, rtol=1e-6, atol=1e-9)


def test_loaders_arrays_and_saved_heads_agree(tmp_path):
    model, x, y, new = case("classification")
    model = model.float()
    x, new = x.float(), new.float()
    options = {"weights": "all", "num_points": 200}
    method = ELLA(model, "classification", **options).fit((x, y), val=(x, y))
    loader = DataLoader(TensorDataset(x, y), batch_size=256)
    torch.testing.assert_close(
        ELLA(model, "classification", **options).fit(loader, val=loader).predict(new).latent.variance,
        method.predict(new).latent.variance,
    )
    method.save(tmp_path / "head.safetensors")
    again = ELLA.load(tmp_path / "head.safetensors", model=model)
    assert torch.equal(again.predict(new).probs, method.predict(new).probs)
    assert again.choice == method.choice
    assert model.training
    with pytest.raises(OptionError, match="network itself"):
        ELLA.load(tmp_path / "head.safetensors")
    with pytest.raises(FileError, match="fingerprint"):
        ELLA.load(tmp_path / "head.safetensors", model=mlp(3, seed=5))


def test_a_failed_fit_leaves_the_method_as_it_was():
    model, x, y, new = case("classification")
    method = ELLA(model, "classification", weights="all").fit((x, y))
    before = method.predict(new).latent.variance
    with pytest.raises(DataError, match="two classes"):
        method.fit((x[:20] + 1.0, torch.zeros(20, dtype=torch.long)))
    assert torch.equal(method.predict(new).latent.variance, before)


def test_gradients_that_do_not_fit_are_refused_with_their_size():
    model, x, y, _ = case("classification")
    method = ELLA(model, "classification", weights="all", max_gigabytes=1e-4)
    with pytest.raises(OptionError, match=r'0\.000727 GB.*num_points.*weights="last"'):
        method.fit((x, y))
    method = ELLA(model, "classification", weights="all", num_points=3, max_gigabytes=1e-4)
    method.fit((x, y))
    with pytest.raises(OptionError, match=r"0\.000288 GB.*num_features"):
        method.fit((x.repeat(100, 1), y.repeat(100)))


def test_bad_options_and_data():
    model, x, y, _ = case("classification")
    for wrong in ({"weights": "some"}, {"num_points": 0}, {"num_features": 0}, {"prior_variance": -1.0}):
        with pytest.raises(OptionError):
            ELLA(model, "classification", **wrong)
    with pytest.raises(OptionError, match="max_gigabytes"):
        ELLA(model, "classification", max_gigabytes=0)
    with pytest.raises(OptionError, match='weights="last"'):
        ELLA(None, "classification", weights="all")
    with pytest.raises(OptionError, match="frozen"):
        ELLA(mlp(3).requires_grad_(False), "classification", weights="all")
    with pytest.raises(OptionError, match="logits"):
        ELLA(model, "classification", outputs_are="probs")
    with pytest.raises(DataError, match="iterator"):
        ELLA(model, "classification", weights="all").fit(iter([(x, y)]))
    with pytest.raises(DataError, match="runs the network"):
        ELLA(model, "classification", weights="all").fit(recorded(model, x, y))
    with pytest.raises(DataError, match="features"):
        ELLA(None, "classification").fit(Outputs(model(x).detach(), y))
    with pytest.raises(LayerError, match=r"nn\.Linear"):
        ELLA(nn.Tanh(), "regression").fit((x, x))
    with pytest.raises(LayerError, match="linear"):
        ELLA(None, "classification").fit(Outputs(model(x).detach().square(), y, x))
    fitted = ELLA(None, "classification").fit(recorded(model, x, y))
    with pytest.raises(DataError, match="width 6"):
        fitted.predict(Outputs(model(x).detach(), y, x))
    with pytest.raises(DataError, match="features"):
        fitted.predict(Outputs(model(x).detach()))


def test_a_temperature_that_was_fixed_is_kept():
    model, x, y, new = case("classification")
    method = ELLA(model, Categorical(temperature=2.0), prior_variance=0.3, **EVERYTHING).fit((x, y))
    weights = last_only(model, model[-1])
    curvature = hessians(model(x).detach() / 2.0) / 4.0
    expected = covariance(jacobian(weights, x), curvature, jacobian(weights, new), 0.3)
    torch.testing.assert_close(
        method.predict(new, covariance=True).latent.full_covariance, expected, rtol=1e-6, atol=1e-9
    )
