"""The marginal likelihood of a linear model under a Gaussian prior, at its best prior precision and noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAX_STEPS, MAX_STEP, TOLERANCE = 200, 2.0, 1e-9
"""The largest number of Newton steps, the longest step, and the step at which they end, in units of the logarithms."""
REACH = 40.0
"""The largest distance of the logarithms from their start: some data want no noise at all."""


def best_evidence(
    eigenvalues: Tensor, square_norm: float, *, count: float, square_error: Tensor | None, precision: float | None
) -> tuple[Tensor, float]:
    """The noises σ² (G,) and the prior precision δ that maximize, up to a constant and a factor of 2,

        Σ_g [-n log σ_g² - e_g/σ_g² - Σ_k log(λ_gk/σ_g² + δ)] + GK log δ - δ|w|².

    This is concave in the logarithms of σ² and δ together, so Newton's steps find the one maximum. `eigenvalues` λ
    (G, K) are those of the curvature under unit noise, a row for each noise; `square_error` e (G,) is summed over the
    `count` n of observations that share a noise, or None where there is no noise. A `precision` that is given stays.
    """
    square_norm = max(square_norm, 1e-12)
    fixed = torch.tensor([square_error is None] * len(eigenvalues) + [precision is not None], device=eigenvalues.device)
    error = torch.zeros_like(eigenvalues[:, 0]) if square_error is None else square_error
    start = torch.zeros_like(fixed, dtype=eigenvalues.dtype)
    if square_error is not None:
        start[:-1] = (error / count).clamp_min(1e-300).log()
    start[-1] = math.log(eigenvalues.numel() / square_norm if precision is None else precision)

    def evidence(at: Tensor) -> Tensor:  # ()
        noise, delta = at[:-1].exp(), at[-1].exp()
        fit = -count * at[:-1] - error / noise
        volume = (eigenvalues / noise[:, None] + delta).log().sum(-1)
        return (fit - volume).sum() + eigenvalues.numel() * at[-1] - delta * square_norm

    def newton(at: Tensor) -> Tensor:  # (G + 1,), zero for what is fixed
        noise, delta = at[:-1].exp(), at[-1].exp()
        decided = eigenvalues / (eigenvalues + delta * noise[:, None])  # the share of each direction that data decide
        spread = (decided * (1.0 - decided)).sum(-1)
        gradient = torch.cat([error / noise - count + decided.sum(-1), (decided.sum() - delta * square_norm)[None]])
        hessian = torch.cat([error / noise + spread, (spread.sum() + delta * square_norm)[None]]).diag()
        hessian[-1, :-1] = hessian[:-1, -1] = spread
        hessian.masked_fill_(fixed[:, None] | fixed, 0.0)
        hessian.diagonal().add_(fixed + 1e-12 * hessian.diagonal().max() + 1e-300)
        return torch.linalg.solve(hessian, gradient.masked_fill(fixed, 0.0))

    at = start
    for _ in range(MAX_STEPS):
        step, value = newton(at), evidence(at)
        step *= (MAX_STEP / step.abs().max()).clamp_max(1.0)
        # Halved while it overshoots; close to the maximum rounding decides, and any step is a short one.
        tried = ((at + step * 0.5**halving).clamp(start - REACH, start + REACH) for halving in range(30))
        before, at = at, next((place for place in tried if bool(evidence(place) >= value)), at)
        if float((at - before).abs().max()) < TOLERANCE:
            break
    return at[:-1].exp(), float(at[-1].exp())
