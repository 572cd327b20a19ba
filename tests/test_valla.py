"""VaLLA against the linearized Laplace approximation computed densely, and against laplace-torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posthoc import Categorical, OptionError, VaLLA
from posthoc.fmgp.points import PointView
from posthoc.fmgp.process import Objective
from tests import oracles
from tests.cases import inputs, labels, mlp
from tests.linearized import case, covariance, hessians, jacobian, last_only, without_bias

QUICK: dict[str, Any] = {"num_inducing": 6, "steps": 20, "batch_size": 16}


def process_of(method):
    return method._fitted.process


def everywhere(model: nn.Sequential, task: str, weights: str, x: Tensor, y: Tensor, **more: Any) -> VaLLA:
    """Not trained, with an inducing point for every output of every point."""
    n, outputs = model(x).shape
    options: dict[str, Any] = {"steps": 0, "prior_precision": 3.0, "weights": weights, **more}
    if weights == "last":
        options["inducing"] = model[:-1](x).detach().repeat(outputs, 1)
        options["inducing_classes"] = torch.arange(outputs).repeat_interleave(n)
    return VaLLA(model, task, num_inducing=n * outputs, **options).fit((x, y))


def places(method: VaLLA, model: nn.Sequential, x: Tensor) -> tuple[Tensor, Tensor]:
    """The row and the output of each inducing point."""
    classes = process_of(method).z_class
    if method.config.weights == "last":
        return torch.arange(len(x)).repeat(model(x).shape[1]), classes
    j = jacobian(model, x)
    gradients = method._tensors()["tangents"]
    apart = (j[:, classes].transpose(0, 1) - gradients[:, None]).abs().amax(-1)  # (M, N)
    assert (apart.amin(1) < 1e-9).all()
    return apart.argmin(1), classes


def knows(method: VaLLA, curvature: Tensor, rows: Tensor, classes: Tensor) -> None:
    """Gives it the Ã of the linearized Laplace approximation, Λ between outputs at the same point."""
    between = curvature[rows[:, None], classes[:, None], classes] * (rows[:, None] == rows)
    ridge = 1e-12 * torch.eye(len(between), dtype=torch.float64)
    with torch.no_grad():
        process_of(method).l_raw.copy_(torch.linalg.cholesky(between + ridge))


@pytest.mark.parametrize("task", ["regression", "classification"])
@pytest.mark.parametrize("weights", ["last", "all"])
@pytest.mark.parametrize("bias", [True, False])
def test_with_all_points_and_the_best_factor_it_is_the_linearized_laplace_approximation(task, weights, bias):
    """Which `test_ella` compares with laplace-torch's."""
    model, x, y, new = case(task)
    model = model if bias else without_bias(model(x).shape[1])
    method = everywhere(model, task, weights, x, y)
    rows, classes = places(method, model, x)
    assert len(set(zip(rows.tolist(), classes.tolist(), strict=True))) == len(x) * model(x).shape[1]
    curvature = inside = hessians(model(x).detach())
    if task == "regression":  # `inside` is in the units of training
        inside = torch.diag_embed((1.0 / method.likelihood.noise.detach()).expand(len(x), 2))
        curvature = inside / method.likelihood.scale.square()
    knows(method, inside, rows, classes)
    free = model if weights == "all" else last_only(model)
    expected = covariance(jacobian(free, x), curvature, jacobian(free, new), 3.0)
    pred = method.predict(new, covariance=True)
    torch.testing.assert_close(pred.latent.full_covariance, expected, rtol=1e-5, atol=1e-8)
    assert torch.equal(pred.latent.mean, model(new).detach())


@pytest.mark.parametrize("weights", ["last", "all"])
def test_the_elbo_has_its_optimum_there(weights):
    """α = 0 with everything but Ã fixed: at Ã = I/σ² its gradient is zero, and elsewhere it is not."""
    model, x, y, _ = case("regression")
    method = everywhere(model, "regression", weights, x, y, alpha=0.0)
    with method._predicting_backbone().reading(features=True, inputs=False) as read:
        view = PointView(next(read([(x, y)])), method._fitted.coordinates)
    process, batch = method._fitted.process, view.batch(method.likelihood, view.outputs)
    objective = Objective(process, method.likelihood, 0.0, len(x))
    inside = torch.diag_embed((1.0 / method.likelihood.noise.detach()).expand(len(x), 2))
    objective(batch).backward()
    assert process.l_raw.grad.tril().abs().max() > 1e-3
    knows(method, inside, *places(method, model, x))
    process.l_raw.grad = None
    objective(batch).backward()
    assert process.l_raw.grad.tril().abs().max() < 1e-9


@pytest.mark.parametrize("task", ["regression", "classification"])
@pytest.mark.parametrize("weights", ["last", "all"])
def test_training_lowers_the_loss_and_learns_the_prior_variance_which_starts_at_one(task, weights):
    model, x, y, new = case(task)
    options = {"weights": weights, "num_inducing": 10, "batch_size": 64}
    method, start = (VaLLA(model, task, **options, steps=steps).fit((x, y)) for steps in (60, 0))
    assert method.history.losses[-1] < method.history.losses[0]
    assert method.prior_precision != start.prior_precision
    fixed = VaLLA(model, task, weights=weights, prior_precision=0.7, **QUICK).fit((x, y))
    assert fixed.prior_precision == pytest.approx(0.7)
    assert (method.predict(new).latent.variance > 0).all()
    now, before = process_of(method), process_of(start)
    assert torch.equal(now.z["features"], before.z["features"]) == (weights == "all")
    assert torch.equal(now.coupling.matrix(), before.coupling.matrix())
    units = method.likelihood.scale if task == "regression" else torch.ones(3, dtype=torch.float64)
    torch.testing.assert_close(now.coupling.matrix(), torch.diag(1.0 / units.square()))
    with torch.no_grad():
        before.l_raw.zero_()  # which leaves the prior, of variance one in units of the residuals
    assert float((start.predict(x).latent.variance / units.square()).mean()) == pytest.approx(1.0)


def test_it_stops_early_where_validation_data_say_so():
    model, x, y, _ = case("classification", 60)
    options = {**QUICK, "steps": 200, "eval_every": 5, "patience": 3}
    method = VaLLA(model, "classification", **options).fit((x[:30], y[:30]), val=(x[30:], y[30:]))
    best = method.history.scores[method.history.best_step]
    assert best == min(method.history.scores.values())
    assert best == pytest.approx(-float(method.predict(x[30:]).log_prob(y[30:]).mean()))


def test_it_starts_where_validation_data_are_likeliest():
    model, x, y, _ = case("classification", 60)
    train, val = (x[:30], y[:30]), (x[30:], y[30:])
    blind = VaLLA(model, "classification", num_inducing=6, steps=0).fit(train)
    method = VaLLA(model, "classification", **QUICK).fit(train, val=val)
    tried = []
    for prior in (blind.prior_precision / 10.0**power for power in range(-3, 6)):
        start = VaLLA(model, "classification", num_inducing=6, steps=0, prior_precision=prior).fit(train)
        tried.append(-float(start.predict(val[0]).log_prob(val[1]).mean()))
    assert tried.index(min(tried)) != 3
    assert method.history.scores[0] == pytest.approx(min(tried))


def test_many_outputs():
    """Nothing of their number squared is written out."""
    model, y = mlp(40, dtype=torch.float64), labels(30, 40)
    x, new = inputs(30, dtype=torch.float64), inputs(5, dtype=torch.float64, seed=9)
    many = VaLLA(model, "classification", num_inducing=20, steps=5, batch_size=30, prior_precision=3.0).fit((x, y))
    process = process_of(many)
    features, z = model[:-1](new).detach(), process.z["features"].detach()
    k = lambda a, b: (a @ b.mT + 1.0) / 3.0  # noqa: E731
    eye = torch.eye(40, dtype=torch.float64)
    expected = oracles.coupled_covariance(
        eye, k(features, features).diagonal(), k(features, z), k(z, z), process.z_class, process.chol.detach()
    )
    pred = many.predict(new, covariance=True)
    torch.testing.assert_close(pred.latent.full_covariance, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(pred.latent.variance, expected.diagonal(dim1=1, dim2=2), rtol=1e-6, atol=1e-9)


def test_options_that_make_no_sense():
    model, x, y, _ = case("classification")
    # Without draws classes have α = 1 only.
    for wrong in ({"alpha": 2.0}, {"alpha": 0.5}, {"inducing": "everywhere"}, {"weights": "all", "inducing": x}):
        with pytest.raises(OptionError):
            VaLLA(model, "classification", **wrong)
    with pytest.raises(OptionError, match="inducing_classes"):
        VaLLA(model, "classification", inducing=torch.zeros(2, 6), inducing_classes=[0, 9]).fit((x, y))


def test_a_temperature_is_learned_only_where_it_is_asked_for():
    model, x, y, _ = case("classification")
    assert float(VaLLA(model, "classification", **QUICK).fit((x, y)).likelihood.temperature.detach()) == 1.0
    assert float(VaLLA(model, Categorical(), **QUICK).fit((x, y)).likelihood.temperature.detach()) != 1.0
