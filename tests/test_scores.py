"""`Scores`: figures are those of the metrics, batch by batch and in several processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as sk  # type: ignore[import-untyped]
import torch
from torch import distributed

from posthoc import ClassificationPredictive, DataError, LatentGaussian, RegressionPredictive, WrongTaskError
from posthoc.evaluate import metrics as m
from posthoc.evaluate.scores import METRICS, Scores, bootstrap_error
from tests.test_metrics import class_case, real_case

CASES: dict[str, Callable[..., Any]] = {"classification": class_case, "regression": real_case}
OUTSIDE = class_case(40, seed=1, sharpness=1.0)[0]

every_task = pytest.mark.parametrize("task", CASES)


def fed(task, *batches) -> Scores:
    pred, y = CASES[task]()
    scores = Scores(task)
    for rows in batches:
        scores.update(pred[rows], y[rows])
    return scores


@pytest.mark.parametrize("outputs", [1, 3])
def test_figures_of_a_regression_are_the_metrics(outputs):
    pred, y = real_case(outputs=outputs)
    scores = Scores("regression")
    scores.update(pred, y)
    expected = {"nll": m.nll, "rmse": m.rmse, "mae": m.mae, "crps": m.crps, "cqm": m.cqm, "pit_error": m.pit_error}
    figures = {name: float(metric(pred, y)) for name, metric in expected.items()}
    figures |= {f"coverage_{level}": float(m.coverage(pred, y, level / 100)) for level in (50, 90, 95)}
    figures |= {"width_90": float(m.width(pred, y, 0.9)), "interval_score_90": float(m.interval_score(pred, y, 0.9))}
    figures["aurc"] = float(m.aurc(pred, y))
    found = scores.compute()
    assert list(found) == list(figures)
    assert all(type(figure) is float for figure in found.values())
    assert found == pytest.approx(figures, rel=1e-12)
    with pytest.raises(WrongTaskError, match="update_ood is for classification"):
        scores.update_ood(pred)


def test_figures_of_classes_are_the_metrics_and_detection_joins_them():
    pred, y = class_case()
    scores = Scores("classification")
    scores.update_ood(OUTSIDE[:30])
    scores.update(pred, y)
    before = scores.compute()
    scores.update_ood(OUTSIDE[30:])
    found = scores.compute()
    expected = {"nll": m.nll, "accuracy": m.accuracy, "ece": m.ece, "smooth_ece": m.smooth_ece, "brier": m.brier}
    expected["aurc"] = m.aurc
    assert list(found) == [*expected, "ood_auc", "ood_fpr95"]
    for name, metric in expected.items():
        assert found[name] == before[name] == pytest.approx(float(metric(pred, y)), rel=1e-12)
    truth, entropy = np.repeat([0, 1], [60, 40]), torch.cat([pred.entropy(), OUTSIDE.entropy()])
    assert found["ood_auc"] == pytest.approx(sk.roc_auc_score(truth, entropy))
    fpr, tpr, _ = sk.roc_curve(truth, entropy, drop_intermediate=False)
    assert found["ood_fpr95"] == pytest.approx(fpr[np.argmax(tpr >= 0.95)])
    assert before["ood_auc"] == pytest.approx(sk.roc_auc_score(truth[:90], entropy[:90]))
    assert list(fed("classification", slice(0, 60)).compute()) == list(expected)


@every_task
def test_batches_and_their_order_do_not_matter(task):
    whole = fed(task, slice(None)).compute()
    assert fed(task, slice(0, 7), slice(7, 7), slice(7, 60)).compute() == pytest.approx(whole, rel=1e-12)
    shuffled = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    assert fed(task, *shuffled.split(13)).compute() == pytest.approx(whole, rel=1e-12)
    assert fed(task, slice(0, 7)).compute() != pytest.approx(whole, rel=1e-3)
    for scores in (fed(task), fed(task, slice(0, 0))):
        with pytest.raises(DataError, match=r"Expected some data before .*compute\(\), got none"):
            scores.compute()


def spoiled(task):
    """NaN where only some of the metrics look."""
    pred, y = CASES[task]()
    if task == "regression":
        latent = LatentGaussian(pred.mean, pred.variance.index_fill(0, torch.tensor(3), torch.nan))
        return RegressionPredictive(latent, pred.noise), y
    log_probs = pred.log_probs.scatter(-1, ((y + 1) % 4)[:, None], torch.nan)  # never the label's own
    return ClassificationPredictive(pred.latent, log_probs, pred.temperature), y


@every_task
def test_a_batch_is_scored_whole_or_not_at_all(task):
    scores = fed(task, slice(0, 30))
    before = scores.compute()
    pred, _ = CASES[task]()
    with pytest.raises(DataError, match="NaN in row"):
        scores.update(*spoiled(task))
    with pytest.raises(DataError, match="Expected"):
        scores.update(pred, torch.full((60,), 9) if task == "classification" else torch.zeros(59, 1))
    other = "regression" if task == "classification" else "classification"
    with pytest.raises(WrongTaskError):
        scores.update(CASES[other]()[0], torch.zeros(60, dtype=torch.long))
    assert scores.compute() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_in_double_precision_and_free_of_the_graph(dtype):
    pred, y = real_case(1000, dtype=dtype)
    scores = Scores("regression")
    with torch.enable_grad():
        latent = LatentGaussian(torch.zeros(1, 1, requires_grad=True), torch.ones(1, 1))
        scores.update(RegressionPredictive(latent, torch.ones(1, 1)), torch.tensor([[2.0**30]]))
    for rows in range(1000):
        scores.update(pred[rows : rows + 1], y[rows : rows + 1])
    exact = (2.0**30 + float((y.double() - pred.mean.double()).abs().sum())) / 1001
    assert scores.compute()["mae"] == pytest.approx(exact, rel=1e-14)
    assert not scores.column(m.squared_error).requires_grad


def test_what_is_kept_does_not_grow_with_the_classes():
    for classes in (2, 3000):
        scores = Scores("classification")
        for _ in range(3):
            pred, y = class_case(20, classes, torch.float32)
            scores.update(pred, y)
            scores.update_ood(pred)
        kept = [part for parts in (*scores._inside.values(), *scores._outside.values()) for part in parts]
        assert sum(part.untyped_storage().nbytes() for part in kept) == 8 * 7 * 60


def test_the_error_of_a_mean_is_that_of_its_rows():
    pred, y = class_case(400)
    scores = Scores("classification")
    scores.update(pred, y)
    assert scores.standard_errors()["nll"] == pytest.approx(float(pred.log_prob(y).std()) / 20, rel=1e-12)


@pytest.mark.parametrize(
    ("task", "names"), [("classification", ("ece", "ood_auc", "aurc")), ("regression", ("rmse", "cqm", "aurc"))]
)
def test_bootstrap_errors_are_those_between_test_sets(task, names):
    """The spread of figures over 200 test sets."""
    figures, errors = [], []
    for seed in range(200):
        scores = Scores(task)
        scores.update(*CASES[task](500, seed=seed))
        if task == "classification":
            scores.update_ood(class_case(500, seed=1000 + seed, sharpness=1.0)[0])
        figures.append(scores.compute())
        if seed < 5:
            errors.append(scores.standard_errors())
    for name in names:
        spread = np.std([each[name] for each in figures])
        assert np.mean([each[name] for each in errors]) == pytest.approx(spread, rel=0.4), name


def test_the_error_of_many_rows_is_that_of_some_of_them_made_smaller(monkeypatch):
    squares = torch.rand(4000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = bootstrap_error(METRICS["rmse"], [squares], torch.Generator().manual_seed(0))
    monkeypatch.setattr("posthoc.evaluate.scores.RESAMPLED_ROWS", 500)
    part = bootstrap_error(METRICS["rmse"], [squares], torch.Generator().manual_seed(0))
    assert part == pytest.approx(whole, rel=0.3)


# The first rank has no regression data, the second no out-of-distribution data.
SHARES = [(slice(0, 0), slice(0, 25), slice(0, 40)), (slice(0, 60), slice(25, 60), slice(0, 0))]


def share(real_rows: slice, class_rows: slice, outside_rows: slice) -> list[dict[str, float]]:
    classes = fed("classification", class_rows)
    classes.update_ood(OUTSIDE[outside_rows])
    return [classes.compute(), fed("regression", real_rows).compute()]


def work(_: int, rank: int, folder: str) -> None:
    distributed.init_process_group("gloo", f"file://{folder}/meet", timedelta(seconds=120), rank=rank, world_size=2)
    try:
        Path(folder, f"{rank}.json").write_text(json.dumps(share(*SHARES[rank])))
    finally:
        distributed.destroy_process_group()


@pytest.mark.skipif(not distributed.is_available(), reason="torch was built without torch.distributed")
def test_two_processes_give_the_figures_of_one(tmp_path):
    whole = share(slice(0, 60), slice(0, 60), slice(0, 40))
    other = torch.multiprocessing.spawn(work, (1, str(tmp_path)), nprocs=1, join=False)
    work(0, 0, str(tmp_path))  # this process is the other rank
    while not other.join():
        pass
    for rank in range(2):
        for found, expected in zip(json.loads((tmp_path / f"{rank}.json").read_text()), whole, strict=True):
            assert found == pytest.approx(expected, rel=1e-12)
