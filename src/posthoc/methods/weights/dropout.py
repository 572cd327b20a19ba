"""MC dropout: the network's own dropout layers stay on when it predicts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from posthoc.collect.loaders import Batch
from posthoc.config import SeedConfig, option
from posthoc.methods.weights.network import DrawingMethod, seeded


@dataclass(frozen=True, kw_only=True)
class DropoutConfig(SeedConfig):
    """Options of `Dropout`."""

    samples: int = option(64, least=2)


class Dropout(DrawingMethod):
    """Predictions averaged over several runs of the network with dropout on.

    In regression the noise variance has the greatest likelihood given the spread of the runs, on `val` or, without it,
    on the data of the fit.

    Args:
        model: An `nn.Module` with dropout layers.
        likelihood: "regression", "classification", or a `Gaussian` or `Categorical`.
        samples: Runs of the network for a prediction.
        seed: The seed of the dropout.
        device: Where a network without weights computes.

    Example:
        >>> import torch
        >>> from posthoc import Dropout
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        >>> x, y = torch.randn(20, 2), torch.randn(20, 1)
        >>> Dropout(model, "regression", samples=4).fit(x, y).predict(x).std.shape
        torch.Size([20, 1])
    """

    name = "dropout"
    Config = DropoutConfig
    config: DropoutConfig
    rows_alone = False

    def _check_parts(self) -> None:
        self._require_layers(dropout_layers(self.module), "dropout layers")

    def _draws(self, fitted: Any, batch: Batch) -> Tensor:  # (S, N, ...)
        # The same seed for every batch, so that equal batches have equal predictions.
        with seeded(self.config.seed, self.backbone.device), dropout_on(self.module):
            return torch.stack([self._answer(self.module, batch) for _ in range(self.config.samples)])


def dropout_layers(network: nn.Module) -> list[nn.Module]:
    """The dropout layers of a network, and its attention and recurrent layers with dropout inside."""
    plain = [part for part in network.modules() if isinstance(part, _DropoutNd) and part.p > 0.0]
    others = [part for part in network.modules() if isinstance(part, nn.MultiheadAttention | nn.RNNBase)]
    return [*plain, *(part for part in others if part.dropout > 0.0)]


@contextmanager
def dropout_on(network: nn.Module) -> Iterator[None]:
    """Dropout on, and everything else in eval mode."""
    layers, fast_path = dropout_layers(network), torch.backends.mha.get_fastpath_enabled()
    # The fast path of PyTorch's transformers in eval mode leaves dropout out.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        for layer in layers:
            layer.training = True
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for layer in layers:
            layer.training = False
