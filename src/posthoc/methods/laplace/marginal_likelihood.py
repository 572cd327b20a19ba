"""The marginal likelihood of a linear model under a Gaussian prior, at its best prior precision and noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["best_evidence"]

STEPS, FAR, CLOSE = 200, 2.0, 1e-9
"""At most so many Newton steps, each of at most so many units of the logarithms, until one is so short."""
REACH = 40.0
"""The logarithms stay within so many units of where they start: some data want no noise at all."""


def best_evidence(
    eigenvalues: Tensor,  # (G, K), of the curvature under unit noise; a row for each noise
    square_norm: float,  # of the weights
    *,
    count: float = 0.0,  # observations that share a noise
    square_error: Tensor | None = None,  # (G,), summed over them; None where there is no noise (classification)
    precision: float | None = None,  # the prior's, where it is given
) -> tuple[Tensor, float]:
    """The noises σ² (G,) and the prior precision δ that maximize, up to a constant and a factor of 2,

        Σ_g [-n log σ_g² - e_g/σ_g² - Σ_k log(λ_gk/σ_g² + δ)] + GK log δ - δ|w|².

    This is concave in the logarithms of σ² and δ together, so Newton's steps find the one maximum.
    """
    groups = len(eigenvalues)
    square_norm = max(square_norm, 1e-12)
    free = eigenvalues.new_ones(groups + 1, dtype=torch.bool)
    start = eigenvalues.new_zeros(groups + 1)
    if square_error is None:
        free[:-1] = False
        square_error = eigenvalues.new_zeros(groups)
    else:
        start[:-1] = (square_error / count).clamp_min(1e-300).log()
    start[-1] = math.log(eigenvalues.numel() / square_norm if precision is None else precision)
    free[-1] = precision is None

    def evidence(at: Tensor) -> Tensor:  # ()
        noise, delta = at[:-1].exp(), at[-1].exp()
        fit = -count * at[:-1] - square_error / noise
        volume = (eigenvalues / noise[:, None] + delta).log().sum(-1)
        return (fit - volume).sum() + eigenvalues.numel() * at[-1] - delta * square_norm

    at, value = start, evidence(start)
    for _ in range(STEPS if bool(free.any()) else 0):
        step = newton(at, eigenvalues, square_norm, count, square_error, free)
        step = step * min(1.0, FAR / max(float(step.abs().max()), 1e-300))
        # Halved while it overshoots; close to the maximum rounding decides, and any step is a short one.
        for halving in range(30):
            following = (at + step * 0.5**halving).clamp(start - REACH, start + REACH)
            if bool(evidence(following) >= value):
                break
        else:
            break
        moved = float((following - at).abs().max())
        at, value = following, evidence(following)
        if moved < CLOSE:
            break
    return at[:-1].exp(), float(at[-1].exp())


def newton(
    at: Tensor, eigenvalues: Tensor, square_norm: float, count: float, square_error: Tensor, free: Tensor
) -> Tensor:
    """Newton's step from (log σ², log δ), zero where it is not free to move."""
    noise, delta = at[:-1].exp(), at[-1].exp()
    decided = eigenvalues / (eigenvalues + delta * noise[:, None])  # how far the data have decided each direction
    spread = (decided * (1.0 - decided)).sum(-1)
    gradient = torch.cat([square_error / noise - count + decided.sum(-1), (decided.sum() - delta * square_norm)[None]])
    curvature = torch.cat([square_error / noise + spread, (spread.sum() + delta * square_norm)[None]]).diag()
    curvature[-1, :-1] = curvature[:-1, -1] = spread
    keep = free[:, None] & free
    curvature = torch.where(keep, curvature, torch.eye(len(at), dtype=at.dtype, device=at.device))
    ridge = 1e-12 * curvature.diagonal().max() + 1e-300
    curvature.diagonal().add_(ridge)
    return torch.linalg.solve(curvature, torch.where(free, gradient, 0.0))
