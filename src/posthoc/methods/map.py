"""MAP: the network as it is."""

from __future__ import annotations

import math
from typing import Self

from torch import nn

from posthoc.base import Job, Method
from posthoc.likelihoods.base import NOISE_FLOOR, Categorical, Gaussian, Likelihood
from posthoc.methods.calibrator import LikelihoodOnly

__all__ = ["MAP"]


class MAP(LikelihoodOnly):
    """The network as it is: its own softmax, or its own output with the constant noise that is best on `val` (or,
    without it, on the data of the fit)."""

    name = "map"

    def _fit_likelihood(self, likelihood: Likelihood, job: Job) -> None:
        held_out = job.val if job.val is not None else job.train
        assert held_out.targets is not None
        likelihood.start(held_out.outputs, held_out.targets)
        take_as_it_is(likelihood)

    @classmethod
    def beside(cls, method: Method) -> Self:
        """The bare predictor behind a fitted method: what it would say without it. In regression its noise is the
        spread of the residuals that the method was fitted on."""
        fitted = method.likelihood
        likelihood: Likelihood
        if isinstance(fitted, Gaussian):
            likelihood = Gaussian(fitted.noise_form)
            likelihood.scale = fitted.scale.detach().clone()
        else:
            likelihood = Categorical()
        take_as_it_is(likelihood)
        bare = cls(None, fitted.task, outputs_are=method.outputs_are)
        bare._fitted, bare._width = likelihood, method._width
        return bare


def take_as_it_is(likelihood: Likelihood) -> None:
    """A temperature of one, or a noise of the residuals' own size."""
    if isinstance(likelihood, Gaussian):
        nn.init.constant_(likelihood.log_noise, math.log1p(-NOISE_FLOOR))
    elif isinstance(likelihood, Categorical) and likelihood.fixed_temperature is None:
        nn.init.zeros_(likelihood.log_temperature)
