"""The curvature of a last layer's loss (its generalized Gauss-Newton matrix), in three forms, each by its eigenvalues.

With features φ (a constant among them where there is a bias) and Λ = diag(p) - ppᵀ of a point's class probabilities,
the matrix is Σ Λ ⊗ φφᵀ over the data. In regression Λ is diagonal and the same for all points, so that all three forms
are Kronecker products. A Gaussian prior of precision δ adds δ to every eigenvalue; the inverse is the weights'
covariance, and J (·)⁻¹ Jᵀ that of the outputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from posthoc.errors import OptionError
from posthoc.numerics import rows_that_fit
from posthoc.predictive.latent import FactorLatent, IndependentLatent, Latent

Form = Literal["kron", "full", "diag"]
COPIES = 4
"""Matrices of one size that exist at once: the sum, its eigenvectors and their work space."""


class Separable(nn.Module):
    """Eigenvalues (C, D) and eigenvectors U ⊗ Q over outputs, (C, C), and features, (D, D). Without U the outputs are
    independent, without Q the features are."""

    def __init__(self, values: Tensor, in_vectors: Tensor | None = None, out_vectors: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("values", values)
        self.values: Tensor
        self.register_buffer("in_vectors", in_vectors)
        self.in_vectors: Tensor | None
        self.register_buffer("out_vectors", out_vectors)
        self.out_vectors: Tensor | None
        self.width = max(values.shape)  # numbers that a prediction holds for each point

    def latent(self, features: Tensor, precision: Tensor, noise: Tensor) -> Latent:
        """The Gaussian over the outputs at features (N, D) if the weights have the covariance (curvature/noise + δ)⁻¹,
        with the precision δ, (), and the noise, () or in regression (C,)."""
        total = self.values / noise.reshape(-1, 1) + precision  # (C, D)
        along = features if self.in_vectors is None else features @ self.in_vectors
        variance = along.square() @ total.reciprocal().mT  # (N, C)
        return IndependentLatent(variance) if self.out_vectors is None else RotatedLatent(variance, self.out_vectors)


class Dense(nn.Module):
    """The whole matrix, weights in the order (output, feature)."""

    def __init__(self, values: Tensor, vectors: Tensor) -> None:  # (C D,), (C, D, C D)
        super().__init__()
        self.register_buffer("values", values)
        self.values: Tensor
        self.register_buffer("vectors", vectors)
        self.vectors: Tensor
        self.width = len(vectors) * len(values)

    def latent(self, features: Tensor, precision: Tensor, noise: Tensor) -> Latent:
        """As that of `Separable`."""
        return FactorLatent(((features @ self.vectors) * (self.values / noise + precision).rsqrt()).transpose(0, 1))


Curvature = Separable | Dense
"""A positive semi-definite matrix over the weights, C outputs x D features, by its eigenvalues `values`."""


class RotatedLatent(Latent):
    """V = U diag(a) Uᵀ, with the same U at every point."""

    def __init__(self, along: Tensor, vectors: Tensor) -> None:  # (N, C), a, and (C, C), U
        self.along, self.vectors = along, vectors

    @property
    def variance(self) -> Tensor:
        return self.along @ self.vectors.square().mT

    def covariance(self) -> Tensor:
        return (self.vectors * self.along[:, None, :]) @ self.vectors.mT

    def difference(self, top: Tensor) -> Tensor:
        variance, label = self.variance, top[:, None]
        shared = (self.along * self.vectors[top]) @ self.vectors.mT
        total = variance + variance.gather(-1, label) - 2.0 * shared
        return total.clamp_min(0.0).scatter(-1, label, 0.0)

    def perturb(self, noise: Tensor) -> Tensor:
        return (noise * self.along.sqrt()) @ self.vectors.mT


def sum_curvature(
    parts: Iterable[tuple[Tensor, Tensor]], form: Form, num_outputs: int, *, classes: bool, bias: bool, share: float
) -> Curvature:
    """The curvature of the loss, summed over the data; in regression under unit noise.

    `parts` are some rows at a time: features (n, D), the last of them the constant if there is a `bias`, and the
    probabilities of `classes` (n, C), which regression ignores. Each row stands for `share` points.
    """
    rows = 0
    sums: list[Tensor] = []
    for x, p in parts:
        more = sums_of_classes(x, p, form) if classes else [x.mT @ x]
        sums = [total.add_(part) for total, part in zip(sums, more, strict=True)] if sums else more
        rows += len(x)
    if classes and form == "diag":
        return Separable(share * sums[0])
    if classes and form == "full":
        values, vectors = eigen(share * sums[0])
        return Dense(values, vectors.reshape(num_outputs, -1, len(values)))
    gram = sums[0] / rows
    if form == "diag":
        return Separable((share * rows * gram.diag()).repeat(num_outputs, 1))
    if form == "kron" and bias:  # KFAC takes the weights and the bias as two layers
        gram = torch.block_diag(gram[:-1, :-1], gram[-1:, -1:])
    in_values, in_vectors = eigen(gram)
    if not classes:
        return Separable((share * rows * in_values).repeat(num_outputs, 1), in_vectors)
    out_values, out_vectors = eigen(share * sums[1])
    return Separable(torch.outer(out_values, in_values), in_vectors, out_vectors)


def sums_of_classes(x: Tensor, p: Tensor, form: Form) -> list[Tensor]:
    """What is summed over the data of a classifier: Σφφᵀ and ΣΛ, or Σ p(1 - p) φ², or the whole matrix."""
    if form == "kron":
        return [x.mT @ x, p.sum(0).diag() - p.mT @ p]
    if form == "diag":
        return [(p * (1.0 - p)).mT @ x.square()]
    c, d = p.shape[1], x.shape[1]
    total, rows = x.new_zeros(c, d, c, d), rows_that_fit(c * d)
    for some_x, some_p in zip(x.split(rows), p.split(rows), strict=True):
        weighted = some_p[:, :, None] * some_x[:, None, :]  # (n, C, D)
        flat = weighted.flatten(1)
        total.view(c * d, c * d).addmm_(flat.mT, flat, alpha=-1.0)
        for k in range(c):
            total[k, :, k] += weighted[:, k].mT @ some_x
    return [total.view(c * d, c * d)]


def require_room(form: Form, num_outputs: int, num_features: int, *, classes: bool, gigabytes: float) -> None:
    """Refuses a form whose matrices would not fit."""
    joint = num_outputs * num_features
    sides = {"kron": [num_features, num_outputs * classes], "full": [joint if classes else num_features], "diag": []}
    needed = COPIES * 8 * (joint + sum(side**2 for side in sides[form])) / 1e9
    if needed > gigabytes:
        advice = 'curvature="kron" or "diag", or allow more with max_gigabytes'
        raise OptionError(f'curvature="{form}" needs {needed:.3g} GB, {gigabytes:g} GB are allowed. Use {advice}.')


def eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, none below zero, and eigenvectors."""
    values, vectors = torch.linalg.eigh(matrix)
    # Laid out as they come from a file, so that a saved head gives the same numbers to the last bit.
    return values.clamp_min(0.0), vectors.contiguous()
