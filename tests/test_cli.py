"""The command line as a newcomer meets it."""

from __future__ import annotations

import errno
import logging
import os
import re
import runpy
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import posthoc
from posthoc import DataError, PosthocWarning, __version__
from posthoc.cli import app, main
from posthoc.io import atomic_path


def run_main(monkeypatch: pytest.MonkeyPatch, command: Callable[[], None] = main, *arguments: str) -> int:
    """The exit code of a command line."""
    monkeypatch.setattr(sys, "argv", ["posthoc", *arguments])
    with pytest.raises(SystemExit) as stop:
        command()
    return int(stop.value.code or 0)


def run_function(monkeypatch: pytest.MonkeyPatch, function: Callable[[], None]) -> int:
    """The exit code of a command line that calls the function."""
    app = typer.Typer()
    app.command()(function)
    return run_main(monkeypatch, partial(main, app))


def test_demo_prints_a_table_and_draws_the_figure(tmp_path):
    out = tmp_path / "figure.png"
    result = CliRunner().invoke(app, ["demo", "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0
    table = [re.split("[│┃]", line)[2:-1] for line in result.stdout.splitlines() if line[:1] in "│┃"]
    names, bare, ours = ([cell.strip(" ↓¹²") for cell in row] for row in table)
    bare, ours = (dict(zip(names, map(float, row), strict=True)) for row in (bare, ours))
    assert all(ours[name] < bare[name] for name in ("NLL", "CRPS", "CQM"))
    assert ours["RMSE"] == bare["RMSE"]
    assert out.read_bytes().startswith(b"\x89PNG\r\n")
    assert os.listdir(tmp_path) == ["figure.png"]
    assert CliRunner().invoke(app, ["--version"]).stdout.strip() == f"posthoc {__version__}"


def test_known_errors_are_one_line_without_a_traceback(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("posthoc.cli.demo_data.train_network", lambda *a: pytest.fail("work was done before the check"))
    assert run_main(monkeypatch, main, "demo", "--out", str(tmp_path / "no" / "such" / "folder.png")) == 1
    error = capsys.readouterr().err
    assert re.fullmatch("posthoc: Expected a folder to write folder.png into.*\n", error)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run_main(monkeypatch, main, "demo") == 1
    assert "pip install 'posthoc[plots]'" in capsys.readouterr().err


def test_errors_name_the_file_of_a_full_disk_and_have_no_control_characters(tmp_path, monkeypatch, capsys):
    def write() -> None:
        with atomic_path(tmp_path / "table.csv"):
            raise OSError(errno.ENOSPC, "No space left on device")

    assert run_function(monkeypatch, write) == 1
    assert capsys.readouterr().err == f"posthoc: No space left on device: {tmp_path / 'table.csv'}\n"
    assert os.listdir(tmp_path) == []

    def fails() -> None:
        raise DataError("Expected a name, got \x1b[31mred\u202e.")

    assert run_function(monkeypatch, fails) == 1
    assert capsys.readouterr().err == "posthoc: Expected a name, got \\x1b[31mred\\u202e.\n"


def test_log_messages_are_lines_on_stderr_and_nothing_stays(monkeypatch, capsys):
    def works() -> None:
        logging.getLogger("posthoc").info("fitting 10/20")
        warnings.warn("few rows", PosthocWarning, stacklevel=1)

    def state():
        return signal.getsignal(signal.SIGTERM), warnings.showwarning, list(logging.getLogger("posthoc").handlers)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        before = state()
        assert run_function(monkeypatch, works) == 0
        assert state() == before
    assert capsys.readouterr().err == "posthoc: fitting 10/20\nposthoc: few rows\n"


def test_sigterm_removes_temporary_files(tmp_path):
    code = f"""
import time, typer
from posthoc.cli import main
from posthoc.io import atomic_path

def write() -> None:
    with atomic_path({str(tmp_path / "table.csv")!r}) as temporary:
        temporary.touch()
        print("ready", flush=True)
        time.sleep(600)

app = typer.Typer()
app.command()(write)
main(app)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert len(os.listdir(tmp_path)) == 1
        process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("arguments", [["-c", "import posthoc; dir(posthoc)"], ["-m", "posthoc", "--help"]])
def test_the_package_and_the_help_import_nothing_heavy(arguments):
    done = subprocess.run([sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "posthoc" in imported
    assert not imported & {"torch", "numpy", "scipy", "pandas", "matplotlib", "safetensors"}


def test_every_public_name_is_found_and_typed():
    names = {name: getattr(posthoc, name) for name in posthoc.__all__}
    stub = runpy.run_path(str(Path(posthoc.__file__).with_suffix(".pyi")))
    assert set(stub["__all__"]) == set(names) <= set(dir(posthoc))
    assert all(stub[name] is value for name, value in names.items() if name != "__version__")
    assert posthoc.methods is stub["methods"]
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = posthoc.absent
