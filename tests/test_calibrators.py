"""Calibrators against other implementations of them, and on data that are hard for them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import expit, log_softmax, softmax
from torch import Tensor
from torch.nn.functional import cross_entropy

from posthoc import (
    Beta,
    Dirichlet,
    EnsembleTemperature,
    EntropyTemperature,
    Isotonic,
    Outputs,
    StructuredMatrix,
    StructuredVector,
    compare,
)
from posthoc.errors import MissingExtraError
from posthoc.methods.calibrators import RIDGE, best_penalty
from posthoc.methods.vector import folds
from tests.cases import reloaded, seeded

ALL = [StructuredVector, StructuredMatrix, Isotonic, Beta, EnsembleTemperature, EntropyTemperature, Dirichlet]
every = pytest.mark.parametrize("kind", ALL)


def needs(kind: type) -> None:
    pytest.importorskip("probmetrics" if issubclass(kind, StructuredMatrix) else "sklearn")


def classified(n: int, classes: int = 4, *, seed: int = 0, confused: bool = True, sharp: float = 1.0) -> Outputs:
    """Labels drawn from softmax(Af + b), or from softmax(f/2); `sharp` multiplies the logits that are given."""
    g = seeded(seed)
    f = 2.0 * torch.randn(n, classes, generator=g, dtype=torch.float64)
    mixing = torch.eye(classes, dtype=torch.float64) - 0.4 * torch.eye(classes, dtype=torch.float64).roll(1, 0)
    true = f @ mixing + torch.linspace(-1.0, 1.0, classes, dtype=torch.float64) if confused else 0.5 * f
    return Outputs(sharp * f, torch.multinomial(true.softmax(-1), 1, generator=g).squeeze(1))


def log_p_of(data: Outputs) -> np.ndarray:
    return log_softmax(data.outputs.numpy(), 1)


def nll(p: np.ndarray, data: Outputs) -> float:
    return float(-np.log(p[np.arange(len(p)), data.targets]).mean())


@pytest.mark.parametrize("kind", [StructuredVector, StructuredMatrix])
@pytest.mark.parametrize("classes", [2, 4])
def test_structured_scaling_is_that_of_probmetrics(kind, classes):
    library = pytest.importorskip("probmetrics.calibrators")
    data, test = classified(500, classes, sharp=5.0), classified(100, classes, seed=1, sharp=40.0)
    name = {StructuredVector: "svs", StructuredMatrix: "sms"}[kind]
    other = library.get_calibrator(name).fit(np.exp(log_p_of(data)), data.targets.numpy())
    found = kind().fit(data).predict(test).probs
    # probmetrics takes the logarithms in float32.
    np.testing.assert_allclose(found, other.predict_proba(np.exp(log_p_of(test))), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("n", "classes"), [(300, 2), (300, 4), (12, 3)])
def test_isotonic_is_that_of_scikit_learn(n, classes):
    isotonic = pytest.importorskip("sklearn.isotonic")
    data, test = classified(n, classes), classified(500, classes, seed=1, sharp=3.0)
    p, q = np.exp(log_p_of(data)), np.exp(log_p_of(test))
    ones = [
        isotonic.IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
        .fit(p[:, c], data.targets == c)
        .predict(q[:, c])
        for c in range(classes)
    ]
    total = np.stack(ones, 1)
    expected = total / total.sum(1, keepdims=True) * (n / (n + 1)) + 1 / (n + 1) / classes
    np.testing.assert_allclose(Isotonic().fit(data).predict(test).probs, expected, rtol=1e-9)


def test_isotonic_is_flat_beyond_its_data_and_uniform_where_every_class_has_zero():
    pytest.importorskip("sklearn")
    p = torch.tensor([0.2, 0.4, 0.6, 0.8], dtype=torch.float64)
    ends = torch.tensor([0.01, 0.2, 0.8, 0.99], dtype=torch.float64)  # the curve is 0 up to 0.2, and 1 from 0.8
    found = Isotonic(outputs_are="probs").fit(Outputs(p, torch.tensor([0, 1, 0, 1]))).predict(Outputs(ends))
    torch.testing.assert_close(found.probs[:, 1], torch.tensor([0.1, 0.1, 0.9, 0.9], dtype=torch.float64))
    method = Isotonic().fit(classified(50))
    method._fitted.y.zero_()  # as where every class is rarer than any row says
    even = torch.full((50, 4), 0.25, dtype=torch.float64)
    torch.testing.assert_close(method.predict(classified(50)).probs, even)


def test_beta_is_the_least_loss_with_positive_slopes():
    data, classes = classified(300), 4
    data = data.with_targets(torch.tensor([0, 1, 3, 2])[data.targets])  # two classes would have negative slopes
    log_p = log_p_of(data)
    found = Beta().fit(data)
    assert (found._fitted.weight[:, :2] >= 0.0).all()
    assert (found._fitted.weight[:, :2] == 0.0).any()
    raised = []
    for c in range(classes):
        a, b, t = log_p[:, c], np.log(-np.expm1(log_p[:, c])), (data.targets == c).numpy()

        def loss(w, a=a, b=b, t=t):  # the slopes are squares here
            z, away = w[0] ** 2 * a - w[1] ** 2 * b + w[2], np.array([w[0] ** 2 - 1.0, w[1] ** 2 - 1.0, w[2]])
            return (np.logaddexp(0.0, z) - t * z).sum() + 0.5 * RIDGE * (away**2).sum()

        w = minimize(loss, [0.9, 0.8, 0.1], method="BFGS", options={"gtol": 1e-6}).x
        raised.append(expit(w[0] ** 2 * a - w[1] ** 2 * b + w[2]))
    expected = np.stack(raised, 1)
    np.testing.assert_allclose(found.predict(data).probs, expected / expected.sum(1, keepdims=True), atol=1e-4)


def test_ensemble_temperature_finds_the_parts_it_was_drawn_from():
    g, n = seeded(3), 20_000
    f = 3.0 * torch.randn(n, 4, generator=g, dtype=torch.float64)
    true = 0.5 * (f / 3.0).softmax(-1) + 0.3 * f.softmax(-1) + 0.2 / 4
    data = Outputs(f, torch.multinomial(true, 1, generator=g).squeeze(1))
    found = EnsembleTemperature().fit(data)
    assert nll(found.predict(data).probs.numpy(), data) <= nll(true.numpy(), data)
    torch.testing.assert_close(found.predict(data).probs, true, rtol=0, atol=0.03)


@pytest.mark.parametrize("sharp", [0.3, 1.0, 8.0])
def test_ensemble_temperature_is_at_least_as_good_as_a_search(sharp):
    data = classified(300, sharp=sharp)
    log_p = log_p_of(data)

    def loss(at: np.ndarray) -> float:
        w = softmax(at[1:])
        return nll(w[0] * softmax(np.exp(at[0]) * log_p, 1) + w[1] * np.exp(log_p) + w[2] / 4, data)

    starts = [np.array([t, *w]) for t in (-2.0, -1.0, 0.0) for w in 2.0 * np.eye(3)]
    best = min(minimize(loss, at, method="Nelder-Mead", options={"maxiter": 2000}).fun for at in starts)
    assert nll(EnsembleTemperature().fit(data).predict(data).probs.numpy(), data) <= best + 1e-5


def test_entropy_temperature_finds_the_one_it_was_drawn_from():
    g, n = seeded(4), 20_000
    log_p = (3.0 * torch.randn(n, 4, generator=g, dtype=torch.float64)).log_softmax(-1)
    h = (torch.special.entr(log_p.exp()).sum(-1, keepdim=True) / math.log(4)).log()
    true = (log_p / (1.0 + (0.5 * h + 2.0).exp()).log()).softmax(-1)
    data = Outputs(log_p, torch.multinomial(true, 1, generator=g).squeeze(1))
    found = EntropyTemperature().fit(data)
    assert nll(found.predict(data).probs.numpy(), data) <= nll(true.numpy(), data)
    assert found._fitted.weight.tolist() == pytest.approx([0.5, 2.0], abs=0.15)


@pytest.mark.parametrize("penalty", [0.01, 1.0])
def test_dirichlet_is_the_least_penalized_loss(penalty):
    data, classes = classified(200, 3), 3
    log_p = log_p_of(data)

    def loss(at: np.ndarray) -> float:
        w, b = at[:9].reshape(3, 3), at[9:]
        off = w[~np.eye(3, dtype=bool)]
        return nll(softmax(log_p @ w.T + b, 1), data) + penalty * ((off**2).sum() / 6 + (b**2).sum() / 3)

    start = np.concatenate([np.eye(classes).ravel(), np.zeros(classes)])
    best = minimize(loss, start, method="BFGS", options={"gtol": 1e-7}).x
    expected = softmax(log_p @ best[:9].reshape(3, 3).T + best[9:], 1)
    np.testing.assert_allclose(Dirichlet(penalty=penalty).fit(data).predict(data).probs, expected, atol=1e-4)


def test_the_penalty_is_weak_where_classes_are_confused_and_strong_where_not():
    start = torch.cat([torch.eye(4), torch.zeros(4, 1)], 1).double()
    found = [best_penalty(list(folds(classified(400, confused=confused), 0)), start) for confused in (True, False)]
    assert found[0] < found[1]


@every
def test_rows_of_a_biased_network_are_better_calibrated(kind):
    needs(kind)
    data, test = classified(2000, sharp=4.0), classified(2000, seed=1, sharp=4.0)
    pred = kind().fit(data).predict(test)
    assert float(-pred.log_prob(test.targets).mean()) < float(cross_entropy(test.outputs, test.targets)) - 0.1
    moved = (pred.labels != test.outputs.argmax(-1)).double().mean()
    assert (moved == 0.0) == kind.keeps_class
    assert torch.equal(pred.latent.mean, test.outputs)


def hard(name: str) -> tuple[Tensor, Tensor, dict[str, str]]:
    data, probs = classified(60), {"outputs_are": "probs"}
    logits, y = data.outputs, data.targets
    assert y is not None
    p = logits.softmax(-1)
    kept = p.where(p > 0.05, 0.0)
    cases: dict[str, tuple[Tensor, Tensor, dict[str, str]]] = {
        "a class without rows": (logits, y.clamp_max(2), {}),
        "zeros": (kept / kept.sum(-1, True), y, probs),
        "two classes": (logits[:, :2], y % 2, {}),
        "one logit": (logits[:, 0], y % 2, {}),
        "one probability": (p[:, 0], torch.where(y == 0, 1, 0), probs),
        "six rows": (logits[:6], y[:6], {}),
        "enormous logits": (1e4 * logits, y, {}),
    }
    return cases[name]


@every
@pytest.mark.parametrize(
    "name",
    ["a class without rows", "zeros", "two classes", "one logit", "one probability", "six rows", "enormous logits"],
)
@pytest.mark.filterwarnings("ignore::posthoc.PosthocWarning")
def test_hard_data_are_predicted_no_worse_than_by_chance(kind, name, tmp_path):
    needs(kind)
    outputs, y, options = hard(name)
    data = Outputs(outputs, y)
    method = kind(None, "classification", **options).fit(data)
    pred = method.predict(data)
    log_p = pred.log_probs
    assert log_p.isfinite().all()
    assert float(-pred.log_prob(y).mean()) <= math.log(log_p.shape[1]) + 1e-3
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones_like(log_p[:, 0]))
    assert torch.equal(reloaded(method, tmp_path).predict(data).log_probs, log_p)


def test_compare_tells_the_share_of_classes_moved_where_they_can_move():
    data = classified(300)
    found = compare(None, data, data, ["temperature", "vector", "ensemble-temperature", "dirichlet"])
    moved = Dirichlet().fit(data).predict(data).labels != data.outputs.argmax(-1)
    assert found["dirichlet"].figures["classes_moved"] == pytest.approx(float(moved.double().mean()))
    assert found["vector"].figures["classes_moved"] > 0.0
    assert all("classes_moved" not in found[name].figures for name in ("temperature", "ensemble-temperature"))
    assert "classes moved" in str(found)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "probmetrics", None)
    with pytest.raises(MissingExtraError, match="calibrators"):
        StructuredMatrix().fit(classified(50))
