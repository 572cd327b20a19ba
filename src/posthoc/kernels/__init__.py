"""Kernels: RBF, Matérn, linear, constant and white, sums and products of them, and those of GPyTorch."""

from posthoc.kernels.base import Kernel, Points, Space, gram
from posthoc.kernels.combine import Constant, Linear, Product, Sum, White
from posthoc.kernels.gpytorch import GPyTorchKernel, as_kernel
from posthoc.kernels.stationary import RBF, Matern

__all__ = [
    "RBF",
    "Constant",
    "GPyTorchKernel",
    "Kernel",
    "Linear",
    "Matern",
    "Points",
    "Product",
    "Space",
    "Sum",
    "White",
    "as_kernel",
    "gram",
]
