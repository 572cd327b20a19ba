"""Intervals and sets of classes cover what they promise, for good methods and bad ones."""

from __future__ import annotations

import bisect
import json
import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from posthoc import FMGP, MAP, ClassificationPredictive, LatentGaussian, Outputs, Predictive, RegressionPredictive, load
from posthoc.base import Method
from posthoc.errors import DataError, FileError, NotFittedError, OptionError, PosthocWarning, WrongTaskError
from posthoc.evaluate.metrics import coverage, width
from posthoc.predictive.conformal import APS, LAC, Conformal, Residual, uniform
from tests.cases import QUICK, in_eval, inputs, labels, mlp, values

DOUBLE = torch.float64
CLASS_SCORES = [LAC(), LAC(True), APS(), APS(seed=3), APS(seed=3, allow_empty=True), APS(penalty=0.1, free=2)]


def gaussian(mean: Tensor, std: Tensor | float) -> RegressionPredictive:
    variance = torch.as_tensor(std).square().expand(mean.shape).clone()
    return RegressionPredictive(LatentGaussian(mean, variance), torch.zeros_like(variance))


def softmax(logits: Tensor) -> ClassificationPredictive:
    one = torch.ones((), dtype=logits.dtype)
    return ClassificationPredictive(LatentGaussian(logits, torch.zeros_like(logits)), logits.log_softmax(-1), one)


def calibrated(pred: Predictive, y: Tensor, score: Any = None) -> Conformal:
    task = "regression" if isinstance(pred, RegressionPredictive) else "classification"
    return Conformal.calibrate(MAP(None, task), [(pred, y)], score, task)


def answers(pred: Predictive, y: Tensor, new: Predictive, score: Any = None) -> Any:
    return calibrated(pred, y, score)._around(new)


def drawn_values(n: int, seed: int, *, outputs: int = 1) -> tuple[RegressionPredictive, Tensor]:
    """Predictions that are biased, and whose std has nothing to do with the heavy tails of the errors."""
    g = np.random.default_rng(seed)
    mean, std = g.normal(size=(n, outputs)), g.uniform(0.01, 0.1, size=(n, outputs))
    y = mean + 0.7 + g.standard_t(2, size=(n, outputs)) * np.exp(mean)
    return gaussian(torch.tensor(mean), torch.tensor(std)), torch.tensor(y)


def drawn_classes(n: int, seed: int, *, classes: int = 5) -> tuple[ClassificationPredictive, Tensor]:
    """Logits that are four times too large."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, classes, generator=g, dtype=DOUBLE)
    return softmax(4.0 * logits), torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(1)


VALUES, CLASSES = drawn_values(5, 1)[0], drawn_classes(5, 1)[0]
INTERVALS, SETS = answers(*drawn_values(20, 0), VALUES), answers(*drawn_classes(20, 0), CLASSES)
LAWS = [
    *((drawn_values, None, n, level) for n, level in ((9, 0.9), (30, 0.5))),
    *((partial(drawn_values, outputs=3), score, n, 0.8) for score, n in (("per_output", 57), ("joint", 30))),
    *((drawn_classes, score, n, level) for score in CLASS_SCORES for n, level in ((19, 0.9), (57, 0.8))),
]


@pytest.mark.parametrize(("draw", "score", "n", "level"), LAWS)
def test_answers_cover_by_the_exact_law_though_the_method_is_wrong(draw, score, n, level):
    """The number of covered points among 100 is Beta-binomial for scores without ties."""
    covered = np.zeros(200)
    for seed in range(200):
        new, y = draw(100, seed + 10_000)
        inside = answers(*draw(n, seed), new, score).covers(y, level)
        covered[seed] = inside.reshape(100, -1)[:, -1].sum()
    rank = math.ceil((n + 1) * level - 1e-9)
    law = stats.betabinom(100, rank, n + 1 - rank)
    assert abs(covered.mean() - law.mean()) < 4.0 * law.std() / math.sqrt(200)
    # Spread evenly within each step of the distribution function, which makes it continuous.
    spread = law.cdf(covered - 1) + law.pmf(covered) * np.random.default_rng(0).uniform(size=200)
    assert stats.kstest(spread, "uniform").pvalue > 1e-3


@example(99, 70)  # 0.07 * 100 is more than 7 in floating point
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


@pytest.mark.parametrize(("n", "level", "needed"), [(8, 0.9, 9), (18, 0.95, 19)])
def test_too_few_points_promise_everything_and_say_how_many_it_takes(n, level, needed):
    intervals, sets = answers(*drawn_values(n, 0), VALUES), answers(*drawn_classes(n, 0), CLASSES)
    for ask in (lambda: intervals.width(level).isposinf(), lambda: sets.sets(level)):
        with pytest.warns(PosthocWarning, match=f"{n} calibration points .* at least {needed} points"):
            assert ask().all()
    assert answers(*drawn_values(needed, 0), VALUES).width(level).isfinite().all()


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
    points = list(zip(new.probs.tolist(), shares[1], strict=True))
    found = answers(pred, y, new, score)
    for level in (0.3, 0.6, 0.8, 0.9):
        limit = slow_rank(known, level)
        expected = [[slow_score(p, c, score, u) <= limit for c in range(7)] for p, u in points]
        assert found.sets(level).dtype == torch.bool
        assert found.sets(level).tolist() == expected
        assert found.size(level).tolist() == [sum(row) for row in expected]
        assert found.covers(truth, level).tolist() == [row[c] for row, c in zip(expected, truth.tolist(), strict=True)]


@pytest.mark.parametrize("score", ["per_output", "joint"])
def test_intervals_are_those_of_a_slow_implementation(score):
    (pred, y), (new, truth) = drawn_values(60, 1, outputs=2), drawn_values(40, 2, outputs=2)
    rows = (((y - pred.mean) / pred.std).abs()).tolist()
    found = answers(pred, y, new, score)
    for level in (0.2, 0.8, 0.95):
        rates = [[max(row)] * 2 for row in rows] if score == "joint" else rows
        limits = [slow_rank(list(column), level) for column in zip(*rates, strict=True)]
        half = torch.tensor(limits, dtype=DOUBLE) * new.std
        torch.testing.assert_close(found.interval(level), (new.mean - half, new.mean + half))
        inside = (truth - new.mean).abs() <= half
        assert torch.equal(found.covers(truth, level), inside.all(1) if score == "joint" else inside)
        torch.testing.assert_close(coverage(found, truth, level), inside.double().mean())
        torch.testing.assert_close(width(found, truth, level), found.width(level).mean())


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.sampled_from(CLASS_SCORES), st.integers(20, 60), st.integers(2, 8))
def test_sets_grow_with_the_level_and_hold_the_predicted_class(seed, score, n, classes):
    new, _ = drawn_classes(20, seed + 1, classes=classes)
    pred = answers(*drawn_classes(n, seed, classes=classes), new, score)
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
def test_points_on_the_edge_are_inside_whatever_is_rounded(steps, unit, dtype, center, level):
    """Of the calibration points themselves at least as many as the rank are inside; ties all lie on the edge."""
    y = center + unit * torch.tensor(steps, dtype=dtype)
    pred = gaussian(torch.full_like(y, center), torch.tensor(unit / 3.0, dtype=dtype))
    found = answers(pred, y, pred)
    lower, upper = found.interval(level)
    assert lower.dtype == upper.dtype == dtype
    inside = (lower <= y) & (y <= upper)
    score = (y.double() - pred.mean.double()).abs()
    limit = slow_rank(score.tolist(), level)
    assert inside[score <= limit].all()
    assert torch.equal(found.covers(y, level), inside)
    step = (math.nextafter(1.0, 2.0) - 1.0 if dtype is DOUBLE else 2.0**-23) * (abs(center) + 20.0 * unit)
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
    """All points have the same prediction: every point of a class is covered, or none."""
    pred = softmax(torch.tensor([3.0, 2.0, 1.0]).log().expand(20, 3).clone())
    y = torch.tensor([0] * 10 + [1] * 8 + [2] * 2)
    for level, classes in ((0.4, 1), (0.8, 2), (0.9, 3)):
        assert answers(pred, y, pred[:1]).sets(level).tolist() == [[c < classes for c in range(3)]]


@pytest.mark.parametrize("score", [LAC(), APS(), APS(seed=0), APS(allow_empty=True)], ids=str)
def test_the_predicted_class_is_the_networks_own_where_probabilities_are_equal(score):
    """Two logits that differ, and whose float32 probabilities do not."""
    logits = torch.tensor([[0.0, 1e-9, -30.0]], dtype=DOUBLE).repeat(30, 1)
    pred = replace(softmax(logits), log_probs=logits.float().log_softmax(-1))
    found = answers(pred, torch.ones(30, dtype=torch.long), pred, score)
    assert found.sets(0.5)[0].tolist() == [False, True, False]


def test_a_standard_deviation_of_zero_covers_too():
    right, wrong = torch.zeros(20, dtype=DOUBLE), torch.tensor([0.0, 1e-3], dtype=DOUBLE).repeat(10)
    certain = gaussian(right, 0.0)
    assert answers(certain, right, certain).covers(right, 0.9).all()
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


def test_the_random_share_is_uniform_and_belongs_to_the_point():
    x = torch.randn(20_000, 4, generator=torch.Generator().manual_seed(0))
    u = uniform(x, 0)
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-3
    assert torch.equal(u, torch.cat([uniform(row, 0) for row in x.split(3000)]))
    other = uniform(x, 1)
    counting = uniform(torch.arange(20_000.0)[:, None].repeat(1, 2), 3)
    for a, b in ((u, other), (u[1:], u[:-1]), (counting[1:], counting[:-1]), (u, x[:, 0].double())):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4.0 / math.sqrt(20_000)


@pytest.mark.parametrize("score", ["lac", APS(seed=5)])
def test_sets_do_not_depend_on_the_rows_beside_them(score):
    """Nor where the classes are very many, and rows are computed in parts."""
    for classes in (5, 100_000):
        (pred, y), (new, _) = drawn_classes(40, 0, classes=classes), drawn_classes(20, 1, classes=classes)
        found = answers(pred, y, new, score)
        assert torch.equal(found.sets(0.8), torch.cat([row.sets(0.8) for row in found]))


def fitted(task: str, kind: type[Method] = MAP, seed: int = 0, **options: Any) -> tuple[Method, Tensor, Tensor]:
    """A method, fitted to labels that are often what its network says or to values, and its data."""
    x, model = inputs(100), mlp(3, seed=seed)
    y = torch.where(labels(100) > 0, in_eval(model, x).argmax(-1), labels(100))
    y = y if task == "classification" else values(100, 3)
    return kind(model, task, **options).fit((x, y)), x, y


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_calibration_and_streams_are_those_of_the_method(task):
    method, x, y = fitted(task)
    loader = DataLoader(TensorDataset(x, y), batch_size=64)
    conformal, pred = method.conformal(loader), method.predict(x)
    by_hand = Residual().of(pred, y) if task == "regression" else LAC().of(pred, y)
    torch.testing.assert_close(conformal.calibration.scores, by_hand.sort(0).values, rtol=1e-4, atol=1e-4)
    whole, parts = conformal.predict(x), list(conformal.stream(loader))
    assert [len(part) for part in parts] == [64, 36]
    covered = torch.cat([parts[0].covers(y[:64], 0.7), parts[1].covers(y[64:], 0.7)])
    assert torch.equal(covered, whole.covers(y, 0.7))
    assert torch.equal(whole[7].covers(y[7:8], 0.7), whole.covers(y, 0.7)[7:8])
    assert torch.equal(whole[10:20].latent.mean, whole.base.latent.mean[10:20])


def test_answers_are_arrays_and_tables():
    for found in (INTERVALS, SETS):
        plain = found.to_dict()
        assert json.loads(json.dumps(plain)) == plain
        assert {name: len(column) for name, column in plain.items()} == dict.fromkeys(found.numpy(), 5)
        np.testing.assert_array_equal(np.asarray(found), next(iter(found.numpy().values())))
        assert "points=5" in repr(found)
        assert found._repr_html_().startswith("<table><caption>Conformal")


@pytest.mark.parametrize("kind", [FMGP, MAP])
@pytest.mark.parametrize("score", ["raps", APS(2, 0.3, free=1, allow_empty=True), "per_output", "joint"], ids=str)
def test_a_saved_calibration_goes_with_its_head(kind, score, tmp_path):
    options = QUICK if kind is FMGP else {}
    task = "regression" if score in ("per_output", "joint") else "classification"
    method, x, y = fitted(task, kind, **options)
    conformal = method.conformal((x, y), score=score)
    method.save(tmp_path / "head")
    conformal.save(tmp_path / "conformal")
    again = Conformal.load(tmp_path / "conformal", load(tmp_path / "head", model=mlp(3)))
    assert again.calibration.score == conformal.calibration.score
    assert torch.equal(again.calibration.scores, conformal.calibration.scores)
    assert torch.equal(again.predict(x).covers(y, 0.8), conformal.predict(x).covers(y, 0.8))
    with pytest.raises(FileError, match="calibration of this head, found that of another"):
        Conformal.load(tmp_path / "conformal", fitted(task, kind, seed=1, **options)[0])
    with pytest.raises(FileError, match="Expected a conformal that posthoc saved"):
        Conformal.load(tmp_path / "head", method)


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        *((partial(INTERVALS.interval, level), OptionError, "between 0 and 1") for level in (0.0, 1.0, 95, math.nan)),
        *((partial(SETS.sets, level), OptionError, "strictly between 0 and 1") for level in (0.0, 1.0, 95, math.nan)),
        (lambda: INTERVALS.size(0.9), WrongTaskError, "A ConformalIntervals has no size: that is for classification"),
        (lambda: SETS.interval(0.9), WrongTaskError, "A ConformalSets has no interval: that is for regression"),
        (lambda: SETS.probs, AttributeError, "no attribute 'probs'; the method's own answers are in base"),
        (lambda: INTERVALS.covers(torch.zeros(4, 1), 0.9), DataError, r"\(5, 1\), got \(4, 1\)"),
        (lambda: SETS.covers(torch.full((5,), 5), 0.9), DataError, "labels from 0 to 4"),
        (lambda: Conformal.calibrate(None, [], None, "counts"), WrongTaskError, "not for counts"),
        (lambda: APS(penalty=-1.0), OptionError, "penalty of at least 0"),
        (lambda: APS(free=-1), OptionError, "free to be an"),
        (lambda: APS(seed=0.5), OptionError, "seed to be an"),
        (lambda: calibrated(VALUES, None, "aps"), OptionError, "one of 'per_output', 'joint', got 'aps'"),
        (lambda: calibrated(CLASSES, None, "joint"), OptionError, "one of 'lac', 'aps', 'raps', got 'joint'"),
        (lambda: calibrated(VALUES, None, APS()), WrongTaskError, "APS is for classification; this is a regression"),
    ],
)
def test_what_cannot_be_answered_is_refused(ask, error, message):
    with pytest.raises(error, match=message):
        ask()


@pytest.mark.parametrize(
    ("task", "score", "expected"),
    [
        ("regression", None, Residual()),
        ("regression", "joint", Residual(joint=True)),
        ("classification", None, LAC()),
        ("classification", "aps", APS()),
        ("classification", "raps", APS(penalty=0.01, free=5)),
    ],
)
def test_scores_are_named_for_each_task(task, score, expected):
    method, x, y = fitted(task)
    assert method.conformal((x, y), score=score).calibration.score == expected


def test_calibration_needs_targets_points_and_a_fit():
    method, x, y = fitted("classification")
    with pytest.raises(NotFittedError):
        MAP(mlp(3), "classification").conformal((x, y))
    for message, *data in (
        (r"Expected targets: batches \(x, y\)", x, DataLoader(x, batch_size=10), Outputs(values(30, 3))),
        ("at least one calibration point, got none", DataLoader(TensorDataset(x[:0], y[:0])), (x[:0], y[:0])),
        ("labels from 0 to 2", (x, torch.full((100,), 3))),
        (r"outputs of shape \('N', 3\) as in fit", Outputs(values(100, 4), y)),
    ):
        for each in data:
            with pytest.raises(DataError, match=message):
                method.conformal(each)
