"""Detection and selective prediction against scikit-learn and loops, and what each uncertainty is."""

from __future__ import annotations

import math
from itertools import pairwise, permutations

import numpy as np
import pytest
import sklearn.metrics as sk  # type: ignore[import-untyped]
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posthoc.evaluate.metrics import AURC, OOD, RiskCoverage, auroc, fpr_at, selective_risk
from posthoc.evaluate.metrics.rows import UNCERTAINTIES
from posthoc.predictive.base import ClassificationPredictive
from tests.test_metrics import class_case, real_case

DOUBLE = torch.float64


def outside_case(n=80):
    return class_case(n, seed=1, sharpness=1.0)[0]


@pytest.mark.parametrize("score", UNCERTAINTIES)
def test_detection_against_scikit_learn(score):
    inside, outside = class_case(100)[0], outside_case()
    metric = OOD(score)
    metric.update(inside, is_ood=False)
    metric.update(outside, is_ood=True)
    found = metric.compute()
    values = torch.cat([UNCERTAINTIES[score](inside), UNCERTAINTIES[score](outside)])
    truth = np.repeat([0, 1], [100, 80])
    assert float(found["auc"]) == pytest.approx(sk.roc_auc_score(truth, values), abs=1e-14)
    fpr, tpr, _ = sk.roc_curve(truth, values, drop_intermediate=False)
    assert float(found["fpr95"]) == fpr[np.argmax(tpr >= 0.95)]


def test_flatter_predictions_are_detected():
    metric = OOD("entropy")
    metric.update(class_case(1000)[0], is_ood=False)
    metric.update(outside_case(1000), is_ood=True)
    assert 0.7 < float(metric.compute()["auc"]) < 0.95


def test_any_score_of_a_regression_may_detect():
    pred, _ = real_case()
    metric = OOD(lambda p: p.std.squeeze(-1))
    metric.update(pred[:30], is_ood=False)
    metric.update(pred[30:], is_ood=True)
    by_variance = OOD("variance")
    by_variance.update(pred[:30], is_ood=False)
    by_variance.update(pred[30:], is_ood=True)
    assert (
        float(metric.compute()["auc"])
        == float(by_variance.compute()["auc"])
        == float(auroc(pred.variance[:30, 0], pred.variance[30:, 0]))
    )


few_values = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=30)


@settings(max_examples=100, deadline=None)
@given(inside=few_values, outside=few_values)
def test_ties_count_half_and_swapping_the_sides_turns_the_area_over(inside, outside):
    a, b = torch.tensor(inside, dtype=DOUBLE), torch.tensor(outside, dtype=DOUBLE)
    pairs = [(o > i) + 0.5 * (o == i) for o in outside for i in inside]
    assert float(auroc(a, b)) == pytest.approx(np.mean(pairs), abs=1e-14)
    assert float(auroc(a, b) + auroc(b, a)) == pytest.approx(1.0, abs=1e-14)
    assert float(auroc(-a, -b)) == pytest.approx(float(auroc(b, a)), abs=1e-14)
    assert float(auroc(a.exp(), b.exp())) == float(auroc(a, b))


@settings(max_examples=100, deadline=None)
@given(inside=few_values, outside=few_values, tpr=st.sampled_from([0.5, 0.8, 0.95, 1.0]))
def test_the_false_positives_of_a_threshold(inside, outside, tpr):
    a, b = torch.tensor(inside, dtype=DOUBLE), torch.tensor(outside, dtype=DOUBLE)
    fitting = [t for t in outside if np.mean(b.numpy() >= t) >= tpr]
    assert float(fpr_at(tpr, a, b)) == pytest.approx(np.mean(a.numpy() >= max(fitting)))


def test_exact_shares_are_not_lost_to_rounding():
    for tpr, n in ((0.95, 20), (0.95, 60), (0.95, 1000), (0.55, 100), (0.56, 100)):
        outside = torch.arange(n, dtype=DOUBLE)
        threshold = n - round(tpr * n)  # all below it may be missed
        inside = torch.tensor([threshold - 0.5, threshold], dtype=DOUBLE)
        assert float(fpr_at(tpr, inside, outside)) == 0.5


def test_what_the_uncertainties_are():
    pred, _ = class_case(20)
    p = pred.probs
    expected = {
        "entropy": -(p * p.log()).sum(-1),
        "least_confidence": 1 - p.amax(-1),
        "variance": pred.variance.mean(-1),
        "mutual_information": pred.mutual_information(),
    }
    for name, values in expected.items():
        torch.testing.assert_close(UNCERTAINTIES[name](pred), values)
    regression, _ = real_case(outputs=3)
    torch.testing.assert_close(UNCERTAINTIES["variance"](regression), regression.variance.mean(-1))


def test_mutual_information_falls_with_the_variance_and_never_exceeds_the_entropy():
    pred, _ = class_case(20)
    flat = ClassificationPredictive(pred.mean, 10 * pred.variance, pred.log_probs, pred.temperature)
    little, much = (UNCERTAINTIES["mutual_information"](p) for p in (pred, flat))
    assert (little > 0).all()
    assert little.mean() < much.mean() < math.log(4)


def test_very_sure_predictions_are_still_ordered():
    logits = torch.tensor([[120.0, 0.0], [150.0, 0.0], [130.0, 0.0]])
    pred = ClassificationPredictive(logits, torch.zeros(3, 2), logits.log_softmax(-1), torch.ones(()))
    assert not pred.entropy().any()  # in float32
    assert UNCERTAINTIES["entropy"](pred).argsort().tolist() == [1, 2, 0]


@pytest.mark.parametrize("by", UNCERTAINTIES)
def test_risk_and_coverage_of_classes_by_loops(by):
    pred, y = class_case(50)
    curve, area = RiskCoverage(by), AURC(by)
    curve.update(pred, y)
    area.update(pred, y)
    order = np.argsort(UNCERTAINTIES[by](pred).numpy())
    wrong = (pred.probs.argmax(-1) != y).double().numpy()[order]
    risks = [wrong[:k].mean() for k in range(1, 51)]
    coverage, risk = curve.compute()
    assert coverage.tolist() == pytest.approx([k / 50 for k in range(1, 51)])
    assert risk.tolist() == pytest.approx(risks)
    assert float(area.compute()) == pytest.approx(np.mean(risks))
    assert 0.0 < risks[-1] < 1.0


def test_risk_and_coverage_of_a_regression_by_loops():
    pred, y = real_case(40, outputs=2)
    metric = AURC("variance")
    metric.update(pred, y)
    order = np.argsort(pred.variance.mean(-1).numpy())
    squares = (pred.mean - y).square().mean(-1).numpy()[order]
    assert float(metric.compute()) == pytest.approx(np.mean([squares[:k].mean() for k in range(1, 41)]))


@settings(max_examples=50, deadline=None)
@given(points=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=5))
def test_tied_points_stand_in_random_order(points):
    """The curve is the mean over all orders that the scores allow."""
    curves = []
    for order in permutations(points):
        if all(a[0] <= b[0] for a, b in pairwise(order)):
            losses = [loss for _, loss in order]
            curves.append([np.mean(losses[:k]) for k in range(1, len(losses) + 1)])
    score, loss = torch.tensor(points, dtype=DOUBLE).T
    assert selective_risk(score, loss).tolist() == pytest.approx(np.mean(curves, 0).tolist())
