"""Deep ensembles."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from posthoc import DataError, Ensemble, FileError, Gaussian, OptionError, load
from posthoc.io import read_head
from tests.cases import Noisy, answers, in_eval, inputs, labels, mlp, recorded, same, values


def networks(count: int = 3, outputs: int = 3) -> list[nn.Sequential]:
    return [mlp(outputs, seed=seed) for seed in range(count)]


@pytest.mark.parametrize("members", [networks(), [mlp(3), nn.Linear(3, 3), nn.Identity()], networks(2, outputs=1)])
def test_probabilities_are_averaged_over_the_networks(members):
    x = inputs()
    pred = Ensemble(members, "classification").fit((x, labels(classes=2))).predict(x, covariance=True)
    logits = torch.stack([in_eval(member, x) for member in members])
    logits = torch.cat([torch.zeros_like(logits), logits], -1) if logits.shape[-1] == 1 else logits
    torch.testing.assert_close(pred.latent.mean, logits.mean(0))
    torch.testing.assert_close(pred.latent.variance, logits.var(0, unbiased=False))
    torch.testing.assert_close(pred.probs, logits.softmax(-1).mean(0))


def test_regression_adds_the_noise_that_is_left():
    """Where the networks agree, the noise is the mean square of their residuals."""
    one, x, y = mlp(2), inputs(200), values(200, 2)
    pred = Ensemble([one, copy.deepcopy(one)], "regression").fit((x, y)).predict(x)
    assert (pred.latent_variance < 1e-12).all()
    torch.testing.assert_close(pred.noise[0], (y - in_eval(one, x)).square().mean(0))
    far = copy.deepcopy(one)
    far[2].bias.data += 0.4
    apart = Ensemble([one, far], Gaussian(noise="per_output")).fit((x, y)).predict(x)
    torch.testing.assert_close(apart.latent_variance, torch.full_like(apart.mean, 0.2**2))
    torch.testing.assert_close(apart.noise[0], (y - apart.mean).square().mean(0) - 0.2**2)


def test_noise_is_found_on_validation_data_where_there_are_any():
    members, x = networks(outputs=1), inputs(100)
    near, far = (torch.stack([in_eval(m, x) for m in members]).mean(0) + s * values(100) for s in (0.01, 5.0))
    fit = Ensemble(members, "regression").fit((x, near), val=DataLoader(TensorDataset(x, far), batch_size=30))
    assert fit.predict(x).noise[0].item() == pytest.approx(25.0, rel=0.5)
    with pytest.raises(DataError, match="got outputs"):
        Ensemble(members, "regression").fit((x, near), val=recorded(members[0], x, far))
    with pytest.raises(DataError, match=r"as many outputs each, got outputs of shapes \[\(30, 2\), \(30, 3\)\]"):
        Ensemble([mlp(3), mlp(2)], "classification").fit((inputs(), labels()))


def test_every_network_comes_back_as_it_was():
    members = [Noisy(2), Noisy(2).eval(), Noisy(2)]
    members[2].body.eval()
    flags = [[part.training for part in member.modules()] for member in members]
    states = copy.deepcopy([member.state_dict() for member in members])
    method = Ensemble(members, "classification").fit((inputs(), labels(classes=2)))
    before = answers(method.predict(inputs()))
    handle = members[1].last.register_forward_hook(lambda *_: 1 // 0)
    for call in (lambda: method.predict(inputs()), lambda: method.fit((inputs(), labels(classes=2)))):
        with pytest.raises(ZeroDivisionError):
            call()
    handle.remove()
    assert [[part.training for part in member.modules()] for member in members] == flags
    assert all(map(same, [member.state_dict() for member in members], states))
    assert same(answers(method.predict(inputs())), before)


def test_a_head_holds_the_noise_and_who_it_is_of(tmp_path):
    members, x = networks(outputs=1), inputs()
    method = Ensemble(nn.ModuleList(members), "regression").fit((x, values()))
    method.save(tmp_path / "head")
    assert set(read_head(tmp_path / "head")[0]) == {"likelihood.log_noise", "likelihood.scale"}
    again = load(tmp_path / "head", model=members)
    assert same(answers(again.predict(x)), answers(method.predict(x)))
    for others in (members[:2], members[::-1], [*members[:2], mlp(1, seed=9)]):
        with pytest.raises(FileError, match="found another"):
            Ensemble.load(tmp_path / "head", model=others)
    for given, message in (
        ({"model": members[0]}, "one Sequential: give a list"),
        ({}, "needs the network itself"),
        ({"model": members, "members": 3}, "got members"),
    ):
        with pytest.raises(OptionError, match=message):
            Ensemble.load(tmp_path / "head", **given)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (mlp(3), "averages several networks, got one Sequential"),
        ([mlp(3)], "at least two networks, each of them once, got 1"),
        ([], "at least two networks, each of them once, got 0"),
        ([mlp(3)] * 2, "at least two networks, each of them once, got 2"),
        ([mlp(3), lambda x: x], "each an nn.Module, got a function in it"),
        ("networks", "got a str in it"),
        ([mlp(3), nn.Linear(3, 3, device="meta")], "on one device, got cpu and meta"),
    ],
)
def test_bad_networks_are_refused(members, message):
    with pytest.raises(OptionError, match=message):
        Ensemble(members, "classification")
