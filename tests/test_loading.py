"""A loaded head is the estimator that was saved, with the options it was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from posthoc import FMGP, RBF, FileError, Linear, Matern, OptionError, Outputs, White
from posthoc.kernels import GPyTorchKernel
from tests.cases import QUICK, answers, inputs, mlp, numbers, recorded, same, values

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


CASES: dict[str, tuple[str, Outputs]] = {
    "temperature scaling": ("classification", classes(wrong=False)),
    "separable": ("classification", classes(wrong=True)),
    "regression": ("regression", reals()),
}


def case(name: str, path: Path, **options: Any) -> tuple[FMGP, Outputs]:
    task, data = CASES[name]
    method = FMGP(None, task, **{**OPTIONS, **options}).fit(data)
    assert (method.head.process is None) == (name == "temperature scaling")  # type: ignore[union-attr]
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
    make = (lambda: RBF(on="features")) if ours else (lambda: kernels.ScaleKernel(kernels.RBFKernel()))
    method, data = case(name, tmp_path / "head", kernel=make())
    loaded = FMGP.load(tmp_path / "head", kernel=make())
    assert same(answers(loaded.predict(data)), answers(method.predict(data)))
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "head").read_bytes()
    assert same(numbers(loaded.fit(data)), numbers(method.fit(data)))
    for other in (kernels.MaternKernel(), Linear() + White(), RBF(on="inputs")):
        with pytest.raises(
            FileError, match=r"Expected the kernel this head was fitted with.*give one of the same form"
        ):
            FMGP.load(tmp_path / "head", kernel=other)


def test_a_kernel_that_is_not_built_by_name_must_be_given(tmp_path: Path) -> None:
    kernels = pytest.importorskip("gpytorch.kernels")
    case("temperature scaling", tmp_path / "head", kernel=RBF() + GPyTorchKernel(kernels.RBFKernel()))
    with pytest.raises(FileError, match=r"GPyTorch kernel is not built by name.*load\(path, kernel=\.\.\.\)"):
        FMGP.load(tmp_path / "head")


def test_points_of_your_own_are_asked_for_before_a_second_fit(tmp_path: Path) -> None:
    data = recorded(mlp(), inputs(), values())
    method = FMGP(None, "regression", inducing=values(4, 6), inducing_classes=[0, 0, 0, 0], **QUICK).fit(data)
    method.save(tmp_path / "head")
    loaded = FMGP.load(tmp_path / "head")
    assert loaded.config.inducing_classes == [0, 0, 0, 0]
    with pytest.raises(OptionError, match=r"file does not hold: to fit again, build FMGP\(\.\.\., inducing=points\)"):
        loaded.fit(data)
    assert same(numbers(loaded), numbers(method))
