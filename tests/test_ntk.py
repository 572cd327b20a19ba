"""The neural tangent kernel against loops of backward passes, and what the methods on it share."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from posthoc import Outputs
from posthoc.collect.loaders import Batch
from posthoc.errors import DataError, FileError, LayerError, OptionError
from posthoc.methods.ntk import ntk
from posthoc.methods.ntk.ella import ELLA
from posthoc.methods.ntk.ntk import Jacobian, LastLayerNTK, gradients
from posthoc.methods.ntk.valla import VaLLA
from tests.cases import Noisy, inputs, mlp, recorded, reloaded
from tests.linearized import case
from tests.linearized import jacobian as jacobian_of

METHODS = {"ella": partial(ELLA, num_inducing=50), "valla": partial(VaLLA, num_inducing=6, steps=20, batch_size=16)}


class Stubborn(nn.Module):
    """A network that looks at its own numbers, which `vmap` forbids."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.unused = mlp(2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out * 2.0 if out.abs().max().item() > 1e9 else out


class Convolutional(nn.Module):
    """Convolution, normalisation and pooling, with some weights frozen."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
            self.last = nn.Linear(3, 4)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x[:, None, :, None].expand(-1, -1, -1, 3)).flatten(1))


def batch_of(x: Tensor) -> Batch:
    return Batch((x,), {}, None)


@pytest.mark.parametrize("module", [mlp(3), Noisy(flat=True), Noisy(2), Stubborn(), Convolutional()])
def test_jacobians_are_those_of_loops(module, monkeypatch):
    x = inputs(7)
    expected = jacobian_of(module.eval(), x)
    jacobian, batch = Jacobian(module, "regression"), batch_of(x)
    if not isinstance(module, Stubborn):
        monkeypatch.delattr(Jacobian, "_slowly")  # what takes one row at a time
    monkeypatch.setattr(ntk, "CHUNK_BYTES", 3 * expected.shape[1] * jacobian.row_bytes)  # three rows at a time
    written = list(jacobian.written(batch))
    assert [len(part) for part in written] == [3, 3, 1]
    torch.testing.assert_close(torch.cat(written), expected)
    assert jacobian.size == expected.shape[-1]
    directions = torch.randn(11, jacobian.size, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(ntk, "ROWS", 4)
    with torch.no_grad():
        torch.testing.assert_close(jacobian.push(batch, directions), expected @ directions.mT, rtol=1e-4, atol=1e-5)


def test_a_network_is_differentiated_inside_inference_mode():
    module = mlp(2).eval()
    with torch.inference_mode():
        jacobian, batch = Jacobian(module, "regression"), batch_of(inputs(3).clone())
        written = torch.cat(list(jacobian.written(batch)))
        pushed = jacobian.push(batch, torch.eye(jacobian.size))
    torch.testing.assert_close(written, jacobian_of(module, inputs(3)))
    torch.testing.assert_close(pushed, written)


def test_a_single_logit_is_that_of_the_second_class():
    module, x = mlp(1).eval(), inputs(4)
    (written,) = Jacobian(module, "classification").written(batch_of(x))
    torch.testing.assert_close(written[:, 1:], jacobian_of(module, x))
    assert (written[:, 0] == 0).all()


def test_gradients_at_pairs():
    module, x = mlp(3).eval(), inputs(10)
    pairs = torch.tensor([0, 4, 5, 11, 28, 29])
    found = gradients(Jacobian(module, "regression"), [batch_of(part) for part in x.split(4)], pairs, 3)
    torch.testing.assert_close(found, jacobian_of(module, x).flatten(0, 1)[pairs])


def test_rows_of_many_lengths_and_named_inputs():
    class Summing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Embedding(9, 3), mlp(2)

        def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
            return self.last((self.table(tokens) * mask[..., None]).sum(1))

    module, batches, expected = Summing().eval(), [], []
    for length in (3, 5):
        named = {"tokens": torch.arange(2 * length).reshape(2, length) % 9, "mask": torch.ones(2, length)}
        batches.append(Batch((), named, None))
        for output in module(**named).reshape(-1):
            parts = torch.autograd.grad(output, list(module.parameters()), retain_graph=True)
            expected.append(torch.cat([part.reshape(-1) for part in parts]))
    found = gradients(Jacobian(module, "classification"), batches, torch.arange(8), 2)
    torch.testing.assert_close(found, torch.stack(expected))


def test_the_closed_form_is_the_kernel_of_a_networks_last_layer():
    module, x = mlp(3).double().eval(), inputs(6).double()
    module[0].requires_grad_(False)
    j, at = jacobian_of(module, x), {"features": module[:-1](x).detach()}
    expected = 0.7 * torch.einsum("ncp,mdp->ncmd", j, j)
    kernel, without = LastLayerNTK(on="features", variance=0.7), LastLayerNTK(variance=0.7, bias=False)
    k = kernel(at, at).detach()
    torch.testing.assert_close(expected, k[:, None, :, None] * torch.eye(3, dtype=torch.float64)[:, None])
    torch.testing.assert_close(kernel.diag(at).detach(), k.diagonal())
    torch.testing.assert_close(without(at, at).detach(), k - 0.7)
    torch.testing.assert_close(without.diag(at).detach(), k.diagonal() - 0.7)


@pytest.mark.parametrize("name", METHODS)
def test_outputs_and_features_are_enough_for_the_last_layer(name):
    model, x, y, new = case("classification")
    with_network = METHODS[name](model, "classification").fit((x, y)).predict(new)
    from_outputs = METHODS[name](None, "classification").fit(recorded(model, x, y)).predict(recorded(model, new))
    torch.testing.assert_close(from_outputs.latent.variance, with_network.latent.variance)


@pytest.mark.parametrize("task", ["regression", "classification"])
@pytest.mark.parametrize("weights", ["last", "all"])
@pytest.mark.parametrize("name", METHODS)
def test_saved_heads_predict_the_same(name, weights, task, tmp_path):
    model, x, y, new = case(task)
    x, y, new = x.float(), y if task == "classification" else y.float(), new.float()
    method = METHODS[name](model.float(), task, weights=weights).fit((x, y), val=(x, y))
    again = reloaded(method, tmp_path, model=model)
    assert torch.equal(again.predict(new).latent.variance, method.predict(new).latent.variance)
    assert again.prior_precision == method.prior_precision
    assert again.config.num_inducing == method.config.num_inducing
    if weights == "all":
        with pytest.raises(OptionError, match="network itself"):
            reloaded(method, tmp_path)
        with pytest.raises(FileError, match="network this head was fitted on"):
            reloaded(method, tmp_path, model=mlp(model[-1].out_features, seed=5))


@pytest.mark.parametrize("weights", ["last", "all"])
@pytest.mark.parametrize("name", METHODS)
def test_a_failed_fit_changes_neither_the_method_nor_the_network(name, weights):
    model, x, y, new = case("classification")
    before = copy.deepcopy(model.state_dict())
    method = METHODS[name](model, "classification", weights=weights).fit((x, y))
    variance = method.predict(new).latent.variance
    for data, message in (((x + 1.0, torch.zeros_like(y)), "two classes"), ((x, y + 7), "Expected")):
        with pytest.raises(DataError, match=message):
            method.fit(data)
    assert torch.equal(method.predict(new).latent.variance, variance)
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", METHODS)
def test_gradients_and_features_that_do_not_fit_are_refused_with_their_size(name):
    model, x, y, _ = case("classification")
    options = {"weights": "all", "num_inducing": 3, "max_gigabytes": 1e-4}
    method = METHODS[name](model, "classification", **options).fit((x, y))
    width = 3 * (20 if name == "ella" else 6)
    needed = f"{(6 * 45 * 8 + 8 * 2000 * width) / 1e9:.3g}"
    with pytest.raises(OptionError, match=rf'need {needed} GB.*num_inducing.*weights="last"'):
        method.fit((x.repeat(100, 1), y.repeat(100)))


@pytest.mark.parametrize("name", METHODS)
def test_bad_options_and_data(name):
    model, x, y, _ = case("classification")
    make, outputs = METHODS[name], recorded(model, x, y)
    wrong = {"weights": "some", "num_inducing": 0, "prior_precision": -1.0, "max_gigabytes": 0, "outputs_are": "probs"}
    method = make(model, "classification", weights="all").fit((x, y))
    for call, error, message in (
        *((partial(make, model, "classification", **{key: wrong[key]}), OptionError, key) for key in wrong),
        (lambda: make(None, "classification", weights="all"), OptionError, 'weights="last"'),
        (lambda: make(mlp(3).requires_grad_(False), "classification", weights="all"), OptionError, "frozen"),
        (lambda: make(None, "classification").fit(Outputs(outputs.outputs, y)), DataError, "features"),
        (lambda: make(nn.Tanh(), "regression").fit((x, x)), LayerError, r"nn\.Linear"),
        (lambda: make(None, "classification").fit(Outputs(outputs.outputs.square(), y, x)), LayerError, "linear"),
        (lambda: method.fit(iter([(x, y)])), DataError, "iterator"),
        (lambda: method.fit(outputs), DataError, "got outputs"),
        (lambda: method.fit((x, y), val=outputs), DataError, "got outputs"),
        (lambda: method.predict(outputs), DataError, "got outputs"),
    ):
        with pytest.raises(error, match=message):
            call()
