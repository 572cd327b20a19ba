"""Whatever the shapes, dtypes and degeneracies of the data, a fit ends and its predictions are sound."""

import warnings

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posthoc import FMGP, Outputs, PosthocWarning

DATA = {
    "seed": st.integers(0, 10_000),
    "n": st.integers(1, 12),
    "m": st.integers(1, 15),
    "dtype": st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    "kind": st.sampled_from(["plain", "duplicated", "constant", "huge", "none"]),
}


def features(n: int, d: int, kind: str, g: torch.Generator) -> torch.Tensor | None:
    x = torch.randn(n, d, generator=g, dtype=torch.float64)
    kinds = {"plain": x, "duplicated": x[:1].expand(n, d), "constant": torch.full_like(x, 3.0), "huge": 1e8 * x}
    return kinds.get(kind)


def fitted(task: str, outputs: Outputs, m: int, **options) -> FMGP:
    with warnings.catch_warnings():  # fewer points than inducing points, half precision: both say so, and serve
        warnings.simplefilter("ignore", PosthocWarning)
        return FMGP(None, task, num_inducing=m, steps=4, batch_size=5, **options).fit(outputs)


@settings(max_examples=40, deadline=None)
@given(**DATA, d=st.integers(1, 4), shape=st.sampled_from([(), (1,), (3,)]), exact=st.booleans())
def test_regression(seed, n, d, m, shape, dtype, kind, exact):
    """N = 1, M > N, a network without any error, every shape of outputs."""
    g = torch.Generator().manual_seed(seed)
    outputs = torch.randn(n, *shape, generator=g).to(dtype)
    targets = outputs.clone() if exact else torch.randn(n, *shape, generator=g)
    data = Outputs(outputs, targets, features(n, d, kind, g))
    pred = fitted("regression", data, m).predict(data)
    assert torch.equal(pred.latent.mean, outputs)
    assert pred.latent.variance.shape == outputs.shape
    assert pred.latent.variance.dtype == torch.promote_types(dtype, torch.float32)
    assert pred.latent.variance.isfinite().all()
    assert (pred.latent.variance > 0).all()
    assert (pred.latent_variance >= 0).all()
    assert pred.log_prob(targets).shape == (n,)
    assert pred.log_prob(targets).isfinite().all()


@settings(max_examples=40, deadline=None)
@given(
    **DATA,
    c=st.integers(2, 6),
    variance=st.sampled_from(["per_output", "shared"]),
    inducing=st.sampled_from(["kmeans", "random", "per_class"]),
)
def test_classification(seed, n, c, m, dtype, kind, variance, inducing):
    """Classes missing from the data, M above and below the number of classes, tied logits."""
    g = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(n, c, generator=g)).to(dtype)
    labels = torch.randint(c - 1, (n,), generator=g)  # the last class never occurs
    data = Outputs(logits, labels, features(n, 3, kind, g))
    pred = fitted("classification", data, m, variance=variance, inducing=inducing).predict(data)
    assert torch.equal(pred.latent.mean, logits)
    assert pred.probs.isfinite().all()
    torch.testing.assert_close(pred.probs.sum(-1), torch.ones(n, dtype=pred.probs.dtype))
    assert (pred.latent.variance >= 0).all()
    assert torch.equal(pred.probs.argmax(-1), logits.argmax(-1))
    assert pred.log_prob(labels).isfinite().all()
