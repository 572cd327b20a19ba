"""What methods share that predict with several networks, or several draws of one."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posthoc.base import Job
from posthoc.collect.loaders import Batch
from posthoc.likelihoods.base import Likelihood, columns
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.methods.weights.network import NetworkMethod
from posthoc.predictive.base import Predictive
from posthoc.saved import Saved

__all__ = ["DrawingMethod"]


class DrawingMethod(NetworkMethod):
    """A method whose predictive is the average over `_draws`. A classifier's temperature is 1 unless the user fixed
    another; the noise of a regression is the method's own, or what `_start` and `_fit_noise` find."""

    fixed_mean = False
    _fitted: Any = None

    @abstractmethod
    def _draws(self, batch: Batch) -> Tensor:  # (S, N, ...)
        """The outputs of several functions, the same ones for every batch."""

    @property
    def likelihood(self) -> Likelihood:
        return self._fitted if self._fitted is not None else self._likelihood

    def _old_predictor(self, *, covariance: bool) -> Callable[[Batch], Predictive]:
        likelihood = self.likelihood

        def predict(batch: Batch) -> Predictive:
            draws = self._draws(batch)
            return likelihood.to(draws.device).predictive_from_draws(draws, covariance=covariance)

        return predict

    def _start(self, outputs: Tensor, targets: Tensor) -> Likelihood:
        """A likelihood in the units of the data: a temperature of one, or the noise of the network's own residuals."""
        likelihood = copy.deepcopy(self._likelihood).to(outputs.device)
        likelihood.initialize(outputs, targets)
        residual = columns(targets) - columns(outputs) if isinstance(likelihood, Gaussian) else None
        set_noise(likelihood, residual.square().mean(0) if residual is not None else None)
        return likelihood

    @torch.no_grad()
    def _fit_noise(self, likelihood: Likelihood, job: Job) -> None:
        """The σ² at which the validation data (or else the data) are likeliest, given how far the draws are from each
        other and from the targets (and at least a hundredth of what is left of the targets)."""
        if not isinstance(likelihood, Gaussian):
            return
        data = job.val_data if job.val_data is not None else job.data
        self._check_data(data)
        squares: list[Tensor] = []
        spreads: list[Tensor] = []
        for batch in self._batches(data):
            draws = self._draws(batch).double()
            mean = draws.mean(0)
            target = likelihood.check_targets(batch.target, mean)
            squares.append(columns(target - mean).square())
            spreads.append(columns(draws.var(0, unbiased=False)))
        unit = likelihood.scale.square()
        square, spread = torch.cat(squares) / unit, torch.cat(spreads) / unit
        if likelihood.noise_form == "shared":
            square, spread = square.reshape(-1, 1), spread.reshape(-1, 1)
        set_noise(likelihood, likeliest_noise(square, spread) * unit)

    def _tensors(self) -> dict[str, Tensor]:
        return {f"likelihood.{name}": tensor for name, tensor in self.likelihood.state_dict().items()}

    @staticmethod
    def _likelihood_from(saved: Saved) -> Likelihood:
        """The fitted likelihood that `_tensors` wrote."""
        likelihood = saved.likelihood()
        state = likelihood.state_dict()
        saved.check_some({f"likelihood.{name}": tensor for name, tensor in state.items()})
        likelihood.load_state_dict({name: saved.tensors[f"likelihood.{name}"] for name in state})
        return likelihood


def likeliest_noise(
    square: Tensor,  # (N, C): squared residuals
    spread: Tensor,  # (N, C): the variance of what they are residuals of
) -> Tensor:  # (C,)
    """The σ² at which Π N(residual | 0, spread + σ²) is greatest, and at least a hundredth of the mean square: Fisher
    scoring, which is a mean of what the spread does not explain, weighted by how much each row says."""
    least = 0.01 * square.mean(0)
    noise = torch.maximum((square - spread).mean(0), least)
    for _ in range(100):
        weight = (spread + noise).clamp_min(1e-300).square().reciprocal()
        before, noise = noise, torch.maximum((weight * (square - spread)).sum(0) / weight.sum(0), least)
        if bool(((noise - before).abs() <= 1e-10 * noise).all()):
            break
    return noise


def set_noise(likelihood: Likelihood, variance: Tensor | None) -> None:
    """σ², given in the user's units, one for each output."""
    if isinstance(likelihood, Gaussian):
        assert variance is not None
        likelihood.set_noise(variance)
    else:
        likelihood.reset()
