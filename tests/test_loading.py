"""A loaded head is the estimator that was saved, with the options it was given; a file that was changed is refused."""

from __future__ import annotations

import copy
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from posthoc import FMGP, RBF, FileError, Linear, Matern, OptionError, Outputs, PosthocError, Temperature, White, load
from posthoc.kernels import GPyTorchKernel
from tests.cases import QUICK, answers, inputs, mlp, numbers, recorded, same, values
from tests.test_persistence import contents, rewrite

OPTIONS: dict[str, Any] = {"steps": 60, "lr": 0.02, "num_inducing": 20}


def classes(*, wrong: bool, n: int = 600, seed: int = 0) -> Outputs:
    """Logits that are right on average, which temperature scaling serves best, or wrong in one half of the space."""
    g = torch.Generator().manual_seed(seed)
    logits, features = 2.0 * torch.randn(n, 3, generator=g), torch.randn(n, 2, generator=g)
    y = torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(1)
    noise = torch.randint(3, (n,), generator=g)
    return Outputs(logits, torch.where(features[:, 0] > 0, noise, y) if wrong else y, features)


def reals(n: int = 250) -> Outputs:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=g)
    return Outputs(torch.zeros(n, 1), x[:, :1] * torch.randn(n, 1, generator=g), x)


def scaled(method: FMGP) -> bool:
    """Whether temperature scaling won."""
    assert method.head is not None
    return method.head.process is None


CASES: dict[str, tuple[str, Outputs]] = {
    "temperature scaling": ("classification", classes(wrong=False)),
    "separable": ("classification", classes(wrong=True)),
    "regression": ("regression", reals()),
}


def case(name: str, path: Path, **options: Any) -> tuple[FMGP, Outputs]:
    task, data = CASES[name]
    method = FMGP(None, task, **{**OPTIONS, **options}).fit(data)
    assert scaled(method) == (name == "temperature scaling")
    method.save(path)
    return method, data


@pytest.mark.parametrize("name", CASES)
def test_the_options_come_back_and_a_second_fit_gives_the_same_numbers(name: str, tmp_path: Path) -> None:
    kernel = Matern(1.5, lengthscale=0.7) + RBF(amplitude=0.5).requires_grad_(False)
    method, data = case(name, tmp_path / "head", kernel=kernel, inducing="random")
    loaded = FMGP.load(tmp_path / "head")
    asked = ("variance", "num_inducing", "output_rank", "inducing", "inducing_classes", "kl", "ood_strength", "cache")
    assert {name: getattr(loaded.config, name) for name in asked} == {n: getattr(method.config, n) for n in asked}
    assert (loaded.config.variance, loaded.config.num_inducing, loaded.config.inducing) == ("auto", 20, "random")
    assert loaded.config.kernel.recipe() == kernel.recipe()
    assert same(numbers(loaded), numbers(method))
    assert same(numbers(loaded.fit(data)), numbers(method.fit(data)))
    assert same(answers(loaded.predict(data)), answers(method.predict(data)))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ours", [True, False])
def test_a_kernel_may_be_given_whatever_the_fit_has_chosen(name: str, ours: bool, tmp_path: Path) -> None:
    kernels = pytest.importorskip("gpytorch.kernels")
    make = (lambda: RBF()) if ours else (lambda: kernels.ScaleKernel(kernels.RBFKernel()))
    method, data = case(name, tmp_path / "head", kernel=make())
    loaded = FMGP.load(tmp_path / "head", kernel=make())
    assert same(answers(loaded.predict(data)), answers(method.predict(data)))
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "head").read_bytes()
    assert same(numbers(loaded.fit(data)), numbers(method.fit(data)))
    with pytest.raises(FileError, match=r"Expected the kernel this head was fitted with.*give one of the same form"):
        FMGP.load(tmp_path / "head", kernel=kernels.MaternKernel())
    with pytest.raises(FileError, match="Expected the kernel this head was fitted with"):
        FMGP.load(tmp_path / "head", kernel=Linear() + White())


def test_a_kernel_that_is_not_built_by_name_must_be_given(tmp_path: Path) -> None:
    kernels = pytest.importorskip("gpytorch.kernels")
    case("temperature scaling", tmp_path / "head", kernel=RBF() + GPyTorchKernel(kernels.RBFKernel()))
    with pytest.raises(FileError, match=r"GPyTorch kernel is not built by name.*load\(path, kernel=\.\.\.\)"):
        FMGP.load(tmp_path / "head")


def test_a_kernel_on_another_block_is_not_the_one_of_the_fit(tmp_path: Path) -> None:
    FMGP(mlp(), "regression", kernel=RBF(on="features"), **QUICK).fit((inputs(), values())).save(tmp_path / "head")
    FMGP.load(tmp_path / "head", kernel=RBF(on="features"))
    with pytest.raises(FileError, match="Expected the kernel this head was fitted with"):
        FMGP.load(tmp_path / "head", kernel=RBF(on="inputs"))


def test_points_of_your_own_are_asked_for_before_a_second_fit(tmp_path: Path) -> None:
    data = recorded(mlp(), inputs(), values())
    method = FMGP(None, "regression", inducing=values(4, 6), inducing_classes=[0, 0, 0, 0], **QUICK).fit(data)
    method.save(tmp_path / "head")
    loaded = FMGP.load(tmp_path / "head")
    assert loaded.config.inducing_classes == [0, 0, 0, 0]
    with pytest.raises(OptionError, match=r"file does not hold: to fit again, build FMGP\(\.\.\., inducing=points\)"):
        loaded.fit(data)
    assert same(numbers(loaded), numbers(method))


# Files that were changed.


def edited(config: Any, where: tuple[Any, ...], value: Any) -> Any:
    config = part = copy.deepcopy(config)
    for key in where[:-1]:
        part = part[key]
    part[where[-1]] = value
    return config


def places(config: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a config."""
    for key, value in config.items() if isinstance(config, dict) else enumerate(config):
        yield (*where, key)
        if isinstance(value, dict | list):
            yield from places(value, (*where, key))


FITTED = ("shapes", "fitted")
LARGER = "shapes that are larger than its tensors"
CHANGES: list[tuple[str, tuple[Any, ...], Any, str]] = [
    ("regression", ("config",), "a", "Expected a valid config in the header of .*, found 'a'"),
    ("regression", (*FITTED, "kernel"), "rbf", "the kernel this head was fitted with, rbf"),
    ("regression", (*FITTED, "spaces", "features"), 10**12, LARGER),
    ("regression", (*FITTED, "spaces", "features"), 3, r"Expected tensors .*process\.z\.features"),
    ("regression", (*FITTED, "owners"), [0] * 19 + [1], "inducing points that belong to other outputs than the 1"),
    ("regression", (*FITTED, "normals"), -1, "cannot be read by this version"),
    ("regression", ("network",), 5, "Expected a valid network in the header of .*, found 5"),
    ("regression", ("shapes", "outputs"), ["a"], r"outputs of width \['a'\]"),
    ("regression", ("shapes", "outputs"), [10**12], LARGER),
    ("separable", (*FITTED, "ood"), [10**12, 2, 0.1], LARGER),
    ("separable", (*FITTED, "ood"), [3, 2, 0.1], r"Expected tensors ood\.basis"),
    ("separable", (*FITTED, "rank"), 10**12, LARGER),
    ("temperature scaling", ("shapes", "outputs"), [10**12], LARGER),
    ("temperature scaling", ("shapes", "outputs"), [], "at least 2 classes"),
]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, torch.Tensor], Any]]:
    """The contents of a file of each case."""
    path = tmp_path_factory.mktemp("heads") / "head"
    found = {}
    for name in CASES:
        case(name, path)
        found[name] = contents(path)
    return found


@pytest.mark.parametrize(("name", "where", "value", "message"), CHANGES)
def test_config_that_was_changed_is_refused(
    name: str, where: tuple[Any, ...], value: Any, message: str, heads: dict[str, Any], tmp_path: Path
) -> None:
    tensors, config = heads[name]
    rewrite(tmp_path / "head", tensors, edited(config, where, value))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FileError, match=message) as caught:
        load(tmp_path / "head")
    assert str(tmp_path / "head") in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB: nothing was made of that size


@pytest.mark.parametrize("name", CASES)
def test_whatever_was_changed_is_told_by_an_error_of_ours(name: str, heads: dict[str, Any], tmp_path: Path) -> None:
    """Or, where any value will do, by nothing."""
    (tensors, config), refused = heads[name], 0
    for where in places(config):
        for value in (None, "a", -1, 10**12, [], ["a"], {"a": 1}):
            rewrite(tmp_path / "head", tensors, edited(config, where, value))
            try:
                loaded = load(tmp_path / "head")
                loaded.predict(CASES[name][1])
            except PosthocError:
                refused += 1
    assert refused > 150


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_tensors_of_another_type_are_refused(dtype: torch.dtype, heads: dict[str, Any], tmp_path: Path) -> None:
    tensors, config = heads["regression"]
    rewrite(tmp_path / "head", {**tensors, "process.l_raw": tensors["process.l_raw"].to(dtype)}, config)
    with pytest.raises(FileError, match=r"l_raw \(20, 20\) of float64; found process\.l_raw .* of (int|float)32"):
        load(tmp_path / "head")


@pytest.mark.parametrize("owner", [99, -1])
@pytest.mark.parametrize("at", [0, -1])
def test_inducing_points_of_no_output_are_refused(owner: int, at: int, heads: dict[str, Any], tmp_path: Path) -> None:
    tensors, config = heads["regression"]
    owners = tensors["process.z_class"].clone()
    owners[at] = owner
    rewrite(tmp_path / "head", {**tensors, "process.z_class": owners}, config)
    with pytest.raises(FileError, match="inducing points that belong to other outputs"):
        load(tmp_path / "head")


def test_options_that_no_fit_has_say_which_file_they_are_from(heads: dict[str, Any], tmp_path: Path) -> None:
    tensors, config = heads["regression"]
    rewrite(tmp_path / "head", tensors, edited(config, ("config", "alpha"), 5.0))
    with pytest.raises(OptionError, match="Expected alpha to be a number of at least 0") as caught:
        load(tmp_path / "head")
    assert caught.value.__notes__ == [f"This was while loading {tmp_path / 'head'}."]


def test_other_methods_refuse_what_was_changed_too(tmp_path: Path) -> None:
    path = tmp_path / "head"
    Temperature(None, "classification").fit(classes(wrong=False)).save(path)
    tensors, config = contents(path)
    rewrite(path, {**tensors, "likelihood.log_temperature": tensors["likelihood.log_temperature"].float()}, config)
    with pytest.raises(
        FileError, match=r"log_temperature \(\) of float64.*; found likelihood.log_temperature \(\) of float32"
    ):
        load(path)
    rewrite(path, tensors, edited(config, ("shapes", "outputs"), []))
    with pytest.raises(FileError, match="at least 2 classes"):
        load(path)
