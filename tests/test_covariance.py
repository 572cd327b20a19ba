"""The variational family against dense computations."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posthoc.errors import NotPSDError, PosthocWarning
from posthoc.fmgp.output_covariance import marginal_variance
from posthoc.fmgp.process import correction
from posthoc.numerics import cholesky
from tests import oracles

DOUBLE = torch.float64


def problem(seed: int, n: int = 7, m: int = 5, d: int = 2):
    g, one = torch.Generator().manual_seed(seed), torch.ones(d, dtype=DOUBLE)
    x, z, chol = (torch.randn(*shape, dtype=DOUBLE, generator=g) for shape in ((n, d), (m, d), (m, m)))
    kzz, kxz = (oracles.kernel_matrix("rbf", points, z, one, 1.3) for points in (z, x))
    return chol.tril(), kzz, kxz, torch.full((n,), 1.3, dtype=DOUBLE)


@pytest.mark.parametrize("seed", range(5))
def test_correction_and_kl_are_the_dense_ones(seed):
    chol, kzz, _, _ = problem(seed)
    w, kl = correction(chol, kzz)
    expected = oracles.correction(chol, kzz)
    torch.testing.assert_close(w.mT @ w, expected, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(kl, oracles.gaussian_kl(kzz - kzz @ expected @ kzz, kzz), rtol=1e-6, atol=1e-6)


def test_kl_is_zero_at_the_prior_and_grows_with_l():
    chol, kzz, _, _ = problem(0)
    values = [float(correction(s * chol, kzz).kl) for s in (0.0, 1e-4, 0.1, 1.0, 10.0)]
    assert 0.0 == values[0] < 1.0 < values[-1]
    assert values == sorted(values)


def test_paper_sign_of_the_trace_would_not_give_a_kl():
    """Trap 1: with the printed sign, the value would be first order in Ã; the true one is second order and positive."""
    chol, kzz, _, _ = problem(1)
    chol = 1e-3 * chol
    trace = (kzz @ oracles.correction(chol, kzz)).trace()
    log_det = torch.linalg.slogdet(torch.eye(5, dtype=DOUBLE) + kzz @ chol @ chol.mT).logabsdet
    kl = correction(chol, kzz).kl
    torch.testing.assert_close(kl, 0.5 * (log_det - trace), rtol=1e-4, atol=0)
    assert 0.5 * (log_det + trace) > 100 * kl > 0


def test_zero_l_is_a_stationary_point():
    """Trap 11: training must not start there."""
    chol, kzz, kxz, k_diag = problem(2)
    chol = torch.zeros_like(chol).requires_grad_()
    c = correction(chol, kzz)
    (marginal_variance(k_diag, kxz, c.w).sum() + c.kl).backward()
    assert torch.equal(chol.grad, torch.zeros_like(chol))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 6),
    m=st.integers(1, 8),
    scale=st.sampled_from([1e-6, 1.0, 1e3, 1e6]),
    duplicated=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_variance_stays_between_zero_and_the_prior(seed, n, m, scale, duplicated, dtype):
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(m, 2, dtype=DOUBLE, generator=g)
    if duplicated:
        z[m // 2 :] = z[0]
    x = torch.cat([torch.randn(n, 2, dtype=DOUBLE, generator=g), z])
    one = torch.ones(2, dtype=DOUBLE)
    kzz, kxz = oracles.kernel_matrix("rbf", z, z, one, 1.0), oracles.kernel_matrix("rbf", x, z, one, 1.0)
    chol = scale * torch.randn(m, m, dtype=DOUBLE, generator=g).tril()
    with warnings.catch_warnings():  # at a scale of 1e6 jitter may be needed, and says so
        warnings.simplefilter("ignore", PosthocWarning)
        c = correction(chol.to(dtype), kzz.to(dtype))
    assert c.w.dtype == torch.float64  # M x M algebra, whatever the network's dtype
    variance = marginal_variance(torch.ones(len(x), dtype=DOUBLE), kxz, c.w)
    assert ((variance >= 0) & (variance <= 1.0)).all()
    assert float(c.kl) >= -1e-9


def test_gradients_agree_with_finite_differences():
    chol, kzz, kxz, k_diag = problem(3, n=3, m=4)

    def both(chol, kzz, kxz):
        c = correction(chol.tril(), 0.5 * (kzz + kzz.mT))
        return marginal_variance(k_diag, kxz, c.w), c.kl

    inputs = [t.clone().requires_grad_() for t in (chol, kzz, kxz)]
    assert torch.autograd.gradcheck(both, inputs, eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_family_is_in_float64_whatever_its_tensors_are(dtype):
    chol, kzz, k_xz, k_diag = (tensor.to(dtype) for tensor in problem(2))
    found, expected = correction(chol, kzz), correction(chol.double(), kzz.double())
    assert torch.equal(found.w, expected.w)
    assert torch.equal(found.kl, expected.kl)
    k_xz.requires_grad_()
    variance = marginal_variance(k_diag, k_xz, found.w)
    assert torch.equal(variance, marginal_variance(k_diag.double(), k_xz.double(), expected.w))
    assert torch.autograd.grad(variance.sum(), k_xz)[0].dtype == dtype


def test_jitter_grows_with_a_warning_then_the_matrix_is_refused():
    eye = torch.eye(3, dtype=DOUBLE)
    singular = torch.ones(3, 3, dtype=DOUBLE) - 1e-9 * eye
    with pytest.warns(PosthocWarning, match="not positive definite; added 1e-08"):
        factor = cholesky(singular, "K")
    torch.testing.assert_close(factor @ factor.mT, singular, rtol=0, atol=1e-7)
    for matrix, message in ((-eye, "Expected K to be positive definite"), (torch.nan * eye, "NaN")):
        with pytest.raises(NotPSDError, match=message):
            cholesky(matrix, "K")
