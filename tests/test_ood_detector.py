"""`ood_score` and `ood_pvalue`: distances to the rows of the fit, with p-values from rows held out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp, kstest
from sklearn.metrics import roc_auc_score

from posthoc import FMGP, RBF, DataError, OptionError, Outputs, Temperature
from posthoc.evaluate.evaluate import evaluate
from posthoc.evaluate.metrics import ood_detection
from posthoc.fmgp import ood_detector
from posthoc.fmgp.ood_detector import NEIGHBORS, OODDetector
from tests.cases import reloaded, seeded

QUICK = {"steps": 2, "num_inducing": 5, "progress": False}


def table(n: int, columns: int = 4, seed: int = 0) -> torch.Tensor:
    """Correlated columns in different units around different means."""
    mixing = torch.randn(columns, columns, generator=seeded(99), dtype=torch.float64)
    units = 10.0 ** torch.arange(columns, dtype=torch.float64)
    return (torch.randn(n, columns, generator=seeded(seed), dtype=torch.float64) @ mixing + 5.0) * units


def rows(n: int = 600, seed: int = 0, block: str = "features", columns: int = 4) -> Outputs:
    logits = 3.0 * torch.randn(n, 3, generator=seeded(seed))
    y = torch.multinomial(logits.softmax(-1), 1, generator=seeded(seed + 1)).squeeze(1)
    return Outputs(logits, y, **{block: table(n, columns, seed=seed)})


def fitted(data: Outputs, **options: Any) -> FMGP:
    return FMGP(None, "classification", variance="shared", **QUICK, **options).fit(data)


def detector_of(data: Outputs, kind: str = "knn") -> OODDetector:
    detector = OODDetector.of(data, kind)
    assert detector is not None
    return detector


def coordinates(x: np.ndarray, known: np.ndarray, block: str) -> np.ndarray:
    standardized = (x - known.mean(0)) / known.std(0)
    if block == "inputs":
        return standardized
    length = np.linalg.norm(standardized, axis=1) / np.sqrt(x.shape[1])
    return np.column_stack([x / np.linalg.norm(x, axis=1)[:, None], length])


@pytest.mark.parametrize("block", ["features", "inputs"])
def test_scores_are_whitened_distances_to_the_tenth_nearest_row_of_the_bank(block):
    data, new = rows(block=block), rows(80, seed=5, block=block).space(block)
    detector = detector_of(data)
    # Which rows are in the bank: all but 200; those with the scores that the detector keeps are held out.
    x = data.space(block)
    g = torch.Generator().manual_seed(0)
    order = (x @ torch.randn(4, generator=g, dtype=torch.float64)).argsort()[torch.randperm(len(x), generator=g)]
    held, known = x[order[:200]].numpy(), x[order[200:]].numpy()
    base = coordinates(known, known, block)
    inverse = np.linalg.inv(np.cov(base.T, bias=True))

    def score(values: np.ndarray) -> np.ndarray:
        away = coordinates(values, known, block)[:, None] - base
        squares = np.einsum("nbd,de,nbe->nb", away, inverse, away)
        return np.sqrt(np.sort(squares, axis=1)[:, NEIGHBORS - 1])

    np.testing.assert_allclose(detector.score(new), score(new.numpy()), rtol=1e-4)  # the bank is float32
    np.testing.assert_allclose(detector.held_out, np.sort(score(held)), rtol=1e-4)
    p = (1 + (score(held)[None] >= score(new.numpy())[:, None]).sum(1)) / 201
    np.testing.assert_allclose(detector.pvalue(detector.score(new)), p, atol=1e-12)
    mahalanobis = detector_of(data, "mahalanobis").score(new)
    away = coordinates(new.numpy(), known, block) - base.mean(0)
    np.testing.assert_allclose(mahalanobis, np.sqrt(np.einsum("nd,de,ne->n", away, inverse, away)), rtol=1e-4)


@pytest.mark.parametrize("block", ["features", "inputs"])
@pytest.mark.parametrize("kind", ["knn", "mahalanobis"])
def test_pvalues_are_uniform_for_new_rows(block, kind):
    detector = detector_of(rows(10_000, block=block), kind)
    assert len(detector.held_out) == 2000
    scores = detector.score(rows(5000, seed=7, block=block).space(block))
    assert ks_2samp(detector.held_out, scores).pvalue > 0.01
    # Over fits of few rows, where p-values are of few values: at most u is below u.
    small = [detector_of(rows(60, seed=s, block=block), kind) for s in range(300)]
    news = [rows(1, seed=1000 + s, block=block).space(block) for s in range(300)]
    p = torch.cat([d.pvalue(d.score(new)) for d, new in zip(small, news, strict=True)])
    jitter = torch.rand(300, generator=seeded(3), dtype=torch.float64) / 31  # of values k/31 to a uniform number
    assert kstest(p - jitter, "uniform").pvalue > 0.01


def test_equal_rows_have_equal_scores_and_large_pvalues():
    x = torch.randint(0, 3, (2000, 2), generator=seeded(0)).double()
    detector = detector_of(Outputs(torch.zeros(2000), inputs=x))
    assert (detector.held_out == 0).all()
    assert (detector.pvalue(detector.score(x[:50])) == 1).all()
    assert float(detector.pvalue(detector.score(torch.tensor([[9.0, 0.0]])))) == pytest.approx(1 / 401)


@pytest.mark.parametrize("block", ["features", "inputs"])
@pytest.mark.parametrize("columns", [1, 4, 40])
def test_far_rows_are_strange(block, columns):
    data = rows(1000, block=block, columns=columns)
    x, pred_of = data.space(block), fitted(data).predict
    for far in (x * 1e3, x + 30 * x.std(0), x.mean(0) - 30 * x.std(0) + 0 * x):
        pred = pred_of(replace(data, **{block: far}))
        assert float(pred.ood_pvalue.max()) < 0.01
    assert float((pred_of(data).ood_pvalue < 0.01).double().mean()) < 0.05


@pytest.mark.filterwarnings("ignore:.*the network's mean is off")
def test_far_inputs_of_a_small_network_are_strange():
    x = torch.randn(1000, 5, generator=seeded(1))
    model = torch.nn.Sequential(torch.nn.Linear(5, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1))
    bayes = FMGP(model, "regression", **QUICK).fit((x, x[:, :1]))
    assert float((bayes.predict(x + 10.0).ood_pvalue < 0.01).double().mean()) == 1.0
    assert bayes.head.detector.space == "features"


def test_the_order_of_rows_and_the_size_of_batches_do_not_matter(monkeypatch):
    data, new = rows(), rows(70, seed=3)
    order = torch.randperm(len(data), generator=seeded(2))
    detector, other = detector_of(data), detector_of(data[order])
    torch.testing.assert_close(other.held_out, detector.held_out, rtol=1e-6, atol=0.0)
    bayes = fitted(data)
    whole = bayes.predict(new)
    shuffle = torch.randperm(70, generator=seeded(4))
    torch.testing.assert_close(bayes.predict(new[shuffle]).ood_score, whole.ood_score[shuffle], rtol=1e-6, atol=0.0)
    monkeypatch.setattr(ood_detector, "CACHED", 1)
    one_by_one = torch.cat([bayes.predict(new[i]).ood_pvalue for i in range(70)])
    assert torch.equal(one_by_one, whole.ood_pvalue)
    assert torch.equal(whole[[5, 3]].ood_pvalue, whole.ood_pvalue[[5, 3]])
    assert torch.equal(type(whole).cat([whole[:9], whole[9:].cpu()]).ood_pvalue, whole.ood_pvalue)


@pytest.mark.parametrize("block", ["features", "inputs"])
@pytest.mark.parametrize("kind", ["knn", "mahalanobis"])
def test_a_loaded_head_has_the_same_scores(tmp_path, block, kind):
    data, new = rows(block=block), rows(40, seed=8, block=block)
    bayes = fitted(data, ood=kind)
    again = reloaded(bayes, tmp_path)
    assert again.config.ood == kind
    assert torch.equal(again.predict(new).ood_score, bayes.predict(new).ood_score)
    assert torch.equal(again.predict(new).ood_pvalue, bayes.predict(new).ood_pvalue)


def test_nothing_is_computed_until_it_is_asked_for(monkeypatch):
    data, calls = rows(), []
    bayes = fitted(data)
    compute = OODDetector._distance
    monkeypatch.setattr(OODDetector, "_distance", lambda self, *args: calls.append(1) or compute(self, *args))
    pred = bayes.predict(data)
    assert pred.numpy().keys() == {"probs", "labels", "entropy"}
    for unrelated in (repr(pred), pred.defer(0.1), pred[:5], evaluate(bayes, data)):
        assert len(unrelated)
    assert not calls
    assert pred.ood_pvalue.shape == pred.ood_score.shape == (600,)
    assert len(calls) == 1


def test_the_bank_is_limited(monkeypatch):
    monkeypatch.setattr(ood_detector, "MAX_BANK_NUMBERS", 500)
    detector = detector_of(rows())
    assert detector.bank.shape == (100, 5)
    monkeypatch.setattr(ood_detector, "MAX_FITTED_ROWS", 300)
    detector = detector_of(rows())
    assert len(detector.held_out) == 150


@pytest.mark.parametrize("block", ["features", "inputs"])
@pytest.mark.parametrize("n", [1, 2, 3, 10, 30])
@pytest.mark.parametrize("columns", [1, 20, 1500])
def test_few_rows_and_many_columns(block, n, columns):
    x = torch.rand(n, columns, generator=seeded(0)) + 1.0
    detector = detector_of(Outputs(torch.zeros(n), **{block: x}))
    p = detector.pvalue(detector.score(torch.cat([x, 0 * x, 1e6 * x])))
    m = n // 2
    assert len(detector.held_out) == m
    assert float(p.min()) == pytest.approx(1 / (m + 1))
    assert bool((p <= 1).all())


def test_constant_columns_and_extreme_values():
    x = torch.rand(500, 3, generator=seeded(0), dtype=torch.float64)
    x[:, 1:] = torch.tensor([0.0, 7.0])
    for block in ("features", "inputs"):
        detector = detector_of(Outputs(torch.zeros(500), **{block: x}))
        near, changed, extreme = x[:50], x[:50] + torch.tensor([0.0, 1.0, 0.0]), 1e300 * x[:50]
        assert float(detector.pvalue(detector.score(near)).median()) > 0.1
        assert float(detector.pvalue(detector.score(changed)).max()) < 0.01
        assert float(detector.pvalue(detector.score(extreme)).max()) < 0.01
        same = detector_of(Outputs(torch.zeros(50), **{block: torch.ones(50, 2)}))
        assert (same.pvalue(same.score(torch.ones(3, 2))) == 1).all()


def test_wide_features_follow_their_largest_directions():
    g = seeded(1)
    x = torch.randn(1200, 8, generator=g) @ torch.randn(8, 1300, generator=g) + 3.0
    x = x + 0.1 * torch.randn(1200, 1300, generator=g)
    detector = detector_of(Outputs(torch.zeros(1000), features=x[:1000]))
    assert detector.basis.shape == (1301, 256)
    strange = x[1000:] + 0.3 * torch.randn(200, 1300, generator=g)
    assert float(detector.pvalue(detector.score(strange)).max()) < 0.01
    assert float((detector.pvalue(detector.score(x[1000:])) < 0.05).double().mean()) < 0.15


def test_defer_and_figures_follow_the_score(tmp_path):
    data, test = rows(1000), rows(300, seed=6)
    bayes = fitted(data)
    odd = replace(test, features=table(300, seed=9).flip(1))
    pred, outside = bayes.predict(test), bayes.predict(odd)
    assert pred.defer(30, by="ood").sum() == 30
    assert pred.ood_score[pred.defer(30, by="ood")].min() >= pred.ood_score[~pred.defer(30, by="ood")].max()
    truth, score = np.repeat([0, 1], 300), torch.cat([pred.ood_score, outside.ood_score])
    auc = roc_auc_score(truth, score)
    figures = evaluate(bayes, test, ood=odd)
    assert figures["ood_score_auc"] == pytest.approx(auc)
    assert float(ood_detection(pred, outside, by="ood")["auc"]) == pytest.approx(auc)
    assert "base_ood_score_auc" not in figures
    assert "ood_score_auc" not in evaluate(bayes, test)


def test_without_features_or_inputs_the_error_says_what_to_give():
    data = rows()
    bare = Outputs(data.outputs, data.targets)
    for pred in (
        fitted(bare).predict(bare),
        fitted(data, ood="none").predict(data),
        Temperature(None, "classification").fit(data).predict(data),
        fitted(bare).predict(data),
        fitted(data, kernel=RBF(on="outputs"), ood_strength=0.0).predict(bare),
    ):
        for name in ("ood_score", "ood_pvalue"):
            with pytest.raises(DataError, match=r"Expected features or inputs .* give them to fit and to predict"):
                getattr(pred, name)
    with pytest.raises(DataError, match=r"Expected features of width 4 as in fit, got 3"):
        detector_of(data).score(torch.zeros(2, 3))
    with pytest.raises(OptionError, match="Expected ood to be one of 'knn', 'mahalanobis', 'none', got 'vim'"):
        FMGP(None, "classification", ood="vim")


@pytest.mark.parametrize(("name", "least"), [("cifar10_resnet20", 0.98), ("cifar10_resnet56", 0.965)])
def test_digits_are_told_from_cifar10_by_the_fit_half_alone(real_data, name, least):
    def read(split: str) -> Outputs:
        found = np.load(real_data / name / f"{split}.npz")
        return Outputs(found["outputs"].astype(np.float32), features=found["features"])

    test, digits = read("test"), read("svhn")
    detector = detector_of(test[:5000])
    inside, outside = (detector.score(each.features) for each in (test[5000:], digits))
    assert roc_auc_score(np.repeat([0, 1], [5000, len(digits)]), torch.cat([inside, outside])) >= least
    assert ks_2samp(detector.held_out, inside).pvalue > 0.01


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_scores():
    data = rows(1000)
    moved, pred = data.to(torch.device("cuda")), fitted(data).predict(data)
    bayes = fitted(moved)
    assert bayes.head.detector.bank.is_cuda
    on_gpu = bayes.predict(moved)
    assert on_gpu.ood_score.is_cuda
    torch.testing.assert_close(on_gpu.ood_score.cpu(), pred.ood_score, rtol=1e-4, atol=1e-5)
    for on_cpu in (on_gpu.cpu(), bayes.predict(data)):  # the head stays on the GPU
        assert on_cpu.ood_score.device.type == "cpu"
        assert torch.equal(on_cpu.ood_pvalue, on_gpu.ood_pvalue.cpu())
    assert bayes.head.detector.bank.is_cuda
