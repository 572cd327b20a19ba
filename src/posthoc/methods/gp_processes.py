"""Gaussian processes of the residuals, on GPyTorch's kernels and variational strategy: exact and sparse, used alike.

All is in the units of training and in float64; several outputs are independent processes side by side. Importing this
module needs GPyTorch (extra `gp`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gpytorch.constraints import Positive
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.models import ApproximateGP
from gpytorch.utils.memoize import clear_cache_hook
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from linear_operator.utils.errors import NanError, NotPSDError  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from posthoc.errors import TrainingError
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.numerics import cholesky
from posthoc.predictive.latent import IndependentLatent

__all__ = ["Exact", "Posterior", "Process", "Sparse", "blank"]

Posterior = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From points (N, D) to the latent mean and variance there, both (N, C)."""


class Exact(nn.Module):
    """All the data, one Cholesky factor for each output."""

    kind = "exact"

    def __init__(
        self,
        x: Tensor,  # (N, D)
        y: Tensor,  # (N, C)
    ) -> None:
        super().__init__()
        self.kernel = rbf(x.shape[1], y.shape[1]).to(x.device)
        self.register_buffer("x", x)
        self.register_buffer("y", y)
        self.x: Tensor
        self.y: Tensor

    def loss(self, x: Tensor, y: Tensor, likelihood: Gaussian, num_data: int) -> Tensor:  # ()
        """-log p(y) / N of all the data, whatever the batch: the marginal likelihood is no sum over points."""
        return -_LogDensity.apply(self.covariance(likelihood), self.y.mT) / len(self.y)  # type: ignore[no-untyped-call]

    def posterior(self, likelihood: Gaussian) -> Posterior:
        factor, weights = solved(self.covariance(likelihood), self.y.mT)

        def at(x: Tensor) -> tuple[Tensor, Tensor]:
            cross = self.kernel(self.x, x).to_dense()  # (C, N, rows)
            half = torch.linalg.solve_triangular(factor, cross, upper=False)
            variance = self.kernel(x, diag=True) - half.square().sum(-2)
            return torch.einsum("cn,cnr->rc", weights, cross), variance.clamp_min(0.0).mT

        return at

    def covariance(self, likelihood: Gaussian) -> Tensor:  # (C, N, N)
        """K + σ²I of the data, for each output."""
        noise = likelihood.noise.reshape(-1, 1).expand(self.y.mT.shape)
        return self.kernel(self.x).to_dense() + torch.diag_embed(noise)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The numbers of points, of their dimensions, and of outputs."""
        return len(self.x), self.x.shape[1], self.y.shape[1]


class Sparse(ApproximateGP):  # type: ignore[misc]
    """A stochastic variational GP: M inducing points for each output, and a Gaussian over the values there."""

    kind = "sparse"

    def __init__(
        self,
        z: Tensor,  # (M, D)
        outputs: int,
    ) -> None:
        values = CholeskyVariationalDistribution(len(z), batch_shape=torch.Size([outputs]))
        places = z.expand(outputs, *z.shape).clone()
        strategy = VariationalStrategy(self, places, values, learn_inducing_locations=True)
        # They are at the prior already; GPyTorch would put them there with draws from the global generator.
        strategy.variational_params_initialized.fill_(1)
        super().__init__(strategy)
        self.kernel = rbf(z.shape[1], outputs)
        self.double().to(z.device)

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(x.new_zeros(x.shape[:-1]), self.kernel(x))

    def loss(self, x: Tensor, y: Tensor, likelihood: Gaussian, num_data: int) -> Tensor:  # ()
        """The mini-batch estimate of -ELBO / N."""
        with explained():
            latent = self.train()(x)
            energy = likelihood.energy(latent.mean.mT, IndependentLatent(latent.variance.mT), y, alpha=0.0)
            return self.variational_strategy.kl_divergence().sum() / num_data - energy.mean()

    def posterior(self, likelihood: Gaussian) -> Posterior:
        clear_cache_hook(self.variational_strategy)  # of the Cholesky factor, which belongs to earlier parameters

        def at(x: Tensor) -> tuple[Tensor, Tensor]:
            with explained():
                latent = self.eval()(x)
                return latent.mean.mT, latent.variance.mT

        return at

    @property
    def shape(self) -> tuple[int, int, int]:
        """The numbers of points, of their dimensions, and of outputs."""
        outputs, points, width = self.variational_strategy.inducing_points.shape
        return points, width, outputs


Process = Exact | Sparse


class _LogDensity(torch.autograd.Function):
    """Σ_c log N(y_c | 0, K_c), with its gradient ½(ww' - K⁻¹), w = K⁻¹y, in closed form: a third of the time and memory
    that it takes to differentiate a Cholesky factor."""

    @staticmethod
    def forward(ctx: Any, covariance: Tensor, y: Tensor) -> Tensor:
        factor, weights = solved(covariance, y)
        ctx.save_for_backward(factor, weights)
        log_det = 2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum()
        return -0.5 * ((y * weights).sum() + log_det + y.numel() * math.log(2.0 * math.pi))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        factor, weights = ctx.saved_tensors
        return 0.5 * grad * (weights.unsqueeze(-1) * weights.unsqueeze(-2) - torch.cholesky_inverse(factor)), None


def solved(
    covariance: Tensor,  # (C, N, N)
    y: Tensor,  # (C, N)
) -> tuple[Tensor, Tensor]:
    """The Cholesky factors of the covariances, and K⁻¹y."""
    factor = cholesky(covariance, "the covariance of the data")
    return factor, torch.cholesky_solve(y.unsqueeze(-1), factor).squeeze(-1)


def blank(kind: str, points: int, width: int, outputs: int) -> Process:
    """A process of this shape, to load a state into."""
    z = torch.zeros(points, width, dtype=torch.float64)
    return Exact(z, z.new_zeros(points, outputs)) if kind == "exact" else Sparse(z, outputs)


def rbf(width: int, outputs: int) -> ScaleKernel:
    """One amplitude for each output and one length-scale for each of its dimensions."""
    batch = torch.Size([outputs])
    # Learnt as logarithms: the length-scale of a dimension that does not matter must be able to grow a hundredfold.
    shape = RBFKernel(ard_num_dims=width, batch_shape=batch, lengthscale_constraint=logarithm())
    kernel = ScaleKernel(shape, batch_shape=batch, outputscale_constraint=logarithm()).double()
    # Typical points are √(2D) apart: shorter scales would start where every point is alone and no gradient is left.
    kernel.base_kernel.lengthscale = math.sqrt(width)
    kernel.outputscale = 1.0
    return kernel


def logarithm() -> Positive:
    return Positive(transform=torch.exp, inv_transform=torch.log)


@contextmanager
def explained() -> Iterator[None]:
    """GPyTorch's numerical errors as ours."""
    try:
        yield
    except (NanError, NotPSDError) as error:
        raise TrainingError(
            f"Expected a covariance that can be factorized, got one that cannot ({str(error).splitlines()[0]}). Lower "
            "the learning rate, use fewer inducing points, or check the data for extreme values."
        ) from error
