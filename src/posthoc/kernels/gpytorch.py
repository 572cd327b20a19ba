"""Kernels of GPyTorch as kernels of posthoc."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from posthoc.errors import OptionError
from posthoc.kernels.base import BlockKernel, Kernel, Points, Space

__all__ = ["GPyTorchKernel", "as_kernel", "describe"]


class GPyTorchKernel(BlockKernel):
    """A `gpytorch.kernels.Kernel` on one block.

    Its class cannot be rebuilt from a file without running code, so `load` has to be given the kernel again.

    Args:
        kernel: the kernel, of one output; it is copied.
        on: as in `RBF`.
    """

    def __init__(self, kernel: Any, on: Space | None = None) -> None:
        super().__init__(on)
        self.knows_identity = True  # some of GPyTorch's kernels add noise to their diagonal
        self.kernel = copy.deepcopy(kernel).double()

    def forward(self, a: Points, b: Points) -> Tensor:
        return self.kernel(self.block(a), self.block(b)).to_dense()

    def diag(self, a: Points) -> Tensor:
        return self.kernel(self.block(a), diag=True)

    def initialize(self, sample: Points, default: str) -> None:
        super().initialize(sample, default)
        x, name = self.block(sample)[:2], type(self.kernel).__name__
        try:
            shape = tuple(self.kernel(x, x).shape)  # known before anything is computed
        except (RuntimeError, IndexError) as error:
            raise OptionError(
                f"Expected a GPyTorch kernel that looks at {x.shape[1]} {self.on}, got a {name} that cannot ({error})."
            ) from error
        if shape != (len(x), len(x)):
            raise OptionError(
                f"Expected a GPyTorch kernel with one row a point, {(len(x), len(x))} for {len(x)} points, got "
                f"{shape} from {name}: give the kernel of one output; the covariance of outputs is learned beside it."
            )

    def spec(self) -> dict[str, Any]:
        return {"type": "gpytorch", "on": self.on, "parts": [describe(part) for part in self.kernel.modules()]}

    def recipe(self) -> dict[str, Any]:
        # The initial values are those of the object that is given; checkpoints compare them.
        return {**self.spec(), "start": {name: [p.tolist(), p.requires_grad] for name, p in self.named_parameters()}}


def as_kernel(kernel: Any) -> Kernel:
    """A kernel of posthoc as it is, one of GPyTorch wrapped.

    Args:
        kernel: a kernel.

    Raises:
        OptionError: if it is neither.

    Example:
        >>> from posthoc.kernels import RBF
        >>> kernel = RBF()
        >>> as_kernel(kernel) is kernel
        True
    """
    if isinstance(kernel, Kernel):
        return kernel
    if any(t.__module__.partition(".")[0] == "gpytorch" for t in type(kernel).__mro__):
        if any(isinstance(part, Kernel) for part in kernel.modules()):
            raise OptionError("Expected a GPyTorch kernel with none of ours in it: write GPyTorchKernel(k) + RBF().")
        return GPyTorchKernel(kernel)
    raise OptionError(f"Expected a posthoc or GPyTorch kernel, got {type(kernel).__name__}.")


def describe(part: nn.Module) -> dict[str, Any]:
    """A module's class and plain settings, which tell kernels of different forms apart."""
    plain = {k: v for k, v in vars(part).items() if isinstance(v, int | float | str) and k != "training"}
    return {"class": type(part).__name__, **{k: v for k, v in plain.items() if not k.startswith("_")}}
