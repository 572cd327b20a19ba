"""Methods that trust the network's function and fit the likelihood alone: no variance between the two."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from posthoc.base import Job, Method
from posthoc.collect.outputs import Outputs
from posthoc.likelihoods.base import Likelihood
from posthoc.predictive.base import Predictive
from posthoc.predictive.latent import ZeroLatent
from posthoc.saved import Saved

__all__ = ["LikelihoodOnly"]


class LikelihoodOnly(Method):
    """Fits a likelihood around outputs that are taken for certain. Nothing in it is random or takes long: `seed` and
    `progress` are taken as other methods take them, and change nothing."""

    def __init__(
        self,
        model: nn.Module | Callable[..., Any] | None,
        likelihood: str | Likelihood,
        *,
        layer: str | None = None,
        outputs_are: str = "logits",
        device: str | torch.device | None = None,
        seed: int = 0,
        progress: bool | None = None,
    ) -> None:
        super().__init__(model, likelihood, layer=layer, outputs_are=outputs_are, device=device)
        self._fitted: Likelihood | None = None

    def _fit(self, job: Job) -> None:
        likelihood = copy.deepcopy(self._likelihood)
        self._fit_likelihood(likelihood, job)
        self._fitted = likelihood

    @abstractmethod
    def _fit_likelihood(self, likelihood: Likelihood, job: Job) -> None: ...

    @property
    def likelihood(self) -> Likelihood:
        return self._fitted if self._fitted is not None else self._likelihood

    def _predictor(self, *, covariance: bool) -> Callable[[Outputs], Predictive]:
        likelihood = self.likelihood

        def predict(outputs: Outputs) -> Predictive:
            home = outputs.outputs.device
            likelihood.to(home)
            return likelihood.predictive(outputs.outputs, ZeroLatent(outputs.outputs), covariance=covariance)

        return predict

    def _needs(self, *, fitted: bool) -> tuple[bool, bool]:
        return False, False

    def _tensors(self) -> dict[str, Tensor]:
        return dict(self.likelihood.state_dict())

    def _options(self) -> dict[str, Any]:
        return {}

    @classmethod
    def _rebuild(cls, saved: Saved) -> Self:
        method, likelihood = saved.unfitted(cls), saved.likelihood()
        saved.check(likelihood.state_dict())
        likelihood.load_state_dict(saved.tensors)
        method._fitted = likelihood
        return method
