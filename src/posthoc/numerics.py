"""Cholesky factors that fail loudly."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from posthoc.errors import NotPSDError, PosthocWarning

__all__ = ["blindly", "cholesky"]

JITTERS = (1e-10, 1e-8, 1e-6, 1e-4)
"""Relative to the mean of the diagonal, tried in turn."""

BLIND = ContextVar("BLIND", default=False)


@contextmanager
def blindly() -> Iterator[None]:
    """Inside, operations are noted in order to be done again, and cannot depend on what they compute."""
    token = BLIND.set(True)
    try:
        yield
    finally:
        BLIND.reset(token)


def cholesky(
    matrix: Tensor,  # (..., M, M), symmetric
    name: str = "the matrix",
) -> Tensor:
    """The lower Cholesky factor; jitter grows with a warning, then `NotPSDError` is raised. Done `blindly`, a failed
    factor is NaN instead."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    if BLIND.get():
        return torch.where(info[..., None, None] == 0, factor, math.nan)
    if not info.any():
        return factor
    if not matrix.isfinite().all():
        raise NotPSDError(
            f"Expected {name} to be finite, got NaN or infinity in it. The kernel's inputs or parameters have "
            "overflowed: check the scale of the features, or lower the learning rate."
        )
    scale = matrix.diagonal(dim1=-2, dim2=-1).abs().mean(-1)[..., None, None].clamp_min(torch.finfo(matrix.dtype).tiny)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for jitter in JITTERS:
        factor, info = torch.linalg.cholesky_ex(matrix + jitter * scale * identity)
        if not info.any():
            warnings.warn(
                f"{name} was not positive definite; added {jitter:g} times its mean diagonal to it.",
                PosthocWarning,
                stacklevel=2,
            )
            return factor
    raise NotPSDError(
        f"Expected {name} to be positive definite, got one that is not even with {JITTERS[-1]:g} times its mean "
        "diagonal added. A kernel that is not positive definite, or values of very different scale, does this: "
        "check the kernel and standardise its inputs."
    )
