"""The command line as a newcomer meets it."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import posthoc
from posthoc import __version__
from posthoc.cli import app, main
from posthoc.cli.demo_data import SPANS, heteroscedastic, noise_std

PNG = b"\x89PNG\r\n"


def test_demo_prints_a_table_and_draws_the_figure(tmp_path):
    out = tmp_path / "figure.png"
    result = CliRunner().invoke(app, ["demo", "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0
    lines = [line.split("│") for line in result.stdout.splitlines() if "network +" in line]
    rows = {cells[1].strip(): cells[2:7] for cells in lines}
    bare, ours = ([float(v.strip(" %")) for v in rows[f"network + {name}"]] for name in ("constant noise", "FMGP"))
    assert all(mine < theirs for mine, theirs in zip(ours[:3], bare[:3], strict=True))  # NLL, CRPS, CQM
    assert abs(ours[3] - 50) < 8
    assert abs(ours[4] - 95) < 4
    assert out.read_bytes().startswith(PNG)
    assert out.stat().st_size > 20_000
    assert os.listdir(tmp_path) == ["figure.png"]


def test_demo_data_have_gaps_and_sinusoidal_noise():
    x, y = heteroscedastic(20_000, torch.Generator().manual_seed(0))
    inside = torch.zeros_like(x, dtype=torch.bool)
    for start, end in SPANS:
        inside |= (x >= start) & (x <= end)
    assert inside.all()
    spread = noise_std(torch.linspace(-7, 7, 100))
    assert spread.max() > 5 * spread.min()
    assert y.isfinite().all()


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.stdout.strip() == f"posthoc {__version__}"


def test_known_errors_are_one_line_without_a_traceback(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["posthoc", "demo", "--out", str(tmp_path / "no" / "such" / "folder.png")])
    monkeypatch.setattr(
        "reproduction.experiments.synthetic.train_network", lambda *a: pytest.fail("work was done before the check")
    )
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("posthoc: Expected a folder to write folder.png into")
    assert "Traceback" not in error


def test_a_missing_extra_says_what_to_install(monkeypatch, capsys):
    real = builtins.__import__

    def without_matplotlib(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    monkeypatch.setattr(sys, "argv", ["posthoc", "demo"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    assert "pip install 'posthoc[plots]'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["-c", "import posthoc; dir(posthoc)"], ["-m", "posthoc", "--help"]])
def test_the_package_and_the_help_import_nothing_heavy(arguments):
    done = subprocess.run([sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "posthoc" in imported
    assert not imported & {"torch", "numpy", "scipy", "pandas", "matplotlib", "safetensors"}


def test_every_public_name_is_found_and_typed():
    names = {name: getattr(posthoc, name) for name in posthoc.__all__}
    stub: dict[str, object] = {}
    exec((Path(posthoc.__file__).parent / "__init__.pyi").read_text(), stub)
    assert set(stub["__all__"]) == set(names) <= set(dir(posthoc))
    assert all(stub[name] is value for name, value in names.items() if name != "__version__")
    assert all(getattr(posthoc, name) is stub[name] for name in posthoc.SUBMODULES)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = posthoc.absent
