"""`Method`, what every post-hoc method shares: its constructor, `fit`, `predict`, `save` and `load`."""

from __future__ import annotations

import copy
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from posthoc.collect import opened
from posthoc.collect.augmentation import Augmented
from posthoc.collect.class_scores import Rounding, as_logits, find_rounding
from posthoc.collect.data_warnings import warn_if_memorized, warn_if_probabilities
from posthoc.collect.fingerprint import fingerprint, require_same_network
from posthoc.collect.loaders import arrays, is_arrays, is_pair, iterate
from posthoc.collect.network import Backbone, collect
from posthoc.collect.outputs import Outputs
from posthoc.config import FeatureConfig, MethodConfig, ScoreConfig, SeedConfig, TrainingConfig, option
from posthoc.errors import (
    DataError,
    NotFittedError,
    OptionError,
    PosthocWarning,
)
from posthoc.io import check_tensors, contents_sha256, read_head, reading, sound_shapes, write_head
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.registry import make_likelihood
from posthoc.predictive.base import Predictive
from posthoc.predictive.conformal import Conformal, Score
from posthoc.training import Checkpoint
from posthoc.validation import integer, known_device

__all__ = [
    "FeatureConfig",
    "Fitted",
    "Job",
    "Method",
    "MethodConfig",
    "ScoreConfig",
    "SeedConfig",
    "TrainingConfig",
    "first_values",
    "option",
]

CHUNK = 1024
"""The largest number of rows that are predicted at a time, or that the network is run on at a time."""
MAX_DENSE_OUTPUTS = 32
"""Up to this number of outputs, predictions hold their covariance where draws of them need it."""
TYPICAL_ROWS = 2**16
"""Rows from which units are computed, at most."""
MOST_OUTPUTS = 2**21
"""The largest number of outputs that are predicted at a time: 16 MB for each tensor of their size."""


@dataclass(frozen=True)
class Job:
    """The data of one fit."""

    train: Outputs
    val: Outputs | None
    num_data: int
    """The number of points that `train` stands for."""
    data: Any
    """What `train` was collected from."""
    checkpoint: Checkpoint | None
    val_data: Any = None
    """What `val` was collected from."""

    @property
    def targets(self) -> Tensor:
        """The targets of `train`."""
        return targets_of(self.train)

    def part(self, rows: Outputs) -> Job:
        """The job of fitting to some of the rows, which stand for as large a share of the points."""
        num_data = max(1, round(self.num_data * len(rows) / len(self.train)))
        return replace(self, train=rows, num_data=num_data, data=rows, checkpoint=None)


class Fitted(nn.Module):
    """What a fit has learned: modules, parameters and buffers, one of them the likelihood.

    Args:
        likelihood: The fitted likelihood.
        metadata: What `shapes` returns.
        **parts: Other modules, and tensors to keep as buffers, by name.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        metadata: Mapping[str, Any] | None = None,
        **parts: Tensor | nn.Module | None,
    ) -> None:
        super().__init__()
        self.likelihood, self.metadata = likelihood, dict(metadata or {})
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            else:
                self.register_buffer(name, part)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return next((t.device for t in self.state_dict().values()), torch.device("cpu"))

    def shapes(self) -> dict[str, Any]:
        """JSON from which `Method._blank` builds an object with tensors of the same shapes."""
        return self.metadata


class Method(ABC):
    """A post-hoc method: it adds uncertainty to the outputs of a trained network.

    A subclass declares its options in a `MethodConfig` and implements `_fit`, `_needs`, `_blank` and `_predictor`.

    Args:
        model: A trained `nn.Module`, a callable that returns a tensor, or None to work from `Outputs`.
        likelihood: "regression", "classification" or a likelihood object; may be left out where the method has
            one task only.
        **options: The fields of the method's config (`Method.Config`).
    """

    name: ClassVar[str]
    Config: ClassVar[type[MethodConfig]] = MethodConfig
    tasks: ClassVar[tuple[str, ...]] = ("regression", "classification")
    any_task: ClassVar[bool] = False
    """Whether the method works with likelihoods of other tasks too."""
    black_box: ClassVar[bool] = True
    """Whether the method needs nothing but outputs (else it needs the network)."""
    fixed_mean: ClassVar[bool] = True
    """Whether the mean of a prediction is the network's own output."""
    wants_unseen: ClassVar[bool] = False
    """Whether the method learns from the network's errors, which must then be those on new data."""
    needs_classes: ClassVar[bool] = False
    """Whether labels of one class alone are an error (else a warning)."""
    trains: ClassVar[bool] = False
    """Whether a fit takes steps, between which it can write checkpoints."""
    rows_alone: ClassVar[bool] = True
    """Whether the prediction for a row does not depend on the other rows."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls.__signature__ = cls.Config.signature()  # type: ignore[attr-defined]

    def __init__(self, model: Any = None, likelihood: str | Likelihood | None = None, **options: Any) -> None:
        self.config = self.Config.build(self.name, options)
        only = self.tasks[0] if len(self.tasks) == 1 else None
        self._likelihood = self._suited(likelihood if likelihood is not None else only)
        if not self.any_task and self._likelihood.task not in self.tasks:
            raise OptionError(f"{self.name} is for {' and '.join(self.tasks)}, not for {self._likelihood.task}.")
        self.device = known_device(self.config.device)
        self.layer: str | None = getattr(self.config, "layer", None)
        self.outputs_are: str = getattr(self.config, "outputs_are", "logits")
        if model is not None and not callable(model) and hasattr(model, "predict_proba"):
            raise OptionError(
                f"Expected a model that can be called, got a {type(model).__name__}: give its method, "
                f'{type(self).__name__}(model.predict_proba, "classification", outputs_are="probs").'
            )
        self.backbone = Backbone(model, self.layer, self.device) if model is not None else None
        self._fitted: Fitted | None = None
        self._width: tuple[int, ...] | None = None  # the shape of one row of outputs
        self._network: str | None = None  # the fingerprint of the network
        self._rounding: Rounding | None = None  # of the probabilities of the fit

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._likelihood.task}, {'fitted' if self.fitted else 'not fitted'})"

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood; after a fit, the fitted one."""
        return self._fitted.likelihood if self._fitted is not None else self._likelihood

    @property
    def fitted(self) -> bool:
        """Whether the method can predict."""
        return self._width is not None

    @classmethod
    def known_options(cls, common: Mapping[str, Any]) -> dict[str, Any]:
        """The options that this method takes, among those that are common to several methods.

        `outputs_are` other than "logits" is kept even so: a method that cannot use probabilities must refuse it.
        """
        taken = cls.Config.names()
        return {k: v for k, v in common.items() if k in taken or (k == "outputs_are" and v != "logits")}

    def _suited(self, likelihood: Any) -> Likelihood:
        """The likelihood in the form that this method uses."""
        return make_likelihood(likelihood)

    def fit(
        self,
        data: Any,
        targets: Any = None,
        *,
        val: Any = None,
        num_data: int | None = None,
        augment: str | Callable[[Tensor], Tensor] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 200,
        resume: bool = False,
    ) -> Self:
        """Fits on data that the network has not memorised.

        Args:
            data: Inputs (with `targets`), a pair (x, y), a DataLoader or dataset of them, `Outputs`, or the path of a
                file of outputs.
            targets: The targets, one for each row of `data`, where `data` are inputs alone.
            val: More data, to stop early by and to choose options by.
            num_data: The number of points that `data` stands for. By default their own number.
            augment: "crops", or a function of a batch of images, where there are only the images that the network was
                trained on.
            checkpoint: A folder for the state of a fit that takes steps.
            checkpoint_every: Steps between two checkpoints.
            resume: Whether to continue from the checkpoint, to exactly the numbers of a fit that was not interrupted.

        Returns:
            The method itself.
        """
        num_data = integer("num_data", num_data, 1) if num_data is not None else None
        if resume and checkpoint is None:
            raise OptionError("resume=True goes on from a checkpoint: name its folder with checkpoint=....")
        if checkpoint is not None and not self.trains:
            raise OptionError(f"{self.name} is not fitted in steps and keeps no checkpoints: leave checkpoint out.")
        data, val = arrays(opened(with_targets(data, targets))), arrays(opened(val))
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
        train = self._outputs(data)
        held_out = self._outputs(val) if val is not None else None
        if held_out is not None:
            self._check_width(held_out, tuple(train.outputs.shape[1:]))
        self._warn_of(train, held_out)
        network = fingerprint(self.backbone.module) if self.backbone else None
        if checkpoint is not None:
            checkpoint.of(
                {
                    **self._identity(),
                    "start": first_values(self._likelihood),
                    "data": train.digest(),
                    "val": held_out.digest() if held_out is not None else None,
                    "num_data": num_data or len(train),
                    "network": network,
                }
            )
        fitted = self._fit(Job(train, held_out, num_data or len(train), data, checkpoint, val))
        self._fitted = fitted if fitted is not None else self._fitted
        self._width, self._network = tuple(train.outputs.shape[1:]), network
        return self

    def _warn_of(self, train: Outputs, val: Outputs | None) -> None:
        """Warns of data that the fit can use but should not, and refuses data of one class where it cannot."""
        if train.outputs.dtype in (torch.float16, torch.bfloat16):
            warnings.warn(
                f"The outputs are {train.outputs.dtype}: means stay as they are, the uncertainty is computed in "
                "float64 and returned in float32.",
                PosthocWarning,
                stacklevel=4,
            )
        targets = targets_of(train)
        one_class = self._likelihood.task == "classification" and int(targets.min()) == int(targets.max())
        if one_class and (len(train) > 1 or self.needs_classes):
            found = f"Expected labels of at least two classes, got class {int(targets[0])} in all {len(train)} rows"
            if self.needs_classes:
                raise DataError(f"{found}: such data say nothing about what separates classes.")
            warnings.warn(f"{found}: the fit is of no use for the other classes.", PosthocWarning, stacklevel=4)
        if self.wants_unseen:
            warn_if_memorized(train, val, self._likelihood.task)

    def predict(self, data: Any, *, covariance: bool = False) -> Predictive:
        """The predictive distribution of each row.

        Args:
            data: One batch of inputs (a tensor, an array or a mapping), a loader, `Outputs`, or the path of a file of
                outputs.
            covariance: Whether to compute the covariance across outputs.

        Returns:
            Predictions for all rows.
        """
        # Closed whatever happens: a suspended generator would keep the network in eval mode.
        with closing(self._predictions(data, covariance=covariance)) as predictions:
            parts = [predictive for predictive, _ in predictions]
        if not parts:
            raise DataError("Expected at least one data point to predict, got none: the loader is empty.")
        return type(parts[0]).cat(parts)

    def stream(self, data: Any, *, covariance: bool = False) -> Generator[Predictive]:
        """As `predict`, some rows at a time and in order, for more data than fit into memory."""
        with closing(self._predictions(data, covariance=covariance)) as predictions:
            for predictive, _ in predictions:
                yield predictive

    def stream_with_targets(self, data: Any) -> Generator[tuple[Predictive, Tensor]]:
        """As `stream`, of data as `fit` takes them, with the targets of each part."""
        with closing(self._predictions(data, targets=True)) as predictions:
            for predictive, part in predictions:
                yield predictive, targets_of(part)

    @torch.no_grad()
    def _predictions(
        self, data: Any, *, covariance: bool = False, targets: bool = False
    ) -> Generator[tuple[Predictive, Outputs]]:
        """Predictions, and the rows that they are for."""
        self._require_fitted("predict")
        predict, size = self._predictor(self._fitted, covariance=covariance), self._rows_at_once()
        with closing(self._stream(data, targets=targets)) as stream:
            for outputs in stream:
                for start in range(0, len(outputs), size):
                    part = outputs[start : start + size] if len(outputs) > size else outputs
                    predictive = predict(part)
                    require_finite_prediction(predictive)
                    yield predictive, part

    def conformal(self, calibration: Any, *, score: str | Score | None = None) -> Conformal:
        """The same predictions with guaranteed coverage: intervals in regression, sets of classes in classification.

        Args:
            calibration: Data as `fit` takes them, exchangeable with the data to come. Neither the network nor this
                method may have been fitted on them.
            score: Regression: "per_output" (the default, a guarantee for each output) or "joint" (one for all
                outputs). Classification: "lac" (the default, the smallest sets), "aps" or "raps" (sets that grow with
                the uncertainty), or an `LAC` or `APS` object.
        """
        with closing(self.stream_with_targets(calibration)) as parts:
            return Conformal.calibrate(self, parts, score, self._likelihood.task)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the fitted head (not the network) as safetensors, whole or not at all.

        Inducing points may be rows of your data, or close to them. The file is read back before it takes the place of
        an older one.
        """
        self._require_fitted("save")
        write_head(path, self._tensors(), self._header(), check=self._read_back)

    def digest(self) -> str:
        """The SHA-256 of what `save` writes: it identifies the fitted head."""
        self._require_fitted("digest")
        return contents_sha256(self._tensors(), self._header())

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        model: Any = None,
        device: str | torch.device | None = None,
        **given: Any,
    ) -> Self:
        """Loads a saved head.

        Args:
            path: The file.
            model: The network that the head was fitted on. Without it the head predicts from `Outputs`.
            device: Where the head computes.
            **given: Options that the file does not hold, such as a kernel of GPyTorch.
        """
        if unknown := [name for name in given if name not in cls.Config.given_on_load()]:
            *others, last = ("model", "device", *cls.Config.given_on_load())
            raise OptionError(f"load() takes {', '.join(others)} and {last}, got {', '.join(unknown)}.")
        tensors, header = read_head(path, cls.name)
        return cls._restored(path, tensors, header, model, {"device": device, **given})

    @classmethod
    def _restored(
        cls,
        path: str | os.PathLike[str],
        tensors: dict[str, Tensor],
        header: dict[str, Any],
        model: Any,
        given: Mapping[str, Any],
    ) -> Self:
        """The method that wrote these contents of a file. Tensors made in inference mode would be of no use later."""
        with torch.inference_mode(False), reading(path):
            method = cls(model, make_likelihood(header["likelihood"]), **cls.Config.from_dict(header["config"], given))
            require_same_network(header["network"], method.backbone.module if method.backbone is not None else None)
            shapes = sound_shapes(header["shapes"], tensors)
            method._width, method._network = tuple(shapes["outputs"]), header["network"]
            rounding = header["rounding"]
            method._rounding = Rounding(*map(float, rounding)) if rounding is not None else None
            fitted = method._blank(shapes["fitted"])
            state = fitted.state_dict()
            check_tensors(path, tensors, tensors_of(state))
            fitted.load_state_dict({**state, **tensors}, strict=True)
            method._fitted = fitted.to(method._home())
        return method

    def _read_back(self, path: Path) -> None:
        """Raises if the head in a file cannot be loaded."""
        tensors, header = read_head(path, self.name)
        given = {name: getattr(self.config, name) for name in self.Config.given_on_load()}
        type(self)._restored(path, tensors, {**header, "network": None}, self._model, given)

    @property
    def _model(self) -> Any:
        return self.backbone.model if self.backbone is not None else None

    def _identity(self) -> dict[str, Any]:
        """The method, its options and its likelihood: what decides the numbers of a fit beside the data."""
        return {"method": self.name, "config": self.config.to_dict(), "likelihood": self._likelihood.spec()}

    def _header(self) -> dict[str, Any]:
        """What a head file holds beside the tensors, with places for the names of columns and classes."""
        shapes = {
            "outputs": list(self._width or ()),
            "fitted": self._fitted.shapes() if isinstance(self._fitted, Fitted) else {},
        }
        found = {"shapes": shapes, "rounding": self._rounding, "network": self._network}
        return {**self._identity(), **found, "columns": None, "classes": None}

    def _tensors(self) -> dict[str, Tensor]:
        return tensors_of(self._fitted.state_dict()) if self._fitted is not None else {}

    def _check_data(self, data: Any) -> None:  # noqa: B027 (most methods take anything)
        """Refuses data that this method cannot be fitted on, before the network is run over them."""

    @abstractmethod
    def _fit(self, job: Job) -> Fitted | None:
        """The fitted state. A fit that fails leaves the method as it was."""

    def _predictor(self, fitted: Any, *, covariance: bool) -> Callable[[Any], Predictive]:
        """A function from some rows of outputs to predictions, made once for many parts of the data.

        By default `fitted.predictive(rows, covariance=...)`, computed where the fitted state is.
        """
        dense, device = self._dense(covariance), fitted.device
        blocks = [name for name, wanted in zip(("features", "inputs"), self._needs(fitted=True), strict=True) if wanted]

        def predict(outputs: Outputs) -> Predictive:
            pred: Predictive = fitted.predictive(outputs.only(*blocks).to(device), covariance=dense)
            return pred.to(outputs.outputs.device)

        return predict

    @abstractmethod
    def _needs(self, *, fitted: bool) -> tuple[bool, bool]:
        """Whether the method reads the features, and the inputs, for a fit or once `fitted`."""

    def _blank(self, shapes: Mapping[str, Any]) -> Fitted:
        """A fitted state of these shapes, to load tensors into."""
        return Fitted(self._blank_likelihood())

    def _blank_likelihood(self, likelihood: Likelihood | None = None) -> Likelihood:
        """A likelihood, by default the method's, with parameters of the shapes it has for outputs of this width."""
        likelihood = copy.deepcopy(likelihood or self._likelihood)
        row = torch.zeros(()).expand(1, *(self._width or ()))
        likelihood.check_outputs(row)
        likelihood.initialize(row, row)
        return likelihood

    def _start_likelihood(self, rows: Outputs, device: torch.device) -> Likelihood:
        """A copy of the likelihood on a device, in the units of some rows."""
        likelihood = copy.deepcopy(self._likelihood).to(device)
        typical = rows.only().spread(TYPICAL_ROWS).to(device)
        likelihood.initialize(typical.outputs, targets_of(typical))
        return likelihood

    def _dense(self, covariance: bool) -> bool:
        """Whether predictions hold the covariance of the outputs: on request, or for draws of few outputs."""
        return covariance or (self._likelihood.samples_latent and math.prod(self._width or ()) <= MAX_DENSE_OUTPUTS)

    def _rows_at_once(self) -> int:
        """The number of rows to predict at a time."""
        return max(1, min(CHUNK, MOST_OUTPUTS // math.prod(self._width or (1,))))

    def _require_fitted(self, verb: str) -> Any:
        """The fitted state."""
        if not self.fitted:
            raise NotFittedError(f"Call fit(...) before {verb}(), or load a saved head.")
        return self._fitted

    def _require_backbone(self, data: Any) -> Backbone:
        if self.backbone is None:
            raise DataError(
                f"Expected posthoc.Outputs, since there is no model to run, got {type(data).__name__}: give "
                f"Outputs(outputs, targets, features), or the model: {type(self).__name__}(model, ...)."
            )
        return self.backbone

    def _outputs(self, data: Any) -> Outputs:
        """The data of a fit as checked outputs; the network is run once over them if there is one."""
        data = opened(data)
        if isinstance(data, Outputs):
            outputs = data
            outputs.require_finite()
        else:
            features, inputs = self._needs(fitted=False)
            outputs = collect(self._require_backbone(data), data, features=features, inputs=inputs)
        if not len(outputs):
            raise DataError("Expected at least one data point, got none.")
        if self._likelihood.task == "classification" and self.outputs_are == "logits":
            warn_if_probabilities(outputs.outputs)
        return self._checked(outputs, targets=True)

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
        """Outputs that suit the likelihood, scores of classes as logits; with targets, these are checked too."""
        outputs = self._as_logits(outputs)
        self._likelihood.check_outputs(outputs.outputs)
        if not targets:
            return outputs
        return outputs.with_targets(self._likelihood.check_targets(targets_of(outputs), outputs.outputs))

    def _check_width(self, outputs: Outputs, width: tuple[int, ...]) -> None:
        found = tuple(outputs.outputs.shape[1:])
        if found != width:
            hint = "; a single point must be a batch of one, x[None]" if outputs.outputs.shape == width else ""
            raise DataError(f"Expected outputs of shape {('N', *width)} as in fit, got {('N', *found)}{hint}.")

    def _stream(self, data: Any, *, targets: bool = False) -> Generator[Outputs]:
        """The outputs of one batch, or of every batch of a loader; with targets, of data as `fit` takes them."""
        data = arrays(opened(data))
        if isinstance(data, Outputs):
            yield self._to_predict(data, targets=targets)
            return
        if isinstance(data, list) and is_pair(data) and not targets:
            raise DataError(
                "Expected one batch or a loader, got a list of arrays, which could be (x, y) or several batches: give "
                "a tuple (x, y), the inputs alone, or a DataLoader."
            )
        batches = [data] if not targets and is_arrays(data) else iterate(data, CHUNK)
        features, inputs = self._needs(fitted=True)
        backbone = self._require_backbone(data)
        with backbone.reading(features=features, inputs=inputs, targets=targets, width=self._width) as read:
            for outputs in read(batches):
                if len(outputs):
                    yield self._to_predict(outputs, targets=targets)

    def _to_predict(self, outputs: Outputs, *, targets: bool) -> Outputs:
        """Outputs checked as those of the fit, and of the same width."""
        assert self._width is not None
        outputs = self._checked(outputs, targets=targets)
        self._check_width(outputs, self._width)
        return outputs


def first_values(part: nn.Module) -> dict[str, Any]:
    """Where a part's parameters start, and whether they move."""
    return {name: [p.tolist(), "learnt" if p.requires_grad else "fixed"] for name, p in part.named_parameters()}


def with_targets(data: Any, targets: Any) -> Any:
    """The pair of data and targets, where targets are given apart."""
    if targets is None:
        return data
    if isinstance(data, Outputs | str | os.PathLike):
        raise DataError(f"Expected targets inside the {type(data).__name__}, got them beside it: fit(data) is enough.")
    return data, targets


def targets_of(outputs: Outputs) -> Tensor:
    """The targets, which a fit has checked to be there."""
    if outputs.targets is None:
        raise DataError("Expected targets: batches (x, y), mappings with labels, Outputs with targets.")
    return outputs.targets


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state: a network may keep other values there."""
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def require_finite_prediction(predictive: Predictive) -> None:
    """Refuses a prediction with NaN or infinity."""
    values = [*vars(predictive).values(), *vars(predictive.latent).values()]
    parts = [part for part in values if isinstance(part, Tensor) and part.is_floating_point()]
    largest = [torch.linalg.vector_norm(part, math.inf).double() for part in parts if part.numel()]
    if largest and not bool(torch.stack(largest).isfinite().all()):
        raise DataError(
            "Expected finite predictions, got NaN or infinity from finite outputs: the inputs are too large, or the "
            "head is damaged. Fit it again."
        )
