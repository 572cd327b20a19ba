"""The process: coupled outputs against a dense computation, shared variances, two-space kernels."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posthoc import FMGP, RBF, Categorical, Outputs, White
from posthoc.fmgp.inducing_points import Inducing
from posthoc.fmgp.output_covariance import OutputCovariance
from posthoc.fmgp.points import TrainingBatch
from posthoc.fmgp.process import Objective, Process
from posthoc.kernels import gram
from posthoc.likelihoods.gaussian import Gaussian
from tests import oracles

DOUBLE = torch.float64


def coupled(seed=0, m=7, c=4, rank=None, classes=None, kernel=None):
    g = torch.Generator().manual_seed(seed)
    kernel = kernel or RBF() + White(variance=0.2)
    z = {"inputs": torch.randn(m, 2, dtype=DOUBLE, generator=g)}
    kernel.initialize(z, "inputs")
    b = OutputCovariance(c, rank, g)
    b.factor.data += 0.5 * torch.randn(b.factor.shape, dtype=DOUBLE, generator=g)
    z_class = torch.randint(c, (m,), generator=g) if classes is None else torch.tensor(classes)
    process = Process(kernel, Inducing(z, z_class), c, b, start=1.0)
    process.l_raw.data += torch.randn(m, m, dtype=DOUBLE, generator=g)
    return process, {"inputs": torch.randn(5, 2, dtype=DOUBLE, generator=g)}


def dense(process, x):
    z, k, b = dict(process.z), process.kernel, process.coupling.matrix()
    return oracles.coupled_covariance(b, k.diag(x), k(x, z), gram(k, z), process.z_class, process.chol)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), m=st.integers(1, 9), c=st.integers(2, 6), low=st.booleans())
def test_coupled_outputs_are_the_dense_multi_output_gp(seed, m, c, low):
    """M above, equal to and below the number of classes, with classes missing."""
    process, x = coupled(seed, m, c, 2 if low else None)
    expected, top = dense(process, x), torch.arange(5) % c
    latent, _ = process(x)
    for one in (latent, process.latent(x)):  # in one evaluation of the kernel, and with W kept
        torch.testing.assert_close(one.covariance(), expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(latent.variance, expected.diagonal(dim1=1, dim2=2), rtol=1e-6, atol=1e-8)
    difference = oracles.DenseLatent(expected).difference(top)
    torch.testing.assert_close(latent.difference(top), difference, rtol=1e-6, atol=1e-7)


def test_white_does_not_tie_a_test_point_to_an_inducing_point():
    """Trap 4: a point that coincides with an inducing point keeps its own δ."""
    process, _ = coupled(c=2)
    at_z = {"inputs": process.z["inputs"].detach().clone()}
    torch.testing.assert_close(process(at_z)[0].covariance(), dense(process, at_z), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["l_raw", "z.inputs", "log_lengthscale", "log_amplitude"])
@pytest.mark.parametrize("kernel", [RBF, lambda: RBF() + White(variance=0.2)])
def test_what_is_kept_between_predictions_follows_the_parameters(kernel, name):
    process, x = coupled(kernel=kernel())
    before = process.latent(x).variance
    with torch.no_grad():
        next(p for own, p in process.named_parameters() if own.endswith(name)).add_(0.3)
    torch.testing.assert_close(process.latent(x).variance, process(x)[0].variance)
    assert not torch.allclose(process.latent(x).variance, before)


def test_classes_without_inducing_points_keep_the_prior_unless_b_couples_them():
    """Trap 12."""
    process, x = coupled(m=3, c=4, classes=[0, 0, 1])
    process.coupling.factor.data.copy_(torch.eye(4, dtype=DOUBLE))
    variance, prior = process(x)[0].variance, process.kernel.diag(x)
    torch.testing.assert_close(variance[:, 2:], prior[:, None].expand(-1, 2))
    assert (variance[:, :2] < prior[:, None]).all()
    process.coupling.factor.data[3, 0] = 0.9
    assert (process(x)[0].variance[:, 3] < prior * (1 + 0.81) - 1e-6).all()


def shared(c):
    kernel = RBF()
    z = {"inputs": torch.randn(4, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))}
    kernel.initialize(z, "inputs")
    return Process(kernel, Inducing(z, torch.zeros(4, dtype=torch.long)), c, None, start=0.7)


def test_a_shared_variance_is_that_of_independent_copies():
    """Trap 9: V = v(x) I, and the KL of all C copies unless asked otherwise."""
    process, x = shared(3), {"inputs": torch.randn(5, 2, dtype=DOUBLE)}
    latent, kl = process(x)
    torch.testing.assert_close(latent.covariance(), latent.variance[:, :1, None] * torch.eye(3, dtype=DOUBLE))
    # the same process written as coupled outputs, B = I, one set of inducing points a class
    inducing = Inducing({"inputs": process.z["inputs"].detach().repeat(3, 1)}, torch.arange(3).repeat_interleave(4))
    expected, full = Process(process.kernel, inducing, 3, OutputCovariance(3), start=0.7)(x)
    torch.testing.assert_close(latent.covariance(), expected.covariance())
    torch.testing.assert_close(3 * kl, full)


def test_objective_is_the_paper_s_with_the_batch_scaled():
    """N/|B| Σ energy - KL, by hand, over N."""
    process, x = shared(1), {"inputs": torch.randn(5, 2, dtype=DOUBLE)}
    likelihood, target = Gaussian(), torch.randn(5, 1, dtype=DOUBLE)
    loss = Objective(process, likelihood, 1.0, 50)(TrainingBatch(x, torch.zeros_like(target), target))
    latent, kl = process(x)
    log_density = torch.distributions.Normal(0.0, (latent.variance + likelihood.noise).sqrt()).log_prob(target)
    torch.testing.assert_close(-50 * loss, (50 / 5) * log_density.sum() - kl)


def test_objective_gradients_agree_with_finite_differences():
    (process, x), likelihood = coupled(m=4, c=3), Categorical()
    batch = TrainingBatch(x, 3 * torch.randn(5, 3, dtype=DOUBLE), torch.tensor([0, 1, 2, 0, 1]))
    objective = Objective(process, likelihood, 1.0, 50)
    objective(batch).backward()
    for parameter in [*process.parameters(), *likelihood.parameters()]:
        flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
        for i in range(0, len(flat), max(1, len(flat) // 5)):
            values = []
            for step in (1e-6, -1e-6):
                flat[i] += step
                values.append(float(objective(batch).detach()))
                flat[i] -= step
            assert (values[0] - values[1]) / 2e-6 == pytest.approx(float(gradient[i]), rel=1e-4, abs=1e-8)


def test_memorised_data_teach_no_variance_and_unmemorised_ones_do():
    """Trap 10."""
    g = torch.Generator().manual_seed(0)
    labels, features = torch.randint(3, (400,), generator=g), torch.randn(400, 2, generator=g)
    confident = 12.0 * torch.nn.functional.one_hot(labels, 3).float()
    wrong, entropies = torch.cat([(labels[:100] + 1) % 3, labels[100:]]), []
    for truth in (labels, wrong):
        bayes = FMGP(None, "classification", num_inducing=10, steps=300, lr=0.03)
        pred = bayes.fit(Outputs(confident, truth, features)).predict(Outputs(confident, None, features))
        entropies.append(float(pred.entropy().mean()))
    assert entropies[0] < 0.01
    assert entropies[1] > 0.3


def test_an_underconfident_network_is_sharpened_by_the_temperature():
    """Trap 8: a variance can only flatten; τ < 1 sharpens, and the latent mean stays."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(1000, 4, generator=g)
    labels = torch.multinomial((3.0 * logits).softmax(-1), 1, generator=g).squeeze(1)
    data, options = Outputs(logits, labels), {"num_inducing": 10, "steps": 400, "lr": 0.02}
    pred = FMGP(None, "classification", **options).fit(data).predict(data)
    assert float(pred.temperature) < 0.6
    assert torch.equal(pred.latent.mean, logits)
    fixed = FMGP(None, Categorical(temperature=1.0), **options).fit(data)
    assert float(fixed.head.likelihood.temperature) == 1.0
    assert float((fixed.predict(data).log_prob(labels) - pred.log_prob(labels)).mean()) < -0.05


def test_units_of_the_features_do_not_matter_unless_asked():
    g = torch.Generator().manual_seed(0)
    features, residuals = torch.randn(60, 3, generator=g, dtype=DOUBLE), torch.randn(60, 1, generator=g, dtype=DOUBLE)
    units = torch.tensor([1.0, 1000.0, 0.001], dtype=DOUBLE)
    for standardize in (True, False):
        plain, scaled = (
            FMGP(None, "regression", num_inducing=5, steps=5, standardize=standardize).fit(data).predict(data).variance
            for data in (Outputs(0 * residuals, residuals, f) for f in (features, features * units + 7.0))
        )
        assert torch.allclose(plain, scaled, rtol=1e-6) == standardize
