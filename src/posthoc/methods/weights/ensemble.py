"""Deep ensemble: several networks, trained alike from different starts, that answer together."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from posthoc.base import Job
from posthoc.collect.loaders import Batch
from posthoc.collect.network import evaluating, exclusive, run_network
from posthoc.errors import DataError, OptionError
from posthoc.likelihoods.base import Likelihood
from posthoc.methods.weights.sampling import DrawingMethod
from posthoc.saved import Saved

__all__ = ["Ensemble"]


class Ensemble(DrawingMethod):
    """Predictions averaged over several networks, given as a list: `Ensemble([first, second, third], "regression")`.

    Class probabilities are averaged, not logits. In regression the noise is what is left of the residuals of the
    average, on `val` or, without it, on the data of the fit. A head holds that noise and the networks' fingerprint:
    load it with the same networks, in the same order.
    """

    name = "ensemble"

    def __init__(
        self,
        model: Sequence[nn.Module] | nn.Module | Callable[..., Any] | None,
        likelihood: str | Likelihood,
        *,
        layer: str | None = None,
        outputs_are: str = "logits",
        device: str | torch.device | None = None,
        seed: int = 0,
        progress: bool | None = None,
    ) -> None:
        super().__init__(together(model), likelihood, layer=layer, outputs_are=outputs_are, device=device)

    def _fit(self, job: Job) -> None:
        assert job.train.targets is not None
        likelihood = self._start(job.train.outputs, job.train.targets)
        with evaluating(self.module), exclusive(self.module):
            self._fit_noise(likelihood, job)
        self._fitted = likelihood

    def _draws(self, batch: Batch) -> Tensor:  # (S, N, ...)
        members = self.module
        assert isinstance(members, Members)
        return alike([self._answer(network, batch) for network in members.networks])

    def _options(self) -> dict[str, Any]:
        return {}

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        model: Sequence[nn.Module] | nn.Module | Callable[..., Any] | None = None,
        device: str | torch.device | None = None,
        **extra: Any,
    ) -> Self:
        return super().load(path, model=together(model), device=device, **extra)

    @classmethod
    def _rebuild(cls, saved: Saved) -> Self:
        method = saved.unfitted(cls)
        method._fitted = cls._likelihood_from(saved)
        return method


class Members(nn.Module):
    """Several networks as one, which says what they say on average."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The mean of their outputs."""
        return alike([run_network(network, Batch(args, kwargs, None)) for network in self.networks]).mean(0)


def together(model: Any) -> Members | Callable[..., Any] | None:
    """A list of networks as one; anything else that is no network is for others to refuse."""
    if isinstance(model, Members):
        return model
    if isinstance(model, nn.ModuleList):
        model = list(model)
    if isinstance(model, nn.Module):
        raise OptionError(
            f"ensemble averages several networks, got one {type(model).__name__}: give a list, "
            "Ensemble([first, second], ...). For one network use another method, such as fmgp."
        )
    if not isinstance(model, Sequence):
        return model
    if others := [type(part).__name__ for part in model if not isinstance(part, nn.Module)]:
        raise OptionError(f"ensemble needs a list of networks, each an nn.Module, got a {others[0]} in it.")
    if len({id(part) for part in model}) < max(2, len(model)):
        raise OptionError(f"ensemble needs at least two networks, each of them once, got {len(model)} in the list.")
    if len(devices := {weight.device for part in model for weight in part.parameters()}) > 1:
        raise OptionError(f"Expected all networks on one device, got {' and '.join(sorted(map(str, devices)))}.")
    return Members(model)


def alike(answers: list[Tensor]) -> Tensor:  # (S, N, ...)
    """What several networks said, if they speak of the same things."""
    if len(shapes := {tuple(answer.shape) for answer in answers}) > 1:
        raise DataError(f"Expected networks with as many outputs each, got outputs of shapes {sorted(shapes)}.")
    return torch.stack(answers)
