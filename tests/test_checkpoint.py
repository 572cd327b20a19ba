"""Checkpoints: a fit that was killed ends, once resumed, with the bytes of one that was not."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn

from posthoc import FMGP, RBF, Categorical, FileError, OptionError, Outputs, TrainingError, save_outputs
from posthoc.cli import main
from posthoc.io import read_tensors
from posthoc.training import Checkpoint
from posthoc.training.adam import FlatAdam
from posthoc.training.loop import PlainSteps, Run
from tests.cases import inputs, labels, mlp, numbers, recorded, same, values

if os.name != "posix":
    pytest.skip("needs kill and fork", allow_module_level=True)

FORKED = multiprocessing.get_context("forkserver")
"""Children come from a process that has loaded everything, once, and has never computed a gradient."""
FORKED.set_forkserver_preload(["pytest", "tests.test_checkpoint"])

SECONDS = 300.0
"""How long a process may take, on a busy machine too, before it counts as hanging; gloo alone would wait 600."""
STEPS, EVERY = 30, 3
SMALL: dict[str, Any] = {"steps": STEPS, "num_inducing": 4, "batch_size": 8, "eval_every": 5, "patience": None}


def classes(n: int = 40, seed: int = 2) -> Outputs:
    return recorded(mlp(3), inputs(n, seed=seed), labels(n, seed=seed))


def reals(n: int = 40, seed: int = 2) -> Outputs:
    return recorded(mlp(2), inputs(n, seed=seed), values(n, 2, seed=seed))


def foreseen(n: int = 40, seed: int = 2, *, wrong: int = 0) -> Outputs:
    """Labels that are the network's own, but for so many in ten: where none is wrong, one can be too unsure."""
    outputs = classes(n, seed)
    top = outputs.outputs.argmax(-1)
    return outputs.with_targets(torch.where(torch.arange(n) % 10 < wrong, (top + 1) % 3, top))


STOPPING: dict[str, Any] = {"variance": "shared", "patience": 2, "eval_every": 2, "lr": 0.1}

Case = tuple[Any, dict[str, Any], Outputs, Outputs | None]
"""Likelihood, options, data and validation data."""

CASES: dict[str, Callable[[], Case]] = {  # made when they are used: a process that is to be forked must not compute
    "regression": lambda: ("regression", {}, reals(), None),
    "classes": lambda: ("classification", {"variance": "per_output", "output_rank": 2}, classes(), None),
    "stops early": lambda: ("classification", STOPPING, foreseen(wrong=1), foreseen(30, seed=5)),
    "Monte Carlo": lambda: (Categorical(training="monte_carlo", samples=4), {}, classes(), classes(12, seed=5)),
}


def fit(case: str = "classes", options: dict[str, Any] | None = None, **more: Any) -> FMGP:
    likelihood, own, data, val = CASES[case]()
    return FMGP(None, likelihood, **{**SMALL, **own, **(options or {})}).fit(data, **{"val": val, **more})


def saved(method: FMGP, path: Path) -> bytes:
    method.save(path)
    return path.read_bytes()


def step_in(folder: Path) -> int:
    """After how many steps the checkpoint was written; 0 where there is none."""
    path = folder / "checkpoint.safetensors"
    return int(read_tensors(path, "posthoc-checkpoint")[1]["step"]) if path.exists() else 0


def start(target: Callable[..., None], *args: Any) -> Any:
    child = FORKED.Process(target=target, args=args, daemon=True)
    child.start()
    return child


def end_of(child: Any) -> int:
    """Waits for a child, but not for ever; its exit code."""
    child.join(SECONDS)
    hangs = child.exitcode is None
    child.kill()
    child.join()
    assert not hangs
    return int(child.exitcode)


def die(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def steps_until(count: int, end: Callable[[], Any]) -> Callable[..., Any]:
    """The training step, which calls `end` instead after so many steps."""
    step, taken = PlainSteps.step, iter(range(count))
    return lambda *args: step(*args) if next(taken, None) is not None else end()


def die_after(steps: int) -> None:
    """Kills this process when it begins another step after so many."""
    PlainSteps.step = steps_until(steps, die)  # type: ignore[method-assign]


def resume_and_save(case: str, folder: Path, out: Path, steps: int | None = None) -> None:
    torch.set_num_threads(1)
    if steps is not None:
        die_after(steps)
    fit(case, checkpoint=folder, checkpoint_every=EVERY, resume=True).save(out)


@pytest.mark.parametrize("case", CASES)
def test_killed_between_checkpoints_and_resumed_gives_the_bytes_of_one_run(case: str, tmp_path: Path) -> None:
    expected = saved(fit(case), tmp_path / "expected.safetensors")
    folder, out = tmp_path / "folder", tmp_path / "out.safetensors"
    for steps, reached in [(2, 0), (4, 3), (0, 3), (5, 6)]:  # of each process, and in the checkpoint that it leaves
        assert end_of(start(resume_and_save, case, folder, out, steps)) == -signal.SIGKILL
        assert step_in(folder) == reached
    assert end_of(start(resume_and_save, case, folder, out)) == 0
    assert out.read_bytes() == expected


def die_while_writing(moment: str, folder: Path, out: Path) -> None:
    """Dies in the third checkpoint."""
    write, replace_file, begun = Path.write_bytes, os.replace, []

    def half_written(path: Path, content: bytes) -> int:
        begun.append(path)
        if moment == "half written" and len(begun) == 3:
            write(path, content[: len(content) // 2])
            die()
        return write(path, content)

    def put_in_place(source: Any, target: Any) -> None:
        if moment == "not in place yet" and len(begun) == 3:
            die()
        replace_file(source, target)
        if moment == "in place" and len(begun) == 3:
            die()

    Path.write_bytes, os.replace = half_written, put_in_place  # type: ignore[method-assign, assignment]
    resume_and_save("classes", folder, out)


@pytest.mark.parametrize(("moment", "step"), [("half written", 6), ("not in place yet", 6), ("in place", 9)])
def test_killed_while_it_writes_a_checkpoint(moment: str, step: int, tmp_path: Path) -> None:
    folder, out = tmp_path / "folder", tmp_path / "out.safetensors"
    assert end_of(start(die_while_writing, moment, folder, out)) == -signal.SIGKILL
    assert step_in(folder) == step
    resumed = fit("classes", checkpoint=folder, checkpoint_every=EVERY, resume=True)
    assert saved(resumed, out) == saved(fit("classes"), tmp_path / "expected.safetensors")
    assert sorted(os.listdir(folder)) == [".lock", "checkpoint.safetensors"]  # and no halves of files


def interrupted(folder: Path, case: str = "classes", *, after: int = 20, **more: Any) -> None:
    """A fit that raises in the middle, as on Ctrl-C."""
    step = steps_until(after, Mock(side_effect=KeyboardInterrupt))
    with patch.object(PlainSteps, "step", step), pytest.raises(KeyboardInterrupt):
        fit(case, checkpoint=folder, **{"checkpoint_every": EVERY, **more})


@pytest.mark.parametrize("case", CASES)
def test_history_goes_on_too(case: str, tmp_path: Path) -> None:
    expected = fit(case).history
    interrupted(tmp_path, case, after=11)
    assert step_in(tmp_path) == 9
    found = fit(case, checkpoint=tmp_path, checkpoint_every=EVERY, resume=True).history
    assert found == expected
    assert (found.best_step is None) == (CASES[case]()[3] is None)


def test_best_parameters_from_before_the_interruption_are_kept(tmp_path):
    expected = fit("stops early")
    best, steps = expected.history.best_step, len(expected.history.losses)
    assert 0 < best < steps - 1 < steps < STEPS  # the best comes before, and training stops by patience
    interrupted(tmp_path, "stops early", after=steps - 1, checkpoint_every=1)
    assert step_in(tmp_path) == steps - 1
    found = fit("stops early", checkpoint=tmp_path, resume=True)
    assert same(numbers(found), numbers(expected))
    assert found.history == expected.history


@pytest.mark.parametrize("every", [1, 7, STEPS, 1000])
@pytest.mark.parametrize("case", ["regression", "Monte Carlo"])
def test_a_checkpoint_changes_no_number(case: str, every: int, tmp_path: Path) -> None:
    watched, alone = fit(case, checkpoint=tmp_path, checkpoint_every=every), fit(case)
    assert same(numbers(watched), numbers(alone))
    assert watched.history == alone.history
    assert step_in(tmp_path) == STEPS  # the last state is written, whatever `every` is


def test_resume_without_a_checkpoint_starts_afresh(tmp_path: Path) -> None:
    assert same(numbers(fit(checkpoint=tmp_path / "not" / "there", resume=True)), numbers(fit()))


@pytest.mark.parametrize("case", ["classes", "stops early"])
def test_resume_of_a_finished_run_takes_no_step(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fit(case, checkpoint=tmp_path / "folder", checkpoint_every=1000)
    head, checkpoint = saved(first, tmp_path / "a.safetensors"), bytes_in(tmp_path / "folder")
    monkeypatch.setattr(PlainSteps, "step", lambda *args: pytest.fail("a step was taken"))
    again = fit(case, checkpoint=tmp_path / "folder", resume=True)
    assert saved(again, tmp_path / "b.safetensors") == head
    assert again.history == first.history
    assert bytes_in(tmp_path / "folder") == checkpoint


def bytes_in(folder: Path) -> bytes:
    return (folder / "checkpoint.safetensors").read_bytes()


def test_no_steps_leave_no_checkpoint(tmp_path: Path) -> None:
    assert fit(options={"steps": 0}, checkpoint=tmp_path).fitted
    assert step_in(tmp_path) == 0


def test_a_fit_that_diverges_keeps_the_last_sound_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, factor = PlainSteps.step, Mock(side_effect=[1.0] * 10 + [math.nan])
    monkeypatch.setattr(PlainSteps, "step", lambda *args: step(*args) * factor())
    with pytest.raises(TrainingError, match="became nan at step 11"):
        fit(checkpoint=tmp_path, checkpoint_every=EVERY)
    assert step_in(tmp_path) == 9
    monkeypatch.undo()
    assert same(numbers(fit(checkpoint=tmp_path, resume=True)), numbers(fit()))


def test_every_vector_comes_back_to_its_place(tmp_path: Path) -> None:
    """Parameters of several dtypes make more vectors than there are digits."""

    def vectors(value: float) -> FlatAdam:
        dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        flat = FlatAdam([nn.Parameter(torch.full((2,), value + i, dtype=dtype)) for i, dtype in enumerate(dtypes)])
        for i, tensor in enumerate(flat.state):
            tensor.fill_(value + i)
        return flat

    checkpoint = Checkpoint(tmp_path, resume=True)
    before, after = (Run(vectors(value), None, scored=True) for value in (1.0, 50.0))
    before.step = 7
    before.save(checkpoint)
    after.restore(checkpoint)
    assert after.step == 7
    assert [float(t.flatten()[0]) for t in after.optimizer.state] == [1.0 + i for i in range(16)]
    assert [float(t[0]) for t in after.best] == [1.0, 2.0, 3.0, 4.0]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was interrupted, for others to be refused."""
    folder = tmp_path_factory.mktemp("begun")
    interrupted(folder, after=5)
    return folder


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"lr": 0.03}, r"\bconfig\.lr: .* now, .* there"),
        ({"variance": "separable"}, r"\bconfig\.variance: .* now, .* there"),
        ({"inducing_classes": [0, 1, 2, 0]}, r"\bconfig\.inducing_classes: .* now, .* there"),
        ({"kernel": RBF() + RBF()}, r"\bconfig\.kernel\.type: .* now, .* there"),
        ({"kernel": RBF(amplitude=2.0)}, r"\bconfig\.kernel\.start\.log_amplitude: .* now, .* there"),
        ({"kernel": RBF().requires_grad_(False)}, r"\bconfig\.kernel\.start\.log_lengthscale: .* now, .* there"),
        ({"lr": 0.03, "seed": 7}, r"\(config\.lr: 0\.03 now, 0\.01 there; config\.seed: 7 now, 0 there\)"),
    ],
)
def test_a_checkpoint_of_other_options_is_refused_before_the_work(other, named, begun, monkeypatch):
    before = bytes_in(begun)
    monkeypatch.setattr(FMGP, "_fit", lambda *args: pytest.fail("the fit was begun"))
    with pytest.raises(FileError, match=f"another configuration.*{named}"):
        fit(options=other, checkpoint=begun, resume=True)
    assert bytes_in(begun) == before


def nudged(outputs: Outputs, name: str) -> Outputs:
    """One value of one block changed, by the least that it can be."""
    block = getattr(outputs, name).clone()
    value = block[7] if block.ndim == 1 else block[7, 0]
    value.copy_(torch.nextafter(value, torch.tensor(9.0)) if block.is_floating_point() else (value + 1) % 3)
    return replace(outputs, **{name: block})


@pytest.mark.parametrize("which", ["data", "val"])
@pytest.mark.parametrize("block", ["outputs", "targets", "features"])
def test_a_checkpoint_of_other_data_is_refused(which: str, block: str, tmp_path: Path) -> None:
    given = {"data": classes(), "val": classes(12, seed=5)}
    method = FMGP(None, "classification", **{**SMALL, "steps": 4}).fit(**given, checkpoint=tmp_path)
    other = {**given, which: nudged(given[which], block)}
    with pytest.raises(FileError, match=rf"other data.*\b{which}\.sha256: \w+ now, \w+ there"):
        method.fit(**other, checkpoint=tmp_path, resume=True)
    assert method.fit(**given, checkpoint=tmp_path, resume=True).fitted


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (lambda: {"val": classes(12)}, r"val\.features: .* now, None there"),
        (lambda: {"num_data": 99}, "num_data: 99 now, 40"),
    ],
)
def test_a_checkpoint_without_validation_data_or_of_another_size_is_refused(more, named, begun):
    with pytest.raises(FileError, match=named):
        fit(checkpoint=begun, resume=True, **more())


def test_a_checkpoint_of_another_likelihood_or_network_is_refused(tmp_path: Path) -> None:
    def run(model: Any, likelihood: Any, **more: Any) -> FMGP:
        return FMGP(model, likelihood, **{**SMALL, "steps": 4}).fit((inputs(), labels()), checkpoint=tmp_path, **more)

    run(mlp(3), "classification")
    with pytest.raises(FileError, match=r"likelihood\.temperature: 2\.0 now, None there"):
        run(mlp(3), Categorical(temperature=2.0), resume=True)
    with pytest.raises(FileError, match="network: "):
        run(mlp(3, seed=1), "classification", resume=True)
    assert run(mlp(3), "classification", resume=True).fitted


def test_a_folder_with_files_is_refused_without_resume(tmp_path: Path) -> None:
    fit(checkpoint=tmp_path)
    before = bytes_in(tmp_path)
    with pytest.raises(FileError, match=r"empty checkpoint folder.*--resume \(resume=True\)"):
        fit(checkpoint=tmp_path)
    assert bytes_in(tmp_path) == before


DAMAGE: dict[str, Callable[[bytes, Path], bytes]] = {
    "truncated": lambda content, path: content[: len(content) // 2],
    "one bit": lambda content, path: content[:-20] + bytes([content[-20] ^ 1]) + content[-19:],
    "another step": lambda content, path: content.replace(b'\\"step\\": 3', b'\\"step\\": 4'),
    "another format": lambda content, path: saved(fit(), path),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_foreign_checkpoint_is_refused(damage: str, tmp_path: Path) -> None:
    interrupted(tmp_path, after=5)
    path, intact = tmp_path / "checkpoint.safetensors", bytes_in(tmp_path)
    path.write_bytes(DAMAGE[damage](intact, path))
    before = path.read_bytes()
    assert before != intact
    with pytest.raises(FileError, match=f"Expected.*{re.escape(str(path))}"):
        fit(checkpoint=tmp_path, resume=True)
    assert path.read_bytes() == before


def test_a_folder_that_another_run_uses_is_refused(tmp_path: Path) -> None:
    with Checkpoint(tmp_path).claimed(), pytest.raises(FileError, match="only one writing"):
        fit(checkpoint=tmp_path, resume=True)


def fit_a_network(**more: Any) -> None:
    model = mlp(3)
    model.forward = lambda x: pytest.fail("the network was run before the folder was looked at")  # type: ignore[method-assign]
    FMGP(model, "classification", **SMALL).fit((inputs(), labels()), **more)


def test_a_folder_that_cannot_be_used_is_refused_before_the_network_is_run(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    expected = {file: "a folder", file / "inside": "a folder", tmp_path: "an empty checkpoint folder"}
    for folder, message in expected.items():
        with pytest.raises(FileError, match=f"Expected {message}"):
            fit_a_network(checkpoint=folder)
    assert file.read_text() == "mine"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused_before_the_network_is_run(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        for folder in (tmp_path, tmp_path / "new"):
            with pytest.raises(FileError, match="Expected a folder"):
                fit_a_network(checkpoint=folder)
    finally:
        tmp_path.chmod(0o755)


def test_options_that_make_no_sense_are_refused_before_the_network_is_run(tmp_path: Path) -> None:
    for every in (0, -1, 1.5, "all"):
        with pytest.raises(OptionError, match="checkpoint_every to be an integer of at least 1"):
            fit_a_network(checkpoint=tmp_path, checkpoint_every=every)
    with pytest.raises(OptionError, match="resume=True goes on from a checkpoint"):
        fit_a_network(resume=True)


def test_fresh_batches_cannot_be_resumed(tmp_path: Path) -> None:
    method = FMGP(mlp(3), "classification", cache=False, **SMALL)
    with pytest.raises(OptionError, match="cache=True"):
        method.fit((inputs(), labels()), checkpoint=tmp_path)


def test_files_say_nothing_of_place_or_time(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there" / "folder"
    there.parent.mkdir()
    out = there.parent / "out.safetensors"
    assert end_of(start(resume_and_save, "Monte Carlo", there, out)) == 0
    head = saved(fit("Monte Carlo", checkpoint=here, checkpoint_every=EVERY), tmp_path / "head.safetensors")
    assert head == out.read_bytes()
    assert bytes_in(here) == bytes_in(there)
    for word in (str(tmp_path), tmp_path.name, str(Path.home()), socket.gethostname(), sys.executable):
        if len(word) > 4:  # a shorter one may be there by chance
            assert word.encode() not in head + bytes_in(here)


def run_command(monkeypatch: pytest.MonkeyPatch, *args: Any) -> int:
    monkeypatch.setattr(sys, "argv", ["posthoc", *map(str, args)])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


SETTINGS = [part for name, value in SMALL.items() if value for part in ("--set", f"{name}={value}")]


def run_command_and_die(data: Path, folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    die_after(17)
    sys.argv = ["posthoc", *map(str, arguments(data, folder, out))]
    main()


def arguments(data: Path, folder: Path, out: Path) -> list[Any]:
    kept = ["--checkpoint", folder, "--checkpoint-every", 5]
    return ["fit", f"{data}[:30]", "--val", f"{data}[30:]", "--task", "classification", "-o", out, *SETTINGS, *kept]


def test_command_goes_on_after_it_was_killed(tmp_path, monkeypatch, capsys):
    data, folder, out = tmp_path / "data.npz", tmp_path / "folder", tmp_path / "out.safetensors"
    save_outputs(classes(), data)
    assert end_of(start(run_command_and_die, data, folder, out)) == -signal.SIGKILL
    assert step_in(folder) == 15
    assert not out.exists()
    again = arguments(data, folder, out)
    refused = {(): "go on from there with --resume", ("--resume", "--seed", 3): "config.seed: 3 now, 0 there"}
    for more, message in refused.items():
        assert run_command(monkeypatch, *again, *more) == 1
        assert message in capsys.readouterr().err
    assert not out.exists()
    assert run_command(monkeypatch, *again, "--resume") == 0
    expected = tmp_path / "expected.safetensors"
    assert run_command(monkeypatch, *arguments(data, tmp_path / "another folder", expected)) == 0
    assert out.read_bytes() == expected.read_bytes()
