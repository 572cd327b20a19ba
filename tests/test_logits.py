"""Logits, probabilities and their logarithms say the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from posthoc import DataError, OptionError
from posthoc.collect.class_scores import as_logits


def logits(rows: int = 50, classes: int = 5, *, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(rows, classes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_all_kinds_give_the_same_probabilities() -> None:
    z = logits()
    p = z.exp() / z.exp().sum(1, keepdim=True)
    assert as_logits(z, "logits") is z
    assert torch.equal(as_logits(p.log(), "log-probs"), p.log())
    torch.testing.assert_close(as_logits(p, "probs").softmax(1), p)
    torch.testing.assert_close(as_logits(p, "probs"), p.log())


@pytest.mark.parametrize("shape", [(9,), (9, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_column_speaks_of_class_1_of_two(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    z = torch.linspace(-12.0, 12.0, 9, dtype=dtype)
    log_p = -(1.0 + (-z.double()).exp()).log()
    for outputs, kind in ((z, "logits"), (log_p.exp().to(dtype), "probs"), (log_p.to(dtype), "log-probs")):
        found = as_logits(outputs.reshape(shape), kind)
        assert (found.shape, found.dtype) == ((9, 2), dtype)
        assert torch.equal(found[:, 0], torch.zeros(9, dtype=dtype))
        close = {"rtol": 1e-6, "atol": 0.0 if kind == "logits" else 0.02 if dtype == torch.float32 else 1e-9}
        torch.testing.assert_close(found[:, 1], z, **close)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["probs", "log-probs"])
def test_certainty_is_finite(dtype: torch.dtype, kind: str) -> None:
    p = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.0, 0.5]], dtype=dtype)
    sure = torch.tensor([0.0, 1.0, 0.5], dtype=dtype)
    if kind == "log-probs":
        p, sure = p.log(), sure.log()
    found, binary = as_logits(p, kind), as_logits(sure, kind)
    for z in (found, binary):
        assert bool(z.isfinite().all())
    torch.testing.assert_close(found.double().softmax(1), torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.0, 0.5]]).double())
    assert binary[:2].double().softmax(1).tolist() == [[1.0, pytest.approx(0.0)], [pytest.approx(0.0), 1.0]]
    assert abs(float(binary[2, 1])) < 0.01
    assert float(found.min()) == pytest.approx(-708.4 if dtype == torch.float64 else -87.3, rel=0.01)


def test_unlikely_logarithms_stay_as_they_are() -> None:
    assert as_logits(torch.tensor([[-300.0, 0.0]]), "log-probs").tolist() == [[-300.0, 0.0]]
    assert as_logits(torch.tensor([-300.0]), "log-probs").tolist() == [[0.0, -300.0]]
    z = as_logits(torch.tensor([-1e-30, -1e-7]), "log-probs")[:, 1]
    torch.testing.assert_close(z, torch.tensor([30.0, 7.0]) * math.log(10.0))


def test_rounding_to_half_precision_is_no_mistake() -> None:
    for z in (logits(100, 1000), torch.zeros(3, 1000), torch.zeros(3, 3), logits(100, 10, scale=20.0)):
        p = z.double().softmax(1)
        assert as_logits(p.half(), "probs").dtype == torch.float32
        torch.testing.assert_close(as_logits(p.half(), "probs").double().softmax(1), p, atol=1e-3, rtol=2e-3)
        assert torch.equal(as_logits(p.log().half(), "log-probs"), p.log().half())
        assert bool(as_logits(p.half().float(), "probs").isfinite().all())


def test_rounding_beyond_the_range_is_no_mistake() -> None:
    found = as_logits(torch.tensor([1.0 + 1e-7, -1e-8, 0.25]), "probs")
    assert bool(found.isfinite().all())
    assert as_logits(torch.tensor([0.001]), "log-probs").isfinite().all()


@pytest.mark.parametrize(
    ("outputs", "kind", "message"),
    [
        ([[0.2, 0.8], [3.0, -2.0]], "probs", r"from 0 to 1, got 3 in row 1\. Are these logits"),
        ([[0.2, 0.8], [-0.1, 1.1]], "probs", "from 0 to 1, got -0.1 in row 1"),
        ([[0.2, 0.8], [0.3, 0.6]], "probs", "sum to 1 in every row, got 0.9 in row 1"),
        ([[0.2, 0.8], [0.5, 0.502]], "probs", "sum to 1 in every row, got 1.002 in row 1"),
        ([0.5, 1.5], "probs", "from 0 to 1, got 1.5 in row 1"),
        ([[0.5, math.nan]], "probs", "from 0 to 1, got nan"),
        ([[0.2, 0.8]], "log-probs", "at most 0, got 0.2 in row 0"),
        ([[-0.2, -0.8]], "log-probs", "sum to 1"),
        ([[-math.inf, -math.inf]], "log-probs", "sum to 1"),
        ([[-0.2, math.nan]], "log-probs", "at most 0, got nan"),
        ([0.5, -1.0], "log-probs", "at most 0, got 0.5 in row 0"),
        ([[0.5, math.inf]], "logits", "Expected finite logits, got inf in row 0"),
        ([0.5, math.nan], "logits", "Expected finite logits, got nan in row 1"),
        ([[[0.5]]], "logits", r"shape \(N, C\).*got torch.float32 of shape \(1, 1, 1\)"),
        ([[]], "logits", r"of shape \(1, 0\)"),
        ([[1, 2]], "logits", "got torch.int64"),
    ],
)
def test_outputs_of_another_kind_are_refused(outputs: list[float], kind: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        as_logits(torch.tensor(outputs), kind)


def test_kinds_have_names() -> None:
    with pytest.raises(OptionError, match="'logits', 'log-probs', 'probs', got 'softmax'"):
        as_logits(torch.zeros(3, 2), "softmax")


def test_rows_are_independent() -> None:
    p = logits().softmax(1)
    for kind, outputs in (("probs", p), ("log-probs", p.log()), ("probs", p[:, 0]), ("log-probs", p[:, 0].log())):
        parts = [as_logits(outputs[at : at + 7], kind) for at in range(0, 50, 7)]
        assert torch.equal(torch.cat(parts), as_logits(outputs, kind))
    assert as_logits(torch.zeros(0, 3), "probs").shape == (0, 3)
