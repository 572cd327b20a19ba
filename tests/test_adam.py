"""Parameters as one vector: views while they train, their own afterwards, and moved as torch's Adam moves them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posthoc.training import Training, train
from posthoc.training.adam import BETA1, BETA2, EPS, FlatAdam
from tests.test_training import Nothing, fitted

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that CUDA knows")

SHAPES: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((3, 4), torch.float64),
    ((5,), torch.float32),
    ((), torch.float64),
    ((2, 1, 3), torch.float32),
    ((0, 4), torch.float64),
    ((7,), torch.float64),
]


def parameters(seed: int = 0) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, dtype=dtype, generator=g)) for shape, dtype in SHAPES]


def gradients(seed: int) -> list[Tensor]:
    """Of very different sizes, and some of them zero."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for shape, dtype in SHAPES:
        size = 10.0 ** torch.randint(-12, 6, shape, generator=g).double()
        there = torch.rand(shape, generator=g) > 0.2
        found.append((size * there * torch.randn(shape, generator=g)).to(dtype))
    return found


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def own_nothing_in_common(tensors: Iterable[Tensor]) -> bool:
    used = [storage(tensor) for tensor in tensors if tensor.numel()]
    return len(set(used)) == len(used)


# One vector.


def test_values_are_kept_and_live_in_one_vector_for_each_dtype() -> None:
    ps = parameters()
    before = [p.detach().clone() for p in ps]
    flat = FlatAdam(ps)
    assert len(flat.parameters) == len(ps)
    assert {v.dtype: v.numel() for v in flat.values} == {torch.float32: 11, torch.float64: 20}
    assert len(flat.values) == 2
    for p, value in zip(ps, before, strict=True):
        assert p.dtype == value.dtype
        assert torch.equal(p, value)
        assert p.numel() == 0 or storage(p) in [storage(v) for v in flat.values]
    for vector in flat.values:
        vector.fill_(2.5)
    assert all(bool((p == 2.5).all()) for p in ps)


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


def test_release_gives_every_parameter_memory_of_its_own() -> None:
    ps = parameters()
    flat = FlatAdam(ps)
    expected = [p.detach().clone() for p in ps]
    flat.release()
    assert own_nothing_in_common([*ps, *flat.values])
    assert all(p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in ps)
    assert all(p.grad is None and p.requires_grad and p.is_leaf for p in ps)
    for vector in flat.values:
        vector.zero_()
    assert all(torch.equal(p, value) for p, value in zip(ps, expected, strict=True))


# Adam.


STEPS = 40
LRS = [Training(steps=STEPS, lr=0.05).lr_at(step) for step in range(STEPS)]


def moved_by_torch(ps: list[nn.Parameter], grads: Callable[[int], list[Tensor]]) -> list[Tensor]:
    adam = torch.optim.Adam(ps, betas=(BETA1, BETA2), eps=EPS, fused=True)
    for step, lr in enumerate(LRS):
        for p, grad in zip(ps, grads(step), strict=True):
            p.grad = grad
        adam.param_groups[0]["lr"] = lr
        adam.step()
    return [p.detach() for p in ps]


def moved(flat: FlatAdam, steps: Iterable[int]) -> list[Tensor]:
    for step in steps:
        flat.clear()
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
    (expected,) = moved_by_torch([nn.Parameter(joined(parameters()))], lambda step: [joined(gradients(step))])
    assert torch.equal(found, expected)
    assert not torch.equal(found, joined(parameters()))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
def test_a_learning_rate_on_the_device_gives_the_same_bits(device: str) -> None:
    """Where it is a float32, as `lr_at` gives it."""

    def run(make: Callable[[float], float | Tensor]) -> Tensor:
        p = nn.Parameter(torch.randn(37, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device))
        flat = FlatAdam([p])
        for lr in LRS:
            flat.clear()
            (p.sin() * lr).sum().backward()
            flat.step(make(lr))
        return p.detach()

    assert torch.equal(run(lambda lr: lr), run(lambda lr: torch.tensor(lr, device=device)))


# Going back.


def test_a_snapshot_brings_back_values_moments_and_counts() -> None:
    flat = FlatAdam(parameters())
    moved(flat, range(5))
    snapshot = flat.snapshot()
    first = moved(flat, range(5, 10))
    flat.restore(snapshot)
    again = moved(flat, range(5, 10))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert own_nothing_in_common([*snapshot, *flat.state])


# In the loop.


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
def test_parameters_are_released_whatever_happens(failure: type[BaseException]) -> None:
    ps = parameters()

    def objective(batch: Any) -> Tensor:
        raise failure

    with pytest.raises(failure):
        train(objective, ps, Nothing(), Training(steps=5))
    assert own_nothing_in_common(ps)
    assert all(p.grad is None for p in ps)


def test_a_fitted_head_shares_no_memory() -> None:
    method = fitted("classification", variance="per_output", output_rank=2)
    assert method.head is not None
    assert own_nothing_in_common(method.head.state_dict().values())
