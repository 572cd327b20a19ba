"""The progress bar: on a terminal or where it is wanted; elsewhere a line in the log from time to time."""

import logging
import math
import sys
import time

import pytest
import rich.progress

from posthoc import FMGP, progress
from posthoc.progress import progress_bar
from tests.test_cuda_graph import classes


@pytest.fixture
def log(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "posthoc")
    monkeypatch.setattr(progress.Clock, "seen", -math.inf)
    return caplog


def test_without_a_terminal_there_is_a_line_every_ten_seconds(log, monkeypatch, capsys):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with progress_bar("fitting", 1000, 100) as report:
        for done in range(200, 1001, 100):
            now += 4.0
            report(done, f"loss {done / 1000}")
    assert log.messages == [
        "fitting: 400 of 1,000 steps, 24 s left, loss 0.4",
        "fitting: 700 of 1,000 steps, 12 s left, loss 0.7",
        "fitting: 1,000 of 1,000 steps, 0 s left, loss 1.0",
    ]
    assert capsys.readouterr().err == ""


def test_short_tasks_that_follow_each_other_share_a_clock(log, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for pause in (0.5, 60.0, 0.0):  # after three tasks of four seconds
        for fold in "abc":
            with progress_bar(fold, 4) as report:
                for done in range(1, 5):
                    now += 1.0
                    report(done)
        now += pause
    assert [line[0] for line in log.messages] == ["c", "b", "c"]


def test_without_a_total_a_line_counts(log, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    with progress_bar("collecting", None, unit="rows") as report:
        report(1234)
    assert log.messages == ["collecting: 1,234 rows"]


def test_a_bar_is_written_to_stderr(capsys):
    with progress_bar("fitting", 30, enabled=True) as report:
        report(30, "loss 0.1")
    out, err = capsys.readouterr()
    assert out == ""
    assert "fitting" in err
    assert "30/30" in err


def test_nothing_is_shown_where_it_is_not_wanted(log, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar("fitting", 30, enabled=False) as report:
        report(30)
    assert log.messages == []
    assert capsys.readouterr().err == ""


def test_parallel_fits_show_one_bar_at_a_time(monkeypatch):
    shown, most = 0, 0

    class Counting(rich.progress.Progress):
        def start(self):
            nonlocal shown, most
            shown, most = shown + 1, max(most, shown + 1)
            super().start()

        def stop(self):
            nonlocal shown
            shown -= 1
            super().stop()

    monkeypatch.setattr(rich.progress, "Progress", Counting)
    with progress_bar("outer", 2, enabled=True), progress_bar("inner", 2, enabled=True) as report:
        report(1)
    quick = {"steps": 60, "num_inducing": 10, "batch_size": 20}
    FMGP(None, "classification", progress=True, **quick).fit(classes(400, c=3))
    assert most == 1
