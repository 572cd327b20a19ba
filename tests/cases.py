"""Small networks, data and comparisons that several test files share."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posthoc import Outputs

QUICK: dict[str, Any] = {"steps": 5, "num_inducing": 4, "batch_size": 16}
"""Options of a fit that takes milliseconds."""

N, WIDTH, HIDDEN = 30, 3, 6


def mlp(outputs: int = 1, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """WIDTH inputs, HIDDEN features (layer "1"), some outputs; always the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs)).to(dtype)


class Noisy(nn.Module):
    """BatchNorm and Dropout: it answers otherwise, and changes its buffers, unless it is in eval mode."""

    def __init__(self, outputs: int = 1, *, flat: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.body = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Dropout(0.5))
            self.last = nn.Linear(HIDDEN, outputs)
            nn.init.normal_(self.body.get_submodule("1").get_buffer("running_mean"))
        self.flat = flat

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.body(x))
        return out.squeeze(-1) if self.flat else out


class AnyWidth(nn.Module):
    """A network that takes inputs of every width."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.sum(1, keepdim=True))


class Attentive(nn.Module):
    """A transformer layer between an embedding of tokens and a linear layer that share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 6, batch_first=True)
        self.tied = nn.Linear(8, 5)
        self.tied.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tied(self.block(self.embedding(tokens)).mean(1))


def inputs(n: int = N, *, dtype: torch.dtype = torch.float32, seed: int = 2) -> Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def values(n: int = N, outputs: int = 1, *, seed: int = 3) -> Tensor:
    return torch.randn(n, outputs, generator=torch.Generator().manual_seed(seed))


def labels(n: int = N, classes: int = 3, *, seed: int = 4) -> Tensor:
    return torch.randint(classes, (n,), generator=torch.Generator().manual_seed(seed))


def recorded(model: Any, x: Tensor, y: Tensor | None = None) -> Outputs:
    """What `mlp` says of x in eval mode, worked out by hand: outputs, features and inputs."""
    with torch.no_grad():
        features = model[:-1](x)
        return Outputs(model[-1](features), y, features, x)


def in_eval(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The model's answer in eval mode, from a copy so that the model itself stays untouched."""
    with torch.no_grad():
        return copy.deepcopy(model).eval()(*args, **kwargs)


def numbers(method: Any) -> dict[str, Tensor]:
    """All that was learned."""
    return {name: tensor.clone() for name, tensor in method.head.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two states are equal to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def answers(pred: Any) -> dict[str, Tensor]:
    """Every tensor of a predictive, for comparing two to the bit."""
    found = {**vars(pred), **vars(pred.latent)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def hold_open(path: str) -> None:
    """Write to a named pipe and keep it open until this process is ended."""
    import signal

    with open(path, "wb", buffering=0) as pipe:
        pipe.write(b"1")
        signal.pause()


class Trap:
    """Runs when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def reloaded(method: Any, folder: Path, **options: Any) -> Any:
    """The method after it was saved and loaded."""
    method.save(folder / "head")
    return type(method).load(folder / "head", **options)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
