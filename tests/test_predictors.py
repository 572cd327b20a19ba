"""Predictors with habits: they drop the axis of a single row, or work on their input in place."""

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

# Models that end in squeeze().


class Squeezed(nn.Module):
    def __init__(self, outputs: int = 1, axis: int | None = None) -> None:
        super().__init__()
        self.body, self.axis = mlp(outputs), axis

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = self.body(input)
        return out.squeeze() if self.axis is None else out.squeeze(self.axis)


def one_too_many(form: str, y: Tensor) -> Any:
    """257 rows, which are cut at 256, or at 8."""
    x = inputs(257)
    forms: dict[str, Callable[[], Any]] = {
        "arrays": lambda: (x, y),
        "numpy": lambda: (x.numpy(), y.numpy()),
        "mapping": lambda: {"input": x, "labels": y},
        "loader": lambda: DataLoader(TensorDataset(x, y), batch_size=8),
        "dataset": lambda: TensorDataset(x, y),
    }
    return forms[form]()


@pytest.mark.parametrize("form", ["arrays", "numpy", "mapping", "loader", "dataset"])
@pytest.mark.parametrize("outputs", [1, 3])
def test_single_row_that_is_left_over_is_a_row(outputs: int, form: str) -> None:
    model = Squeezed(outputs)
    y = values(257) if outputs == 1 else values(257, outputs)
    method = FMGP(model, "regression", **QUICK).fit(one_too_many(form, y))
    said = method.predict(one_too_many(form, y)).latent.mean
    assert said.shape == ((257,) if outputs == 1 else (257, outputs))
    torch.testing.assert_close(said, in_eval(model, inputs(257)))


@pytest.mark.parametrize("cache", [True, False])
def test_classifier_that_squeezes_a_single_row(cache: bool) -> None:
    model = Squeezed(3)
    method = FMGP(model, "classification", cache=cache, **QUICK).fit((inputs(17), labels(17)))
    one = method.predict(inputs(1))
    assert one.latent.mean.shape == (1, 3)
    assert torch.equal(one.latent.mean[0], in_eval(model, inputs(1)))
    assert one.latent.variance.shape == (1, 3)


@pytest.mark.parametrize("form", ["tensor", "numpy", "mapping", "loader", "pair", "list"])
def test_one_row_is_predicted(form: str) -> None:
    model, x = Squeezed(), inputs()[:1]
    method = FMGP(model, "regression", **QUICK).fit((inputs(), values()))
    forms: dict[str, Any] = {
        "tensor": x,
        "numpy": x.numpy(),
        "mapping": {"input": x},
        "loader": DataLoader(TensorDataset(x), batch_size=4),
        "pair": (x, values(1)),
        "list": [x],
    }
    one = method.predict(forms[form])
    assert one.latent.mean.shape == one.latent.variance.shape == (1,)
    assert torch.equal(one.latent.mean[0], in_eval(model, x))
    torch.testing.assert_close(one.latent.variance, method.predict(inputs()).latent.variance[:1])


def test_one_row_is_enough_to_fit_on() -> None:
    for outputs in (1, 3):
        options = {**QUICK, "num_inducing": 1}
        method = FMGP(Squeezed(outputs), "regression", **options).fit((inputs(1), values(1, outputs)))
        assert method.predict(inputs(1)).latent.mean.shape == ((1,) if outputs == 1 else (1, 3))


def test_axis_that_only_a_single_row_loses() -> None:
    model = Squeezed(1, axis=0)
    method = FMGP(model, "regression", **QUICK).fit((inputs(257), values(257)))
    assert torch.equal(method.predict(inputs(1)).latent.mean, in_eval(model, inputs(1))[None])


def test_single_logit_of_a_single_row() -> None:
    model = Squeezed()
    method = FMGP(model, "classification", **QUICK).fit((inputs(257), labels(257, 2)))
    one = method.predict(inputs(1)).latent.mean
    assert one.shape == (1, 2)
    assert torch.equal(one[0, 1], in_eval(model, inputs(1)))


@pytest.mark.parametrize("name", ["mfvi", "ella"])
def test_methods_that_run_the_network_read_single_rows_too(name: str) -> None:
    options: Any = {"mfvi": {"steps": 3, "samples": 2}, "ella": {"weights": "all"}}[name]
    x, y = inputs(17), labels(17)
    flat, plain = (
        REGISTRY[name](model, "classification", **options).fit(DataLoader(TensorDataset(x, y), batch_size=8))
        for model in (Squeezed(3), nn.Sequential(mlp(3)))
    )
    torch.testing.assert_close(flat.predict(inputs(1)).latent.mean, plain.predict(inputs(1)).latent.mean)


def test_rows_collected_without_targets(tmp_path: Path) -> None:
    found = collect_to_folder(
        Backbone(Squeezed(3), None, None), inputs(9), tmp_path / "outputs", identity={"data": "nine"}, batch_size=4
    )
    assert found.outputs.shape == (9, 3)


def test_leading_axis_of_length_one_is_not_always_a_row() -> None:
    def model(x: Tensor) -> Tensor:  # (1, N, D)
        return x[0].sum(1)

    kernel = RBF(on="outputs")
    method = FMGP(model, "regression", kernel=kernel, **QUICK).fit([(inputs()[None], values())])
    assert method.predict(inputs()[None]).latent.mean.shape == (N,)


def test_single_number_for_many_rows_is_refused() -> None:
    with pytest.raises(DataError, match="one row a point, got a single number"):
        FMGP(lambda x: x.sum(), "regression", **QUICK).fit((inputs(), values()))


# Models that work in place.


def scaled(x: Tensor) -> Tensor:
    return x.mul_(3.0).add_(1.0)


def reshaped(x: Tensor) -> Tensor:
    return x.mul_(3.0).unsqueeze_(1).add_(1.0).squeeze(1)


def differentiated(x: Tensor) -> Tensor:
    x.requires_grad_(True)
    return 3.0 * x.detach() + 1.0


class Greedy(nn.Module):
    """Standardises its input, or not on a copy."""

    def __init__(self, change: Callable[[Tensor], Tensor], outputs: int = 1) -> None:
        super().__init__()
        self.change, self.body = change, mlp(outputs)

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = self.body(self.change(input))
        return out


def polite(outputs: int = 1) -> nn.Module:
    return Greedy(lambda x: 3.0 * x + 1.0, outputs)


def on_inputs(model: Any) -> FMGP:
    return FMGP(model, "regression", kernel=RBF(on="inputs"), **QUICK)


@pytest.mark.parametrize("form", ["arrays", "numpy", "mapping", "list", "loader", "view"])
@pytest.mark.parametrize("change", [scaled, reshaped, differentiated])
def test_kernel_sees_the_inputs_as_they_were_given(change: Callable[[Tensor], Tensor], form: str) -> None:
    x, y = inputs(), values()
    wide = torch.cat([x, x], 1)
    forms: dict[str, Any] = {
        "arrays": (x, y),
        "numpy": (x.numpy(), y.numpy()),
        "mapping": {"input": x, "y": y},
        "list": [(x, y)],
        "loader": DataLoader(TensorDataset(x, y), batch_size=N),
        "view": (wide[:, :WIDTH], y),
    }
    expected = on_inputs(polite()).fit((inputs(), values()))
    method = on_inputs(Greedy(change)).fit(forms[form])
    assert same(numbers(method), numbers(expected))
    assert same(answers(method.predict(forms[form] if form != "list" else x)), answers(expected.predict(inputs())))
    assert torch.equal(x, inputs())
    assert torch.equal(wide, torch.cat([inputs(), inputs()], 1))
    assert not x.requires_grad
    assert x.shape == (N, WIDTH)


def test_data_stay_though_no_kernel_looks_at_them() -> None:
    x = inputs()
    method = FMGP(Greedy(scaled), "regression", **QUICK).fit((x, values()))
    assert torch.equal(method.predict(x).latent.mean, in_eval(polite(), inputs()))
    assert torch.equal(x, inputs())


def test_data_stay_though_the_model_fails() -> None:
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError(f"the network fell over at {float(x.zero_().sum())}")

    x = inputs()
    with pytest.raises(RuntimeError, match="fell over"):
        FMGP(fails, "regression", **QUICK).fit((x, values()))
    assert torch.equal(x, inputs())


def test_outputs_in_the_memory_of_the_inputs_are_kept() -> None:
    x = inputs()
    method = FMGP(lambda x: x.mul_(2.0)[:, :1], "regression", kernel=RBF(on="inputs"), **QUICK).fit((x, values()))
    assert torch.equal(method.predict(x).latent.mean, 2.0 * inputs()[:, :1])
    assert torch.equal(x, inputs())


def test_data_of_inference_mode_stay_too() -> None:
    method = on_inputs(Greedy(scaled)).fit((inputs(), values()))
    with torch.inference_mode():
        x = inputs()
        pred = method.predict(x)
        assert torch.equal(x, inputs())
    assert torch.equal(pred.latent.mean, in_eval(polite(), inputs()))


@pytest.mark.parametrize("name", ["mfvi", "ensemble", "ella"])
def test_methods_that_run_the_network_often_show_it_the_same_data(name: str) -> None:
    options: Any = {"mfvi": {"steps": 3, "samples": 4}, "ella": {"weights": "all"}}.get(name, {})
    x, y = inputs(), labels()

    def predicted(network: Callable[[], nn.Module]) -> Tensor:
        model: Any = [network(), network()] if name == "ensemble" else network()
        return REGISTRY[name](model, "classification", **options).fit((x, y)).predict(x).probs

    found = predicted(lambda: Greedy(scaled, 3))
    assert torch.equal(x, inputs())
    torch.testing.assert_close(found, predicted(lambda: polite(3)))


def test_every_member_of_an_ensemble_sees_the_same_data() -> None:
    members = Members([Greedy(scaled), Greedy(scaled)])
    assert torch.equal(members(inputs()), polite()(inputs()))
