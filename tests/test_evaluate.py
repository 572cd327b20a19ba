"""Curves of an evaluation, against plain computations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from posthoc import MAP, Outputs
from posthoc.evaluate.evaluate import score


def classes(n: int, seed: int) -> Outputs:
    g = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(n, 4, generator=g)
    return Outputs(logits, torch.distributions.Categorical(logits=logits).sample())


def test_a_classifiers_curves_against_loops():
    torch.manual_seed(0)
    data, ood = classes(300, 0), classes(100, 1)
    found = score(MAP(None, "classification").fit(data), data, ood)
    curves = found.curves()
    p = data.outputs.double().softmax(-1).numpy()
    confidence, said, y = p.max(1), p.argmax(1), data.targets.numpy()
    for b in range(15):
        inside = (confidence > b / 15) & (confidence <= (b + 1) / 15)
        assert curves["reliability"]["share"][b] == pytest.approx(inside.mean())
        if not inside.any():
            assert curves["reliability"]["accuracy"][b] is None
            continue
        assert curves["reliability"]["confidence"][b] == pytest.approx(confidence[inside].mean(), rel=1e-5)
        assert curves["reliability"]["accuracy"][b] == pytest.approx((said == y)[inside].mean())
    columns = (curves["reliability"][name] for name in ("share", "confidence", "accuracy"))
    gaps = [share * abs(c - a) for share, c, a in zip(*columns, strict=True) if c is not None]
    assert sum(gaps) == pytest.approx(found.figures["ece"], rel=1e-4)
    entropy = -(p * np.log(p)).sum(1)
    q = ood.outputs.double().softmax(-1).numpy()
    edges = np.linspace(0, math.log(4), 31)
    np.testing.assert_allclose(curves["entropy"]["edges"], edges)
    np.testing.assert_allclose(curves["entropy"]["in"], np.histogram(entropy, edges)[0] / 300)
    np.testing.assert_allclose(curves["entropy"]["out"], np.histogram(-(q * np.log(q)).sum(1), edges)[0] / 100)
    wrong = (said != y)[np.argsort(entropy)]
    np.testing.assert_allclose(curves["risk_coverage"]["coverage"], np.arange(1, 51) / 50)
    np.testing.assert_allclose(curves["risk_coverage"]["risk"], [wrong[: 6 * k].mean() for k in range(1, 51)])


def test_a_regressions_curves_against_loops():
    g = torch.Generator().manual_seed(0)
    mean = torch.randn(250, 1, generator=g)
    y = mean + 0.5 * torch.randn(250, 1, generator=g)
    data = Outputs(mean, y)
    method = MAP(None, "regression").fit(data)
    found, pred = score(method, data), method.predict(data)
    curves = found.curves()
    for level, share in zip(curves["calibration"]["level"], curves["calibration"]["coverage"], strict=True):
        low, high = pred.interval(level)
        assert share == pytest.approx(float(((y >= low) & (y <= high)).double().mean()))
    bars = curves["error_bars"]
    low, high = pred.interval(0.9)
    rows = torch.linspace(0, 249, 100).long()
    for name, column in (("target", y), ("mean", mean), ("low", low), ("high", high)):
        np.testing.assert_allclose(bars[name], column[rows, 0], rtol=1e-5)
    # One variance for all: whichever are kept, their error is that of all.
    np.testing.assert_allclose(curves["risk_coverage"]["risk"], found.figures["rmse"] ** 2, rtol=1e-4)
