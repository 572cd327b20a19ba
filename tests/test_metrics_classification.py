"""Scores of class probabilities against scikit-learn, torchmetrics and definitions written as loops."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import sklearn.calibration as calibration  # type: ignore[import-untyped]
import sklearn.metrics as sk  # type: ignore[import-untyped]
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional.classification import multiclass_calibration_error

from posthoc import DataError
from posthoc.evaluate.metrics import ECE, NLL, Accuracy, AdaptiveECE, Brier, EntropyHistogram
from posthoc.predictive.base import ClassificationPredictive
from tests.test_metrics import class_case


def value(metric, *batch) -> float:
    metric.update(*batch)
    return float(metric.compute())


def predictions(probs) -> ClassificationPredictive:
    log_probs = torch.as_tensor(probs, dtype=torch.float64).log()
    return ClassificationPredictive(log_probs, torch.zeros_like(log_probs), log_probs, torch.ones(()))


def two_classes(confidence) -> ClassificationPredictive:
    """Class 0 is predicted, with these probabilities of at least one half."""
    confidence = torch.as_tensor(confidence, dtype=torch.float64)
    return predictions(torch.stack([confidence, 1.0 - confidence], -1))


def test_against_scikit_learn():
    pred, y = class_case(200)
    p = pred.probs
    assert value(NLL(), pred, y) == pytest.approx(sk.log_loss(y, p, labels=range(4)))
    assert value(Accuracy(), pred, y) == pytest.approx(sk.accuracy_score(y, p.argmax(-1)))
    assert value(Brier(), pred, y) == pytest.approx(sk.brier_score_loss(y, p, labels=range(4), scale_by_half=False))


def test_brier_by_hand():
    pred, y = predictions([[0.7, 0.2, 0.1], [1.0, 0.0, 0.0]]), torch.tensor([1, 2])
    assert value(Brier(), pred, y) == pytest.approx(((0.7**2 + 0.8**2 + 0.1**2) + 2.0) / 2)


def test_probabilities_that_underflow():
    logits = torch.tensor([[300.0, 0.0, -300.0], [0.0, 200.0, -500.0]])
    pred = ClassificationPredictive(logits, torch.zeros(2, 3), logits.log_softmax(-1), torch.ones(()))
    y = torch.tensor([2, 1])
    assert float(pred.probs[0, 2]) == 0.0
    assert value(NLL(), pred, y) == pytest.approx(300.0)
    assert value(Brier(), pred, y) == pytest.approx(1.0)
    assert value(ECE(), pred, y) == pytest.approx(0.5)
    impossible = predictions([[1.0, 0.0]])
    assert value(NLL(), impossible, torch.tensor([1])) == math.inf


def test_the_networks_choice_is_the_predicted_class_where_probabilities_tie():
    logits = torch.tensor([[1.0, 1.0 + 1e-7, -5.0]])
    half = torch.tensor([[0.5, 0.5, 0.0]]).log()
    pred = ClassificationPredictive(logits, torch.zeros(1, 3), half, torch.ones(()))
    assert value(Accuracy(), pred, torch.tensor([1])) == 1.0


def ece_by_loops(confidence, hits, edges) -> float:
    """Σ_b (n_b / N) |accuracy_b - confidence_b| over bins (a, b]."""
    total = 0.0
    for a, b in pairwise(edges):
        members = [i for i, c in enumerate(confidence) if a < c <= b]
        if members:
            gap = np.mean([hits[i] for i in members]) - np.mean([confidence[i] for i in members])
            total += len(members) / len(confidence) * abs(gap)
    return total


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_ece_by_loops_and_torchmetrics(bins):
    pred, y = class_case(300)
    confidence, top = pred.probs.max(-1)
    found = value(ECE(bins), pred, y)
    assert found > 0.05
    assert found == pytest.approx(ece_by_loops(confidence.tolist(), (top == y).tolist(), np.linspace(0, 1, bins + 1)))
    assert found == pytest.approx(float(multiclass_calibration_error(pred.probs, y, 4, n_bins=bins)), rel=1e-6)


def test_bins_are_closed_on_the_right():
    """0.5 and 0.75 end their bins, and certainty is in the last one with what is almost certain."""
    confidence, hits = [0.5, 0.6, 0.75, 0.76, 1.0], [1, 0, 1, 0, 1]
    pred, y = two_classes(confidence), 1 - torch.tensor(hits)
    assert value(ECE(4), pred, y) == pytest.approx((0.5 + abs(1 - 1.35) + abs(1 - 1.76)) / 5)


@pytest.mark.parametrize(("n", "bins"), [(300, 15), (90, 10), (40, 4)])
def test_adaptive_ece_against_scikit_learn(n, bins):
    pred, y = class_case(n)
    confidence, top = pred.probs.max(-1)
    hits = (top == y).double()
    true, said = calibration.calibration_curve(hits, confidence, n_bins=bins, strategy="quantile")
    assert len(true) == bins
    assert value(AdaptiveECE(bins), pred, y) == pytest.approx(np.abs(true - said).mean())  # equal bins, equal weights


def test_adaptive_ece_where_the_points_do_not_divide_equally():
    confidence = torch.linspace(0.51, 0.99, 11, dtype=torch.float64)
    hits = torch.tensor([1, 0, 0, 1, 1, 0, 1, 1, 0, 1, 1])
    gaps = (hits - confidence).split([3, 3, 3, 2])
    expected = sum(abs(float(gap.sum())) for gap in gaps) / 11
    assert value(AdaptiveECE(4), two_classes(confidence), 1 - hits) == pytest.approx(expected)


def test_adaptive_ece_of_fewer_points_than_bins_and_of_ties():
    pred, y = two_classes([0.6, 0.9]), torch.tensor([0, 1])
    assert value(AdaptiveECE(15), pred, y) == pytest.approx((0.4 + 0.9) / 2)
    tied, y = two_classes([0.8] * 10), torch.tensor([0] * 7 + [1] * 3)
    assert value(AdaptiveECE(5), tied, y) == pytest.approx(0.1)
    assert value(AdaptiveECE(5), tied, y.flip(0)) == pytest.approx(0.1)


@pytest.mark.parametrize("metric", [ECE, AdaptiveECE])
def test_calibrated_predictions_have_a_small_error_and_others_theirs(metric):
    g = torch.Generator().manual_seed(0)
    confidence = 0.5 + 0.5 * torch.rand(100_000, dtype=torch.float64, generator=g)
    y = (torch.rand(100_000, dtype=torch.float64, generator=g) > confidence).long()
    assert value(metric(), two_classes(confidence), y) < 0.01
    bolder = 0.5 + 0.5 * (2 * confidence - 1).sqrt()
    expected = float((bolder - confidence).mean())
    assert value(metric(), two_classes(bolder), y) == pytest.approx(expected, abs=0.01)


@settings(max_examples=50, deadline=None)
@given(
    n=st.integers(1, 30),
    classes=st.integers(2, 6),
    seed=st.integers(0, 10_000),
    sharpness=st.sampled_from([0.0, 1, 30]),
)
def test_ranges(n, classes, seed, sharpness):
    pred, y = class_case(n, classes, seed=seed, sharpness=sharpness)
    assert 0.0 <= value(Accuracy(), pred, y) <= 1.0
    assert 0.0 <= value(Brier(), pred, y) <= 2.0
    one_bin = abs(value(Accuracy(), pred, y) - float(pred.probs.amax(-1).mean()))
    for metric in (ECE, AdaptiveECE):
        assert one_bin - 1e-12 <= value(metric(), pred, y) <= 1.0  # more bins can only add
        assert value(metric(1), pred, y) == pytest.approx(one_bin, abs=1e-12)


def test_entropy_histogram_against_numpy():
    pred, y = class_case(500)
    histogram = EntropyHistogram(20)
    histogram.update(pred, y)
    histogram.update(pred)  # out-of-distribution data have no targets
    edges, counts = histogram.compute()
    expected, where = np.histogram(pred.entropy(), 20, (0.0, math.log(4)))
    assert counts.tolist() == (2 * expected).tolist()
    assert edges.tolist() == pytest.approx(where.tolist())


def test_rounding_does_not_put_an_entropy_beyond_the_last_bin():
    for classes in range(2, 60):
        histogram = EntropyHistogram(10)
        histogram.update(predictions(torch.full((1, classes), 1 / classes)))
        assert histogram.compute()[1].tolist() == [0] * 9 + [1]


def test_entropy_histogram_of_the_extremes():
    histogram = EntropyHistogram(3)
    histogram.update(predictions([[1 / 3] * 3, [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]))
    edges, counts = histogram.compute()
    assert counts.tolist() == [1, 1, 1]
    assert float(edges[-1]) == pytest.approx(math.log(3))
    with pytest.raises(DataError, match="3 classes, as before, got 2"):
        histogram.update(two_classes([0.5]))
