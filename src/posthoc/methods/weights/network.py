"""What methods share that need the network itself (its parameters, its gradients, or several runs of it)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posthoc.base import CHUNK, Method, require_finite_prediction
from posthoc.collect import opened
from posthoc.collect.class_scores import as_logits
from posthoc.collect.loaders import Batch, arrays, is_arrays, iterate, move, row_count, take, tensors_of
from posthoc.collect.network import Backbone, evaluating, exclusive, run_network
from posthoc.collect.outputs import Outputs, refuse_infinite
from posthoc.errors import DataError, OptionError
from posthoc.likelihoods.base import Likelihood
from posthoc.predictive.base import Predictive

__all__ = ["LabelledBatch", "NetworkBatches", "NetworkMethod", "seeded"]


class NetworkMethod(Method):
    """A method that runs an `nn.Module` in a way of its own, so that outputs alone are not enough.

    A subclass fits on the batches that `_batches(job.data)` gives (`job.train` holds the network's outputs on them),
    and its `_predictor` turns a `Batch` into predictions. It runs the network by `_answer`.
    """

    black_box = False

    def __init__(self, model: Any = None, likelihood: str | Likelihood | None = None, **options: Any) -> None:
        if not isinstance(model, nn.Module):
            found = "none" if model is None else f"a {type(model).__name__}"
            raise OptionError(
                f"{self.name} needs the network itself, an nn.Module, got {found}. "
                f"The methods that need outputs alone are: {', '.join(black_box_methods())}."
            )
        super().__init__(model, likelihood, **options)
        self.module = model

    @property
    def module_device(self) -> torch.device | None:
        """Where the network is."""
        return self._known_backbone.device

    @property
    def _known_backbone(self) -> Backbone:
        assert self.backbone is not None
        return self.backbone

    def _check_data(self, data: Any) -> None:
        if isinstance(data, Outputs):
            raise DataError(
                f"{self.name} runs the network: give what it takes (a DataLoader, a pair of arrays), not outputs. "
                f"The methods that need outputs alone are: {', '.join(black_box_methods())}."
            )
        if isinstance(data, Iterator):
            raise DataError(f"{self.name} reads the data more than once: give a DataLoader or arrays, no iterator.")

    def _batches(self, data: Any, size: int = 256) -> Iterator[Batch]:
        """The batches of data, on the network's device, their numbers checked."""
        backbone, seen = self._known_backbone, 0
        for raw in iterate(data, size):
            batch = backbone.place(raw)
            given = tensors_of(batch)
            for tensor in given:
                refuse_infinite(tensor, "inputs", seen)
            seen += len(given[0]) if given and given[0].ndim else 0
            device = given[0].device if given else backbone.device or torch.device("cpu")
            yield batch._replace(target=move(batch.target, device) if batch.target is not None else None)

    def _answer(self, network: nn.Module, batch: Batch) -> Tensor:  # (N, ...)
        """What a network says of a batch: logits or regression outputs."""
        said = run_network(network, batch, self._width)
        single = self._likelihood.task == "classification" and said.shape[1:].numel() == 1
        return as_logits(said, "logits") if single else said

    @torch.no_grad()
    def _predictions(
        self, data: Any, *, covariance: bool = False, targets: bool = False
    ) -> Generator[tuple[Predictive, Outputs]]:
        self._require_fitted("predict")
        data = arrays(opened(data))
        self._check_data(data if isinstance(data, Outputs) else None)
        predict = self._predictor(self._fitted, covariance=covariance)
        one_batch = not targets and is_arrays(data)
        with evaluating(self.module):
            for batch in self._batches([data] if one_batch else data, CHUNK):
                with exclusive(self.module):
                    predictive = predict(batch)
                require_finite_prediction(predictive)
                if not len(predictive):
                    continue
                part = Outputs.trusted(outputs=predictive.latent.mean, targets=batch.target)
                yield predictive, self._fitting(part, targets=targets)

    @abstractmethod
    def _predictor(self, fitted: Any, *, covariance: bool) -> Callable[[Batch], Predictive]:
        """A function from a batch to predictions, called while the network is in eval mode and without gradients."""

    def _needs(self, *, fitted: bool) -> tuple[bool, bool]:
        return False, False


class LabelledBatch(NamedTuple):
    """A batch and its checked targets, as the training loop hands it to an objective."""

    batch: Batch
    target: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> LabelledBatch:
        """Itself: batches of arbitrary inputs come one by one and are not stacked."""
        return self


class NetworkBatches:
    """A `Source` of a network method's batches: pass after pass over the data, arrays in a new order every time.

    Batches are counted by step, so that a resumed run continues with the one that would have been next."""

    ahead, fixed, weight = 1, False, 1.0

    def __init__(self, method: NetworkMethod, data: Any, size: int, seed: int) -> None:
        self.method, self.data, self.size = method, data, size
        self.generator = torch.Generator().manual_seed(seed)
        self.endless, self.next_step = self._endless(), 0

    def block(self, step: int, count: int) -> LabelledBatch:
        while self.next_step < step:
            next(self.endless)
            self.next_step += 1
        self.next_step += 1
        return next(self.endless)

    def _endless(self) -> Iterator[LabelledBatch]:
        while True:
            seen = 0
            for batch in self.method._batches(self._shuffled(), self.size):
                if batch.target is None:
                    raise DataError("Expected targets to fit on: batches (x, y), or mappings with labels.")
                seen += 1
                yield LabelledBatch(batch, torch.as_tensor(batch.target))
            if not seen:
                raise DataError("Expected data in every pass of the loader, got none in the last one.")

    def _shuffled(self) -> Any:
        if not is_arrays(self.data):
            return self.data  # a loader has an order of its own
        return take(self.data, torch.randperm(row_count(self.data), generator=self.generator))


@contextmanager
def seeded(seed: int, device: torch.device | None) -> Iterator[None]:
    """Global random numbers (dropout's, a loader's shuffling) from this seed inside, and undisturbed outside."""
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


def black_box_methods() -> list[str]:
    from posthoc.methods import REGISTRY  # which this module is below

    return sorted(name for name, method in REGISTRY.items() if method.black_box)
