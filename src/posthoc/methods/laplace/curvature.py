"""The curvature of a last layer's loss (its generalised Gauss-Newton matrix), in three forms, each by its eigenvalues.

With features φ (a constant among them where there is a bias) and Λ = diag(p) - ppᵀ of a point's class probabilities,
the matrix is Σ Λ ⊗ φφᵀ over the data. In regression Λ is diagonal and the same for all points, so that all three forms
are Kronecker products. A Gaussian prior of precision δ adds δ to every eigenvalue; the inverse is the weights'
covariance, and J (·)⁻¹ Jᵀ that of the outputs, never written out for more than it must.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from posthoc.errors import OptionError
from posthoc.predictive.latent import FactorLatent, IndependentLatent, Latent

__all__ = ["FORMS", "Curvature", "Dense", "Diagonal", "Form", "Kronecker", "of_classes", "of_outputs", "require_room"]

Form = Literal["kron", "full", "diag"]
FORMS: tuple[Form, ...] = ("kron", "full", "diag")
VALUES_AT_ONCE = 2**22
"""Numbers in the largest tensor made of data: 32 MB."""
COPIES = 4
"""Matrices of one size that exist at once: the sum, its eigenvectors and what it takes to find them."""


class Curvature(nn.Module, ABC):
    """A positive semi-definite matrix over the weights, C outputs x D features."""

    @abstractmethod
    def eigenvalues(self) -> Tensor:
        """All of them; (C, D) where outputs may have noises of their own."""

    @abstractmethod
    def latent(
        self,
        features: Tensor,  # (N, D)
        precision: Tensor,  # (), δ
        noise: Tensor,  # () or, in regression, (C,)
    ) -> Latent:
        """The Gaussian over the outputs that N(0, (curvature/noise + δ)⁻¹) over the weights gives."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Numbers that a prediction holds for each point."""


class Kronecker(Curvature):
    """U diag(l) Uᵀ ⊗ Q diag(m) Qᵀ, over outputs and features; without U, the outputs are independent."""

    out_values: Tensor
    in_values: Tensor
    in_vectors: Tensor
    out_vectors: Tensor | None

    def __init__(
        self,
        out_values: Tensor,  # (C,), l
        in_values: Tensor,  # (D,), m
        in_vectors: Tensor,  # (D, D), Q
        out_vectors: Tensor | None = None,  # (C, C), U
    ) -> None:
        super().__init__()
        hold(self, out_values=out_values, in_values=in_values, in_vectors=in_vectors, out_vectors=out_vectors)

    def eigenvalues(self) -> Tensor:  # (C, D)
        return torch.outer(self.out_values, self.in_values)

    def latent(self, features: Tensor, precision: Tensor, noise: Tensor) -> Latent:
        total = torch.outer(self.out_values / noise, self.in_values) + precision
        along = (features @ self.in_vectors).square() @ total.reciprocal().mT  # (N, C)
        return IndependentLatent(along) if self.out_vectors is None else RotatedLatent(along, self.out_vectors)

    @property
    def width(self) -> int:
        return max(len(self.out_values), len(self.in_values))


class Diagonal(Curvature):
    """A number for every weight."""

    values: Tensor

    def __init__(
        self,
        values: Tensor,  # (C, D)
    ) -> None:
        super().__init__()
        hold(self, values=values)

    def eigenvalues(self) -> Tensor:
        return self.values

    def latent(self, features: Tensor, precision: Tensor, noise: Tensor) -> Latent:
        return IndependentLatent(features.square() @ (self.values / noise + precision).reciprocal().mT)

    @property
    def width(self) -> int:
        return max(self.values.shape)


class Dense(Curvature):
    """The whole matrix, weights in the order (output, feature)."""

    values: Tensor
    vectors: Tensor

    def __init__(
        self,
        values: Tensor,  # (C D,)
        vectors: Tensor,  # (C, D, C D)
    ) -> None:
        super().__init__()
        hold(self, values=values, vectors=vectors)

    def eigenvalues(self) -> Tensor:
        return self.values

    def latent(self, features: Tensor, precision: Tensor, noise: Tensor) -> Latent:
        return FactorLatent(((features @ self.vectors) * (self.values / noise + precision).rsqrt()).transpose(0, 1))

    @property
    def width(self) -> int:
        return len(self.vectors) * len(self.values)


class RotatedLatent(Latent):
    """V = U diag(a) Uᵀ, with the same U at every point."""

    def __init__(
        self,
        along: Tensor,  # (N, C), a
        vectors: Tensor,  # (C, C), U
    ) -> None:
        self.along, self.vectors = along, vectors

    @property
    def variance(self) -> Tensor:
        return self.along @ self.vectors.square().mT

    def covariance(self) -> Tensor:
        return (self.vectors * self.along[:, None, :]) @ self.vectors.mT

    def difference(self, top: Tensor) -> Tensor:
        variance, label = self.variance, top[:, None]
        shared = (self.along * self.vectors[top]) @ self.vectors.mT
        apart = variance + variance.gather(-1, label) - 2.0 * shared
        return apart.clamp_min(0.0).scatter(-1, label, 0.0)

    def perturb(self, noise: Tensor) -> Tensor:
        return (noise * self.along.sqrt()) @ self.vectors.mT


def of_outputs(
    parts: Iterable[Tensor],  # features (n, D), some rows at a time
    num_outputs: int,
    form: Form,
    *,
    bias: bool,  # whether the last feature is the constant
    share: float = 1.0,  # how many points each row stands for
) -> Kronecker:
    """The curvature of a regression's loss under unit noise, summed over the data."""
    rows, total = 0, None
    for x in parts:
        rows, total = rows + len(x), add(total, x.mT @ x)
    assert total is not None
    gram = total / rows
    values, vectors = eigen({"full": gram, "kron": apart(gram, bias), "diag": gram.diag().diag()}[form])
    return Kronecker(values.new_full((num_outputs,), share * rows), values, vectors)


def of_classes(
    parts: Iterable[tuple[Tensor, Tensor]],  # features (n, D) and class probabilities (n, C), some rows at a time
    form: Form,
    *,
    bias: bool,  # whether the last feature is the constant
    share: float = 1.0,  # how many points each row stands for
) -> Curvature:
    """The curvature of a classifier's loss, summed over the data."""
    if form == "kron":
        return kronecker_of_classes(parts, bias, share)
    return dense_of_classes(parts, share) if form == "full" else diagonal_of_classes(parts, share)


def kronecker_of_classes(parts: Iterable[tuple[Tensor, Tensor]], bias: bool, share: float) -> Kronecker:
    """ΣΛ ⊗ the mean of φφᵀ, the bias as a layer of its own."""
    rows, gram, hessian = 0, None, None
    for x, p in parts:
        rows, gram = rows + len(x), add(gram, x.mT @ x)
        hessian = add(hessian, p.sum(0).diag() - p.mT @ p)
    assert gram is not None
    assert hessian is not None
    out_values, out_vectors = eigen(share * hessian)
    in_values, in_vectors = eigen(apart(gram / rows, bias))
    return Kronecker(out_values, in_values, in_vectors, out_vectors)


def diagonal_of_classes(parts: Iterable[tuple[Tensor, Tensor]], share: float) -> Diagonal:
    """Σ p_c (1 - p_c) φ_j²."""
    total = None
    for x, p in parts:
        total = add(total, (p * (1.0 - p)).mT @ x.square())
    assert total is not None
    return Diagonal(share * total)


def dense_of_classes(parts: Iterable[tuple[Tensor, Tensor]], share: float) -> Dense:
    """Σ diag(p) ⊗ φφᵀ less Σ (p ⊗ φ)(p ⊗ φ)ᵀ, block by block."""
    total: Tensor | None = None
    for many_x, many_p in parts:
        c, d = many_p.shape[1], many_x.shape[1]
        total = many_x.new_zeros(c * d, c * d) if total is None else total
        rows = max(1, VALUES_AT_ONCE // (c * d))
        for x, p in zip(many_x.split(rows), many_p.split(rows), strict=True):
            weighted = (p[:, :, None] * x[:, None, :]).flatten(1)  # (n, C D)
            for k in range(c):  # the blocks on and below the diagonal: eigh reads no others
                own, rest = slice(k * d, (k + 1) * d), slice(k * d, c * d)
                total[rest, own].addmm_(weighted[:, rest].mT, weighted[:, own], alpha=-1.0)
                total[own, own].addmm_(weighted[:, own].mT, x)
    assert total is not None
    values, vectors = eigen(total.mul_(share))
    return Dense(values, vectors.reshape(c, d, c * d))


def require_room(form: Form, num_outputs: int, num_features: int, *, classes: bool, gigabytes: float) -> None:
    """Refuses, before the work, a form whose matrices would not fit."""
    joint = num_outputs * num_features
    numbers = {
        "full": joint**2 if classes else num_features**2,
        "kron": num_features**2 + (num_outputs**2 if classes else 0) + joint,
        "diag": joint,
    }
    needed = {name: COPIES * 8 * count / 1e9 for name, count in numbers.items()}
    if needed[form] > gigabytes:
        others = [f'curvature="{name}" ({needed[name]:.2g} GB)' for name in FORMS if needed[name] <= gigabytes]
        instead = f"Use {' or '.join(others)}, or allow more" if others else "Allow more"
        raise OptionError(
            f'Expected curvature="{form}" to fit into {gigabytes:g} GB, found that {num_outputs} outputs x '
            f"{num_features} features need {needed[form]:.3g} GB. {instead} with max_gigabytes=...."
        )


def hold(module: nn.Module, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)


def eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, none below zero, and eigenvectors."""
    values, vectors = torch.linalg.eigh(matrix)
    # Laid out as they come from a file, so that a saved head gives the same numbers to the last bit.
    return values.clamp_min(0.0), vectors.contiguous()


def apart(gram: Tensor, bias: bool) -> Tensor:
    """The mean of φφᵀ with the weights and the bias as two layers, which is how KFAC takes them."""
    if not bias:
        return gram
    return torch.block_diag(gram[:-1, :-1], gram[-1:, -1:])


def add(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part
