"""Networks that do more than they should when they are switched to eval mode or run."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posthoc import FMGP, PosthocError
from posthoc.collect.network import evaluating
from tests.cases import HIDDEN, QUICK, WIDTH, N, in_eval, inputs, mlp, same, values
from tests.test_network import assert_unchanged, portrait


class LoRA(nn.Linear):
    """As in loralib: the adapter is merged into the weight in eval mode, and taken out of it in training mode."""

    merged = False

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.randn(outputs, 2))

    def train(self, mode: bool = True) -> LoRA:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (self.b @ self.a) * (-1.0 if mode else 1.0)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        return out if self.merged else out + x @ self.a.T @ self.b.T


def adapted() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(LoRA(WIDTH, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))


def used(model: nn.Module) -> FMGP:
    method = FMGP(model, "regression", **QUICK).fit((inputs(), values()))
    method.predict(inputs())
    return method


def test_adapters_that_merge_in_eval_mode_are_refused() -> None:
    model = adapted().train()
    before = portrait(model)
    expected = r"changed weights \(0\.weight\).*eval\(\) changes weights, call model\.eval\(\)"
    with pytest.raises(PosthocError, match=expected):
        used(model)
    assert not model[0].merged
    assert model.training
    for name, weight in model.named_parameters():  # merged and taken apart again
        torch.testing.assert_close(weight, before["values"][name], atol=1e-5, rtol=1e-5)
    model(inputs()).sum().backward()
    assert bool(model.get_parameter("0.a").grad.any())  # type: ignore[union-attr]
    model.eval()  # merged already, it serves
    before = portrait(model)
    method = used(model)
    assert_unchanged(model, before)
    assert model[0].merged
    assert torch.equal(method.predict(inputs()).latent.mean, in_eval(model, inputs()))


class Switching(nn.Sequential):
    """Does something of its own when it is switched to eval mode."""

    def __init__(self, switch: Callable[[Switching], Any]) -> None:
        super().__init__(*mlp())
        self.switch, self.deterministic = switch, False

    def train(self, mode: bool = True) -> Switching:
        super().train(mode)
        self.deterministic = not mode
        if not mode:
            self.switch(self)
        return self

    def forward(self, x: Tensor) -> Tensor:
        assert self.deterministic
        return super().forward(x)


def replaces_a_weight(model: Any) -> None:
    model[0].weight = nn.Parameter(2.0 * model[0].weight.detach())


def fails(model: Any) -> None:
    model[0].weight.data.zero_()
    raise RuntimeError("the switch is stuck")


CHANGED = r"changed weights \(0\.weight"


@pytest.mark.parametrize(
    ("switch", "error", "message"),
    [
        (lambda model: model[0].weight.data[0].zero_(), PosthocError, CHANGED),
        (lambda model: model[0].weight.requires_grad_(False), PosthocError, CHANGED),
        (replaces_a_weight, PosthocError, CHANGED),
        (fails, RuntimeError, "the switch is stuck"),
    ],
)
def test_eval_that_changes_weights_is_refused(switch: Any, error: type[Exception], message: str) -> None:
    model = Switching(switch).train()
    with pytest.raises(error, match=message):
        used(model)
    assert model.training
    assert not model.deterministic


def test_eval_of_the_networks_own_is_undone_by_its_train() -> None:
    model = Switching(lambda model: None).train()
    before = portrait(model)
    used(model)
    assert_unchanged(model, before)
    assert not model.deterministic


class Writing(nn.Sequential):
    """Writes to what it is made of in every forward pass, and raises in the pass whose number is `fails_at`."""

    count: Tensor

    def __init__(self, write: Callable[[Any], Any], fails_at: int | None = None) -> None:
        super().__init__(*mlp())
        self.register_buffer("count", torch.zeros(()))
        self.write, self.fails_at, self.passes = write, fails_at, 0

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self)
        self.passes += 1
        if self.passes - 1 == self.fails_at:
            raise RuntimeError("the network fell over")
        return super().forward(x)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda model: model[0].weight.add_(1.0), r"0\.weight"),
        (lambda model: model[0].weight.data.add_(1.0), r"0\.weight"),
        (replaces_a_weight, r"0\.weight"),
        (lambda model: model.count.data.add_(1.0), "count"),
    ],
)
def test_network_that_writes_to_its_weights_is_refused(write: Any, name: str, later: bool) -> None:
    model = Writing(lambda model: write(model) if model.passes >= later else None).train()
    for _ in range(2):  # and again
        with pytest.raises(PosthocError, match=rf"changed weights \({name}\).*give posthoc\.Outputs"):
            FMGP(model, "regression", **QUICK).fit([(inputs(), values())] * 3)
        assert model.training


def test_error_of_the_network_comes_before_what_it_wrote() -> None:
    model = Writing(lambda model: model[0].weight.add_(1.0), fails_at=0).train()
    with pytest.raises(RuntimeError, match="the network fell over"):
        used(model)
    assert model.training


def test_embeddings_that_are_kept_short_are_refused() -> None:
    # PyTorch's own layer writes to its weight in forward: to the rows that are looked up, where they are too long.
    model = nn.Sequential(nn.Embedding(10, HIDDEN, max_norm=1.0), nn.Flatten(), nn.Linear(HIDDEN, 1))
    rows = torch.arange(N).remainder(5)[:, None]
    with pytest.raises(PosthocError, match=r"changed weights \(0\.weight\)"):
        FMGP(model, "regression", **QUICK).fit((rows, values()))


def test_what_the_user_writes_into_weights_and_buffers_stays() -> None:
    model: Any = Writing(lambda model: None)
    method = used(model)
    for tensor in (model[0].weight, model[2].weight, model.count):
        tensor.data.fill_(7.0)
    method.predict(inputs())
    assert bool((model[0].weight == 7.0).all())
    assert float(model.count) == 7.0
    outputs = model(inputs())  # and a graph from before can still be differentiated
    method.predict(inputs())
    outputs.sum().backward()


class Cache(nn.Module):
    """Positions that grow with the longest input so far, as in many language models; `made` says how far they reach."""

    cos: Tensor

    def __init__(self, length: int) -> None:
        super().__init__()
        self.made = 0
        if length:
            self.grow(length)

    def grow(self, length: int) -> None:
        self.made = length
        self.register_buffer("cos", torch.arange(float(length)).cos(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.made:
            self.grow(x.shape[1])
        return x * self.cos[: x.shape[1]]


@pytest.mark.parametrize("length", [0, 2, WIDTH])
def test_caches_that_grow_serve_afterwards(length: int) -> None:
    model = nn.Sequential(Cache(length), mlp())
    before = portrait(model)
    expected = in_eval(model, inputs())
    method = used(model)
    assert_unchanged(model, before)
    assert torch.equal(model(inputs()), expected)
    assert torch.equal(method.predict(inputs()).latent.mean, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_network_comes_back_too() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(WIDTH, 1)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count = self.count + 1.0  # type: ignore[has-type]
            return self.last(x)

    model = torch.jit.script(Counting()).train()
    before = copy.deepcopy(model.state_dict())
    used(model)
    assert model.training
    assert same(dict(model.state_dict()), before)


class Waiting(nn.Module):
    """Waits in its forward pass for another thread, where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)
        self.entered, self.go_on, self.waits = threading.Event(), threading.Event(), False

    def __deepcopy__(self, memo: Any) -> Waiting:
        other = Waiting()
        other.load_state_dict(self.state_dict())
        return other

    def forward(self, x: Tensor) -> Tensor:
        if self.waits and not self.training:
            self.waits = False
            self.entered.set()
            assert self.go_on.wait(10.0)
        return self.last(self.norm(x))


def while_predicting(model: Waiting, act: Callable[[], Any]) -> BaseException | None:
    """The error of a prediction in the middle of which another thread acts on the network."""
    method = used(model)
    model.waits = True

    with ThreadPoolExecutor(1) as pool:
        predicting = pool.submit(method.predict, inputs())
        assert model.entered.wait(10.0)
        try:
            act()
        finally:
            model.go_on.set()
        return predicting.exception(10.0)


def train_once(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    model(inputs()).square().mean().backward()
    optimizer.step()


def test_training_during_a_prediction_is_told_and_not_undone() -> None:
    model = Waiting().eval()
    error = while_predicting(model, lambda: train_once(model))
    assert "changed weights" in str(error)
    assert "copy.deepcopy(model)" in str(error)
    assert model.training
    assert int(model.norm.num_batches_tracked) > 0  # type: ignore[arg-type]
    model = Waiting().eval()
    assert "it in training mode" in str(while_predicting(model, model.train))
    assert model.training


def test_forward_pass_of_a_training_thread_is_refused_while_the_network_predicts() -> None:
    model = Waiting().train()

    def forward() -> None:
        with pytest.raises(PosthocError, match="another thread predicts with it"):
            model(inputs())

    assert while_predicting(model, forward) is None
    assert model.training
    model(inputs())


def test_copy_of_a_network_can_be_trained_while_it_predicts() -> None:
    model = Waiting().train()
    assert while_predicting(model, lambda: train_once(copy.deepcopy(model))) is None
    copied = copy.deepcopy(mlp().train())
    with evaluating(copied):
        train_once(copy.deepcopy(copied))
