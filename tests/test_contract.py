"""What every method of the registry promises, run over all of them and all their tasks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from posthoc import GP, Outputs, VaLLA, load
from posthoc.errors import DataError, OptionError
from posthoc.methods import REGISTRY
from posthoc.training.loop import PlainSteps
from tests.cases import in_eval, recorded
from tests.test_network import assert_unchanged, portrait

QUICK: dict[str, dict[str, Any]] = {
    "fmgp": {"num_inducing": 8, "steps": 30, "batch_size": 32},
    "map": {},
    "temperature": {},
    "vector": {},
    "structured-vector": {},
    "structured-matrix": {},
    "isotonic": {},
    "beta": {},
    "ensemble-temperature": {},
    "entropy-temperature": {},
    "dirichlet": {},
    "laplace": {},
    "ella": {},
    "valla": {"num_inducing": 8, "steps": 30, "batch_size": 32},
    "ensemble": {},
    "dropout": {"samples": 8},
    "mfvi": {"samples": 8, "steps": 10},
    "sngp": {"num_features": 32, "steps": 10},
    "gp": {"steps": 10},
    "hmc": {"samples": 6, "warmup": 4, "chains": 1, "max_tree_depth": 2, "max_r_hat": None},
}
"""Options by which a method of the registry fits in no time."""
AROUND_ZERO = {"laplace", "ella"}
"""Methods that expect weights, the bias among them, to be around zero: to shift the outputs is to tell them more."""
LIBRARY = {
    "structured-vector": "probmetrics",
    "structured-matrix": "probmetrics",
    "isotonic": "sklearn",
    "beta": "scipy",
}
"""The optional library without which a method cannot be tested."""
PREPARE: dict[str, Callable[[Any], Any]] = {"ensemble": lambda model: [model, another(model)]}
"""What a method takes in place of a network."""
TASKS = {"regression": 1, "regression-2": 2, "classification": 3}


ALL = [(name, task) for name, method in REGISTRY.items() for task in TASKS if task.partition("-")[0] in method.tasks]
REGRESSION = [(method, name) for method, name in ALL if name != "classification" and REGISTRY[method].black_box]


@pytest.fixture(params=ALL, ids="-".join)
def case(request):
    return make_case(*request.param)


def make_case(method, name):
    if method in LIBRARY:
        pytest.importorskip(LIBRARY[method])
    task, width = name.partition("-")[0], TASKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, width))
        x = torch.randn(90, 4)
        y = torch.randint(width, (90,)) if task == "classification" else torch.randn(90, width)
    kind = REGISTRY[method]

    def prepare(model):
        return PREPARE[method](model) if method in PREPARE and isinstance(model, nn.Module) else model

    def make(model=model, **more):
        return kind(prepare(model), task, **{**QUICK[method], **more})

    return SimpleNamespace(task=task, model=model, x=x, y=y, make=make, kind=kind, prepare=prepare)


def another(model):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    return other


def test_the_mean_is_the_networks_own_output_and_the_network_stays(case):
    before = portrait(case.model)
    pred = case.make().fit((case.x, case.y)).predict(case.x)
    assert_unchanged(case.model, before)
    if case.kind.fixed_mean:
        assert torch.equal(pred.latent.mean, in_eval(case.model, case.x))


def test_shapes_and_ranges(case):
    pred = case.make().fit((case.x, case.y)).predict(case.x, covariance=True)
    n, c = pred.latent.mean.shape
    assert pred.latent.variance.shape == (n, c)
    assert pred.latent.mean.dtype == case.x.dtype
    assert (pred.latent.variance >= 0).all()
    torch.testing.assert_close(pred.latent.std.square(), pred.latent.variance)
    diagonal = pred.latent.covariance.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(diagonal, pred.latent.variance, rtol=1e-4, atol=1e-6)
    assert torch.equal(pred[7].latent.covariance, pred.latent.covariance[7:8])
    assert pred.log_prob(case.y).shape == (n,)
    assert pred.sample(5).shape == ((5, n) if case.task == "classification" else (5, n, c))
    assert pred.latent.sample(5).shape == (5, n, c)
    if case.task == "classification":
        torch.testing.assert_close(pred.probs.sum(-1), torch.ones(n))
        assert (pred.entropy() >= 0).all()
        if pred.latent.has_variance:
            assert (pred.mutual_information() <= pred.entropy() + 0.1).all()
        if pred.keeps_argmax:
            assert torch.equal(pred.probs.argmax(-1), pred.latent.mean.argmax(-1))
        assert torch.equal(pred.labels, pred.probs.argmax(-1))
    else:
        torch.testing.assert_close(pred.latent_variance + pred.noise, pred.variance)
        lower, upper = pred.interval(0.9)
        assert (lower < upper).all()


def test_same_seed_same_numbers(case):
    seed = case.kind.known_options({"seed": 3})
    a, b = (case.make(**seed).fit(case.x, case.y).predict(case.x) for _ in range(2))
    assert torch.equal(a.latent.variance, b.latent.variance)
    assert torch.equal(a.log_prob(case.y), b.log_prob(case.y))


def test_batches_loaders_and_outputs_agree(case):
    loader = DataLoader(TensorDataset(case.x, case.y), batch_size=30)
    method = case.make().fit(loader)
    whole, streamed = method.predict(case.x), method.predict(loader)
    assert streamed.latent.mean.shape == whole.latent.mean.shape
    if case.kind.rows_alone:
        torch.testing.assert_close(streamed.latent.mean, whole.latent.mean)
        torch.testing.assert_close(streamed.latent.variance, whole.latent.variance)
    if not case.kind.black_box:
        with pytest.raises(DataError, match="fmgp"):
            method.predict(Outputs(whole.latent.mean))
        return
    outputs = recorded(case.model.eval(), case.x, case.y)
    torch.testing.assert_close(method.predict(outputs).latent.variance, whole.latent.variance)


def test_saved_and_loaded_heads_predict_the_same(case, tmp_path):
    method = case.make().fit((case.x, case.y))
    method.save(tmp_path / "head.safetensors")
    model = case.prepare(case.model)
    again = type(method).load(tmp_path / "head.safetensors", model=model)
    assert type(load(tmp_path / "head.safetensors", model=model)) is type(method)
    a, b = method.predict(case.x), again.predict(case.x)
    assert torch.equal(a.latent.variance, b.latent.variance)
    assert torch.equal(a.log_prob(case.y), b.log_prob(case.y))


def test_a_method_that_needs_the_network_refuses_a_black_box(case):
    for predictor in (None, lambda x: x):
        with nullcontext() if case.kind.black_box else pytest.raises(OptionError, match="fmgp"):
            case.make(predictor)


@pytest.mark.parametrize(("method", "name"), REGRESSION)
def test_units_do_not_matter_to_regression(method, name):
    """y and the predictor in other units give the same predictive in those units."""
    case = make_case(method, name)
    shift = 0.0 if method in AROUND_ZERO else 7.0
    said = recorded(case.model.eval(), case.x)
    data = [said.with_outputs(u * said.outputs - shift).with_targets(u * case.y - shift) for u in (1.0, 1000.0)]
    plain, scaled = (case.make(None).fit(outputs).predict(outputs) for outputs in data)
    torch.testing.assert_close(scaled.std, 1000.0 * plain.std, rtol=1e-3, atol=0)


def test_on_a_gpu_where_there_is_one(case):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    model, x, y = case.model.cuda(), case.x.cuda(), case.y.cuda()
    pred = case.make(model).fit((x, y)).predict(x)
    assert pred.latent.variance.is_cuda
    if case.kind.fixed_mean:
        assert torch.equal(pred.latent.mean, in_eval(model, x))
    again = case.make(model).fit((x, y)).predict(x)
    assert torch.equal(pred.latent.variance, again.latent.variance)
    away = case.make(model.cpu(), device="cuda").fit((case.x, case.y), val=(case.x, case.y)).predict(case.x)
    assert not away.latent.variance.is_cuda
    assert (away.probs if case.task == "classification" else away.std).isfinite().all()


@pytest.mark.parametrize(
    "kind",
    [
        partial(GP, exact_up_to=0, num_inducing=6, batch_size=8, steps=40),
        partial(VaLLA, weights="all", num_inducing=6, batch_size=16, steps=40),
    ],
)
def test_a_fit_that_was_stopped_goes_on_to_the_same_numbers(kind, tmp_path, monkeypatch):
    case, checkpoint = make_case("gp", "regression"), {"checkpoint": tmp_path / "c", "checkpoint_every": 10}
    complete = kind(case.model, "regression").fit(case.x, case.y).predict(case.x).variance
    method, step, calls = kind(case.model, "regression"), PlainSteps.step, count()

    def interrupted(*args):
        if next(calls) == 25:
            raise KeyboardInterrupt
        return step(*args)

    monkeypatch.setattr(PlainSteps, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        method.fit(case.x, case.y, **checkpoint)
    assert not method.fitted
    resumed = kind(case.model, "regression").fit(case.x, case.y, **checkpoint, resume=True)
    assert next(calls) < 60
    assert torch.equal(resumed.predict(case.x).variance, complete)
