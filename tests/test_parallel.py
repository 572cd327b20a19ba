"""Tasks in parallel threads: one PyTorch thread each, results in order, and an error or an interrupt ends them all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, repeat
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from posthoc import FMGP, TrainingError
from posthoc.training import run_parallel, single_thread
from posthoc.training.loop import PlainSteps
from tests.cases import numbers, same
from tests.test_cuda_graph import classes, reals


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_come_in_the_order_of_their_tasks() -> None:
    first, seen = threading.Event(), set()

    def task(i: int) -> int:
        seen.add(threading.get_ident())
        if i == 0:
            first.wait(60.0)  # the first to begin is the last to end
        if i == 4:
            first.set()
        return i

    assert run_parallel([partial(task, i) for i in range(5)]) == list(range(5))
    assert len(seen) == 2
    assert threading.get_ident() not in seen
    assert run_parallel([]) == []


@pytest.mark.parametrize(("threads", "parallel"), [(1, True), (2, False)])
def test_one_after_the_other_in_the_callers_thread(threads: int, parallel: bool) -> None:
    torch.set_num_threads(threads)
    assert set(run_parallel([threading.get_ident] * 3, parallel)) == {threading.get_ident()}
    assert torch.get_num_threads() == threads


def test_each_task_has_one_pytorch_thread_and_the_caller_gets_its_own_back() -> None:
    meet = threading.Barrier(2)  # so that both threads have one of the tasks

    def task() -> list[int]:
        meet.wait(60.0)
        before = torch.get_num_threads()
        with single_thread():
            return [before, torch.get_num_threads()]

    assert run_parallel([task, task]) == [[1, 1], [1, 1]]
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("which", [0, 1])
def test_an_error_is_raised_and_ends_what_has_not_begun(which: int) -> None:
    meet, before, later = threading.Barrier(2), threading.active_count(), list[int]()

    def fail() -> None:
        meet.wait(60.0)
        raise TrainingError("my own mistake")

    tasks = [fail, partial(meet.wait, 60.0)]
    with pytest.raises(TrainingError, match="my own mistake"):
        run_parallel(tasks[::-1] if which else tasks)
    with pytest.raises(ZeroDivisionError):
        run_parallel([lambda: 1 // 0, lambda: 1 // 0, *[lambda: later.append(1)] * 100])
    assert len(later) < 100
    assert threading.active_count() == before
    assert torch.get_num_threads() == 2


FITS: dict[str, tuple[str, Callable[[], Any]]] = {
    "regression": ("regression", lambda: reals(400)),
    "classes": ("classification", lambda: classes(400, c=3)),
}
QUICK: dict[str, Any] = {"steps": 60, "num_inducing": 10, "batch_size": 20}


@pytest.fixture
def threads_of_steps(monkeypatch):
    """The names of the threads that took steps."""
    seen, step = set(), PlainSteps.step
    monkeypatch.setattr(PlainSteps, "step", lambda *args: seen.add(threading.current_thread().name) or step(*args))
    return seen


@pytest.mark.parametrize("case", FITS)
def test_parallel_fits_of_parts_have_the_same_numbers(case: str, threads_of_steps: set[str]) -> None:
    likelihood, data = FITS[case]
    together, again = (FMGP(None, likelihood, **QUICK).fit(data()) for _ in range(2))
    assert len(threads_of_steps) > 1
    assert same(numbers(together), numbers(again))  # in whatever order they ended
    assert together.history == again.history
    threads_of_steps.clear()
    torch.set_num_threads(1)
    alone = FMGP(None, likelihood, **QUICK).fit(data())
    assert len(threads_of_steps) == 1
    # What is not parallel may be rounded differently with another number of threads.
    torch.testing.assert_close(numbers(together), numbers(alone), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("case", FITS)
def test_a_fit_that_is_interrupted_leaves_no_thread_at_work(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    likelihood, data = FITS[case]
    step, before = PlainSteps.step, threading.active_count()
    interrupt = Mock(side_effect=chain(repeat(None, 50), repeat(KeyboardInterrupt)))
    monkeypatch.setattr(PlainSteps, "step", lambda *args: interrupt() or step(*args))
    method = FMGP(None, likelihood, **{**QUICK, "steps": 100_000})
    with pytest.raises(KeyboardInterrupt):
        method.fit(data())
    assert not method.fitted
    assert threading.active_count() == before
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    "large", [{"num_inducing": 300, "steps": 2}, {"batch_size": 50, "cache": False, "steps": 2}], ids=["many", "fresh"]
)
def test_fits_that_use_all_threads_or_the_network_are_made_one_by_one(large, threads_of_steps):
    data = reals(1000)
    loader = DataLoader(TensorDataset(data.features, data.targets), batch_size=50)
    FMGP(torch.nn.Linear(5, 1), "regression", **{"num_inducing": 10, **large}).fit(loader)
    assert threads_of_steps == {threading.main_thread().name}
