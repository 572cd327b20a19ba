"""Real networks on real data: default options must beat what people use today. Skipped where the data are not."""

from __future__ import annotations

import pytest

from benchmarks import real_data as bench


@pytest.mark.parametrize("name", ["protein", "elevators"])
def test_regression_beats_a_constant_noise(real_data, name):
    result = bench.uci(real_data, name, seed=0)
    for metric in ("nll", "crps", "cqm"):
        assert result["fmgp"][metric] < result["constant noise"][metric]


def test_cifar10_beats_temperature_scaling_and_keeps_every_class(real_data):
    result = bench.classification(*bench.cifar10(real_data), seed=0)
    assert result["temperature scaling"]["nll"] == pytest.approx(0.2260, abs=5e-4)
    assert result["fmgp"]["nll"] < 0.2260
    assert result["fmgp"]["classes_changed"] == 0


def test_an_underconfident_imagenet_network_is_improved(real_data):
    result = bench.classification(*bench.imagenet(real_data), seed=0)
    assert result["network"]["nll"] == pytest.approx(0.4085, abs=5e-4)
    assert result["fmgp"]["nll"] < 0.4085
    assert result["fmgp"]["classes_changed"] == 0
