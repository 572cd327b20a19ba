"""`Scores`: the names it promises, and that each figure is its metric's."""

from __future__ import annotations

import numpy as np
import pytest
import sklearn.metrics as sk  # type: ignore[import-untyped]
import torch

from posthoc import DataError, WrongTaskError
from posthoc.evaluate.metrics import AURC, CQM, CRPS, ECE, MAE, NLL, RMSE, Accuracy, Brier, Coverage, Scores, Width
from tests.test_metrics import class_case, real_case


def value(metric, *batch) -> float:
    metric.update(*batch)
    return float(metric.compute())


def test_classification():
    pred, y = class_case()
    scores = Scores("classification")
    scores.update(pred, y)
    expected = {"nll": NLL(), "accuracy": Accuracy(), "ece": ECE(15), "brier": Brier(), "aurc": AURC("entropy")}
    found = scores.compute()
    assert list(found) == list(expected)
    assert all(type(figure) is float for figure in found.values())
    assert found == pytest.approx({name: value(metric, pred, y) for name, metric in expected.items()}, rel=1e-12)


def test_classification_with_out_of_distribution_data():
    pred, y = class_case()
    outside, _ = class_case(40, seed=1, sharpness=1.0)
    scores = Scores("classification")
    scores.update_ood(outside[:30])
    scores.update(pred, y)
    before = scores.compute()
    scores.update_ood(outside[30:])
    found = scores.compute()
    assert set(found) == {"nll", "accuracy", "ece", "brier", "aurc", "ood_auc", "ood_fpr95"}
    truth, entropy = np.repeat([0, 1], [60, 40]), torch.cat([pred.entropy(), outside.entropy()])
    assert found["ood_auc"] == pytest.approx(sk.roc_auc_score(truth, entropy))
    fpr, tpr, _ = sk.roc_curve(truth, entropy, drop_intermediate=False)
    assert found["ood_fpr95"] == pytest.approx(fpr[np.argmax(tpr >= 0.95)])
    assert before["ood_auc"] == pytest.approx(sk.roc_auc_score(truth[:90], entropy[:90]))
    assert before["nll"] == found["nll"]


def test_out_of_distribution_data_alone_are_not_enough():
    scores = Scores("classification")
    scores.update_ood(class_case()[0])
    with pytest.raises(DataError, match=r"Expected some data before NLL\.compute"):
        scores.compute()


@pytest.mark.parametrize("outputs", [1, 3])
def test_regression(outputs):
    pred, y = real_case(outputs=outputs)
    scores = Scores("regression")
    scores.update(pred, y)
    expected = {
        "nll": NLL(),
        "rmse": RMSE(),
        "mae": MAE(),
        "crps": CRPS(),
        "cqm": CQM(),
        "coverage_50": Coverage(0.5),
        "coverage_90": Coverage(0.9),
        "coverage_95": Coverage(0.95),
        "width_90": Width(0.9),
        "aurc": AURC("variance"),
    }
    found = scores.compute()
    assert list(found) == list(expected)
    assert all(type(figure) is float for figure in found.values())
    assert found == pytest.approx({name: value(metric, pred, y) for name, metric in expected.items()}, rel=1e-12)
    with pytest.raises(WrongTaskError, match="update_ood is for classification"):
        scores.update_ood(pred)


def test_a_rank_without_out_of_distribution_data_takes_the_others():
    pred, y = class_case()
    outside, _ = class_case(40, seed=1)
    one, other, whole = (Scores("classification") for _ in range(3))
    one.update(pred[:20], y[:20])
    other.update(pred[20:], y[20:])
    other.update_ood(outside)
    whole.update(pred, y)
    whole.update_ood(outside)
    one.merge_state(other)
    assert one.compute() == pytest.approx(whole.compute(), rel=1e-12)


def test_half_precision_outputs():
    pred, y = real_case(dtype=torch.bfloat16)
    wide = real_case()[0]
    scores, exact = Scores("regression"), Scores("regression")
    scores.update(type(pred)(pred.mean, wide.latent_variance.float(), wide.noise.float()), y)
    exact.update(type(pred)(pred.mean.double(), wide.latent_variance, wide.noise), y.double())
    assert scores.compute() == pytest.approx(exact.compute(), rel=1e-4)
