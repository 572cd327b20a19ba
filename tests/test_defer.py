"""The most uncertain rows are handed over, exactly as many as the budget allows; the page about it runs."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posthoc import FMGP, OptionError, WrongTaskError
from posthoc.evaluate.metrics import aurc, risk_coverage
from posthoc.predictive.base import LatentGaussian
from posthoc.predictive.classification import ClassificationPredictive
from posthoc.predictive.conformal import Conformal
from posthoc.predictive.regression import RegressionPredictive
from tests.cases import in_eval, inputs, mlp
from tests.test_metrics import CLASS_UNCERTAINTIES, class_case, real_case

DOUBLE = torch.float64
PAGE = (Path(__file__).parent.parent / "docs" / "decisions.md").read_text()


def with_std(std: list[float]) -> RegressionPredictive:
    values = torch.tensor(std, dtype=DOUBLE)
    return RegressionPredictive(LatentGaussian(torch.zeros_like(values), values.square()), torch.zeros_like(values))


def slow(scores: list[float], count: int) -> list[bool]:
    """Takes the largest, and the first of equal ones."""
    chosen = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]
    return [i in chosen for i in range(len(scores))]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(0, 100))
def test_as_many_rows_as_the_budget_allows_also_if_many_are_equal(stds, percent):
    pred = with_std([float(s) for s in stds])
    count = percent * len(stds) // 100
    assert pred.defer(percent / 100).tolist() == slow(stds, count)
    assert pred.defer(count).tolist() == slow(stds, count)


@pytest.mark.parametrize(
    ("budget", "count"),
    [
        *((0.29, 29), (0.57, 57), (0.1, 10), (0.999, 99), (0.0, 0), (1.0, 100), (0, 0), (1, 1), (500, 100)),
        *((np.float64(0.29), 29), (np.int64(29), 29), (torch.tensor(29), 29), (torch.tensor(0.29, dtype=DOUBLE), 29)),
    ],
)
def test_a_share_is_rounded_down_and_an_integer_is_a_number_of_rows(budget, count):
    deferred = real_case(100)[0].defer(budget)
    assert (deferred.dtype, deferred.shape, deferred.sum()) == (torch.bool, (100,), count)


@pytest.mark.parametrize("budget", [-0.1, 1.5, math.nan, math.inf, -1])
def test_impossible_budgets_are_refused(budget):
    with pytest.raises(OptionError, match=r"share of the rows from 0\.0 to 1\.0, or a number of rows, got"):
        real_case()[0].defer(budget)


@pytest.mark.parametrize("options", [{}, {"budget": 0.1, "threshold": 1.0}, {"threshold": math.nan}])
def test_either_a_budget_or_a_threshold(options):
    with pytest.raises(OptionError, match="either a budget or a threshold"):
        real_case()[0].defer(**options)


def test_a_threshold_defers_what_lies_above_it_in_any_batch():
    pred, above = with_std([1.0, 3.0, 2.0, 2.5, math.nan]), [False, True, False, True, True]
    assert pred.defer(threshold=2.0).tolist() == [bool(pred[i].defer(threshold=2.0)) for i in range(5)] == above
    assert pred.defer(threshold=math.inf).tolist() == [False, False, False, False, True]
    assert pred.defer(2).tolist() == [False, True, False, False, True]
    classes, _ = class_case(1000)
    assert torch.equal(classes.defer(threshold=float(classes.uncertainty().quantile(0.9))), classes.defer(0.1))


def test_uncertainties_by_name():
    pred, _ = class_case()
    p = pred.probs
    expected = {
        "entropy": -(p * p.log()).sum(-1),
        "least_confidence": 1.0 - p.amax(-1),
        "variance": pred.latent.variance.mean(-1),
        "mutual_information": pred.mutual_information(),
    }
    assert tuple(expected) == CLASS_UNCERTAINTIES
    for by, score in expected.items():
        torch.testing.assert_close(pred.uncertainty(by), score)
        assert pred.defer(10, by=by).tolist() == slow(score.tolist(), 10)
    assert torch.equal(pred.uncertainty(), pred.uncertainty("entropy"))
    assert len({tuple(pred.defer(10, by=by).tolist()) for by in expected}) > 1


@pytest.mark.parametrize("outputs", [1, 3])
def test_regression_goes_by_the_standard_deviation_of_all_outputs(outputs):
    pred, _ = real_case(outputs=outputs)
    variance = (pred.latent_variance + pred.noise).mean(-1)
    torch.testing.assert_close(pred.uncertainty(), variance.sqrt())
    torch.testing.assert_close(pred.uncertainty("variance"), variance)
    assert pred.defer(0.2).tolist() == slow(variance.tolist(), 12)
    assert pred.defer(5, by=lambda p: p.mean[:, 0]).tolist() == slow(pred.mean[:, 0].tolist(), 5)


def test_very_sure_predictions_have_an_order():
    logits = torch.tensor([[30.0, 0.0], [20.0, 0.0], [40.0, 0.0]])
    log_probs = logits.double().log_softmax(-1).float()
    pred = ClassificationPredictive(LatentGaussian(logits, torch.zeros_like(logits)), log_probs, torch.ones(()))
    assert (pred.probs[:, 0] == 1).all()
    for by in ("entropy", "least_confidence"):
        assert pred.defer(1, by=by).tolist() == [False, True, False]


def test_many_classes_are_worked_out_some_rows_at_a_time(monkeypatch):
    pred, _ = class_case(49)
    whole = pred.uncertainty()
    monkeypatch.setattr("posthoc.predictive.base.rows_that_fit", lambda numbers: 3)
    assert torch.equal(pred.uncertainty(), whole)


def test_unknown_names_and_the_other_tasks_are_refused():
    with pytest.raises(OptionError, match=r"'entropy', 'least_confidence', .* got 'doubt'"):
        class_case()[0].defer(0.1, by="doubt")
    for by in ("entropy", "mutual_information"):
        with pytest.raises(WrongTaskError, match=f"A RegressionPredictive has no {by}"):
            real_case()[0].defer(0.1, by=by)


@pytest.mark.parametrize("by", ["entropy", "least_confidence"])
def test_what_is_kept_has_the_risk_that_the_curve_says(by):
    pred, y = class_case(400)
    wrong = (pred.labels != y).double()
    risks = torch.stack([wrong[~pred.defer(count, by=by)].mean() for count in range(400)])
    torch.testing.assert_close(risk_coverage(pred, y, by)[1], risks.flip(0))
    torch.testing.assert_close(aurc(pred, y, by), risks.mean())
    assert pred[:0].defer(0.5).shape == (0,)


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, x, g = mlp(3), inputs(900), torch.Generator().manual_seed(0)
    y = torch.multinomial((5.0 * in_eval(model, x)).softmax(-1), 1, generator=g).squeeze(1)
    bayes = FMGP(model, "classification", variance="shared", steps=3, num_inducing=4).fit((x[:300], y[:300]))
    names = {"bayes": bayes, "calibration": (x[300:600], y[300:600]), "x": x[600:], "y": y[600:], "x_val": x[:300]}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        exec(block, names)
    assert int(names["hard"].sum()) == 30
    wrong = (names["machine"].labels != names["y"][~names["hard"]]).double().mean()
    torch.testing.assert_close(names["risk"][269], wrong)
    names["conformal"].save("conformal.safetensors")
    assert isinstance(Conformal.load("conformal.safetensors", bayes), Conformal)
