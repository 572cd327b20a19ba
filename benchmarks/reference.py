"""FMGP as one would first write it down from the paper: dense kernels over all pairs of classes, explicit inverses, the
network run in every step, float64 throughout, distances by the differences of the paper's formula (products would be
faster). It computes the objective of `posthoc.fmgp`; the benchmark checks that before timing it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from posthoc.fmgp.fitted import FittedFMGP
from posthoc.kernels import RBF
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.gaussian import Gaussian

__all__ = ["DenseFMGP", "endless", "loader", "train_reference"]

Look = Callable[..., tuple[Tensor, Tensor]]


class DenseFMGP(nn.Module):
    """The fixed-mean process with an RBF kernel, its parameters copied from a head of ours."""

    def __init__(self, head: FittedFMGP, num_data: int) -> None:
        super().__init__()
        process, likelihood = head.process, head.likelihood
        kernel = cast(RBF, process.kernel)
        (space,) = head.coordinates.spaces
        self.num_data, self.num_outputs = num_data, process.num_outputs
        classes = cast(Categorical, likelihood)
        level = likelihood.noise if isinstance(likelihood, Gaussian) else classes.relative_temperature
        alone = torch.eye(self.num_outputs, device=process.l_raw.device)
        coupling = process.coupling.factor if process.coupling is not None else alone
        self.z = parameter(process.z[space])
        self.l = parameter(process.l_raw)
        self.log_lengthscale = parameter(kernel.log_lengthscale)
        self.log_amplitude = parameter(kernel.log_amplitude)
        self.b_factor = parameter(coupling, trained=self.num_outputs > 1)
        self.log_level = parameter(level.log())  # σ² or τ
        self.z_class = process.z_class
        self.location = head.coordinates.get_buffer(f"{space}_location")
        self.scale = head.coordinates.get_buffer(f"{space}_scale")
        self.target_scale = likelihood.scale if isinstance(likelihood, Gaussian) else None
        self.unit = likelihood.unit if isinstance(likelihood, Categorical) else None

    def b(self) -> Tensor:  # (C, C)
        return self.b_factor.tril() @ self.b_factor.tril().mT

    def kernel(self, a: Tensor, b: Tensor) -> Tensor:  # (N, M, C, C)
        """B_cc' k(x, x') for every pair of points and of classes."""
        difference = (a[:, None, :] - b[None, :, :]) / self.log_lengthscale.exp()
        k = self.log_amplitude.exp() * (-0.5 * difference.square().sum(-1)).exp()
        return k[:, :, None, None] * self.b()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The covariance across outputs at each point (N, C, C), and the KL."""
        x = (x.double() - self.location) / self.scale
        m = torch.arange(len(self.z), device=x.device)
        kxx = (self.log_amplitude.exp() * self.b()).expand(len(x), -1, -1)
        kxz = self.kernel(x, self.z)[:, m, :, self.z_class].transpose(0, 1)  # (N, M, C)
        kzz = self.kernel(self.z, self.z)[m[:, None], m, self.z_class[:, None], self.z_class]  # (M, M)
        a_tilde = self.l.tril() @ self.l.tril().mT
        correction = torch.linalg.inv(torch.linalg.inv(a_tilde) + kzz)  # (Ã⁻¹ + K)⁻¹ = -A
        covariance = kxx - torch.einsum("nmc,mp,npd->ncd", kxz, correction, kxz)
        identity = torch.eye(len(m), dtype=kzz.dtype, device=x.device)
        kl = 0.5 * torch.linalg.slogdet(identity + kzz @ a_tilde).logabsdet - 0.5 * (kzz @ correction).trace()
        return covariance, kl

    def log_prob(self, mean: Tensor, covariance: Tensor, y: Tensor) -> Tensor:  # (N,)
        """log E[p(y | f)], the energy at α = 1, in the units of training."""
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        if self.target_scale is not None:
            residual = (y.double() - mean.double()) / self.target_scale
            total = variance + self.log_level.exp()
            return -0.5 * (residual.square() / total + total.log() + math.log(2.0 * math.pi)).sum(-1)
        assert self.unit is not None
        mean, rows, top = mean.double() / self.unit, torch.arange(len(y), device=y.device), mean.argmax(-1)
        difference = variance + variance[rows, top][:, None] - 2.0 * covariance[rows, top]
        scale = (self.log_level.exp().square() + math.pi / 16.0 * difference.clamp_min(0.0)).sqrt()
        return -F.cross_entropy((mean - mean[rows, top][:, None]) / scale, y, reduction="none")

    def loss(self, mean: Tensor, x: Tensor, y: Tensor) -> Tensor:
        covariance, kl = self(x)
        return kl / self.num_data - self.log_prob(mean, covariance, y).mean()

    @torch.no_grad()
    def losses(self, look: Look, rows: tuple[Tensor, ...]) -> Tensor:  # (N,)
        """Minus the log-probabilities of new data, in the user's units."""
        found = []
        for batch in zip(*(column.split(500) for column in rows), strict=True):
            mean, x = look(*batch[:-1])
            found.append(-self.log_prob(mean, self(x)[0], batch[-1]))
        unit = 0.0 if self.target_scale is None else float(self.target_scale.log().sum())
        return torch.cat(found).cpu() + unit


def loader(rows: tuple[Tensor, ...], batch: int) -> DataLoader[Any]:
    """Shuffled batches, as anyone would make them."""
    return DataLoader(TensorDataset(*(r.cpu() for r in rows)), batch_size=batch, shuffle=True)


def train_reference(model: DenseFMGP, look: Look, batches: Iterator[Any], steps: int, lr: float = 1e-3) -> None:
    """Adam, without a schedule; every batch is moved, and the network run on it."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        *x, y = (column.to(model.z.device) for column in next(batches))
        with torch.no_grad():
            mean, coordinates = look(*x)
        optimizer.zero_grad()
        loss = model.loss(mean, coordinates, y)
        loss.backward()
        optimizer.step()


def endless(data: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from data


def parameter(value: Tensor, trained: bool = True) -> nn.Parameter:
    return nn.Parameter(value.detach().double().clone(), requires_grad=trained)
