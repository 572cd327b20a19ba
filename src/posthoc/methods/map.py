"""`MAP`, the network as it is, and what it shares with the other methods that fit a likelihood alone."""

from __future__ import annotations

import copy
from typing import Any, Self

from posthoc.base import Fitted, Job, Method, Predictor
from posthoc.collect.outputs import Outputs
from posthoc.config import ScoreConfig
from posthoc.predictive.base import Predictive
from posthoc.predictive.latent import ZeroLatent


class LikelihoodOnly(Method):
    """A method that fits a likelihood to outputs that have no variance."""

    Config = ScoreConfig

    def _predictor(self, fitted: Any, *, covariance: bool) -> Predictor:
        def predict(outputs: Outputs) -> Predictive:
            fitted.to(outputs.outputs.device)
            return fitted.likelihood.predictive(outputs.outputs, ZeroLatent(outputs.outputs), covariance=covariance)

        return Predictor(predict, self._rows_at_once())

    def _reads(self) -> tuple[str, ...]:
        return ()


class MAP(LikelihoodOnly):
    """The network as it is: its own softmax, or its own output with a constant noise.

    The noise is the one of greatest likelihood on `val` or, without it, on the data of the fit.

    Args:
        model: A network, a callable, or None to work from `Outputs`.
        likelihood: "regression", "classification", or a likelihood object.
        outputs_are: What the outputs of a classifier are: "logits", "log-probs" or "probs".
        device: Where the fitted method computes.

    Example:
        >>> import torch
        >>> from posthoc import MAP, Outputs
        >>> data = Outputs(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]))
        >>> MAP(likelihood="classification").fit(data).predict(data).probs[0]
        tensor([0.8808, 0.1192])
    """

    name = "map"
    any_task = True

    def _fit(self, job: Job) -> Fitted:
        likelihood, held_out = copy.deepcopy(self._likelihood), job.val if job.val is not None else job.train
        assert held_out.targets is not None
        likelihood.initialize(held_out.outputs, held_out.targets)
        likelihood.reset()
        return Fitted(likelihood)

    @classmethod
    def beside(cls, method: Method) -> Self:
        """The bare predictor behind a fitted method, for comparison with it.

        In regression its noise is the spread of the residuals that the method was fitted on.
        """
        likelihood = method.likelihood.bare()
        bare = cls(None, likelihood, outputs_are=method.outputs_are)
        bare._fitted, bare._width, bare._given_width = Fitted(likelihood), method._width, method._given_width
        return bare
