"""The progress bar: on a terminal or where it is wanted; elsewhere a line in the log from time to time."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import pytest

from posthoc import FMGP, progress
from posthoc.progress import progress_bar
from tests.test_cuda_graph import classes


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "posthoc"]


def test_without_a_terminal_there_is_a_line_every_ten_seconds(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with caplog.at_level(logging.INFO, "posthoc"), progress_bar("fitting", 1000, 100) as report:
        for done in range(200, 1001, 100):
            now += 4.0
            report(done, f"loss {done / 1000}")
    assert lines(caplog) == [
        "fitting: 400 of 1,000 steps, 24 s left, loss 0.4",
        "fitting: 700 of 1,000 steps, 12 s left, loss 0.7",
        "fitting: 1,000 of 1,000 steps, 0 s left, loss 1.0",
    ]
    assert capsys.readouterr().err == ""


def test_short_tasks_that_follow_each_other_share_a_clock(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with caplog.at_level(logging.INFO, "posthoc"):
        for pause in (0.5, 60.0, 0.0):  # after three tasks of four seconds
            for fold in "abc":
                with progress_bar(fold, 4) as report:
                    for done in range(1, 5):
                        now += 1.0
                        report(done)
            now += pause
    assert [line[0] for line in lines(caplog)] == ["c", "b", "c"]


def test_without_a_total_a_line_counts(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    with caplog.at_level(logging.INFO, "posthoc"), progress_bar("collecting", None, unit="rows") as report:
        report(1234)
    assert lines(caplog) == ["collecting: 1,234 rows"]


def test_a_bar_is_written_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("fitting", 30, enabled=True) as report:
        report(30, "loss 0.1")
    written = capsys.readouterr()
    assert written.out == ""
    assert "fitting" in written.err
    assert "30/30" in written.err


def test_nothing_is_shown_where_it_is_not_wanted(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with caplog.at_level(logging.INFO, "posthoc"), progress_bar("fitting", 30, enabled=False) as report:
        report(30)
    assert lines(caplog) == []
    assert capsys.readouterr().err == ""


def test_parallel_fits_show_one_bar_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import rich.progress

    shown, most = 0, 0

    class Counting(rich.progress.Progress):
        def start(self) -> None:
            nonlocal shown, most
            shown, most = shown + 1, max(most, shown + 1)
            super().start()

        def stop(self) -> None:
            nonlocal shown
            shown -= 1
            super().stop()

    monkeypatch.setattr(rich.progress, "Progress", Counting)
    with progress_bar("outer", 2, enabled=True), progress_bar("inner", 2, enabled=True) as report:
        report(1)
    quick: dict[str, Any] = {"steps": 60, "num_inducing": 10, "batch_size": 20}
    FMGP(None, "classification", progress=True, **quick).fit(classes(400, c=3))
    assert most == 1
