"""Methods that run the network themselves: on batches of data, with several sets of weights, or to fine-tune a copy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from posthoc.base import CHUNK, Fitted, Job, Method
from posthoc.collect.class_scores import as_logits
from posthoc.collect.loaders import Batch, is_arrays, iterate, row_count, take
from posthoc.collect.network import Backbone, evaluating, exclusive, run_network
from posthoc.collect.outputs import Outputs, require_width
from posthoc.config import TrainingConfig
from posthoc.errors import DataError, OptionError
from posthoc.likelihoods.base import Likelihood, columns
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.predictive.base import Predictive, require_finite_prediction
from posthoc.predictive.latent import ZeroLatent
from posthoc.training import History, Ranks, train


class NetworkMethod(Method):
    """A method that needs an `nn.Module`, not only its outputs.

    A subclass fits on the batches of `_batches(job.data)` (`job.train` holds the network's outputs on them). Its
    `_batch_predictor` maps a `Batch` to predictions. It runs the network by `_answer`.
    """

    black_box = False
    _reads_again = True
    backbone: Backbone

    def __init__(self, model: Any = None, likelihood: str | Likelihood | None = None, **options: Any) -> None:
        if not isinstance(model, nn.Module):
            found = "none" if model is None else f"a {type(model).__name__}"
            advice = "For outputs alone use a method such as fmgp, laplace or temperature."
            raise OptionError(f"{self.name} needs the network itself, an nn.Module, got {found}. {advice}")
        super().__init__(model, likelihood, **options)
        self.module = model
        self._check_parts()

    def _check_parts(self) -> None:
        """Raises if the network, or an optional library, lacks what the method works with."""

    def _require_layers(self, present: Any, wanted: str) -> None:
        """Refuses a network without the layers that the method works on."""
        if not present:
            found = f"a {type(self.module).__name__} without any"
            raise OptionError(f"{self.name} needs {wanted}, got {found}. Use another method, such as fmgp.")

    def _batches(self, data: Any, size: int = 256) -> Iterator[Batch]:
        """The batches of data, with the inputs on the network's device; raises where these are not finite."""
        return self.backbone.batches(iterate(data, size))

    def _answer(self, network: nn.Module, batch: Batch, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """The logits or outputs (N, ...) of a network, with these values in place of its parameters if given."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(network, dict(weights or {}), args, kwargs)

        outputs = run_network(network if weights is None else call, batch, self._given_width)
        classes = self._likelihood.task == "classification"
        if self._given_width is not None:
            require_width(outputs, self._given_width, one_score=classes)
        single = classes and outputs.shape[1:].numel() == 1
        return as_logits(outputs, "logits") if single else outputs

    @torch.no_grad()
    def _predictions(
        self, data: Any, *, covariance: bool = False, targets: bool = False
    ) -> Generator[tuple[Predictive, Outputs]]:
        predict = self._batch_predictor(self._require_fitted("predict"), covariance=covariance)
        data = self._read(data, once=True)
        one_batch = not targets and is_arrays(data)
        with evaluating(self.module):
            for batch in self._batches([data] if one_batch else data, CHUNK):
                with exclusive(self.module):
                    predictive = predict(batch)
                require_finite_prediction(predictive)
                if not len(predictive):
                    continue
                part = Outputs.trusted(outputs=predictive.latent.mean, targets=batch.target)
                yield predictive, self._checked(part, width=self._width, targets=targets)

    @abstractmethod
    def _batch_predictor(self, fitted: Any, *, covariance: bool) -> Callable[[Batch], Predictive]:
        """A function from a batch to predictions, called while the network is in eval mode and without gradients."""

    def _reads(self) -> tuple[str, ...]:
        return ()


class DrawingMethod(NetworkMethod):
    """A method whose prediction is the average over `_draws`.

    A classifier's temperature is 1 unless the user fixed another.
    """

    fixed_mean = False

    @torch.no_grad()
    def _fit(self, job: Job) -> Fitted:
        """Fits the noise variance of a regression: the one of greatest likelihood on the validation data (or else the
        data), given the variance of the draws; at least a hundredth of the mean squared residual."""
        likelihood = self._start(job)
        fitted = Fitted(likelihood)
        if not isinstance(likelihood, Gaussian):
            return fitted
        unit, parts = likelihood.scale.square(), []
        with evaluating(self.module), exclusive(self.module):
            for batch in self._batches(job.val_data if job.val_data is not None else job.data):
                draws = self._draws(fitted, batch).double()
                mean = draws.mean(0)
                _, residual = likelihood.standardize(mean, likelihood.check_targets(batch.target, mean))
                parts.append(torch.stack([residual.square(), columns(draws.var(0, unbiased=False)) / unit]))
        both = torch.cat(parts, 1)  # (2, N, C)
        square, variance = both.reshape(2, -1, 1) if likelihood.noise_form == "shared" else both
        likelihood.set_noise(likeliest_noise(square, variance) * unit)
        return fitted

    @abstractmethod
    def _draws(self, fitted: Any, batch: Batch) -> Tensor:  # (S, N, ...)
        """The outputs of several functions, the same functions for every batch."""

    def _batch_predictor(self, fitted: Any, *, covariance: bool) -> Callable[[Batch], Predictive]:
        def predict(batch: Batch) -> Predictive:
            draws = self._draws(fitted, batch)
            return fitted.likelihood.to(draws.device).predictive_from_draws(draws, covariance=covariance)

        return predict

    def _start(self, job: Job) -> Likelihood:
        """A likelihood in the units of the data, without temperature and with noise of the residuals' size."""
        likelihood = self._start_likelihood(job.train, job.train.outputs.device)
        likelihood.reset()
        return likelihood


def likeliest_noise(square: Tensor, variance: Tensor) -> Tensor:  # (N, C), (N, C) -> (C,)
    """The σ² that maximizes Π N(residual | 0, variance + σ²) given squared residuals and the variances of predictions,
    by Fisher scoring: each step is a mean of square - variance, weighted by the information in each row. It is at least
    a hundredth of the mean square."""
    least = 0.01 * square.mean(0)
    noise = torch.maximum((square - variance).mean(0), least)
    for _ in range(100):
        weight = (variance + noise).clamp_min(1e-300).square().reciprocal()
        before, noise = noise, torch.maximum((weight * (square - variance)).sum(0) / weight.sum(0), least)
        if bool(((noise - before).abs() <= 1e-10 * noise).all()):
            break
    return noise


class FinetunedMethod(DrawingMethod):
    """A method that minimizes -(1/|B|) Σ_b log p(y_b | f(x_b)) + penalty/N over batches B of the data.

    A copy of the network is trained, never the network itself. It is in eval mode: BatchNorm keeps its statistics and
    dropout is off.
    """

    Config = TrainingConfig
    config: TrainingConfig
    history = History()
    """The losses and validation scores of the last fit."""

    def _fit(self, job: Job) -> Fitted:
        with seeded(self.config.seed, self.backbone.device):  # a loader draws its order from the global generator
            return self._finetune(job)

    @abstractmethod
    def _finetune(self, job: Job) -> Fitted:
        """Implements `_fit`, with the global random numbers seeded."""

    def _minimize(
        self,
        job: Job,
        likelihood: Likelihood,
        learned: Iterable[Tensor],
        answer: Callable[[Batch], Tensor],
        penalty: Callable[[], Tensor],
        draw: Callable[[Batch], Tensor],
        generator: torch.Generator | None = None,
    ) -> History:
        """Trains the `learned` tensors of `answer`, which may draw from `generator`. Stops early by the log-probability
        of the validation data, averaged over the outputs (S, N, ...) of `draw`."""
        if not Ranks().alone:
            raise OptionError(f"{self.name} trains in one process: fit it outside torch.distributed.")
        options = self.config.training

        def objective(batch: Batch) -> Tensor:
            outputs = answer(batch)
            mean, target = likelihood.standardize(outputs, likelihood.check_targets(batch.target, outputs))
            energy = likelihood.energy(mean, ZeroLatent(outputs), target, alpha=1.0)
            return penalty() / job.num_data - energy.mean()

        def score() -> float:
            total, rows = 0.0, 0
            with seeded(options.seed, self.backbone.device):  # a second loader must not change the order of the first
                for batch in self._batches(job.val_data):
                    log_p = likelihood.predictive_from_draws(draw(batch)).log_prob(batch.target)
                    total, rows = total - float(log_p.sum()), rows + len(log_p)
            return total / rows

        source = NetworkBatches(self, job.data, options.batch_size, options.seed)
        scored = score if job.val is not None else None
        return train(objective, learned, source, options, score=scored, generator=generator, checkpoint=job.checkpoint)


class SingleBatch(Batch):
    """A batch as a `Block` of the training loop: batches of any inputs come one by one and are not stacked."""

    def map(self, change: Callable[[Tensor], Tensor]) -> SingleBatch:
        """The batch itself."""
        return self


class NetworkBatches:
    """A `Source` of a network method's batches: pass after pass over the data, arrays in a new order every time.

    Batches are counted by step, so that a resumed run continues with the batch that would have been next.
    """

    ahead, fixed, weight = 1, False, 1.0

    def __init__(self, method: NetworkMethod, data: Any, size: int, seed: int) -> None:
        self.batches = enumerate(endless_batches(method, data, size, torch.Generator().manual_seed(seed)))

    def block(self, step: int, count: int) -> SingleBatch:
        return next(batch for number, batch in self.batches if number == step)


def endless_batches(method: NetworkMethod, data: Any, size: int, generator: torch.Generator) -> Iterator[SingleBatch]:
    """The batches of one pass over the data after another."""
    while True:
        batch = None
        # A loader has an order of its own.
        rows = take(data, torch.randperm(row_count(data), generator=generator)) if is_arrays(data) else data
        for batch in method._batches(rows, size):
            yield SingleBatch(*batch)
        if batch is None:
            raise DataError("Expected data in every pass of the loader, got none in the last one.")


def normal(std: Tensor, generator: torch.Generator) -> Tensor:
    """Gaussian noise with these standard deviations."""
    return std * torch.randn(std.shape, dtype=std.dtype, device=std.device, generator=generator)


@contextmanager
def seeded(seed: int, device: torch.device | None) -> Iterator[None]:
    """Seeds the global random numbers (dropout's, a loader's shuffling) inside, and restores them afterwards."""
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield
