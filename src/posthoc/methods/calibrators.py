"""Calibrators: maps of a classifier's probabilities, fitted on labeled rows. All but two can change the label."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from posthoc.base import Fitted, Job, Predictor
from posthoc.collect.outputs import Outputs
from posthoc.config import ScoreConfig, SeedConfig, option
from posthoc.likelihoods.categorical import Categorical
from posthoc.methods.temperature import Temperature, remapped
from posthoc.methods.vector import folds
from posthoc.optional import require
from posthoc.predictive.base import Predictive

MAX_ROWS = 50_000
"""The largest number of rows that a calibrator is fitted on."""
SMALLEST = math.log(torch.finfo(torch.float32).tiny)
"""Logarithms of probabilities below this one are raised to it."""
MAX_STEPS, SEARCH_STEPS, MEMORY = 500, 100, 20
"""Steps of L-BFGS in a fit and when penalties are compared, and its history."""
RIDGE = 0.01
"""Of beta calibration, towards the identity: it only keeps the fit finite where a class is missing or separable."""
PENALTIES, PATIENCE = (10.0, 1.0, 0.1, 0.01, 1e-3, 1e-4), 1
"""The penalties that `Dirichlet` compares, and the number of weaker ones it tries after the best one."""


class Calibrator(Temperature):
    """A map of class probabilities that is fitted on labeled rows, with the logits' mean left as it is.

    A subclass implements `_learn` and `_map`.
    """

    Config: ClassVar[type[ScoreConfig]] = ScoreConfig
    keeps_class: ClassVar[bool] = False
    """Whether the most probable class stays the same."""

    def _fit(self, job: Job) -> Fitted:
        likelihood = super()._fit(job).likelihood
        assert isinstance(likelihood, Categorical)
        inverse = 1.0 / likelihood.temperature.item()
        nn.init.zeros_(likelihood.log_temperature)  # the map starts from the network's own probabilities
        rows = job.train.only().spread(MAX_ROWS).to(torch.device("cpu"))
        assert rows.targets is not None
        learned = self._learn(log_probs(rows), rows.targets, inverse)
        return Fitted(likelihood, {name: list(tensor.shape) for name, tensor in learned.items()}, **learned)

    def _predictor(self, fitted: Any, *, covariance: bool) -> Predictor:
        plain = super()._predictor(fitted, covariance=covariance)

        def predict(outputs: Outputs) -> Predictive:
            mapped = self._map(log_probs(outputs), fitted)
            return remapped(plain.predict(outputs), mapped, keeps_argmax=self.keeps_class)

        return plain._replace(predict=predict)

    def _blank(self, shapes: Mapping[str, Any]) -> Fitted:
        tensors = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        return Fitted(self._blank_likelihood(), shapes, **tensors)

    @abstractmethod
    def _learn(self, log_p: Tensor, y: Tensor, inverse: float) -> dict[str, Tensor]:
        """The tensors in float64 that describe the map.

        Args:
            log_p: Logarithms of the network's probabilities, (N, C).
            y: The classes, (N,).
            inverse: 1/τ of temperature scaling.
        """

    @abstractmethod
    def _map(self, log_p: Tensor, fitted: Any) -> Tensor:  # (N, C)
        """Logarithms of the calibrated probabilities, up to a constant for each row."""


class StructuredMatrix(Calibrator):
    """Structured matrix scaling by probmetrics: softmax(W log q + b), q the probabilities at their best temperature.

    A ridge penalty on b, on the diagonal of W - I and on the rest of W becomes weaker with the number of rows and
    stronger with that of classes (Berta et al., 2026). Needs the extra `calibrators`.

    Args:
        model: A network, a callable, or None to work from `Outputs`.
        likelihood: "classification" (the default), or a `Categorical`.
        outputs_are: What the outputs are: "logits", "log-probs" or "probs".
        device: Where the fitted method computes.

    Example:
        >>> from posthoc import Outputs, StructuredMatrix
        >>> logits = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
        >>> data = Outputs(logits, torch.where(torch.arange(200) % 4 == 0, 0, logits.argmax(1)))
        >>> StructuredMatrix().fit(data).predict(data).probs.shape
        torch.Size([200, 3])
    """

    name = "structured-matrix"
    calibrator: ClassVar[str] = "sms"
    """Its name in probmetrics."""

    def _learn(self, log_p: Tensor, y: Tensor, inverse: float) -> dict[str, Tensor]:
        library = require("probmetrics.calibrators", "calibrators", "Structured scaling")
        fit = library.get_calibrator(self.calibrator).fit(log_p.exp().numpy(), y.numpy())
        found = {"inverse": fit.ts_.cal_.invtemp_, "uniform": 1.0 / (len(y) + 1.0), **self._weights(fit)}
        return {name: torch.as_tensor(value, dtype=torch.float64) for name, value in found.items()}

    def _weights(self, fit: Any) -> dict[str, Any]:
        return {"weight": fit.W_[:, :-1], "bias": fit.W_[:, -1]}

    def _map(self, log_p: Tensor, fitted: Any) -> Tensor:
        q = mixed((fitted.inverse * log_p.clamp_min(SMALLEST)).softmax(-1), fitted.uniform)
        return q.log() @ fitted.weight.mT + fitted.bias


class StructuredVector(StructuredMatrix):
    """Structured vector scaling by probmetrics: as `StructuredMatrix`, with a diagonal matrix.

    Args:
        model: A network, a callable, or None to work from `Outputs`.
        likelihood: "classification" (the default), or a `Categorical`.
        outputs_are: What the outputs are: "logits", "log-probs" or "probs".
        device: Where the fitted method computes.

    Example:
        >>> from posthoc import Outputs, StructuredVector
        >>> logits = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
        >>> data = Outputs(logits, torch.where(torch.arange(200) % 4 == 0, 0, logits.argmax(1)))
        >>> StructuredVector().fit(data).predict(data).probs.shape
        torch.Size([200, 3])
    """

    name = "structured-vector"
    calibrator = "svs"

    def _weights(self, fit: Any) -> dict[str, Any]:
        return {"weight": np.diag(fit.v_), "bias": fit.b_}


class Isotonic(Calibrator):
    """Isotonic regression of each class against the rest, normalized (Zadrozny and Elkan, 2002).

    With N rows, 1/(N + 1) of the uniform distribution is mixed in, since isotonic regression gives probabilities of 0.
    Needs the extra `calibrators` (scikit-learn).

    Args:
        model: A network, a callable, or None to work from `Outputs`.
        likelihood: "classification" (the default), or a `Categorical`.
        outputs_are: What the outputs are: "logits", "log-probs" or "probs".
        device: Where the fitted method computes.

    Example:
        >>> from posthoc import Isotonic, Outputs
        >>> logits = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
        >>> data = Outputs(logits, torch.where(torch.arange(200) % 4 == 0, 0, logits.argmax(1)))
        >>> Isotonic().fit(data).predict(data).probs.shape
        torch.Size([200, 3])
    """

    name = "isotonic"

    def _learn(self, log_p: Tensor, y: Tensor, inverse: float) -> dict[str, Tensor]:
        library = require("sklearn.isotonic", "calibrators", "Isotonic calibration")
        curves = []
        for c, p in enumerate(log_p.exp().numpy().T):
            fit = library.IsotonicRegression(y_min=0.0, y_max=1.0).fit(p, (y == c).double().numpy())
            curves.append(torch.as_tensor(np.stack([fit.X_thresholds_, fit.y_thresholds_])))
        knots = max(2, *(curve.shape[1] for curve in curves))
        full = torch.stack([torch.cat([c, c[:, -1:].expand(2, knots - c.shape[1])], 1) for c in curves], 1)
        return {"x": full[0], "y": full[1], "uniform": torch.tensor(1.0 / (len(y) + 1.0), dtype=torch.float64)}

    def _map(self, log_p: Tensor, fitted: Any) -> Tensor:
        p = log_p.exp().mT.contiguous()  # (C, N)
        right = torch.searchsorted(fitted.x, p).clamp(1, fitted.x.shape[1] - 1)
        (x0, x1), (y0, y1) = ((t.gather(1, right - 1), t.gather(1, right)) for t in (fitted.x, fitted.y))
        share = ((p - x0) / (x1 - x0).clamp_min(1e-300)).clamp(0.0, 1.0)
        raised = (y0 + share * (y1 - y0)).mT
        # Where every class has 0, what is mixed in is all there is.
        return mixed(raised / raised.sum(-1, keepdim=True).clamp_min(1e-300), fitted.uniform).log()


class Beta(Calibrator):
    """Beta calibration of each class against the rest, normalized (Kull et al., 2017).

    The logit of p becomes a log p - b log(1 - p) + c with a, b ≥ 0. Needs the extra `calibrators` (SciPy).

    Args:
        model: A network, a callable, or None to work from `Outputs`.
        likelihood: "classification" (the default), or a `Categorical`.
        outputs_are: What the outputs are: "logits", "log-probs" or "probs".
        device: Where the fitted method computes.

    Example:
        >>> from posthoc import Beta, Outputs
        >>> logits = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
        >>> data = Outputs(logits, torch.where(torch.arange(200) % 4 == 0, 0, logits.argmax(1)))
        >>> Beta().fit(data).predict(data).probs.shape
        torch.Size([200, 3])
    """

    name = "beta"

    def _learn(self, log_p: Tensor, y: Tensor, inverse: float) -> dict[str, Tensor]:
        optimize = require("scipy.optimize", "calibrators", "Beta calibration")
        terms, start = beta_terms(log_p).numpy(), np.array([1.0, 1.0, 0.0])
        bounds = [(0.0, None), (0.0, None), (None, None)]

        def fit(c: int) -> Any:
            x, t = terms[:, c], (y == c).double().numpy()

            def loss(w: Any) -> tuple[float, Any]:
                logit, away = x @ w, w - start
                value = np.logaddexp(0.0, logit).sum() - t @ logit + 0.5 * RIDGE * away @ away
                return value, (0.5 * (1.0 + np.tanh(0.5 * logit)) - t) @ x + RIDGE * away

            return optimize.minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds).x

        return {"weight": torch.as_tensor(np.stack([fit(c) for c in range(terms.shape[1])]))}

    def _map(self, log_p: Tensor, fitted: Any) -> Tensor:
        return nn.functional.logsigmoid((beta_terms(log_p) * fitted.weight).sum(-1))


class EnsembleTemperature(Calibrator):
    """Ensemble temperature scaling: w₁ p^(1/τ) + w₂ p + w₃/C with p^(1/τ) normalized (Zhang et al., 2020).

    The weights, which are positive and sum to 1, and τ are fitted together. The most probable class stays.

    Args:
        model: A network, a callable, or None to work from `Outputs`.
        likelihood: "classification" (the default), or a `Categorical`.
        outputs_are: What the outputs are: "logits", "log-probs" or "probs".
        device: Where the fitted method computes.

    Example:
        >>> from posthoc import EnsembleTemperature, Outputs
        >>> logits = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
        >>> data = Outputs(logits, torch.where(torch.arange(200) % 4 == 0, 0, logits.argmax(1)))
        >>> EnsembleTemperature().fit(data).predict(data).probs.shape
        torch.Size([200, 3])
    """

    name = "ensemble-temperature"
    keeps_class = True

    def _learn(self, log_p: Tensor, y: Tensor, inverse: float) -> dict[str, Tensor]:
        at_label = torch.arange(len(y)), y

        def loss(at: Tensor) -> Tensor:
            return -mixture(log_p, at)[at_label].mean()

        # Each start is mostly one of the first two parts, at this temperature or a higher one.
        starts = [[math.log(inverse) + d, w, -w, -2.0] for d in (0.0, -1.0) for w in (1.0, -1.0)]
        found = [minimized(loss, torch.tensor(start, dtype=torch.float64)) for start in starts]
        return {"weight": min(found, key=lambda at: float(loss(at)))}

    def _map(self, log_p: Tensor, fitted: Any) -> Tensor:
        return mixture(log_p, fitted.weight)


class EntropyTemperature(Calibrator):
    """Temperature scaling with log(1 + exp(w log h + b)) as the temperature (Balanya et al., 2024).

    h is the entropy of the network's probabilities divided by log C. The most probable class stays.

    Args:
        model: A network, a callable, or None to work from `Outputs`.
        likelihood: "classification" (the default), or a `Categorical`.
        outputs_are: What the outputs are: "logits", "log-probs" or "probs".
        device: Where the fitted method computes.

    Example:
        >>> from posthoc import EntropyTemperature, Outputs
        >>> logits = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
        >>> data = Outputs(logits, torch.where(torch.arange(200) % 4 == 0, 0, logits.argmax(1)))
        >>> EntropyTemperature().fit(data).predict(data).probs.shape
        torch.Size([200, 3])
    """

    name = "entropy-temperature"
    keeps_class = True

    def _learn(self, log_p: Tensor, y: Tensor, inverse: float) -> dict[str, Tensor]:
        bias = 1.0 / inverse + math.log(-math.expm1(-1.0 / inverse))  # the inverse of log(1 + exp(b))
        start = torch.tensor([0.0, bias], dtype=torch.float64)
        return {"weight": minimized(lambda at: nn.functional.cross_entropy(entropy_scaled(log_p, at), y), start)}

    def _map(self, log_p: Tensor, fitted: Any) -> Tensor:
        return entropy_scaled(log_p, fitted.weight)


@dataclass(frozen=True, kw_only=True)
class DirichletConfig(ScoreConfig, SeedConfig):
    """Options of `Dirichlet`."""

    penalty: float | None = option(None, least=0.0)


class Dirichlet(Calibrator):
    """Dirichlet calibration, softmax(W log p + b), with off-diagonal and intercept regularization (Kull et al., 2019).

    Args:
        model: A network, a callable, or None to work from `Outputs`.
        likelihood: "classification" (the default), or a `Categorical`.
        penalty: The weight of the mean square of W off the diagonal plus that of b, beside the mean loss. By default
            the one that predicts best in five-fold cross-validation.
        outputs_are: What the outputs are: "logits", "log-probs" or "probs".
        seed: The seed of the folds.
        device: Where the fitted method computes.

    Example:
        >>> from posthoc import Dirichlet, Outputs
        >>> logits = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
        >>> data = Outputs(logits, torch.where(torch.arange(200) % 4 == 0, 0, logits.argmax(1)))
        >>> Dirichlet(penalty=0.1).fit(data).predict(data).probs.shape
        torch.Size([200, 3])
    """

    name = "dirichlet"
    Config = DirichletConfig
    config: DirichletConfig

    def _learn(self, log_p: Tensor, y: Tensor, inverse: float) -> dict[str, Tensor]:
        log_p, penalty = log_p.clamp_min(SMALLEST), self.config.penalty
        start = torch.cat([inverse * torch.eye(log_p.shape[1]), torch.zeros(log_p.shape[1], 1)], 1).double()
        rows = Outputs.trusted(outputs=log_p, targets=y)
        if penalty is None:
            penalty = best_penalty(list(folds(rows, self.config.seed)), start)
        return {"weight": dirichlet(rows, penalty, start)}

    def _map(self, log_p: Tensor, fitted: Any) -> Tensor:
        return affine(log_p.clamp_min(SMALLEST), fitted.weight)


def best_penalty(splits: list[tuple[Outputs, Outputs]], start: Tensor) -> float:
    """The penalty whose fits predict the rows left out best; each fit starts from that with the penalty before."""
    at, scores = [start] * len(splits), list[float]()
    for penalty in PENALTIES:
        at = [dirichlet(train, penalty, w, SEARCH_STEPS) for (train, _), w in zip(splits, at, strict=True)]
        tests = [test for _, test in splits]
        scores.append(sum(float(cross_entropy(t, w)) * len(t) for t, w in zip(tests, at, strict=True)))
        if len(scores) - scores.index(min(scores)) > PATIENCE:
            break
    return PENALTIES[scores.index(min(scores))]


def dirichlet(rows: Outputs, penalty: float, start: Tensor, steps: int = MAX_STEPS) -> Tensor:  # (C, C + 1)
    """W and b of least penalized loss."""
    classes = len(start)
    off = (1.0 - torch.eye(classes, classes + 1, dtype=torch.float64)) / (classes * (classes - 1))
    off[:, -1] = 1.0 / classes
    return minimized(lambda at: cross_entropy(rows, at) + penalty * (off * at.square()).sum(), start, steps)


def cross_entropy(rows: Outputs, weight: Tensor) -> Tensor:  # ()
    """The mean loss of W and b."""
    assert rows.targets is not None
    return nn.functional.cross_entropy(affine(rows.outputs, weight), rows.targets)


def affine(log_p: Tensor, weight: Tensor) -> Tensor:  # (N, C)
    """W log p + b."""
    return log_p @ weight[:, :-1].mT + weight[:, -1]


def log_probs(rows: Outputs) -> Tensor:  # (N, C)
    """The logarithms of the network's probabilities, in float64."""
    return rows.outputs.double().log_softmax(-1)


def mixed(p: Tensor, share: Tensor) -> Tensor:  # (N, C)
    """Probabilities with this share of the uniform distribution mixed in."""
    return (1.0 - share) * p + share / p.shape[-1]


def beta_terms(log_p: Tensor) -> Tensor:  # (N, C, 3)
    """What a, b and c of beta calibration multiply."""
    below = (-torch.expm1(log_p)).log().clamp_min(SMALLEST)
    return torch.stack([log_p.clamp_min(SMALLEST), -below, torch.ones_like(log_p)], -1)


def mixture(log_p: Tensor, at: Tensor) -> Tensor:  # (N, C)
    """The logarithm of w₁ p^(1/τ) + w₂ p + w₃/C, given log 1/τ and the weights' logarithms up to a constant."""
    uniform = torch.full_like(log_p, -math.log(log_p.shape[1]))
    parts = torch.stack([(at[0].exp() * log_p).log_softmax(-1), log_p, uniform])
    return (parts + at[1:].log_softmax(0)[:, None, None]).logsumexp(0)


def entropy_scaled(log_p: Tensor, at: Tensor) -> Tensor:  # (N, C)
    """log p divided by log(1 + exp(w log h + b)), given w and b."""
    h = torch.special.entr(log_p.exp()).sum(-1, keepdim=True) / math.log(log_p.shape[1])
    return log_p / nn.functional.softplus(at[0] * h.clamp_min(1e-12).log() + at[1]).clamp_min(1e-6)


def minimized(loss: Callable[[Tensor], Tensor], start: Tensor, steps: int = MAX_STEPS) -> Tensor:
    """Where L-BFGS ends, or the start if that is no worse."""
    at = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [at], max_iter=steps, tolerance_grad=1e-7, history_size=MEMORY, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        optimizer.zero_grad()
        value = loss(at)
        value.backward()
        return value.item()

    optimizer.step(closure)
    with torch.no_grad():
        return at.detach() if float(loss(at)) < float(loss(start)) else start
