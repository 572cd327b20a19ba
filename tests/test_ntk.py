"""The neural tangent kernel against loops of backward passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from posthoc.collect.loaders import Batch
from posthoc.errors import OptionError
from posthoc.methods.ntk import ntk
from posthoc.methods.ntk.ntk import Jacobian, LastLayerNTK, draw_pairs, gradients
from tests.cases import Noisy, inputs, mlp
from tests.linearised import jacobian as jacobian_of


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
        out: Tensor = self.last(self.body(x[:, None, :, None].expand(-1, -1, -1, 3)).flatten(1))
        return out


NETWORKS = {
    "mlp": lambda: mlp(3),
    "flat": lambda: Noisy(flat=True),
    "noisy": lambda: Noisy(2),
    "stubborn": Stubborn,
    "convolutional": Convolutional,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_jacobians_are_those_of_loops(name, monkeypatch):
    module, x = NETWORKS[name]().eval(), inputs(7)
    expected = jacobian_of(module, x)
    jacobian, batch = Jacobian(module, "regression"), Batch((x,), {}, None)
    monkeypatch.setattr(ntk, "CHUNK_BYTES", 3 * expected.shape[1] * jacobian.row_bytes)  # three rows at a time
    written = list(jacobian.written(batch))
    assert [len(part) for part in written] == [3, 3, 1]
    torch.testing.assert_close(torch.cat(written), expected)
    assert jacobian.size == expected.shape[-1]
    directions = torch.randn(11, jacobian.size, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(ntk, "ROWS", 4)
    with torch.no_grad():
        pushed = jacobian.push(batch, directions)
    torch.testing.assert_close(pushed, expected @ directions.mT, rtol=1e-4, atol=1e-5)


def test_a_fast_way_is_taken_where_there_is_one(monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("one row at a time")

    monkeypatch.setattr(Jacobian, "_slowly", refuse)
    list(Jacobian(Convolutional().eval(), "regression").written(Batch((inputs(5),), {}, None)))


def test_a_network_is_differentiated_inside_inference_mode():
    module = mlp(2).eval()
    with torch.inference_mode():
        x = inputs(3).clone()
        jacobian, batch = Jacobian(module, "regression"), Batch((x,), {}, None)
        written = torch.cat(list(jacobian.written(batch)))
        pushed = jacobian.push(batch, torch.eye(jacobian.size))
    torch.testing.assert_close(written, jacobian_of(module, inputs(3)))
    torch.testing.assert_close(pushed, written)


def test_a_single_logit_is_that_of_the_second_class():
    module, x = mlp(1).eval(), inputs(4)
    (written,) = Jacobian(module, "classification").written(Batch((x,), {}, None))
    torch.testing.assert_close(written[:, 1:], jacobian_of(module, x))
    assert (written[:, 0] == 0).all()


def test_frozen_networks_are_refused():
    with pytest.raises(OptionError, match="frozen"):
        Jacobian(mlp().requires_grad_(False), "regression")


def test_gradients_at_pairs():
    module, x = mlp(3).eval(), inputs(10)
    jacobian = Jacobian(module, "regression")
    batches = [Batch((part,), {}, None) for part in x.split(4)]
    pairs, points, outputs = draw_pairs(jacobian, iter(batches), 12, torch.Generator().manual_seed(0))
    assert (len(pairs), points, outputs) == (12, 10, 3)
    known = jacobian_of(module, x)
    at = [int((x == pair.row.args[0]).all(1).nonzero()) for pair in pairs]
    assert len({(row, pair.output) for row, pair in zip(at, pairs, strict=True)}) == 12
    expected = torch.stack([known[row, pair.output] for row, pair in zip(at, pairs, strict=True)])
    torch.testing.assert_close(gradients(jacobian, pairs, 3), expected)


def test_pairs_are_drawn_evenly():
    jacobian = Jacobian(mlp(2).eval(), "regression")
    x = torch.arange(6.0)[:, None].expand(-1, 3)
    seen = torch.zeros(6, 2)
    for seed in range(300):
        batches = (Batch((part,), {}, None) for part in x.split(4))
        for pair in draw_pairs(jacobian, batches, 4, torch.Generator().manual_seed(seed))[0]:
            seen[int(pair.row.args[0][0, 0]), pair.output] += 1
    assert seen.sum() == 1200
    assert (seen - 100).abs().max() < 40  # four standard deviations of a draw of 4 out of 12


def test_rows_of_many_lengths_and_named_inputs():
    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(0)
                self.table, self.last = nn.Embedding(9, 4), nn.Linear(4, 2)

        def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
            summed = (self.table(tokens) * mask[..., None]).sum(1)
            out: Tensor = self.last(summed / mask.sum(1, keepdim=True))
            return out

    module = Averaging().eval()
    jacobian = Jacobian(module, "classification")
    generator = torch.Generator().manual_seed(1)
    batches = []
    for length in (3, 5):
        tokens = torch.randint(9, (2, length), generator=generator)
        batches.append(Batch((), {"tokens": tokens, "mask": torch.ones(2, length)}, None))
    pairs, *_ = draw_pairs(jacobian, iter(batches), 8, generator)
    found = gradients(jacobian, pairs, 2)
    for pair, gradient in zip(pairs, found, strict=True):
        said = module(**pair.row.kwargs)[0, pair.output]
        parts = torch.autograd.grad(said, list(module.parameters()))
        torch.testing.assert_close(gradient, torch.cat([part.reshape(-1) for part in parts]))


def test_the_closed_form_is_the_kernel_of_a_networks_last_layer():
    module, x = mlp(3).double().eval(), inputs(6).double()
    for part in (module[0],):
        part.requires_grad_(False)
    j = jacobian_of(module, x)
    expected = 0.7 * torch.einsum("ncp,mdp->ncmd", j, j)
    features = module[:-1](x).detach()
    kernel = LastLayerNTK(on="features", variance=0.7)
    k = kernel({"features": features}, {"features": features}).detach()
    torch.testing.assert_close(expected, k[:, None, :, None] * torch.eye(3, dtype=torch.float64)[:, None])
    torch.testing.assert_close(kernel.diag({"features": features}).detach(), k.diagonal())
    without = LastLayerNTK(variance=0.7, bias=False)
    torch.testing.assert_close(without({"features": features}, {"features": features}).detach(), k - 0.7)
    torch.testing.assert_close(without.diag({"features": features}).detach(), k.diagonal() - 0.7)
