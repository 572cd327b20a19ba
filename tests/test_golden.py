"""Predictions recorded from an earlier version: small fits of every form, compared to rounding error.

Each case of `CASES` fits one method on synthetic data and predicts a few rows; `tests/golden/NAME.npz` holds what it
gave when it was recorded. FMGP cases with a fixed form also hold the parameters after one training step. A change that
is meant to move numbers records them anew, and its commit says why:

    python -m tests.test_golden --record            # all cases
    python -m tests.test_golden --record NAME...    # some of them

A change of the API is followed in `answers`, `learned` and the table of cases, not in the recorded files.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from posthoc import ELLA, FMGP, MAP, Categorical, Gaussian, Laplace, Outputs, Temperature, Vector
from posthoc.kernels import RBF, Constant, Linear, Matern, White

Numbers = dict[str, NDArray[Any]]

GOLDEN = Path(__file__).parent / "golden"
EXACT, CLOSE = 1e-12, 1e-6
"""Tolerances relative to an array's largest entry: where arithmetic is that of the recording, and elsewhere. Another
release of torch or another CPU may sum in another order, and training carries such differences on."""
TEST_ROWS = 12
D, WIDTH = 2, 4


class Data(NamedTuple):
    """Rows to fit on, to calibrate or validate on, and to predict; and the network behind them."""

    fit: Outputs
    val: Outputs
    test: Outputs
    network: nn.Module


class Case(NamedTuple):
    """How to make a fitted method, and the data it is for."""

    data: Callable[[], Data]
    fit: Callable[..., Any]  # (data, **options) -> what predicts
    steps: int | None = None  # of training, where one step alone is recorded too
    predict: Callable[[Any, Data], Any] = lambda method, data: method.predict(data.test)


def answers(pred: Any, y: Any) -> Numbers:
    """What a prediction says, by names that do not change with the API."""
    if hasattr(type(pred), "covers"):
        return {**conformal_answers(pred, y), **answers(pred.base, y)}
    found: dict[str, Tensor] = {"mean": pred.latent.mean, "log_prob": pred.log_prob(y)}
    regression = y.is_floating_point()
    if regression:
        lower, upper = pred.interval(0.9)
        found |= {"latent_variance": pred.latent_variance, "noise": pred.noise, "lower": lower, "upper": upper}
        found |= {"quantile_0.05": pred.quantile(0.05), "quantile_0.6": pred.quantile(0.6), "cdf": pred.cdf(y)}
        found["variance"] = pred.variance
    else:
        found |= {"probs": pred.probs, "log_probs": pred.log_probs, "entropy": pred.entropy()}
        found |= {"temperature": pred.temperature, "variance": pred.latent.variance}
    if pred.latent.full_covariance is not None:
        found["covariance"] = (pred if regression else pred.latent).covariance
    return numpy(found)


def conformal_answers(pred: Any, y: Any) -> Numbers:
    """What a conformal prediction says beside the prediction it is built on."""
    found: dict[str, Tensor] = {"conformal_covers": pred.covers(y, 0.9)}
    if hasattr(type(pred), "sets"):
        found |= {"conformal_sets": pred.sets(0.9), "conformal_size": pred.size(0.8)}
    else:
        lower, upper = pred.interval(0.9)
        found |= {"conformal_lower": lower, "conformal_upper": upper}
    return numpy(found)


def learned(method: Any) -> Numbers:
    """The parameters of a fitted FMGP."""
    return numpy({f"step/{name}": p.detach() for name, p in method.head.named_parameters()})


def fit_of(
    kind: Any, likelihood: Any = None, *, network: bool = False, val: bool = False, **options: Any
) -> Callable[..., Any]:
    """A fit of a method, on outputs that are known or on those of a network."""

    def fit(data: Any, **more: Any) -> Any:
        task = "regression" if data.fit.targets.is_floating_point() else "classification"
        given = options | more
        if "steps" in given:
            given = {"lr": 0.02} | given  # the rate that these numbers were recorded with
        method = kind(data.network if network else None, likelihood or task, **given)
        train = (data.fit.inputs, data.fit.targets) if network else data.fit
        return method.fit(train, val=data.val if val else None)

    return fit


fmgp = partial(fit_of, FMGP, num_inducing=10, batch_size=50, progress=False)


def calibrated(fit: Callable[..., Any], score: str | None = None) -> Callable[..., Any]:
    return lambda data: fit(data).conformal(data.val, score=score)


def of_inputs(method: Any, data: Data) -> Any:
    return method.predict(data.test.inputs)


def with_covariance(method: Any, data: Data) -> Any:
    return method.predict(data.test, covariance=True)


class Network(nn.Module):
    """inputs -> tanh features -> outputs, in float64."""

    def __init__(self, rng: np.random.Generator, outputs: int, scale: float) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(D, WIDTH).double(), nn.Linear(WIDTH, outputs).double()
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.from_numpy(rng.normal(size=tuple(p.shape))))
            self.last.weight.mul_(scale)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.body(x).tanh())
        return out


def drawn(seed: int, rows: int, outputs: int, scale: float, targets: Callable[..., NDArray[Any]]) -> Data:
    """Rows of a network; `targets` draws theirs from the generator, the inputs and the outputs."""
    rng = np.random.default_rng(seed)
    network = Network(rng, outputs, scale)

    def draw(n: int, scale: float = 1.0) -> Outputs:
        x = scale * rng.normal(size=(n, D))
        with torch.no_grad():
            features = network.body(torch.from_numpy(x)).tanh()
            mean = network.last(features)
        return Outputs(mean, targets(rng, x, mean.numpy()), features, x)

    return Data(draw(rows), draw(80), draw(TEST_ROWS, 2.0), network)


def regression(rows: int = 300, outputs: int = 1) -> Data:
    """A noise that grows with the first input, and is skewed."""

    def targets(rng: Any, x: Any, mean: Any) -> Any:
        return mean + (0.1 + 0.4 * np.abs(x[:, :1])) * (rng.gamma(2.0, size=mean.shape) - 2.0)

    return drawn(1, rows, outputs, 1.0, targets)


def classes(rows: int = 300, outputs: int = 3) -> Data:
    """Logits that are too sure, more so where the first input is large."""

    def targets(rng: Any, x: Any, logits: Any) -> Any:
        return (logits / (0.5 + 2.5 * np.abs(x[:, :1])) + rng.gumbel(size=logits.shape)).argmax(-1)

    return drawn(2, rows, outputs, 2.5, targets)


def as_probs() -> Data:
    """Classes by their probabilities."""
    return changed_outputs(classes(), lambda outputs: outputs.softmax(-1))


def single_logit() -> Data:
    """Two classes by one logit."""
    return changed_outputs(classes(outputs=2), lambda outputs: outputs[:, 1:] - outputs[:, :1])


def changed_outputs(data: Data, change: Callable[[Tensor], Tensor]) -> Data:
    fit, val, test = (rows.with_outputs(change(rows.outputs)) for rows in (data.fit, data.val, data.test))
    return Data(fit, val, test, data.network)


SCALING = Categorical(training="logit_scaling", prediction="logit_scaling")
ON_INPUTS = RBF(on="inputs")
MONTE_CARLO = Categorical(training="monte_carlo", prediction="monte_carlo", samples=16)
KERNELS = Matern(on="features") + Linear(on="inputs") * Constant(variance=0.5) + White(variance=0.1)
THREE = partial(regression, outputs=3)
MANY = partial(classes, outputs=12)

# Cases named "auto" let the fit choose the form of the variance; where one is named too, it is the one chosen.
CASES: dict[str, Case] = {
    "regression_learnt": Case(regression, fmgp(scale="none"), 30),
    "regression_gaussian_inputs": Case(regression, fmgp(kernel=ON_INPUTS, residuals="gaussian", alpha=0.5), 30),
    "regression_kernels_elbo": Case(
        regression, fmgp(kernel=KERNELS, residuals="gaussian", alpha=0.0, inducing="random"), 30
    ),
    "regression_network": Case(partial(regression, rows=150), fmgp(network=True, variance="shared"), 30, of_inputs),
    "regression_not_cached": Case(partial(regression, rows=150), fmgp(network=True, cache=False), 20, of_inputs),
    "regression_early_stopping": Case(
        regression, fmgp(val=True, lr=0.1, eval_every=5, patience=2, residuals="gaussian"), 40
    ),
    "regression_default_steps": Case(partial(regression, rows=220), fmgp(residuals="gaussian")),
    "regression_outputs_auto": Case(THREE, fmgp(Gaussian("per_output"), scale="none"), 30, with_covariance),
    "regression_outputs_separable": Case(THREE, fmgp(variance="separable", residuals="gaussian"), 30, with_covariance),
    "regression_outputs_shared": Case(THREE, fmgp(variance="shared", standardize=False, scale="none"), 30),
    "classes_auto_separable": Case(partial(classes, rows=800), fmgp(steps=200, lr=0.05)),
    "classes_auto_per_output": Case(partial(classes, rows=400, outputs=2), fmgp(steps=150, lr=0.05, kernel=ON_INPUTS)),
    "classes_auto_temperature": Case(partial(classes, rows=400), fmgp(steps=90, lr=0.03)),
    "classes_auto_val": Case(partial(classes, rows=250), fmgp(val=True, steps=60)),
    "classes_auto_few": Case(partial(classes, rows=150), fmgp(steps=40)),
    "classes_auto_many": Case(MANY, fmgp(steps=40)),
    "classes_separable": Case(classes, fmgp(variance="separable"), 30, with_covariance),
    "classes_per_output": Case(classes, fmgp(variance="per_output", inducing="per_class"), 30, with_covariance),
    "classes_default_steps": Case(partial(classes, rows=220), fmgp(variance="separable")),
    "classes_shared": Case(classes, fmgp(variance="shared"), 30),
    "classes_shared_once_inputs": Case(
        classes, fmgp(variance="shared", kl="once", kernel=ON_INPUTS, ood_strength=0.0), 30
    ),
    "classes_logit_scaling": Case(classes, fmgp(SCALING, variance="per_output"), 30),
    "classes_monte_carlo": Case(classes, fmgp(MONTE_CARLO, variance="separable", alpha=0.5), 20),
    "classes_novelty": Case(classes, fmgp(variance="separable", ood_strength=1.0), 30),
    "classes_low_rank": Case(MANY, fmgp(variance="per_output", output_rank=2), 20, with_covariance),
    "classes_low_rank_separable": Case(MANY, fmgp(variance="separable", output_rank=2), 20),
    "classes_network": Case(partial(classes, rows=150), fmgp(network=True, variance="separable"), 20, of_inputs),
    "classes_probs": Case(as_probs, fmgp(variance="separable", outputs_are="probs"), 20),
    "classes_single_logit": Case(single_logit, fmgp(variance="separable"), 20),
    "map_regression": Case(regression, fit_of(MAP, val=True)),
    "map_classes": Case(classes, fit_of(MAP)),
    "temperature_classes": Case(classes, fit_of(Temperature)),
    "vector_classes": Case(classes, fit_of(Vector)),
    "laplace_regression": Case(regression, fit_of(Laplace)),
    "laplace_classes_kron": Case(classes, fit_of(Laplace), None, with_covariance),
    "laplace_classes_full_val": Case(classes, fit_of(Laplace, curvature="full", prior_precision="val", val=True)),
    "laplace_classes_diag": Case(classes, fit_of(Laplace, curvature="diag", prior_precision=2.0)),
    "ella_classes": Case(partial(classes, rows=150), fit_of(ELLA, network=True), None, of_inputs),
    "conformal_intervals": Case(regression, calibrated(fmgp(steps=20, scale="none"))),
    "conformal_joint": Case(THREE, calibrated(fit_of(MAP), "joint")),
    "conformal_sets": Case(classes, calibrated(fmgp(variance="shared", steps=20))),
    "conformal_raps": Case(MANY, calibrated(fit_of(Temperature), "raps")),
}


def found(case: Case) -> Numbers:
    """All that a case records."""
    data = case.data()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a few rows and steps are worth some warnings
        method = case.fit(data, **({"steps": case.steps} if case.steps else {}))
        after_one_step = learned(case.fit(data, steps=1)) if case.steps else {}
        return answers(case.predict(method, data), data.test.targets) | after_one_step


def numpy(tensors: dict[str, Tensor]) -> Numbers:
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}


def arithmetic() -> Numbers:
    """What tells whether this machine rounds as the one that recorded: torch's version, and the bits of a few results
    of its linear algebra."""
    a = torch.from_numpy(np.random.default_rng(0).normal(size=(40, 40)))
    gram = a @ a.mT + torch.eye(40, dtype=torch.float64)
    solved = torch.linalg.solve_triangular(torch.linalg.cholesky(gram), a, upper=False)
    probe = torch.stack([gram.sum(), solved.sum(), a.exp().sum(), a.tanh().sum(), torch.linalg.eigvalsh(gram).sum()])
    return {"torch": np.array(str(torch.__version__)), "probe": probe.numpy()}


def tolerance(recorded: Numbers, here: Numbers) -> float:
    same = all(np.array_equal(recorded[name], here[name]) for name in ("torch", "probe"))
    return EXACT if same else CLOSE


def assert_same(values: Numbers, recorded: Numbers, within: float) -> None:
    """Equal names, shapes and dtypes, and values whose difference is small beside the array's largest."""
    assert sorted(values) == sorted(recorded)
    for name, expected in recorded.items():
        value = values[name]
        assert (value.shape, value.dtype) == (expected.shape, expected.dtype), name
        if expected.dtype == bool or np.issubdtype(expected.dtype, np.integer):
            np.testing.assert_array_equal(value, expected, err_msg=name)
            continue
        largest = np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
        np.testing.assert_allclose(value, expected, rtol=within, atol=within * largest, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    with np.load(GOLDEN / f"{name}.npz") as file:
        recorded = dict(file)
    within = tolerance(recorded, arithmetic())
    values = {key: value for key, value in recorded.items() if key not in ("torch", "probe")}
    assert_same(found(CASES[name]), values, within)


def test_every_recording_has_its_case():
    assert sorted(path.stem for path in GOLDEN.glob("*.npz")) == sorted(CASES)


def test_a_difference_is_seen():
    recorded = {"mean": np.array([1.0, -2.0, 1e-20]), "sets": np.array([True, False])}
    assert_same({"mean": recorded["mean"] + 1e-13, "sets": recorded["sets"]}, recorded, EXACT)
    with pytest.raises(AssertionError, match="mean"):
        assert_same({"mean": recorded["mean"] + 1e-11, "sets": recorded["sets"]}, recorded, EXACT)
    with pytest.raises(AssertionError, match="sets"):
        assert_same({"mean": recorded["mean"], "sets": ~recorded["sets"]}, recorded, CLOSE)
    with pytest.raises(AssertionError):
        assert_same({"mean": recorded["mean"]}, recorded, CLOSE)


if __name__ == "__main__" and sys.argv[1:2] == ["--record"]:
    torch.set_num_threads(1)  # sums by several threads come in another order
    for name in sys.argv[2:] or CASES:
        np.savez_compressed(GOLDEN / f"{name}.npz", **found(CASES[name]), **arithmetic())  # type: ignore[arg-type]
        print(f"recorded {name}")
