"""MC dropout: the network's own dropout layers left on when it predicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from posthoc.base import Job
from posthoc.collect.loaders import Batch
from posthoc.collect.network import evaluating, exclusive
from posthoc.errors import OptionError
from posthoc.likelihoods.base import Likelihood
from posthoc.methods.weights.network import seeded
from posthoc.methods.weights.sampling import DrawingMethod
from posthoc.saved import Saved
from posthoc.validation import integer

__all__ = ["Dropout"]


class Dropout(DrawingMethod):
    """Predictions averaged over `samples` runs with dropout on. In regression the noise is what is left of the
    residuals of these averages, on `val` or, without it, on the data of the fit."""

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
        if not dropouts(self.module):
            raise OptionError(
                f"dropout needs a network with dropout layers, got a {type(self.module).__name__} without any. "
                "Use another method, such as fmgp."
            )

    def _fit(self, job: Job) -> None:
        assert job.train.targets is not None
        likelihood = self._start(job.train.outputs, job.train.targets)
        with evaluating(self.module), exclusive(self.module):
            self._fit_noise(likelihood, job)
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
    def _rebuild(cls, saved: Saved) -> Self:
        method = saved.unfitted(cls, **saved.options)
        method._fitted = cls._likelihood_from(saved)
        return method


def dropouts(network: nn.Module) -> list[nn.Module]:
    """The parts that drop something when they train, and change nothing else."""
    return [part for part in network.modules() if dropped(part) > 0.0]


def dropped(part: nn.Module) -> float:
    """The share that a part drops: a dropout layer, or what has one of its own inside."""
    if isinstance(part, _DropoutNd):
        return part.p
    return part.dropout if isinstance(part, nn.MultiheadAttention | nn.RNNBase) else 0.0


@contextmanager
def dropping(network: nn.Module) -> Iterator[None]:
    """Dropout on, and everything else in eval mode."""
    parts, fast = dropouts(network), torch.backends.mha.get_fastpath_enabled()
    # PyTorch's transformers have a way through their layers in eval mode that leaves dropout out.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        for part in parts:
            part.training = True
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for part in parts:
            part.training = False
