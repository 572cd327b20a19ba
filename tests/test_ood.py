"""More variance away from the data of the fit, and none within it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from posthoc import FMGP, RBF, DataError, OptionError, Outputs
from posthoc.fmgp.ood import FAR_LEVEL, FLOOR_LEVEL, OutOfDistribution, top_margin
from tests.cases import reloaded, seeded

QUICK = {"steps": 2, "num_inducing": 5}


def features(n: int = 4000, d: int = 6, seed: int = 0) -> torch.Tensor:
    """Directions around one of their own, of many lengths."""
    g = seeded(seed)
    mixing = torch.randn(d, d, generator=seeded(9), dtype=torch.float64)
    x = 3.0 + torch.randn(n, d, generator=g, dtype=torch.float64) @ mixing * 0.3
    return x * (0.5 + torch.rand(n, 1, generator=g, dtype=torch.float64))


def classified(n: int = 400, seed: int = 0) -> Outputs:
    g = seeded(seed)
    logits = 3.0 * torch.randn(n, 3, generator=g)
    y = torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(1)
    return Outputs(logits, y, features(n, seed=seed).float())


def estimated(x: torch.Tensor, *, exponent: float = 0.0, strength: float = 0.0) -> OutOfDistribution:
    ood = OutOfDistribution.of(x)
    assert ood is not None
    ood.exponent, ood.strength = exponent, torch.tensor(strength).double()
    return ood


def inside(ood: OutOfDistribution, x: torch.Tensor) -> float:
    return float((ood.distance(x) <= ood.quantiles[2]).double().mean())


def test_distance_is_mahalanobis_of_the_direction():
    x, new = features(), features(50, seed=1)
    ood = estimated(x)
    order = torch.randperm(len(x), generator=seeded(0))[::2]
    half = (x / x.norm(dim=1, keepdim=True))[order].numpy()
    away = (new / new.norm(dim=1, keepdim=True)).numpy() - half.mean(0)
    # Lengths are gone, so one direction is nearly constant: what is compared must not divide by it.
    inverse = np.linalg.pinv(np.cov(half.T, bias=True), rcond=1e-12)
    expected = np.einsum("nd,de,ne->n", away, inverse, away) / x.shape[1]
    np.testing.assert_allclose(ood.distance(new), expected, rtol=1e-6)


def about(share: float) -> Any:
    """That share of 4,000 rows within a quantile that 2,000 others gave."""
    return pytest.approx(share, abs=4 * math.sqrt(share * (1 - share)) * (1 / math.sqrt(4000) + 1 / math.sqrt(2000)))


def test_nothing_is_added_within_the_distance_that_most_points_keep():
    ood, new = estimated(features(), strength=7.0), features(4000, seed=2)
    d, outputs = ood.distance(new), torch.randn(4000, 3, generator=seeded(0))
    ahead = outputs.double().max(-1).values - (outputs.double().sort(-1).values[:, :2]).mean(-1)
    more = ood.extra_variance(d, outputs)
    assert float((more == 0).double().mean()) == about(FAR_LEVEL)
    excess = (d / ood.quantiles[2] - 1.0).clamp_min(0)
    torch.testing.assert_close(more, 7.0 * ahead**2 * excess**3)


def test_the_scale_follows_a_power_of_the_distance_from_a_floor_up():
    ood = estimated(features(), exponent=0.3)
    d = ood.distance(features(4000, seed=2))
    stretch = ood.logit_scale(d).squeeze(-1)
    least = stretch.min()
    assert float((stretch == least).double().mean()) == about(FLOOR_LEVEL)
    assert float((stretch < 1).double().mean()) == about(0.5)
    above = stretch > least
    torch.testing.assert_close(stretch[above], (d[above] / ood.quantiles[1]) ** 0.3)
    assert torch.equal(ood.logit_scale(torch.zeros(1, dtype=torch.float64)).squeeze(), least)  # not certainty


def test_the_distance_limits_the_confidence_however_large_the_logits():
    ood, new = estimated(features(), strength=1.0), -features(1, seed=4).expand(3, -1)
    outputs = torch.tensor([[1.0, 0.0, 0.0], [10.0, 0.0, 0.0], [1000.0, 0.0, 0.0]])
    more = ood.extra_variance(ood.distance(new), outputs)
    torch.testing.assert_close(more / more[0], torch.tensor([1.0, 1e2, 1e6], dtype=torch.float64))
    confidence = outputs[:, 0] / (1.0 + more).sqrt()
    torch.testing.assert_close(confidence[1], confidence[2], rtol=1e-2, atol=0.0)


def test_outputs_that_are_all_alike_have_no_top_margin():
    assert torch.equal(top_margin(torch.full((5, 4), 2.5)), torch.zeros(5, dtype=torch.float64))
    data = Outputs(torch.zeros(200, 3), torch.arange(200) % 3, features(200).float())
    flat = FMGP(None, "classification", variance="separable", ood_strength=1.0, **QUICK).fit(data)
    assert bool(flat.predict(data).probs.isfinite().all())


def test_length_does_not_matter_and_direction_does():
    ood, x = estimated(features()), features(20, seed=3)
    torch.testing.assert_close(ood.distance(100.0 * x), ood.distance(x))
    assert float(ood.distance(-x).min()) > 10 * float(ood.quantiles[2])


def test_fewer_rows_than_dimensions_do_not_make_everything_new():
    g = seeded(0)
    known, new = torch.randn(200, 1000, generator=g), torch.randn(200, 1000, generator=g)
    assert inside(estimated(known), new) == pytest.approx(FAR_LEVEL, abs=0.15)
    assert OutOfDistribution.of(known[:99]) is None


def test_constant_and_zero_features_are_no_trouble():
    assert OutOfDistribution.of(torch.ones(200, 3)) is OutOfDistribution.of(torch.zeros(200, 3)) is None
    corners = torch.eye(3)[torch.randint(3, (200,), generator=seeded(0))]
    ood = estimated(corners)
    d = ood.distance(torch.cat([corners, torch.zeros(1, 3)]))
    assert bool(ood.extra_variance(d, torch.rand(201, 4)).isfinite().all())
    assert bool((ood.logit_scale(d) > 0.0).all())


def test_predictions_near_the_data_stay_and_those_far_from_it_open_up(tmp_path):
    data, known = classified(), classified(300, seed=1)
    new = Outputs(known.outputs, features=-known.features)
    quick = {"variance": "separable", "steps": 20, "num_inducing": 10}
    bayes, plain = (FMGP(None, "classification", ood_strength=n, **quick).fit(data) for n in (0.5, 0.0))
    near, without = bayes.predict(known), plain.predict(known)
    assert float((near.probs == without.probs).all(-1).double().mean()) > 0.6
    assert bool((near.latent.variance >= without.latent.variance).all())
    assert torch.equal(near.probs.argmax(-1), known.outputs.argmax(-1))
    far = bayes.predict(new)
    assert float(far.entropy().min()) > float(plain.predict(new).entropy().max())
    assert float(far.entropy().min()) > 0.8 * math.log(3)
    again = reloaded(bayes, tmp_path)
    assert again.config.ood_strength == bayes.config.ood_strength
    assert torch.equal(again.predict(new).probs, far.probs)


def test_wide_features_take_their_directions_from_some_rows():
    g = seeded(0)
    x = torch.randn(3000, 20, generator=g) @ torch.randn(20, 1500, generator=g)
    x += 0.1 * torch.randn(3000, 1500, generator=g)
    ood = estimated(x[:2500])
    identity = torch.eye(ood.basis.shape[1], dtype=torch.float64)
    torch.testing.assert_close(ood.basis.mT @ ood.basis, identity, rtol=0, atol=1e-8)
    assert inside(ood, x[2500:]) == pytest.approx(FAR_LEVEL, abs=0.1)
    assert float(ood.distance(torch.randn(50, 1500, generator=g)).min()) > 2 * float(ood.quantiles[2])


def test_it_is_for_classes_with_features():
    data = classified()
    bare = Outputs(data.outputs, data.targets)
    for rows, strength in ((data, 0.0), (bare, 0.5)):
        assert FMGP(None, "classification", ood_strength=strength, **QUICK).fit(rows).head.ood is None
    bayes = FMGP(None, "classification", ood_strength=0.5, kernel=RBF(on="outputs"), **QUICK).fit(data)
    assert bayes.head.ood is not None
    with pytest.raises(DataError, match=r"Expected features of width 6 as in fit, .* got none"):
        bayes.predict(bare)


def test_the_network_gives_its_features_where_the_ood_variance_needs_them():
    data = classified()
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    bayes = FMGP(net, "classification", kernel=RBF(on="inputs"), ood_strength=0.5, **QUICK)
    bayes.fit((data.features, data.targets))
    assert bayes.head.ood is not None
    with torch.no_grad():
        outputs = Outputs(net(data.features), features=net[:2](data.features), inputs=data.features)
    torch.testing.assert_close(bayes.predict(data.features).latent.variance, bayes.predict(outputs).latent.variance)


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan, "much"])
def test_a_strength_that_is_no_number_is_refused(value):
    with pytest.raises(OptionError, match="Expected ood_strength to be a number of at least 0"):
        FMGP(None, "classification", ood_strength=value)
