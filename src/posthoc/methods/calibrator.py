"""Methods that take the network's function as certain and fit the likelihood alone."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from posthoc.base import Fitted, Job, Method, ScoreConfig
from posthoc.collect.outputs import Outputs
from posthoc.likelihoods.base import Likelihood
from posthoc.predictive.base import Predictive
from posthoc.predictive.latent import ZeroLatent

__all__ = ["LikelihoodOnly"]


class LikelihoodOnly(Method):
    """Fits a likelihood around outputs that are certain."""

    Config = ScoreConfig

    def _fit(self, job: Job) -> Fitted:
        likelihood = copy.deepcopy(self._likelihood)
        self._fit_likelihood(likelihood, job)
        return Fitted(likelihood)

    @abstractmethod
    def _fit_likelihood(self, likelihood: Likelihood, job: Job) -> None: ...

    def _predictor(self, fitted: Any, *, covariance: bool) -> Callable[[Outputs], Predictive]:
        def predict(outputs: Outputs) -> Predictive:
            fitted.to(outputs.outputs.device)
            return fitted.likelihood.predictive(outputs.outputs, ZeroLatent(outputs.outputs), covariance=covariance)

        return predict

    def _needs(self, *, fitted: bool) -> tuple[bool, bool]:
        return False, False
