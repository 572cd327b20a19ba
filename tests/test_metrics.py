"""Metrics against scikit-learn, quadrature and definitions written as loops."""

import math
from itertools import pairwise, permutations

import numpy as np
import pytest
import sklearn.calibration as calibration  # type: ignore[import-untyped]
import sklearn.metrics as sk  # type: ignore[import-untyped]
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize, stats  # type: ignore[import-untyped]
from torch import Tensor

from posthoc import DataError, OptionError, WrongTaskError
from posthoc.evaluate import metrics as m
from posthoc.predictive.base import LatentGaussian
from posthoc.predictive.classification import ClassificationPredictive
from posthoc.predictive.regression import RegressionPredictive
from tests import oracles

DOUBLE = torch.float64
CLASS_UNCERTAINTIES = ("entropy", "least_confidence", "variance", "mutual_information")


def real_case(n=60, outputs=1, dtype=DOUBLE, seed=0) -> tuple[RegressionPredictive, Tensor]:
    """Gaussian predictions, and targets that are somewhat wider than they say."""
    g = torch.Generator().manual_seed(seed)
    mean, spread = (torch.rand(n, outputs, dtype=DOUBLE, generator=g) for _ in range(2))
    y = mean + torch.randn(n, outputs, dtype=DOUBLE, generator=g)
    latent = LatentGaussian(mean.to(dtype), spread.to(dtype))
    return RegressionPredictive(latent, torch.full_like(spread, 0.1).to(dtype)), y.to(dtype)


def class_case(n=60, classes=4, dtype=DOUBLE, seed=0, sharpness=2.0) -> tuple[ClassificationPredictive, Tensor]:
    """Class probabilities, and labels drawn from flatter ones: overconfident."""
    g = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(n, classes, dtype=DOUBLE, generator=g)
    y = torch.multinomial((logits / 2).softmax(-1), 1, generator=g).squeeze(-1)
    spread = torch.rand(n, classes, dtype=DOUBLE, generator=g)
    parts = [part.to(dtype) for part in (logits, spread, logits.log_softmax(-1), torch.ones(()))]
    return ClassificationPredictive(LatentGaussian(*parts[:2]), *parts[2:]), y


def predictions(probs) -> ClassificationPredictive:
    log_probs = torch.as_tensor(probs, dtype=DOUBLE).log()
    return ClassificationPredictive(LatentGaussian(log_probs, torch.zeros_like(log_probs)), log_probs, torch.ones(()))


def two_classes(confidence) -> ClassificationPredictive:
    """Class 0 is predicted, with these probabilities of at least one half."""
    confidence = torch.as_tensor(confidence, dtype=DOUBLE)
    return predictions(torch.stack([confidence, 1.0 - confidence], -1))


def test_against_scikit_learn():
    pred, y = class_case(200)
    p = pred.probs
    assert float(m.nll(pred, y)) == pytest.approx(sk.log_loss(y, p, labels=range(4)))
    assert float(m.accuracy(pred, y)) == pytest.approx(sk.accuracy_score(y, p.argmax(-1)))
    assert float(m.brier(pred, y)) == pytest.approx(sk.brier_score_loss(y, p, labels=range(4), scale_by_half=False))


def test_probabilities_that_underflow():
    logits = torch.tensor([[300.0, 0.0, -300.0], [0.0, 200.0, -500.0]])
    pred = ClassificationPredictive(LatentGaussian(logits, torch.zeros(2, 3)), logits.log_softmax(-1), torch.ones(()))
    y = torch.tensor([2, 1])
    assert float(pred.probs[0, 2]) == 0.0
    for figure, expected in ((m.nll, 300.0), (m.brier, 1.0), (m.ece, 0.5)):
        assert float(figure(pred, y)) == pytest.approx(expected)
    assert float(m.nll(predictions([[1.0, 0.0]]), torch.tensor([1]))) == math.inf


def test_the_networks_choice_is_the_predicted_class_where_probabilities_tie():
    latent = LatentGaussian(torch.tensor([[1.0, 1.0 + 1e-7, -5.0]]), torch.zeros(1, 3))
    pred = ClassificationPredictive(latent, torch.tensor([[0.5, 0.5, 0.0]]).log(), torch.ones(()))
    assert float(m.accuracy(pred, torch.tensor([1]))) == 1.0


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
def test_ece_by_loops(bins):
    pred, y = class_case(300)
    confidence, top = pred.probs.max(-1)
    found = float(m.ece(pred, y, bins))
    assert found > 0.05
    assert found == pytest.approx(ece_by_loops(confidence.tolist(), (top == y).tolist(), np.linspace(0, 1, bins + 1)))


@pytest.mark.parametrize(("n", "bins"), [(300, 15), (90, 10), (40, 4)])
def test_adaptive_ece_against_scikit_learn(n, bins):
    pred, y = class_case(n)
    confidence, top = pred.probs.max(-1)
    hits = (top == y).double()
    true, said = calibration.calibration_curve(hits, confidence, n_bins=bins, strategy="quantile")
    assert len(true) == bins
    assert float(m.ece(pred, y, bins, equal_mass=True)) == pytest.approx(np.abs(true - said).mean())


def test_bins_of_equal_width_are_closed_on_the_right():
    """0.5 and 0.75 end their bins, and certainty is in the last one with what is almost certain."""
    pred, y = two_classes([0.5, 0.6, 0.75, 0.76, 1.0]), torch.tensor([0, 1, 0, 1, 0])
    assert float(m.ece(pred, y, 4)) == pytest.approx((0.5 + abs(1 - 1.35) + abs(1 - 1.76)) / 5)


def test_adaptive_ece_of_points_that_do_not_divide_equally_and_of_ties():
    confidence, hits = torch.linspace(0.51, 0.99, 11, dtype=DOUBLE), torch.tensor([1, 0, 0, 1, 1, 0, 1, 1, 0, 1, 1])
    expected = sum(abs(float(gap.sum())) for gap in (hits - confidence).split([3, 3, 3, 2])) / 11
    assert float(m.ece(two_classes(confidence), 1 - hits, 4, equal_mass=True)) == pytest.approx(expected)
    pred, y = two_classes([0.6, 0.9]), torch.tensor([0, 1])
    assert float(m.ece(pred, y, 15, equal_mass=True)) == pytest.approx((0.4 + 0.9) / 2)
    tied, y = two_classes([0.8] * 10), torch.tensor([0] * 7 + [1] * 3)
    assert float(m.ece(tied, y, 5, equal_mass=True)) == pytest.approx(0.1)
    assert float(m.ece(tied, y.flip(0), 5, equal_mass=True)) == pytest.approx(0.1)


def smooth_ece_by_sums(confidence: np.ndarray, hits: np.ndarray) -> float:
    """The kernel with its images in the mirrors at 0 and 1, summed over the points and integrated on a grid."""
    t = (np.arange(4000) + 0.5) / 4000
    images = [(2 * k + sign * confidence) for k in range(-2, 3) for sign in (1, -1)]

    def error(width: float) -> float:
        smoothed = sum(stats.norm.pdf((t[:, None] - each) / width) / width for each in images) @ (hits - confidence)
        return float(np.abs(smoothed).mean() / len(hits))

    return float(optimize.brentq(lambda width: error(width) - width, 1e-3, 1.0, xtol=1e-6))


@pytest.mark.parametrize(("n", "sharpness"), [(200, 2.0), (40, 6.0), (300, 0.5)])
def test_smooth_ece_by_sums(n, sharpness):
    pred, y = class_case(n, sharpness=sharpness)
    confidence, top = pred.probs.max(-1)
    expected = smooth_ece_by_sums(confidence.numpy(), (top == y).double().numpy())
    assert float(m.smooth_ece(pred, y)) == pytest.approx(expected, abs=5e-4)  # the grid of 512 cells


def test_smooth_ece_of_certainty():
    pred = two_classes([1.0] * 10)
    assert float(m.smooth_ece(pred, torch.zeros(10, dtype=torch.long))) == pytest.approx(0.0, abs=1e-6)
    # All of the gap is in one place, and no kernel takes any of it away.
    assert float(m.smooth_ece(pred, torch.ones(10, dtype=torch.long))) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("bins", [1, 10])
def test_classwise_ece_by_loops(bins):
    pred, y = class_case(300)
    edges = np.linspace(0, 1, bins + 1)
    errors = [ece_by_loops(pred.probs[:, c].tolist(), (y == c).tolist(), edges) for c in range(4)]
    assert float(m.classwise_ece(pred, y, bins)) == pytest.approx(np.mean(errors))


def test_entropy_histogram_against_numpy():
    pred, _ = class_case(500)
    edges, counts = m.entropy_histogram(pred, 20)
    expected, where = np.histogram(pred.entropy(), 20, (0.0, math.log(4)))
    assert counts.tolist() == expected.tolist()
    assert edges.tolist() == pytest.approx(where.tolist())
    extremes = predictions([[1 / 3] * 3, [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    assert m.entropy_histogram(extremes, 3)[1].tolist() == [1, 1, 1]
    for classes in range(2, 60):  # rounding does not put an entropy beyond the last bin
        uniform = predictions(torch.full((1, classes), 1 / classes))
        assert m.entropy_histogram(uniform, 10)[1].tolist() == [0] * 9 + [1]


@pytest.mark.parametrize("outputs", [1, 3])
def test_figures_of_a_regression_against_scikit_learn_and_scipy(outputs):
    pred, y = real_case(outputs=outputs)
    assert float(m.rmse(pred, y)) == pytest.approx(sk.mean_squared_error(y.ravel(), pred.mean.ravel()) ** 0.5)
    assert float(m.mae(pred, y)) == pytest.approx(sk.mean_absolute_error(y, pred.mean))
    normal = stats.norm(pred.mean.numpy(), pred.std.numpy())
    assert float(m.nll(pred, y)) == pytest.approx(-normal.logpdf(y.numpy()).sum(-1).mean())
    lower, upper = normal.interval(0.8)
    inside = (lower < y.numpy()) & (y.numpy() < upper)
    assert 0.3 < inside.mean() < 0.8  # neither all nor none
    assert float(m.coverage(pred, y, 0.8)) == pytest.approx(inside.mean())
    assert float(m.width(pred, y, 0.8)) == pytest.approx((upper - lower).mean())


def crps_by_quadrature(cdf, y: float) -> float:
    below = integrate.quad(lambda t: cdf(t) ** 2, -np.inf, y)[0]
    return below + integrate.quad(lambda t: (1 - cdf(t)) ** 2, y, np.inf)[0]


def test_crps_is_its_integral_and_the_absolute_error_without_doubt():
    pred, y = real_case(8)
    cases = torch.cat([pred.mean, pred.std, y], 1).tolist()
    expected = [crps_by_quadrature(stats.norm(mean, std).cdf, target) for mean, std, target in cases]
    assert float(m.crps(pred, y)) == pytest.approx(np.mean(expected), rel=1e-7)
    mean, y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.5, 2.0, -1.0])
    for variance in (0.0, 1e-30):
        pred = RegressionPredictive(LatentGaussian(mean, torch.full_like(mean, variance)), torch.zeros_like(mean))
        assert float(m.crps(pred, y)) == pytest.approx(4.5 / 3)


def test_crps_of_draws_by_all_pairs():
    pred, y = real_case(5, outputs=2)
    draws = pred.sample(7, torch.Generator().manual_seed(0))
    pairs = (draws[:, None] - draws[None]).abs()
    for fair, count in ((False, 7 * 7), (True, 7 * 6)):
        expected = (draws - y).abs().mean(0) - 0.5 * pairs.sum((0, 1)) / count
        torch.testing.assert_close(m.crps_of_draws(draws, y, fair=fair), expected)


@pytest.mark.parametrize("seed", range(3))
def test_cqm_is_its_integral(seed):
    pred, y = real_case(13, seed=seed)
    assert float(m.cqm(pred, y)) == pytest.approx(oracles.cqm_by_grid(pred.cdf(y).squeeze(-1)), abs=1e-5)


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("level", [0.5, 0.9])
def test_interval_score_by_loops(outputs, level):
    pred, y = real_case(outputs=outputs)
    total = []
    for target, low, high in zip(y.flatten(), *(end.flatten() for end in pred.interval(level)), strict=True):
        missed = low - target if target < low else target - high if target > high else 0.0
        total.append(float(high - low + 2 / (1 - level) * missed))
    assert float(m.interval_score(pred, y, level)) == pytest.approx(np.mean(total))
    assert float(m.interval_score(pred, y, level)) > float(m.width(pred, y, level))


@pytest.mark.parametrize("outputs", [1, 3])
def test_pit_error_is_its_integral(outputs):
    pred, y = real_case(outputs=outputs)
    levels = (np.arange(100_000) + 0.5) / 100_000
    shares = np.searchsorted(np.sort(pred.cdf(y).flatten().numpy()), levels, side="right") / y.numel()
    assert float(m.pit_error(pred, y)) == pytest.approx(np.abs(shares - levels).mean(), abs=1e-5)


def test_pit_error_sees_a_shift_that_the_centered_metric_does_not():
    below = 0.5 + 0.5 * torch.rand(2000, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    assert float(m.cqm_of(below)) < 0.02
    assert float(m.distance_to_uniform(below)) == pytest.approx(0.25, abs=0.01)


def test_cqm_of_the_extremes():
    pred, _ = real_case(1000)
    for y in (pred.mean, pred.mean + 100 * pred.std):
        assert float(m.cqm(pred, y)) == pytest.approx(0.5)
    assert float(m.cqm(pred, pred.sample(1, torch.Generator().manual_seed(0))[0])) < 0.03


reals = st.floats(-1e3, 1e3)


@settings(max_examples=50, deadline=None)
@given(errors=st.lists(reals, min_size=1, max_size=8), shift=reals, scale=st.floats(1e-2, 1e2))
def test_units_go_through(errors, shift, scale):
    """y → a + by moves no CQM or coverage, and multiplies rmse, mae, CRPS and width by b."""
    error = torch.tensor(errors, dtype=DOUBLE)
    zero, half = torch.zeros_like(error), torch.full_like(error, 0.5)
    plain = RegressionPredictive(LatentGaussian(zero, half), half)
    other = RegressionPredictive(LatentGaussian(zero + shift, scale**2 * half), scale**2 * half)
    moved = shift + scale * error
    for metric, factor in ((m.rmse, scale), (m.mae, scale), (m.crps, scale), (m.width, scale), (m.cqm, 1.0)):
        assert float(metric(other, moved)) == pytest.approx(factor * float(metric(plain, error)), rel=1e-6, abs=1e-7)
    assert 0.0 <= float(m.cqm(plain, error)) <= 0.5 + 1e-12
    assert float(m.crps(plain, error)) <= float(m.mae(plain, error)) + 0.24


@pytest.mark.parametrize("score", [*CLASS_UNCERTAINTIES, lambda pred: pred.latent.variance.sum(-1)])
def test_detection_against_scikit_learn(score):
    inside, outside = class_case(100)[0], class_case(80, seed=1, sharpness=1.0)[0]
    found, truth = m.ood_detection(inside, outside, score), np.repeat([0, 1], [100, 80])
    values = torch.cat([inside.uncertainty(score), outside.uncertainty(score)])
    assert float(found["auc"]) == pytest.approx(sk.roc_auc_score(truth, values), abs=1e-14)
    fpr, tpr, _ = sk.roc_curve(truth, values, drop_intermediate=False)
    assert float(found["fpr95"]) == fpr[np.argmax(tpr >= 0.95)]


few_values = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=30)


@settings(max_examples=100, deadline=None)
@given(inside=few_values, outside=few_values)
def test_ties_count_half_and_swapping_the_sides_turns_the_area_over(inside, outside):
    a, b = torch.tensor(inside, dtype=DOUBLE), torch.tensor(outside, dtype=DOUBLE)
    pairs = [(o > i) + 0.5 * (o == i) for o in outside for i in inside]
    assert float(m.auroc(a, b)) == pytest.approx(np.mean(pairs), abs=1e-14)
    assert float(m.auroc(a, b) + m.auroc(b, a)) == pytest.approx(1.0, abs=1e-14)
    assert float(m.auroc(-a, -b)) == pytest.approx(float(m.auroc(b, a)), abs=1e-14)
    assert float(m.auroc(a.exp(), b.exp())) == float(m.auroc(a, b))


@settings(max_examples=100, deadline=None)
@given(inside=few_values, outside=few_values, tpr=st.sampled_from([0.5, 0.8, 0.95, 1.0]))
def test_the_false_positives_of_a_threshold(inside, outside, tpr):
    a, b = torch.tensor(inside, dtype=DOUBLE), torch.tensor(outside, dtype=DOUBLE)
    fitting = [t for t in outside if np.mean(b.numpy() >= t) >= tpr]
    assert float(m.fpr_at(tpr, a, b)) == pytest.approx(np.mean(a.numpy() >= max(fitting)))


def test_exact_shares_are_not_lost_to_rounding():
    for tpr, n in ((0.95, 20), (0.95, 60), (0.95, 1000), (0.55, 100), (0.56, 100)):
        threshold = n - round(tpr * n)  # all below it may be missed
        inside = torch.tensor([threshold - 0.5, threshold], dtype=DOUBLE)
        assert float(m.fpr_at(tpr, inside, torch.arange(n, dtype=DOUBLE))) == 0.5


@pytest.mark.parametrize("by", CLASS_UNCERTAINTIES)
def test_risk_and_coverage_of_classes_by_loops(by):
    pred, y = class_case(50)
    wrong = (pred.probs.argmax(-1) != y).double().numpy()[np.argsort(pred.uncertainty(by).numpy())]
    risks = [wrong[:k].mean() for k in range(1, 51)]
    kept, risk = m.risk_coverage(pred, y, by)
    assert kept.tolist() == pytest.approx([k / 50 for k in range(1, 51)])
    assert risk.tolist() == pytest.approx(risks)
    assert float(m.aurc(pred, y, by)) == pytest.approx(np.mean(risks))
    assert 0.0 < risks[-1] < 1.0


def test_risk_and_coverage_of_a_regression_by_loops():
    pred, y = real_case(40, outputs=2)
    squares = (pred.mean - y).square().mean(-1).numpy()[np.argsort(pred.variance.mean(-1).numpy())]
    assert float(m.aurc(pred, y)) == pytest.approx(np.mean([squares[:k].mean() for k in range(1, 41)]))


@settings(max_examples=50, deadline=None)
@given(points=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=5))
def test_tied_points_stand_in_random_order(points):
    """The curve is the mean over all orders that the scores allow."""
    allowed = [order for order in permutations(points) if all(a[0] <= b[0] for a, b in pairwise(order))]
    losses = np.array(allowed)[..., 1]
    curves = losses.cumsum(1) / np.arange(1, len(points) + 1)
    score, loss = torch.tensor(points, dtype=DOUBLE).T
    assert m.selective_risk(score, loss).tolist() == pytest.approx(np.mean(curves, 0).tolist())


def test_figures_refuse_the_other_task():
    for figure in (m.accuracy, m.ece, m.brier):
        with pytest.raises(WrongTaskError, match=r"A RegressionPredictive has no .* classification"):
            figure(real_case()[0], torch.zeros(60, dtype=torch.long))
    for figure in (m.rmse, m.mae, m.crps, m.cqm, m.pit_error, m.coverage, m.width, m.interval_score):
        with pytest.raises(WrongTaskError, match="regression"):
            figure(class_case()[0], torch.zeros(60, 4))


@pytest.mark.parametrize(
    ("compute", "error", "message"),
    [
        (lambda *_: m.coverage(*real_case(), 95), OptionError, "0.95 means 95 %"),
        (lambda *_: m.width(*real_case(), 0.0), OptionError, "strictly between 0 and 1"),
        (lambda pred, y: m.ece(pred, y, 0), OptionError, "bins"),
        (lambda pred, y: m.ece(pred, y, 2.5), OptionError, "bins"),
        (lambda pred, y: m.aurc(pred, y, "doubt"), OptionError, "'entropy'"),
        (lambda pred, y: m.accuracy(pred[:48], y), DataError, "60"),
        (lambda pred, y: m.crps_of_draws(torch.zeros(1, 3), torch.zeros(3), fair=True), DataError, r"got \(1, 3\)"),
        (lambda pred, y: m.crps_of_draws(torch.zeros(5, 3), torch.zeros(1)), DataError, "not broadcast"),
    ],
)
def test_impossible_options_and_data_are_refused(compute, error, message):
    with pytest.raises(error, match=message):
        compute(*class_case())


@pytest.mark.parametrize("figure", [m.nll, m.accuracy, m.ece, m.smooth_ece, m.classwise_ece, m.brier, m.aurc])
def test_no_rows_and_nan_are_refused(figure):
    pred, y = class_case()
    with pytest.raises(DataError, match="at least one row"):
        figure(pred[:0], y[:0])
    if figure is not m.accuracy:
        spoiled = predictions(pred.probs.index_fill(0, torch.tensor(3), torch.nan))
        with pytest.raises(DataError, match="NaN in row 3"):
            figure(spoiled, y)


def test_many_classes_are_scored_some_rows_at_a_time(monkeypatch):
    pred, y = class_case(50, 7)
    whole, rows = float(m.brier(pred, y)), []
    monkeypatch.setattr("posthoc.predictive.base.rows_that_fit", lambda numbers: rows.append(84 // numbers) or rows[-1])
    assert float(m.brier(pred, y)) == pytest.approx(whole, rel=1e-12)
    assert rows == [12]
