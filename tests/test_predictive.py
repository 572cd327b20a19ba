"""`Predictive` against torch.distributions and its own samples."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from posthoc import DataError, OptionError, PosthocWarning, WrongTaskError
from posthoc.predictive.base import LatentGaussian, require_finite_prediction
from posthoc.predictive.classification import ClassificationPredictive
from posthoc.predictive.regression import RegressionPredictive
from posthoc.training.loop import History
from tests.cases import answers, same, seeded

DOUBLE = torch.float64


def regression(shape=(6, 2), dtype=DOUBLE, covariance=False):
    g = seeded()
    mean, variance, noise = (torch.rand(shape, dtype=dtype, generator=g) + 0.1 for _ in range(3))
    full = torch.diag_embed(variance - 0.05) + 0.05 if covariance else None
    return RegressionPredictive(LatentGaussian(3 * mean, variance, full, independent=False), noise)


def classification(n=6, c=3, covariance=False):
    g = seeded()
    mean, factor = (torch.randn(*shape, dtype=DOUBLE, generator=g) for shape in ((n, c), (n, c, c)))
    full = factor @ factor.mT
    variance, full = full.diagonal(dim1=1, dim2=2), full if covariance else None
    latent = LatentGaussian(mean, variance, full, independent=not covariance)
    return ClassificationPredictive(latent, (mean / 2).log_softmax(-1), torch.tensor(0.7, dtype=DOUBLE))


def test_regression_is_a_normal_distribution():
    pred = regression()
    normal = torch.distributions.Normal(pred.mean, (pred.latent_variance + pred.noise).sqrt())
    torch.testing.assert_close(pred.std, normal.stddev)
    y = pred.mean + 1.3 * torch.randn_like(pred.mean)
    torch.testing.assert_close(pred.log_prob(y), normal.log_prob(y).sum(-1))
    torch.testing.assert_close(pred.cdf(y), normal.cdf(y))
    torch.testing.assert_close(pred.quantile(0.3), normal.icdf(torch.tensor(0.3, dtype=DOUBLE)))
    torch.testing.assert_close(pred.cdf(pred.quantile(0.85)), torch.full_like(y, 0.85))
    lower, upper = pred.interval(0.9)
    torch.testing.assert_close(pred.cdf(upper) - pred.cdf(lower), torch.full_like(y, 0.9))
    torch.testing.assert_close(0.5 * (lower + upper), pred.mean)


@pytest.mark.parametrize("covariance", [False, True])
@pytest.mark.parametrize("make", [regression, classification])
def test_samples_have_the_moments(make, covariance):
    pred = make(covariance=covariance) if make is regression else make(covariance=covariance).latent
    draws = pred.sample(200_000, seeded())
    assert torch.equal(draws, pred.sample(200_000, seeded()))
    assert draws.shape == (200_000, *pred.mean.shape)
    torch.testing.assert_close(draws.mean(0), pred.mean, rtol=0, atol=0.05)
    torch.testing.assert_close(draws.var(0), pred.variance, rtol=0.05, atol=0)
    if covariance or make is classification:
        centered = draws - pred.mean
        found = torch.einsum("snc,snd->ncd", centered, centered) / len(draws)
        torch.testing.assert_close(found, pred.covariance, rtol=0, atol=0.2 if make is classification else 0.03)


def test_probabilities_of_classes_their_samples_and_scores():
    pred = classification()
    draws = pred.sample(100_000, seeded())
    assert (draws.shape, draws.dtype) == ((100_000, 6), torch.int64)
    torch.testing.assert_close(torch.nn.functional.one_hot(draws, 3).double().mean(0), pred.probs, rtol=0, atol=0.01)
    p = (pred.latent.mean / 2).softmax(-1)
    torch.testing.assert_close(pred.probs, p)
    assert torch.equal(pred.labels, p.argmax(-1))
    torch.testing.assert_close(pred.entropy(), torch.distributions.Categorical(probs=p).entropy())
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    torch.testing.assert_close(pred.log_prob(y), p.log()[torch.arange(6), y])


def test_mutual_information_is_the_entropy_that_knowing_the_logits_would_remove():
    pred = classification(covariance=True)
    found = pred.mutual_information(samples=50_000)
    p = (pred.latent.sample(100_000, seeded(7)) / pred.temperature).softmax(-1)
    expected = torch.special.entr(p.mean(0)).sum(-1) - torch.special.entr(p).sum(-1).mean(0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.01)
    assert torch.equal(found, pred.mutual_information(samples=50_000))
    zero = LatentGaussian(pred.latent.mean, torch.zeros_like(pred.latent.mean))
    certain = ClassificationPredictive(zero, pred.log_probs, pred.temperature)
    torch.testing.assert_close(certain.mutual_information(), torch.zeros(6, dtype=DOUBLE))


@pytest.mark.parametrize("make", [regression, classification])
def test_rows_are_selected_moved_and_joined_again(make):
    pred = make(covariance=True)
    for parts in ([pred[:2], pred[2:]], list(pred)):
        joined = type(pred).cat(parts)
        assert sum(len(part) for part in parts) == len(joined) == 6
        assert same(answers(joined), answers(pred))
    assert torch.equal(pred[-1].latent.mean, pred.latent.mean[-1:])
    assert all(tensor.is_meta for tensor in answers(pred.to("meta")).values())


REFUSED = [
    (regression, lambda p: p.covariance, OptionError, "covariance=True"),
    (classification, lambda p: replace(p.latent, independent=False).sample(2), OptionError, "covariance=True"),
    (regression, lambda p: p.interval(95), OptionError, "0.95 means 95 %"),
    (regression, lambda p: p.interval("a"), OptionError, "strictly between 0 and 1, got 'a'"),
    (regression, lambda p: p.quantile(0.0), OptionError, "strictly between 0 and 1"),
    (regression, lambda p: p.quantile([[0.1] * 3]), OptionError, r"broadcast to shape \(6, 2\), got .* \(1, 3\)"),
    (regression, lambda p: p.quantile(None), OptionError, "strictly between 0 and 1, got None"),
    (regression, lambda p: p.sample(2.5), OptionError, r"number of draws, to be an integer of at least 1, got 2\.5"),
    (regression, lambda p: p.cdf("a"), DataError, "targets to be numbers, one row a point, got 'a'"),
    (regression, lambda p: p.defer("some"), OptionError, "share of the rows .*got 'some'"),
    (regression, lambda p: p.defer(threshold="high"), OptionError, "either a budget or a threshold"),
    (regression, lambda p: p.log_prob(torch.zeros(6)), DataError, r"\(6, 2\), got \(6,\)"),
    (regression, lambda p: p.log_prob(torch.full((6, 2), torch.nan)), DataError, "finite targets"),
    (classification, lambda p: p.mutual_information(0), OptionError, "samples to be an integer of at least 1, got 0"),
    (classification, lambda p: p.sample(0), OptionError, "number of draws"),
    (classification, lambda p: p.log_prob(["cat"] * 6), DataError, "targets to be numbers"),
    (regression, lambda p: p.probs, WrongTaskError, "A RegressionPredictive has no probs: that is for classification"),
    (regression, lambda p: p.color, AttributeError, "no attribute 'color'"),
    (regression, lambda p: require_finite_prediction(replace(p, noise=p.noise / 0)), DataError, "finite predictions"),
    (regression, lambda p: p[6], IndexError, "row from 0 to 5"),
    (regression, lambda p: p[-7], IndexError, "row from 0 to 5"),
    (classification, lambda p: p.interval(0.9), WrongTaskError, "no interval: that is for regression"),
    (classification, lambda p: p.mean, WrongTaskError, r"no mean: .*pred\.latent\.mean"),
    (classification, lambda p: p.variance, WrongTaskError, r"no variance: .*pred\.latent\.variance"),
]


@pytest.mark.parametrize(("make", "ask", "error", "message"), REFUSED)
def test_impossible_questions_are_refused(make, ask, error, message):
    with pytest.raises(error, match=message):
        ask(make())


def test_several_levels_give_several_quantiles():
    pred = regression()
    assert torch.equal(pred.quantile(0.3), pred.quantile(torch.tensor(0.3, dtype=DOUBLE)))
    levels = [0.05, 0.5, 0.95]
    found = pred.quantile(levels)
    assert torch.equal(found, torch.stack([pred.quantile(level) for level in levels]))
    assert torch.equal(pred.quantile(torch.tensor([0.5])), found[1:2])
    for shape in ((6,), (6, 1), (6, 2)):
        pred = regression(shape, torch.float32)
        assert pred.quantile([0.1, 0.2]).shape == (2, *shape)
        assert pred.std.shape == pred.interval(0.9)[0].shape == pred.quantile(0.2).shape == shape
        assert pred.log_prob(pred.mean).shape == (6,)
        assert pred.sample(4).shape == (4, *shape)


@pytest.mark.parametrize("make", [regression, classification])
def test_predictions_are_arrays_and_tables_and_a_line(make):
    pred = make()
    main = pred.mean if make is regression else pred.probs
    np.testing.assert_array_equal(np.asarray(pred), main.numpy())
    assert np.asarray(pred, dtype=np.float32).dtype == np.float32
    arrays, plain = pred.numpy(), pred.to_dict()
    assert arrays.keys() == plain.keys()
    assert all(len(values) == 6 for values in arrays.values())
    assert json.loads(json.dumps(plain)) == plain
    half = replace(pred, latent=replace(pred.latent, mean=pred.latent.mean.bfloat16()))
    assert np.asarray(half).shape == main.shape
    many = make(500) if make is classification else make((500, 2))
    assert len(repr(many)) < 120
    assert "points=500" in repr(many)
    assert many._repr_html_().startswith("<table>")
    assert len(many._repr_html_()) < 3000


def test_a_history_is_a_table_of_scores_or_losses():
    assert "<th>validation score</th></tr><tr><td>20</td><td>0.5</td>" in History([1.0], {20: 0.5}, 20)._repr_html_()
    assert "<th>loss</th></tr><tr><td>1</td><td>0.25</td>" in History([0.25])._repr_html_()


def test_logits_without_variance_have_no_mutual_information():
    logits = torch.randn(6, 3, dtype=DOUBLE, generator=seeded())
    latent = LatentGaussian(logits, torch.zeros_like(logits), has_variance=False)
    pred = ClassificationPredictive(latent, logits.log_softmax(-1), torch.ones(()))
    with pytest.warns(PosthocWarning, match="no variance"):
        assert not pred.mutual_information().any()
    for by in ("mutual_information", "variance"):
        with pytest.raises(OptionError, match=r'no variance.*by="entropy"'):
            pred.defer(0.5, by=by)
    assert int(pred.defer(2).sum()) == 2


def test_singular_covariances_are_sampled_without_a_warning():
    ones = torch.ones(4, 3, 3)
    pred = RegressionPredictive(LatentGaussian(torch.zeros(4, 3), torch.ones(4, 3), ones, False), torch.zeros(4, 3))
    draws = pred.sample(1000, seeded())
    torch.testing.assert_close(draws[..., 0], draws[..., 1], rtol=0, atol=0.02)


@pytest.mark.parametrize("make", [regression, classification])
def test_predictions_plot_themselves(make):
    pytest.importorskip("matplotlib").use("agg")
    pred = make((6, 1)) if make is regression else make()
    for axes in (pred.plot(), pred.plot(pred.mean if make is regression else pred.labels)):
        assert axes.get_xlabel()
