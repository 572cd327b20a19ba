"""A head knows the network it was fitted on: another is refused, the same one in another state is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posthoc import FMGP, FileError
from posthoc.collect.fingerprint import fingerprint
from tests.cases import HIDDEN, QUICK, WIDTH, Noisy, inputs, mlp, values
from tests.test_eval_mode import Cache, adapted


def with_activation(activation: nn.Module) -> nn.Module:
    return nn.Sequential(mlp()[0], activation, mlp()[2])


def convolution(stride: int, padding: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        conv = nn.Conv1d(1, 2, 3, stride=stride, padding=padding)
        return nn.Sequential(nn.Unflatten(1, (1, WIDTH)), conv, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(2, 1))


class Attending(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.attend = nn.Linear(WIDTH, 4), nn.MultiheadAttention(4, heads)
            self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)[None]
        return self.last(self.attend(h, h, h)[0][0])


def saved(model: nn.Module, folder: Path) -> Path:
    path = folder / "head.safetensors"
    FMGP(model, "regression", **QUICK).fit((inputs(), values())).save(path)
    return path


PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "another activation": (lambda: with_activation(nn.GELU()), lambda: with_activation(nn.ReLU())),
    "another slope": (lambda: with_activation(nn.LeakyReLU(0.1)), lambda: with_activation(nn.LeakyReLU(0.2))),
    "another form": (lambda: with_activation(nn.GELU()), lambda: with_activation(nn.GELU("tanh"))),
    "another stride": (lambda: convolution(1, 1), lambda: convolution(2, 1)),
    "another padding": (lambda: convolution(1, 1), lambda: convolution(1, 2)),
    "other heads": (lambda: Attending(1), lambda: Attending(2)),
    "one more layer": (lambda: nn.Sequential(mlp()), lambda: nn.Sequential(mlp(), nn.Softplus())),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_network_of_equal_weights_and_other_layers_is_refused(pair: str, tmp_path: Path) -> None:
    make, other = PAIRS[pair]
    path = saved(make(), tmp_path)
    FMGP.load(path, model=make())
    with pytest.raises(FileError, match=r"Expected the network.*found another.*its layers .* differ\. Load the right"):
        FMGP.load(path, model=other())


def changed(index: int, layer: nn.Module) -> nn.Module:
    model = Noisy()
    model.body[index] = layer
    return model


def used_before() -> nn.Module:
    model = Noisy().eval()
    model(inputs())
    model.register_forward_hook(lambda part, args, out: None)
    return model.requires_grad_(False)


STATES: dict[str, Callable[[], nn.Module]] = {
    "training": lambda: Noisy().train(),
    "eval": lambda: Noisy().eval(),
    "without dropout": lambda: changed(3, nn.Dropout(0.0)),
    "working in place": lambda: changed(2, nn.ReLU(inplace=True)),
    "used before": used_before,
    "of another module": lambda: type("Noisy", (Noisy,), {"__module__": "elsewhere"})(),
}


@pytest.mark.parametrize("state", STATES)
def test_the_same_network_in_another_state_is_taken(state: str, tmp_path: Path) -> None:
    FMGP.load(saved(Noisy(), tmp_path), model=STATES[state]())


@pytest.mark.parametrize("fitted_after_use", [True, False])
@pytest.mark.parametrize("length", [0, 2])
def test_caches_that_come_and_grow_are_no_sign_of_another_network(length, fitted_after_use, tmp_path):
    fresh, used = (nn.Sequential(Cache(length), mlp()) for _ in range(2))
    used(inputs())
    assert fresh[0].made != used[0].made
    first, second = (used, fresh) if fitted_after_use else (fresh, used)
    FMGP.load(saved(first, tmp_path), model=second)


PROGRAMS: dict[str, Any] = {
    "scripted": torch.jit.script,
    "traced": lambda model: torch.jit.trace(model, inputs(2)),
    "symbolic": torch.fx.symbolic_trace,
    "compiled in place": lambda model: model.compile(backend="eager") or model,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("form", PROGRAMS)
def test_a_program_made_of_the_network_is_the_network(form: str, tmp_path: Path) -> None:
    program = PROGRAMS[form]
    FMGP.load(saved(mlp(), tmp_path), model=program(mlp()))
    path = saved(program(mlp()), tmp_path)
    FMGP.load(path, model=mlp())
    with pytest.raises(FileError, match="its weights or buffers differ"):
        FMGP.load(path, model=mlp(seed=1))


@pytest.mark.filterwarnings("ignore")
def test_wrapped_and_quantised_networks_are_known_too() -> None:
    wrappers: list[Any] = [
        lambda model: torch.compile(model, backend="eager"),
        nn.DataParallel,
        lambda model: torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8),
    ]
    for wrap in wrappers:
        assert fingerprint(wrap(mlp())) == fingerprint(wrap(mlp()))
        assert fingerprint(wrap(mlp())) != fingerprint(wrap(with_activation(nn.ReLU())))


def test_fingerprint_leaves_the_network_alone_and_knows_the_order_of_its_layers() -> None:
    model = adapted().train()
    before = copy.deepcopy(model.state_dict())
    assert fingerprint(model) == fingerprint(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(part.training for part in model.modules())
    first = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Tanh())
    second = nn.Sequential(first[0], first[2], first[1])
    assert fingerprint(first) != fingerprint(second)
