"""Corrections of a classifier's mean: the map itself, the constraint on the class, and what `FMGP` makes of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from posthoc import FMGP, Outputs, Temperature
from posthoc.errors import OptionError, PosthocWarning
from posthoc.fmgp.selection import TEMPERATURE_SCALING, HeldOutRows, Selection, VarianceForm, with_correction
from posthoc.likelihoods.mean_correction import CorrectionForm, MeanCorrection, corrected, keep_class
from posthoc.likelihoods.temperature import PRIOR, best_inverse, log_likelihood
from posthoc.predictive.base import LatentGaussian
from posthoc.predictive.classification import ClassificationPredictive

CLASSES = 4
BIAS = torch.tensor([1.5, 0.0, -1.0, 0.0], dtype=torch.float64)
FEW = {"steps": 60, "num_inducing": 20, "progress": False}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def biased(n: int, seed: int = 0, bias: Tensor = BIAS) -> tuple[Tensor, Tensor]:
    """Logits that are too large for some classes by `bias`, and labels from the unbiased ones."""
    g = seeded(seed)
    true = 1.5 * torch.randn(n, CLASSES, dtype=torch.float64, generator=g)
    y = torch.multinomial(true.softmax(-1), 1, generator=g).squeeze(-1)
    return true + bias, y


def loss(log_p: Tensor, y: Tensor) -> float:
    return float(-log_p.double().gather(-1, y[:, None]).mean())


def test_formula():
    g = seeded()
    correction = MeanCorrection(CorrectionForm(1.0, 1.0, "both"), CLASSES)
    for name, buffer in correction.named_buffers():
        buffer.copy_(torch.randn(buffer.shape, dtype=torch.float64, generator=g))
        if name == "log_weights":
            buffer.copy_(buffer.log_softmax(0))
    log_p, f = torch.randn(2, 5, CLASSES, dtype=torch.float64, generator=g).log_softmax(-1)
    s, b, m, w = (np.asarray(t) for t in (correction.scale, correction.bias, correction.matrix, correction.log_weights))
    for i in range(5):
        logits = b.copy()
        for k, term in enumerate((log_p, f)):
            z = np.asarray(term[i]) - np.asarray(term[i]).mean()
            logits += s[k] * z + m[k] @ z
        softmax, raw = np.exp(logits) / np.exp(logits).sum(), np.asarray(f[i].softmax(-1))
        wanted = np.exp(w[0]) * softmax + np.exp(w[1]) * raw + np.exp(w[2]) / CLASSES
        np.testing.assert_allclose(correction(log_p, f)[i].exp(), wanted, rtol=1e-12)


def test_bias_is_found():
    logits, y = biased(20_000)
    correction = MeanCorrection.fit(CorrectionForm(1.0), logits.log_softmax(-1), logits, y)
    found = correction.bias - correction.bias.mean()
    torch.testing.assert_close(found, -(BIAS - BIAS.mean()), atol=0.15, rtol=0.0)
    new, labels = biased(20_000, seed=1)
    best = loss((new - BIAS).log_softmax(-1), labels)
    assert loss(correction(new.log_softmax(-1), new), labels) < best + 0.002


def test_random_labels_are_met_by_the_uniform_part():
    logits, y = biased(20_000, bias=torch.zeros(CLASSES, dtype=torch.float64))
    logits = 4.0 * logits
    y = torch.where(
        torch.rand(len(y), generator=seeded(2)) < 0.2, torch.randint(CLASSES, y.shape, generator=seeded(3)), y
    )
    correction = MeanCorrection.fit(CorrectionForm(), logits.log_softmax(-1), logits, y)
    assert 0.1 < float(correction.log_weights.exp()[2]) < 0.3


def test_start_does_not_change_the_fit():
    logits, y = biased(2000)
    form, log_p = CorrectionForm(3.0, 30.0, "both"), (0.5 * logits).log_softmax(-1)
    cold = MeanCorrection.fit(form, log_p, logits, y)
    warm = MeanCorrection.fit(
        form, log_p, logits, y, MeanCorrection.fit(CorrectionForm(10.0), log_p, logits, y).parameters_of_fit
    )
    # The steps are limited, and weights that go to zero do so slowly.
    torch.testing.assert_close(warm(log_p, logits).exp(), cold(log_p, logits).exp(), atol=1e-2, rtol=0.0)


def capped(p: list[float], top: int, margin: float) -> list[float]:
    """`keep_class` for one row, one class after the other."""
    classes = len(p)
    if max(q for c, q in enumerate(p) if c != top) <= p[top] - margin:
        return p
    kept, lowered = max(p[top], 1.0 / classes + margin), set[int]()
    while True:
        below = [c for c in range(classes) if c != top and c not in lowered]
        free = 1.0 - kept - (kept - margin) * len(lowered)
        total = sum(p[c] for c in below)
        found = {c: p[c] * free / total for c in below}
        more = {c for c, q in found.items() if q > kept - margin}
        if not more:
            return [kept if c == top else kept - margin if c in lowered else found[c] for c in range(classes)]
        lowered |= more


@pytest.mark.parametrize("classes", [2, 3, 10, 100])
def test_capped_probabilities_are_those_of_a_loop(classes):
    g = seeded(classes)
    p = (3.0 * torch.randn(200, classes, dtype=torch.float64, generator=g)).softmax(-1)
    top = torch.randint(classes, (200,), generator=g)
    margin = min(2e-4, 0.1 / classes)
    found = keep_class(p.log(), top).exp()
    for row, wanted, t in zip(found, p.tolist(), top.tolist(), strict=True):
        torch.testing.assert_close(row.tolist(), capped(wanted, t, margin), atol=1e-10, rtol=0.0)
    torch.testing.assert_close(found.sum(-1), torch.ones(200, dtype=torch.float64))
    rest = found.scatter(-1, top[:, None], 0.0).amax(-1)
    assert bool((found.gather(-1, top[:, None]).squeeze(-1) - rest >= 0.99 * margin).all())


def fitted(mean: str, n: int = 1500, **options: object) -> FMGP:
    logits, y = biased(n)
    return FMGP(None, "classification", mean=mean, **{**FEW, **options}).fit(Outputs(logits, y))


@pytest.mark.filterwarnings("ignore::posthoc.errors.PosthocWarning")
def test_means(tmp_path):
    new, labels = biased(4000, seed=1)
    logits, y = biased(1500)
    scaled = loss(Temperature().fit(Outputs(logits, y)).predict(Outputs(new)).log_probs, labels)
    preds = {mean: fitted(mean).predict(Outputs(new)) for mean in ("network", "fixed", "calibrated")}
    losses = {mean: loss(pred.log_probs, labels) for mean, pred in preds.items()}
    assert losses["calibrated"] < losses["fixed"] < scaled
    assert losses["calibrated"] < loss((new - BIAS).log_softmax(-1), labels) + 0.02
    for mean, pred in preds.items():
        assert torch.equal(pred.latent.mean, new)
        assert torch.equal(pred.labels, new.argmax(-1)) == (mean != "calibrated")
        assert torch.equal(pred.probs.argmax(-1), pred.labels)
    free, fixed = preds["calibrated"], preds["fixed"]
    own = free.probs.gather(-1, new.argmax(-1, keepdim=True)).squeeze(-1)
    torch.testing.assert_close(free.network_confidence, own)
    right = (labels == new.argmax(-1)).double().mean()
    assert abs(float(fixed.network_confidence.mean() - right)) < 0.03
    assert bool((fixed.network_confidence <= fixed.probs.amax(-1) + 1e-12).all())


def test_confidence_in_the_networks_class_is_not_that_of_the_cap():
    logits, y = biased(2000, bias=3.0 * BIAS)
    form, log_p = CorrectionForm(1.0), logits.log_softmax(-1)
    correction = MeanCorrection.fit(form, log_p, logits, y)
    pred = ClassificationPredictive(LatentGaussian(logits, torch.ones_like(logits)), log_p, torch.ones(()))
    fixed, free = (corrected(pred, correction, fixed=each) for each in (True, False))
    assert torch.equal(fixed.network_confidence, free.network_confidence)
    assert bool((fixed.network_confidence < fixed.probs.amax(-1) - 0.01).any())


@pytest.mark.parametrize("informed", [True, False])
def test_a_correction_of_a_process_drops_the_strength_that_temperature_scaling_was_given(informed):
    logits, y = biased(1500)
    scaled, process = logits.log_softmax(-1), VarianceForm("separable")
    known = 4.0 * torch.nn.functional.one_hot(y, CLASSES) if informed else 0.0
    g = seeded(5)
    log_p = (0.5 * logits + known + torch.randn(logits.shape, generator=g, dtype=torch.float64)).log_softmax(-1)
    plain = Selection(TEMPERATURE_SCALING, "", ood_strength=1.0)
    held_out = {TEMPERATURE_SCALING: {0.0: scaled, 1.0: scaled}, process: {0.0: log_p}}
    found = with_correction(plain, held_out, [process], HeldOutRows(logits, y, scaled, fixed=False))
    assert found.correction is not None
    assert (found.form, found.ood_strength) == ((process, 0.0) if informed else (TEMPERATURE_SCALING, 1.0))


@pytest.mark.filterwarnings("ignore::posthoc.errors.PosthocWarning")
def test_a_corrected_head_is_loaded_as_it_was(tmp_path):
    bayes, new = fitted("calibrated"), Outputs(biased(50, seed=1)[0])
    assert bayes.selection_.correction is not None
    bayes.save(tmp_path / "head.safetensors")
    again = FMGP.load(tmp_path / "head.safetensors")
    assert repr(again.selection_) == repr(bayes.selection_)
    assert again.selection_.correction == bayes.selection_.correction
    assert torch.equal(again.predict(new).log_probs, bayes.predict(new).log_probs)
    assert torch.equal(again.predict(new).network_confidence, bayes.predict(new).network_confidence)


def test_a_bias_is_reported():
    with pytest.warns(PosthocWarning, match=r'favors class 0: .*mean="calibrated" would lower the negative'):
        fitted("fixed")


def test_nothing_is_corrected_where_nothing_is_wrong():
    logits, y = biased(1500, bias=torch.zeros(CLASSES, dtype=torch.float64))
    bayes = FMGP(None, "classification", mean="calibrated", **FEW).fit(Outputs(logits, y))
    assert bayes.selection_.correction is None


@pytest.mark.filterwarnings("ignore::posthoc.errors.PosthocWarning")
def test_the_order_of_rows_does_not_decide():
    logits, y = biased(1500)
    new, selections, probs = Outputs(biased(200, seed=1)[0]), set(), []
    for seed in range(3):
        order = torch.randperm(len(y), generator=seeded(seed))
        bayes = FMGP(None, "classification", **FEW).fit(Outputs(logits[order], y[order]))
        selections.add((bayes.selection_.form, bayes.selection_.correction))
        probs.append(bayes.predict(new).probs)
    assert len(selections) == 1
    assert torch.equal(probs[1], probs[0])
    assert torch.equal(probs[2], probs[0])


def test_classes_that_are_never_true():
    logits, y = biased(1000)
    logits, y = torch.cat([logits, logits[:, :1]], 1), y
    with pytest.warns(PosthocWarning, match="Of 5 classes, class 4 is never true in 1,000 rows"):
        Temperature().fit(Outputs(logits, y))


def test_features_that_know_more_than_the_network():
    g = seeded()
    features = torch.randn(1000, 8, generator=g)
    y = (features @ torch.randn(8, 3, generator=g)).argmax(-1)
    logits = torch.randn(1000, 3, generator=g)
    with pytest.warns(PosthocWarning, match="refit the last layer rather than calibrate it"):
        FMGP(None, "classification", ood="none", **FEW).fit(Outputs(logits, y, features))


def test_mean_is_for_classification():
    with pytest.raises(OptionError, match="mean is an option for classification"):
        FMGP(None, "regression", mean="calibrated")
    with pytest.raises(OptionError, match="Expected mean to be one of 'fixed', 'calibrated', 'network'"):
        FMGP(None, "classification", mean="moved")


@pytest.mark.parametrize("rows", [5, 50, 5000])
def test_mode_of_the_temperature_is_that_of_a_grid(rows):
    logits, y = biased(rows)
    grid = torch.logspace(-2, 2, 20_001, dtype=torch.float64).tolist()
    wanted = (
        max(grid, key=lambda inverse: log_likelihood(logits, y, inverse) - 0.5 * PRIOR.penalty(inverse))
        if rows < 5000
        else None
    )
    found = best_inverse(logits, y, PRIOR)
    if wanted is not None:
        assert found == pytest.approx(wanted, rel=1e-3)
    else:
        assert found == pytest.approx(best_inverse(logits, y), rel=0.01)


@pytest.mark.filterwarnings("ignore::posthoc.errors.PosthocWarning")
@pytest.mark.parametrize("method", [Temperature(), FMGP(None, "classification", **FEW)], ids=repr)
def test_few_rows_that_are_all_right(method):
    logits, _ = biased(20)
    few = Outputs(logits, logits.argmax(-1))
    assert 0.1 < float(method.fit(few).predict(few).temperature.mean()) < 2.0  # without a prior: 1e-4


def test_prior_is_the_users():
    logits, y = biased(10)
    data = Outputs(logits, y)
    free, tight = Temperature(prior=None).fit(data), Temperature(prior=(math.log(0.5), 1e-3)).fit(data)
    assert free.likelihood.temperature.item() == pytest.approx(1.0 / best_inverse(logits, y))
    assert tight.likelihood.temperature.item() == pytest.approx(2.0, rel=0.01)
    with pytest.raises(OptionError, match="the mean and the scale"):
        Temperature(prior=(0.0, -1.0))
