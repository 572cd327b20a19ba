"""A saved head is the fitted head: to the bit, in one file that is whole, ours, and runs no code."""

from __future__ import annotations

import json
import math
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from posthoc import FMGP, RBF, Categorical, Constant, DataError, FileError, Gaussian, Linear, Matern, OptionError, White
from posthoc.io import contents_sha256
from tests.cases import QUICK, N, Trap, answers, inputs, labels, mlp, numbers, recorded, reloaded, same, values

TWICE = RBF()
CASES: dict[str, tuple[int, Any, dict[str, Any]]] = {  # outputs, likelihood, options
    "regression": (1, "regression", {}),
    "regression, 3 outputs": (3, "regression", {}),
    "regression, noise per output": (3, Gaussian(noise="per_output"), {}),
    "regression, shared variance": (3, "regression", {"variance": "shared", "kl": "once"}),
    "regression, alpha 0": (1, "regression", {"alpha": 0.0, "standardize": False, "seed": 3, "lr": 0.03}),
    "regression, a layer": (1, "regression", {"layer": "0"}),
    "regression, own points": (1, "regression", {"inducing": values(4, 6)}),
    "classification": (3, "classification", {}),
    "classification, shared": (3, "classification", {"variance": "shared"}),
    "classification, many": (40, "classification", {}),
    "classification, low rank": (5, "classification", {"variance": "per_output", "output_rank": 2}),
    "classification, per class": (3, "classification", {"inducing": "per_class"}),
    "classification, fewer points than classes": (7, "classification", {}),
    "classification, temperature": (3, Categorical(temperature=2.0), {}),
    "classification, logit scaling": (3, Categorical(training="logit_scaling", prediction="logit_scaling"), {}),
    "classification, Monte Carlo": (3, Categorical(training="monte_carlo", prediction="monte_carlo", samples=7), {}),
    "Matern": (1, "regression", {"kernel": Matern(nu=1.5)}),
    "one kernel twice": (1, "regression", {"kernel": TWICE * TWICE}),
    "Linear + Constant": (1, "regression", {"kernel": Linear() + Constant(0.5)}),
    "two spaces": (3, "classification", {"kernel": RBF(on="inputs") * (Linear(on="features") + White())}),
    "on outputs": (3, "classification", {"kernel": RBF(on="outputs", lengthscale=2.0) + Matern(0.5, on="outputs")}),
}


def case(name: str) -> tuple[nn.Module, FMGP]:
    outputs, likelihood, options = CASES[name]
    model = mlp(outputs)
    method = FMGP(model, likelihood, **{**QUICK, **options})
    y = values(N, outputs) if method.likelihood.task == "regression" else labels(N, outputs)
    return model, method.fit((inputs(), y))


def saved(folder: Path) -> Path:
    path = folder / "head.safetensors"
    case("regression")[1].save(path)
    return path


def contents(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, json.loads(file.metadata()["posthoc"])


@pytest.mark.parametrize("name", CASES)
def test_loaded_head_predicts_the_same_to_the_bit(name: str, tmp_path: Path) -> None:
    model, method = case(name)
    loaded, x = reloaded(method, tmp_path, model=model), inputs(11, seed=7)
    assert same(numbers(loaded), numbers(method))
    assert same(answers(loaded.predict(x)), answers(method.predict(x)))
    assert same(answers(loaded.predict(x, covariance=True)), answers(method.predict(x, covariance=True)))
    assert vars(loaded.predict(x)).keys() == vars(method.predict(x)).keys()
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "head").read_bytes()


def test_equal_fits_of_two_processes_are_equal_bytes(tmp_path: Path) -> None:
    code = "import sys; from tests.test_persistence import case; case('two spaces')[1].save(sys.argv[1])"
    command = [sys.executable, "-c", code, str(tmp_path / "theirs")]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}  # another order of sets
    subprocess.run(command, check=True, cwd=Path(__file__).parent.parent, env=environment)
    case("two spaces")[1].save(tmp_path / "ours")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_file_holds_neither_paths_nor_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    data = path.read_bytes()
    monkeypatch.setattr("time.time", lambda: 4.0e9)
    monkeypatch.chdir(tmp_path)
    assert saved(Path()).read_bytes() == data
    for private in (str(tmp_path), str(Path.home()), str(Path(__file__).parent), os.uname().nodename):
        assert private.encode() not in data
    parts = "classes columns config format likelihood method network rounding selection sha256 shapes version"
    assert sorted(contents(path)[1]) == parts.split()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.filterwarnings("ignore::posthoc.PosthocWarning")
def test_heads_of_networks_of_other_precision_load_too(dtype: torch.dtype, tmp_path: Path) -> None:
    model, x = mlp(dtype=dtype), inputs(dtype=dtype)
    method = FMGP(model, "regression", **QUICK).fit((x, values()))
    assert same(answers(reloaded(method, tmp_path, model=model).predict(x)), answers(method.predict(x)))


def test_flat_outputs_stay_flat(tmp_path: Path) -> None:
    flat = partial(torch.sum, dim=1)
    method = FMGP(flat, "regression", **QUICK).fit((inputs(), values()))
    assert reloaded(method, tmp_path, model=flat).predict(inputs()).variance.shape == (N,)
    with pytest.raises(DataError, match=r"shape \('N',\) as in fit, got \('N', 1\)"):
        reloaded(method, tmp_path, model=lambda x: x[:, :1]).predict(inputs())


def test_head_without_its_network_predicts_from_outputs(tmp_path: Path) -> None:
    model, method = case("classification")
    loaded, at = reloaded(method, tmp_path), recorded(model, inputs())
    assert same(answers(loaded.predict(at)), answers(method.predict(at)))
    with pytest.raises(DataError, match=r"Expected posthoc\.Outputs"):
        loaded.predict(inputs())


def test_head_fitted_on_outputs_takes_a_network_when_loaded(tmp_path: Path) -> None:
    at = recorded(mlp(), inputs(), values())
    method = FMGP(None, "regression", **QUICK).fit(at)
    loaded = reloaded(method, tmp_path, model=mlp())
    torch.testing.assert_close(loaded.predict(inputs()).variance, method.predict(at).variance)


def test_loading_does_not_change_the_network(tmp_path: Path) -> None:
    model = mlp().train()
    FMGP.load(saved(tmp_path), model=model)
    assert model.training
    assert same(dict(model.state_dict()), dict(mlp().state_dict()))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_gpytorch_kernel_is_given_again(tmp_path: Path) -> None:
    kernels = pytest.importorskip("gpytorch").kernels
    method = FMGP(mlp(), "regression", kernel=kernels.MaternKernel(nu=1.5), **QUICK).fit((inputs(), values()))
    loaded = reloaded(method, tmp_path, model=mlp(), kernel=kernels.MaternKernel(nu=1.5))
    assert same(answers(loaded.predict(inputs())), answers(method.predict(inputs())))
    for options, message in (
        ({}, r"GPyTorch kernel .*MaternKernel.*load\(path, kernel=\.\.\.\)"),
        ({"kernel": kernels.RBFKernel()}, r"MaternKernel.*RBFKernel"),
        ({"kernel": kernels.MaternKernel(nu=2.5)}, "Expected the kernel this head was fitted with"),
    ):
        with pytest.raises(FileError, match=message):
            reloaded(method, tmp_path, model=mlp(), **options)


def test_kernel_that_is_not_the_saved_one_and_unknown_options_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with pytest.raises(FileError, match=r"(?i)rbf.*matern"):  # whose parameters have the same names and shapes
        FMGP.load(path, model=mlp(), kernel=Matern())
    with pytest.raises(OptionError, match="takes model, device and kernel, got steps"):
        FMGP.load(path, model=mlp(), steps=3)


def changed(path: Path, name: str, value: Any, *, sign: bool = True) -> None:
    """Changes a value of the header, or a tensor; None removes it. With the hash of the new contents, if signed."""
    tensors, header = contents(path)
    part: dict[str, Any] = tensors if "." in name else header
    part.pop(name) if value is None else part.update({name: value})
    if sign:
        hashed = {name: value for name, value in header.items() if name not in ("format", "version", "sha256")}
        header["sha256"] = contents_sha256(tensors, hashed)
    save_file(tensors, path, {"posthoc": json.dumps(header)})


OTHER = "Expected a head that posthoc saved, found another or a damaged file"
UNREADABLE = "cannot be read by this version of posthoc: "
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (Path.unlink, "Expected a saved head, found no file at .*head.safetensors"),
    "empty": (lambda path: path.write_bytes(b""), OTHER),
    "JSON": (lambda path: path.write_bytes(b'{"format": "posthoc-head"}'), OTHER),
    "bytes": (lambda path: path.write_bytes(bytes(range(256)) * 4), OTHER),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:100]), OTHER),
    "a byte short": (lambda path: path.write_bytes(path.read_bytes()[:-1]), OTHER),
    "of another library": (lambda path: save_file({"w": torch.zeros(3)}, path), "safetensors file of another origin"),
    "earlier": (lambda path: changed(path, "version", 1), "Expected format version 2, found 1 .*posthoc that wrote it"),
    "later": (lambda path: changed(path, "version", 3), "Expected format version 2, found 3 .*posthoc that wrote it"),
    "tensor": (lambda path: changed(path, "process.l_raw", torch.zeros(1), sign=False), "found a damaged or changed"),
    "header": (lambda path: changed(path, "classes", [], sign=False), "found a damaged or changed one"),
    "method": (lambda path: changed(path, "method", "map"), "Expected a head of method 'fmgp', found one of 'map'"),
    "without config": (lambda path: changed(path, "config", None), UNREADABLE + "KeyError"),
    "without a tensor": (lambda path: changed(path, "process.l_raw", None), UNREADABLE + r".*process\.l_raw"),
    "another shape": (lambda path: changed(path, "process.l_raw", torch.zeros(1)), UNREADABLE + r".*process\.l_raw"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_refused(name: str, tmp_path: Path) -> None:
    path, (change, message) = saved(tmp_path), REFUSED[name]
    change(path)
    with pytest.raises(FileError, match=message):
        FMGP.load(path)


def test_options_that_no_fit_has_say_which_file_they_are_from(tmp_path: Path) -> None:
    path = saved(tmp_path)
    changed(path, "config", {**contents(path)[1]["config"], "alpha": 5.0})
    with pytest.raises(OptionError, match="Expected alpha to be a number of at least 0") as caught:
        FMGP.load(path)
    assert caught.value.__notes__ == [f"This was while loading {path}."]


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    path, marker = tmp_path / "head", tmp_path / "marker"
    header = json.dumps({"__metadata__": {"posthoc": pickle.dumps(Trap(marker), 0).decode("latin-1")}}).encode()
    for write in (
        lambda: path.write_bytes(pickle.dumps(Trap(marker))),
        lambda: torch.save({"process.l_raw": Trap(marker)}, path),
        lambda: path.write_bytes(struct.pack("<Q", len(header)) + header),
    ):
        write()
        with pytest.raises(FileError, match="Expected a"):
            FMGP.load(path)
        assert not marker.exists()


def test_parameters_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    method = case("regression")[1]
    assert method.head is not None
    method.head.process.l_raw.data.fill_(math.inf)
    with pytest.raises(FileError, match=r"finite parameters, found NaN or infinity in process\.l_raw"):
        method.save(tmp_path / "head")
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_subclasses_that_would_be_loaded_as_their_parents_are_refused(likelihood, tmp_path):
    class Own(RBF if likelihood == "regression" else Categorical):
        """A part that the file would name as its parent."""

    given = {"kernel": Own()} if likelihood == "regression" else {}
    method = FMGP(mlp(), Own() if likelihood == "classification" else likelihood, **given, **QUICK)
    method.fit(inputs(), values() if likelihood == "regression" else labels(classes=2))
    with pytest.raises(OptionError, match=r"got Own, which would be loaded as (RBF|Categorical): register it"):
        method.save(tmp_path / "head")
    assert not list(tmp_path.iterdir())


def test_another_network_is_refused(tmp_path: Path) -> None:
    path, one_weight_moved = saved(tmp_path), mlp()
    with torch.no_grad():
        one_weight_moved.get_parameter("0.weight")[0, 0] += 1e-6
    for other in (mlp(seed=1), one_weight_moved, mlp(dtype=torch.float64), nn.Sequential(mlp())):
        with pytest.raises(FileError, match=r"Expected the network.*fingerprint \w{8}.*found another.*or fit again"):
            FMGP.load(path, model=other)
    FMGP.load(path, model=mlp())


def test_buffers_belong_to_the_network(tmp_path: Path) -> None:
    def network(mean: float) -> nn.Module:
        model = nn.Sequential(mlp(), nn.BatchNorm1d(1))
        model.get_buffer("1.running_mean").fill_(mean)
        return model

    method = FMGP(network(0.0), "regression", **QUICK).fit((inputs(), values()))
    reloaded(method, tmp_path, model=network(0.0))
    with pytest.raises(FileError, match="Expected the network"):
        reloaded(method, tmp_path, model=network(0.5))


@pytest.mark.parametrize("fails", ["pathlib.Path.write_bytes", "posthoc.io.os.replace"])
def test_write_that_fails_leaves_what_was_there_and_nothing_else(fails: str, tmp_path: Path) -> None:
    path, other = saved(tmp_path), case("classification")[1]
    before = path.read_bytes()
    with patch(fails, side_effect=OSError(28, "No space left on device")):
        for target in (path, tmp_path / "new"):
            with pytest.raises(FileError, match=r"No space left.*Make room"):
                other.save(target)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]
    other.save(path)
    assert os.listdir(tmp_path) == [path.name]
    assert FMGP.load(path).likelihood.task == "classification"


def test_saving_into_a_folder_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"Expected a folder to write head into.*missing: create it"):
        case("regression")[1].save(tmp_path / "missing" / "head")
    with pytest.raises(FileError, match=r"path of a file to write, \w+ a folder"):
        case("regression")[1].save(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_saved_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    assert saved(tmp_path).stat().st_mode == (tmp_path / "plain").stat().st_mode
