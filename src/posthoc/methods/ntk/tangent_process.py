"""A fixed-mean process with the neural tangent kernel of all weights, evaluated once for each point."""

from __future__ import annotations

import torch
from torch import Tensor

from posthoc.collect.loaders import Batch
from posthoc.fmgp.build import START
from posthoc.fmgp.covariance import Correction, correction
from posthoc.fmgp.inducing_points import Inducing
from posthoc.fmgp.output_covariance import OutputCovariance
from posthoc.fmgp.process import Process
from posthoc.kernels import Points
from posthoc.methods.ntk.ntk import Jacobian, LastLayerNTK, products
from posthoc.predictive.latent import DenseLatent, Latent

__all__ = ["Covariances", "TangentProcess", "fixed_coupling"]

FEW_OUTPUTS = 32
"""Up to so many outputs B is written out."""


class Covariances:
    """The tangent kernel, for a prior variance of one, between a point's outputs and the inducing points, and among
    those outputs: as features, one row of numbers for each point."""

    def __init__(self, jacobian: Jacobian, gradients: Tensor, classes: Tensor) -> None:
        self.jacobian, self.gradients, self.classes = jacobian, gradients, classes  # (M, P), (M,)

    def __call__(self, batch: Batch) -> Tensor:  # (N, C M + C C)
        found = []
        for j in self.jacobian.written(batch):
            cross = products(j.flatten(0, 1), self.gradients.to(j.device))
            found.append(torch.cat([cross.reshape(len(j), -1), products(j, j).flatten(1)], -1))
        return torch.cat(found)

    def among(self) -> Tensor:  # (M, M)
        return products(self.gradients, self.gradients)


class TangentProcess(Process):
    """A process whose points come with their kernels: `Covariances` of a point, and what those are among the inducing
    points, in order of their outputs, in the place of their coordinates."""

    def __init__(self, kernel: LastLayerNTK, among: Tensor, classes: Tensor, coupling: OutputCovariance) -> None:
        super().__init__(kernel, Inducing({"features": among}, classes), coupling.num_outputs, coupling, start=START)
        self.z.requires_grad_(False)

    @property
    def variance(self) -> Tensor:  # ()
        """σ₀²."""
        assert isinstance(self.kernel, LastLayerNTK)
        return self.kernel.log_variance.exp()

    @property
    def units(self) -> Tensor:  # (C,)
        """What turns the network's outputs into those of training."""
        assert self.coupling is not None
        return self.coupling.diagonal().sqrt()

    def split(self, features: Tensor) -> tuple[Tensor, Tensor]:  # (N, C, M) and (N, C, C)
        c = self.num_outputs
        cross, prior = features.split([c * len(self.l_raw), c * c], -1)
        return cross.unflatten(-1, (c, -1)), prior.unflatten(-1, (c, c))

    def forward(self, x: Points) -> tuple[Latent, Tensor]:
        found = self._correction(self.z["features"])
        return self.latent(x, found.w), found.kl

    def prepare(self) -> Tensor:  # (M, M)
        return self._correction(self.z["features"]).w

    def latent(self, x: Points, w: Tensor) -> Latent:
        cross, prior = self.split(x["features"])
        units, variance = self.units, self.variance
        taken = (variance * units[:, None] * units[self.z_class] * cross) @ w.mT  # (N, C, M)
        return DenseLatent(variance * units[:, None] * units * prior - taken @ taken.mT)

    def _correction(self, kzz: Tensor) -> Correction:
        units = self.units[self.z_class]
        return correction(self.chol, self.variance * units[:, None] * units * kzz)


def fixed_coupling(units: Tensor) -> OutputCovariance:
    """B as the tangent kernel of a last layer has it: outputs that have nothing to do with each other, each in its unit
    of training."""
    many = len(units) > FEW_OUTPUTS
    coupling = OutputCovariance(len(units), 1 if many else None).to(units.device).requires_grad_(False)
    if many:
        coupling.factor.zero_()
        coupling.log_diagonal.copy_(units.square().log())
    else:
        coupling.factor.copy_(units.diag())
    return coupling
