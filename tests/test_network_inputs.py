"""Networks that drop the axis of a single row, or change their input in place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from posthoc import FMGP, RBF, DataError
from posthoc.collect.network import Backbone
from posthoc.collect.to_folder import collect_to_folder
from posthoc.methods import REGISTRY
from posthoc.methods.weights.ensemble import Members
from tests.cases import QUICK, WIDTH, N, answers, in_eval, inputs, labels, mlp, numbers, same, values


def in_form(form: str, x: Tensor, y: Tensor, batch_size: int = 8) -> Any:
    """The data in one of the forms that `fit` and `predict` take."""
    forms: dict[str, Any] = {
        "arrays": (x, y),
        "view": (torch.cat([x, x], 1)[:, :WIDTH], y),
        "numpy": (x.numpy(), y.numpy()),
        "mapping": {"input": x, "labels": y},
        "list": [(x, y)],
        "loader": DataLoader(TensorDataset(x, y), batch_size=batch_size),
        "dataset": TensorDataset(x, y),
    }
    return forms[form]


class Squeezed(nn.Module):
    """A network that drops the axis of a single row."""

    def __init__(self, outputs: int = 1, axis: int | None = None) -> None:
        super().__init__()
        self.body, self.axis = mlp(outputs), axis

    def forward(self, input: Tensor) -> Tensor:
        out = self.body(input)
        return out.squeeze() if self.axis is None else out.squeeze(self.axis)


@pytest.mark.parametrize("form", ["arrays", "numpy", "mapping", "loader", "dataset"])
@pytest.mark.parametrize("outputs", [1, 3])
def test_a_last_batch_of_one_row(outputs: int, form: str) -> None:
    model = Squeezed(outputs)
    data = in_form(form, inputs(257), values(257, outputs))  # cut at 256 rows, or at 8
    mean = FMGP(model, "regression", **QUICK).fit(data).predict(data).latent.mean
    assert mean.shape == ((257,) if outputs == 1 else (257, outputs))
    torch.testing.assert_close(mean, in_eval(model, inputs(257)))


def test_a_classifier_that_squeezes_a_single_row() -> None:
    model = Squeezed(3)
    for cache in (True, False):
        method = FMGP(model, "classification", cache=cache, **QUICK).fit((inputs(17), labels(17)))
        one = method.predict(inputs(1)).latent
        assert one.mean.shape == one.variance.shape == (1, 3)
        assert torch.equal(one.mean[0], in_eval(model, inputs(1)))


@pytest.mark.parametrize("form", ["tensor", "arrays", "numpy", "mapping", "loader", "inputs only"])
def test_one_row_is_predicted(form: str) -> None:
    model, x = Squeezed(), inputs()[:1]
    method = FMGP(model, "regression", **QUICK).fit((inputs(), values()))
    alone: dict[str, Any] = {"tensor": x, "inputs only": DataLoader(TensorDataset(x), batch_size=4)}
    one = method.predict(alone[form] if form in alone else in_form(form, x, values(1))).latent
    assert one.mean.shape == one.variance.shape == (1,)
    assert torch.equal(one.mean[0], in_eval(model, x))
    torch.testing.assert_close(one.variance, method.predict(inputs()).latent.variance[:1])


def test_one_row_to_fit_on_an_axis_that_only_one_row_loses_and_a_single_logit() -> None:
    for outputs, shape in ((1, (1,)), (3, (1, 3))):
        method = FMGP(Squeezed(outputs), "regression", **{**QUICK, "num_inducing": 1})
        method.fit((inputs(1), values(1, outputs)))
        assert method.predict(inputs(1)).latent.mean.shape == shape
    model = Squeezed(1, axis=0)
    method = FMGP(model, "regression", **QUICK).fit((inputs(257), values(257)))
    assert torch.equal(method.predict(inputs(1)).latent.mean, in_eval(model, inputs(1))[None])
    method = FMGP(Squeezed(), "classification", **QUICK).fit((inputs(257), labels(257, 2)))
    one = method.predict(inputs(1)).latent.mean
    assert one.shape == (1, 2)
    assert torch.equal(one[0, 1], in_eval(Squeezed(), inputs(1)))


@pytest.mark.parametrize("name", ["mfvi", "ella"])
def test_methods_that_run_the_network_read_single_rows_too(name: str) -> None:
    options: Any = {"mfvi": {"steps": 3, "samples": 2}, "ella": {"weights": "all"}}[name]
    data = in_form("loader", inputs(17), labels(17))

    def mean(model: nn.Module) -> Tensor:
        return REGISTRY[name](model, "classification", **options).fit(data).predict(inputs(1)).latent.mean

    torch.testing.assert_close(mean(Squeezed(3)), mean(nn.Sequential(mlp(3))))


def test_rows_collected_without_targets_and_a_leading_axis_that_is_no_row(tmp_path: Path) -> None:
    backbone = Backbone(Squeezed(3), None, None)
    outputs = collect_to_folder(backbone, inputs(9), tmp_path / "outputs", identity={"data": "nine"}, batch_size=4)
    assert outputs.outputs.shape == (9, 3)
    method = FMGP(lambda x: x[0].sum(1), "regression", kernel=RBF(on="outputs"), **QUICK)
    method.fit([(inputs()[None], values())])
    assert method.predict(inputs()[None]).latent.mean.shape == (N,)
    with pytest.raises(DataError, match="one row a point, got a single number"):
        FMGP(lambda x: x.sum(), "regression", **QUICK).fit((inputs(), values()))


def scaled(x: Tensor) -> Tensor:
    return x.mul_(3.0).add_(1.0)


def reshaped(x: Tensor) -> Tensor:
    return x.mul_(3.0).unsqueeze_(1).add_(1.0).squeeze(1)


def differentiated(x: Tensor) -> Tensor:
    x.requires_grad_(True)
    return 3.0 * x.detach() + 1.0


class InPlace(nn.Module):
    """Standardizes its input by a function, which may change it."""

    def __init__(self, change: Callable[[Tensor], Tensor], outputs: int = 1) -> None:
        super().__init__()
        self.change, self.body = change, mlp(outputs)

    def forward(self, input: Tensor) -> Tensor:
        return self.body(self.change(input))


def on_a_copy(outputs: int = 1) -> nn.Module:
    return InPlace(lambda x: 3.0 * x + 1.0, outputs)


def on_inputs(model: Any) -> FMGP:
    return FMGP(model, "regression", kernel=RBF(on="inputs"), **QUICK)


@pytest.mark.parametrize("form", ["arrays", "numpy", "mapping", "list", "loader", "view"])
@pytest.mark.parametrize("change", [scaled, reshaped, differentiated])
def test_the_kernel_gets_the_inputs_as_they_were_given(change: Callable[[Tensor], Tensor], form: str) -> None:
    x, y = inputs(), values()
    data = in_form(form, x, y, batch_size=N)
    expected = on_inputs(on_a_copy()).fit((inputs(), values()))
    method = on_inputs(InPlace(change)).fit(data)
    assert same(numbers(method), numbers(expected))
    assert same(answers(method.predict(data if form != "list" else x)), answers(expected.predict(inputs())))
    assert torch.equal(data[0] if form == "view" else x, inputs())
    assert not x.requires_grad
    assert x.shape == (N, WIDTH)


def test_data_stay_without_a_kernel_on_them_in_inference_mode_and_if_the_network_fails() -> None:
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError(f"the network failed at {float(x.zero_().sum())}")

    x = inputs()
    method = FMGP(InPlace(scaled), "regression", **QUICK).fit((x, values()))
    for mode in (False, True):
        with torch.inference_mode(mode):
            assert torch.equal(method.predict(x).latent.mean, in_eval(on_a_copy(), inputs()))
    with pytest.raises(RuntimeError, match="network failed"):
        FMGP(fails, "regression", **QUICK).fit((x, values()))
    assert torch.equal(x, inputs())
    # Outputs in the memory of the inputs are kept too.
    method = on_inputs(lambda x: x.mul_(2.0)[:, :1]).fit((x, values()))
    assert torch.equal(method.predict(x).latent.mean, 2.0 * inputs()[:, :1])
    assert torch.equal(x, inputs())


@pytest.mark.parametrize("name", ["mfvi", "ensemble", "ella"])
def test_methods_that_run_the_network_often_give_it_the_same_data(name: str) -> None:
    options: Any = {"mfvi": {"steps": 3, "samples": 4}, "ella": {"weights": "all"}}.get(name, {})
    x, y = inputs(), labels()

    def predicted(network: Callable[[], nn.Module]) -> Tensor:
        model: Any = [network(), network()] if name == "ensemble" else network()
        return REGISTRY[name](model, "classification", **options).fit((x, y)).predict(x).probs

    probs = predicted(lambda: InPlace(scaled, 3))
    assert torch.equal(x, inputs())
    torch.testing.assert_close(probs, predicted(lambda: on_a_copy(3)))
    assert torch.equal(Members([InPlace(scaled), InPlace(scaled)])(inputs()), on_a_copy()(inputs()))
