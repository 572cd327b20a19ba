"""`Laplace`: the linearized Laplace approximation of a network's last layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from posthoc.base import Job, Method
from posthoc.config import FeatureConfig, option
from posthoc.errors import OptionError
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.registry import make_likelihood
from posthoc.methods.laplace.curvature import Form, require_room
from posthoc.methods.laplace.last_layer import find_last_layer, require_last_layer
from posthoc.methods.laplace.posterior import Posterior, fit_posterior, refine


@dataclass(frozen=True, kw_only=True)
class LaplaceConfig(FeatureConfig):
    """Options of `Laplace`."""

    curvature: Form = "kron"
    prior_precision: Literal["marglik", "val"] | float = option("marglik", above=0.0)
    max_gigabytes: float = option(8.0, above=0.0, saved=False)


class Laplace(Method):
    """The weights of the last layer as Gaussian, with the curvature of the loss at the trained ones as its precision.

    `Outputs` with features are enough: the last layer is then found by least squares. Other subsets of the weights are
    for `posthoc.methods.LaplaceTorch`. Nothing in it is random.

    Args:
        model: An `nn.Module` whose last layer is an `nn.Linear`, or None to work from `Outputs` with features.
        likelihood: "regression", "classification", or a `Gaussian` or `Categorical` with options of its own. By default
            classes are predicted by logit scaling (the "probit" approximation) at temperature 1. "shared" noise is one
            σ² for all outputs.
        curvature: "kron" (KFAC), "full" or "diag".
        prior_precision: The precision of the weights' prior, or how it and the noise of a regression are found:
            "marglik" (they maximize the marginal likelihood of the data) or "val" (the likelihood of `val`).
        max_gigabytes: The most memory that the matrices of the curvature may take.
        layer: A module whose output is taken as features. By default the input of the last `nn.Linear` is.
        device: Where the fitted method computes.

    Example:
        >>> import torch
        >>> from posthoc import Laplace
        >>> model = torch.nn.Linear(2, 1)
        >>> x, y = torch.randn(20, 2), torch.randn(20, 1)
        >>> Laplace(torch.nn.Sequential(model), "regression").fit(x, y).predict(x).std.shape
        torch.Size([20, 1])
    """

    name = "laplace"
    Config = LaplaceConfig
    config: LaplaceConfig
    needs_classes = True

    def _suited(self, likelihood: Any) -> Likelihood:
        return linearized(likelihood)

    @property
    def posterior(self) -> Posterior:
        """The fitted posterior of the weights."""
        posterior: Posterior = self._require_fitted("posterior")
        return posterior

    @property
    def prior_precision(self) -> float:
        """The fitted precision of the weights' prior."""
        return float(self.posterior.log_precision.detach().exp())

    def _fit(self, job: Job) -> Posterior:
        prior, form = self.config.prior_precision, self.config.curvature
        if prior == "val" and job.val is None:
            raise OptionError(
                'prior_precision="val" is chosen on validation data: give fit(..., val=...), or use "marglik".'
            )
        train, device = job.train, job.device
        if train.features is not None:
            outputs, features = train.outputs.shape[1:].numel(), train.features.shape[1] + 1
            classes = self._likelihood.task == "classification"
            require_room(form, outputs, features, classes=classes, gigabytes=self.config.max_gigabytes)
        posterior = fit_posterior(
            train.only("features"),
            find_last_layer(self.backbone, train, device),
            self._start_likelihood(train, device),
            form,
            precision=prior if isinstance(prior, float) else None,
            share=job.num_data / len(train),
        )
        if prior == "val" and job.val is not None:
            refine(posterior, job.val.only("features"))
        return posterior

    def _reads(self) -> tuple[str, ...]:
        require_last_layer(self.backbone)
        return ("features",)

    def _blank(self, shapes: Mapping[str, Any]) -> Posterior:
        return Posterior.blank(self._blank_likelihood(), shapes)


def linearized(likelihood: str | Likelihood) -> Likelihood:
    """The likelihood of a Laplace approximation: its temperature is 1 unless the user fixed another one, and by name
    alone classes are predicted by logit scaling."""
    made = make_likelihood(likelihood)
    if not isinstance(made, Categorical):
        return made
    if not isinstance(likelihood, Likelihood):
        return Categorical(temperature=1.0, prediction="logit_scaling")
    return make_likelihood({**made.spec(), "temperature": made.fixed_temperature or 1.0})
