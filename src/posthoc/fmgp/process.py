"""The fixed-mean process: its parameters, and the latent Gaussian they give at any points."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posthoc.fmgp.coupling import OutputCovariance
from posthoc.fmgp.covariance import Correction, correction, marginal_variance, output_covariance
from posthoc.inducing import Inducing
from posthoc.kernels import Kernel, Points, gram
from posthoc.latent import IndependentLatent, Latent

__all__ = ["CoupledLatent", "Process"]


class Process(nn.Module):
    """Inducing points Z, the factor L, the kernel and, unless all outputs share one variance, their covariance B.

    Without a `coupling` the outputs are independent copies of one process (V = v(x) I). With it the kernel is
    B_cc' k(x, x') and each inducing point belongs to one output, `z_class`.
    """

    def __init__(
        self, kernel: Kernel, inducing: Inducing, num_outputs: int, coupling: OutputCovariance | None, *, start: float
    ) -> None:
        super().__init__()
        self.kernel, self.num_outputs, self.coupling = kernel, num_outputs, coupling
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

    def forward(self, x: Points) -> tuple[Latent, Tensor]:
        """The latent Gaussian at some points, and KL(q | p). The kernel is evaluated once for both."""
        z = dict(self.z)
        joint = {space: torch.cat([x[space], block]) for space, block in z.items()}
        k = self.kernel(joint, z)
        m, b_z = len(self.l_raw), self._columns()
        k_xz, kzz = k.split([len(k) - m, m])
        c = self._correction(gram(self.kernel, z, kzz), b_z)
        return self._latent(k_xz, self.kernel.diag(x), b_z, c.w), c.kl

    def prepare(self) -> Tensor:  # (M, M)
        """W, for `latent` at many batches of points."""
        return self._correction(gram(self.kernel, dict(self.z)), self._columns()).w

    def latent(self, x: Points, w: Tensor) -> Latent:
        """The latent Gaussian at some points, with W from `prepare`."""
        return self._latent(self.kernel(x, dict(self.z)), self.kernel.diag(x), self._columns(), w)

    def _columns(self) -> Tensor | None:  # (C, J)
        """B's columns of the outputs that own inducing points."""
        return self.coupling.columns(self.present) if self.coupling is not None else None

    def _correction(self, kzz: Tensor, b_z: Tensor | None) -> Correction:
        if b_z is not None:
            kzz = kzz * b_z[self.z_class][:, self.group]
        return correction(self.chol, kzz)

    def _latent(self, k_xz: Tensor, k_diag: Tensor, b_z: Tensor | None, w: Tensor) -> Latent:
        if self.coupling is None or b_z is None:
            variance = marginal_variance(k_diag, k_xz, w)
            return IndependentLatent(variance[:, None].expand(-1, self.num_outputs))
        # W K(Z, (x, c)) = Σ_j B_cj (Σ k(x, z_m) W_m over the inducing points of output j)
        n, m, j = *k_xz.shape, len(self.sizes)
        if self.sizes.count(self.sizes[0]) == j:
            sums = k_xz.reshape(n, j, -1).transpose(0, 1) @ w.mT.reshape(j, -1, m)  # (J, N, M)
        else:
            groups = zip(k_xz.split(self.sizes, -1), w.mT.split(self.sizes), strict=True)
            sums = torch.stack([k @ part for k, part in groups])
        taken = b_z @ sums.reshape(j, -1)  # (C, N M)
        return CoupledLatent(self.coupling, k_diag, taken.reshape(-1, n, m))


class CoupledLatent(Latent):
    """Outputs coupled by B: V(x) = B k(x, x) - UᵀU, where U's columns are what the inducing points know of each output;
    written out only when asked for."""

    def __init__(self, coupling: OutputCovariance, k_diag: Tensor, taken: Tensor) -> None:
        self.coupling = coupling
        self.k_diag = k_diag[:, None]  # (N, 1)
        self.taken = taken  # (C, N, M)

    @property
    def variance(self) -> Tensor:
        return (self.k_diag * self.coupling.diagonal() - self.taken.square().sum(-1).mT).clamp_min(0.0)

    def covariance(self) -> Tensor:
        return output_covariance(self.coupling.matrix(), self.k_diag.squeeze(-1), self.taken)

    def difference(self, top: Tensor) -> Tensor:
        # the prior's Var(f_c - f_t) = B_cc + B_tt - 2 B_ct, less what the inducing points know of the difference
        diagonal = self.coupling.diagonal()
        prior = diagonal + diagonal[top][:, None] - 2.0 * self.coupling.columns(top).mT
        known = self.taken - self.taken[top, torch.arange(len(top), device=top.device)]
        return (self.k_diag * prior - known.square().sum(-1).mT).clamp_min(0.0)
