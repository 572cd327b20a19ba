"""Vector scaling against SciPy, and the choice of its ridge."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax
from torch import Tensor

from posthoc import Outputs, PosthocWarning, Temperature
from posthoc.methods.vector import Vector
from tests.cases import reloaded, seeded

C = 4
SCALE = torch.tensor([0.4, 1.0, 1.6, 0.7], dtype=torch.float64)
BIAS = torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=torch.float64)


def classified(n: int, *, scale: Tensor = SCALE, bias: Tensor = BIAS, seed: int = 0) -> Outputs:
    """Labels drawn from softmax(a∘f + b), where f has mean 0 over the classes."""
    g = seeded(seed)
    f = 2.0 * torch.randn(n, C, generator=g, dtype=torch.float64)
    f -= f.mean(-1, keepdim=True)
    return Outputs(f, torch.multinomial((scale * f + bias).softmax(-1), 1, generator=g).squeeze(1))


PLAIN = {"scale": 0.5 * torch.ones_like(SCALE), "bias": torch.zeros_like(BIAS)}  # temperature scaling is enough


@pytest.mark.parametrize("ridge", [0.5, 50.0])
def test_scale_and_bias_are_those_of_the_least_penalised_loss(ridge):
    data = classified(300)
    found = Vector(None, "classification", ridge=ridge).fit(data)
    f, y = data.outputs.numpy(), data.targets.numpy()
    inverse = 1.0 / Temperature(None, "classification").fit(data).likelihood.temperature.item()
    size = inverse * np.sqrt((f**2).mean())

    def loss(w: np.ndarray) -> float:
        a, b = w.reshape(2, C)
        data_term = -log_softmax(a * f + b, 1)[np.arange(len(y)), y].sum()
        return data_term + 0.5 * ridge * (((a / inverse - 1.0) ** 2).sum() + ((b / size) ** 2).sum())

    best = minimize(loss, np.concatenate([np.full(C, inverse), np.zeros(C)]), method="BFGS", options={"gtol": 1e-6})
    assert found._fitted.scale.numpy() == pytest.approx(best.x[:C], rel=1e-4)
    assert found._fitted.bias.numpy() == pytest.approx(best.x[C:], rel=1e-4, abs=1e-5)


def test_true_scale_and_bias_are_found_and_make_the_prediction():
    data = classified(20_000)
    method = Vector(None, "classification").fit(data)
    fitted, pred = method._fitted, method.predict(data)
    torch.testing.assert_close(fitted.scale, SCALE, rtol=0.1, atol=0)
    torch.testing.assert_close(fitted.bias, BIAS - BIAS.mean(), rtol=0, atol=0.1)
    torch.testing.assert_close(pred.probs, (fitted.scale * data.outputs + fitted.bias).softmax(-1))
    assert torch.equal(pred.latent.mean, data.outputs)
    assert (pred.latent.variance == 0).all()
    assert (pred.labels != data.outputs.argmax(-1)).any()


def test_an_infinite_ridge_is_temperature_scaling():
    data = classified(200)
    found, expected = (method.fit(data).predict(data).probs for method in (Vector(ridge=math.inf), Temperature()))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_validation_data_choose_the_ridge():
    data, vals = classified(400), (classified(4000, **PLAIN, seed=5), classified(4000, seed=5))
    strong, weak = (Vector(None, "classification").fit(data, val=val).chosen_ridge for val in vals)
    assert strong == math.inf
    assert weak <= 10.0


@pytest.mark.parametrize("seed", range(4))
def test_cross_validation_is_of_rows_the_fit_has_not_seen(seed):
    """Rows that were seen would always speak for the weakest ridge."""
    assert Vector(None, "classification").fit(classified(60, **PLAIN, seed=seed)).chosen_ridge >= 10.0


def test_what_is_added_to_all_logits_of_a_row_changes_nothing():
    data = classified(300)
    shifted = Outputs(data.outputs + 100.0 * torch.randn(300, 1, dtype=torch.float64), data.targets)
    a, b = (Vector(None, "classification").fit(d).predict(d).probs for d in (data, shifted))
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def test_reading_rows_in_parts_gives_the_same(monkeypatch):
    data = classified(60)
    whole = Vector(None, "classification").fit(data)._fitted
    monkeypatch.setattr("posthoc.likelihoods.temperature.rows_that_fit", lambda numbers: 7)
    cut = Vector(None, "classification").fit(data)._fitted
    torch.testing.assert_close((cut.scale, cut.bias), (whole.scale, whole.bias), rtol=1e-6, atol=1e-9)


def test_files_hold_the_options_and_the_chosen_ridge(tmp_path):
    method = Vector(None, "classification", seed=4).fit(classified(300))
    again = reloaded(method, tmp_path)
    assert (again.config.ridge, again.config.seed, again.chosen_ridge) == (None, 4, method.chosen_ridge)


def test_data_that_are_all_right_are_told_and_left_to_the_temperature():
    logits = 2.0 * torch.eye(C, dtype=torch.float64).repeat(10, 1)
    with pytest.warns(PosthocWarning, match="all right"):
        assert Vector(prior=None).fit(Outputs(logits, logits.argmax(-1))).chosen_ridge == math.inf
