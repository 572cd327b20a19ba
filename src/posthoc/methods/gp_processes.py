"""Gaussian processes of the residuals, on GPyTorch's kernels and variational strategy: exact and sparse.

All is in the units of training and in float64; several outputs are independent processes. Importing this module needs
GPyTorch (extra `gp`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from gpytorch.constraints import Positive
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.models import ApproximateGP
from gpytorch.utils.memoize import clear_cache_hook
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from linear_operator.utils.errors import NanError, NotPSDError  # type: ignore[import-untyped]
from torch import Tensor, nn

from posthoc.errors import TrainingError
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.numerics import cholesky
from posthoc.predictive.latent import IndependentLatent

Posterior = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From points (N, D) to the latent mean and variance there, both (N, C)."""


class Exact(nn.Module):
    """All the data, x (N, D) and y (N, C), with one Cholesky factor for each output."""

    kind = "exact"
    x: Tensor
    y: Tensor

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__()
        self.kernel = rbf(x.shape[1], y.shape[1]).to(x.device)
        self.register_buffer("x", x)
        self.register_buffer("y", y)
        self.shape = len(x), x.shape[1], y.shape[1]

    def loss(self, x: Tensor, y: Tensor, likelihood: Gaussian, num_data: int) -> Tensor:  # ()
        """-log p(y) / N of all the data, whatever the batch: the marginal likelihood is no sum over points."""
        factor = self.factor(likelihood)
        marginal = torch.distributions.MultivariateNormal(torch.zeros_like(self.y.mT), scale_tril=factor)
        return -marginal.log_prob(self.y.mT).sum() / len(self.y)

    def posterior(self, likelihood: Gaussian) -> Posterior:
        factor = self.factor(likelihood)
        whitened = torch.linalg.solve_triangular(factor, self.y.mT[..., None], upper=False)  # (C, N, 1)

        def at(x: Tensor) -> tuple[Tensor, Tensor]:
            cross = torch.linalg.solve_triangular(factor, self.kernel(self.x, x).to_dense(), upper=False)
            variance = self.kernel(x, diag=True) - cross.square().sum(-2)
            return (whitened.mT @ cross).squeeze(-2).mT, variance.clamp_min(0.0).mT

        return at

    def factor(self, likelihood: Gaussian) -> Tensor:  # (C, N, N)
        """The Cholesky factors of K + σ²I of the data, for each output."""
        noise = likelihood.noise.reshape(-1, 1).expand(self.y.mT.shape)
        return cholesky(self.kernel(self.x).to_dense() + torch.diag_embed(noise), "the covariance of the data")


class Sparse(ApproximateGP):  # type: ignore[misc]
    """A stochastic variational GP: M inducing points z (M, D) for each output, and a Gaussian over the values there."""

    kind = "sparse"

    def __init__(self, z: Tensor, outputs: int) -> None:
        values = CholeskyVariationalDistribution(len(z), batch_shape=torch.Size([outputs]))
        places = z.expand(outputs, *z.shape).clone()
        strategy = VariationalStrategy(self, places, values, learn_inducing_locations=True)
        # They are at the prior already; GPyTorch would put them there with draws from the global generator.
        strategy.variational_params_initialized.fill_(1)
        super().__init__(strategy)
        self.kernel = rbf(z.shape[1], outputs)
        self.shape = *z.shape, outputs
        self.double().to(z.device)

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(x.new_zeros(x.shape[:-1]), self.kernel(x))

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the variance at some points."""
        try:
            latent = self(x)
        except (NanError, NotPSDError) as error:
            advice = "lower the learning rate, use fewer inducing points, or check the data for extreme values"
            raise TrainingError(f"The covariance has no Cholesky factor: {advice}.") from error
        return latent.mean.mT, latent.variance.mT

    def loss(self, x: Tensor, y: Tensor, likelihood: Gaussian, num_data: int) -> Tensor:  # ()
        """The mini-batch estimate of -ELBO / N."""
        mean, variance = self.train().latent(x)
        energy = likelihood.energy(mean, IndependentLatent(variance), y, alpha=0.0)
        return self.variational_strategy.kl_divergence().sum() / num_data - energy.mean()

    def posterior(self, likelihood: Gaussian) -> Posterior:
        clear_cache_hook(self.variational_strategy)  # of the Cholesky factor, which belongs to earlier parameters
        return self.eval().latent


Process = Exact | Sparse


def rbf(width: int, outputs: int) -> ScaleKernel:
    """One amplitude for each output and one length-scale for each of its dimensions."""
    # Learned as logarithms: the length-scale of a dimension that does not matter must be able to grow a hundredfold.
    batch, logarithm = torch.Size([outputs]), partial(Positive, transform=torch.exp, inv_transform=torch.log)
    shape = RBFKernel(ard_num_dims=width, batch_shape=batch, lengthscale_constraint=logarithm())
    kernel = ScaleKernel(shape, batch_shape=batch, outputscale_constraint=logarithm()).double()
    # Typical points are √(2D) apart. With shorter scales every point would be alone and no gradient would be left.
    kernel.base_kernel.lengthscale = math.sqrt(width)
    kernel.outputscale = 1.0
    return kernel
