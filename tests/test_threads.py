"""Small fits beside each other: one thread each, the same numbers, and one of them to speak."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from posthoc import FMGP
from posthoc.errors import TrainingError
from posthoc.numerics import BLIND
from posthoc.training import few_threads, side_by_side
from posthoc.training.steps import PlainSteps
from posthoc.training.threads import HELPS, Stopped, may_go_on, speaks
from tests.cases import numbers, same
from tests.test_graph import classes, reals


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_come_in_the_order_of_their_tasks() -> None:
    seen = set()

    def task(i: int) -> int:
        seen.add(threading.get_ident())
        time.sleep(0.02 * (5 - i))
        return i

    assert side_by_side([partial(task, i) for i in range(5)], True) == list(range(5))
    assert len(seen) == 2
    assert threading.get_ident() in seen
    assert side_by_side([], True) == []


@pytest.mark.parametrize(("threads", "wanted"), [(1, True), (2, False)])
def test_one_after_the_other_in_the_callers_thread(threads: int, wanted: bool) -> None:
    torch.set_num_threads(threads)
    assert set(side_by_side([threading.get_ident] * 3, wanted)) == {threading.get_ident()}
    assert torch.get_num_threads() == threads


def test_each_has_one_thread_of_its_own_and_the_caller_gets_its_own_back() -> None:
    meet = threading.Barrier(2)  # so that both threads have one of the tasks

    def task() -> list[int]:
        meet.wait(10.0)
        before = torch.get_num_threads()
        with few_threads(True):
            return [before, torch.get_num_threads()]

    assert side_by_side([task, task], True) == [[1, 1], [1, 1]]
    assert torch.get_num_threads() == 2


def test_what_the_caller_has_set_holds_for_all() -> None:
    meet = threading.Barrier(2)

    def task() -> bool:
        meet.wait(10.0)
        return BLIND.get()

    token = BLIND.set(True)
    try:
        assert side_by_side([task, task], True) == [True, True]
    finally:
        BLIND.reset(token)


def until_stopped() -> None:
    end = time.monotonic() + 30.0
    while time.monotonic() < end:
        may_go_on()
        time.sleep(0.001)
    pytest.fail("it was never told to stop")


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_the_callers_failure_ends_the_others(failure: type[BaseException]) -> None:
    started, before = threading.Event(), threading.active_count()
    later: list[int] = []

    def fail() -> None:
        started.wait(10.0)
        raise failure

    def other() -> None:
        started.set()
        until_stopped()

    with pytest.raises(failure):
        side_by_side([fail, other, lambda: later.append(1)], True)
    assert not later
    assert threading.active_count() == before
    assert torch.get_num_threads() == 2


def test_a_caller_who_is_interrupted_while_it_waits_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    started, before, join = threading.Event(), threading.active_count(), threading.Thread.join

    def other() -> None:
        started.set()
        until_stopped()

    def interrupted(self: threading.Thread, timeout: float | None = None) -> None:
        monkeypatch.setattr(threading.Thread, "join", join)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        side_by_side([lambda: started.wait(10.0), other], True)
    assert threading.active_count() == before


def test_a_helpers_failure_is_the_callers() -> None:
    caller = threading.get_ident()
    meet = threading.Barrier(2)

    def task() -> None:
        meet.wait(10.0)
        if threading.get_ident() != caller:
            raise TrainingError("my own mistake")

    with pytest.raises(TrainingError, match="my own mistake"):
        side_by_side([task, task], True)


def test_only_the_caller_speaks() -> None:
    meet = threading.Barrier(2)

    def task() -> tuple[bool, bool]:
        meet.wait(10.0)
        return threading.get_ident() == caller, speaks()

    caller = threading.get_ident()
    assert sorted(side_by_side([task, task], True)) == [(False, False), (True, True)]
    assert speaks()


def test_outside_of_any_section_one_may_go_on() -> None:
    may_go_on()
    stopped = type("Section", (), {"stopped": threading.Event()})()
    token = HELPS.set(stopped)
    try:
        may_go_on()
        stopped.stopped.set()
        with pytest.raises(Stopped):
            may_go_on()
    finally:
        HELPS.reset(token)


FITS: dict[str, tuple[str, Callable[[], Any]]] = {
    "regression": ("regression", lambda: reals(400)),
    "classes": ("classification", lambda: classes(400, c=3)),
}
QUICK: dict[str, Any] = {"steps": 60, "num_inducing": 10, "batch_size": 20}


@pytest.fixture
def threads_of_steps(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Which threads took steps."""
    seen: set[str] = set()
    step = PlainSteps.step

    def noting(*args: Any) -> Any:
        seen.add(threading.current_thread().name)
        return step(*args)

    monkeypatch.setattr(PlainSteps, "step", noting)
    return seen


@pytest.mark.parametrize("case", FITS)
def test_fits_of_parts_are_made_beside_each_other_with_the_same_numbers(case: str, threads_of_steps: set[str]) -> None:
    likelihood, data = FITS[case]

    def run() -> FMGP:
        return FMGP(None, likelihood, **QUICK).fit(data())

    together, again = run(), run()
    assert len(threads_of_steps) > 1
    assert same(numbers(together), numbers(again))  # whoever was first
    assert together.history == again.history
    threads_of_steps.clear()
    torch.set_num_threads(1)
    alone = run()
    assert len(threads_of_steps) == 1
    # What is not done side by side may round in another way with another number of threads.
    torch.testing.assert_close(numbers(together), numbers(alone), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("case", FITS)
def test_a_fit_that_is_interrupted_leaves_no_thread_at_work(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    likelihood, data = FITS[case]
    step, before = PlainSteps.step, threading.active_count()

    def interrupted(*args: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return step(*args)

    monkeypatch.setattr(PlainSteps, "step", interrupted)
    method = FMGP(None, likelihood, **{**QUICK, "steps": 100_000})
    with pytest.raises(KeyboardInterrupt):
        method.fit(data())
    assert not method.fitted
    assert threading.active_count() == before
    assert torch.get_num_threads() == 2


def test_one_bar_at_a_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import rich.progress

    drawn: list[str] = []
    start = rich.progress.Progress.start

    def noting(self: Any) -> None:
        drawn.append(threading.current_thread().name)
        start(self)

    monkeypatch.setattr(rich.progress.Progress, "start", noting)
    FMGP(None, "classification", progress=True, **QUICK).fit(classes(400, c=3))
    assert drawn
    assert set(drawn) == {threading.main_thread().name}


@pytest.mark.parametrize(
    "large", [{"num_inducing": 300, "steps": 2}, {"batch_size": 50, "cache": False, "steps": 2}], ids=["many", "fresh"]
)
def test_fits_that_use_all_threads_or_the_network_are_made_one_by_one(
    large: dict[str, Any], threads_of_steps: set[str]
) -> None:
    data = reals(1000)
    model = torch.nn.Linear(5, 1)
    assert data.features is not None
    assert data.targets is not None
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data.features, data.targets), batch_size=50)
    FMGP(model, "regression", **{"num_inducing": 10, **large}).fit(loader)
    assert threads_of_steps == {threading.main_thread().name}
