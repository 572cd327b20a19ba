"""The training loop: repeatable, stops when it should, and says what it does only when asked."""

from __future__ import annotations

import copy
import io
import math
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posthoc import FMGP, RBF, Categorical, Gaussian, Linear, NotFittedError, TrainingError, White
from posthoc.fmgp.process import correction
from posthoc.training import History, Training, train
from tests.cases import QUICK, N, answers, inputs, labels, mlp, numbers, recorded, same, values

BATCHED: dict[str, Any] = {"steps": 15, "num_inducing": 4, "batch_size": 8}


def fitted(task: Any = "regression", **options: Any) -> FMGP:
    y = labels() if task != "regression" else values(N, 3)
    return FMGP(mlp(3), task, **{**BATCHED, **options}).fit((inputs(), y))


# Seeds.

TASKS = ["regression", "classification", "Monte Carlo"]


def likelihood(task: str) -> Any:
    return Categorical(training="monte_carlo", samples=4) if task == "Monte Carlo" else task


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("inducing", ["kmeans", "random"])
def test_same_seed_gives_the_same_numbers_to_the_bit(task: str, inducing: str) -> None:
    torch.manual_seed(1)  # whatever the global generator has been through
    first = fitted(likelihood(task), inducing=inducing, seed=3)
    torch.manual_seed(2)
    second = fitted(likelihood(task), inducing=inducing, seed=3)
    assert same(numbers(first), numbers(second))
    assert first.history == second.history
    assert same(answers(first.predict(inputs())), answers(second.predict(inputs())))


@pytest.mark.parametrize("task", TASKS)
def test_another_seed_gives_other_numbers(task: str) -> None:
    first, second = fitted(likelihood(task), seed=0), fitted(likelihood(task), seed=1)
    assert not same(numbers(first), numbers(second))
    assert first.history.losses != second.history.losses


@pytest.mark.parametrize("task", TASKS)
def test_fitting_again_gives_the_same_numbers(task: str) -> None:
    method = fitted(likelihood(task))
    before, history = numbers(method), method.history
    y = values(N, 3) if task == "regression" else labels()
    method.fit((inputs(), y))
    assert same(numbers(method), before)
    assert method.history == history
    assert method.history is not history


# Learning.


def test_training_lowers_the_loss() -> None:
    losses = fitted(steps=50, batch_size=N).history.losses
    assert losses[-1] < losses[0] - 0.01


def test_training_moves_every_part() -> None:
    kernel = RBF() * (Linear() + White())
    start, end = (numbers(fitted("classification", kernel=kernel, steps=steps)) for steps in (0, 15))
    fixed = {name for name in start if "location" in name or "scale" in name.rsplit(".", 1)[-1]} - {
        name for name in start if "log_" in name
    }
    fixed |= {"process.z_class", "likelihood.unit"}
    for name in start:
        assert torch.equal(start[name], end[name]) == (name in fixed), name


def test_no_steps_leave_the_start_and_still_predict() -> None:
    method = fitted(steps=0)
    assert method.history == History()
    assert method.head is not None
    assert torch.equal(method.head.process.l_raw.detach(), torch.eye(4, dtype=torch.float64))
    pred = method.predict(inputs())
    assert bool((pred.latent.variance > 0).all())
    with_val = FMGP(mlp(), "regression", **{**QUICK, "steps": 0})
    assert with_val.fit((inputs(), values()), val=(inputs(5), values(5))).fitted


def test_parameters_that_are_fixed_stay() -> None:
    kernel = RBF(lengthscale=0.7, amplitude=2.0).requires_grad_(False)
    head = fitted(kernel=kernel).head
    assert head is not None
    state = head.state_dict()
    assert torch.allclose(state["process.kernel.log_lengthscale"].exp(), torch.tensor(0.7).double())
    assert torch.allclose(state["process.kernel.log_amplitude"].exp(), torch.tensor(2.0).double())
    assert float(fitted(Categorical(temperature=2.0)).predict(inputs()).temperature) == 2.0  # type: ignore[attr-defined]


def test_fit_works_inside_no_grad() -> None:
    expected = numbers(fitted())
    with torch.no_grad():
        found = fitted()
    assert same(numbers(found), expected)


def test_nothing_fitted_keeps_a_gradient_or_a_graph() -> None:
    method = fitted("classification")
    assert method.head is not None
    assert all(parameter.grad is None for parameter in method.head.parameters())
    pred = method.predict(inputs())
    assert not any(tensor.requires_grad for tensor in answers(pred).values())


# The weight of the KL.


def test_num_data_changes_the_weight_of_the_kl_and_nothing_else() -> None:
    def first_loss(num_data: int | None) -> float:
        method = FMGP(mlp(), "regression", steps=1, num_inducing=4, batch_size=N)
        return method.fit((inputs(), values()), num_data=num_data).history.losses[0]

    head = FMGP(mlp(), "regression", steps=0, num_inducing=4).fit((inputs(), values())).head
    assert head is not None
    z = dict(head.process.z)
    kl = float(correction(head.process.chol, head.process.kernel(z, z)).kl.detach())
    assert kl > 1e-5
    assert first_loss(None) == first_loss(N)
    assert first_loss(1) - first_loss(N) == pytest.approx(kl * (1 - 1 / N), rel=1e-6)
    assert first_loss(N) - first_loss(10**9) == pytest.approx(kl / N, rel=1e-6)


def test_shared_variance_counts_the_kl_of_every_copy_unless_told_to_count_one() -> None:
    losses = {
        (kl, n): FMGP(mlp(3), "classification", variance="shared", kl=kl, steps=1, num_inducing=4, batch_size=N)
        .fit((inputs(), labels()), num_data=n)
        .history.losses[0]
        for kl in ("copies", "once")
        for n in (1, 10**9)
    }
    once = losses["once", 1] - losses["once", 10**9]
    assert losses["copies", 1] - losses["copies", 10**9] == pytest.approx(3 * once, rel=1e-6)


# The user's own objects.


def test_kernel_and_likelihood_of_the_user_are_not_changed() -> None:
    kernel, noise = RBF(lengthscale=0.7) * (Linear() + White()), Gaussian(noise="per_output")
    parts: tuple[Any, ...] = (kernel, noise)
    before = [(copy.deepcopy(part.state_dict()), part.spec()) for part in parts]
    method = fitted_with(kernel, noise)
    for part, (state, spec) in zip(parts, before, strict=True):
        assert same(dict(part.state_dict()), dict(state))
        assert part.spec() == spec
        assert all(parameter.grad is None for parameter in part.parameters())
    assert method.head is not None
    assert not same(dict(method.head.process.kernel.state_dict()), dict(kernel.state_dict()))


def fitted_with(kernel: Any, noise: Any) -> FMGP:
    return FMGP(mlp(3), noise, kernel=kernel, **BATCHED).fit((inputs(), values(N, 3)))


def test_gpytorch_kernel_of_the_user_is_not_changed() -> None:
    gpytorch = pytest.importorskip("gpytorch")
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    before = copy.deepcopy(kernel.state_dict())
    fitted_with(kernel, Gaussian())
    for name, tensor in kernel.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name])


# Early stopping, on the loop itself: one parameter, pushed up by lr at every step.


class Nothing:
    """Batches for an objective that does not look at them."""

    ahead, fixed, weight = 2, True, 1.0

    def block(self, step: int, count: int) -> Nothing:
        return self

    def map(self, change: Any) -> Nothing:
        return self


def climb(scores: list[float], **options: Any) -> tuple[float, History]:
    """Trains one parameter p upwards while the validation score runs through a list."""
    parameter = nn.Parameter(torch.zeros(()))
    history = train(
        lambda batch: -parameter,
        [parameter],
        Nothing(),
        Training(lr=1.0, **options),
        score=iter(scores).__next__,
    )
    return parameter.item(), history


def test_best_parameters_are_kept() -> None:
    places = {}
    for best in range(4):
        scores = [1.0] * 4
        scores[best] = 0.0
        places[best], history = climb(scores, steps=3, eval_every=1, patience=None)
        assert history.best_step == best
        assert history.scores == dict(enumerate(scores))
    assert places[0] == 0.0
    assert places[0] < places[1] < places[2] < places[3]


def test_the_first_of_equal_scores_is_kept() -> None:
    assert climb([1.0, 0.5, 0.5, 0.5], steps=3, eval_every=1)[1].best_step == 1


@pytest.mark.parametrize(("patience", "steps_run"), [(1, 4), (2, 6), (3, 8), (None, 10)])
def test_training_stops_by_patience(patience: int | None, steps_run: int) -> None:
    scores = [3.0, 2.0, 2.5, 2.6, 2.7, 2.8]  # at steps 0, 2, 4, 6, 8, 10: the best is at step 2
    _, history = climb(scores, steps=10, eval_every=2, patience=patience)
    assert len(history.losses) == steps_run
    assert history.best_step == 2


def test_a_better_score_resets_the_patience() -> None:
    _, history = climb([5.0, 6.0, 4.0, 6.0, 3.0, 6.0, 6.0], steps=6, eval_every=1, patience=2)
    assert len(history.losses) == 6
    assert history.best_step == 4


def test_last_step_is_evaluated_too() -> None:
    _, history = climb([3.0, 2.0, 1.0], steps=5, eval_every=4)
    assert sorted(history.scores) == [0, 4, 5]


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_head_is_the_one_with_the_best_validation_score(task: str) -> None:
    model, x_val = mlp(3), inputs(9, seed=11)
    if task == "regression":
        y, y_val = values(N, 3), values(9, 3)
    else:  # right where it learns, wrong where it is watched: it grows too sure
        y, y_val = recorded(model, inputs()).outputs.argmax(-1), recorded(model, x_val).outputs.argmin(-1)
    method = FMGP(model, task, lr=0.2, steps=30, eval_every=3, patience=None, num_inducing=4)
    method.fit((inputs(), y), val=(x_val, y_val))
    scores = method.history.scores
    assert method.history.best_step == min(scores, key=lambda step: scores[step])
    assert scores[method.history.best_step] < scores[30]  # training went on past the best
    found = -float(method.predict(x_val).log_prob(y_val).mean())
    assert found == pytest.approx(scores[method.history.best_step], rel=1e-5)


def test_validation_does_not_change_the_course_of_training() -> None:
    alone = fitted()
    watched = FMGP(mlp(3), "regression", eval_every=1, patience=None, **BATCHED)
    watched.fit((inputs(), values(N, 3)), val=(inputs(9), values(9, 3)))
    assert watched.history.losses == alone.history.losses


# Losses that are not numbers.


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_loss_that_is_not_finite_raises(loss: float) -> None:
    parameter = nn.Parameter(torch.zeros(()))
    losses = iter([1.0, 1.0, loss])

    def objective(batch: Any) -> Tensor:
        return parameter * 0.0 + next(losses)

    expected = rf"The loss became {loss} at step 3 of 9\. Lower the learning rate \(it is 0\.5\)"
    with pytest.raises(TrainingError, match=expected):
        train(objective, [parameter], Nothing(), Training(steps=9, lr=0.5))


def test_fit_that_diverges_raises_and_leaves_the_method_unfitted() -> None:
    method = FMGP(mlp(), "regression", kernel=RBF(amplitude=1e-3).requires_grad_(False), lr=1e6, steps=20)
    with pytest.raises(TrainingError, match="Lower the learning rate"):
        method.fit(recorded(mlp(), inputs(120), values(120)))
    assert not method.fitted
    assert method.history == History()
    with pytest.raises(NotFittedError):
        method.predict(inputs())


def test_fit_that_diverges_leaves_an_earlier_one_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    method = fitted()
    before = answers(method.predict(inputs()))
    monkeypatch.setattr("posthoc.likelihoods.gaussian.gaussian_energy", lambda residual, *rest: residual * math.nan)
    with pytest.raises(TrainingError, match="became nan at step 1"):
        method.fit((inputs(seed=12), values(N, 3)))
    assert same(answers(method.predict(inputs())), before)


# Progress.


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nothing_is_printed_where_stderr_is_not_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    fitted(steps=40)
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return Terminal()


def test_progress_is_shown_on_a_terminal_and_changes_no_number(terminal: Terminal) -> None:
    with redirect_stderr(terminal):
        silent = fitted(steps=40, progress=False)
        assert terminal.getvalue() == ""
        shown = fitted(steps=40)
    assert "40/40" in terminal.getvalue()
    assert f"loss {shown.history.losses[-1]:.4f}" in terminal.getvalue()
    assert same(numbers(shown), numbers(silent))


def test_a_history_has_a_short_repr() -> None:
    assert repr(fitted(steps=40).history).startswith("History(40 steps, last loss ")
    assert repr(climb([3.0, 2.0, 2.5], steps=2, eval_every=1)[1]).endswith("best of 3 scores 2 at step 1)")
    assert repr(History()) == "History(0 steps)"
