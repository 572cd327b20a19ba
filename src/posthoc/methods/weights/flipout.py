"""Gaussian noise on the weights of Linear and convolution layers: flipout for training, plain draws for predicting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Draw", "Reweighted", "flipout", "noisy_parameters", "sampled"]

KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
FORWARDS = {kind.forward for kind in KINDS}
"""A subclass with a forward of its own may do anything with its weights, so it is left alone."""


def layers(network: nn.Module) -> list[nn.Module]:
    return [part for part in network.modules() if isinstance(part, KINDS) and type(part).forward in FORWARDS]


def noisy_parameters(network: nn.Module) -> dict[str, Tensor]:
    """The weights and biases of Linear and convolution layers by name: those that no layer of another kind shares, and
    that are not frozen."""
    own = set(layers(network))
    ours = {id(layer._parameters.get(part)) for layer in own for part in ("weight", "bias")}
    others = {id(p) for part in network.modules() if part not in own for p in part._parameters.values()}
    wanted = ours - others
    return {name: p for name, p in network.named_parameters() if id(p) in wanted and p.requires_grad}


class Draw:
    """One draw of the noise of every weight, with the signs that turn it into another one for each example."""

    def __init__(self, std: Mapping[str, Tensor], generator: torch.Generator) -> None:
        self.std, self.generator = std, generator
        self.deltas: dict[str, Tensor] = {}
        self.flips: dict[tuple[str, str, tuple[int, ...]], Tensor] = {}

    def delta(self, name: str) -> Tensor:
        """σ∘ε, differentiable in σ."""
        if name not in self.deltas:
            self.deltas[name] = normal(self.std[name], self.generator)
        return self.deltas[name]

    def signs(self, name: str, side: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """±1, the same whenever a weight is used again at the same width."""
        key = name, side, shape
        if key not in self.flips:
            coin = torch.randint(2, shape, device=like.device, generator=self.generator)
            self.flips[key] = (2 * coin - 1).to(like.dtype)
        return self.flips[key]


@contextmanager
def flipout(network: nn.Module, std: Mapping[str, Tensor], generator: torch.Generator) -> Iterator[Draw]:
    """Inside, the network runs as if every example had weights of its own, w + σ∘ε, with σ given by parameter name
    (Wen et al. 2018): one ΔW = σ∘ε for the batch, and signs r, s for each example n,

        (W + ΔW∘r_n s_nᵀ) x_n = W x_n + r_n∘(ΔW (s_n∘x_n)).

    The first axis of what a layer is given counts the examples. A layer that is run twice, or shares its weights with
    another, has the same noise each time. Afterwards the network is as it was."""
    names = {id(p): name for name, p in network.named_parameters()}
    draw = Draw(std, generator)
    handles = []
    try:
        for layer in layers(network):
            found = {part: names.get(id(layer._parameters.get(part))) for part in ("weight", "bias")}
            own = {part: name for part, name in found.items() if name is not None and name in std}
            if own:
                # Before the user's own hooks, which are to see what the layers after it see.
                hook = adding(draw, own)
                handles.append(layer.register_forward_hook(hook, with_kwargs=True, prepend=True))
        yield draw
    finally:
        for handle in handles:
            handle.remove()


def adding(draw: Draw, own: dict[str, str]) -> Callable[..., Tensor]:
    """The hook that adds to a layer's output what noise on its parameters does."""
    key = own.get("weight") or own["bias"]

    def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        x: Tensor = args[0] if args else kwargs["input"]
        deltas = {part: draw.delta(name).to(output.dtype) for part, name in own.items()}
        weight, bias = deltas.get("weight", torch.zeros_like(layer.weight)), deltas.get("bias")
        flipped = x * draw.signs(key, "in", sign_shape(layer, x), x)
        if isinstance(layer, nn.Linear):
            noise = F.linear(flipped, weight, bias)
        else:
            noise = layer._conv_forward(flipped, weight, bias)  # which knows its padding, stride and groups
        return output + noise * draw.signs(key, "out", sign_shape(layer, output), output)

    return hook


def sign_shape(layer: nn.Module, values: Tensor) -> tuple[int, ...]:
    """One sign for each example and channel, shared by the places (or times) at which the same weights are used."""
    if isinstance(layer, nn.Linear):
        batch = values.shape[:1] if values.ndim > 1 else ()
        return (*batch, *[1] * (values.ndim - len(batch) - 1), values.shape[-1])
    places = len(layer.kernel_size)  # type: ignore[arg-type]
    return (*values.shape[: values.ndim - places], *[1] * places)


def sampled(mean: Mapping[str, Tensor], std: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """One draw of all weights, in the order of their names, which a file may have changed."""
    return {name: mean[name] + normal(std[name], generator).to(mean[name].dtype) for name in sorted(std)}


def normal(std: Tensor, generator: torch.Generator) -> Tensor:
    return std * torch.randn(std.shape, dtype=std.dtype, device=std.device, generator=generator)


class Reweighted(nn.Module):
    """A network that is run with other values for some of its parameters, and is not changed."""

    def __init__(self, network: nn.Module, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.call = network, dict(values)  # a tuple, so that the network does not become a part of this

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        network, values = self.call
        return torch.func.functional_call(network, values, args, kwargs)
