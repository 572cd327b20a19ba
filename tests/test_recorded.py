"""Steps whose operations were noted once: the numbers of ordinary steps, to the bit, or ordinary steps."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posthoc import FMGP, RBF, Categorical, Gaussian, Linear, Matern, NotPSDError, PosthocError, PosthocWarning, White
from posthoc.errors import TrainingError
from posthoc.methods.ntk.valla import VaLLA
from posthoc.numerics import cholesky
from posthoc.training import History, Training, recorded, train
from posthoc.training.adam import Flat
from posthoc.training.recorded import RecordedSteps, as_they_are
from posthoc.training.steps import PlainSteps
from tests.cases import numbers, same
from tests.test_graph import CASES, SMALL, Numbers, Same, classes, descend, reals, singular, waves


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often blocks were taken in ordinary steps, steps without Python, and functions were recorded."""
    counts = {"plain": 0, "replayed": 0, "recorded": 0}

    def count(where: Any, method: str, name: str) -> None:
        original = getattr(where, method)

        def counted(*args: Any) -> Any:
            found = original(*args)
            counts[name] += 1  # if it did not raise
            return found

        monkeypatch.setattr(where, method, counted)

    count(PlainSteps, "run", "plain")
    count(RecordedSteps, "_gradient", "replayed")
    count(recorded, "recorded", "recorded")
    return counts


KERNELS: dict[str, Callable[[], Any]] = {
    "rbf": RBF,
    "matern": lambda: Matern(1.5),
    "the paper's": lambda: RBF() * (Linear() + White()),
}
FORMS: dict[str, tuple[Any, dict[str, Any], Any]] = {
    **CASES,
    "learnt residuals": ("regression", {}, reals),
    "elbo": (Gaussian(), {"alpha": 0.0, "residuals": "gaussian"}, reals),
    "separable": ("classification", {"variance": "separable"}, functools.partial(classes, c=4)),
    "logit scaling": (
        Categorical(training="logit_scaling"),
        {"variance": "per_output"},
        functools.partial(classes, c=4),
    ),
}


def fit(case: str, way: str | None, *, data: Any = None, val: Any = None, **options: Any) -> FMGP:
    likelihood, own, made = FORMS[case]
    method = FMGP(None, likelihood, **{**SMALL, **own, **options})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("posthoc.fmgp.build.train", functools.partial(train, way=way))
        return method.fit(data or made(400), val=val)


@pytest.mark.parametrize("case", FORMS)
def test_they_are_the_default_and_have_the_numbers_of_ordinary_steps(case: str, calls: dict[str, int]) -> None:
    replayed = fit(case, None)
    assert calls["plain"] == 0
    assert calls["replayed"] >= SMALL["steps"]
    plain = fit(case, "plain")
    assert calls["plain"] > 1
    assert replayed.history.losses == plain.history.losses
    assert same(numbers(replayed), numbers(plain))


@pytest.mark.parametrize("kernel", KERNELS)
def test_with_any_kernel(kernel: str, calls: dict[str, int]) -> None:
    replayed, plain = (fit("ten classes", way, kernel=KERNELS[kernel](), steps=20) for way in ("recorded", "plain"))
    assert calls["recorded"] == 1
    assert same(numbers(replayed), numbers(plain))


def test_with_a_kernel_of_gpytorch() -> None:
    gpytorch = pytest.importorskip("gpytorch")
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=5))
    replayed, plain = (fit("regression", way, kernel=kernel, steps=20) for way in ("recorded", "plain"))
    assert same(numbers(replayed), numbers(plain))


def test_early_stopping_among_them(calls: dict[str, int]) -> None:
    data = classes(400, c=10)
    sure = data.with_targets(data.outputs.argmax(-1))  # right where it learns, wrong where it is watched
    watched = {"lr": 0.1, "eval_every": 3, "patience": 2, "data": sure, "val": data[:60]}
    replayed, plain = (fit("ten classes", way, **watched) for way in ("recorded", "plain"))
    assert calls["recorded"] == 1
    assert replayed.history == plain.history
    assert same(numbers(replayed), numbers(plain))
    assert 6 <= len(plain.history.losses) < SMALL["steps"]


def test_parameters_that_the_loss_does_not_know_stay(calls: dict[str, int]) -> None:
    known, unknown = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3, dtype=torch.float64))
    train(lambda batch: known.square().sum(), [unknown, known], Same("cpu"), Training(steps=4), way="recorded")
    assert calls == {"plain": 0, "replayed": 4, "recorded": 1}
    assert torch.equal(unknown.detach(), torch.ones(3, dtype=torch.float64))
    assert (known < 1.0).all()


def test_a_factor_that_fails_has_its_jitter_in_an_ordinary_step(calls: dict[str, int]) -> None:
    with pytest.warns(PosthocWarning, match="was not positive definite"):
        replayed = descend(singular, "cpu", "recorded")
    assert calls == {"plain": 3, "replayed": 10, "recorded": 1}  # each block had such a step
    with pytest.warns(PosthocWarning, match="was not positive definite"):
        plain = descend(singular, "cpu", "plain")
    assert torch.equal(replayed[0], plain[0])
    assert replayed[1] == plain[1]


def test_one_bad_block_does_not_end_them(calls: dict[str, int]) -> None:
    def once(p: Tensor, step: Tensor) -> Tensor:
        return singular(p, 2.0 * (step == 5).double()) + waves(p, step)

    with pytest.warns(PosthocWarning, match="was not positive definite"):
        replayed = descend(once, "cpu", "recorded")
    assert calls == {"plain": 1, "replayed": 10, "recorded": 1}
    with pytest.warns(PosthocWarning, match="was not positive definite"):
        plain = descend(once, "cpu", "plain")
    assert torch.equal(replayed[0], plain[0])
    assert replayed[1] == plain[1]


def test_a_factor_that_fails_in_ordinary_steps_too_says_so() -> None:
    def negative(p: Tensor, step: Tensor) -> Tensor:
        sign = 1.0 - 2.0 * (step == 6).double()
        return cholesky(sign * torch.diag(p.exp()), "my matrix").diagonal().sum()

    with pytest.raises(NotPSDError, match="Expected my matrix to be positive definite"):
        descend(negative, "cpu", "recorded")


def test_a_loss_that_stays_bad_is_reported_with_its_step() -> None:
    def loss(p: Tensor, step: Tensor) -> Tensor:
        return waves(p, step) * torch.where(step == 6, math.nan, 1.0)

    with pytest.raises(TrainingError, match="became nan at step 7 of 10"):
        descend(loss, "cpu", "recorded")


@pytest.mark.filterwarnings("ignore::posthoc.PosthocWarning")
def test_a_fit_that_diverges_says_what_ordinary_steps_say() -> None:
    said = []
    for way in ("recorded", "plain"):
        with pytest.raises(PosthocError) as failure:
            fit("regression", way, kernel=RBF(amplitude=1e-3).requires_grad_(False), lr=1e6)
        said.append((type(failure.value), str(failure.value)))
    assert said[0] == said[1]


@pytest.mark.parametrize("behind", [lambda p: p.data, lambda p: p.detach()], ids=["data", "detach"])
def test_what_autograd_does_not_see_is_replayed_with_the_numbers_of_the_day(
    behind: Callable[[Tensor], Tensor], calls: dict[str, int]
) -> None:
    def loss(p: Tensor, step: Tensor) -> Tensor:
        return waves(p, step) * (1.0 + behind(p).square().sum())

    replayed, plain = (descend(loss, "cpu", way) for way in ("recorded", "plain"))
    assert calls["replayed"] == 10
    assert replayed[1] == plain[1]


def test_a_tensor_that_came_in_an_unknown_way_is_refused() -> None:
    p = nn.Parameter(torch.ones(3))
    other = p.view(3)  # made before anyone looks
    with pytest.raises(NotImplementedError, match="in an unknown way"):
        recorded.recorded(lambda: [other.square().sum()], [p])


# What cannot be done again without Python.


def looks(p: Tensor, step: Tensor) -> Tensor:
    return waves(p, step) if float(p.detach().sum()) > 0.0 else 2.0 * waves(p, step)


def compares(p: Tensor, step: Tensor) -> Tensor:
    return waves(p, step) if torch.equal(p, p.abs()) else 2.0 * waves(p, step)


def draws(p: Tensor, step: Tensor) -> Tensor:
    return waves(p, step) + (torch.rand(2, dtype=p.dtype) * p).sum()


def counts(p: Tensor, step: Tensor, counter: Tensor) -> Tensor:
    counter.add_(1.0)
    return waves(p, step) * counter


def counts_in_a_view(p: Tensor, step: Tensor, counter: Tensor) -> Tensor:
    counter.view(1)[0].add_(1.0)
    return waves(p, step) * counter


@pytest.mark.parametrize("loss", [looks, compares, draws, counts, counts_in_a_view])
def test_what_cannot_be_replayed_is_not(loss: Callable[..., Tensor], calls: dict[str, int]) -> None:
    def run(way: str | None) -> tuple[Tensor, History]:
        torch.manual_seed(0)
        given = (torch.zeros((), dtype=torch.float64),) if loss in (counts, counts_in_a_view) else ()
        return descend(lambda p, step: loss(p, step, *given), "cpu", way)

    replayed = run("recorded")
    assert calls == {"plain": 3, "replayed": 0, "recorded": 0}
    if loss is draws:  # it drew once in order to find out
        return
    plain = run("plain")
    assert torch.equal(replayed[0], plain[0])
    assert replayed[1] == plain[1]


def test_large_steps_are_left_alone(monkeypatch: pytest.MonkeyPatch, calls: dict[str, int]) -> None:
    monkeypatch.setattr("posthoc.training.recorded.MOST", 100)
    fit("regression", "recorded", steps=5)
    assert calls["recorded"] == calls["replayed"] == 0


@pytest.mark.parametrize("failure", [RuntimeError, AttributeError])
def test_without_torchscript_steps_are_ordinary(
    failure: type[Exception], monkeypatch: pytest.MonkeyPatch, calls: dict[str, int]
) -> None:
    def gone(*args: Any, **options: Any) -> Any:
        raise failure("TorchScript is no more")

    monkeypatch.setattr(torch.jit, "trace", gone)
    found = descend(waves, "cpu", "recorded")
    assert calls == {"plain": 3, "replayed": 0, "recorded": 0}
    assert torch.equal(found[0], descend(waves, "cpu", "plain")[0])


def test_a_replay_with_other_numbers_is_refused(monkeypatch: pytest.MonkeyPatch, calls: dict[str, int]) -> None:
    trace = torch.jit.trace

    def wrong(function: Any, inputs: Any, **options: Any) -> Any:
        return trace(lambda *values: tuple(t + 1e-12 for t in function(*values)), inputs, **options)

    monkeypatch.setattr(torch.jit, "trace", wrong)
    descend(waves, "cpu", "recorded")
    assert calls == {"plain": 3, "replayed": 0, "recorded": 0}


def test_they_are_for_many_steps_on_the_cpu_in_batches_of_one_shape_without_draws() -> None:
    flat = Flat([nn.Parameter(torch.zeros(2))])
    fresh = Same("cpu")
    fresh.fixed = False
    assert RecordedSteps.possible(flat, Same("cpu"), None, 100)
    assert not RecordedSteps.possible(flat, Same("cpu"), None, 99)
    assert not RecordedSteps.possible(flat, fresh, None, 100)
    assert not RecordedSteps.possible(flat, Same("cpu"), torch.Generator(), 100)
    flat.values = [torch.zeros(2, device="meta")]
    assert not RecordedSteps.possible(flat, Same("cpu"), None, 100)


def test_torchscript_is_as_it_was() -> None:
    before = torch._C._get_graph_executor_optimize()
    with as_they_are():
        assert not torch._C._get_graph_executor_optimize()
        assert torch.is_inference_mode_enabled()
    assert torch._C._get_graph_executor_optimize() == before
    descend(waves, "cpu", "recorded")
    assert torch._C._get_graph_executor_optimize() == before


def test_the_objective_is_asked_once() -> None:
    asked = []

    def loss(p: Tensor, step: Tensor) -> Tensor:
        asked.append(step)
        return waves(p, step)

    descend(loss, "cpu", "recorded")
    assert len(asked) == 1


def test_a_first_fit_says_nothing_and_imports_no_compiler() -> None:
    code = (
        "import sys, torch; from posthoc import FMGP, Outputs\n"
        "x = torch.randn(60, 2); data = Outputs(x[:, :1], x[:, 1:], x)\n"
        "FMGP(None, 'regression', steps=100, num_inducing=9).fit(data)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:torch", "-c", code], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_batches_reach_a_replay_in_the_order_of_their_map() -> None:
    class Pair:
        def __init__(self, a: Tensor, b: Tensor) -> None:
            self.a, self.b = a, b

        def map(self, change: Callable[[Tensor], Tensor]) -> Pair:
            return Pair(change(self.a), change(self.b))

    class Pairs(Same):
        def block(self, step: int, count: int) -> Any:
            first: Numbers = super().block(step, count)
            return Pair(first.tensor, first.tensor.square())

    def run(way: Any) -> list[float]:
        p = nn.Parameter(torch.ones(2, dtype=torch.float64))
        return train(
            lambda batch: (p * (batch.a - 2.0 * batch.b)).sum(), [p], Pairs("cpu"), Training(6), way=way
        ).losses

    assert run("recorded") == run("plain")


@pytest.mark.parametrize("weights", ["last", "all"])
def test_another_method_that_trains_a_process(weights: str, calls: dict[str, int]) -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    data, found = classes(50, c=3), []
    for way in ("recorded", "plain"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("posthoc.methods.ntk.valla.train", functools.partial(train, way=way))
            method = VaLLA(model, "classification", weights=weights, num_inducing=6, steps=20, batch_size=16)
            found.append(method.fit((data.features, data.targets)).predict(data.features).variance)
    assert calls["replayed"] == 20
    assert torch.equal(*found)
