"""Logits, probabilities and their logarithms say the same."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from posthoc import DataError, Outputs, PosthocWarning, Temperature
from posthoc.collect.class_scores import Rounding, as_logits, find_rounding
from posthoc.methods import REGISTRY, load


def logits(rows: int = 50, classes: int = 5, *, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(rows, classes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_all_kinds_give_the_same_probabilities() -> None:
    z = logits()
    p = z.exp() / z.exp().sum(1, keepdim=True)
    assert as_logits(z, "logits") is z
    assert torch.equal(as_logits(p.log(), "log-probs"), p.log())
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


@pytest.mark.filterwarnings("ignore:.*probabilities are 0")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["probs", "log-probs"])
def test_certainty_is_finite(dtype: torch.dtype, kind: str) -> None:
    p, sure = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.0, 0.5]], dtype=dtype), torch.tensor([0.0, 1.0, 0.5], dtype=dtype)
    found, binary = (as_logits(given.log() if kind == "log-probs" else given, kind) for given in (p, sure))
    assert bool(torch.cat([found.flatten(), binary.flatten()]).isfinite().all())
    torch.testing.assert_close(found.double().softmax(1), p.double(), atol=1e-6, rtol=0.0)
    torch.testing.assert_close(binary[:2].double().softmax(1), torch.eye(2).double(), atol=1e-6, rtol=0.0)
    assert abs(float(binary[2, 1])) < 0.01
    assert float(found.min()) == pytest.approx(math.log(torch.finfo(found.to(torch.float32).dtype).eps), rel=1.3)


def rounded(decimals: int | None, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Overconfident probabilities, rounded, and labels."""
    z = logits(4000, 10, scale=1.5)
    labels = torch.multinomial(z.softmax(1), 1, generator=torch.Generator().manual_seed(1))[:, 0]
    p = (3.0 * z).softmax(1)
    return (p if decimals is None else p.round(decimals=decimals)).to(dtype), labels


@pytest.mark.filterwarnings("ignore:.*probabilities are 0")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("decimals", "loss"), [(4, 0.02), (3, 0.05), (2, 0.1)])
def test_rounding_costs_calibration_little(decimals: int, loss: float, dtype: torch.dtype) -> None:
    def score(decimals: int | None) -> float:
        p, labels = rounded(decimals, dtype)
        method = REGISTRY["temperature"](None, "classification", outputs_are="probs")
        method.fit(Outputs(p[:2000], labels[:2000]))
        # One row at a time: what a zero stands for was derived in the fit.
        parts = [method.predict(Outputs(p[at : at + 1])).log_prob(labels[at : at + 1]) for at in range(2000, 2200)]
        whole = method.predict(Outputs(p[2000:])).log_prob(labels[2000:])
        torch.testing.assert_close(torch.cat(parts), whole[:200])
        return -float(whole.mean())

    assert score(decimals) < score(None) + loss


def test_zeros_of_a_forest_are_half_a_vote() -> None:
    votes = torch.randint(0, 4, (200, 3), generator=torch.Generator().manual_seed(0)).double()
    p = torch.cat([votes, 30.0 - votes.sum(1, keepdim=True)], 1) / 30.0
    with pytest.warns(PosthocWarning, match=r"\d+ probabilities are 0.*taken as 0\.0167.*rounding, 0\.0333"):
        z = as_logits(p, "probs")
    assert float(z[p == 0.0].exp().max()) == pytest.approx(1.0 / 60.0)
    torch.testing.assert_close(z[p > 0.0], p[p > 0.0].log())
    with pytest.warns(PosthocWarning, match="taken as 0.0167"):
        torch.testing.assert_close(as_logits(p.log(), "log-probs"), z)


def test_unrounded_zeros_are_less_than_any_other_probability() -> None:
    p = torch.cat([logits(classes=4).softmax(1), torch.zeros(50, 1, dtype=torch.float64)], 1)
    with pytest.warns(PosthocWarning, match=r"50 of 250 .* \(less than any other\)"):
        z = as_logits(p, "probs")
    assert float(z[:, 4].max()) == pytest.approx(math.log(float(p[:, :4].min()) / 2.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_floating_point_numbers_are_not_taken_for_rounded_ones(dtype: torch.dtype) -> None:
    p = logits(500, 10).softmax(1).to(dtype)
    assert find_rounding(p, "probs").unit == find_rounding(p.double(), "probs").unit == 0.0


@pytest.mark.filterwarnings("ignore:.*probabilities are")
def test_rows_may_sum_to_one_within_their_rounding() -> None:
    many = torch.randn(50, 200, generator=torch.Generator().manual_seed(0)).double().softmax(1)
    for p in (rounded(2)[0], rounded(1)[0], many.round(decimals=2)):
        total = p.sum(1)
        assert float((total - 1.0).abs().max()) > 0.02
        for rounding in (None, Rounding(1e-6, 0.0)):  # that of the fit may have been finer
            z = as_logits(p, "probs", rounding)
            torch.testing.assert_close(z[p > 0], (p / total[:, None])[p > 0].log(), atol=0.0102, rtol=0.0)
    thirds = torch.tensor([[0.33, 0.33, 0.33]])
    assert as_logits(thirds, "probs").softmax(1).tolist() == [pytest.approx([1.0 / 3.0] * 3)]
    p = rounded(2)[0]
    with pytest.raises(DataError, match=r"sum to 1 in every row, got 2\.15 in row 4000.*several labels a row"):
        as_logits(torch.cat([p, torch.tensor([[1.0, 1.0, 0.15] + 7 * [0.0]])]), "probs")


def test_zeros_beside_the_smallest_numbers_are_taken_as_what_calibrates_best() -> None:
    """Naive Bayes gives probabilities down to the smallest number there is, which no temperature can mend."""
    rng = torch.Generator().manual_seed(0)
    z = 4.0 * torch.randn(300, 3, generator=rng, dtype=torch.float64)
    y = z.softmax(1).multinomial(1, generator=rng)[:, 0]
    p = torch.where(torch.arange(300)[:, None] % 6 == 0, 80.0 * z, z).softmax(1)
    assert bool((p == 0.0).any())
    assert float(p[p > 0.0].min()) < 1e-200
    with pytest.warns(PosthocWarning, match=r"probabilities are 0 and are taken as 2\.22e-16 \(like smaller ones\)"):
        ours = Temperature(outputs_are="probs").fit(Outputs(p, y))
    best = Temperature().fit(Outputs(p.clamp_min(2.2e-16).log(), y)).predict(Outputs(p.clamp_min(2.2e-16).log()))
    torch.testing.assert_close(ours.predict(Outputs(p)).probs, best.probs, atol=0.01, rtol=0.01)
    # A softmax in float32 underflows beside values that are calibrated: zeros are a little smaller than these.
    z = 60.0 * torch.randn(300, 3, generator=rng)
    with pytest.warns(PosthocWarning, match=r"taken as 1\.18e-38"):
        Temperature(outputs_are="probs").fit(
            Outputs(z.softmax(1), (z / 12.0).softmax(1).multinomial(1, generator=rng)[:, 0])
        )


def test_predictions_that_are_rounded_more_than_the_fit_are_noticed() -> None:
    z = logits(300, 4)
    p, y = z.double().softmax(1), torch.arange(300) % 4
    method = Temperature(outputs_are="probs").fit(Outputs(p, y))
    with pytest.warns(PosthocWarning, match=r"rounded to 0\.01 and those of the fit were not: a 0 is taken as"):
        method.predict(Outputs(p.round(decimals=2)))


@pytest.mark.filterwarnings("ignore:.*probabilities are 0")
def test_probabilities_in_half_precision_may_be_rounded_too() -> None:
    p = rounded(2)[0].double()
    assert find_rounding(p.half(), "probs").unit == 0.01
    assert as_logits(p.half(), "probs").shape == p.shape


def test_unlikely_logarithms_stay_as_they_are() -> None:
    assert as_logits(torch.tensor([[-300.0, 0.0]]), "log-probs").tolist() == [[-300.0, 0.0]]
    assert as_logits(torch.tensor([-300.0]), "log-probs").tolist() == [[0.0, -300.0]]
    z = as_logits(torch.tensor([-1e-30, -1e-7]), "log-probs")[:, 1]
    torch.testing.assert_close(z, torch.tensor([30.0, 7.0]) * math.log(10.0))


@pytest.mark.filterwarnings("ignore:.*probabilities are 0")
def test_rounding_to_half_precision_is_no_mistake() -> None:
    for z in (logits(100, 1000), torch.zeros(3, 1000), torch.zeros(3, 3), logits(100, 10, scale=20.0)):
        p = z.double().softmax(1)
        assert as_logits(p.half(), "probs").dtype == torch.float32
        torch.testing.assert_close(as_logits(p.half(), "probs").double().softmax(1), p, atol=1e-3, rtol=2e-3)
        assert torch.equal(as_logits(p.log().half(), "log-probs"), p.log().half())
        assert bool(as_logits(p.half().float(), "probs").isfinite().all())


@pytest.mark.filterwarnings("ignore:.*probabilities are 0")
@pytest.mark.parametrize(
    ("outputs", "kind", "message"),
    [
        ([[0.2, 0.8], [3.0, -2.0]], "probs", r"from 0 to 1, got 3 in row 1\. Are these logits"),
        ([[0.2, 0.8], [0.3, 0.6]], "probs", "sum to 1 in every row, got 0.9 in row 1"),
        ([[0.2, 0.8], [0.5, 0.52]], "probs", "sum to 1 in every row, got 1.02 in row 1"),
        ([[0.5, math.nan]], "probs", "from 0 to 1, got nan"),
        ([[0.2, 0.8]], "log-probs", "at most 0, got 0.2 in row 0"),
        ([[-0.2, -0.8]], "log-probs", "sum to 1"),
        ([[-0.2, math.nan]], "log-probs", "at most 0, got nan"),
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


def test_rows_are_independent() -> None:
    p = logits().softmax(1)
    for kind, outputs in (("probs", p), ("log-probs", p.log()), ("probs", p[:, 0]), ("log-probs", p[:, 0].log())):
        parts = [as_logits(outputs[at : at + 7], kind) for at in range(0, 50, 7)]
        assert torch.equal(torch.cat(parts), as_logits(outputs, kind))
    assert as_logits(torch.zeros(0, 3), "probs").shape == (0, 3)


def test_head_keeps_the_rounding(tmp_path: Path) -> None:
    p, labels = rounded(2)
    method = REGISTRY["temperature"](None, "classification", outputs_are="probs")
    with pytest.warns(PosthocWarning, match="are 0"):
        method.fit(Outputs(p, labels))
    method.save(tmp_path / "head")
    row = Outputs(torch.eye(10, dtype=torch.float64)[:1])
    probs = load(tmp_path / "head").predict(row).probs
    assert torch.equal(probs, method.predict(row).probs)
    assert float(probs[0, 1]) > 0.001
