"""The parts of SNGP: random Fourier features, the Gaussian over the weights of a layer on them, bounded layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

__all__ = ["FeatureLaplace", "RandomFeatures", "SpectralBound", "bounded", "settle_bounds", "spectral_norm"]

WARM_UP, EACH_TIME = 30, 1
"""Power iterations before training, and at every step of it."""


class RandomFeatures(nn.Module):
    """φ(h) = √(2/D) cos(W h / lengthscale + b), W standard normal, b uniform: φ(h)ᵀφ(h') ≈ exp(-|h - h'|² / 2ℓ²)."""

    def __init__(self, width: int, num_features: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.register_buffer("frequency", torch.randn(num_features, width, generator=generator))
        self.register_buffer("phase", 2.0 * math.pi * torch.rand(num_features, generator=generator))
        self.register_buffer("lengthscale", torch.ones(()))
        self.frequency: Tensor  # (D, F)
        self.phase: Tensor  # (D,)
        self.lengthscale: Tensor  # ()

    def forward(self, h: Tensor) -> Tensor:  # (N, F) -> (N, D)
        angle = nn.functional.linear(h / self.lengthscale, self.frequency, self.phase)
        return math.sqrt(2.0 / len(self.phase)) * angle.cos()


class FeatureLaplace(nn.Module):
    """The posterior covariance of the weights of a linear layer on features: (τ_c I + r_c G)⁻¹ = U diag(v_c) Uᵀ for
    output c. G = Σ w φφᵀ is the same for all outputs, so that one eigendecomposition serves them."""

    def __init__(
        self,
        basis: Tensor,  # (D, D)
        variances: Tensor,  # (D, C)
    ) -> None:
        super().__init__()
        self.register_buffer("basis", basis)
        self.register_buffer("variances", variances)
        self.basis: Tensor
        self.variances: Tensor

    @classmethod
    def of(
        cls,
        gram: Tensor,  # (D, D), float64
        prior: Tensor,  # (C,): τ
        weight: Tensor,  # (C,): r
    ) -> FeatureLaplace:
        values, basis = torch.linalg.eigh(gram)
        return cls(basis, 1.0 / (prior + values.clamp_min(0.0)[:, None] * weight))

    def variance(self, features: Tensor) -> Tensor:  # (N, C)
        """Var(φᵀβ_c)."""
        return (features.double() @ self.basis).square() @ self.variances

    def deviations(self, features: Tensor, samples: int, generator: torch.Generator) -> Tensor:  # (S, N, C)
        """φᵀ(β_c - its mean) for draws of β, the same ones for every row and every call with equal generators."""
        along, std = features.double() @ self.basis, self.variances.sqrt()
        drawn = []
        for _ in range(samples):
            noise = torch.randn(std.shape, dtype=std.dtype, device=std.device, generator=generator)
            drawn.append(along @ (std * noise))
        return torch.stack(drawn)


class SpectralBound(nn.Module):
    """A parametrisation that scales a weight down to a spectral norm of `bound` where it has a greater one, by power
    iteration. A convolution's weight is taken as the matrix (out, in × kernel), as is usual."""

    def __init__(self, weight: Tensor, bound: float, generator: torch.Generator) -> None:
        super().__init__()
        self.bound = bound
        start = torch.randn(len(weight), generator=generator)
        self.register_buffer("left", start.to(weight))
        self.left: Tensor  # (out,)
        self._iterate(weight, WARM_UP)

    @torch.no_grad()
    def _iterate(self, weight: Tensor, times: int) -> Tensor:  # (in × kernel,)
        """Brings the singular vectors up to date, and gives the right one."""
        matrix, left = weight.flatten(1), self.left
        for _ in range(times):
            right = nn.functional.normalize(matrix.mT @ left, dim=0)
            left = nn.functional.normalize(matrix @ right, dim=0)
        self.left = left  # a new tensor: the graph of an earlier use keeps its own
        return right

    def forward(self, weight: Tensor) -> Tensor:
        right = self._iterate(weight, EACH_TIME)
        norm = self.left @ (weight.flatten(1) @ right)
        return weight / (norm / self.bound).clamp_min(1.0)


def bounded(network: nn.Module, last: str, bound: float, generator: torch.Generator) -> None:
    """Bounds the weights of the Linear and convolution layers of a network, except the last one and frozen ones."""
    for name, layer in list(network.named_modules()):
        if name != last and isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            weight = layer._parameters.get("weight")
            if weight is not None and weight.requires_grad:
                parametrize.register_parametrization(layer, "weight", SpectralBound(weight, bound, generator))


@torch.no_grad()
def settle_bounds(network: nn.Module) -> None:
    """Makes ordinary weights of bounded ones, within the bound exactly."""
    for layer in list(network.modules()):
        if not parametrize.is_parametrized(layer, "weight"):
            continue
        bound = layer.parametrizations.weight[0]  # type: ignore[union-attr, index]
        if isinstance(bound, SpectralBound):
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
            weight = layer.get_parameter("weight")
            weight.div_((spectral_norm(weight) / bound.bound).clamp_min(1.0).to(weight.dtype))


def spectral_norm(weight: Tensor) -> Tensor:  # (), float64
    """The largest singular value, exactly."""
    matrix = weight.detach().flatten(1).double()
    gram = matrix @ matrix.mT if matrix.shape[0] <= matrix.shape[1] else matrix.mT @ matrix
    return torch.linalg.eigvalsh(gram)[-1].clamp_min(0.0).sqrt()


@contextmanager
def listening(layer: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """What a layer is given and what it says of it, each time it is run inside."""
    heard: list[tuple[Tensor, Tensor]] = []

    def note(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> None:
        # A copy, since a later layer may work in place on what this one said.
        heard.append((args[0] if args else kwargs["input"], output.clone()))

    handle = layer.register_forward_hook(note, with_kwargs=True)
    try:
        yield heard
    finally:
        handle.remove()
