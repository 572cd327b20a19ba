"""Kernels of GPyTorch as kernels of posthoc."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from posthoc.errors import OptionError
from posthoc.kernels.base import BlockKernel, Kernel, Points, Space


class GPyTorchKernel(BlockKernel):
    """A `gpytorch.kernels.Kernel` on one block.

    Its class cannot be rebuilt from a file without running code, so `load` has to be given the kernel again.

    Args:
        kernel: the kernel, of one output; it is copied.
        on: as in `RBF`.
    """

    name = "gpytorch"
    options = ("on", "parts")
    knows_identity = True  # some of GPyTorch's kernels add noise to their diagonal

    def __init__(self, kernel: Any, on: Space | None = None) -> None:
        super().__init__(on)
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
            found = f"got a {name} that cannot ({error})"
            raise OptionError(f"Expected a GPyTorch kernel that looks at {x.shape[1]} {self.on}, {found}.") from error
        if shape != (len(x), len(x)):
            found = f"{shape} from {name} for {len(x)} points"
            raise OptionError(f"Expected a GPyTorch kernel of one output, with one row a point, got {found}.")

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The class and the plain settings of each part, which tell kernels of different forms apart."""
        described = []
        for part in self.kernel.modules():
            plain = {name: value for name, value in vars(part).items() if isinstance(value, int | float | str)}
            settings = {name: value for name, value in plain.items() if name != "training" and name[0] != "_"}
            described.append({"class": type(part).__name__, **settings})
        return described

    def recipe(self) -> dict[str, Any]:
        # The initial values are those of the object that is given; checkpoints compare them.
        return {**self.spec(), "start": {name: [p.tolist(), p.requires_grad] for name, p in self.named_parameters()}}


def as_kernel(kernel: Any) -> Kernel:
    """A kernel of posthoc as it is, one of GPyTorch wrapped.

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
