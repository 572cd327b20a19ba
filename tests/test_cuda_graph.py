"""Steps from a CUDA graph, and data kept on the host: the numbers of ordinary steps on resident data, to the bit."""

import functools
import math
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from posthoc import FMGP, RBF, Categorical, Gaussian, NotPSDError, Outputs, PosthocWarning, TrainingError
from posthoc.collect import open_outputs, save_outputs
from posthoc.fmgp.points import Coordinates, DrawnBatches, PointView, drawn_rows
from posthoc.numerics import cholesky
from posthoc.training import History, Ranks, Training, loop, train
from posthoc.training.cuda_graph import GraphSteps
from posthoc.training.loop import PlainSteps
from tests.cases import numbers, same

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that CUDA knows")

CUDA_GRAPH = {None: None, "graph": True, "plain": False}
WIDTH, STEPS = 5, 120
SMALL: dict[str, Any] = {"steps": STEPS, "num_inducing": 20, "batch_size": 50, "eval_every": 30, "patience": None}


def classes(n: int, c: int, seed: int = 0) -> Outputs:
    g = torch.Generator().manual_seed(seed)
    target = torch.randint(c, (n,), generator=g)
    return Outputs(2.0 * torch.randn(n, c, generator=g), target, torch.randn(n, WIDTH, generator=g))


def reals(n: int, seed: int = 0) -> Outputs:
    g = torch.Generator().manual_seed(seed)
    output, target = torch.randn(2, n, 1, generator=g)
    return Outputs(output, target, torch.randn(n, WIDTH, generator=g))


CASES: dict[str, tuple[Any, dict[str, Any], Callable[..., Outputs]]] = {
    "regression": ("regression", {"residuals": "gaussian"}, reals),
    "ten classes": ("classification", {"variance": "per_output"}, functools.partial(classes, c=10)),
    "a thousand classes": ("classification", {"variance": "shared"}, functools.partial(classes, c=1000)),
    "low rank": ("classification", {"variance": "per_output", "output_rank": 3}, functools.partial(classes, c=100)),
}


def fit(case: str, *, way: str | None = None, options: dict[str, Any] | None = None, **more: Any) -> FMGP:
    """A fit on the GPU, with a graph or without."""
    likelihood, own, data = CASES[case]
    method = FMGP(None, likelihood, device="cuda", **{**SMALL, **own, **(options or {})})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("posthoc.fmgp.build.train", functools.partial(train, cuda_graph=CUDA_GRAPH[way]))
        return method.fit(more.pop("data", None) or data(400), **more)


@pytest.fixture
def calls(monkeypatch):
    """How often blocks were taken by a graph and step by step, and how often a graph was captured."""
    counts = {"graph": 0, "plain": 0, "captured": 0}

    def count(kind, method, name):
        original = getattr(kind, method)

        def counted(*args):
            counts[name] += 1
            return original(*args)

        monkeypatch.setattr(kind, method, counted)

    count(GraphSteps, "run", "graph")
    count(GraphSteps, "_capture", "captured")
    count(PlainSteps, "run", "plain")
    return counts


def assert_equal_fits(found: FMGP, expected: FMGP) -> None:
    assert found.history == expected.history
    assert same(numbers(found), numbers(expected))


@cuda
@pytest.mark.parametrize("case", CASES)
def test_a_graph_gives_the_numbers_of_ordinary_steps(case, calls):
    replayed = fit(case)  # it is the default there
    assert calls["graph"] > calls["captured"] == 1
    assert calls["plain"] == 0
    plain = fit(case, way="plain")
    assert calls["plain"] > 1
    assert_equal_fits(replayed, plain)
    assert len(plain.history.losses) == STEPS


@cuda
def test_early_stopping_in_a_graph(calls):
    data = classes(400, c=10)
    sure = data.with_targets(data.outputs.argmax(-1))  # right where it learns, wrong where it is watched
    watched = {"options": {"lr": 0.1, "eval_every": 3, "patience": 2}, "data": sure, "val": data[:60]}
    replayed, plain = (fit("ten classes", way=way, **watched) for way in ("graph", "plain"))
    assert calls["captured"] == 1
    assert_equal_fits(replayed, plain)
    assert 6 <= len(plain.history.losses) < STEPS


@cuda
def test_a_graph_that_was_interrupted_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    def head(name, **more):
        method = fit("ten classes", val=classes(60, c=10, seed=1), **more)
        method.save(tmp_path / name)
        return (tmp_path / name).read_bytes()

    expected, folder, run, blocks = head("expected"), tmp_path / "folder", GraphSteps.run, iter(range(4))

    def stopping(self, block, lrs):
        if next(blocks, None) is None:
            raise KeyboardInterrupt
        return run(self, block, lrs)

    with monkeypatch.context() as patch:
        patch.setattr(GraphSteps, "run", stopping)
        with pytest.raises(KeyboardInterrupt):
            head("never", checkpoint=folder, checkpoint_every=20)
    shutil.copytree(folder, tmp_path / "copy")
    assert head("resumed", checkpoint=folder, resume=True) == expected
    assert head("resumed in ordinary steps", checkpoint=tmp_path / "copy", resume=True, way="plain") == expected


@cuda
def test_draws_on_the_gpu_go_on_too(tmp_path, calls):
    def run(**more):
        likelihood = Categorical(training="monte_carlo", samples=4)
        return FMGP(None, likelihood, device="cuda", **SMALL).fit(classes(400, c=5), **more)

    expected = run()
    with pytest.MonkeyPatch.context() as patch:
        step, taken = PlainSteps.step, iter(range(50))
        patch.setattr(PlainSteps, "step", lambda *args: step(*args) if next(taken, None) is not None else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(checkpoint=tmp_path, checkpoint_every=20)
    assert_equal_fits(run(checkpoint=tmp_path, resume=True), expected)
    assert calls["graph"] == 0  # draws cannot be replayed


class Numbers:
    """A block, or a batch, of one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> "Numbers":
        return Numbers(change(self.tensor))


def descend(loss: Callable[[Tensor, Tensor], Tensor], device: str, way: str | None) -> tuple[list[float], History]:
    """Trains two numbers, for ten steps, on a loss of them and of the number of the step."""
    parameter = nn.Parameter(torch.tensor([0.3, -0.2], dtype=torch.float64, device=device))

    def block(step: int, count: int) -> Numbers:
        return Numbers(torch.arange(step, step + count, dtype=torch.float64, device=device))

    source: Any = SimpleNamespace(fixed=True, weight=1.0, ahead=4, block=block)
    objective, training = lambda batch: loss(parameter, batch.tensor), Training(steps=10, lr=0.1)
    history = train(objective, [parameter], source, training, cuda_graph=CUDA_GRAPH[way])
    return parameter.tolist(), history


def waves(p: Tensor, step: Tensor) -> Tensor:
    return (p - 0.1 * step).square().sum() + (p * step).sin().sum()


def singular(p: Tensor, step: Tensor) -> Tensor:
    """A matrix that has a Cholesky factor only with jitter, at every third step."""
    ridge = 1e-3 - (1e-3 + 1e-9) * (step % 3 == 2).double()
    return cholesky(p.exp().sum() * (1.0 + ridge * torch.eye(2, dtype=torch.float64, device=p.device))).diagonal().sum()


@cuda
def test_a_factor_that_fails_in_a_graph_has_its_jitter_in_an_ordinary_step(calls):
    with pytest.warns(PosthocWarning, match="was not positive definite"):
        replayed = descend(singular, "cuda", "graph")
    assert calls["captured"] == 1
    assert calls["plain"] == calls["graph"] == 3  # each block had such a step
    with pytest.warns(PosthocWarning, match="was not positive definite"):
        assert replayed == descend(singular, "cuda", "plain")


@cuda
def test_a_factor_that_fails_in_ordinary_steps_too_says_so(calls):
    def negative(p, step):
        sign = 1.0 - 2.0 * (step == 6).double()
        return cholesky(sign * torch.diag(p.exp()), "my matrix").diagonal().sum()

    with pytest.raises(NotPSDError, match="Expected my matrix to be positive definite"):
        descend(negative, "cuda", "graph")
    assert calls == {"graph": 2, "plain": 1, "captured": 1}


@cuda
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("case", ["regression", "a thousand classes"])
def test_data_on_the_host_give_the_numbers_of_resident_ones(case, mapped, tmp_path, monkeypatch):
    def run(data):
        away = []

        class Noting(DrawnBatches):
            def __init__(self, *args):
                super().__init__(*args)
                away.append(self.reader is not None)

        few = {"steps": 30, "batch_size": 20, "eval_every": 7}  # which look at fewer rows than there are
        monkeypatch.setattr("posthoc.fmgp.build.DrawnBatches", Noting)
        return fit(case, options=few, data=data, val=CASES[case][2](50, seed=1)), away

    data = CASES[case][2](2000)
    resident, where = run(data)
    assert where == [False]
    if mapped:
        save_outputs(data, tmp_path / "outputs")
        data = open_outputs(tmp_path / "outputs")
    monkeypatch.setattr("posthoc.fmgp.build.LARGE_OUTPUTS", 0)
    kept, where = run(data)
    assert where == [True]
    assert data.outputs.device.type == "cpu"
    assert_equal_fits(kept, resident)


@cuda
def test_reading_ahead_does_not_disturb_the_capture(monkeypatch, calls):
    read = DrawnBatches._read

    def long(self, step, count):
        end, held = time.monotonic() + 0.5, []
        while time.monotonic() < end:
            held.append(torch.empty(2**20).pin_memory())  # as reading does, but for as long as a capture may take
        return read(self, step, count)

    few, data = {"steps": 30, "batch_size": 10, "eval_every": 10}, classes(1000, c=10)
    expected = fit("ten classes", options=few, data=data)
    monkeypatch.setattr("posthoc.fmgp.build.LARGE_OUTPUTS", 0)
    monkeypatch.setattr(DrawnBatches, "_read", long)
    assert_equal_fits(fit("ten classes", options=few, data=data), expected)
    assert calls["plain"] == 0


@pytest.mark.parametrize(
    ("devices", "fixed", "alone", "draws", "expected"),
    [
        (["cuda"], True, True, None, "captured"),
        (["cpu"], True, True, None, "ordinary"),
        (["cuda", "cpu"], True, True, None, "ordinary"),
        (["cuda"], False, True, None, "ordinary"),
        (["cuda"], True, False, None, "ordinary"),
        (["cuda"], True, True, torch.Generator(), "ordinary"),
    ],
)
def test_a_graph_is_for_one_gpu_batches_of_one_shape_and_no_draws(devices, fixed, alone, draws, expected, monkeypatch):
    values = [SimpleNamespace(device=torch.device(name)) for name in devices]
    optimizer = SimpleNamespace(parameters=[None], values=values, release=lambda: None)
    ranks = SimpleNamespace(alone=alone, share=lambda tensors: None, agree=Mock(side_effect=LookupError("ordinary")))
    monkeypatch.setattr(loop, "FlatAdam", lambda parameters: optimizer)
    monkeypatch.setattr(loop, "Ranks", lambda: ranks)
    monkeypatch.setattr(loop, "GraphSteps", Mock(side_effect=LookupError("captured")))
    source: Any = SimpleNamespace(fixed=fixed, weight=1.0, ahead=1)
    with pytest.raises(LookupError, match=expected):
        train(lambda batch: batch, [], source, Training(), generator=draws)


class PretendedGraph:
    """Does again, by hand, what a captured step does."""

    def replay(self):
        self.step()


@pytest.fixture
def pretended(monkeypatch):
    """CUDA graphs on the CPU: a capture notes the step, a replay takes it."""
    taken, original = [], GraphSteps._step

    def step(self):
        taken.append(lambda: original(self))
        original(self)

    @contextmanager
    def capture(graph, stream, capture_error_mode):
        assert stream is idle
        yield
        graph.step = taken[-1]

    idle = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(GraphSteps, "_step", step)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PretendedGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: idle)
    monkeypatch.setattr("posthoc.training.cuda_graph.STREAMS", threading.local())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: idle)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


@pytest.mark.usefixtures("pretended")
def test_replayed_steps_have_their_own_batch_and_learning_rate(calls):
    """Ten steps in blocks of four: the warm-up leaves no trace, and the last block is shorter than its place."""
    replayed, plain = descend(waves, "cpu", "graph"), descend(waves, "cpu", "plain")
    assert calls == {"graph": 3, "captured": 1, "plain": 3}
    assert replayed == plain
    assert len(plain[1].losses) == 10


@pytest.mark.usefixtures("pretended")
def test_a_block_that_fails_is_taken_again_from_where_it_began(calls):
    failing = iter([False] * (4 + 4 + 2) + [True] + [False] * 20)  # capture, first block, third step of the second

    def loss(p, step):
        return waves(p, step) * (math.nan if next(failing) else 1.0)

    replayed, plain = descend(loss, "cpu", "graph"), descend(waves, "cpu", "plain")
    assert calls == {"graph": 3, "captured": 1, "plain": 1 + 3}
    assert replayed == plain


@pytest.mark.usefixtures("pretended")
def test_a_loss_that_stays_bad_is_reported_with_its_step():
    def loss(p, step):
        return waves(p, step) * torch.where(step == 6, math.nan, 1.0)

    with pytest.raises(TrainingError, match="became nan at step 7 of 10"):
        descend(loss, "cpu", "graph")


def test_rows_of_a_step_do_not_depend_on_the_block_it_is_read_in():
    whole = drawn_rows(1000, 7, 3, 0, 200)
    assert whole.shape == (200, 7)
    for sizes in ([1] * 200, [50] * 4, [63, 1, 1, 64, 71]):
        parts = [drawn_rows(1000, 7, 3, sum(sizes[:i]), count) for i, count in enumerate(sizes)]
        assert torch.equal(torch.cat(parts), whole)
    assert len({tuple(rows) for rows in whole.tolist()}) == 200
    assert 0 <= int(whole.min()) < int(whole.max()) < 1000


def drawn_batches() -> DrawnBatches:
    data, likelihood = reals(200), Gaussian()
    likelihood.initialize(data.outputs, data.targets)
    view = PointView(data, Coordinates.of(data, RBF(), standardize=True))
    return DrawnBatches(view, likelihood, 7, 0, Ranks())


def test_blocks_are_read_ahead_in_any_order_and_an_error_of_the_reader_is_not_lost(monkeypatch):
    monkeypatch.setattr(Outputs, "pinned", lambda self: self)  # as for a GPU
    plain, ahead = drawn_batches(), drawn_batches()
    with ThreadPoolExecutor(1) as ahead.reader:
        for step, count in [(0, 5), (5, 5), (10, 2), (12, 5), (3, 5)]:
            assert torch.equal(ahead.block(step, count).target, plain.block(step, count).target)
            assert list(ahead.next) == [(step + count, count)]  # before anybody wanted it
        assert not plain.next
        monkeypatch.setattr(ahead, "_read", Mock(side_effect=[reals(35), OSError("the disk is gone")]))
        ahead.block(0, 5)
        with pytest.raises(OSError, match="the disk is gone"):
            ahead.block(5, 5)
