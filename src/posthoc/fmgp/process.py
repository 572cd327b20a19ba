"""The fixed-mean process: its parameters, and the latent Gaussian they give at any points."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posthoc.fmgp.covariance import Correction, correction, marginal_variance
from posthoc.fmgp.inducing_points import Inducing
from posthoc.fmgp.output_covariance import CoupledLatent, LowRankLatent, OutputCovariance, SeparableLatent
from posthoc.kernels import Kernel, Points, gram
from posthoc.predictive.latent import IndependentLatent, Latent

__all__ = ["Process"]


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

    def prepare(self) -> Tensor:  # (M, M)
        """W, for `latent` at many batches of points."""
        return self._correction(gram(self.kernel, dict(self.z))).w

    def latent(self, x: Points, w: Tensor) -> Latent:
        """The latent Gaussian at some points, with W from `prepare`."""
        return self._latent(self.kernel(x, dict(self.z)), self.kernel.diag(x), w)

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
