"""Deep ensemble: the average over several networks, trained alike from different starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from posthoc.collect.loaders import Batch
from posthoc.collect.network import run_network
from posthoc.errors import DataError, OptionError
from posthoc.likelihoods.base import Likelihood
from posthoc.methods.weights.network import DrawingMethod


class Ensemble(DrawingMethod):
    """Predictions averaged over several networks.

    Class probabilities are averaged, not logits. In regression the noise variance has the greatest likelihood given
    the variance between the networks, on `val` or, without it, on the data of the fit. A head holds that noise and the
    networks' fingerprint: load it with the same networks, in the same order.

    Args:
        model: A list of networks.
        likelihood: "regression", "classification", or a `Gaussian` or `Categorical`.
        device: Where networks without weights compute.

    Example:
        >>> import torch
        >>> from posthoc import Ensemble
        >>> x, y = torch.randn(20, 2), torch.randn(20, 1)
        >>> Ensemble([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)], "regression").fit(x, y).predict(x).std.shape
        torch.Size([20, 1])
    """

    name = "ensemble"

    def __init__(self, model: Any = None, likelihood: str | Likelihood | None = None, **options: Any) -> None:
        super().__init__(as_members(model), likelihood, **options)

    def _draws(self, fitted: Any, batch: Batch) -> Tensor:  # (S, N, ...)
        assert isinstance(self.module, Members)
        return stacked([self._answer(network, batch) for network in self.module.networks])


class Members(nn.Module):
    """Several networks as one, whose output is the mean of theirs."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The mean of their outputs."""
        return stacked([run_network(network, Batch(args, kwargs, None)) for network in self.networks]).mean(0)


def as_members(model: Any) -> Any:
    """A list of networks as one module; `NetworkMethod` refuses what is neither a network nor a list."""
    if isinstance(model, nn.ModuleList):
        model = list(model)
    if isinstance(model, nn.Module) and not isinstance(model, Members):
        raise OptionError(f"ensemble averages several networks, got one {type(model).__name__}: give a list.")
    if not isinstance(model, Sequence):
        return model
    if others := [type(part).__name__ for part in model if not isinstance(part, nn.Module)]:
        raise OptionError(f"ensemble needs a list of networks, each an nn.Module, got a {others[0]} in it.")
    if len({id(part) for part in model}) < max(2, len(model)):
        raise OptionError(f"ensemble needs at least two networks, each of them once, got {len(model)} in the list.")
    if len(devices := {weight.device for part in model for weight in part.parameters()}) > 1:
        raise OptionError(f"Expected all networks on one device, got {' and '.join(sorted(map(str, devices)))}.")
    return Members(model)


def stacked(outputs: list[Tensor]) -> Tensor:  # (S, N, ...)
    """The outputs of several networks, if they have the same shape."""
    if len(shapes := {tuple(each.shape) for each in outputs}) > 1:
        raise DataError(f"Expected networks with as many outputs each, got outputs of shapes {sorted(shapes)}.")
    return torch.stack(outputs)
