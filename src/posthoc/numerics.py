"""Cholesky factors with growing jitter, L-BFGS, and the memory budget of computations in parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from posthoc.errors import NotPSDError, warn

JITTERS = (1e-10, 1e-8, 1e-6, 1e-4)
"""Jitters to try in turn, relative to the mean of the diagonal."""
MEMORY_BUDGET = 2**27
"""Bytes that the largest temporary tensor of a computation in parts may take: 128 MB."""


def rows_that_fit(numbers_per_row: int, budget: int = MEMORY_BUDGET) -> int:
    """How many rows to process at once.

    Args:
        numbers_per_row: float64 numbers in the largest temporary tensor, for each row.
        budget: bytes that this tensor may take.

    Returns:
        The number of rows, at least 1.

    Example:
        >>> rows_that_fit(numbers_per_row=1000)
        16777
    """
    return max(1, budget // (8 * max(1, numbers_per_row)))


def cholesky(matrix: Tensor, name: str = "the matrix") -> Tensor:
    """The lower Cholesky factor of a symmetric matrix, with as little jitter as it needs.

    Jitter is added with a `PosthocWarning`. While a CUDA graph is captured nothing can depend on the numbers: a factor
    that fails is then NaN.

    Args:
        matrix: (..., M, M), symmetric.
        name: what the matrix is, for messages.

    Returns:
        (..., M, M), lower triangular.

    Raises:
        NotPSDError: if the matrix is not finite, or not positive definite with the largest jitter.

    Example:
        >>> cholesky(torch.tensor([[4.0, 2.0], [2.0, 2.0]]))
        tensor([[2., 0.],
                [1., 1.]])
    """
    factor, info = torch.linalg.cholesky_ex(matrix)
    if matrix.is_cuda and torch.cuda.is_current_stream_capturing():
        return torch.where(info[..., None, None] == 0, factor, math.nan)
    if not info.any():
        return factor
    if not matrix.isfinite().all():
        advice = "check the scale of the kernel's inputs, or lower the learning rate"
        raise NotPSDError(f"Expected {name} to be finite, got NaN or infinity in it: {advice}.")
    scale = matrix.diagonal(dim1=-2, dim2=-1).abs().mean(-1)[..., None, None].clamp_min(torch.finfo(matrix.dtype).tiny)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for jitter in JITTERS:
        factor, info = torch.linalg.cholesky_ex(matrix + jitter * scale * identity)
        if not info.any():
            warn(f"{name} was not positive definite; added {jitter:g} times its mean diagonal to it.")
            return factor
    advice = f"even with {JITTERS[-1]:g} times its mean diagonal added: check the kernel and standardize its inputs"
    raise NotPSDError(f"Expected {name} to be positive definite, got one that is not, {advice}.")


def minimize(loss: Callable[[], Tensor], parameters: Sequence[Tensor], *, steps: int, tolerance: float) -> None:
    """Minimizes a smooth function of a few parameters by L-BFGS with backtracking (Nocedal and Wright, chapter 7).

    `torch.optim.LBFGS` would do, but its first use imports PyTorch's compiler, which takes a second.

    Args:
        loss: The function () of the parameters.
        parameters: Changed in place.
        steps: The largest number of steps.
        tolerance: The largest entry of the gradient at which it ends; or a step that gains a thousandth of this.

    Example:
        >>> x = torch.zeros(2, dtype=torch.float64)
        >>> minimize(lambda: (x - torch.tensor([1.0, 2.0])).square().sum(), [x], steps=50, tolerance=1e-6)
        >>> x.tolist()
        [1.0, 2.0]
    """
    sizes = [p.numel() for p in parameters]

    def evaluate(at: Tensor) -> tuple[float, Tensor]:
        with torch.enable_grad():
            for p, values in zip(parameters, at.split(sizes), strict=True):
                p.detach().copy_(values.view_as(p))
                p.requires_grad_()
            value = loss()
            gradients = torch.autograd.grad(value, parameters)
        return value.item(), torch.cat([g.reshape(-1) for g in gradients])

    x = torch.cat([p.detach().reshape(-1) for p in parameters])
    value, gradient = evaluate(x)
    changes: list[tuple[Tensor, Tensor, Tensor]] = []  # of x and of the gradient, and one over their product
    for _ in range(steps):
        if float(gradient.abs().max()) <= tolerance:
            break
        direction, factors = gradient.clone(), list[Tensor]()
        for s, y, rho in reversed(changes):
            factors.append(rho * (s @ direction))
            direction -= factors[-1] * y
        if changes:
            s, y, rho = changes[-1]
            direction /= rho * (y @ y)
        else:
            direction /= max(1.0, float(gradient.abs().sum()))
        for (s, y, rho), factor in zip(changes, reversed(factors), strict=True):
            direction += s * (factor - rho * (y @ direction))
        slope, step = float(gradient @ direction), 1.0
        for _ in range(30):
            new_value, new_gradient = evaluate(x - step * direction)
            if new_value <= value - 1e-4 * step * slope:
                break
            step *= 0.5
        else:
            break
        s, y = -step * direction, new_gradient - gradient
        if float(s @ y) > 0.0:
            changes = [*changes[-9:], (s, y, 1.0 / (s @ y))]
        x, gain, value, gradient = x + s, value - new_value, new_value, new_gradient
        if gain <= 1e-3 * tolerance:
            break
    for p, values in zip(parameters, x.split(sizes), strict=True):
        p.requires_grad_(False).copy_(values.view_as(p))
