"""Several processes that train together: the numbers of one, the same bits in each, and an end when one dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from posthoc import FMGP, Categorical, PosthocError
from posthoc.collect import save_outputs
from posthoc.fmgp import build as building
from posthoc.fmgp.points import Coordinates
from posthoc.training import Checkpoint, History, Ranks
from posthoc.training.distributed import distributed
from posthoc.training.loop import PlainSteps
from tests import test_checkpoint
from tests.test_checkpoint import STOPPING, Case, classes, die, die_after, end_of, foreseen, reals, start, step_in

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")

STEPS, EVERY = 100, 5
SMALL: dict[str, Any] = {"steps": STEPS, "num_inducing": 6, "batch_size": 100, "eval_every": 7, "patience": None}
SLOWLY = {**STOPPING, "lr": 0.02}
CASES: dict[str, Callable[[], Case]] = {
    "all rows in every batch": lambda: ("regression", {}, reals(100), None),
    "classes": lambda: ("classification", {"variance": "per_output"}, classes(150), None),
    "stops early": lambda: ("classification", SLOWLY, foreseen(150, wrong=1), foreseen(40, seed=5)),
    "Monte Carlo": lambda: (Categorical(training="monte_carlo", samples=4), {}, classes(150), None),
}


def fit(case: str, **more: Any) -> FMGP:
    likelihood, options, data, val = CASES[case]()
    return FMGP(None, likelihood, **{**SMALL, **options}).fit(data, val=val, **more)


Job = Callable[[int, Path], None]
"""What one of the processes does, with its rank and a folder for all of them."""


def work(job: Job, rank: int, count: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": count}
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        with distributed(None):
            job(rank, folder)
    except PosthocError as error:
        (folder / f"{rank}.error").write_text(f"{type(error).__name__}: {error}")
        sys.exit(1)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def together(job: Job, count: int, folder: Path) -> list[int]:
    """Runs a job on so many ranks; their exit codes."""
    folder.mkdir(exist_ok=True)
    port = free_port()
    children = [start(work, job, rank, count, port, folder) for rank in range(count)]
    return [end_of(child) for child in children]


def errors(count: int, folder: Path) -> list[str]:
    paths = [folder / f"{rank}.error" for rank in range(count)]
    return [path.read_text() if path.exists() else "" for path in paths]


def fit_and_save(rank: int, folder: Path, case: str, steps: int | None = None, **more: Any) -> None:
    """Fits a case and leaves each rank's head, with the history, which no head holds, in its own file."""
    if steps is not None:
        die_after(steps)
    if rank:
        Checkpoint.save = lambda *args: pytest.fail("only rank 0 writes")  # type: ignore[method-assign]
    method = fit(case, **more)
    method.save(folder / f"{rank}.safetensors")
    (folder / f"{rank}.json").write_text(json.dumps(asdict(method.history)))


def heads(count: int, folder: Path) -> list[bytes]:
    return [(folder / f"{rank}.safetensors").read_bytes() for rank in range(count)]


def history(count: int, folder: Path) -> History:
    """What happened, which all ranks must tell alike."""
    texts = {(folder / f"{rank}.json").read_text() for rank in range(count)}
    assert len(texts) == 1
    told = History(**json.loads(texts.pop()))
    told.scores = {int(step): score for step, score in told.scores.items()}
    return told


def require_alike(found: History, expected: History) -> None:
    """Sums over ranks may be rounded otherwise."""
    assert found.losses == pytest.approx(expected.losses, rel=1e-8)
    assert found.scores == pytest.approx(expected.scores, rel=1e-8)
    assert found.best_step == expected.best_step


def require_close(found: FMGP, expected: FMGP) -> None:
    assert found.head is not None
    assert expected.head is not None
    state, other = found.head.state_dict(), expected.head.state_dict()
    assert state.keys() == other.keys()
    for name, tensor in state.items():
        assert torch.allclose(tensor, other[name], rtol=1e-6, atol=1e-6), name


@pytest.mark.parametrize(("case", "count"), [("all rows in every batch", 2), ("classes", 3), ("stops early", 2)])
def test_ranks_agree_to_the_bit_and_with_one_process_to_a_millionth(case: str, count: int, tmp_path: Path) -> None:
    assert together(partial(fit_and_save, case=case), count, tmp_path) == [0] * count, errors(count, tmp_path)
    assert len(set(heads(count, tmp_path))) == 1
    expected = fit(case)
    require_close(FMGP.load(tmp_path / "0.safetensors"), expected)
    require_alike(history(count, tmp_path), expected.history)
    assert (len(expected.history.losses) < STEPS) == (case == "stops early")


def start_a_little_elsewhere(rank: int, folder: Path) -> None:
    """As on another kind of processor, which rounds differently."""
    if rank:
        standardize = Coordinates.set_units

        def shifted(self: Coordinates, space: str, block: torch.Tensor) -> None:
            standardize(self, space, block + 1e-9)

        Coordinates.set_units = shifted  # type: ignore[method-assign]
        building.START = 1.0 + 1e-9
    fit_and_save(rank, folder, "classes")


def test_all_start_from_the_numbers_of_the_first(tmp_path: Path) -> None:
    assert together(start_a_little_elsewhere, 2, tmp_path) == [0, 0]
    first, second = heads(2, tmp_path)
    assert first == second


def test_slices_cover_a_batch_once_and_evenly() -> None:
    ranks = Ranks()
    for size, count in [(100, 3), (7, 7), (10, 4), (1, 1), (101, 8)]:
        slices = []
        for rank in range(count):
            ranks.rank, ranks.count = rank, count
            slices.append(range(size)[ranks.part(size)])
        assert [row for part in slices for row in part] == list(range(size))
        assert {len(part) for part in slices} <= {size // count, -(-size // count)}


def fit_in_batches_of_one(rank: int, folder: Path) -> None:
    FMGP(None, "classification", **{**SMALL, "batch_size": 1}).fit(classes(150))


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (partial(fit_and_save, case="Monte Carlo"), "Monte Carlo training draws in one process"),
        (fit_in_batches_of_one, "Expected batches of at least one row a process, got 1 for 2."),
    ],
)
def test_fits_for_one_process_are_refused(job: Job, message: str, tmp_path: Path) -> None:
    assert together(job, 2, tmp_path) == [1, 1]
    assert all(f"OptionError: {message}" in error for error in errors(2, tmp_path))


def fail(rank: int, folder: Path, which: int, how: Callable[[], None]) -> None:
    """One rank dies, or raises, in the middle."""
    step, taken = PlainSteps.step, iter(range(20))

    def failing(*args: Any) -> Any:
        if rank == which and next(taken, None) is None:
            how()
        return step(*args)

    PlainSteps.step = failing  # type: ignore[method-assign, assignment]
    fit("classes")


def raise_an_error() -> None:
    raise PosthocError("my own mistake")


@pytest.mark.parametrize(("which", "how"), [(0, die), (1, die), (2, raise_an_error)])
def test_the_others_stop_when_one_fails(which: int, how: Callable[[], None], tmp_path: Path) -> None:
    codes = together(partial(fail, which=which, how=how), 3, tmp_path)
    for rank, (code, said) in enumerate(zip(codes, errors(3, tmp_path), strict=True)):
        if rank == which:
            assert (code, said) == ((-signal.SIGKILL, "") if how is die else (1, "PosthocError: my own mistake"))
            continue
        assert code == 1
        assert said.startswith("TrainingError: Lost touch with another process of this run (")
        assert "--checkpoint and --resume" in said


def test_killed_and_resumed_together_they_give_the_bytes_of_one_run(tmp_path: Path) -> None:
    whole, resumed, folder = tmp_path / "whole", tmp_path / "resumed", tmp_path / "folder"
    job = partial(fit_and_save, case="stops early")
    assert together(job, 2, whole) == [0, 0]
    again = partial(job, checkpoint=folder, checkpoint_every=EVERY, resume=True)
    for steps, reached in [(7, 5), (8, 10)]:  # of each process, and in the checkpoint that they leave
        assert 0 not in together(partial(again, steps=steps), 2, resumed)
        assert step_in(folder) == reached
    assert together(again, 2, resumed) == [0, 0], errors(2, resumed)
    assert heads(2, resumed) == heads(2, whole)
    require_alike(history(2, resumed), history(2, whole))


def resume_from_a_folder_of_its_own(rank: int, folder: Path) -> None:
    test_checkpoint.fit(checkpoint=folder / f"of rank {rank}", resume=True)


def test_a_checkpoint_that_not_all_can_read_is_refused(tmp_path: Path) -> None:
    test_checkpoint.interrupted(tmp_path / "of rank 0")
    assert together(resume_from_a_folder_of_its_own, 2, tmp_path) == [1, 1]
    assert errors(2, tmp_path)[1].startswith("TrainingError: Expected the same checkpoint for every process")


def test_torchrun_writes_the_head_and_the_report_of_one_process(tmp_path: Path, monkeypatch: Any) -> None:
    data, out, alone = (tmp_path / name for name in ("data.npz", "two.safetensors", "one.safetensors"))
    save_outputs(classes(150), data)
    settings = {"steps": 30, "num_inducing": 6, "batch_size": 25, "progress": "true"}
    fixed = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    command = ["fit", str(data), "--task", "classification", *fixed, "-o"]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", "-m", "posthoc"]
    done = subprocess.run(
        [sys.executable, *launcher, *command, str(out)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fitted fmgp on 150 rows (3 outputs, 6 features, 3 inputs) in ") == 1
    assert done.stderr.count("30/30") == 1
    assert test_checkpoint.run_command(monkeypatch, *command, alone) == 0
    require_close(FMGP.load(out), FMGP.load(alone))
