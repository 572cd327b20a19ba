"""What methods share that train something of the network's own: on its batches, through the one loop."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from posthoc.base import Job
from posthoc.collect.loaders import Batch
from posthoc.errors import DataError, OptionError
from posthoc.likelihoods.base import Likelihood
from posthoc.methods.weights.network import LabelledBatch, NetworkBatches, seeded
from posthoc.methods.weights.sampling import DrawingMethod
from posthoc.predictive.base import Predictive
from posthoc.predictive.latent import ZeroLatent
from posthoc.training import History, Ranks, Training, train

__all__ = ["FinetunedMethod", "positive"]


class FinetunedMethod(DrawingMethod):
    """A method that minimises -(1/|B|) Σ_b log p(y_b | f(x_b)) + penalty/N over batches B of the data. The network
    itself is never trained: a copy of it is, in eval mode, so that BatchNorm keeps its statistics and dropout is off.
    """

    defaults: ClassVar[dict[str, Any]] = {}
    """Training options, where `Training`'s own would not suit."""

    def __init__(
        self,
        model: nn.Module | Callable[..., Any] | None,
        likelihood: str | Likelihood,
        *,
        layer: str | None,
        outputs_are: str,
        device: str | torch.device | None,
        training: dict[str, Any],
    ) -> None:
        super().__init__(model, likelihood, layer=layer, outputs_are=outputs_are, device=device)
        if unknown := training.keys() - Training.__dataclass_fields__.keys():
            raise OptionError(
                f"Unknown option {', '.join(sorted(unknown))}. "
                f"The training options are: {', '.join(Training.__dataclass_fields__)}."
            )
        self.training = Training(**{**self.defaults, **training})
        self.history = History()

    def _fit(self, job: Job) -> None:
        with seeded(self.training.seed, self.module_device):  # of which a loader takes its order
            self._finetune(job)

    @abstractmethod
    def _finetune(self, job: Job) -> None:
        """As `_fit`."""

    def _minimise(
        self,
        job: Job,
        likelihood: Likelihood,
        parameters: Iterable[Tensor],
        answer: Callable[[Batch], Tensor],
        penalty: Callable[[], Tensor],
        predict: Callable[[Batch], Predictive],
        generator: torch.Generator | None = None,
    ) -> History:
        """Trains the parameters behind `answer`, and stops early by what `predict` says of the validation data.
        `generator` is what `answer` draws from."""
        if not Ranks().alone:
            raise OptionError(f"{self.name} trains in one process: fit it outside torch.distributed.")
        options = self.training

        def objective(labelled: LabelledBatch) -> Tensor:
            said = answer(labelled.batch)
            mean, target = likelihood.standardize(said, likelihood.check_targets(labelled.target, said))
            energy = likelihood.energy(mean, ZeroLatent(mean), target, alpha=1.0)
            return penalty() / job.num_data - energy.mean()

        def score() -> float:
            total, rows = 0.0, 0
            with seeded(options.seed, self.module_device):  # a loader of its own must not shift the other's order
                for batch in self._batches(job.val_data):
                    log_p = predict(batch).log_prob(batch.target)
                    total, rows = total - float(log_p.sum()), rows + len(log_p)
            return total / rows

        return train(
            objective,
            parameters,
            NumberedBatches(self, job.data, options.batch_size, options.seed),
            options,
            score=score if job.val is not None else None,
            generator=generator,
            checkpoint=job.checkpoint,
        )

    def _first_batch(self, data: Any) -> Batch:
        for batch in self._batches(data):
            return batch
        raise DataError("Expected at least one data point, got none.")

    def _training(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self.training).items() if k != "progress"}


class NumberedBatches(NetworkBatches):
    """Batches that are known by their step, so that a resumed run goes on with the one that would have been next."""

    at = 0

    def block(self, step: int, count: int) -> LabelledBatch:
        while self.at < step:
            super().block(self.at, 1)
            self.at += 1
        self.at += 1
        return super().block(step, count)


def positive(name: str, value: Any) -> float:
    """A positive number, or an error that names the option."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise OptionError(f"Expected {name} to be a positive number, got {value!r}.")
    return float(value)
