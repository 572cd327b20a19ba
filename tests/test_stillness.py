"""Networks that do more than they should when they are switched to eval mode or run: they come back as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posthoc import FMGP, PosthocWarning
from posthoc.collect.stillness import still, written
from tests.cases import HIDDEN, QUICK, WIDTH, in_eval, inputs, mlp, values
from tests.test_backbone import assert_unchanged, portrait


def lora(layer: LoRA | ConvLoRA, weight: nn.Parameter, delta: Tensor, mode: bool) -> None:
    """As in loralib: the adapter is merged into the weight in eval mode, and taken out of it in training mode."""
    if mode and layer.merged:
        weight.data -= delta
        layer.merged = False
    elif not mode and not layer.merged:
        weight.data += delta
        layer.merged = True


class LoRA(nn.Linear):
    merged = False

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.randn(outputs, 2))

    def train(self, mode: bool = True) -> LoRA:
        super().train(mode)
        lora(self, self.weight, self.b @ self.a, mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        said = F.linear(x, self.weight, self.bias)
        return said if self.merged else said + x @ self.a.T @ self.b.T


class ConvLoRA(nn.Module):
    """Merges into the weight of a part of its own."""

    merged = False

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 1)
        self.a = nn.Parameter(torch.randn(2, 1, 1))

    def train(self, mode: bool = True) -> ConvLoRA:
        super().train(mode)
        lora(self, self.conv.weight, self.a, mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x) if self.merged else self.conv(x) + F.conv1d(x, self.a)
        return out


def adapted() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        conv = nn.Sequential(nn.Unflatten(1, (1, WIDTH)), ConvLoRA(), nn.Flatten())
        return nn.Sequential(conv, LoRA(2 * WIDTH, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))


def adapters_in_training() -> nn.Module:
    return adapted().train()


def one_of_two_merged() -> nn.Module:
    model = adapted().train()
    model[1].eval()
    return model


def norm_in_eval() -> nn.Module:
    model = adapted().train()
    model[2].eval()
    return model


def already_merged() -> nn.Module:
    return adapted().eval()


def used(model: nn.Module) -> FMGP:
    method = FMGP(model, "regression", **QUICK).fit((inputs(), values()))
    method.predict(inputs())
    return method


def merged(model: nn.Module) -> list[bool]:
    return [part.merged for part in model.modules() if isinstance(part, LoRA | ConvLoRA)]


@pytest.mark.parametrize("make", [adapters_in_training, one_of_two_merged, norm_in_eval, already_merged])
def test_adapters_that_merge_in_eval_mode_come_apart_to_the_bit(make: Callable[[], nn.Module]) -> None:
    model = make()
    before, flags = portrait(model), merged(model)
    method = used(model)
    assert_unchanged(model, before)
    assert merged(model) == flags
    assert torch.equal(method.predict(inputs()).latent.mean, in_eval(model, inputs()))


def test_adapters_still_learn_afterwards() -> None:
    model = adapters_in_training()
    used(model)
    model(inputs()).sum().backward()
    for name in ("a", "b"):
        grad = model.get_parameter(f"1.{name}").grad
        assert grad is not None
        assert bool(grad.any())


class Switching(nn.Module):
    """Does something of its own when it is switched to eval mode."""

    extra: Tensor

    def __init__(self, switch: Callable[[Switching], None]) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body, self.last = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, 1)
        self.register_buffer("extra", torch.ones(2))
        self.switch, self.notes = switch, ["a note"]

    def train(self, mode: bool = True) -> Switching:
        super().train(mode)
        if not mode:
            self.switch(self)
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.body(x))
        return out


def gives_other_memory(model: Switching) -> None:
    model.body.weight.data = 2.0 * model.body.weight.data


def replaces_a_weight(model: Switching) -> None:
    model.body.weight = nn.Parameter(2.0 * model.body.weight.detach())


def replaces_a_part(model: Switching) -> None:
    model.body = nn.Linear(WIDTH, HIDDEN)


def adds_a_part(model: Switching) -> None:
    model.reparametrised = nn.Linear(WIDTH, HIDDEN)


def writes_through_a_view(model: Switching) -> None:
    model.body.weight.data[0].zero_()


def writes_many_at_once(model: Switching) -> None:
    with torch.no_grad():
        torch._foreach_mul_([model.body.weight, model.last.weight], 2.0)


def writes_into_a_given_place(model: Switching) -> None:
    torch.add(model.extra.data, 1.0, out=model.extra.data)


def freezes(model: Switching) -> None:
    model.body.requires_grad_(False)


def adds_a_hook(model: Switching) -> None:
    model.body.register_forward_hook(lambda part, args, out: 2.0 * out)


def adds_a_buffer(model: Switching) -> None:
    model.register_buffer("another", torch.zeros(3))


def writes_down(model: Switching) -> None:
    model.notes.append("another")


def falls_over(model: Switching) -> None:
    model.body.weight.data.zero_()
    raise RuntimeError("the switch is stuck")


SWITCHES = [
    gives_other_memory,
    replaces_a_weight,
    replaces_a_part,
    adds_a_part,
    writes_through_a_view,
    writes_many_at_once,
    writes_into_a_given_place,
    freezes,
    adds_a_hook,
    adds_a_buffer,
    writes_down,
]


@pytest.mark.parametrize("switch", SWITCHES)
def test_whatever_eval_does_is_undone(switch: Callable[[Switching], None]) -> None:
    model = Switching(switch).train()
    before, attributes = portrait(model), set(vars(model))
    for _ in range(2):
        used(model)
        assert_unchanged(model, before)
        assert set(vars(model)) == attributes
        assert model.notes == ["a note"]


def test_eval_that_fails_changes_nothing() -> None:
    model = Switching(falls_over).train()
    before = portrait(model)
    with pytest.raises(RuntimeError, match="the switch is stuck"):
        used(model)
    assert_unchanged(model, before)


def test_eval_that_writes_nothing_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Switching(lambda model: None).train()
    used(model)
    copied: list[Any] = []
    monkeypatch.setattr("posthoc.collect.snapshots.Snapshot.copy", copied.append)
    with still(model):
        assert not model.training
    assert not copied


# Networks that write when they are run.


class Writing(nn.Module):
    """Writes to what it is made of in every forward pass, and raises in the pass whose number is `fails_at`."""

    count: Tensor

    def __init__(self, write: Callable[[Writing], Any], fails_at: int | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, 1)
        self.register_buffer("count", torch.zeros(()))
        self.write, self.fails_at, self.passes = write, fails_at, 0

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self)
        self.passes += 1
        if self.passes - 1 == self.fails_at:
            raise RuntimeError("the network fell over")
        out: Tensor = self.last(self.first(x))
        return out


def weight_in_place(model: Writing) -> None:
    model.first.weight.add_(1.0)


def weight_behind_autograd(model: Writing) -> None:
    model.first.weight.data.add_(1.0)


def weight_binarised(model: Writing) -> None:
    model.first.weight.data = model.first.weight.data.sign()


def weight_replaced(model: Writing) -> None:
    model.first.weight = nn.Parameter(model.first.weight + 1.0)


def weight_frozen(model: Writing) -> None:
    model.first.weight.requires_grad_(False)


def buffer_behind_autograd(model: Writing) -> None:
    model.count.data.add_(1.0)


def buffer_replaced(model: Writing) -> None:
    model.count = model.count + 1.0


WRITES: dict[Callable[[Writing], None], str] = {
    weight_in_place: "first.weight",
    weight_behind_autograd: "first.weight",
    weight_binarised: "first.weight",
    weight_replaced: "first.weight",
    weight_frozen: "first.weight",
    buffer_behind_autograd: "count",
    buffer_replaced: "count",
}


@pytest.mark.parametrize("write", WRITES)
def test_what_a_network_writes_when_it_runs_is_undone(write: Callable[[Writing], None]) -> None:
    model = Writing(write).train()
    before = portrait(model)
    method = FMGP(model, "regression", **QUICK).fit([(inputs(), values()), (inputs(seed=8), values(seed=9))])
    assert_unchanged(model, before)
    assert written(model) == [WRITES[write]]
    for _ in range(2):
        method.predict(inputs())
        assert_unchanged(model, before)


@pytest.mark.parametrize("fails_at", [0, 1])
@pytest.mark.parametrize("write", WRITES)
def test_what_a_network_writes_before_it_fails_is_undone(write: Callable[[Writing], None], fails_at: int) -> None:
    model = Writing(write, fails_at).train()
    before = portrait(model)
    with pytest.raises(RuntimeError, match="the network fell over"):
        FMGP(model, "regression", **QUICK).fit([(inputs(), values())] * 2)
    assert_unchanged(model, before)


def test_embeddings_that_are_kept_short_are_as_long_as_they_were() -> None:
    # PyTorch's own layer writes to its weight in forward: to the rows that are looked up, where they are too long.
    model = nn.Sequential(nn.Embedding(10, HIDDEN, max_norm=1.0), nn.Flatten(), nn.Linear(HIDDEN, 1))
    weight = model.get_parameter("0.weight")
    weight.data[:5] *= 1e-3
    before = portrait(model)
    rows = torch.arange(30).remainder(5)[:, None]
    method = FMGP(model, "regression", **QUICK).fit((rows, values()))
    assert_unchanged(model, before)
    method.predict(rows + 5)  # the first batch had nothing to shorten
    assert_unchanged(model, before)


def test_most_networks_write_to_nothing() -> None:
    model = mlp()
    assert written(model) is None
    used(model)
    assert written(model) == []


def test_what_the_user_writes_into_weights_stays() -> None:
    model = Writing(weight_behind_autograd)
    method = used(model)
    model.first.weight.data.fill_(7.0)
    model.last.weight.data.fill_(8.0)
    method.predict(inputs())
    assert bool((model.first.weight == 7.0).all())
    assert bool((model.last.weight == 8.0).all())


def test_a_graph_from_before_can_still_be_differentiated() -> None:
    model = Writing(lambda model: model.last.weight.data.add_(1.0)).eval()
    method = used(model)
    assert written(model) == ["last.weight"]
    said = model(inputs())
    method.predict(inputs())
    said.sum().backward()


def test_network_too_large_to_be_copied_says_what_it_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posthoc.collect.stillness.MOST_COPIED", 0)
    model = Writing(weight_in_place)
    with pytest.warns(PosthocWarning, match=r"writes to first\.weight when it is run.*too large.*Load them again"):
        method = FMGP(model, "regression", **QUICK).fit((inputs(), values()))
    before = portrait(model)
    method.predict(inputs())
    assert_unchanged(model, before)


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
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    FMGP(model, "regression", **QUICK).fit((inputs(), values())).predict(inputs())
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
