"""The fixed-mean process: its parameters, and the latent Gaussian they give at any points."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posthoc.fmgp.covariance import Correction, correction, marginal_variance, output_covariance
from posthoc.inducing import Inducing
from posthoc.kernels import Kernel, OutputCovariance, Points
from posthoc.latent import IndependentLatent, Latent

__all__ = ["CoupledLatent", "Process"]


class Process(nn.Module):
    """Inducing points Z, the factor L, the kernel and, unless all outputs share one variance, their covariance B.

    With `outputs=None` the outputs are independent copies of one process (V = v(x) I). Otherwise the kernel is
    B_cc' k(x, x') and each inducing point belongs to one output, `z_class`.
    """

    def __init__(
        self, kernel: Kernel, inducing: Inducing, num_outputs: int, outputs: OutputCovariance | None, *, start: float
    ) -> None:
        super().__init__()
        self.kernel, self.num_outputs, self.outputs = kernel, num_outputs, outputs
        # Inducing points of one output stand together, so that its columns can be summed as one block.
        order = inducing.z_class.argsort(stable=True).to(next(iter(inducing.z.values())).device)
        self.z = nn.ParameterDict({space: nn.Parameter(block[order].clone()) for space, block in inducing.z.items()})
        device = order.device
        self.l_raw = nn.Parameter(start * torch.eye(len(order), dtype=torch.float64, device=device))
        self.register_buffer("z_class", inducing.z_class.to(device)[order])
        self.z_class: Tensor
        present, group, sizes = self.z_class.unique(return_inverse=True, return_counts=True)
        self.register_buffer("present", present, persistent=False)  # (J,), the outputs that own inducing points
        self.register_buffer("group", group, persistent=False)  # (M,), which of those each belongs to
        self.present: Tensor
        self.group: Tensor
        self.sizes: list[int] = sizes.tolist()

    @property
    def chol(self) -> Tensor:  # (M, M)
        """L."""
        return self.l_raw.tril()

    def forward(self, x: Points) -> tuple[Latent, Correction]:
        """The latent Gaussian at some points and the correction it came from. The kernel is evaluated once for both."""
        z = dict(self.z)
        joint = {space: torch.cat([x[space], block]) for space, block in z.items()} if z else x
        k, diagonal = self.kernel(joint, z), self.kernel.diag(joint)
        m = len(self.l_raw)
        c = self._correction(k[-m:], diagonal[-m:])
        return self._latent(k[:-m], diagonal[:-m], c.w), c

    def prepare(self) -> Tensor:  # (M, M)
        """W, for `latent` at many batches of points."""
        z = dict(self.z)
        return self._correction(self.kernel(z, z), self.kernel.diag(z)).w

    def latent(self, x: Points, w: Tensor) -> Latent:
        """The latent Gaussian at some points, with W from `prepare`."""
        return self._latent(self.kernel(x, dict(self.z)), self.kernel.diag(x), w)

    def _correction(self, kzz: Tensor, diagonal: Tensor) -> Correction:
        kzz = kzz.diagonal_scatter(diagonal)
        if self.outputs is not None and self.num_outputs > 1:
            b = self.outputs.columns(self.present)[self.present]  # (J, J)
            kzz = kzz * b[self.group][:, self.group]
        return correction(self.chol, kzz)

    def _latent(self, k_xz: Tensor, k_diag: Tensor, w: Tensor) -> Latent:
        if self.outputs is None or self.num_outputs == 1:
            variance = marginal_variance(k_diag, k_xz, w)
            return IndependentLatent(variance[:, None].expand(-1, self.num_outputs))
        # Σ_m k(x, z_m) W_m over the inducing points of each output, then products between outputs.
        parts = [k @ part for k, part in zip(k_xz.split(self.sizes, -1), w.mT.split(self.sizes), strict=True)]
        blocks = torch.stack(parts, 1)  # (N, J, M)
        return CoupledLatent(self.outputs, self.present, k_diag, blocks @ blocks.mT)


class CoupledLatent(Latent):
    """Outputs coupled by B: V(x) = B k(x, x) - B_z T(x) B_zᵀ, written out only when asked for."""

    def __init__(self, outputs: OutputCovariance, present: Tensor, k_diag: Tensor, reduced: Tensor) -> None:
        self.outputs, self.k_diag, self.reduced = outputs, k_diag, reduced
        self.b_z = outputs.columns(present)  # (C, J)

    @property
    def variance(self) -> Tensor:
        taken = ((self.b_z @ self.reduced) * self.b_z).sum(-1)  # (N, C)
        return (self.k_diag[:, None] * self.outputs.diagonal() - taken).clamp_min(0.0)

    def covariance(self) -> Tensor:
        return output_covariance(self.outputs.matrix(), self.b_z, self.k_diag, self.reduced)

    def difference(self, top: Tensor) -> Tensor:
        factor, diagonal = self.outputs.parts()
        row = factor[top] @ factor.mT  # (N, C), B's row of the top output
        if diagonal is not None:
            row = row.scatter_add(-1, top[:, None], diagonal[top][:, None])
        product = self.b_z @ self.reduced  # (N, C, J)
        b_top = self.b_z[top]  # (N, J)
        shared = self.k_diag[:, None] * row - (product @ b_top[..., None]).squeeze(-1)
        variance = self.k_diag[:, None] * self.outputs.diagonal() - (product * self.b_z).sum(-1)
        return (variance + variance.gather(-1, top[:, None]) - 2.0 * shared).clamp_min(0.0)
