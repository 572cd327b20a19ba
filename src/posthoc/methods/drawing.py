"""What methods share that predict with several networks, or several draws of one."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posthoc.batches import Batch
from posthoc.likelihoods import Categorical, Gaussian, Likelihood, columns, make_likelihood
from posthoc.methods.network import NetworkMethod
from posthoc.predictive import Predictive
from posthoc.sampled import from_draws

__all__ = ["DrawingMethod"]


class DrawingMethod(NetworkMethod):
    """A method whose predictive is the average over `_draws`. A classifier's temperature is 1 unless the user fixed
    another; the noise of a regression is the method's own, or what `_start` and `_fit_noise` find."""

    fixed_mean = False
    _fitted: Likelihood | None = None

    @abstractmethod
    def _draws(self, batch: Batch) -> Tensor:  # (S, N, ...)
        """The outputs of several functions, the same ones for every batch."""

    @property
    def likelihood(self) -> Likelihood:
        return self._fitted if self._fitted is not None else self._likelihood

    def _predictor(self, *, covariance: bool) -> Callable[[Batch], Predictive]:
        likelihood = self.likelihood

        def predict(batch: Batch) -> Predictive:
            draws = self._draws(batch)
            return from_draws(draws, likelihood.to(draws.device))

        return predict

    def _start(self, outputs: Tensor, targets: Tensor) -> Likelihood:
        """A likelihood in the units of the data: a temperature of one, or the noise of the network's own residuals."""
        likelihood = copy.deepcopy(self._likelihood).to(outputs.device)
        likelihood.start(outputs, targets)
        set_noise(likelihood, columns(targets - outputs).square().mean(0) if isinstance(likelihood, Gaussian) else None)
        return likelihood

    @torch.no_grad()
    def _fit_noise(self, likelihood: Likelihood, data: Any) -> None:
        """The σ² at which data are likeliest, given how far the draws are from each other and from the targets: what
        the spread of the draws does not explain of the residuals, on average (and at least a hundredth of them)."""
        if not isinstance(likelihood, Gaussian):
            return
        squares: list[Tensor] = []
        spreads: list[Tensor] = []
        for batch in self._batches(data):
            draws = self._draws(batch).double()
            mean = draws.mean(0)
            target = likelihood.check_targets(batch.target, mean)
            squares.append(columns(target - mean).square())
            spreads.append(columns(draws.var(0, unbiased=False)))
        total, explained = torch.cat(squares).mean(0), torch.cat(spreads).mean(0)
        set_noise(likelihood, torch.maximum(total - explained, 0.01 * total))

    def _tensors(self) -> dict[str, Tensor]:
        return {f"likelihood.{name}": tensor for name, tensor in self.likelihood.state_dict().items()}

    @staticmethod
    def _likelihood_from(config: dict[str, Any], tensors: dict[str, Tensor]) -> Likelihood:
        """The fitted likelihood that `_tensors` wrote."""
        likelihood = make_likelihood(config["likelihood"])
        width = config["width"]
        likelihood.start(torch.zeros(1, *width), torch.ones(1, *width))
        found = {name.removeprefix("likelihood."): t for name, t in tensors.items() if name.startswith("likelihood.")}
        likelihood.load_state_dict({name: found[name] for name in likelihood.state_dict()})
        return likelihood


def set_noise(likelihood: Likelihood, variance: Tensor | None) -> None:
    """σ², given in the user's units, one for each output."""
    if isinstance(likelihood, Categorical):
        if likelihood.fixed_temperature is None:
            torch.nn.init.zeros_(likelihood.log_temperature)
        return
    assert isinstance(likelihood, Gaussian)
    assert variance is not None
    relative = variance / likelihood.scale.square()
    relative = relative if likelihood.noise_form == "per_output" else relative.mean()
    with torch.no_grad():
        likelihood.log_noise.copy_(relative.clamp_min(1e-12).log())
