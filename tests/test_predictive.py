"""`Predictive` against torch.distributions and its own samples."""

from __future__ import annotations

import pytest
import torch

from posthoc import DataError, OptionError, WrongTaskError
from posthoc.predictive.base import ClassificationPredictive, RegressionPredictive

DOUBLE = torch.float64


def regression(shape=(6, 2), dtype=DOUBLE, covariance=False):
    g = torch.Generator().manual_seed(0)
    draw = lambda: torch.rand(shape, dtype=dtype, generator=g) + 0.1  # noqa: E731
    pred = RegressionPredictive(draw() * 3, draw(), draw())
    if not covariance:
        return pred
    cross = torch.full(shape[:1], 0.05, dtype=dtype)
    latent = torch.diag_embed(pred.latent_variance) + cross[:, None, None] * (1 - torch.eye(shape[1], dtype=dtype))
    return RegressionPredictive(pred.mean, pred.latent_variance, pred.noise, latent)


def classification(n=6, c=3, covariance=False):
    g = torch.Generator().manual_seed(0)
    mean = torch.randn(n, c, dtype=DOUBLE, generator=g)
    factor = torch.randn(n, c, c, dtype=DOUBLE, generator=g)
    full = factor @ factor.mT
    variance = full.diagonal(dim1=1, dim2=2)
    tau = torch.tensor(0.7, dtype=DOUBLE)
    return ClassificationPredictive(
        mean, variance, (mean / 2).log_softmax(-1), tau, True, not covariance, full if covariance else None
    )


def test_a_new_observation_has_both_variances():
    pred = regression()
    torch.testing.assert_close(pred.variance, pred.latent_variance + pred.noise)
    torch.testing.assert_close(pred.std.square(), pred.variance)


def test_regression_is_a_normal_distribution():
    pred = regression()
    normal = torch.distributions.Normal(pred.mean, pred.variance.sqrt())
    y = pred.mean + 1.3 * torch.randn_like(pred.mean)
    torch.testing.assert_close(pred.log_prob(y), normal.log_prob(y).sum(-1))
    torch.testing.assert_close(pred.cdf(y), normal.cdf(y))
    torch.testing.assert_close(pred.quantile(0.3), normal.icdf(torch.tensor(0.3, dtype=DOUBLE)))
    torch.testing.assert_close(pred.cdf(pred.quantile(0.85)), torch.full_like(y, 0.85))
    lower, upper = pred.interval(0.9)
    torch.testing.assert_close(pred.cdf(upper) - pred.cdf(lower), torch.full_like(y, 0.9))
    torch.testing.assert_close(0.5 * (lower + upper), pred.mean)


@pytest.mark.parametrize("covariance", [False, True])
def test_regression_samples_have_its_moments(covariance):
    pred = regression(covariance=covariance)
    draws = pred.sample(200_000, torch.Generator().manual_seed(0))
    assert draws.shape == (200_000, 6, 2)
    torch.testing.assert_close(draws.mean(0), pred.mean, rtol=0, atol=0.02)
    torch.testing.assert_close(draws.var(0), pred.variance, rtol=0.03, atol=0)
    if covariance:
        centred = draws - pred.mean
        found = torch.einsum("snc,snd->ncd", centred, centred) / len(draws)
        torch.testing.assert_close(found, pred.covariance, rtol=0, atol=0.03)
        torch.testing.assert_close(pred.covariance.diagonal(dim1=1, dim2=2), pred.variance)


@pytest.mark.parametrize("covariance", [False, True])
def test_logit_samples_have_the_logits_moments(covariance):
    pred = classification(covariance=covariance)
    draws = pred.sample(200_000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(draws.mean(0), pred.mean, rtol=0, atol=0.05)
    torch.testing.assert_close(draws.var(0), pred.variance, rtol=0.05, atol=0)
    centred = draws - pred.mean
    found = torch.einsum("snc,snd->ncd", centred, centred) / len(draws)
    torch.testing.assert_close(found, pred.covariance, rtol=0, atol=0.2)


def test_sampling_is_seeded():
    pred = regression()
    a, b = (pred.sample(3, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(a, b)
    assert not torch.equal(a, pred.sample(3, torch.Generator().manual_seed(2)))


def test_classification_scores():
    pred = classification()
    p = (pred.mean / 2).softmax(-1)
    torch.testing.assert_close(pred.probs, p)
    torch.testing.assert_close(pred.entropy(), torch.distributions.Categorical(probs=p).entropy())
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    torch.testing.assert_close(pred.log_prob(y), p.log()[torch.arange(6), y])


def test_mutual_information_is_the_entropy_that_knowing_the_logits_would_remove():
    pred = classification(covariance=True)
    found = pred.mutual_information(samples=50_000)
    draws = pred.sample(100_000, torch.Generator().manual_seed(7)) / pred.temperature
    p = draws.softmax(-1)
    entropy = lambda q: -(q * q.log()).sum(-1)  # noqa: E731
    torch.testing.assert_close(found, entropy(p.mean(0)) - entropy(p).mean(0), rtol=0, atol=0.01)
    assert torch.equal(found, pred.mutual_information(samples=50_000))
    certain = ClassificationPredictive(pred.mean, torch.zeros_like(pred.mean), pred.log_probs, pred.temperature)
    torch.testing.assert_close(certain.mutual_information(), torch.zeros(6, dtype=DOUBLE))


def test_rows_can_be_selected_and_joined_again():
    for pred in (regression(covariance=True), classification(covariance=True)):
        halves = [pred[:2], pred[2:]]
        joined = type(pred).cat(halves)
        assert len(halves[0]) == 2
        assert torch.equal(joined.mean, pred.mean)
        assert torch.equal(joined.variance, pred.variance)
        assert torch.equal(joined.covariance, pred.covariance)
        assert len(pred[-1]) == 1
        assert torch.equal(pred[-1].mean, pred.mean[-1:])


def test_what_was_not_computed_is_asked_for():
    with pytest.raises(OptionError, match="covariance=True"):
        _ = regression().covariance
    pred = classification(covariance=True)
    lost = ClassificationPredictive(pred.mean, pred.variance, pred.log_probs, pred.temperature, True, False)
    with pytest.raises(OptionError, match="covariance=True"):
        lost.sample(2)


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda p: p.interval(95), OptionError, "0.95 means 95 %"),
        (lambda p: p.quantile(0.0), OptionError, "strictly between 0 and 1"),
        (lambda p: p.sample(0), OptionError, "at least one draw"),
        (lambda p: p.sample(2.5), OptionError, r"at least one draw, a whole number of them, got n = 2\.5"),
        (lambda p: p.sample("a"), OptionError, "at least one draw"),
        (lambda p: p.quantile("a"), OptionError, "strictly between 0 and 1, got 'a'"),
        (lambda p: p.quantile(None), OptionError, "strictly between 0 and 1, got None"),
        (lambda p: p.interval("a"), OptionError, "strictly between 0 and 1, got 'a'"),
        (lambda p: p.cdf("a"), DataError, "targets to be numbers, one row a point, got 'a'"),
        (lambda p: p.log_prob([["a"]]), DataError, "targets to be numbers"),
        (lambda p: p.defer("some"), OptionError, "share of the rows .*got 'some'"),
        (lambda p: p.defer(threshold="high"), OptionError, "either a budget or a threshold"),
        (lambda p: p.log_prob(torch.zeros(6)), DataError, r"\(6, 2\), got \(6,\)"),
        (lambda p: p.log_prob(torch.full((6, 2), torch.nan)), DataError, "finite targets"),
    ],
)
def test_impossible_questions_are_refused(ask, error, message):
    with pytest.raises(error, match=message):
        ask(regression())


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda p: p.mutual_information(0), OptionError, "samples to be an integer of at least 1, got 0"),
        (lambda p: p.mutual_information(2.5), OptionError, r"samples to be an integer of at least 1, got 2\.5"),
        (lambda p: p.sample(2.5), OptionError, "at least one draw"),
        (lambda p: p.log_prob(["cat"] * 6), DataError, "targets to be numbers"),
    ],
)
def test_impossible_questions_about_classes_are_refused(ask, error, message):
    with pytest.raises(error, match=message):
        ask(classification())


def test_a_quantile_keeps_the_digits_of_its_level():
    pred = regression()
    assert torch.equal(pred.quantile(0.3), pred.quantile(torch.tensor(0.3, dtype=DOUBLE)))


def test_questions_for_the_other_task_say_so():
    with pytest.raises(WrongTaskError, match="probs is for classification; this is a RegressionPredictive"):
        _ = regression().probs
    with pytest.raises(WrongTaskError, match="interval is for regression"):
        classification().interval(0.9)
    assert not hasattr(regression(), "probs")
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        _ = regression().colour


def test_shapes_follow_the_networks_output():
    for shape in ((6,), (6, 1), (6, 2)):
        pred = regression(shape, torch.float32)
        assert pred.std.shape == pred.interval(0.9)[0].shape == pred.quantile(0.2).shape == shape
        assert pred.log_prob(pred.mean).shape == (6,)
        assert pred.sample(4).shape == (4, *shape)


def test_everything_moves_to_another_device():
    for pred in (regression(covariance=True), classification(covariance=True)):
        moved = pred.to("meta")
        tensors = [v for v in vars(moved).values() if isinstance(v, torch.Tensor)]
        assert len(tensors) >= 4
        assert all(t.is_meta for t in tensors)


def test_singular_covariances_are_sampled_without_a_warning():
    ones = torch.ones(4, 3, 3)
    pred = RegressionPredictive(torch.zeros(4, 3), torch.ones(4, 3), torch.zeros(4, 3), ones)
    draws = pred.sample(1000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(draws[..., 0], draws[..., 1], rtol=0, atol=0.02)
