"""Kernels: RBF, Matérn, linear, constant and white, their sums and products, and those of GPyTorch."""
