"""A folder written in batches: what was committed survives kills, full disks and second writers."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import posthoc.collect.folder as writer_module
from posthoc import DataError, FileError, Outputs
from posthoc.collect import OutputsWriter, open_outputs, read_identity, save_outputs
from posthoc.io import lock
from tests.collecting_cases import contents
from tests.test_files import bits, change_manifest, small_files, some, written

ROOT = Path(__file__).parent.parent
SAME: dict[str, Any] = {"identity": {"network": "abc"}}


def assert_same_bytes_as_a_whole_run(folder: Path, data: Outputs) -> None:
    whole = folder.parent / "whole"
    written(whole, data, 30)
    assert contents(folder) == contents(whole)


@pytest.mark.parametrize("size", [1, 7, 30])
def test_batches_of_any_size_give_the_same_bytes(size, tmp_path):
    written(tmp_path / "many", some(), size)
    assert_same_bytes_as_a_whole_run(tmp_path / "many", some())
    assert bits(open_outputs(tmp_path / "many")) == bits(some())


def left(folder: Path, data: Outputs, act: Callable[[], Any] = lambda: None) -> None:
    """Appends to a folder and leaves it unfinished, after something else that may raise."""
    with OutputsWriter(folder, **SAME) as writer:
        writer.append(data)
        act()


def test_unfinished_folder_is_refused_and_gone_on_with(tmp_path):
    folder, data = tmp_path / "data", some()
    with OutputsWriter(folder, **SAME) as writer:
        assert writer.rows == 0
        writer.append(data[:5])
        writer.append(data[5:12])
        writer.append(data[:0])
        assert writer.rows == 12
    with pytest.raises(FileError, match=r"finished folder, found 12 rows so far in .*data\. Run the collection again"):
        open_outputs(folder)
    with pytest.raises(KeyboardInterrupt):
        left(folder, data[12:13], Mock(side_effect=KeyboardInterrupt))
    with OutputsWriter(folder, **SAME) as writer:
        assert writer.rows == 13
        writer.append(data[13:])
        writer.finish()
        with pytest.raises(FileError, match="was finished or left"):
            writer.append(data)
    assert_same_bytes_as_a_whole_run(folder, data)


@pytest.mark.parametrize("manifest", [True, False])
def test_what_a_killed_run_left_is_cleared(manifest, tmp_path):
    folder = tmp_path / "data"
    with OutputsWriter(folder, **SAME):
        pass
    if manifest:
        (folder / "features.npy").write_bytes(b"half a hea")
    else:  # killed before there was any
        (folder / "outputs.json").unlink()
    data = Outputs(some().outputs)
    written(folder, data)
    assert bits(open_outputs(folder)) == bits(data)
    assert set(os.listdir(folder)) == {".lock", "outputs.json", "outputs.npy"}


def test_rows_are_committed_every_few_seconds(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def recorded():
        return json.loads((tmp_path / "outputs.json").read_text())["rows"]

    with OutputsWriter(tmp_path, identity={}) as writer:
        for share, rows in [(0.0, 0), (1.0, 60), (0.5, 60)]:
            now += share * writer_module.COMMIT_SECONDS
            writer.append(some())
            assert recorded() == rows
    assert recorded() == 90


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Outputs(torch.zeros(3, 4)), r"inputs of float64 of shape \(3,\).*, as in the rows before, got outputs"),
        (some(8, dtype=torch.float64), r"Expected outputs of float32 of shape \(4,\).*got outputs of float64"),
        (Outputs(some(8).outputs[:, :3], some(8).targets, some(8).features, some(8).inputs), r"got .*shape \(3,\)"),
    ],
)
def test_batch_that_does_not_fit_is_refused_and_changes_nothing(batch, message, tmp_path):
    data = some(40)
    with OutputsWriter(tmp_path, **SAME) as writer:
        writer.append(data[:30])
        with pytest.raises(DataError, match=message):
            writer.append(batch)
        writer.append(data[30:])
        writer.finish()
    assert bits(open_outputs(tmp_path)) == bits(data)


def test_nothing_cannot_be_finished(tmp_path):
    with OutputsWriter(tmp_path / "data", identity={}) as writer:
        with pytest.raises(DataError, match="Expected at least one row to finish"):
            writer.finish()
        with pytest.raises(DataError, match="Expected at least one column of outputs"):
            writer.append(Outputs(torch.zeros(3, 0)))
    with pytest.raises(FileError, match="0 rows so far"):
        open_outputs(tmp_path / "data")


def test_folder_of_something_else_is_refused(tmp_path):
    folder = tmp_path / "data"
    with OutputsWriter(folder, identity={"network": "abc", "layer": "fc", "size": 224}) as writer:
        writer.append(some())
    before = contents(folder)
    other = {"network": "def", "layer": "fc", "crop": [1, 2]}
    with pytest.raises(FileError) as caught:
        OutputsWriter(folder, identity=other)
    differences = ("network: 'abc' there, 'def'", "crop: 'nothing' there, [1, 2]", "size: 224 there, 'nothing'")
    assert all(f"{part} now" in str(caught.value) for part in differences)
    assert "layer" not in str(caught.value)
    assert contents(folder) == before
    written(folder, some(9), identity=other, force=True)
    assert bits(open_outputs(folder)) == bits(some(9))
    assert read_identity(folder) == other


def test_complete_folder_is_written_again_only_when_told(tmp_path):
    folder = tmp_path / "data"
    written(folder, some())
    with pytest.raises(FileError, match=r"found 30 rows complete in .*open_outputs.*force=True"):
        OutputsWriter(folder, **SAME)
    opened = open_outputs(folder)
    written(folder, Outputs(some(9).outputs), force=True)
    assert bits(open_outputs(folder)) == bits(Outputs(some(9).outputs))
    assert bits(opened) == bits(some())  # mapped before: its file is gone, its numbers are not
    assert sorted(contents(folder)) == ["outputs.json", "outputs.npy"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: os.truncate(f / "targets.npy", 150), r"\(208 bytes\) in .*targets\.npy, found .* and 150 bytes"),
        (lambda f: (f / "targets.npy").unlink(), "No such file"),
        (lambda f: np.save(f / "targets.npy", np.zeros(10)), "found .*f8"),
        (lambda f: change_manifest(f, version=7), "version 1, found 7"),
    ],
)
def test_unfinished_folder_that_was_changed_is_refused(change, message, tmp_path):
    left(tmp_path, some()[:10])
    change(tmp_path)
    with pytest.raises(FileError, match=message):
        OutputsWriter(tmp_path, **SAME)
    written(tmp_path, some(), force=True)  # the lock is free, and starting over helps
    assert bits(open_outputs(tmp_path)) == bits(some())


def test_full_disk_keeps_what_there_was_room_for(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "COMMIT_SECONDS", 0.0)  # every append is committed
    folder, data = tmp_path / "data", some(1000)
    message = r"Expected to write .*data, found that it cannot be .*first 300 rows are safe: make room"
    with small_files(10_000), pytest.raises(FileError, match=message):  # 354 rows of features
        written(folder, data, 100)
    with OutputsWriter(folder, **SAME) as writer:
        assert writer.rows == 300
    written(folder, data, 100)
    assert_same_bytes_as_a_whole_run(folder, data)


def test_writing_goes_on_when_there_is_room_again(tmp_path):
    folder, data = tmp_path / "data", some(1000)
    with OutputsWriter(folder, **SAME) as writer:
        writer.append(data[:300])
        with small_files(10_000), pytest.raises(FileError, match="first 0 rows are safe"):
            writer.append(data[300:])
        assert writer.rows == 300
        writer.append(data[300:])
        writer.finish()
    assert bits(open_outputs(folder)) == bits(data)


def test_what_went_wrong_first_is_told(tmp_path, monkeypatch):
    def full_disk():
        monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(28, "No space left on device")))

    with pytest.raises(FileError, match=r"No space left.*first 0 rows are safe"):
        left(tmp_path, some(), full_disk)
    monkeypatch.undo()
    with pytest.raises(ZeroDivisionError):
        left(tmp_path, some(), lambda: full_disk() or 1 / 0)
    monkeypatch.undo()
    with OutputsWriter(tmp_path, **SAME) as writer:  # the lock is free
        assert writer.rows == 0


def test_rows_are_on_the_disk_before_they_count(tmp_path, monkeypatch):
    synced: dict[str, int] = {}
    moved: list[tuple[int, bool]] = []
    fsync, replace = os.fsync, os.replace

    def recording_fsync(handle):
        fsync(handle)
        synced[os.readlink(f"/proc/self/fd/{handle}")] = os.fstat(handle).st_size

    def checking_replace(source, target):
        document = json.loads(Path(source).read_text())
        assert synced[str(source)] == Path(source).stat().st_size
        for name in document["arrays"]:
            assert synced[str(folder / f"{name}.npy")] == 128 + document["rows"] * getattr(data[:1], name).nbytes
            header = (folder / f"{name}.npy").read_bytes()[:128]
            assert not document["complete"] or f"({document['rows']}," in header.decode("latin-1")
        replace(source, target)
        moved.append((document["rows"], document["complete"]))

    if not Path("/proc/self/fd").exists():
        pytest.skip("reads /proc")
    monkeypatch.setattr(writer_module, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "replace", checking_replace)
    folder, data = tmp_path.resolve() / "data", some(10)
    written(folder, data, 4)
    assert moved == [(0, False), (4, False), (8, False), (10, False), (10, True)]


def test_second_writer_is_refused_at_once(tmp_path):
    folder = tmp_path / "data"
    with OutputsWriter(folder, **SAME) as writer:
        writer.append(some()[:10])
        for force in (False, True):
            with pytest.raises(FileError, match=r"Expected to be the only one writing to .*data, found another"):
                OutputsWriter(folder, force=force, **SAME)
        with pytest.raises(FileError, match="only one writing"):
            save_outputs(some(), folder, force=True)
        writer.append(some()[10:])
        writer.finish()
    assert bits(open_outputs(folder)) == bits(some())
    save_outputs(some(9), folder, force=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_runs_go_on_to_the_same_bytes(tmp_path):
    # In a process of its own, which has no threads: it forks children and kills them.
    code = "import sys; from tests.test_folder import *; folder = Path(sys.argv[1])"
    code += "; kill_with_worker(folder), kill_at_steps(folder)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=ROOT, timeout=100)


def kill_with_worker(folder: Path) -> None:
    """A killed process leaves a worker behind, which must not keep the lock."""
    read, write = os.pipe()
    number = os.fork()
    if not number:
        with lock(folder / "lock"):
            if not os.fork():
                os.write(write, str(os.getpid()).encode())
            signal.pause()
    worker = int(os.read(read, 20))
    try:
        with pytest.raises(FileError, match="only one writing"), lock(folder / "lock"):
            pass
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)
        with lock(folder / "lock"):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


def kill_at_step(n: int) -> None:
    """Lets this process be killed before or after a write, a wait for the disk or a rename, the nth of all."""
    moments = count(1)

    def live_on() -> None:
        if next(moments) == n:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            live_on()
            found = step(*args, **kwargs)
            live_on()
            return found

        return run

    for place, name in ((os, "fsync"), (os, "replace"), (writer_module, "write_at"), (Path, "unlink")):
        setattr(place, name, counted(getattr(place, name)))


def kill_at_steps(folder: Path) -> None:
    torch.set_num_threads(1)
    # A kill, unlike a power cut, loses nothing that was written: there is no need to wait for the disk.
    setattr(os, "fsync", lambda _: None)  # noqa: B010
    writer_module.COMMIT_SECONDS = 0.0
    data = some(10)
    written(folder / "whole", data, 4)
    expected = contents(folder / "whole")
    left_with: set[Any] = set()

    def killed(step: int, target: Path) -> None:
        kill_at_step(step)
        written(target, data, 4)

    for step in count(1):
        target = folder / f"killed at {step}"
        child = get_context("fork").Process(target=killed, args=(step, target))
        child.start()
        child.join()
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        manifest = target / "outputs.json"
        if manifest.exists() and json.loads(manifest.read_text())["complete"]:
            left_with.add("complete")
        else:
            with OutputsWriter(target, **SAME) as writer:
                left_with.add(writer.rows)
            written(target, data, 4)
        assert contents(target) == expected, step
        shutil.rmtree(target)
    assert step > 51
    assert left_with == {0, 4, 8, 10, "complete"}, left_with
