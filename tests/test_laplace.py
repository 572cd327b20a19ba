"""The linearized Laplace approximation against dense computations and against laplace-torch."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from scipy.optimize import minimize
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from posthoc import Categorical, Gaussian, Outputs
from posthoc.errors import DataError, LayerError, NotFittedError, OptionError, PosthocWarning
from posthoc.methods.laplace.laplace import Laplace
from posthoc.methods.laplace.last_layer import find_last_layer
from posthoc.methods.laplace_torch import LaplaceTorch
from tests.cases import answers, same
from tests.test_many_classes import Largest
from tests.test_network import assert_unchanged, portrait

DOUBLE = torch.float64
FORMS = ("kron", "full", "diag")


def network(width, bias=True):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, width, bias=bias)).double().eval()


def case(task, width=3, n=80, bias=True, seed=1):
    """A network, points, targets that it explains in part, and its outputs as a file would hold them."""
    model, g = network(width, bias), torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, dtype=DOUBLE, generator=g)
    with torch.no_grad():
        features, outputs = model[:-1](x), model(x)
    if task == "classification":
        y = torch.multinomial((2.0 * outputs).softmax(-1), 1, generator=g).squeeze(-1)
    else:
        y = outputs + 0.3 * torch.randn(outputs.shape, dtype=DOUBLE, generator=g)
    return model, x, y, Outputs(outputs, y, features)


def one(features):
    return torch.cat([features, torch.ones(len(features), 1, dtype=DOUBLE)], -1)


def jacobians(features, width):  # (N, C, C D)
    eye = torch.eye(width, dtype=DOUBLE)
    return torch.einsum("cd,nf->ncdf", eye, one(features)).flatten(2)


def dense_hessian(data, form, noise=1.0):
    """Σ Jᵀ Λ J, one point at a time; KFAC as the product of its factors."""
    width, features = data.outputs.shape[1], data.features
    classes = data.targets.ndim == 1
    total, blocks = 0.0, 0.0
    for j, f in zip(jacobians(features, width), data.outputs, strict=True):
        p = f.softmax(-1)
        block = torch.diag(p) - torch.outer(p, p) if classes else torch.eye(width, dtype=DOUBLE) / noise
        total, blocks = total + j.mT @ block @ j, blocks + block
    if form != "kron":
        return total if form == "full" else total.diag().diag()
    a = one(features).mT @ one(features) / len(features)
    a[-1, :-1] = a[:-1, -1] = 0.0
    return torch.kron(blocks, a)


@pytest.mark.parametrize("form", FORMS)
def test_the_posterior_is_the_inverse_of_the_dense_matrix(form):
    data = case("classification")[3]
    method = Laplace(None, "classification", curvature=form, prior_precision=0.7).fit(data)
    pred = method.predict(data, covariance=True)
    sigma = torch.linalg.inv(dense_hessian(data, form) + 0.7 * torch.eye(18, dtype=DOUBLE))
    j = jacobians(data.features, 3)
    v = j @ sigma @ j.mT
    torch.testing.assert_close(pred.latent.covariance, v, rtol=1e-8, atol=1e-10)
    probit = data.outputs / (1.0 + math.pi / 8.0 * v.diagonal(dim1=1, dim2=2)).sqrt()
    torch.testing.assert_close(pred.probs, probit.softmax(-1))
    # Variances of differences, and draws, are those of the covariance.
    latent, scalar = method.posterior.curvature.latent, torch.tensor(1.0, dtype=DOUBLE)
    few, top, rows = latent(one(data.features[:2]), 0.7 * scalar, scalar), data.outputs[:2].argmax(-1), torch.arange(2)
    expected = torch.stack([v[rows, c, c] + v[rows, top, top] - 2 * v[rows, c, top] for c in range(3)], -1)
    torch.testing.assert_close(few.difference(top), expected)
    draws = few.perturb(torch.randn(20000, 2, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)))
    found = torch.einsum("snc,snd->ncd", draws, draws) / len(draws)
    torch.testing.assert_close(found, v[:2], rtol=0.05, atol=0.03 * float(v[:2].abs().max()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("noise", "prior"), [("shared", "marglik"), ("per_output", "marglik"), ("per_output", 3.0)])
def test_regression_is_bayesian_linear_regression_at_its_greatest_evidence(form, noise, prior):
    model, _, y, data = case("regression", width=2)
    method = Laplace(None, Gaussian(noise), curvature=form, prior_precision=prior).fit(data)
    pred = method.predict(data, covariance=True)
    found, delta = pred.noise[0], method.prior_precision
    if noise == "shared":
        torch.testing.assert_close(found[0], found[1])
    weights = torch.cat([model[-1].weight, model[-1].bias[:, None]], -1).detach()
    error = (y - data.outputs).square().sum(0)
    unit = dense_hessian(data, form).reshape(2, 6, 2, 6)

    def evidence(log_noise, log_delta):
        """Minus twice the log evidence: Laplace's, with the network's own weights as the mode."""
        sigma2, d = log_noise.exp(), log_delta.exp()
        h = (unit / sigma2[:, None, None, None]).reshape(12, 12) + d * torch.eye(12, dtype=DOUBLE)
        fit = (len(y) * (2 * math.pi * sigma2).log() + error / sigma2).sum()
        return fit + torch.logdet(h) - 12 * log_delta + d * weights.square().sum()

    at = found.log().requires_grad_(), torch.tensor(math.log(delta), dtype=DOUBLE, requires_grad=True)
    slopes = torch.autograd.grad(evidence(*at), at)
    by_noise = slopes[0].sum() if noise == "shared" else slopes[0]
    torch.testing.assert_close(by_noise, torch.zeros_like(by_noise), rtol=0, atol=1e-5)
    if prior == "marglik":
        torch.testing.assert_close(slopes[1], torch.zeros_like(slopes[1]), rtol=0, atol=1e-5)
    else:
        assert delta == pytest.approx(prior)

    h = (unit / found[:, None, None, None]).reshape(12, 12) + delta * torch.eye(12, dtype=DOUBLE)
    j = jacobians(data.features, 2)
    v = j @ torch.linalg.inv(h) @ j.mT
    torch.testing.assert_close(pred.latent.full_covariance, v, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(pred.variance, v.diagonal(dim1=1, dim2=2) + found, rtol=1e-7, atol=1e-9)


def test_an_exact_fit_and_weights_of_zero_still_have_an_answer():
    model, x, _, data = case("regression", width=1)
    exact = data.with_targets(data.outputs)
    assert (Laplace(None, "regression").fit(exact).predict(exact).std < 1e-3).all()
    for weights in model[-1].parameters():
        nn.init.zeros_(weights)
    y = torch.randint(2, (len(x), 1), generator=torch.Generator().manual_seed(0)).double()
    assert Laplace(model, "regression").fit((x, y)).predict(x).std.isfinite().all()


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_validation_data_choose_what_is_best_on_them(task):
    data, val = case(task, n=8)[3], case(task, n=4000, seed=9)[3]
    given, g = 3.0, torch.Generator().manual_seed(0)
    truth = Laplace(None, task, curvature="full", prior_precision=given).fit(data).predict(val, covariance=True)
    drawn = (truth.latent if task == "classification" else truth).sample(1, g)[0]
    y = torch.multinomial(drawn.softmax(-1), 1, generator=g).squeeze(-1) if task == "classification" else drawn
    val = val.with_targets(y)
    method = Laplace(None, task, curvature="full", prior_precision="val").fit(data, val=val)
    if task == "regression":  # logit scaling is an approximation, whose best precision is another
        assert method.prior_precision == pytest.approx(given, rel=0.5)

    def loss():
        return -float(method.predict(val).log_prob(val.targets).mean())

    best, posterior = loss(), method.posterior
    assert best < -float(Laplace(None, task, curvature="full").fit(data).predict(val).log_prob(val.targets).mean())
    learned = [posterior.log_precision] + ([posterior.likelihood.log_noise] if task == "regression" else [])
    for value in learned:
        for step in (-0.05, 0.05):
            value.data += step
            assert loss() > best + 1e-7
            value.data -= step
    with pytest.raises(OptionError, match="val"):
        Laplace(None, task, prior_precision="val").fit(data)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_rows_that_stand_for_several_points_count_as_several(task, form):
    data = case(task)[3]
    twice = Outputs(*(torch.cat([part, part]) for part in (data.outputs, data.targets, data.features)))
    a = Laplace(None, task, curvature=form).fit(data, num_data=160)
    b = Laplace(None, task, curvature=form).fit(twice)
    assert a.prior_precision == pytest.approx(b.prior_precision, rel=1e-6)
    found, expected = (method.predict(data).latent.variance for method in (a, b))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_a_temperature_of_the_likelihood_divides_the_logits():
    """softmax(f/τ) of logits f is softmax of logits f/τ."""
    data = case("classification")[3]
    half = data.with_outputs(data.outputs / 2)

    def predicted(t, rows):
        return Laplace(None, Categorical(t, prediction="pairwise"), prior_precision=2.0 / t**2).fit(rows).predict(rows)

    warm, cool = predicted(2.0, data), predicted(1.0, half)
    torch.testing.assert_close(warm.probs, cool.probs)
    torch.testing.assert_close(warm.latent.variance, 4 * cool.latent.variance)
    assert warm.keeps_argmax
    warm, cool = (Laplace(None, Categorical(t)).fit(rows) for t, rows in ((2.0, data), (1.0, half)))
    assert warm.prior_precision == pytest.approx(cool.prior_precision / 4)
    assert float(Laplace(None, Categorical()).fit(data).predict(data).temperature) == 1.0


@pytest.mark.parametrize("bias", [True, False])
def test_the_last_layer_is_read_from_the_network_or_found_from_the_files(bias):
    model, x, y, data = case("classification", bias=bias)
    half = Outputs(data.outputs.half().float(), data.targets, data.features.half().float())
    expected = model[-1].bias.detach() if bias else torch.zeros(3, dtype=DOUBLE)
    for rows, error in ((data, 1e-8), (half, 2e-3)):
        found = find_last_layer(None, rows, torch.device("cpu"))
        torch.testing.assert_close(found.weight, model[-1].weight.detach(), rtol=error, atol=error)
        torch.testing.assert_close(found.bias, expected, rtol=error, atol=error)
    from_network = Laplace(model, "classification").fit((x, y))
    assert from_network.posterior.bias == bias
    if bias:
        probs = from_network.predict(x).probs
        torch.testing.assert_close(probs, Laplace(None, "classification").fit(data).predict(data).probs)
        named = Laplace(model, "classification", layer="1").fit((x, y))
        torch.testing.assert_close(probs, named.predict(x).probs)


def test_a_single_logit_is_of_two_classes():
    model, x, _, data = case("regression", width=1)
    y = torch.randint(2, (len(x),), generator=torch.Generator().manual_seed(0))
    both = Outputs(torch.cat([torch.zeros_like(data.outputs), data.outputs], -1), y, data.features)
    a, b = Laplace(model, "classification").fit((x, y)), Laplace(None, "classification").fit(both)
    assert a.prior_precision == pytest.approx(b.prior_precision)
    torch.testing.assert_close(a.predict(x).probs, b.predict(both).probs)


def test_data_and_networks_of_which_the_last_layer_is_not_known_are_refused():
    model, x, y, data = case("classification")
    with pytest.warns(PosthocWarning, match="6 points are too few to find a last layer of 5 features"):
        Laplace(None, "classification").fit(data[:6].with_targets(torch.arange(6) % 3))
    for predictor, rows, error, message in (
        (None, data.with_outputs(data.outputs.tanh()), LayerError, r"1% of their spread, found a residual of 0\.\d"),
        (None, Outputs(data.outputs, y), DataError, "features"),
        (None, data.with_targets(torch.ones_like(y)), DataError, "two classes"),
        (lambda v: model(v), (x, y), LayerError, "Outputs with features"),
        (nn.Sequential(nn.Linear(3, 3), nn.Tanh()), (x, y), LayerError, "the layer '0' to give the outputs"),
        (nn.Sequential(nn.Linear(3, 2), nn.ConstantPad1d((1, 0), 0.0)), (x, y), LayerError, "residual of inf"),
        (nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 3, 3), nn.Flatten()), (x, y), LayerError, r"nn\.Linear"),
    ):
        with pytest.raises(error, match=message):
            Laplace(predictor.double() if isinstance(predictor, nn.Module) else predictor, "classification").fit(rows)


def test_options_and_data_that_do_not_fit_are_refused():
    _, _, _, data = case("classification")
    fitted = Laplace(None, "classification").fit(data)
    for rows in (Outputs(data.outputs), Outputs(data.outputs, features=data.features[:, :4])):
        with pytest.raises(DataError, match="width 5"):
            fitted.predict(rows)
    with pytest.raises(NotFittedError):
        _ = Laplace(None, "classification").prior_precision
    wrong = {"curvature": ["block"], "prior_precision": ["best", 0.0, math.inf, True], "outputs_are": ["probs"]}
    for options in ({name: value} for name, values in wrong.items() for value in values):
        with pytest.raises(OptionError):
            Laplace(None, "classification", **options)
    for form, needed in (("kron", "2.02e-06"), ("full", "1.09e-05"), ("diag", "5.76e-07")):
        with pytest.raises(OptionError, match=f'"{form}" needs {needed} GB, 1e-07 GB are allowed.*max_gigabytes'):
            Laplace(None, "classification", curvature=form, max_gigabytes=1e-7).fit(data)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_saved_and_loaded(task, form, tmp_path):
    _, _, _, data = case(task)
    method = Laplace(None, task, curvature=form).fit(data)
    method.save(tmp_path / "head")
    again = Laplace.load(tmp_path / "head")
    assert again.prior_precision == method.prior_precision
    assert same(answers(again.predict(data)), answers(method.predict(data)))


@pytest.mark.parametrize("form", ["kron", "diag"])
def test_no_tensor_has_a_matrix_of_classes_for_each_point(form):
    g = torch.Generator().manual_seed(0)
    features, weights = torch.randn(600, 32, generator=g), 0.05 * torch.randn(32, 500, generator=g)
    data = Outputs(features @ weights, torch.arange(600) % 500, features)
    with Largest() as seen:
        Laplace(None, "classification", curvature=form, prior_precision=1.0).fit(data).predict(data)
    assert seen.numbers <= 600 * 500


def theirs(model, x, y, form, task, subset="last_layer", **options):
    """laplace-torch at the top of its marginal likelihood, found from its values: its gradient lacks a term for
    Kronecker factors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        laplace = pytest.importorskip("laplace", reason="not installed: pip install 'posthoc[laplace]'")
        la = laplace.Laplace(model, task, subset_of_weights=subset, hessian_structure=form, **options)
        la.fit(DataLoader(TensorDataset(x, y), batch_size=30))

    def minus(logs):
        return -float(la.log_marginal_likelihood(*torch.tensor(logs, dtype=DOUBLE).exp()))

    start = [1.0, 0.0] if task == "regression" else [1.0]  # logarithms of the precision and of the noise
    minus(minimize(minus, start, method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-12}).x)
    return la


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [True, False])
def test_classification_equals_laplace_torch(form, bias):
    model, x, y, data = case("classification", bias=bias)
    la = theirs(model, x, y, form, "classification")
    fitted = [(Laplace(model, "classification", curvature=form).fit((x, y)), x)]
    if bias:
        fitted.append((Laplace(None, "classification", curvature=form).fit(data), data))
    for method, new in fitted:
        assert method.prior_precision == pytest.approx(float(la.prior_precision), rel=1e-5)
        pred = method.predict(new, covariance=True)
        torch.testing.assert_close(pred.probs, la(x, pred_type="glm", link_approx="probit"), rtol=1e-5, atol=1e-6)
        covariance = la._glm_predictive_distribution(x)[1]
        torch.testing.assert_close(pred.latent.covariance, covariance, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", [1, 2])
def test_regression_equals_laplace_torch(form, width):
    model, x, y, _ = case("regression", width=width)
    la = theirs(model, x, y, form, "regression")
    method = Laplace(model, "regression", curvature=form).fit((x, y))
    pred = method.predict(x, covariance=True)
    assert method.prior_precision == pytest.approx(float(la.prior_precision), rel=1e-4)
    torch.testing.assert_close(pred.noise.sqrt(), la.sigma_noise.expand(pred.noise.shape), rtol=1e-4, atol=0)
    torch.testing.assert_close(pred.latent.full_covariance, la(x)[1], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize(("curvature", "subnetwork"), [*((form, None) for form in FORMS), ("full", 7), ("diag", 7)])
def test_the_adapter_gives_what_laplace_torch_gives(task, curvature, subnetwork, tmp_path):
    model, x, y, _ = case(task)
    model.train()
    model[0].bias.grad = torch.ones(5, dtype=DOUBLE)
    before = portrait(model)
    method = LaplaceTorch(model, task, curvature=curvature, subnetwork=subnetwork).fit((x, y))
    pred = method.predict(x, covariance=True)
    weights, chosen = torch.cat([p.detach().reshape(-1) for p in model.parameters()]), {}
    if subnetwork is not None:
        chosen = {"subnetwork_indices": weights.abs().topk(subnetwork).indices.sort().values}
    la = theirs(network(3), x, y, curvature, task, "subnetwork" if chosen else "all", **chosen)
    assert method.prior_precision == pytest.approx(float(la.prior_precision), rel=1e-4)
    torch.testing.assert_close(pred.latent.mean, model(x).detach(), rtol=0, atol=0)
    torch.testing.assert_close(pred.latent.full_covariance, la._glm_predictive_distribution(x)[1], rtol=1e-3, atol=1e-6)
    if task == "regression":
        torch.testing.assert_close(pred.noise.sqrt(), la.sigma_noise.expand(pred.noise.shape), rtol=1e-4, atol=0)
    assert_unchanged(model, before)
    assert not hasattr(model, "output_size")
    with pytest.raises(OptionError, match="cannot be saved"):
        method.save(tmp_path / "head.safetensors")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None}, r"nn\.Module"),
        ({"model": network(3).requires_grad_(False)}, "not frozen"),
        ({"curvature": "lowrank"}, "curvature"),
        ({"prior_precision": "val"}, "prior_precision"),
        ({"subnetwork": 3}, 'subnetwork, got "kron"'),
        ({"likelihood": Categorical(temperature=2.0)}, r"temperature=1\.0"),
        ({"likelihood": Gaussian("per_output")}, "shared"),
    ],
)
def test_the_adapter_refuses_what_it_cannot_do(options, message):
    pytest.importorskip("laplace")
    model, x, y, data = case("classification")
    with pytest.raises(OptionError, match=message):
        LaplaceTorch(**{"model": model, "likelihood": "classification", **options}).fit((x, y))
    with pytest.raises(DataError, match="got outputs"):
        LaplaceTorch(model, "classification").fit(data)


@pytest.mark.parametrize(("form", "nll"), [("kron", 0.2414), ("full", 0.2384)])
def test_cifar10_as_laplace_torch(real_data, form, nll):
    folder = real_data / "cifar10_resnet20"
    method = Laplace(None, "classification", curvature=form).fit(folder / "train.npz")
    total = rows = 0.0
    for pred, y in method.stream_with_targets(folder / "test.npz"):
        total, rows = total - float(pred.log_prob(y).sum()), rows + len(y)
    assert total / rows == pytest.approx(nll, abs=1e-3)
