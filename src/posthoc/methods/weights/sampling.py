"""What methods share that predict with several networks, or several draws of one."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from posthoc.base import Job
from posthoc.collect.loaders import Batch
from posthoc.collect.network import evaluating, exclusive
from posthoc.likelihoods.base import Likelihood, columns
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.methods.weights.network import NetworkMethod
from posthoc.predictive.base import Predictive

__all__ = ["DrawingMethod", "NamedTensors"]


class DrawingMethod(NetworkMethod):
    """A method whose predictive is the average over `_draws`. A classifier's temperature is 1 unless the user fixed
    another; the noise of a regression is the method's own, or what `_start` and `_fit_noise` find."""

    fixed_mean = False

    @abstractmethod
    def _draws(self, fitted: Any, batch: Batch) -> Tensor:  # (S, N, ...)
        """The outputs of several functions, the same ones for every batch."""

    def _predictor(self, fitted: Any, *, covariance: bool) -> Callable[[Batch], Predictive]:
        def predict(batch: Batch) -> Predictive:
            draws = self._draws(fitted, batch)
            return fitted.likelihood.to(draws.device).predictive_from_draws(draws, covariance=covariance)

        return predict

    def _start(self, job: Job) -> Likelihood:
        """A likelihood in the units of the data, with which the network predicts as it is."""
        likelihood = copy.deepcopy(self._likelihood).to(job.train.outputs.device)
        likelihood.initialize(job.train.outputs, job.targets)
        likelihood.reset()
        return likelihood

    @torch.no_grad()
    def _fit_noise(self, likelihood: Likelihood, job: Job, draw: Callable[[Batch], Tensor]) -> None:
        """Sets the σ² at which the validation data (or else the data) are likeliest, given the spread of the draws; at
        least a hundredth of the mean squared residual."""
        if not isinstance(likelihood, Gaussian):
            return
        data = job.val_data if job.val_data is not None else job.data
        self._check_data(data)
        squares: list[Tensor] = []
        spreads: list[Tensor] = []
        with evaluating(self.module), exclusive(self.module):
            for batch in self._batches(data):
                draws = draw(batch).double()
                mean = draws.mean(0)
                squares.append(columns(likelihood.check_targets(batch.target, mean) - mean).square())
                spreads.append(columns(draws.var(0, unbiased=False)))
        unit = likelihood.scale.square()
        square, spread = torch.cat(squares) / unit, torch.cat(spreads) / unit
        if likelihood.noise_form == "shared":
            square, spread = square.reshape(-1, 1), spread.reshape(-1, 1)
        likelihood.set_noise(likeliest_noise(square, spread) * unit)


class NamedTensors(nn.Module):
    """Tensors by the names of a network's parameters, which have dots in them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name.replace(".", "/"), tensor)

    def as_dict(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {name.replace("/", "."): tensor for name, tensor in self.named_buffers()}


def likeliest_noise(
    square: Tensor,  # (N, C): squared residuals
    spread: Tensor,  # (N, C): the variance of what they are residuals of
) -> Tensor:  # (C,)
    """The σ² at which Π N(residual | 0, spread + σ²) is greatest, and at least a hundredth of the mean square: Fisher
    scoring, a mean of what the spread does not explain, weighted by the information in each row."""
    least = 0.01 * square.mean(0)
    noise = torch.maximum((square - spread).mean(0), least)
    for _ in range(100):
        weight = (spread + noise).clamp_min(1e-300).square().reciprocal()
        before, noise = noise, torch.maximum((weight * (square - spread)).sum(0) / weight.sum(0), least)
        if bool(((noise - before).abs() <= 1e-10 * noise).all()):
            break
    return noise
