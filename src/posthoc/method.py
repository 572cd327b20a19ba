"""What every method shares: `fit`, `predict`, `save` and `load` around a predictor that is only ever read."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from posthoc.backbone import Backbone, fingerprint
from posthoc.batches import is_array, is_arrays, iterate
from posthoc.checks import integer
from posthoc.errors import DataError, FileError, NotFittedError, PosthocWarning
from posthoc.files import read_head, write_head
from posthoc.likelihoods import Likelihood, make_likelihood
from posthoc.outputs import Outputs, collect, join
from posthoc.predictive import Predictive

__all__ = ["Method"]

CHUNK = 1024
"""Rows predicted at a time, unless a method says otherwise, and rows of a dataset run at a time."""


class Method(ABC):
    """A post-hoc method: give it a trained predictor (or none, and its outputs), fit, predict.

    A subclass fits from `Outputs` (`_fit`), predicts from them (`_predictor`) and says what it holds (`_tensors`,
    `_options`) and how to be built from that (`_rebuild`).
    """

    name: ClassVar[str]

    def __init__(
        self,
        model: nn.Module | Callable[..., Any] | None,
        likelihood: str | Likelihood,
        *,
        layer: str | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        self._likelihood = make_likelihood(likelihood)
        self.device = torch.device(device) if device is not None else None
        self.layer = layer
        self.backbone = Backbone(model, layer, self.device) if model is not None else None
        self._width: tuple[int, ...] | None = None  # of one row of outputs, once fitted
        self._fingerprint: str | None = None

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood: fitted, once there is a fit."""
        return self._likelihood

    @property
    def fitted(self) -> bool:
        """Whether there is anything to predict with."""
        return self._width is not None

    def fit(self, data: Any, *, val: Any = None, num_data: int | None = None) -> Self:
        """Fits on data the network has not memorised: a DataLoader of (x, y) or mappings, a pair of arrays, or
        `Outputs`. `val` is for early stopping; `num_data` is the number of points that `data` stands for, if not
        its own."""
        num_data = integer("num_data", num_data, 1) if num_data is not None else None
        self._check_data(data)
        with torch.inference_mode(False), torch.enable_grad():
            return self._fit_checked(data, val, num_data)

    def _fit_checked(self, data: Any, val: Any, num_data: int | None) -> Self:
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
        mark = fingerprint(self.backbone.module) if self.backbone else None
        self._fit(train, held_out, num_data or len(train), data)
        self._width, self._fingerprint = tuple(train.outputs.shape[1:]), mark
        return self

    @torch.no_grad()
    def predict(self, data: Any, *, covariance: bool = False) -> Predictive:
        """The predictive distribution of a batch (a tensor, an array or a mapping, run as one), of the batches of a
        loader (streamed), or of `Outputs`. `covariance=True` adds the covariance across outputs."""
        self._require_fitted("predict")
        predict, size = self._predictor(covariance=covariance), self._rows_at_once()
        # Closed whatever happens: a suspended stream would keep the network in eval mode.
        with closing(self._stream(data)) as stream:
            parts = [predict(part[at : at + size]) for part in stream for at in range(0, len(part), size)]
        if not parts:
            raise DataError("Expected at least one data point to predict, got none: the loader is empty.")
        return type(parts[0]).cat(parts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the fitted head (not the network) as safetensors, whole or not at all. Inducing points may be rows
        of your data, or close to them."""
        self._require_fitted("save")
        config = {
            "method": self.name,
            "options": self._options(),
            "likelihood": self._likelihood.spec(),
            "layer": self.layer,
            "width": self._width,
            "network": self._fingerprint,
        }
        write_head(path, self._tensors(), config)

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
        tensors, config = read_head(path, cls.name)
        found = fingerprint(model) if isinstance(model, nn.Module) else None
        if found is not None and config["network"] is not None and found != config["network"]:
            raise FileError(
                f"Expected the network this head was fitted on (fingerprint {config['network'][:12]}), found another "
                f"({found[:12]}): its weights, buffers or layers differ. Load the right weights, or fit again."
            )
        try:
            method = cls._rebuild(path, tensors, config, model=model, device=device, **extra)
            method._width = tuple(config["width"])
        except (KeyError, TypeError) as error:
            raise FileError(
                f"Expected a config that this version can read, found one in {path} that it cannot ({error!r}): "
                "the file was changed; save it again."
            ) from error
        method._fingerprint = config["network"]
        return method

    def _check_data(self, data: Any) -> None:  # noqa: B027 (most methods take anything)
        """Refuses, before the predictor is run over them, data that this method cannot be fitted on."""

    @abstractmethod
    def _fit(self, train: Outputs, val: Outputs | None, num_data: int, data: Any) -> None:
        """Fits; leaves everything as it was if it fails. `data` is what `train` was collected from."""

    @abstractmethod
    def _predictor(self, *, covariance: bool) -> Callable[[Outputs], Predictive]:
        """What turns some rows of outputs into predictions, with what it needs made ready once."""

    def _rows_at_once(self) -> int:
        """How many rows to predict at a time."""
        return CHUNK

    @abstractmethod
    def _tensors(self) -> dict[str, Tensor]: ...

    @abstractmethod
    def _options(self) -> dict[str, Any]: ...

    @classmethod
    @abstractmethod
    def _rebuild(
        cls,
        path: str | os.PathLike[str],
        tensors: dict[str, Tensor],
        config: dict[str, Any],
        *,
        model: nn.Module | Callable[..., Any] | None,
        device: str | torch.device | None,
        **extra: Any,
    ) -> Self: ...

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
        if isinstance(data, Outputs):
            outputs = data
        else:
            features, inputs = self._needs(fitted=False)
            outputs = collect(self._require_backbone(data), data, features=features, inputs=inputs)
        if not len(outputs):
            raise DataError("Expected at least one data point, got none.")
        return self._checked(outputs, targets=targets)

    def _checked(self, outputs: Outputs, *, targets: bool) -> Outputs:
        self._likelihood.check_outputs(outputs.outputs)
        if not targets:
            return outputs
        if outputs.targets is None:
            raise DataError("Expected targets to fit on: batches (x, y), mappings with labels, Outputs with targets.")
        fitting = self._likelihood.check_targets(outputs.targets, outputs.outputs)
        return Outputs(outputs.outputs, fitting, outputs.features, outputs.inputs)

    def _check_width(self, outputs: Outputs, width: tuple[int, ...]) -> None:
        found = tuple(outputs.outputs.shape[1:])
        if found != width:
            raise DataError(f"Expected outputs of shape {('N', *width)} as in fit, got {('N', *found)}.")

    def _stream(self, data: Any) -> Generator[Outputs]:
        if isinstance(data, Outputs):
            yield self._fitting(data)
            return
        if isinstance(data, list) and is_arrays(data):
            raise DataError(
                "Expected one batch or a loader, got a list of arrays, which could be (x, y) or several batches: give "
                "a tuple (x, y), the inputs alone, or a DataLoader."
            )
        features, inputs = self._needs(fitted=True)
        one_batch = isinstance(data, Mapping) or is_array(data) or is_arrays(data)
        with self._require_backbone(data).running(features=features, inputs=inputs) as run:
            for batch in [data] if one_batch else iterate(data, CHUNK):
                reading = run(batch)
                if len(reading.outputs):
                    yield self._fitting(join([reading._replace(target=None)]))

    def _fitting(self, outputs: Outputs) -> Outputs:
        assert self._width is not None
        self._check_width(outputs, self._width)
        return self._checked(outputs, targets=False)
