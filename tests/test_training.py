"""The training loop: repeatable, stops when it should, and says what it does only when asked."""

from __future__ import annotations

import copy
import io
import math
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
from torch import nn

from posthoc import FMGP, RBF, Categorical, Gaussian, Linear, NotFittedError, TrainingError, White
from posthoc.fmgp.process import correction
from posthoc.training import History, Training, single_thread, train
from tests.cases import QUICK, N, answers, inputs, labels, mlp, numbers, recorded, same, values

BATCHED: dict[str, Any] = {"steps": 15, "num_inducing": 4, "batch_size": 8}


def fitted(task: Any = "regression", **options: Any) -> FMGP:
    y = labels() if task != "regression" else values(N, 3)
    return FMGP(mlp(3), task, **{**BATCHED, **options}).fit((inputs(), y))


@pytest.mark.parametrize("task", ["regression", "classification", Categorical(training="monte_carlo", samples=4)])
@pytest.mark.parametrize("inducing", ["kmeans", "random"])
def test_numbers_follow_from_the_seed_to_the_bit(task: Any, inducing: str) -> None:
    torch.manual_seed(1)  # whatever the global generator has been through
    first = fitted(task, inducing=inducing, seed=3)
    before, history, said = numbers(first), first.history, answers(first.predict(inputs()))
    torch.manual_seed(2)
    second = fitted(task, inducing=inducing, seed=3)
    again = first.fit((inputs(), values(N, 3) if task == "regression" else labels()))
    assert again.history is not history
    for method in (second, again):
        assert same(numbers(method), before)
        assert method.history == history
        assert same(answers(method.predict(inputs())), said)
    other = fitted(task, inducing=inducing, seed=1)
    assert not same(numbers(other), before)
    assert other.history.losses != history.losses


def test_training_lowers_the_loss() -> None:
    losses = fitted(steps=50, batch_size=N).history.losses
    assert losses[-1] < losses[0] - 0.01


def test_training_moves_every_part() -> None:
    kernel = RBF() * (Linear() + White())
    start, end = (numbers(fitted("classification", kernel=kernel, steps=steps)) for steps in (0, 15))
    for name in start:
        unit = "log_" not in name and ("location" in name or "scale" in name.rsplit(".", 1)[-1])
        fixed = unit or name in ("process.z_class", "likelihood.unit") or name.startswith(("detector.", "correction."))
        assert torch.equal(start[name], end[name]) == fixed, name


def test_no_steps_leave_the_start_and_still_predict():
    method = fitted(steps=0)
    assert method.history == History()
    assert torch.equal(method.head.process.l_raw.detach(), torch.eye(4, dtype=torch.float64))
    assert (method.predict(inputs()).latent.variance > 0).all()
    with_val = FMGP(mlp(), "regression", **{**QUICK, "steps": 0})
    assert with_val.fit((inputs(), values()), val=(inputs(5), values(5))).fitted


def test_parameters_that_are_fixed_stay():
    state = numbers(fitted(kernel=RBF(lengthscale=0.7, amplitude=2.0).requires_grad_(False)))
    assert torch.allclose(state["process.kernel.log_lengthscale"].exp(), torch.tensor(0.7).double())
    assert torch.allclose(state["process.kernel.log_amplitude"].exp(), torch.tensor(2.0).double())
    assert float(fitted(Categorical(temperature=2.0)).predict(inputs()).temperature) == 2.0


def test_fit_works_inside_no_grad() -> None:
    expected = numbers(fitted())
    with torch.no_grad():
        assert same(numbers(fitted()), expected)


def test_nothing_fitted_keeps_a_gradient_or_a_graph():
    method = fitted("classification")
    assert all(parameter.grad is None for parameter in method.head.parameters())
    assert not any(tensor.requires_grad for tensor in answers(method.predict(inputs())).values())


def test_num_data_changes_the_weight_of_the_kl_and_nothing_else():
    def first_loss(num_data):
        method = FMGP(mlp(), "regression", steps=1, num_inducing=4, batch_size=N)
        return method.fit((inputs(), values()), num_data=num_data).history.losses[0]

    process = FMGP(mlp(), "regression", steps=0, num_inducing=4).fit((inputs(), values())).head.process
    z = dict(process.z)
    kl = float(correction(process.chol, process.kernel(z, z)).kl.detach())
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


def fitted_with(kernel: Any, noise: Any) -> FMGP:
    return FMGP(mlp(3), noise, kernel=kernel, **BATCHED).fit((inputs(), values(N, 3)))


def test_kernel_and_likelihood_of_the_user_are_not_changed():
    parts = kernel, noise = RBF(lengthscale=0.7) * (Linear() + White()), Gaussian(noise="per_output")
    before = [(copy.deepcopy(part.state_dict()), part.spec()) for part in parts]
    method = fitted_with(kernel, noise)
    for part, (state, spec) in zip(parts, before, strict=True):
        assert same(part.state_dict(), state)
        assert part.spec() == spec
        assert all(parameter.grad is None for parameter in part.parameters())
    assert not same(method.head.process.kernel.state_dict(), kernel.state_dict())


def test_gpytorch_kernel_of_the_user_is_not_changed():
    gpytorch = pytest.importorskip("gpytorch")
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    before = copy.deepcopy(kernel.state_dict())
    fitted_with(kernel, Gaussian())
    torch.testing.assert_close(kernel.state_dict(), before, rtol=0, atol=0)


# Early stopping, on the loop itself: one parameter, pushed up by lr at every step.


class Nothing:
    """Batches for an objective that does not look at them."""

    ahead, fixed, weight = 2, True, 1.0

    def block(self, *args: Any) -> Any:
        return self

    map = block


def climb(scores: list[float], **options: Any) -> tuple[float, History]:
    """Trains one parameter p upwards while the validation score runs through a list."""
    parameter, score = nn.Parameter(torch.zeros(())), iter(scores).__next__
    history = train(lambda batch: -parameter, [parameter], Nothing(), Training(lr=1.0, **options), score=score)
    return parameter.item(), history


def test_best_parameters_are_kept() -> None:
    places = []
    for best in range(4):
        scores = [float(step != best) for step in range(4)]
        place, history = climb(scores, steps=3, eval_every=1, patience=None)
        places.append(place)
        assert history.best_step == best
        assert history.scores == dict(enumerate(scores))
    assert 0.0 == places[0] < places[1] < places[2] < places[3]


@pytest.mark.parametrize(
    ("scores", "steps", "every", "patience", "evaluated", "best"),
    [
        *(([3.0, 2.0, 2.5, 2.6, 2.7, 2.8], 10, 2, p, list(range(0, 2 * p + 3, 2)), 2) for p in (1, 2, 3)),
        ([3.0, 2.0, 2.5, 2.6, 2.7, 2.8], 10, 2, None, [0, 2, 4, 6, 8, 10], 2),
        ([5.0, 6.0, 4.0, 6.0, 3.0, 6.0, 6.0], 6, 1, 2, [0, 1, 2, 3, 4, 5, 6], 4),  # a better score resets the patience
        ([1.0, 0.5, 0.5, 0.5], 3, 1, None, [0, 1, 2, 3], 1),  # the first of equal scores is kept
        ([3.0, 2.0, 1.0], 5, 4, None, [0, 4, 5], 5),  # the last step is evaluated too
    ],
)
def test_training_stops_by_patience(scores, steps, every, patience, evaluated, best):
    _, history = climb(scores, steps=steps, eval_every=every, patience=patience)
    assert list(history.scores) == evaluated
    assert len(history.losses) == evaluated[-1]
    assert history.best_step == best


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_head_is_the_one_with_the_best_validation_score(task: str) -> None:
    model, x_val = mlp(3), inputs(9, seed=11)
    if task == "regression":
        y, y_val = values(N, 3), values(9, 3)
    else:  # right where it learns, wrong where it is watched: it grows too sure
        y, y_val = recorded(model, inputs()).outputs.argmax(-1), recorded(model, x_val).outputs.argmin(-1)
    more = {"mean": "network"} if task == "classification" else {}
    method = FMGP(model, task, lr=0.2, steps=30, eval_every=3, patience=None, num_inducing=4, **more)
    method.fit((inputs(), y), val=(x_val, y_val))
    scores = method.history.scores
    assert method.history.best_step == min(scores, key=lambda step: scores[step])
    assert scores[method.history.best_step] < scores[30]  # training went on past the best
    found = -float(method.predict(x_val).log_prob(y_val).mean())
    assert found == pytest.approx(scores[method.history.best_step], rel=1e-5)


def test_validation_does_not_change_the_course_of_training() -> None:
    watched = FMGP(mlp(3), "regression", eval_every=1, patience=None, **BATCHED)
    watched.fit((inputs(), values(N, 3)), val=(inputs(9), values(9, 3)))
    assert watched.history.losses == fitted().history.losses


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_loss_that_is_not_finite_raises(loss: float) -> None:
    parameter, losses = nn.Parameter(torch.zeros(())), iter([1.0, 1.0, loss])
    message = rf"The loss became {loss} at step 3 of 9\. Lower the learning rate \(it is 0\.5\)"
    with pytest.raises(TrainingError, match=message):
        train(lambda batch: parameter * 0.0 + next(losses), [parameter], Nothing(), Training(steps=9, lr=0.5))


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


def test_nothing_is_printed_where_stderr_is_not_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    fitted(steps=40)
    assert capfd.readouterr() == ("", "")


def test_progress_is_shown_on_a_terminal_and_changes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
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


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_the_number_of_threads_is_put_back_after_an_error(error: type[BaseException], monkeypatch: Any) -> None:
    before, seen = torch.get_num_threads(), []

    def fail(*_: Any, **__: Any) -> None:
        seen.append(torch.get_num_threads())
        raise ZeroDivisionError

    monkeypatch.setattr("posthoc.fmgp.build.train", fail)
    torch.set_num_threads(2)
    try:
        with pytest.raises(error), single_thread():
            raise error
        assert torch.get_num_threads() == 2
        with pytest.raises(ZeroDivisionError):
            fitted()
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("rows", "threads"), [(2, 1), (N, 2)])
def test_a_few_rows_are_predicted_by_one_thread(rows: int, threads: int, monkeypatch: Any) -> None:
    method, before, seen = fitted(), torch.get_num_threads(), []
    plain = type(method.head).predictive

    def predictive(*args: Any, **options: Any) -> Any:
        seen.append(torch.get_num_threads())
        return plain(*args, **options)

    monkeypatch.setattr(type(method.head), "predictive", predictive)
    torch.set_num_threads(2)
    try:
        method.predict(inputs()[:rows])
        assert (seen, torch.get_num_threads()) == ([threads], 2)
    finally:
        torch.set_num_threads(before)
