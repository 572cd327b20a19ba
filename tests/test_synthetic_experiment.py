"""The runner of experiments, and Figure 1 with quick options."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from posthoc import FMGP, RBF
from posthoc.cli.reproduce import reproduce as command
from posthoc.data.synthetic import heteroscedastic
from posthoc.errors import FileError, MissingExtraError, OptionError
from posthoc.experiments import EXPERIMENTS, experiment_named, synthetic
from posthoc.experiments.runner import Run, run_once
from posthoc.methods import GP
from posthoc.report.panels import Panel, panel_figure

RUN = Run("toy", "fmgp", 3, {"steps": 5, "span": (0, 1)})


def refuse():
    pytest.fail("the work was done again")


# The runner.


def test_a_run_is_made_once(tmp_path):
    first = run_once(RUN, tmp_path, lambda: {"metrics": {"nll": 0.25}, "times": {"fit_s": 1.0}})
    written = json.loads((tmp_path / "toy" / "fmgp-3.json").read_text())
    assert written == first == run_once(RUN, tmp_path, refuse)
    assert written["metrics"] == {"nll": 0.25}
    assert (written["method"], written["seed"], written["configuration"]) == ("fmgp", 3, {"steps": 5, "span": [0, 1]})
    assert written["versions"]["torch"] == metadata.version("torch")
    assert written["machine"]["cores"] >= 1


def test_a_result_of_another_configuration_is_not_taken_for_it(tmp_path):
    run_once(RUN, tmp_path, lambda: {"metrics": 1})
    other = Run("toy", "fmgp", 3, {"steps": 6})
    with pytest.raises(FileError, match=r"another configuration.*--force"):
        run_once(other, tmp_path, refuse)
    assert run_once(other, tmp_path, lambda: {"metrics": 2}, force=True)["metrics"] == 2
    assert run_once(other, tmp_path, refuse)["metrics"] == 2


def test_a_failed_run_leaves_nothing_and_a_foreign_file_is_refused(tmp_path):
    with pytest.raises(ZeroDivisionError):
        run_once(RUN, tmp_path, lambda: {"metrics": 1 / 0})
    assert not list(tmp_path.rglob("*.json"))
    RUN.path(tmp_path).write_text("[]")
    with pytest.raises(FileError, match="something else"):
        run_once(RUN, tmp_path, refuse)


# The figure.


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two panels, and training of a few steps."""
    monkeypatch.delenv("POSTHOC_DATA", raising=False)
    monkeypatch.setattr(synthetic, "STEPS", 30)
    options = {"kernel": {"type": "rbf", "on": "inputs"}, "num_inducing": 5, "steps": 10}
    variants = {
        "fmgp": synthetic.Variant("FMGP", FMGP, options),
        "gp": synthetic.Variant("GP", GP, {"mean": "network", "steps": 3}),
    }
    monkeypatch.setattr(synthetic, "VARIANTS", variants)


def test_the_figure_and_its_results(quick, tmp_path, monkeypatch):
    results = synthetic.reproduce(tmp_path, seeds=[1])
    folder = tmp_path / "synthetic"
    names = {"fmgp-1.json", "gp-1.json", "figure1-1.png", "figure1-1.pdf"}
    assert {path.name for path in folder.iterdir()} == names
    assert (folder / "figure1-1.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "figure1-1.pdf").read_bytes().startswith(b"%PDF")
    # The same by hand.
    generator = torch.Generator().manual_seed(1)
    train, test = heteroscedastic(400, generator), heteroscedastic(2000, generator)
    model = synthetic.train_network(*train, 1)
    method = FMGP(model, "regression", kernel=RBF(on="inputs"), num_inducing=5, steps=10, seed=1).fit(train)
    found = next(r for r in results if r["method"] == "fmgp")
    pred = method.predict(torch.tensor(found["curve"]["x"])[:, None])
    np.testing.assert_allclose(found["curve"]["mean"], pred.mean.squeeze(1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["curve"]["std"], pred.std.squeeze(1), rtol=1e-5)
    nll = -float(method.predict(test[0]).log_prob(test[1]).mean())
    assert found["metrics"]["test"]["nll"] == pytest.approx(nll, rel=1e-5)
    assert found["times"]["fit_s"] > 0
    # And nothing is done twice: not even the network is trained.
    monkeypatch.setattr(synthetic, "train_network", lambda *a: refuse())
    assert synthetic.reproduce(tmp_path, seeds=[1]) == results


def test_the_papers_points_come_from_a_folder(quick, tmp_path, monkeypatch):
    rows = np.random.default_rng(0).normal(size=(30, 2))
    (tmp_path / "synthetic").mkdir()
    np.save(tmp_path / "synthetic" / "synthetic_data.npy", rows)
    x, y = synthetic.load_points(tmp_path, 0).train
    np.testing.assert_allclose(torch.cat([x, y], 1), rows, rtol=1e-6)
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


def test_what_is_not_known_or_not_there_is_said_before_the_work(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "train_network", lambda *a: refuse())
    with pytest.raises(OptionError, match="among fmgp, gp, got sgd"):
        synthetic.reproduce(tmp_path, methods=["sgd"])
    monkeypatch.setitem(sys.modules, "gpytorch", None)
    with pytest.raises(MissingExtraError, match="gp"):
        synthetic.reproduce(tmp_path)
    assert experiment_named("synthetic") is EXPERIMENTS["synthetic"]
    with pytest.raises(OptionError, match="synthetic"):
        experiment_named("figure1")


@pytest.mark.parametrize("name", ["lla", "fmgp", "mfvi", "gp-zero", "gp", "hmc"])
def test_the_six_panels_of_the_paper(name):
    """Their options are ones that the methods know."""
    if name == "lla":
        pytest.importorskip("laplace")
    variant = synthetic.VARIANTS[name]
    assert json.loads(json.dumps(variant.options)) == variant.options
    assert variant.build(synthetic.untrained(0), 4).likelihood.task == "regression"


def test_panels(tmp_path):
    x = [0.0, 1.0, 2.0]
    data = (torch.tensor([[0.0], [2.0]]), torch.tensor([[0.0], [1.0]]))
    panels = [Panel(str(i), x, [0.0, 0.5, 1.0], [0.1, 5.0, 0.1]) for i in range(2)]
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        panel_figure([tmp_path / folder / "f.png", tmp_path / folder / "f.pdf"], panels, data)
    for name in ("f.png", "f.pdf"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_command(quick, tmp_path):
    app = typer.Typer()
    app.command()(command)
    asked = ["synthetic", "--methods", "gp", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "gp, seed 0: NLL" in done.output
    assert str(Path("synthetic", "figure1-0.png")) in done.output.replace("\n", "")
    assert "crps" in done.output
    assert (tmp_path / "synthetic" / "gp-0.json").exists()
    assert isinstance(CliRunner().invoke(app, ["nothing"]).exception, OptionError)
