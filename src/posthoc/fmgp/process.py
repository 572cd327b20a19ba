"""The fixed-mean process: its parameters, the latent Gaussian at any points, and the objective it is trained with.

The posterior covariance (paper, section 3.3; `docs/notation.md`) is K(x, x') - K(x, Z) (-A) K(Z, x') with
-A = (Ã⁻¹ + K_β)⁻¹ and Ã = L Lᵀ. With

    H = I + Lᵀ K_β L = R Rᵀ        and        W = R⁻¹ Lᵀ

we have -A = Wᵀ W, so one Cholesky of H and one triangular solve give every quantity, and nothing is inverted. H has no
eigenvalue below one, whatever the inducing points: duplicated points and singular kernels need no jitter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from posthoc.collect.network import version
from posthoc.fmgp.inducing_points import Inducing
from posthoc.fmgp.output_covariance import (
    CoupledLatent,
    LowRankLatent,
    OutputCovariance,
    SeparableLatent,
    marginal_variance,
)
from posthoc.fmgp.points import TrainingBatch
from posthoc.kernels import Kernel, Points, gram
from posthoc.likelihoods.base import Likelihood
from posthoc.numerics import cholesky
from posthoc.predictive.latent import IndependentLatent, Latent


class Process(nn.Module):
    """Inducing points Z, the factor L, the kernel and, unless all outputs share one variance, their covariance B.

    Without a `coupling` the outputs are independent copies of one process (V = v(x) I); `separable`, mixtures of such
    copies (V = v(x) B). With a coupling that is not separable the kernel is B_cc' k(x, x') and each inducing point
    belongs to one output, `z_class`.

    Args:
        kernel: The kernel of one output.
        inducing: The initial inducing points and the output that each belongs to.
        num_outputs: C.
        coupling: B, or None.
        start: L starts at this number times the identity.
        separable: Whether V(x) = v(x) B.
    """

    def __init__(
        self,
        kernel: Kernel,
        inducing: Inducing,
        num_outputs: int,
        coupling: OutputCovariance | None,
        *,
        start: float,
        separable: bool = False,
    ) -> None:
        super().__init__()
        self.kernel, self.num_outputs, self.coupling, self.separable = kernel, num_outputs, coupling, separable
        # Inducing points of one output stand together, so that its columns can be summed as one block.
        device = next(iter(inducing.z.values())).device
        order = inducing.z_class.argsort(stable=True).to(device)
        self.z = nn.ParameterDict({space: nn.Parameter(block[order].clone()) for space, block in inducing.z.items()})
        self.l_raw = nn.Parameter(start * torch.eye(len(order), dtype=torch.float64, device=device))
        self.register_buffer("z_class", inducing.z_class.to(device)[order])
        self.z_class: Tensor
        present, sizes = self.z_class.unique(return_counts=True)
        self.register_buffer("present", present, persistent=False)  # (J,), the outputs that own inducing points
        self.present: Tensor
        self.sizes: list[int] = sizes.tolist()
        self._prepared: Prepared | None = None

    @property
    def chol(self) -> Tensor:  # (M, M)
        """L."""
        return self.l_raw.tril()

    def forward(self, x: Points) -> tuple[Latent, Tensor]:
        """The latent Gaussian at some points, and KL(q | p), in one evaluation of the kernel."""
        k, k_diag = self.kernel.joint(x, dict(self.z)), self.kernel.diag(x)
        k_xz, kzz = k.split([len(k_diag), len(self.l_raw)])
        w, kl = self._correction(kzz)
        return self._latent(k_xz, k_diag, w), kl

    def latent(self, x: Points) -> Latent:
        """The latent Gaussian at some points, with what is kept between calls."""
        kept = self.prepared()
        return self._latent(self.kernel.at(x, kept.anchor), self.kernel.diag(x), kept.w)

    def prepared(self) -> Prepared:
        """What predictions have in common, computed anew when the parameters have changed."""
        kept = self._prepared
        if kept is None or any(p.data_ptr() != place or version(p) != count for p, place, count in kept.made_of):
            made_of = [(p, p.data_ptr(), version(p)) for p in self.parameters()]
            with torch.no_grad():
                w, anchor = self._correction(self._among()).w, self.kernel.anchor(dict(self.z))
            self._prepared = kept = Prepared(w, anchor, made_of)
        return kept

    def forget(self) -> None:
        """Drops what is kept. Training writes to parameters through views, which leaves their versions as they are."""
        self._prepared = None

    def _among(self) -> Tensor:  # (M, M)
        """The kernel of one output among the inducing points."""
        return gram(self.kernel, dict(self.z))

    def _correction(self, kzz: Tensor) -> Correction:
        if self.coupling is not None and not self.separable:
            kzz = kzz * self.coupling.among(self.z_class)
        return correction(self.chol, kzz)

    def _latent(self, k_xz: Tensor, k_diag: Tensor, w: Tensor) -> Latent:
        if self.coupling is None:
            return IndependentLatent(marginal_variance(k_diag, k_xz, w)[:, None].expand(-1, self.num_outputs))
        if self.separable:
            return SeparableLatent(self.coupling, marginal_variance(k_diag, k_xz, w))
        if self.coupling.rank is None:
            return CoupledLatent(self.coupling, k_diag, k_xz, w, self.present, self.sizes)
        return LowRankLatent(self.coupling, k_diag, k_xz, w, self.z_class, self.present)


class Prepared(NamedTuple):
    """What predictions have in common: W (M, M), what the kernel needs of Z, and the parameters that these were made
    of, with their addresses and versions."""

    w: Tensor
    anchor: Any
    made_of: list[tuple[nn.Parameter, int, int]]


@dataclass(frozen=True)
class Objective:
    """-(1/|B|) Σ_b energy_b + (copies · KL + prior · KL_B) / N: the mini-batch estimate of the loss of one data point.

    Args:
        process: Gives the latent Gaussian and the KL.
        likelihood: Gives the energy.
        alpha: The divergence, from 0 (the ELBO) to 1.
        num_data: N.
        kl_copies: How often the KL counts: once, or for each output where outputs share one variance.
        prior: The weight of KL_B, which holds B near the identity.
        generator: What the energy draws from, if it does.
    """

    process: Process
    likelihood: Likelihood
    alpha: float
    num_data: int
    kl_copies: int = 1
    prior: float = 0.0
    generator: torch.Generator | None = None

    def __call__(self, batch: TrainingBatch) -> Tensor:  # ()
        latent, kl = self.process(batch.points)
        energy = self.likelihood.energy(batch.mean, latent, batch.target, self.alpha, self.generator)
        loss = kl * (self.kl_copies / self.num_data) - energy.mean()
        if self.prior and self.process.coupling is not None:
            loss = torch.add(loss, self.process.coupling.divergence(), alpha=self.prior / self.num_data)
        return loss


class Correction(NamedTuple):
    """The difference between posterior and prior.

    Attributes:
        w: W (M, M), with -A = WᵀW. Use it in that form only: its gradient assumes that.
        kl: KL(q | p) = ½ (log|H| + tr H⁻¹ - M) ≥ 0, (), zero at L = 0 (the paper prints its trace with the wrong sign).
    """

    w: Tensor
    kl: Tensor


def correction(chol: Tensor, kzz: Tensor) -> Correction:
    """W and KL(q | p), in float64.

    Args:
        chol: L (M, M), lower triangular with any signs.
        kzz: K_β (M, M), symmetric.

    Example:
        >>> one = torch.ones(1, 1)
        >>> round(float(correction(one, one).w) ** 2, 6)  # 1 / (1 + 1)
        0.5
    """
    w, kl = _Correction.apply(chol.double(), kzz.double())  # type: ignore[no-untyped-call]
    return Correction(w, kl)


class _Correction(torch.autograd.Function):
    """W and the KL from L and K, with a derived backward pass: products and one triangular solve, where autograd
    would differentiate the Cholesky factor and the solve one by one.

    The KL follows from log|H| = 2 Σ log R_mm and M - tr H⁻¹ = tr(W K Wᵀ). For a function f of G = WᵀW, with the
    gradients W̄ of f and κ of the KL, and using tr(K G) = tr(W K Wᵀ):

        D = (κ W K - W̄) Wᵀ          (symmetric, since f does not change under W → QW with Q orthogonal)
        K̄ = ½ Wᵀ D W                L̄ = (W̄ᵀ + K Wᵀ D) R⁻¹
    """

    @staticmethod
    def forward(ctx: Any, chol: Tensor, kzz: Tensor) -> tuple[Tensor, Tensor]:
        k_chol = kzz @ chol
        h = chol.mT @ k_chol
        h.diagonal().add_(1.0)
        r = cholesky(h, "H = I + LᵀKL")
        # Wᵀ = L R⁻ᵀ and (W K)ᵀ = K L R⁻ᵀ: from the right, with an upper factor, it takes two thirds of the time
        solved = torch.linalg.solve_triangular(r.mT, torch.cat([chol, k_chol]), upper=True, left=False)
        w, wk = (part.mT for part in solved.split(len(chol)))
        ctx.save_for_backward(r, w, wk)
        return w, r.diagonal().log().sum() - 0.5 * (wk * w).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, w_grad: Tensor, kl_grad: Tensor) -> tuple[Tensor, Tensor]:
        r, w, wk = ctx.saved_tensors
        d = (kl_grad * wk).sub_(w_grad) @ w.mT
        # L̄ᵀ = R⁻ᵀ (W̄ + D W K), since D is symmetric
        chol_grad = torch.linalg.solve_triangular(r.mT, torch.addmm(w_grad, d, wk), upper=True).mT
        return chol_grad, (w.mT @ d @ w).mul_(0.5)
