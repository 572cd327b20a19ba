"""What holds for every metric: batches, order, ranks, empty data, NaN, copies; and the data the other tests score."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from posthoc import DataError, OptionError, WrongTaskError
from posthoc.evaluate.metrics import (
    AURC,
    CQM,
    CRPS,
    ECE,
    MAE,
    NLL,
    OOD,
    RMSE,
    Accuracy,
    AdaptiveECE,
    Brier,
    Coverage,
    EntropyHistogram,
    RiskCoverage,
    SampleCRPS,
    Scores,
    Width,
)
from posthoc.evaluate.metrics import rows as row_scores
from posthoc.predictive.base import ClassificationPredictive, Predictive, RegressionPredictive

DOUBLE = torch.float64


def real_case(n=60, outputs=1, dtype=DOUBLE, seed=0) -> tuple[RegressionPredictive, Tensor]:
    """Gaussian predictions, and targets that are somewhat wider than they say."""
    g = torch.Generator().manual_seed(seed)
    mean, spread = (torch.rand(n, outputs, dtype=DOUBLE, generator=g) for _ in range(2))
    y = mean + torch.randn(n, outputs, dtype=DOUBLE, generator=g)
    pred = RegressionPredictive(mean.to(dtype), spread.to(dtype), torch.full_like(spread, 0.1).to(dtype))
    return pred, y.to(dtype)


def class_case(n=60, classes=4, dtype=DOUBLE, seed=0, sharpness=2.0) -> tuple[ClassificationPredictive, Tensor]:
    """Class probabilities, and labels drawn from flatter ones: overconfident."""
    g = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(n, classes, dtype=DOUBLE, generator=g)
    y = torch.multinomial((logits / 2).softmax(-1), 1, generator=g).squeeze(-1)
    spread = torch.rand(n, classes, dtype=DOUBLE, generator=g)
    parts = [part.to(dtype) for part in (logits, spread, logits.log_softmax(-1), torch.ones(()))]
    return ClassificationPredictive(*parts), y


def with_draws(metric: SampleCRPS, pred: RegressionPredictive, y: Tensor) -> None:
    metric.update(torch.stack([pred.quantile(q) for q in (0.2, 0.5, 0.6, 0.9)]), y)


def with_first_class_outside(metric: OOD, pred: Predictive, y: Tensor) -> None:
    metric.update(pred[y != 0], False)
    metric.update(pred[y == 0], True)


def plainly(metric: Metric, pred: Predictive, y: Tensor) -> None:
    metric.update(pred, y)


Feed = Callable[[Any, Any, Tensor], None]

METRICS: dict[str, tuple[Callable[..., Metric], Callable[..., Any], Feed]] = {
    "nll": (NLL, real_case, plainly),
    "rmse": (RMSE, real_case, plainly),
    "mae": (MAE, real_case, plainly),
    "crps": (CRPS, real_case, plainly),
    "crps of draws": (SampleCRPS, real_case, with_draws),
    "cqm": (CQM, real_case, plainly),
    "coverage": (Coverage, real_case, plainly),
    "width": (Width, real_case, plainly),
    "aurc of errors": (lambda **k: AURC("variance", **k), real_case, plainly),
    "scores of a regression": (lambda **k: Scores("regression", **k), real_case, plainly),
    "nll of classes": (NLL, class_case, plainly),
    "accuracy": (Accuracy, class_case, plainly),
    "brier": (Brier, class_case, plainly),
    "ece": (ECE, class_case, plainly),
    "adaptive ece": (AdaptiveECE, class_case, plainly),
    "entropies": (EntropyHistogram, class_case, plainly),
    "risk and coverage": (RiskCoverage, class_case, plainly),
    "aurc": (AURC, class_case, plainly),
    "ood": (OOD, class_case, with_first_class_outside),
    "scores of classes": (lambda **k: Scores("classification", **k), class_case, plainly),
}

every_metric = pytest.mark.parametrize("name", METRICS)


def figures(metric: Metric) -> list[float]:
    """What compute gives, whatever its form, as numbers."""
    value = metric.compute()
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
    return torch.cat([torch.as_tensor(part, dtype=DOUBLE).reshape(-1) for part in parts]).tolist()


def fed(name: str, *batches: Any, **options: Any) -> Metric:
    make, case, feed = METRICS[name]
    pred, y = case()
    metric = make(**options)
    for rows in batches:
        feed(metric, pred[rows], y[rows])
    return metric


@every_metric
def test_batches_and_their_order_do_not_matter(name):
    whole = figures(fed(name, slice(None)))
    assert figures(fed(name, slice(0, 7), slice(7, 7), slice(7, 60))) == pytest.approx(whole, rel=1e-12)
    shuffled = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    assert figures(fed(name, *shuffled.split(13))) == pytest.approx(whole, rel=1e-12)
    assert figures(fed(name, slice(0, 7))) != pytest.approx(whole, rel=1e-3)


@every_metric
def test_states_of_two_ranks_are_merged(name):
    one, other, none = fed(name, slice(0, 11)), fed(name, slice(11, 60)), fed(name)
    part = figures(one)
    one.merge_state(other)
    one.merge_state(none)
    none.merge_state(one)
    whole = figures(fed(name, slice(None)))
    assert figures(one) == pytest.approx(whole, rel=1e-12)
    assert figures(none) == pytest.approx(whole, rel=1e-12)
    assert part != pytest.approx(whole, rel=1e-3)


@every_metric
def test_an_empty_metric_says_so_and_nothing_else(name):
    metric = fed(name)
    for _ in range(2):  # never fed, then fed with nothing
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(DataError, match=r"Expected some .*data before .*compute\(\), got none"):
                metric.compute()
        _, case, feed = METRICS[name]
        pred, y = case()
        feed(metric, pred[:0], y[:0])


@every_metric
def test_copies_resets_and_moves(name):
    metric = fed(name, slice(0, 30))
    half = figures(metric)
    copies = [copy.deepcopy(metric), pickle.loads(pickle.dumps(metric)), metric.clone()]
    metric.to("cpu")
    _, case, feed = METRICS[name]
    pred, y = case()
    feed(metric, pred[30:], y[30:])
    whole = figures(fed(name, slice(None)))
    assert figures(metric) == pytest.approx(whole, rel=1e-12)
    for made in copies:
        assert figures(made) == pytest.approx(half, rel=1e-12)
    metric.reset()
    feed(metric, pred[:30], y[:30])
    assert figures(metric) == pytest.approx(half, rel=1e-12)


def test_calling_a_metric_scores_the_batch_and_adds_it():
    pred, y = class_case()
    metric, scores = Brier(), Scores("classification")
    for rows in (slice(0, 20), slice(20, 60)):
        alone = Scores("classification")
        alone.update(pred[rows], y[rows])
        assert float(metric(pred[rows], y[rows])) == pytest.approx(alone.compute()["brier"], rel=1e-12)
        assert scores(pred[rows], y[rows]) == pytest.approx(alone.compute(), rel=1e-12)
    assert figures(metric) == pytest.approx(figures(fed("brier", slice(None))), rel=1e-12)
    assert figures(scores) == pytest.approx(figures(fed("scores of classes", slice(None))), rel=1e-12)


@pytest.mark.parametrize("name", ["nll", "rmse", "crps", "crps of draws", "cqm", "width", "aurc of errors"])
def test_nan_predictions_are_refused_and_leave_no_trace(name):
    metric = fed(name, slice(0, 30))
    before = figures(metric)
    pred, y = real_case()
    spoilt = RegressionPredictive(pred.mean.index_fill(0, torch.tensor(3), torch.nan), pred.variance, pred.noise)
    with pytest.raises(DataError, match="NaN in row 3"):
        METRICS[name][2](metric, spoilt, y)
    assert figures(metric) == before


@pytest.mark.parametrize("name", ["ece", "adaptive ece", "entropies", "aurc", "ood", "brier", "scores of classes"])
def test_nan_probabilities_are_refused_and_leave_no_trace(name):
    metric = fed(name, slice(0, 30))
    before = figures(metric)
    pred, y = class_case()
    spoilt = ClassificationPredictive(pred.mean, pred.variance, pred.log_probs * torch.nan, pred.temperature)
    with pytest.raises(DataError, match="NaN in row 0"):
        METRICS[name][2](metric, spoilt, y)
    assert figures(metric) == before


def test_a_batch_is_scored_whole_or_not_at_all():
    """NaN where only some of the metrics look."""
    metric = fed("scores of classes", slice(0, 30))
    before = figures(metric)
    pred, y = class_case()
    log_probs = pred.log_probs.scatter(-1, ((y + 1) % 4)[:, None], torch.nan)  # never the label's own
    spoilt = ClassificationPredictive(pred.mean, pred.variance, log_probs, pred.temperature)
    NLL().update(spoilt, y)
    for add in (metric.update, metric):
        with pytest.raises(DataError, match="NaN in row 0"):
            add(spoilt, y)
        assert figures(metric) == before


def test_bad_targets_leave_no_trace():
    for name, bad in (("scores of classes", torch.full((60,), 9)), ("scores of a regression", torch.zeros(59, 1))):
        metric = fed(name, slice(0, 30))
        before = figures(metric)
        pred, _ = METRICS[name][1]()
        with pytest.raises(DataError, match="Expected"):
            metric.update(pred, bad)
        assert figures(metric) == before


@every_metric
def test_predictions_of_the_other_task_are_refused(name):
    make, case, feed = METRICS[name]
    pred, y = (class_case if case is real_case else real_case)()
    if name in ("nll", "nll of classes", "aurc of errors"):
        return  # these take both
    with pytest.raises(WrongTaskError, match=r"is for|Expected"):
        feed(make(), pred, y if case is real_case else torch.zeros(60, dtype=torch.long))


def test_scores_of_the_other_task_leave_no_trace():
    scores = Scores("classification")
    with pytest.raises(WrongTaskError, match="Expected predictions of classes, got a RegressionPredictive"):
        scores.update(real_case()[0], torch.zeros(60, dtype=torch.long))
    with pytest.raises(DataError, match=r"before NLL\.compute"):
        scores.compute()


def test_metrics_in_a_collection_keep_apart():
    """torchmetrics shares the state of metrics that look alike after the first batch."""
    pred, y = real_case()
    together = MetricCollection({"at_50": Coverage(0.5), "at_95": Coverage(0.95), "rmse": RMSE(), "mae": MAE()})
    together.update(pred, pred.mean)  # both intervals hold everything, and all errors are zero
    together.update(pred, y)
    found = together.compute()
    for name, metric in (("at_50", Coverage(0.5)), ("at_95", Coverage(0.95)), ("rmse", RMSE()), ("mae", MAE())):
        metric.update(pred, pred.mean)
        metric.update(pred, y)
        assert float(found[name]) == pytest.approx(float(metric.compute()), rel=1e-12)


def test_sums_are_kept_in_double_precision():
    pred, y = real_case(1000, dtype=torch.float32)
    metric = MAE()
    metric.update(RegressionPredictive(torch.zeros(1), torch.ones(1), torch.ones(1)), torch.tensor([2.0**30]))
    for rows in range(1000):
        metric.update(pred[rows], y[rows : rows + 1])
    exact = (2.0**30 + float((y.double() - pred.mean.double()).abs().sum())) / 1001
    assert float(metric.compute()) == pytest.approx(exact, rel=1e-14)


def test_nothing_is_kept_of_the_graph():
    pred, y = real_case()
    mean = pred.mean.clone().requires_grad_()
    with torch.enable_grad():
        for metric in (CRPS(), CQM()):
            metric(RegressionPredictive(mean, pred.latent_variance, pred.noise), y)
            assert not any(t.requires_grad for t in tensors(metric))


def tensors(metric: Metric) -> list[Tensor]:
    """Everything a metric holds."""
    states = (getattr(part, name) for part in metric.modules() if isinstance(part, Metric) for name in part._defaults)
    return [t for state in states for t in (state if isinstance(state, list) else [state])]


def test_what_is_kept_does_not_grow_with_the_classes():
    sizes = []
    for classes in (2, 3000):
        metric = Scores("classification")
        for _ in range(3):
            pred, y = class_case(20, classes, torch.float32)
            metric.update(pred, y)
            metric.update_ood(pred)
        sizes.append(sum(t.untyped_storage().nbytes() for t in tensors(metric)))
    assert sizes[0] == sizes[1] < 8 * (4 * 60 + 50)


def test_many_classes_are_worked_on_some_rows_at_a_time(monkeypatch):
    pred, y = class_case(50, 7)
    whole = Scores("classification")
    whole.update(pred, y)
    seen = []
    probs = ClassificationPredictive.probs.fget
    monkeypatch.setattr(row_scores, "AT_ONCE", 7 * 12)
    monkeypatch.setattr(ClassificationPredictive, "probs", property(lambda p: seen.append(len(p)) or probs(p)))
    parts = Scores("classification")
    parts.update(pred, y)
    assert parts.compute() == pytest.approx(whole.compute(), rel=1e-12)
    assert set(seen) == {12, 2}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Coverage(95), "0.95 means 95 %"),
        (lambda: Width(0.0), "strictly between 0 and 1"),
        (lambda: ECE(0), "bins"),
        (lambda: AdaptiveECE(2.5), "bins"),
        (lambda: OOD("entropie"), "'entropy'"),
        (lambda: AURC("std"), "'variance'"),
        (lambda: Scores("ranking"), "'regression'"),
        (lambda: OOD().update(class_case()[0], torch.ones(60)), "True or False"),
        (lambda: Scores("regression").merge_state(Scores("classification")), "to merge with"),
    ],
)
def test_impossible_options_are_refused(make, message):
    with pytest.raises(OptionError, match=message):
        make()
