"""The runner, and a tiny suite of the experiments: every method of each, on a few rows for a few steps."""

from __future__ import annotations

import json
import math
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from posthoc import FMGP, MAP, RBF, Outputs, Temperature
from posthoc.errors import (
    FileError,
    MissingExtraError,
    OptionError,
    PosthocError,
    PosthocWarning,
)
from reproduction.data import Dataset
from reproduction.data.files import UnavailableError
from reproduction.data.images import CIFAR10_CLASSES
from reproduction.experiments import EXPERIMENTS, Request, cifar_networks, experiment_named, regression
from reproduction.experiments.ablations import decomposition
from reproduction.experiments.cifar_networks import CifarResNet, pretrained
from reproduction.experiments.experiment import Experiment, Run, load_or_run
from reproduction.experiments.variants import FitData, Variant, cached_fit

RUN = Run("toy", "", "fmgp", 3, "regression", {"steps": 5, "span": (0, 1)})


def refuse() -> Any:
    pytest.fail("the work was done again")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTHOC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("POSTHOC_DATA", raising=False)


# The runner.


def test_a_run_is_made_once(tmp_path):
    first = load_or_run(
        RUN, tmp_path, lambda: {"metrics": {"nll": 0.25}, "times": {"fit_seconds": 1.0}, "data": {"test": "toys"}}
    )
    written = json.loads((tmp_path / "toy" / "fmgp-3.json").read_text())
    assert written == first == load_or_run(RUN, tmp_path, refuse)
    assert written["metrics"] == {"nll": 0.25}
    assert written["problem"] is None
    assert written["configuration"] == {"steps": 5, "span": [0, 1], "data": {"test": "toys"}}
    assert (written["method"], written["seed"], written["task"]) == ("fmgp", 3, "regression")
    assert written["versions"]["torch"] == metadata.version("torch")
    assert written["machine"]["cores"] >= 1


def test_a_result_of_another_configuration_or_version_is_not_taken_for_it(tmp_path):
    load_or_run(RUN, tmp_path, lambda: {"metrics": {"nll": 1.0}})
    other = Run("toy", "", "fmgp", 3, "regression", {"steps": 6, "span": (0, 1)})
    with pytest.raises(FileError, match=r"another configuration.*\(steps\).*--force"):
        load_or_run(other, tmp_path, refuse)
    assert load_or_run(other, tmp_path, lambda: {"metrics": {"nll": 2.0}}, force=True)["metrics"] == {"nll": 2.0}
    assert load_or_run(other, tmp_path, refuse)["metrics"] == {"nll": 2.0}
    path = other.path(tmp_path)
    document = json.loads(path.read_text())
    document["versions"]["posthoc"] = "0.0.1"
    path.write_text(json.dumps(document))
    with pytest.raises(FileError, match=r"found one of 0\.0\.1"):
        load_or_run(other, tmp_path, refuse)


def test_a_failed_run_leaves_nothing_and_a_foreign_file_is_refused(tmp_path):
    with pytest.raises(ZeroDivisionError):
        load_or_run(RUN, tmp_path, lambda: {"metrics": {"nll": 1 / 0}})
    assert not list(tmp_path.rglob("*.json"))
    for text in ("[]", "{", "{}"):
        RUN.path(tmp_path).write_text(text)
        with pytest.raises(FileError, match="something else"):
            load_or_run(RUN, tmp_path, refuse)


def test_a_run_without_numbers_is_kept_and_marked(tmp_path):
    found = load_or_run(
        RUN, tmp_path, lambda: {"metrics": {"nll": math.nan, "rmse": 1.0}, "curves": {"a": [math.inf, 2]}}
    )
    assert found["problem"] == "not a finite number: nll"
    assert found["metrics"] == {"nll": None, "rmse": 1.0}
    assert found["curves"] == {"a": [None, 2]}
    assert json.loads(RUN.path(tmp_path).read_text()) == found


class Toy(Experiment):
    """Three methods, of which one fails and one makes no sense."""

    name, title, task = "toy", "Toys", "regression"
    methods = {name: SimpleNamespace(title=name.upper()) for name in ("good", "bad", "worse")}  # noqa: RUF012
    cases = ("a", "b")
    prepared = 0

    def configuration(self, case: str, method: str, request: Request) -> dict[str, Any]:
        return {"steps": 1}

    def prepare(self, case: str, seed: int, request: Request) -> str:
        self.prepared += 1
        return case

    def run(self, prepared: Any, case: str, method: str, seed: int, request: Request) -> dict[str, Any]:
        assert prepared == case
        if method == "bad":
            raise FileError("Expected better, found this.")
        import warnings

        warnings.warn("beware", PosthocWarning, stacklevel=2)
        return {"metrics": {"nll": float(seed) if method == "good" else math.nan}, "times": {}, "curves": {}}


def test_an_experiment_makes_all_its_runs_though_some_fail(tmp_path):
    told: list[str] = []
    toy = Toy()
    request = Request(out=tmp_path, seeds=(0, 1), log=told.append)
    with pytest.raises(PosthocError, match=r"4 of 12 runs failed.*a, bad, seed 0: FileError: Expected better"):
        toy.reproduce(request)
    runs = {path.name for path in (tmp_path / "toy").glob("*.json")}
    assert runs == {f"{case}-{method}-{seed}.json" for case in "ab" for method in ("good", "worse") for seed in (0, 1)}
    assert toy.prepared == 4  # once for a case and a seed
    table = (tmp_path / "toy" / "table.md").read_text()
    assert "0.5000 ± 0.5000" in table  # of seeds 0 and 1
    assert "not a finite number" in table
    document = json.loads((tmp_path / "toy" / "a-good-1.json").read_text())
    assert document["warnings"] == ["beware"]
    assert document["title"] == "GOOD"
    assert sum("not a finite number" in line for line in told) == 4
    # Finished runs are not made again: nothing is even made ready.
    again = Toy()
    documents = again.reproduce(Request(out=tmp_path, seeds=(0, 1), methods=("good",), cases=("b",)))
    assert again.prepared == 0
    assert [document["metrics"]["nll"] for document in documents] == [0.0, 1.0]


class Elsewhere(Toy):
    """One of whose cases cannot be had."""

    def prepare(self, case: str, seed: int, request: Request) -> str:
        super().prepare(case, seed, request)
        if case == "a":
            error = UnavailableError("Expected the file a, found no network.")
            error.add_note("posthoc: put it into a folder.")
            raise error
        return case


def test_a_case_that_cannot_be_had_is_left_out_unless_it_was_asked_for(tmp_path):
    told: list[str] = []
    toy = Elsewhere()
    request = Request(out=tmp_path, seeds=(0, 1), methods=("good", "worse"), log=told.append)
    assert [(d["case"], d["method"]) for d in toy.reproduce(request)] == 2 * [("b", "good"), ("b", "worse")]
    assert told[-1] == (
        "left out: a, whose data are unavailable: Expected the file a, found no network. posthoc: put it into a folder."
    )
    assert toy.prepared == 3  # a is not asked for again
    with pytest.raises(UnavailableError, match="the file a"):
        Elsewhere().reproduce(Request(out=tmp_path, cases=("a",), methods=("good",)))
    with pytest.raises(PosthocError, match=r"1 of 2 runs failed.*a, good, seed 0: Expected the file a"):
        Elsewhere().reproduce(Request(out=tmp_path, cases=("a", "b"), methods=("good",)))


def test_what_is_not_known_is_said_with_what_is(tmp_path):
    with pytest.raises(OptionError, match="methods among good, bad, worse, got sgd"):
        Toy().reproduce(Request(out=tmp_path, methods=("sgd",)))
    with pytest.raises(OptionError, match="cases among a, b, got c"):
        Toy().reproduce(Request(out=tmp_path, cases=("c",)))
    with pytest.raises(OptionError, match="synthetic, regression, cifar10"):
        experiment_named("figure1")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_its_name_and_options_that_its_methods_know(name):
    experiment = experiment_named(name)
    assert experiment.name == name
    request, network = Request(), torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout())
    for case in experiment.cases:
        for method in experiment.methods_of(case):
            configuration = experiment.configuration(case, method, request)
            assert json.loads(json.dumps(configuration)) == json.loads(json.dumps(configuration))
            variant = experiment.methods[method]
            assert variant.title
            for quick in (False, True):
                assert not variant.build(network, experiment.task, seed=0, device="cpu", quick=quick).fitted


# Fits that are kept.


def test_a_fit_is_kept_by_its_recipe(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    data = Outputs(3.0 * torch.randn(50, 3, generator=generator), torch.randint(3, (50,), generator=generator))
    variant = Variant("T", Temperature, on="here")
    make = lambda: variant.build(None, "classification", seed=0, device="cpu")  # noqa: E731
    first, times = cached_fit(make, lambda: FitData(data, collect_seconds=2.0), {"a": 1}, None)
    assert times["fit_seconds_with_network"] == times["fit_seconds"] + 2.0
    second, again = cached_fit(make, refuse, {"a": 1}, None)
    assert again == times
    assert torch.equal(first.predict(data).probs, second.predict(data).probs)
    with pytest.raises(pytest.fail.Exception):
        cached_fit(make, refuse, {"a": 2}, None)


# The experiments, on next to nothing.


def small_table(rows: int = 120) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 3, generator=generator)
    y = x[:, 0] + 0.3 * (1 + x[:, 1].abs()) * torch.randn(rows, generator=generator)
    return Dataset("Small", "a small table", x, y)


@pytest.mark.parametrize(("name", "count"), [("regression", 7), ("ablation-alpha", 5), ("ablation-inducing", 4)])
def test_tables(name, count, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(regression, "load", lambda what, folder: asked.append((what, folder)) or small_table())
    request = Request(out=tmp_path, seeds=(0, 1), cases=("airline",), data_dir=Path("data"), quick=True)
    documents = experiment_named(name).reproduce(request)
    assert len(documents) == 2 * count
    assert asked == [("airline", Path("data"))] * 2
    for document in documents:
        assert document["problem"] is None
        assert document["configuration"]["data"]["test"] == "a small table; rows shuffled"
        assert {"nll", "rmse", "crps", "cqm", "coverage_90"} <= document["metrics"].keys()
        assert {"calibration", "error_bars", "risk_coverage"} == document["curves"].keys()
        assert document["times"]["fit_seconds"] > 0
    # The network's mean stays, so all errors of a seed are the same, but for MFVI's draws.
    errors = {d["metrics"]["rmse"] for d in documents if d["seed"] == 0 and d["method"] != "mfvi"}
    assert max(errors) == pytest.approx(min(errors), rel=1e-5)
    assert {path.suffix for path in (tmp_path / name).iterdir()} == {".json", ".md", ".csv", ".tex", ".png", ".pdf"}


def test_the_decomposition_of_a_variance():
    x = torch.linspace(-1, 1, 40)[:, None]
    y = x.sin() + 0.1 * torch.randn(40, 1, generator=torch.Generator().manual_seed(0))
    method = FMGP(
        torch.nn.Linear(1, 1), "regression", kernel=RBF(on="inputs"), residuals="gaussian", num_inducing=10, steps=20
    ).fit((x, y))
    found = decomposition(method, x)
    pred, unit = method.predict(x), float(method.likelihood.scale.square())
    prior = found["amplitude"] * unit
    assert found["posterior_percent"] == pytest.approx(100 * float(pred.latent_variance.mean()) / prior, rel=1e-4)
    assert found["posterior_percent"] + found["correction_percent"] == pytest.approx(100)
    assert found["noise"] * unit == pytest.approx(float(pred.noise[0]), rel=1e-4)


@pytest.fixture
def cifar(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few random images, and networks that know nothing."""

    def images(folder: Any, part: str) -> Dataset:
        generator = torch.Generator().manual_seed(len(part))
        pixels = torch.randint(256, (16, 3, 32, 32), dtype=torch.uint8, generator=generator)
        return Dataset("CIFAR-10", f"random pixels, {part}", pixels, torch.arange(16) % 10)

    def network(depth: int, folder: Any) -> CifarResNet:
        torch.manual_seed(depth)
        return CifarResNet(20).eval()

    monkeypatch.setattr(cifar_networks, "cifar10", images)
    monkeypatch.setattr(cifar_networks, "svhn", images)
    monkeypatch.setattr(cifar_networks, "pretrained", network)


def test_cifar10(cifar, tmp_path):
    request = Request(out=tmp_path, cases=("resnet20", "resnet20-half"), quick=True)
    documents = {(d["case"], d["method"]): d for d in experiment_named("cifar10").reproduce(request)}
    experiment = experiment_named("cifar10")
    assert [method for case, method in documents if case == "resnet20"] == list(experiment.methods)
    assert [method for case, method in documents if case == "resnet20-half"] == ["map", "temperature", "fmgp"]
    for (case, method), document in documents.items():
        assert {"nll", "accuracy", "ece", "brier", "ood_auc"} <= document["metrics"].keys(), method
        assert {"reliability", "entropy", "risk_coverage"} == document["curves"].keys()
        assert "out" in document["curves"]["entropy"]
        assert document["configuration"]["data"]["ood"] == "random pixels, test"
        assert len(document["examples"]["most_certain"]) == 8
        half = case.endswith("-half")
        assert ("second half" in document["configuration"]["data"]["test"]) == half
        assert half or document["times"]["predict_seconds_with_network"] > 0
    # By hand: the bare network.
    cifar = cifar_networks.Cifar(request)
    outputs = cifar.outputs(20, "test").outputs
    bare = -outputs.outputs.log_softmax(-1)[torch.arange(16), outputs.targets].mean()
    assert documents["resnet20", "map"]["metrics"]["nll"] == pytest.approx(float(bare), rel=1e-5)
    probs = outputs.outputs.softmax(-1)
    order = torch.special.entr(probs).sum(-1).argsort().tolist()
    shown = documents["resnet20", "map"]["examples"]
    assert [example["row"] for example in shown["most_certain"]] == order[:8]
    assert [example["row"] for example in shown["least_certain"]] == order[:-9:-1]
    assert shown["most_certain"][0]["said"] == CIFAR10_CLASSES[int(probs[order[0]].argmax())]
    assert shown["most_certain"][0]["target"] == CIFAR10_CLASSES[int(outputs.targets[order[0]])]
    assert shown["most_certain"][0]["probability"] == pytest.approx(float(probs[order[0]].max()), rel=1e-5)
    later = -outputs.outputs.log_softmax(-1)[torch.arange(8, 16), outputs.targets[8:]].mean()
    assert documents["resnet20-half", "map"]["metrics"]["nll"] == pytest.approx(float(later), rel=1e-5)
    with torch.no_grad():
        whole = cifar.network(20)(cifar.rows("test")[0])
    torch.testing.assert_close(outputs.outputs, whole)


@pytest.mark.parametrize("name", ["cifar10-ood", "cifar10-rotations", "cifar10-corruptions"])
def test_cifar10_elsewhere_rotated_and_corrupted(name, cifar, tmp_path):
    methods = ("map", "temperature", "sngp", "fmgp")
    request = Request(out=tmp_path, cases=("resnet56",), methods=methods, quick=True)
    documents = {d["method"]: d for d in experiment_named(name).reproduce(request)}
    assert tuple(documents) == methods
    assert {"figure.png", "figure.pdf", "table.tex"} <= {path.name for path in (tmp_path / name).iterdir()}
    for document in documents.values():
        if name == "cifar10-ood":
            assert sum(document["curves"]["entropy"]["out"]) == pytest.approx(1)
            continue
        (line,) = document["curves"]["lines"].values()
        assert len(line["x"]) == len(line["nll"]) == len(line["ece"]) >= 3
        assert document["metrics"]["nll"] == pytest.approx(sum(line["nll"]) / len(line["nll"]))
        assert "the first 16 images" in document["configuration"]["data"]["test"]
    if name == "cifar10-rotations":  # by no angle, they are the test images
        data = cifar_networks.Cifar(request).outputs(56, "test").outputs
        bare = MAP(None, "classification").fit(data).predict(data)
        assert documents["map"]["curves"]["lines"]["rotation"]["nll"][0] == pytest.approx(
            -float(bare.log_prob(data.targets).mean()), rel=1e-4
        )


def test_weights_come_from_a_folder_and_must_fit(tmp_path):
    (tmp_path / "weights").mkdir()
    network = CifarResNet(20)
    torch.save(network.state_dict(), tmp_path / "weights" / "cifar10_resnet20.pt")
    found = pretrained(20, tmp_path)
    assert torch.equal(found.conv1.weight, network.conv1.weight)
    assert not found.training
    torch.save(CifarResNet(32).state_dict(), tmp_path / "weights" / "cifar10_resnet20.pt")
    with pytest.raises(FileError, match="weights of a ResNet20"):
        pretrained(20, tmp_path)
    with pytest.raises(OptionError, match="20, 32, 44, 56"):
        pretrained(18, tmp_path)


def test_molecules(tmp_path, monkeypatch):
    pytest.importorskip("torch_geometric", reason="torch-geometric is not installed (extra reproduction)")
    from reproduction.experiments import qm9
    from reproduction.tests.test_molecule_network import some

    monkeypatch.setattr(qm9, "qm9", lambda folder: some(70))
    documents = qm9.QM9().reproduce(Request(out=tmp_path, quick=True))
    assert [document["method"] for document in documents] == ["map", "lla-kfac", "ella", "fmgp-paper", "fmgp"]
    assert documents[0]["diagnostics"]["rows"] == {"train": 40, "val": 10, "test": 20}
    assert len({round(document["metrics"]["rmse"], 5) for document in documents}) == 1  # the mean stays
    assert "made here" in documents[0]["configuration"]["data"]["test"]


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "reproduction.experiments.qm9", raising=False)
    monkeypatch.setitem(sys.modules, "reproduction.experiments.molecule_network", None)
    with pytest.raises(MissingExtraError, match=r"The experiment qm9 needs .*posthoc\[reproduction\]"):
        experiment_named("qm9")
