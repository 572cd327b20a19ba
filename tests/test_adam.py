"""Parameters as one vector: views while they train, their own afterwards, and moved as torch's Adam moves them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from posthoc.training import Training, train
from posthoc.training.adam import BETA1, BETA2, EPS, FlatAdam
from tests.cases import seeded
from tests.test_training import Nothing, fitted

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that CUDA knows")

DOUBLE, SINGLE = torch.float64, torch.float32
SHAPES = [((3, 4), DOUBLE), ((5,), SINGLE), ((), DOUBLE), ((2, 1, 3), SINGLE), ((0, 4), DOUBLE), ((7,), DOUBLE)]


def parameters() -> list[nn.Parameter]:
    g = seeded()
    return [nn.Parameter(torch.randn(shape, dtype=dtype, generator=g)) for shape, dtype in SHAPES]


def gradients(seed: int) -> list[Tensor]:
    """Of very different sizes, and some of them zero."""
    g = seeded(seed)

    def gradient(shape: tuple[int, ...]) -> Tensor:
        size = 10.0 ** torch.randint(-12, 6, shape, generator=g).double()
        return size * (torch.rand(shape, generator=g) > 0.2) * torch.randn(shape, generator=g)

    return [gradient(shape).to(dtype) for shape, dtype in SHAPES]


def own_nothing_in_common(tensors: Iterable[Tensor]) -> bool:
    used = [tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()]
    return len(set(used)) == len(used)


def test_parameters_live_in_one_vector_for_each_dtype_until_they_are_released() -> None:
    ps = parameters()
    flat = FlatAdam(ps)
    assert len(flat.parameters) == len(ps)
    assert [(v.dtype, v.numel()) for v in sorted(flat.values, key=len)] == [(SINGLE, 11), (DOUBLE, 20)]
    for p, value in zip(ps, parameters(), strict=True):
        assert p.dtype == value.dtype
        assert torch.equal(p, value)
        assert p.numel() == 0 or not own_nothing_in_common([p, *flat.values])
    for vector in flat.values:
        vector.add_(1.0)
    expected = [p.detach() + 1.0 for p in parameters()]
    assert all(torch.equal(p, value) for p, value in zip(ps, expected, strict=True))
    flat.release()
    assert own_nothing_in_common([*ps, *flat.values])
    assert all(p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in ps)
    assert all(p.grad is None and p.requires_grad and p.is_leaf for p in ps)
    for vector in flat.values:
        vector.zero_()
    assert all(torch.equal(p, value) for p, value in zip(ps, expected, strict=True))


def test_parameters_that_are_fixed_are_left_alone() -> None:
    ps = parameters()
    ps[0].requires_grad_(False)
    place = ps[0].data_ptr()
    flat = FlatAdam(ps)
    assert len(flat.parameters) == len(ps) - 1
    assert sum(v.numel() for v in flat.values) == 31 - ps[0].numel()
    flat.release()
    assert ps[0].data_ptr() == place
    assert not FlatAdam([ps[0]]).parameters


STEPS = 40
LRS = [Training(steps=STEPS, lr=0.05).lr_at(step) for step in range(STEPS)]


def moved(flat: FlatAdam, steps: Iterable[int]) -> list[Tensor]:
    for step in steps:
        torch._foreach_zero_(flat.grads)
        for p, grad in zip(flat.parameters, gradients(step), strict=True):
            assert p.grad is not None
            p.grad += grad
        flat.step(LRS[step])
    return [p.detach().clone() for p in flat.parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_are_those_of_torch_to_the_bit(dtype: torch.dtype) -> None:
    """On the same vector: where a vector ends, the processor may round otherwise."""

    def joined(tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat([t.detach().reshape(-1) for t in tensors if t.dtype == dtype])

    found = joined(moved(FlatAdam(parameters()), range(STEPS)))
    expected = nn.Parameter(joined(parameters()))
    adam = torch.optim.Adam([expected], betas=(BETA1, BETA2), eps=EPS, fused=True)
    for step, lr in enumerate(LRS):
        expected.grad, adam.param_groups[0]["lr"] = joined(gradients(step)), lr
        adam.step()
    assert torch.equal(found, expected)
    assert not torch.equal(found, joined(parameters()))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
def test_a_learning_rate_on_the_device_gives_the_same_bits(device: str) -> None:
    """Where it is a float32, as `lr_at` gives it."""

    def run(make: Callable[[float], float | Tensor]) -> Tensor:
        p = nn.Parameter(torch.randn(37, dtype=torch.float64, generator=seeded(0)).to(device))
        flat = FlatAdam([p])
        for lr in LRS:
            torch._foreach_zero_(flat.grads)
            (p.sin() * lr).sum().backward()
            flat.step(make(lr))
        return p.detach()

    assert torch.equal(run(lambda lr: lr), run(lambda lr: torch.tensor(lr, device=device)))


def test_a_snapshot_brings_back_values_moments_and_counts() -> None:
    flat = FlatAdam(parameters())
    moved(flat, range(5))
    snapshot = flat.snapshot()
    first = moved(flat, range(5, 10))
    flat.restore(snapshot)
    assert all(torch.equal(a, b) for a, b in zip(first, moved(flat, range(5, 10)), strict=True))
    assert own_nothing_in_common([*snapshot, *flat.state])


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
def test_parameters_are_released_whatever_happens(failure: type[BaseException]) -> None:
    ps = parameters()
    with pytest.raises(failure):
        train(Mock(side_effect=failure), ps, Nothing(), Training(steps=5))
    assert own_nothing_in_common(ps)
    assert all(p.grad is None for p in ps)


def test_a_fitted_head_shares_no_memory() -> None:
    method = fitted("classification", variance="per_output", output_rank=2)
    assert method.head is not None
    assert own_nothing_in_common(method.head.state_dict().values())
