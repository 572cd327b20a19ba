"""MC dropout: the network's own dropout layers left on when it predicts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from posthoc.batches import Batch
from posthoc.checks import integer
from posthoc.errors import OptionError
from posthoc.likelihoods import Likelihood, make_likelihood
from posthoc.method import Job
from posthoc.methods.drawing import DrawingMethod
from posthoc.methods.network import seeded
from posthoc.stillness import still

__all__ = ["Dropout"]


class Dropout(DrawingMethod):
    """Predictions averaged over `samples` runs with dropout on. In regression the noise is what is left of the
    residuals of these averages."""

    name = "dropout"
    rows_alone = False

    def __init__(
        self,
        model: nn.Module | Callable[..., Any] | None,
        likelihood: str | Likelihood,
        *,
        samples: int = 64,
        layer: str | None = None,
        outputs_are: str = "logits",
        device: str | torch.device | None = None,
        seed: int = 0,
        progress: bool | None = None,
    ) -> None:
        super().__init__(model, likelihood, layer=layer, outputs_are=outputs_are, device=device)
        self.samples, self.seed = integer("samples", samples, 2), integer("seed", seed, 0)
        if not any(part.p > 0 for part in dropouts(self.module)):
            raise OptionError(
                f"dropout needs a network with dropout layers, got a {type(self.module).__name__} without any. "
                "Use another method, such as fmgp."
            )

    def _fit(self, job: Job) -> None:
        assert job.train.targets is not None
        likelihood = self._start(job.train.outputs, job.train.targets)
        with still(self.module):
            self._fit_noise(likelihood, job.data)
        self._fitted = likelihood

    def _draws(self, batch: Batch) -> Tensor:  # (S, N, ...)
        # The same seed for every batch, so that equal batches have equal answers.
        with seeded(self.seed, self.module_device), dropping(self.module):
            return torch.stack([self._answer(self.module, batch) for _ in range(self.samples)])

    def _options(self) -> dict[str, Any]:
        return {"samples": self.samples, "seed": self.seed}

    def _recipe(self) -> dict[str, Any]:
        return self._options()

    @classmethod
    def _rebuild(
        cls,
        path: str | os.PathLike[str],
        tensors: dict[str, Tensor],
        config: dict[str, Any],
        *,
        model: nn.Module | Callable[..., Any] | None,
        device: str | torch.device | None,
        **extra: Any,
    ) -> Self:
        likelihood = make_likelihood(config["likelihood"])
        method = cls(model, likelihood, layer=config["layer"], device=device, **config["options"], **extra)
        method._fitted = cls._likelihood_from(config, tensors)
        return method


def dropouts(network: nn.Module) -> list[_DropoutNd]:
    return [part for part in network.modules() if isinstance(part, _DropoutNd)]


@contextmanager
def dropping(network: nn.Module) -> Iterator[None]:
    """Dropout on, and everything else in eval mode."""
    parts = dropouts(network)
    try:
        for part in parts:
            part.train()
        yield
    finally:
        for part in parts:
            part.eval()
