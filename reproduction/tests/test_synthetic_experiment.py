"""Figure 1 with quick options, and the command that draws it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from posthoc import FMGP, RBF
from posthoc.cli.demo_data import heteroscedastic, untrained
from posthoc.errors import FileError, OptionError
from reproduction.__main__ import reproduce as command
from reproduction.experiments import EXPERIMENTS, Request, synthetic
from reproduction.figures import band_figure


@pytest.fixture(autouse=True)
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTHOC_DATA", raising=False)


@pytest.mark.filterwarnings("ignore:.*the network's mean is off")
def test_the_figure_and_its_results(tmp_path, monkeypatch):
    request = Request(out=tmp_path, seeds=(1,), methods=("fmgp", "gp"), quick=True)
    documents = synthetic.Synthetic().reproduce(request)
    folder = tmp_path / "synthetic"
    names = {"fmgp-1.json", "gp-1.json", "figure1-1.png", "figure1-1.pdf", "table.md", "table.csv", "table.tex"}
    assert {path.name for path in folder.iterdir()} == names
    assert (folder / "figure1-1.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "figure1-1.pdf").read_bytes().startswith(b"%PDF")
    # The same by hand.
    generator = torch.Generator().manual_seed(1)
    train, test = heteroscedastic(400, generator), heteroscedastic(2000, generator)
    model = synthetic.train_network(*train, 1, steps=synthetic.QUICK_STEPS)
    options = {"num_inducing": 20, "steps": 3, "batch_size": 20}
    method = FMGP(model, "regression", kernel=RBF(on="inputs"), **options, seed=1).fit(train)
    (found,) = (d for d in documents if d["method"] == "fmgp")
    band = found["curves"]["band"]
    pred = method.predict(torch.tensor(band["x"])[:, None])
    np.testing.assert_allclose(band["mean"], pred.mean.squeeze(1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(band["low"], (pred.mean - 2 * pred.std).squeeze(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(band["high"], (pred.mean + 2 * pred.std).squeeze(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(band["points"], torch.cat(train, 1), rtol=1e-6)
    nll = -float(method.predict(test[0]).log_prob(test[1]).mean())
    assert found["metrics"]["nll"] == pytest.approx(nll, rel=1e-5)
    assert found["configuration"]["data"]["test"] == "2,000 more of them"
    # And nothing is done twice: not even the network is trained.
    monkeypatch.setattr(synthetic, "train_network", lambda *a, **k: pytest.fail("trained again"))
    assert synthetic.Synthetic().reproduce(request) == documents


def test_the_papers_points_come_from_a_folder(tmp_path, monkeypatch):
    rows = np.random.default_rng(0).normal(size=(30, 2))
    (tmp_path / "synthetic").mkdir()
    np.save(tmp_path / "synthetic" / "synthetic_data.npy", rows)
    data = synthetic.load_points(tmp_path, 0)
    x, _ = data.train
    np.testing.assert_allclose(torch.cat(data.train, 1), rows, rtol=1e-6)
    assert data.test_source == "the points of the fit"
    monkeypatch.setenv("POSTHOC_DATA", str(tmp_path))
    assert torch.equal(synthetic.load_points(None, 5).train[0], x)
    monkeypatch.setenv("POSTHOC_DATA", str(tmp_path / "elsewhere"))
    assert len(synthetic.load_points(None, 5).train[0]) == 400
    with pytest.raises(FileError, match="--data-dir"):
        synthetic.load_points(tmp_path / "elsewhere", 0)
    np.save(tmp_path / "synthetic" / "synthetic_data.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(FileError, match="something else"):
        synthetic.load_points(tmp_path, 0)
    np.save(tmp_path / "synthetic" / "synthetic_data.npy", rows.T)
    with pytest.raises(FileError, match=r"\(N, 2\)"):
        synthetic.load_points(tmp_path, 0)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", ["lla", "fmgp", "mfvi", "gp-zero", "gp", "hmc"])
def test_the_six_panels_of_the_paper(name, quick):
    """Their options are ones that the methods know."""
    if name == "lla":
        pytest.importorskip("laplace")
    variant = synthetic.VARIANTS[name]
    assert json.loads(json.dumps(variant.describe(quick))) == variant.describe(quick)
    built = variant.build(untrained(0), "regression", seed=4, device="cpu", quick=quick)
    assert built.likelihood.task == "regression"


def test_panels(tmp_path):
    x = [0.0, 1.0, 2.0]
    band = {"mean": [0.0, 0.5, 1.0], "low": [-0.1, -5.0, 0.9], "high": [0.1, 5.5, 1.1], "points": [[0, 0], [2, 1]]}
    runs = [{"title": str(i), "curves": {"band": {"x": x, **band}}} for i in range(2)]
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        band_figure(tmp_path / folder / "f", runs)
    for name in ("f.png", "f.pdf"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_command(tmp_path):
    app = typer.Typer()
    app.command()(command)
    asked = [
        "synthetic",
        "--methods",
        "gp, fmgp",
        "--quick",
        "--seeds",
        "2",
        "--first-seed",
        "3",
        "--out",
        str(tmp_path),
    ]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "gp, seed 4: nll" in done.output
    assert str(Path("synthetic", "figure1-3.png")) in done.output.replace("\n", "")
    assert "| FMGP |" in done.output
    assert {path.name for path in (tmp_path / "synthetic").glob("*.json")} == {
        f"{method}-{seed}.json" for method in ("fmgp", "gp") for seed in (3, 4)
    }
    assert isinstance(CliRunner().invoke(app, ["nothing"]).exception, OptionError)
    listed = CliRunner().invoke(app, ["list"])
    assert all(name in listed.output for name in EXPERIMENTS)
