"""The last correction of a classifier's confidence."""

from __future__ import annotations

import math

import pytest
import torch

from posthoc.likelihoods.recalibration import NONE, Recalibration
from posthoc.predictive.base import LatentGaussian
from posthoc.predictive.classification import ClassificationPredictive
from tests.cases import seeded


def drawn(true: torch.Tensor, seed: int = 7) -> torch.Tensor:
    return torch.multinomial(true.softmax(-1), 1, generator=seeded(seed)).squeeze(1)


def logits(n: int = 20_000, classes: int = 4) -> torch.Tensor:
    return 2.0 * torch.randn(n, classes, generator=seeded(0), dtype=torch.float64)


def predictive(log_p: torch.Tensor) -> ClassificationPredictive:
    variance = torch.rand(log_p.shape, generator=seeded(1), dtype=log_p.dtype)
    latent = LatentGaussian(3.0 * log_p, variance, torch.diag_embed(variance), independent=False)
    return ClassificationPredictive(latent, log_p, torch.tensor(1.5, dtype=log_p.dtype))


def test_a_temperature_that_was_applied_is_found_again():
    true = logits()
    found, none = (Recalibration.of((factor * true).log_softmax(-1), drawn(true)) for factor in (2.0, 1.0))
    assert found.temperature * math.exp(0.5 * found.bend) == pytest.approx(2.0, rel=0.1)
    assert none.temperature == pytest.approx(1.0, abs=0.05)


def test_a_bend_that_was_applied_is_found_again():
    """Scores that are right once those that are unsure are softened: what made them is undone by t and b."""
    log_p, wanted = logits().log_softmax(-1), Recalibration(1.3, 0.4)
    found = Recalibration.of(log_p, drawn(wanted.log_probs(log_p)))
    assert found.bend == pytest.approx(0.4, abs=0.15)
    torch.testing.assert_close(found.temperatures(log_p), wanted.temperatures(log_p), rtol=0.08, atol=0)


def test_chance_is_not_taken_for_a_bend():
    log_p = logits(500).log_softmax(-1)
    assert sum(Recalibration.of(log_p, drawn(log_p, seed)).bend != 0.0 for seed in range(20)) <= 2


def test_it_divides_by_a_temperature_of_each_row():
    log_p = logits(50).log_softmax(-1)
    t = Recalibration(1.2, -0.3).temperatures(log_p)
    entropy = -(log_p.exp() * log_p).sum(-1) / math.log(4)
    torch.testing.assert_close(t.squeeze(-1), 1.2 * torch.exp(-0.3 * entropy))
    torch.testing.assert_close(Recalibration(1.2, -0.3).log_probs(log_p), (log_p / t).log_softmax(-1))


@pytest.mark.parametrize("bend", [-0.6, 0.0, 0.6])
def test_classes_and_means_stay_and_the_rest_goes_together(bend):
    pred = predictive(logits(200).log_softmax(-1))
    correction = Recalibration(1.7, bend)
    found, t = correction(pred), correction.temperatures(pred.log_probs)
    assert torch.equal(found.latent.mean, pred.latent.mean)
    assert torch.equal(found.probs.argmax(-1), pred.probs.argmax(-1))
    torch.testing.assert_close(found.latent.variance, pred.latent.variance * t.square())
    torch.testing.assert_close(found.latent.covariance.diagonal(dim1=1, dim2=2), found.latent.variance)
    torch.testing.assert_close(found.temperature, 1.5 * t)
    torch.testing.assert_close(found[3:5].log_probs, found.log_probs[3:5])
    parts = ClassificationPredictive.cat([found[:50], found[50:]])
    torch.testing.assert_close(parts.mutual_information(), found.mutual_information())
    assert NONE(pred) is pred


def test_surer_predictions_stay_surer():
    p = torch.linspace(0.26, 0.999, 200, dtype=torch.float64)
    log_p = torch.cat([p[:, None], ((1 - p) / 3)[:, None].expand(-1, 3)], 1).log()
    for bend in (-0.6, 0.6):
        assert bool((Recalibration(1.0, bend).log_probs(log_p)[:, 0].diff() > 0).all())
