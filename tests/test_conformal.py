"""Intervals and sets of classes cover what they promise, for good methods and bad ones."""

from __future__ import annotations

import bisect
import math
import weakref
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from posthoc import (
    FMGP,
    MAP,
    Categorical,
    DataError,
    FileError,
    NotFittedError,
    OptionError,
    Outputs,
    PosthocWarning,
    Temperature,
    WrongTaskError,
    load,
    save_outputs,
)
from posthoc.base import Method
from posthoc.evaluate.metrics import coverage, width
from posthoc.io import read_tensors, write_tensors
from posthoc.predictive.base import LatentGaussian, Predictive
from posthoc.predictive.classification import ClassificationPredictive
from posthoc.predictive.conformal import (
    APS,
    LAC,
    Conformal,
    ConformalIntervals,
    ConformalSets,
    Residual,
    Score,
    uniform,
)
from posthoc.predictive.regression import RegressionPredictive
from tests.cases import QUICK, in_eval, inputs, labels, mlp, values

DOUBLE = torch.float64
CLASS_SCORES = [
    LAC(),
    LAC(allow_empty=True),
    APS(),
    APS(seed=3),
    APS(seed=3, allow_empty=True),
    APS(penalty=0.1, free=2),
]


def gaussian(mean: Tensor, std: Tensor | float) -> RegressionPredictive:
    std = torch.as_tensor(std).expand(mean.shape).clone()
    return RegressionPredictive(LatentGaussian(mean, std.square()), torch.zeros_like(std))


def softmax(logits: Tensor) -> ClassificationPredictive:
    one = torch.ones((), dtype=logits.dtype)
    return ClassificationPredictive(LatentGaussian(logits, torch.zeros_like(logits)), logits.log_softmax(-1), one)


def calibrated(pred: Predictive, y: Tensor, score: str | Score | None = None) -> Conformal:
    task = "regression" if isinstance(pred, RegressionPredictive) else "classification"
    return Conformal.calibrate(MAP(None, task), [(pred, y)], score, task)


def around(conformal: Conformal, pred: Predictive) -> Any:
    kind = ConformalIntervals if isinstance(pred, RegressionPredictive) else ConformalSets
    return kind(pred, conformal.calibration)


def answers(pred: Predictive, y: Tensor, new: Predictive, score: str | Score | None = None) -> Any:
    return around(calibrated(pred, y, score), new)


def drawn_values(n: int, seed: int, *, outputs: int = 1) -> tuple[RegressionPredictive, Tensor]:
    """Predictions that are biased, and whose std has nothing to do with the heavy tails of the errors."""
    g = np.random.default_rng(seed)
    mean, std = g.normal(size=(n, outputs)), g.uniform(0.01, 0.1, size=(n, outputs))
    y = mean + 0.7 + g.standard_t(2, size=(n, outputs)) * np.exp(mean)
    return gaussian(torch.tensor(mean), torch.tensor(std)), torch.tensor(y)


def drawn_classes(n: int, seed: int, *, classes: int = 5, sure: float = 4.0) -> tuple[ClassificationPredictive, Tensor]:
    """Logits that are `sure` times too sure of themselves."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, classes, generator=g, dtype=DOUBLE)
    y = torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(1)
    return softmax(sure * logits), y


# The guarantee.


def beta_law(covered: list[int], new: int, n: int, level: float) -> float:
    """The p-value of: of so many new points, as many are covered as a Beta-binomial says, which is exact for scores
    without ties."""
    rank = math.ceil((n + 1) * level - 1e-9)
    law = stats.betabinom(new, rank, n + 1 - rank)
    mean, deviation = law.mean(), law.std() / math.sqrt(len(covered))
    assert abs(np.mean(covered) - mean) < 4.0 * deviation
    # Spread evenly within each step of the distribution function, which makes it continuous.
    g = np.random.default_rng(0)
    low, high = law.cdf(np.array(covered) - 1), law.cdf(covered)
    return float(stats.kstest(low + (high - low) * g.uniform(size=len(covered)), "uniform").pvalue)


@pytest.mark.parametrize(("n", "level"), [(9, 0.9), (30, 0.5), (57, 0.8)])
def test_intervals_cover_by_the_exact_law_though_the_method_is_wrong(n, level):
    covered = []
    for seed in range(300):
        new, y = drawn_values(100, seed + 10_000)
        covered.append(int(answers(*drawn_values(n, seed), new).covers(y, level).sum()))
    assert beta_law(covered, 100, n, level) > 1e-3


@pytest.mark.parametrize("score", CLASS_SCORES, ids=str)
@pytest.mark.parametrize(("n", "level"), [(19, 0.9), (57, 0.8)])
def test_sets_cover_by_the_exact_law_though_the_method_is_wrong(n, level, score):
    covered = []
    for seed in range(200):
        new, y = drawn_classes(100, seed + 10_000)
        covered.append(int(answers(*drawn_classes(n, seed), new, score).covers(y, level).sum()))
    assert beta_law(covered, 100, n, level) > 1e-3


def test_a_joint_box_covers_all_outputs_at_once_and_intervals_each_alone():
    joint, alone = [], []
    for seed in range(300):
        data, (new, y) = drawn_values(30, seed, outputs=3), drawn_values(100, seed + 10_000, outputs=3)
        box = answers(*data, new, "joint").covers(y, 0.8)
        assert box.shape == (100,)
        joint.append(int(box.sum()))
        each = answers(*data, new).covers(y, 0.8)
        assert each.shape == (100, 3)
        alone.append(int(each[:, 1].sum()))
        assert each.all(1).sum() < box.sum()
    assert beta_law(joint, 100, 30, 0.8) > 1e-3
    assert beta_law(alone, 100, 30, 0.8) > 1e-3


def test_a_fitted_method_covers_where_its_own_intervals_do_not():
    """FMGP fitted on residuals ten times too small."""
    g = torch.Generator().manual_seed(0)
    outputs = torch.randn(3000, 1, generator=g)
    error = torch.randn(3000, 1, generator=g) * (0.2 + outputs.abs())
    data = Outputs(outputs, outputs + error)
    method = FMGP(None, "regression", **QUICK).fit(Outputs(outputs[:200], outputs[:200] + 0.1 * error[:200]))
    pred = method.conformal(data[200:1200]).predict(data[1200:])
    assert coverage(pred.base, data.targets[1200:], 0.9) < 0.5
    assert abs(pred.covers(data.targets[1200:], 0.9).double().mean() - 0.9) < 4.0 * math.sqrt(0.09 / 1000 + 0.09 / 1800)


def test_a_classifier_better_than_the_level_says_one_class():
    logits = drawn_classes(4000, 0, sure=8.0)[0].latent.mean
    right = torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(1)).squeeze(1)
    sure = softmax(logits)
    new = answers(sure[:2000], right[:2000], sure[2000:])
    accuracy = (logits.argmax(-1) == right)[2000:].double().mean()
    assert accuracy > 0.85
    assert (new.size(0.8) == 1).all()
    assert new.covers(right[2000:], 0.8).double().mean() == accuracy
    assert (answers(sure[:2000], right[:2000], sure[2000:], LAC(allow_empty=True)).size(0.8) == 0).any()


# The rank of the threshold.


@pytest.mark.parametrize(
    ("n", "level", "rank"),
    # 0.07 * 100 is more than 7 in floating point.
    [(9, 0.9, 9), (11, 0.9, 11), (18, 0.9, 18), (19, 0.95, 19), (3, 0.5, 2), (99, 0.07, 7), (99, 0.551, 56)],
)
def test_the_threshold_is_the_right_one_of_the_sorted_scores(n, level, rank):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(n))
    y = torch.arange(1.0, n + 1.0, dtype=DOUBLE)[order] * torch.tensor([1.0, -1.0]).repeat(n)[:n]
    pred = answers(gaussian(torch.zeros(n, dtype=DOUBLE), 1.0), y, gaussian(torch.zeros(1, dtype=DOUBLE), 1.0))
    lower, upper = pred.interval(level)
    torch.testing.assert_close(upper, torch.tensor([float(rank)], dtype=DOUBLE))
    torch.testing.assert_close(lower, -upper, rtol=0, atol=0)
    torch.testing.assert_close(pred.width(level), 2.0 * upper)


@given(st.integers(1, 400), st.integers(1, 999))
def test_the_rank_is_the_least_that_promises_the_level(n, thousandth):
    y = torch.arange(1.0, n + 1.0, dtype=DOUBLE)
    calibration = calibrated(gaussian(torch.zeros(n, dtype=DOUBLE), 1.0), y).calibration
    rank = bisect.bisect_left(range(n + 2), thousandth * (n + 1), key=lambda k: 1000 * k)
    if rank <= n:
        assert float(calibration.threshold(thousandth / 1000)) == rank
    else:
        with pytest.warns(PosthocWarning, match=f"{n} calibration points cannot promise"):
            assert float(calibration.threshold(thousandth / 1000)) == math.inf


@pytest.mark.parametrize(("n", "level", "needed"), [(8, 0.9, 9), (18, 0.95, 19), (1, 0.999, 999), (9, 0.91, 11)])
def test_too_few_points_promise_everything_and_say_how_many_it_takes(n, level, needed):
    told = f"{n} calibration points .* at least {needed} points"
    pred = answers(*drawn_values(n, 0), drawn_values(3, 1)[0])
    with pytest.warns(PosthocWarning, match=told):
        lower, upper = pred.interval(level)
    assert (lower == -math.inf).all()
    assert (upper == math.inf).all()
    with pytest.warns(PosthocWarning, match=told):
        assert pred.width(level).isposinf().all()
    classes = answers(*drawn_classes(n, 0), drawn_classes(3, 1)[0])
    with pytest.warns(PosthocWarning, match=told):
        assert classes.sets(level).all()
    enough = answers(*drawn_values(needed, 0), drawn_values(3, 1)[0])
    assert enough.width(level).isfinite().all()


# By other means: one point, one class at a time.


def slow_rank(scores: list[float], level: float) -> float:
    return sorted(scores)[math.ceil((len(scores) + 1) * level - 1e-9) - 1]


def slow_score(p: list[float], c: int, score: LAC | APS, u: float) -> float:
    before = [k for k in range(len(p)) if p[k] > p[c]]
    if not before and not score.allow_empty:
        return -1.0
    if isinstance(score, LAC):
        return 1.0 - p[c]
    own = u * p[c] if score.seed is not None else 0.0
    return sum(p[k] for k in before) + own + score.penalty * max(0, len(before) + 1 - score.free)


@pytest.mark.parametrize("score", CLASS_SCORES, ids=str)
def test_sets_are_those_of_a_slow_implementation(score):
    (pred, y), (new, truth) = drawn_classes(60, 1, classes=7), drawn_classes(40, 2, classes=7)
    shares = [uniform(each.latent.mean, 3).tolist() for each in (pred, new)]
    known = [slow_score(p, c, score, u) for p, c, u in zip(pred.probs.tolist(), y.tolist(), shares[0], strict=True)]
    found = answers(pred, y, new, score)
    for level in (0.3, 0.6, 0.8, 0.9):
        limit = slow_rank(known, level)
        expected = [
            [slow_score(p, c, score, u) <= limit for c in range(7)]
            for p, u in zip(new.probs.tolist(), shares[1], strict=True)
        ]
        sets = found.sets(level)
        assert sets.dtype == torch.bool
        assert sets.tolist() == expected
        assert found.size(level).tolist() == [sum(row) for row in expected]
        assert found.covers(truth, level).tolist() == [row[c] for row, c in zip(expected, truth.tolist(), strict=True)]


@pytest.mark.parametrize("score", ["per_output", "joint"])
def test_intervals_are_those_of_a_slow_implementation(score):
    (pred, y), (new, _) = drawn_values(60, 1, outputs=2), drawn_values(40, 2, outputs=2)
    rows = (((y - pred.mean) / pred.std).abs()).tolist()
    for level in (0.2, 0.8, 0.95):
        if score == "joint":
            limits = [slow_rank([max(row) for row in rows], level)] * 2
        else:
            limits = [slow_rank([row[i] for row in rows], level) for i in range(2)]
        lower, upper = answers(pred, y, new, score).interval(level)
        half = torch.tensor(limits, dtype=DOUBLE) * new.std
        torch.testing.assert_close(lower, new.mean - half)
        torch.testing.assert_close(upper, new.mean + half)


def test_an_output_has_the_interval_it_would_have_alone():
    (pred, y), (new, _) = drawn_values(50, 1, outputs=2), drawn_values(8, 2, outputs=2)
    lower, upper = answers(pred, y, new).interval(0.9)
    for i in range(2):
        alone = answers(gaussian(pred.mean[:, i], pred.std[:, i]), y[:, i], gaussian(new.mean[:, i], new.std[:, i]))
        assert alone.interval(0.9)[0].shape == (8,)
        torch.testing.assert_close(alone.interval(0.9), (lower[:, i], upper[:, i]))


# Properties.


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.sampled_from(CLASS_SCORES), st.integers(20, 60), st.integers(2, 8))
def test_sets_grow_with_the_level_and_hold_the_predicted_class(seed, score, n, classes):
    data = drawn_classes(n, seed, classes=classes)
    new = drawn_classes(20, seed + 1, classes=classes)[0]
    pred = answers(*data, new, score)
    sets = [pred.sets(level) for level in (0.05, 0.3, 0.6, 0.9, 0.95)]
    assert all((small <= large).all() for small, large in pairwise(sets))
    if not score.allow_empty:
        assert sets[0].gather(-1, new.probs.argmax(-1, keepdim=True)).all()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(-20, 20), min_size=20, max_size=60),
    st.sampled_from([0.1, 0.3, 1.0, 1e-6, 12345.678]),
    st.sampled_from([torch.float32, torch.float64]),
    st.floats(-1e3, 1e3, width=32),
    st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.95]),
)
def test_points_on_the_edge_are_inside_whatever_is_rounded(steps, unit, dtype, centre, level):
    """Of the calibration points themselves at least as many as the rank are inside; ties all lie on the edge."""
    y = centre + unit * torch.tensor(steps, dtype=dtype)
    pred = gaussian(torch.full_like(y, centre), torch.tensor(unit / 3.0, dtype=dtype))
    found = answers(pred, y, pred)
    lower, upper = found.interval(level)
    assert lower.dtype == upper.dtype == dtype
    inside = (lower <= y) & (y <= upper)
    score = (y.double() - pred.mean.double()).abs()
    limit = score.sort().values[math.ceil((len(y) + 1) * level - 1e-9) - 1]
    assert inside[score <= limit].all()
    assert torch.equal(found.covers(y, level), inside)
    step = (math.nextafter(1.0, 2.0) - 1.0 if dtype is DOUBLE else 2.0**-23) * (abs(centre) + 20.0 * unit)
    assert not inside[score > limit + 2.0 * step].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_point_that_sets_the_threshold_is_inside_its_own_interval(dtype):
    """One calibration point of very many outputs: each is on its edge, and r / std * std may be less than r."""
    g = torch.Generator().manual_seed(0)
    y, mean, std = (torch.randn(1, 5000, generator=g, dtype=DOUBLE) for _ in range(3))
    mean[:, :2500] = 0.0
    pred = gaussian(mean.to(dtype), std.abs().to(dtype))
    assert answers(pred, y, pred).covers(y, 0.5).all()


def test_equal_scores_are_covered_together():
    """A method that always says the same: every point of a class is covered, or none."""
    pred = softmax(torch.tensor([3.0, 2.0, 1.0]).log().expand(20, 3).clone())
    y = torch.tensor([0] * 10 + [1] * 8 + [2] * 2)
    found = answers(pred, y, pred[:1])
    assert found.sets(0.4).tolist() == [[True, False, False]]
    assert found.sets(0.8).tolist() == [[True, True, False]]
    assert found.sets(0.9).tolist() == [[True, True, True]]


@pytest.mark.parametrize("score", [LAC(), APS(), APS(seed=0), APS(allow_empty=True)], ids=str)
def test_the_predicted_class_is_the_networks_own_where_probabilities_are_equal(score):
    """Two logits that differ, and whose float32 probabilities do not."""
    logits = torch.tensor([[0.0, 1e-9, -30.0]], dtype=DOUBLE).repeat(30, 1)
    pred = ClassificationPredictive(
        LatentGaussian(logits, torch.zeros_like(logits)),
        logits.float().log_softmax(-1),
        torch.ones((), dtype=torch.float32),
    )
    found = answers(pred, torch.ones(30, dtype=torch.long), pred, score)
    assert found.sets(0.5)[0].tolist() == [False, True, False]


def test_no_doubt_at_all_is_no_excuse():
    y = torch.zeros(20, dtype=DOUBLE)
    certain = gaussian(torch.zeros(20, dtype=DOUBLE), 0.0)
    assert answers(certain, y, certain).covers(y, 0.9).all()
    wrong = y.clone()
    wrong[:10] = 1e-3
    found = answers(certain, wrong, certain)
    assert (found.width(0.4) == 0).all()
    assert found.covers(wrong, 0.9).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_answers_have_the_networks_dtype_but_not_half_precision(dtype):
    pred, y = drawn_values(40, 0)
    rough = gaussian(pred.mean.to(dtype), pred.std.to(torch.promote_types(dtype, torch.float32)))
    lower, upper = answers(rough, y, rough).interval(0.9)
    assert lower.dtype == upper.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(upper.double(), answers(pred, y, pred).interval(0.9)[1], rtol=1e-2, atol=0.3)
    assert answers(rough, y, rough).covers(y, 0.9).sum() >= 37


def test_very_sure_predictions_are_told_apart():
    """Probabilities that are all 1 in float32 have an order that LAC and APS keep."""
    logits = torch.zeros(40, 2)
    logits[:, 0] = torch.linspace(18.0, 60.0, 40)
    pred, y = softmax(logits), torch.ones(40, dtype=torch.long)
    assert answers(pred, y, pred).covers(y, 0.5).sum() == 21
    assert (pred.probs[:, 0] == 1).all()


# The share that APS adds.


def test_the_random_share_is_uniform_and_belongs_to_the_point():
    x = torch.randn(20_000, 4, generator=torch.Generator().manual_seed(0))
    u = uniform(x, 0)
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-3
    assert torch.equal(u, torch.cat([uniform(row, 0) for row in x.split(3000)]))
    other = uniform(x, 1)
    counting = uniform(torch.arange(20_000.0)[:, None].repeat(1, 2), 3)
    for a, b in ((u, other), (u[1:], u[:-1]), (counting[1:], counting[:-1]), (u, x[:, 0].double())):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4.0 / math.sqrt(20_000)


def test_randomised_sets_do_not_depend_on_the_batch():
    (pred, y), (new, _) = drawn_classes(50, 0), drawn_classes(30, 1)
    conformal = calibrated(pred, y, APS(seed=5))
    whole = around(conformal, new).sets(0.8)
    assert torch.equal(whole, torch.cat([around(conformal, new[i]).sets(0.8) for i in range(30)]))
    assert not torch.equal(whole, answers(pred, y, new, APS(seed=6)).sets(0.8))


# Around a method.


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_calibration_data_come_in_any_form(task, tmp_path):
    x, y = inputs(2100), labels(2100) if task == "classification" else values(2100, 3)
    model = mlp(3).train()
    method = FMGP(model, task, **QUICK).fit((x[:100], y[:100]))
    pairs = TensorDataset(x, y)
    with torch.no_grad():
        features = model[:-1](x)
        outputs = Outputs(model[-1](features), y, features, x)
    save_outputs(outputs, tmp_path / "outputs.npz")
    shuffled = DataLoader(pairs, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))
    forms = ((x, y), (x.numpy(), y.numpy()), pairs, shuffled, outputs, tmp_path / "outputs.npz")
    first, *others = (method.conformal(data).calibration.scores for data in forms)
    assert model.training
    assert first.shape == ((2100,) if task == "classification" else (2100, 3))
    assert torch.equal(first, first.sort(0).values)
    for other in others:
        torch.testing.assert_close(first, other, rtol=1e-4, atol=1e-4)
    pred = method.predict(x)
    by_hand = Residual().of(pred, y) if task == "regression" else LAC().of(pred, y)
    torch.testing.assert_close(first, by_hand.sort(0).values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_streams_and_rows_give_what_the_whole_gives(task):
    x, y = inputs(200), labels(200) if task == "classification" else values(200, 3)
    conformal = MAP(mlp(3), task).fit((x, y)).conformal((x, y))
    whole, parts = conformal.predict(x), list(conformal.stream(DataLoader(TensorDataset(x, y), batch_size=64)))
    assert [len(part) for part in parts] == [64, 64, 64, 8]
    assert len(whole) == 200
    assert torch.equal(whole.latent.mean, whole.base.latent.mean)
    covered = torch.cat([part.covers(torch.zeros_like(y[: len(part)]), 0.7) for part in parts])
    assert torch.equal(covered, whole.covers(torch.zeros_like(y), 0.7))
    assert torch.equal(whole[7].covers(y[7:8], 0.7), whole.covers(y, 0.7)[7:8])
    assert torch.equal(whole[10:20].latent.mean, whole.base.latent.mean[10:20])


def test_a_stream_is_forgotten_as_it_is_calibrated_on() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def parts() -> Iterator[tuple[Predictive, Tensor]]:
        for seed in range(10):
            pred, y = drawn_classes(30, seed)
            alive.append(weakref.ref(pred.log_probs))
            yield pred, y
            del pred
            assert sum(ref() is not None for ref in alive) <= 1

    conformal = Conformal.calibrate(MAP(None, "classification"), parts(), "aps", "classification")
    assert conformal.calibration.scores.shape == (300,)


def test_the_usual_metrics_judge_conformal_intervals():
    (pred, y), (new, truth) = drawn_values(50, 0), drawn_values(80, 1)
    found = answers(pred, y, new)
    assert coverage(found, truth, 0.8) == found.covers(truth, 0.8).double().mean()
    torch.testing.assert_close(width(found, truth, 0.8), found.width(0.8).double().mean())


def test_classes_may_be_very_many():
    pred, y = drawn_classes(40, 0, classes=100_000)
    found = answers(pred, y, pred)
    assert torch.equal(found.sets(0.8), torch.cat([found[i].sets(0.8) for i in range(40)]))


def test_on_a_gpu_where_there_is_one():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    for score in CLASS_SCORES:
        (pred, y), (new, truth) = drawn_classes(50, 0), drawn_classes(30, 1)
        there = answers(pred.to("cuda"), y.cuda(), new.to("cuda"), score)
        assert there.sets(0.8).is_cuda
        assert torch.equal(there.covers(truth, 0.8).cpu(), answers(pred, y, new, score).covers(truth, 0.8))
    (real, y), (fresh, _) = drawn_values(50, 0), drawn_values(30, 1)
    away = answers(real.to("cuda"), y.cuda(), fresh.to("cuda")).interval(0.8)
    torch.testing.assert_close(away[1].cpu(), answers(real, y, fresh).interval(0.8)[1])


# Files.


@pytest.mark.parametrize("score", ["lac", "raps", APS(seed=2, penalty=0.3, free=1, allow_empty=True)])
@pytest.mark.parametrize("kind", [FMGP, MAP, Temperature])
def test_a_saved_calibration_goes_with_its_head(kind, score, tmp_path):
    def fitted(y: Tensor, seed: int = 0) -> Method:
        return kind(mlp(3, seed=seed), "classification", **(QUICK if kind is FMGP else {})).fit((x, y))

    x = inputs(100)
    y = torch.where(labels(100) > 0, in_eval(mlp(3), x).argmax(-1), labels(100))  # often what the network says
    method = fitted(y)
    conformal = method.conformal((x, y), score=score)
    method.save(tmp_path / "head.safetensors")
    conformal.save(tmp_path / "conformal.safetensors")
    again = Conformal.load(tmp_path / "conformal.safetensors", load(tmp_path / "head.safetensors", model=mlp(3)))
    assert again.calibration.score == conformal.calibration.score
    assert torch.equal(again.calibration.scores, conformal.calibration.scores)
    assert torch.equal(again.predict(x).sets(0.8), conformal.predict(x).sets(0.8))
    others = [fitted(torch.where(labels(100) > 0, in_eval(mlp(3, seed=1), x).argmax(-1), y), seed=1)]
    if kind is not MAP:  # which learns nothing from labels
        others.append(fitted(torch.where(labels(100, seed=9) > 0, y, labels(100, seed=9))))
    for other in others:
        with pytest.raises(FileError, match="calibration of this head, found that of another"):
            Conformal.load(tmp_path / "conformal.safetensors", other)


def test_a_saved_calibration_of_a_regression(tmp_path):
    x, y = inputs(100), values(100, 2)
    method = MAP(mlp(2), "regression").fit((x, y))
    for score in ("per_output", "joint"):
        conformal = method.conformal((x, y), score=score)
        conformal.save(tmp_path / "c")
        again = Conformal.load(tmp_path / "c", method)
        assert torch.equal(again.predict(x).width(0.8), conformal.predict(x).width(0.8))
        assert again.predict(x).covers(y, 0.8).shape == ((100,) if score == "joint" else (100, 2))


def test_another_temperature_is_another_head():
    data = Outputs(torch.randn(50, 3), labels(50))
    plain, warm = (MAP(None, Categorical(temperature=t)).fit(data) for t in (1.0, 2.0))
    assert plain.digest() == MAP(None, Categorical(temperature=1.0)).fit(data).digest()
    assert plain.digest() != warm.digest()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score": {"type": "lucky"}}, "a config that this version can read"),
        ({"score": {"type": "aps", "colour": 3}}, "a config that this version can read"),
        ({"score": {"type": "aps", "penalty": -1.0}}, "a config that this version can read"),
        ({"shape": [7]}, r"Expected tensors scores \(7,\); found scores \(100,\)"),
        ({"head": "0" * 64}, "found that of another"),
    ],
)
def test_files_that_were_changed_are_refused(change, message, tmp_path):
    x, y = inputs(100), labels(100)
    method = MAP(mlp(3), "classification").fit((x, y))
    method.conformal((x, y)).save(tmp_path / "c")
    tensors, config = read_tensors(tmp_path / "c", "posthoc-conformal")
    config = {key: value for key, value in config.items() if key not in ("format", "version")}
    write_tensors(tmp_path / "c", tensors, "posthoc-conformal", {**config, **change})
    with pytest.raises(FileError, match=message):
        Conformal.load(tmp_path / "c", method)


def test_a_head_is_no_calibration(tmp_path):
    method = MAP(mlp(3), "classification").fit((inputs(), labels()))
    method.save(tmp_path / "head")
    with pytest.raises(FileError, match="Expected a conformal that posthoc saved"):
        Conformal.load(tmp_path / "head", method)


# What cannot be served.


@pytest.mark.parametrize("level", [0.0, 1.0, -0.1, 95, math.nan])
def test_levels_are_between_0_and_1(level):
    intervals = answers(*drawn_values(20, 0), drawn_values(5, 1)[0])
    sets = answers(*drawn_classes(20, 0), drawn_classes(5, 1)[0])
    for ask in (intervals.interval, intervals.width, sets.sets, sets.size):
        with pytest.raises(OptionError, match="strictly between 0 and 1"):
            ask(level)


def test_questions_for_the_other_task_say_so():
    intervals = answers(*drawn_values(20, 0), drawn_values(5, 1)[0])
    sets = answers(*drawn_classes(20, 0), drawn_classes(5, 1)[0])
    for pred, names, task in (
        (intervals, ("sets", "size"), "classification"),
        (sets, ("interval", "width"), "regress"),
    ):
        for name in names:
            with pytest.raises(WrongTaskError, match=f"{name} is for {task}.*this is a {type(pred).__name__}"):
                getattr(pred, name)
    with pytest.raises(AttributeError, match="no attribute 'probs'; the method's own answers are in base"):
        _ = sets.probs
    with pytest.raises(WrongTaskError, match="for regression and classification, not for counts"):
        Conformal.calibrate(None, [], None, "counts")


def test_conformal_predictions_are_short_sequences():
    pred = answers(*drawn_classes(20, 0), drawn_classes(5, 1)[0])
    assert [len(row) for row in pred] == [1] * 5
    assert len(repr(pred)) < 250
    with pytest.raises(IndexError):
        pred[5]


def test_scores_by_name():
    x = inputs()
    real, classes = MAP(mlp(), "regression").fit((x, values())), MAP(mlp(3), "classification").fit((x, labels()))
    for name, score in ((None, Residual()), ("per_output", Residual()), ("joint", Residual(joint=True))):
        assert real.conformal((x, values()), score=name).calibration.score == score
    for name, rule in ((None, LAC()), ("lac", LAC()), ("aps", APS()), ("raps", APS(penalty=0.01, free=5))):
        assert classes.conformal((x, labels()), score=name).calibration.score == rule


def test_scores_are_those_of_the_task():
    x = inputs()
    real, classes = MAP(mlp(), "regression").fit((x, values())), MAP(mlp(3), "classification").fit((x, labels()))
    with pytest.raises(OptionError, match="score to be one of 'per_output', 'joint', got 'aps'"):
        real.conformal((x, values()), score="aps")
    with pytest.raises(OptionError, match="score to be one of 'lac', 'aps', 'raps', got 'joint'"):
        classes.conformal((x, labels()), score="joint")
    with pytest.raises(WrongTaskError, match="APS is for classification; this is a regression"):
        real.conformal((x, values()), score=APS())
    with pytest.raises(WrongTaskError, match="Residual is for regression; this is a classification"):
        classes.conformal((x, labels()), score=Residual())


@pytest.mark.parametrize(
    ("options", "message"),
    [({"penalty": -1.0}, "penalty of at least 0"), ({"free": -1}, "free to be an"), ({"seed": 0.5}, "seed to be an")],
)
def test_options_of_a_score_are_checked(options, message):
    with pytest.raises(OptionError, match=message):
        APS(**options)


def test_calibration_needs_targets_points_and_a_fit():
    x, y = inputs(), labels()
    method = MAP(mlp(3), "classification")
    with pytest.raises(NotFittedError):
        method.conformal((x, y))
    with pytest.raises(NotFittedError):
        method.digest()
    method.fit((x, y))
    for bare in (x, DataLoader(x, batch_size=10), {"input": x}, Outputs(values(30, 3)), [x]):
        with pytest.raises(DataError, match=r"Expected targets too: batches \(x, y\)"):
            method.conformal(bare)
    for nothing in (DataLoader(TensorDataset(x[:0], y[:0])), Outputs(values(0, 3), labels(0)), (x[:0], y[:0])):
        with pytest.raises(DataError, match="at least one calibration point, got none"):
            method.conformal(nothing)
    with pytest.raises(DataError, match="labels from 0 to 2"):
        method.conformal((x, torch.full((30,), 3)))
    with pytest.raises(DataError, match=r"outputs of shape \('N', 3\) as in fit"):
        method.conformal(Outputs(values(30, 4), y))
    assert method.backbone is not None
    assert method.backbone.module.training


def test_observations_are_checked_before_they_are_looked_for():
    intervals = answers(*drawn_values(20, 0), drawn_values(5, 1)[0])
    with pytest.raises(DataError, match=r"\(5, 1\), got \(4, 1\)"):
        intervals.covers(torch.zeros(4, 1), 0.9)
    with pytest.raises(DataError, match="finite targets"):
        intervals.covers(torch.full((5, 1), math.nan), 0.9)
    sets = answers(*drawn_classes(20, 0), drawn_classes(5, 1)[0])
    with pytest.raises(DataError, match="labels from 0 to 4"):
        sets.covers(torch.full((5,), 5), 0.9)
