"""`Likelihood`: how an observation comes from the latent outputs. What differs between tasks is a method of it.

The energy of a point is the data term of the Black-Box alpha objective (paper, section 3.5), (1/α) log E_q[p(y|f)^α];
its limit at α = 0 is E_q[log p(y|f)], the ELBO's.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from posthoc.errors import DataError, OptionError
from posthoc.predictive.base import Predictive
from posthoc.predictive.latent import Latent

Metric = str | Callable[[Any, Any], Tensor]


class Likelihood(nn.Module, ABC):
    """One task: its parameters, its units, its energy and its predictions.

    A new task is a subclass with `task`, `check_targets`, `energy`, `predictive` and `spec`, registered under the
    "type" in its `spec` (see `posthoc.likelihoods.registry`). The other methods have defaults.
    """

    task: ClassVar[str]
    """The name of the task; "regression" and "classification" are those of the built-in likelihoods."""
    draws: bool = False
    """Whether the energy is estimated from random draws."""
    samples_latent: ClassVar[bool] = False
    """Whether predictions draw the latent outputs, so that their covariance is computed where they are few."""
    chooses_form: bool = False
    """Whether `FMGP` chooses the form of the variance, and corrects the confidence, on held-out rows."""

    def check_alpha(self, alpha: float) -> None:
        """Raises `OptionError` for an α that `energy` cannot compute."""

    def check_outputs(self, outputs: Tensor) -> None:
        """Raises `DataError` for network outputs of a shape that the task cannot have; default: (N,) or (N, C)."""
        if outputs.ndim not in (1, 2):
            raise DataError(
                f"Expected {self.task} outputs of shape (N,) or (N, outputs), got {tuple(outputs.shape)}: "
                "wrap the model so that it returns one row a point."
            )

    @abstractmethod
    def check_targets(self, targets: Any, outputs: Tensor) -> Tensor:
        """The targets as a tensor that fits the outputs; raises `DataError` otherwise."""

    def initialize(self, outputs: Tensor, targets: Tensor) -> None:
        """Sets units and initial parameters from data, and the shapes of parameters from the shape of the outputs."""

    def set_unit(self, outputs: Tensor, targets: Tensor) -> None:
        """Sets the unit of the outputs in training, where that is not a part of `initialize`."""

    def reset(self) -> None:
        """Sets the parameters to those of the bare network: without temperature, noise of the residuals' size."""

    def bare(self) -> Likelihood:
        """The likelihood of the network without a method, for comparison: in the same units, after `reset`."""
        likelihood = copy.deepcopy(self)
        likelihood.reset()
        return likelihood

    def standardize(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the target for `energy`, in the units of training; the mean is (N, C) in float64."""
        return columns(outputs), targets

    @abstractmethod
    def energy(self, mean: Tensor, latent: Latent, target: Tensor, alpha: float, generator: Any = None) -> Tensor:
        """The energy of each point, (1/α) log E[p(y|f)^α] with f ~ N(mean, latent), (N,)."""

    @abstractmethod
    def predictive(self, outputs: Tensor, latent: Latent, *, covariance: bool = False) -> Predictive:
        """The predictions for network outputs and the latent Gaussian around them, in the user's units."""

    def predictive_from_draws(self, draws: Tensor, *, covariance: bool = False) -> Predictive:
        """The predictions from draws (S, N, ...) of the outputs, in the user's units."""
        raise OptionError(f"A {type(self).__name__} likelihood has no predictions from draws of the network.")

    def curvature(self, outputs: Tensor) -> Tensor:
        """The Hessian of -log p(y|f) in the outputs at f = `outputs`, (N, C, C), as Laplace approximations need it."""
        raise OptionError(f"A {type(self).__name__} likelihood has no curvature: Laplace approximations need one.")

    def with_learned_noise(self, rows: int, alpha: float) -> Likelihood | None:
        """A copy that also learns the distribution of the residuals from so many rows; None if there is none."""
        return None

    def metrics(self) -> tuple[Metric, ...]:
        """The metrics of the task: names of `posthoc.evaluate.scores.METRICS`, or functions (pred, y) -> (N,)."""
        return ("nll",)

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """The "type" under which the likelihood is registered, and the arguments of its constructor."""


def columns(values: Tensor) -> Tensor:
    """Values as (N, C) in float64."""
    return values.double().reshape(len(values), -1)
