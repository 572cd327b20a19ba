"""`Method`, what every post-hoc method shares: its constructor, `fit`, `predict`, `save` and `load`."""

from __future__ import annotations

import copy
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from posthoc.collect import open_outputs
from posthoc.collect.augmentation import Augmented
from posthoc.collect.class_scores import Rounding, as_logits, find_rounding
from posthoc.collect.data_warnings import check_classes, warn_if_half, warn_if_memorized, warn_if_probabilities
from posthoc.collect.fingerprint import fingerprint, require_same_network
from posthoc.collect.loaders import arrays, is_arrays, is_pair, iterate, with_targets
from posthoc.collect.network import Backbone, collect
from posthoc.collect.outputs import Outputs, require_same_columns, require_width, table_names
from posthoc.config import MethodConfig
from posthoc.errors import DataError, FileError, NotFittedError, OptionError
from posthoc.io import contents_sha256, read_head, reading, write_head
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.registry import make_likelihood
from posthoc.likelihoods.temperature import best_inverse, log_likelihood
from posthoc.predictive.base import Predictive, require_finite_prediction
from posthoc.predictive.conformal import Conformal, Score
from posthoc.training import Checkpoint, single_thread
from posthoc.validation import integer, known_device

CHUNK = 1024
"""The largest number of rows that are predicted at a time, or that the network is run on at a time."""
MAX_DENSE_OUTPUTS = 32
"""Up to this number of outputs, predictions hold their covariance where draws of them need it."""
FEW_ROWS = 16
"""Predictions of at most this many rows use one thread."""
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
    device: torch.device
    """Where the fit computes."""
    data: Any
    """What `train` was collected from."""
    val_data: Any = None
    """What `val` was collected from."""
    checkpoint: Checkpoint | None = None
    rounding: Rounding | None = None
    """How coarse the probabilities of `train` are, where it was made of such."""
    given_width: tuple[int, ...] = ()
    """The shape of one row of the outputs that `train` was made of."""


class Predictor(NamedTuple):
    """How a fitted method predicts.

    Attributes:
        predict: A function from some rows of outputs to their predictions.
        rows: The largest number of rows to predict at a time.
        reads: The blocks that it reads besides the outputs: "features", "inputs".
        device: Where it takes the rows; None: where they are.
    """

    predict: Callable[[Outputs], Predictive]
    rows: int
    reads: Collection[str] = ()
    device: torch.device | None = None


class Fitted(nn.Module):
    """What a fit has learned: modules, parameters and buffers, one of them the likelihood.

    Args:
        likelihood: The fitted likelihood.
        metadata: What `shapes` returns.
        **parts: Other modules, and tensors to keep as buffers, by name.
    """

    reads: Collection[str] = ()
    """The blocks that predictions read besides the outputs."""
    coupled: bool = True
    """Whether draws need the covariance of the outputs."""

    def __init__(
        self, likelihood: Likelihood, metadata: Mapping[str, Any] | None = None, **parts: Tensor | nn.Module | None
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

    def rows_at_once(self, outputs: int, *, dense: bool) -> int:
        """How many rows of this number of outputs to predict at a time, as far as memory allows.

        Args:
            outputs: The number of outputs.
            dense: Whether predictions hold the covariance of the outputs.
        """
        return CHUNK


class Method(ABC):
    """A post-hoc method: it adds uncertainty to the outputs of a trained network.

    A subclass declares its options in a `MethodConfig` and implements `_fit`, `_reads` and `_blank`.

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
    black_box: bool = True
    """Whether the method needs nothing but outputs (else it needs the network)."""
    _reads_again: bool = False
    """Whether a fit reads the data more than once."""
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
        if isinstance(model, str) and likelihood is None:
            raise OptionError(f"Expected a model first, got {model!r}: {type(self).__name__}(likelihood={model!r}).")
        self.config = self.Config.build(self.name, options)
        only = self.tasks[0] if len(self.tasks) == 1 else None
        self._likelihood = self._suited(likelihood if likelihood is not None else only)
        if not self.any_task and self._likelihood.task not in self.tasks:
            raise OptionError(f"{self.name} is for {' and '.join(self.tasks)}, not for {self._likelihood.task}.")
        self.device = known_device(self.config.device)
        self.layer: str | None = getattr(self.config, "layer", None)
        self.outputs_are: str = getattr(self.config, "outputs_are", "logits")
        claims = self.outputs_are == "mean-and-variance"
        if self.outputs_are != "logits" and claims == (self._likelihood.task == "classification"):
            kinds = ("regression", "classification") if claims else ("classification", "regression")
            raise OptionError(f"outputs_are is an option for {kinds[0]}, got {self.outputs_are!r} for a {kinds[1]}.")
        if model is not None and not callable(model) and hasattr(model, "predict_proba"):
            raise OptionError(
                f"Expected a model that can be called, got a {type(model).__name__}: give its method, "
                f'{type(self).__name__}(model.predict_proba, "classification", outputs_are="probs").'
            )
        self.backbone = Backbone(model, self.layer, self.device) if model is not None else None
        self._fitted: Fitted | None = None
        self._width: tuple[int, ...] | None = None  # the shape of one row of logits or values
        self._given_width: tuple[int, ...] | None = None  # the same of the outputs before they became logits
        self._network: str | None = None  # the fingerprint of the network
        self._rounding: Rounding | None = None  # of the probabilities of the fit
        self._columns: dict[str, tuple[str, ...]] = {}  # the names of columns in tables, by block

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
        """Fits on data that the network has not memorized.

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
        place = Checkpoint(checkpoint, every=checkpoint_every, resume=resume) if checkpoint is not None else None
        data = with_targets(data, targets)
        names = table_names(data)
        data, val = self._read(data), self._read(val) if val is not None else None
        if augment is not None:
            data = Augmented(data, augment)
        with torch.inference_mode(False), torch.enable_grad(), place.claimed() if place is not None else nullcontext():
            job = self._job(data, val, num_data, place)
            network = fingerprint(self.backbone.module) if self.backbone else None
            if place is not None:
                start = {
                    "start": {name: [p.tolist(), p.requires_grad] for name, p in self._likelihood.named_parameters()},
                    "data": job.train.digest(),
                    "val": job.val.digest() if job.val is not None else None,
                    "num_data": job.num_data,
                    "network": network,
                }
                place.of(self._identity() | start)
            self._fitted = self._fit(job)
        self._width, self._given_width = tuple(job.train.outputs.shape[1:]), job.given_width
        self._network, self._rounding = network, job.rounding
        read = ("outputs", *self._fitted.reads)
        self._columns = {block: columns for block, columns in job.train.named().items() if block in read}
        if names is not None and not isinstance(data, Outputs):
            self._columns["inputs"] = names  # of the network
        return self

    def _read(self, data: Any, *, once: bool = False) -> Any:
        """Data as `Outputs`, arrays or batches: a file is opened, tables and lists of numbers become arrays.

        Data that this method cannot use are refused, before the network is run over them. Iterators are taken where
        it is enough to read the data `once`.
        """
        if isinstance(data, str | os.PathLike):
            data = open_outputs(data)
        if isinstance(data, Outputs):
            if not self.black_box:
                raise DataError(
                    f"Expected data for the network, which {self.name} runs (a DataLoader, a pair of arrays), got "
                    "outputs: give those data, or use a method that needs outputs alone, such as fmgp."
                )
            return data
        if self._reads_again and not once and isinstance(data, Iterator):
            raise DataError(
                f"Expected a DataLoader or arrays, since {self.name} reads the data more than once, got an iterator."
            )
        if self.backbone is None:
            raise DataError(
                f"Expected posthoc.Outputs, since there is no model to run, got {type(data).__name__}: give "
                f"Outputs(outputs, targets, features), or the model: {type(self).__name__}(model, ...)."
            )
        return arrays(data)

    def _job(self, data: Any, val: Any, num_data: int | None, checkpoint: Checkpoint | None) -> Job:
        """Collects the outputs of the network on the data of a fit, and checks them."""
        collected = [self._collect(each) for each in ([data] if val is None else [data, val])]
        first, task = collected[0].outputs, self._likelihood.task
        device, rounding = self._home(first.device), None
        if task == "classification" and self.outputs_are != "logits":
            targets = collected[0].targets

            def loss(logits: Tensor) -> float:  # after temperature scaling
                labels = self._likelihood.check_targets(targets, logits)
                return -log_likelihood(logits, labels, best_inverse(logits, labels))

            rounding = find_rounding(first, self.outputs_are, loss if targets is not None else None)
        train, held_out = self._checked(collected[0], rounding), None
        if val is not None:
            require_same_columns(train.named(), collected[1].named())
            held_out = self._checked(collected[1], rounding, width=tuple(first.shape[1:]))
        warn_if_half(train.outputs)
        if task == "classification":
            check_classes(train, required=self.needs_classes)
            if self.outputs_are == "logits":
                warn_if_probabilities(*(each.outputs for each in collected))
        if self.wants_unseen:
            warn_if_memorized(train, held_out, task)
        width = tuple(first.shape[1:])
        return Job(train, held_out, num_data or len(train), device, data, val, checkpoint, rounding, width)

    def _collect(self, data: Any) -> Outputs:
        """The outputs of the network, which is run once over the data of a fit if there is one."""
        if isinstance(data, Outputs):
            data.require_finite()
            outputs = data
        else:
            assert self.backbone is not None
            reads = self._reads()
            inputs = None if "table" in reads and "inputs" not in reads else "inputs" in reads
            outputs = collect(self.backbone, data, features="features" in reads, inputs=inputs)
        if not len(outputs):
            raise DataError("Expected at least one data point, got none.")
        return outputs

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
        return parts[0] if len(parts) == 1 else type(parts[0]).cat(parts)

    def stream(self, data: Any, *, covariance: bool = False) -> Generator[Predictive]:
        """As `predict`, some rows at a time and in order, for more data than fit into memory."""
        with closing(self._predictions(data, covariance=covariance)) as predictions:
            for predictive, _ in predictions:
                yield predictive

    def stream_with_targets(self, data: Any) -> Generator[tuple[Predictive, Tensor]]:
        """As `stream`, of data as `fit` takes them, with the targets of each part."""
        with closing(self._predictions(data, targets=True)) as predictions:
            for predictive, rows in predictions:
                assert rows.targets is not None
                yield predictive, rows.targets

    def _predictions(
        self, data: Any, *, covariance: bool = False, targets: bool = False
    ) -> Generator[tuple[Predictive, Outputs]]:
        """Predictions, and the rows that they are for."""
        names = table_names(data)
        fitted, data = self._require_fitted("predict"), self._read(data, once=True)
        if names and not isinstance(data, Outputs):
            require_same_columns(self._columns, {"inputs": names})
        if isinstance(data, list) and is_pair(data) and not targets:
            raise DataError(
                "Expected one batch or a loader, got a list of arrays, which could be (x, y) or several batches: give "
                "a tuple (x, y), the inputs alone, or a DataLoader."
            )
        one_batch = isinstance(data, Outputs) or (not targets and is_arrays(data))
        batches = [data] if one_batch else iterate(data, CHUNK)
        (predict, size, reads, device), seen = self._predictor(fitted, covariance=covariance), 0
        with ExitStack() as stack:
            if not isinstance(data, Outputs):
                backbone, features, inputs = self._predicting_backbone(), "features" in reads, "inputs" in reads
                reading = backbone.reading(features=features, inputs=inputs, targets=targets, width=self._given_width)
                batches = stack.enter_context(reading)(batches)
            for outputs in batches:
                if one_batch:
                    stack.close()  # puts the network back, while a GPU still computes
                if not len(outputs):
                    continue
                require_same_columns(self._columns, outputs.named())
                home = outputs.outputs.device
                checked = self._checked(outputs, self._rounding, width=self._given_width, targets=targets)
                for start in range(0, len(checked), size):
                    rows = checked[start : start + size] if len(checked) > size else checked
                    # These contexts do not include the yield, because the caller's code runs there.
                    with torch.no_grad(), single_thread(len(rows) <= FEW_ROWS):
                        predictive = predict(rows.only(*reads).to(device or home))
                    predictive = predictive.to(home) if device not in (None, home) else predictive
                    require_finite_prediction(predictive, rows, seen + start)
                    yield predictive, rows
                seen += len(outputs)

    def _predicting_backbone(self) -> Backbone:
        """What runs the network for predictions."""
        assert self.backbone is not None
        return self.backbone

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

        Inducing points, and the rows that `ood_score` compares with, may be rows of your data, or close to them. The
        file is read back before it takes the place of an older one.
        """
        self._require_fitted("save")
        write_head(path, self._tensors(), self._header(), check=self._read_back)

    def digest(self) -> str:
        """The SHA-256 of what `save` writes: it identifies the fitted head."""
        self._require_fitted("digest")
        return contents_sha256(self._tensors(), self._header())

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, model: Any = None, device: str | torch.device | None = None, **given: Any
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
            shapes = header["shapes"]
            method._width, method._given_width = tuple(shapes["outputs"]), tuple(shapes["given"])
            method._network = header["network"]
            rounding = header["rounding"]
            method._rounding = Rounding(*map(float, rounding)) if rounding is not None else None
            method._columns = {block: tuple(names) for block, names in header["columns"].items()}
            fitted = method._blank(shapes["fitted"])
            others = {name: value for name, value in fitted.state_dict().items() if not isinstance(value, Tensor)}
            fitted.load_state_dict({**others, **tensors})
            method._fitted = fitted.to(method._home())
        return method

    def _read_back(self, path: Path) -> None:
        """Raises if the head in a file cannot be loaded."""
        tensors, header = read_head(path, self.name)
        given = {name: getattr(self.config, name) for name in self.Config.given_on_load()}
        model = self.backbone.model if self.backbone is not None else None
        try:
            method = type(self)._restored(path, tensors, {**header, "network": None}, model, given)
        except FileError as error:
            found = f"one that cannot ({error.__cause__!r:.300})"
            raise OptionError(f"Expected a head that can be loaded, got {found}: is _blank missing?") from error
        states = (each._require_fitted("save").named_modules(remove_duplicate=False) for each in (self, method))
        for own, loaded in zip(*([type(part) for _, part in state] for state in states), strict=True):
            if own is not loaded:
                found = f"{own.__name__}, which would be loaded as {loaded.__name__}: register it under another name"
                raise OptionError(f"Expected parts that a file can name, got {found}.")

    def _identity(self) -> dict[str, Any]:
        """The method, its options and its likelihood: what decides the numbers of a fit beside the data."""
        return {"method": self.name, "config": self.config.to_dict(), "likelihood": self._likelihood.spec()}

    def _header(self) -> dict[str, Any]:
        """What a head file holds beside the tensors, with a place for the names of classes."""
        shapes: dict[str, Any] = {"outputs": list(self._width or ()), "given": list(self._given_width or ())}
        shapes["fitted"] = self._require_fitted("save").shapes()
        found = {"shapes": shapes, "rounding": self._rounding, "network": self._network, "columns": self._columns}
        return {**self._identity(), **found, "classes": None}

    def _tensors(self) -> dict[str, Tensor]:
        assert self._fitted is not None
        return {name: value for name, value in self._fitted.state_dict().items() if isinstance(value, Tensor)}

    @abstractmethod
    def _fit(self, job: Job) -> Fitted:
        """The fitted state. A fit that fails leaves the method as it was."""

    @abstractmethod
    def _reads(self) -> Collection[str]:
        """The blocks that a fit reads besides the outputs: "features", "inputs", "table" (inputs of few columns)."""

    def _predictor(self, fitted: Any, *, covariance: bool) -> Predictor:
        """How to predict; made once for many parts of the data.

        By default `fitted.predictive(rows, covariance=...)`, computed where the fitted state is.
        """
        rows, dense = self._rows_at_once(), self._dense(covariance)
        dense = covariance or (dense and fitted.coupled)
        rows = min(rows, fitted.rows_at_once(math.prod(self._width or ()), dense=dense))
        return Predictor(partial(fitted.predictive, covariance=dense), rows, fitted.reads, fitted.device)

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
        assert typical.targets is not None
        likelihood.initialize(typical.outputs, typical.targets)
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

    def _home(self, found: torch.device | None = None) -> torch.device:
        """Where a head lives: on `device`, or where the data were found, or with the network; Apple's GPUs have no
        float64."""
        device = self.device or found or (self.backbone.device if self.backbone else None) or torch.device("cpu")
        return torch.device("cpu") if device.type == "mps" else device

    def _checked(
        self,
        outputs: Outputs,
        rounding: Rounding | None = None,
        *,
        width: tuple[int, ...] | None = None,
        targets: bool = True,
    ) -> Outputs:
        """Outputs that suit the likelihood, scores of classes as logits; with targets, these are checked too."""
        values, classes = outputs.outputs, self._likelihood.task == "classification"
        if width is not None:
            require_width(values, width, one_score=classes)
        if classes and (self.outputs_are != "logits" or values.shape[1:].numel() == 1):
            outputs = outputs.with_outputs(as_logits(values, self.outputs_are, rounding))
        if self.outputs_are == "mean-and-variance":
            outputs = outputs.with_claimed_variance()
        self._likelihood.check_outputs(outputs.outputs)
        if not targets:
            return outputs
        if outputs.targets is None:
            raise DataError("Expected targets: batches (x, y), mappings with labels, Outputs with targets.")
        return outputs.with_targets(self._likelihood.check_targets(outputs.targets, outputs.outputs))
