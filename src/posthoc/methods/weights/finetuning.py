"""What methods share that train parameters of a copy of the network, on batches of the data."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from posthoc.base import Fitted, Job, TrainingConfig
from posthoc.collect.loaders import Batch
from posthoc.errors import DataError, OptionError
from posthoc.likelihoods.base import Likelihood
from posthoc.methods.weights.network import LabelledBatch, NetworkBatches, seeded
from posthoc.methods.weights.sampling import DrawingMethod
from posthoc.predictive.base import Predictive
from posthoc.predictive.latent import ZeroLatent
from posthoc.training import History, Ranks, train

__all__ = ["FinetunedMethod"]


class FinetunedMethod(DrawingMethod):
    """A method that minimizes -(1/|B|) Σ_b log p(y_b | f(x_b)) + penalty/N over batches B of the data.

    The network itself is never trained: a copy of it is, in eval mode, so that BatchNorm keeps its statistics and
    dropout is off.
    """

    Config = TrainingConfig
    config: TrainingConfig
    history = History()
    """The losses and validation scores of the last fit."""

    def _fit(self, job: Job) -> Fitted:
        with seeded(self.config.seed, self.module_device):  # a loader draws its order from the global generator
            return self._finetune(job)

    @abstractmethod
    def _finetune(self, job: Job) -> Fitted:
        """As `_fit`."""

    def _minimize(
        self,
        job: Job,
        likelihood: Likelihood,
        parameters: Iterable[Tensor],
        answer: Callable[[Batch], Tensor],
        penalty: Callable[[], Tensor],
        predict: Callable[[Batch], Predictive],
        generator: torch.Generator | None = None,
    ) -> History:
        """Trains the parameters of `answer`, and stops early by the score of `predict` on the validation data.
        `generator` is what `answer` draws from."""
        if not Ranks().alone:
            raise OptionError(f"{self.name} trains in one process: fit it outside torch.distributed.")
        options = self.config.training

        def objective(labelled: LabelledBatch) -> Tensor:
            outputs = answer(labelled.batch)
            mean, target = likelihood.standardize(outputs, likelihood.check_targets(labelled.target, outputs))
            energy = likelihood.energy(mean, ZeroLatent(outputs), target, alpha=1.0)
            return penalty() / job.num_data - energy.mean()

        def score() -> float:
            total, rows = 0.0, 0
            with seeded(options.seed, self.module_device):  # a second loader must not change the order of the first
                for batch in self._batches(job.val_data):
                    log_p = predict(batch).log_prob(batch.target)
                    total, rows = total - float(log_p.sum()), rows + len(log_p)
            return total / rows

        return train(
            objective,
            parameters,
            NetworkBatches(self, job.data, options.batch_size, options.seed),
            options,
            score=score if job.val is not None else None,
            generator=generator,
            checkpoint=job.checkpoint,
        )

    def _first_batch(self, data: Any) -> Batch:
        for batch in self._batches(data):
            return batch
        raise DataError("Expected at least one data point, got none.")
