"""What every method shares: `fit`, `predict`, `save` and `load` around a predictor that is only ever read."""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from posthoc.collect import opened
from posthoc.collect.arrays import arrays, as_tensor, is_arrays, is_pair
from posthoc.collect.augmentation import Augmented
from posthoc.collect.class_scores import KINDS, Rounding, as_logits, find_rounding
from posthoc.collect.data_warnings import doubt_logits, doubt_memorised
from posthoc.collect.fingerprint import mark, refuse_another
from posthoc.collect.loaders import iterate
from posthoc.collect.network import Backbone, Reading, settled
from posthoc.collect.outputs import Outputs, collect, read
from posthoc.errors import DataError, NotFittedError, OptionError, PosthocWarning
from posthoc.io import read_head, write_head
from posthoc.likelihoods.base import Likelihood, make_likelihood
from posthoc.predictive.base import Predictive
from posthoc.predictive.conformal import Conformal, Score
from posthoc.saved import Saved
from posthoc.training import Checkpoint
from posthoc.validation import choice, integer, known_device

__all__ = ["Job", "Method", "first_values"]

CHUNK = 1024
"""Rows predicted at a time, and rows of a dataset run at a time,"""
AT_ONCE = 2**21
"""but no more than so many outputs at a time: 16 MB for each tensor of their size."""


@dataclass(frozen=True)
class Job:
    """What there is to fit."""

    train: Outputs
    val: Outputs | None
    num_data: int
    """How many points `train` stands for."""
    data: Any
    """What `train` was collected from."""
    checkpoint: Checkpoint | None
    val_data: Any = None
    """What `val` was collected from."""

    def part(self, rows: Outputs) -> Job:
        """The job of fitting to some of its rows, which stand for as large a share of the points."""
        num_data = max(1, round(self.num_data * len(rows) / len(self.train)))
        return replace(self, train=rows, num_data=num_data, data=rows, checkpoint=None)


class Method(ABC):
    """A post-hoc method: give it a trained predictor (or none, and its outputs), fit, predict.

    A subclass fits from `Outputs` (`_fit`), predicts from them (`_predictor`) and says what it holds (`_tensors`,
    `_options`) and how to be built from that (`_rebuild`).
    """

    name: ClassVar[str]
    tasks: ClassVar[tuple[str, ...]] = ("regression", "classification")
    black_box: ClassVar[bool] = True
    """Whether outputs are all it needs (else it must have the network)."""
    fixed_mean: ClassVar[bool] = True
    """Whether `mean` is the network's own output."""
    wants_unseen: ClassVar[bool] = False
    """Whether it learns from the network's errors, which must then be those on new data."""
    load_options: ClassVar[tuple[str, ...]] = ()
    """What `load` takes beside the network and the device."""
    rows_alone: ClassVar[bool] = True
    """Whether the prediction for a row is the same whatever rows are beside it."""

    def __init__(
        self,
        model: nn.Module | Callable[..., Any] | None,
        likelihood: str | Likelihood,
        *,
        layer: str | None = None,
        outputs_are: str = "logits",
        device: str | torch.device | None = None,
    ) -> None:
        self._likelihood = make_likelihood(likelihood)
        if self._likelihood.task not in self.tasks:
            raise OptionError(f"{self.name} is for {' and '.join(self.tasks)}, not for {self._likelihood.task}.")
        choice("outputs_are", outputs_are, KINDS)
        self.outputs_are = outputs_are
        self.device = known_device(device)
        self.layer = layer
        self.backbone = Backbone(model, layer, self.device) if model is not None else None
        self._width: tuple[int, ...] | None = None  # of one row of outputs, once fitted
        self._network: dict[str, Any] | None = None  # what it is known by, once fitted on
        self._rounding: Rounding | None = None  # of the probabilities it was fitted on

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood: fitted, once there is a fit."""
        return self._likelihood

    @property
    def fitted(self) -> bool:
        """Whether there is anything to predict with."""
        return self._width is not None

    def fit(
        self,
        data: Any,
        *,
        val: Any = None,
        num_data: int | None = None,
        augment: str | Callable[[Tensor], Tensor] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 200,
        resume: bool = False,
    ) -> Self:
        """Fits on data the network has not memorised: a DataLoader or dataset of (x, y) or mappings, a pair of arrays
        (or tables, or lists of numbers), `Outputs`, or the path of a file of them. `val` is for early stopping;
        `num_data` is the number of points that `data` stands for, if not its own. Where there are only the images that
        the network was trained on, `augment="crops"` shows it parts of them, and a function of a batch of images
        whatever it makes of them. `checkpoint` names a folder where the state is written every `checkpoint_every`
        steps; with `resume` a fit that was killed goes on from there to exactly the numbers it would have had."""
        num_data = integer("num_data", num_data, 1) if num_data is not None else None
        if resume and checkpoint is None:
            raise OptionError("resume=True goes on from a checkpoint: name its folder with checkpoint=....")
        data, val = arrays(opened(data)), arrays(opened(val))
        if augment is not None:
            data = Augmented(data, augment)
        self._check_data(data)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            place = Checkpoint(checkpoint, every=checkpoint_every, resume=resume) if checkpoint is not None else None
            if place is not None:
                stack.enter_context(place.claimed())
            before, self._rounding = self._rounding, None
            try:
                return self._fit_checked(data, val, num_data, place)
            except BaseException:
                self._rounding = before
                raise

    def _fit_checked(self, data: Any, val: Any, num_data: int | None, checkpoint: Checkpoint | None) -> Self:
        train = self._outputs(data, targets=True)
        held_out = self._outputs(val, targets=True) if val is not None else None
        if held_out is not None:
            self._check_width(held_out, tuple(train.outputs.shape[1:]))
        if train.outputs.dtype in (torch.float16, torch.bfloat16):
            warnings.warn(
                f"The outputs are {train.outputs.dtype}: means stay as they are, the uncertainty is computed in "
                "float64 and returned in float32.",
                PosthocWarning,
                stacklevel=3,
            )
        if self.wants_unseen:
            doubt_memorised(train, held_out, self._likelihood.task)
        network = mark(self.backbone.module) if self.backbone else None
        if checkpoint is not None:
            checkpoint.of(
                {
                    "method": self.name,
                    "options": self._recipe(),
                    "likelihood": {**self._likelihood.spec(), "start": first_values(self._likelihood)},
                    "data": train.digest(),
                    "val": held_out.digest() if held_out is not None else None,
                    "num_data": num_data or len(train),
                    "network": network["fingerprint"] if network is not None else None,
                }
            )
        self._fit(Job(train, held_out, num_data or len(train), data, checkpoint, val))
        self._width, self._network = tuple(train.outputs.shape[1:]), network
        return self

    def predict(self, data: Any, *, covariance: bool = False) -> Predictive:
        """The predictive distribution of a batch (a tensor, an array or a mapping, run as one), of the batches of a
        loader (streamed), of `Outputs`, or of a file of them. `covariance=True` adds the covariance across outputs."""
        # Closed whatever happens: a suspended stream would keep the network in eval mode.
        with closing(self.stream(data, covariance=covariance)) as stream:
            parts = list(stream)
        if not parts:
            raise DataError("Expected at least one data point to predict, got none: the loader is empty.")
        return type(parts[0]).cat(parts)

    def stream(self, data: Any, *, covariance: bool = False) -> Generator[Predictive]:
        """As `predict`, some rows at a time and in order, for more data than fit into memory."""
        with closing(self._predictions(data, covariance=covariance)) as predictions:
            for predictive, _ in predictions:
                yield predictive

    def stream_with_targets(self, data: Any) -> Generator[tuple[Predictive, Tensor]]:
        """As `stream`, but of data as `fit` takes them, and with what was true of each row."""
        with closing(self._predictions(data, targets=True)) as predictions:
            for predictive, part in predictions:
                assert part.targets is not None
                yield predictive, part.targets

    @torch.no_grad()
    def _predictions(
        self, data: Any, *, covariance: bool = False, targets: bool = False
    ) -> Generator[tuple[Predictive, Outputs]]:
        self._require_fitted("predict")
        predict, size = self._predictor(covariance=covariance), self._rows_at_once()
        with closing(self._stream(data, targets=targets)) as stream:
            for outputs, settle in stream:
                for start in range(0, len(outputs), size):
                    part = outputs[start : start + size]
                    predictive = predict(part)
                    if not start:
                        settle()  # once a GPU has more to do: to look at the network's numbers is to wait for them
                    yield predictive, part

    def conformal(self, calibration: Any, *, score: str | Score | None = None) -> Conformal:
        """The same predictions with guaranteed coverage: intervals of a regression, sets of classes. Calibrates on data
        as `fit` takes them, which neither the network nor this method was fitted on (nor stopped early by), and which
        are exchangeable with the data to come.

        `score` says what the answers are made of. Regression: "per_output" (the default: intervals in proportion to
        `std`, a guarantee for each output) or "joint" (one for all outputs at once). Classification: "lac" (the
        default: the smallest sets), "aps" (sets that grow more where the method is unsure), "raps" (the same, less so
        for many classes), or an `LAC` or `APS` with options of its own."""
        with closing(self.stream_with_targets(calibration)) as parts:
            return Conformal.calibrate(self, parts, score, self._likelihood.task)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the fitted head (not the network) as safetensors, whole or not at all. Inducing points may be rows
        of your data, or close to them."""
        self._require_fitted("save")
        write_head(path, self._tensors(), self._config())

    def digest(self) -> str:
        """What tells this fitted head from any other: a hash of what `save` writes."""
        self._require_fitted("digest")
        hashed = hashlib.sha256(json.dumps(self._config(), sort_keys=True).encode())
        for name, tensor in sorted(self._tensors().items()):
            hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            hashed.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return hashed.hexdigest()

    def _config(self) -> dict[str, Any]:
        return {
            "method": self.name,
            "options": self._options(),
            "likelihood": self._likelihood.spec(),
            "layer": self.layer,
            "outputs_are": self.outputs_are,
            "rounding": self._rounding,
            "width": self._width,
            "network": self._network,
        }

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        model: nn.Module | Callable[..., Any] | None = None,
        device: str | torch.device | None = None,
        **extra: Any,
    ) -> Self:
        """A saved head to predict with, and the network it was fitted on (or none: it then predicts from `Outputs`).
        What only `fit` needs, such as given inducing points, is not in the file."""
        if unknown := [name for name in extra if name not in cls.load_options]:
            *others, last = ("model", "device", *cls.load_options)
            raise OptionError(f"load() takes {', '.join(others)} and {last}, got {', '.join(unknown)}.")
        with torch.inference_mode(False):  # what is loaded inside it would not be of use outside
            return cls._opened(Saved(path, *read_head(path, cls.name), model, device, extra))

    @classmethod
    def _opened(cls, saved: Saved) -> Self:
        config, model = saved.config, saved.model
        with saved.rebuilding():
            refuse_another(config["network"], model if isinstance(model, nn.Module) else None)
            method = cls._rebuild(saved)
            method._rounding = Rounding.restore(config["rounding"])
        method._width = saved.width
        method._network, method.outputs_are = config["network"], config["outputs_are"]
        return method

    def _check_data(self, data: Any) -> None:  # noqa: B027 (most methods take anything)
        """Refuses, before the predictor is run over them, data that this method cannot be fitted on."""

    @abstractmethod
    def _fit(self, job: Job) -> None:
        """Fits; leaves everything as it was if it fails."""

    def _recipe(self) -> dict[str, Any]:
        """The options that decide the numbers of a fit, for a checkpoint to be recognised by."""
        return {}

    @abstractmethod
    def _predictor(self, *, covariance: bool) -> Callable[[Any], Predictive]:
        """What turns some rows of outputs into predictions, with what it needs made ready once."""

    def _rows_at_once(self) -> int:
        """How many rows to predict at a time."""
        assert self._width is not None
        return max(1, min(CHUNK, AT_ONCE // math.prod(self._width)))

    @abstractmethod
    def _tensors(self) -> dict[str, Tensor]: ...

    @abstractmethod
    def _options(self) -> dict[str, Any]: ...

    @classmethod
    @abstractmethod
    def _rebuild(cls, saved: Saved) -> Self: ...

    @abstractmethod
    def _needs(self, *, fitted: bool) -> tuple[bool, bool]:
        """Whether it reads the features, and the inputs, in order to fit or once fitted."""

    def _require_fitted(self, verb: str) -> None:
        if not self.fitted:
            raise NotFittedError(f"Call fit(...) before {verb}(), or load a saved head.")

    def _require_backbone(self, data: Any) -> Backbone:
        if self.backbone is None:
            raise DataError(
                f"Expected posthoc.Outputs, since there is no model to run, got {type(data).__name__}: give "
                f"Outputs(outputs, targets, features), or the model: {type(self).__name__}(model, ...)."
            )
        return self.backbone

    def _outputs(self, data: Any, *, targets: bool) -> Outputs:
        """Data as checked outputs, the predictor run once over it where it must be."""
        data = opened(data)
        if isinstance(data, Outputs):
            outputs = data
        else:
            features, inputs = self._needs(fitted=False)
            outputs = collect(self._require_backbone(data), data, features=features, inputs=inputs)
        if not len(outputs):
            raise DataError("Expected at least one data point, got none.")
        if self._likelihood.task == "classification" and self.outputs_are == "logits":
            doubt_logits(outputs.outputs)
        return self._checked(self._as_logits(outputs), targets=targets)

    def _home(self, found: torch.device | None = None) -> torch.device:
        """Where a head lives: on `device`, or where the data were found, or with the network; Apple's GPUs have no
        float64."""
        device = self.device or found or (self.backbone.device if self.backbone else None) or torch.device("cpu")
        return torch.device("cpu") if device.type == "mps" else device

    def _as_logits(self, outputs: Outputs) -> Outputs:
        """A classifier's outputs as logits, be they probabilities or a single logit for two classes."""
        said = outputs.outputs
        plain = self.outputs_are == "logits" and said.shape[1:].numel() > 1
        if self._likelihood.task != "classification" or plain:
            return outputs
        if self._rounding is None and self.outputs_are != "logits":
            self._rounding = find_rounding(said, self.outputs_are, warn=True)
        return outputs.with_outputs(as_logits(said, self.outputs_are, self._rounding))

    def _checked(self, outputs: Outputs, *, targets: bool) -> Outputs:
        self._likelihood.check_outputs(outputs.outputs)
        if not targets:
            return outputs
        if outputs.targets is None:
            raise DataError("Expected targets to fit on: batches (x, y), mappings with labels, Outputs with targets.")
        return outputs.with_targets(self._likelihood.check_targets(outputs.targets, outputs.outputs))

    def _check_width(self, outputs: Outputs, width: tuple[int, ...]) -> None:
        found = tuple(outputs.outputs.shape[1:])
        if found != width:
            raise DataError(f"Expected outputs of shape {('N', *width)} as in fit, got {('N', *found)}.")

    def _stream(self, data: Any, *, targets: bool = False) -> Generator[tuple[Outputs, Callable[[], None]]]:
        """Outputs, and for each what refuses them if they are not finite; with targets, of data as `fit` takes them."""
        data = arrays(opened(data))
        if isinstance(data, Outputs):
            yield self._fitting(data, targets=targets), settled
            return
        if isinstance(data, list) and is_pair(data) and not targets:
            raise DataError(
                "Expected one batch or a loader, got a list of arrays, which could be (x, y) or several batches: give "
                "a tuple (x, y), the inputs alone, or a DataLoader."
            )
        one_batch = not targets and is_arrays(data)
        with closing(self._readings(data, one_batch=one_batch)) as readings:
            for reading in readings:
                if len(reading.outputs):
                    part = read(reading)
                    if targets and reading.target is not None:
                        part = part.with_targets(as_tensor(reading.target))
                    yield self._fitting(part, targets=targets), reading.settle

    def _readings(self, data: Any, *, one_batch: bool) -> Generator[Reading]:
        """What the network says of one batch, or of every batch of a loader."""
        features, inputs = self._needs(fitted=True)
        with self._require_backbone(data).running(features=features, inputs=inputs, width=self._width) as run:
            if not one_batch:
                for batch in iterate(data, CHUNK):
                    yield run(batch)
                return
            reading = run(data)
        yield reading  # the network was put back while a GPU still computes

    def _fitting(self, outputs: Outputs, *, targets: bool) -> Outputs:
        assert self._width is not None
        outputs = self._as_logits(outputs)
        self._check_width(outputs, self._width)
        if targets and outputs.targets is None:
            raise DataError("Expected targets too: batches (x, y), mappings with labels, Outputs with targets.")
        return self._checked(outputs, targets=targets)


def first_values(part: nn.Module) -> dict[str, Any]:
    """Where a part's parameters start, and whether they move."""
    return {name: [p.tolist(), "learnt" if p.requires_grad else "fixed"] for name, p in part.named_parameters()}
