"""What the methods share that are made of the neural tangent kernel, of the last layer's weights or of all weights."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator
from typing import Any, Literal, Self, SupportsFloat

import torch
from torch import Tensor

from posthoc.base import OldMethod
from posthoc.collect import opened
from posthoc.collect.loaders import Batch, iterate
from posthoc.collect.network import Backbone, evaluating, exclusive
from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError, LayerError, OptionError
from posthoc.likelihoods.base import Likelihood
from posthoc.methods.ntk.ntk import Jacobian, Pair, draw_pairs
from posthoc.training import Checkpoint
from posthoc.validation import choice

__all__ = ["NTKMethod", "TangentBackbone", "Weights", "check_classes", "positive"]

Weights = Literal["last", "all"]


class TangentBackbone(Backbone):
    """A network whose features are made of its Jacobians, so that all that reads features can read them."""

    def __init__(self, plain: Backbone, describe: Callable[[Batch], Tensor]) -> None:
        super().__init__(plain.model, plain.layer if not plain.takes_input else None, plain._device)
        self.describe = describe

    @property
    def has_features(self) -> bool:
        return True

    def listen(self, heard: Callable[[Any], None]) -> None:
        """No layer has these features."""

    def features_of(self, raw: Any, captured: Tensor | None, rows: int) -> Tensor:
        return self.describe(self.place(raw))


class NTKMethod(OldMethod):
    """A method on the tangent kernel. With `weights="last"` it reads the features in front of the last layer, and needs
    no network. With "all" it needs one, and `_describer` says what is made of its Jacobians."""

    needs_classes = True
    weights: Weights
    max_gigabytes: float

    def _take_weights(self, weights: Weights, max_gigabytes: float) -> None:
        choice("weights", weights, ("last", "all"))
        self.weights, self.max_gigabytes = weights, positive("max_gigabytes", max_gigabytes)
        if self.outputs_are != "logits":
            raise OptionError(f"{self.name} needs the logits that the last layer gives, got {self.outputs_are}.")
        if weights == "last":
            return
        if self.backbone is None or self.backbone.module is None:
            raise OptionError(
                f'{self.name} with weights="all" needs the network itself, an nn.Module, to differentiate. '
                'With weights="last" it needs outputs and features alone.'
            )
        self._jacobian()

    def _jacobian(self) -> Jacobian:
        assert self.backbone is not None
        assert self.backbone.module is not None
        return Jacobian(self.backbone.module, self._likelihood.task)

    @abstractmethod
    def _describer(self, pairs: list[Pair], points: int, outputs: int) -> Callable[[Batch], Tensor]:
        """What takes the place of the features of a batch, from gradients at some points; the network is in eval
        mode."""

    @abstractmethod
    def _draws(self) -> tuple[int, int]:
        """How many pairs of a point and an output `_describer` looks at, and the seed by which they are drawn."""

    def _afford(self, size: float, what: str, remedy: str) -> None:
        """Refuses what takes more bytes than the user allowed."""
        if size > self.max_gigabytes * 1e9:
            raise OptionError(
                f"{what} take {size / 1e9:.3g} GB, and max_gigabytes={self.max_gigabytes:g}. {remedy}, allow more, or "
                'use weights="last".'
            )

    def _check_data(self, data: Any) -> None:
        super()._check_data(data)
        if self.weights == "last":
            return
        self._refuse_outputs(data)
        if isinstance(data, Iterator):
            raise DataError(
                f'{self.name} with weights="all" reads the data more than once: give a DataLoader or arrays, no '
                "iterator."
            )

    def _refuse_outputs(self, data: Any) -> None:
        if isinstance(data, Outputs):
            raise DataError(
                f'{self.name} with weights="all" runs the network: give what it takes (a DataLoader, arrays), not '
                'outputs. With weights="last" outputs and features are enough.'
            )

    def _fit_checked(self, data: Any, val: Any, num_data: int | None, checkpoint: Checkpoint | None) -> Self:
        if self.weights == "last":
            return super()._fit_checked(data, val, num_data, checkpoint)
        self._refuse_outputs(val)
        plain = self.backbone
        assert plain is not None
        most, seed = self._draws()
        generator = torch.Generator().manual_seed(seed)
        with evaluating(plain.module), exclusive(plain.module):
            batches = (plain.place(raw) for raw in iterate(data, 256))
            drawn = draw_pairs(self._jacobian(), batches, most, generator)
            describe = self._describer(*drawn)
        try:
            self.backbone = TangentBackbone(plain, describe)
            return super()._fit_checked(data, val, num_data, checkpoint)
        except BaseException:
            self.backbone = plain
            raise

    def _stream(self, data: Any, *, targets: bool = False) -> Generator[Outputs]:
        data = opened(data)
        if self.weights == "all":
            self._refuse_outputs(data)
        yield from super()._stream(data, targets=targets)

    def _require_features(self) -> None:
        if self.backbone is not None and not self.backbone.has_features:
            raise LayerError(
                f"{self.name} looks at the input of the last linear layer, and found no nn.Linear in this model. Give "
                'Outputs with those features, or an nn.Module and weights="all".'
            )


def positive(name: str, value: Any) -> float:
    """An option that is a number above zero."""
    if isinstance(value, bool) or not isinstance(value, SupportsFloat) or not 0.0 < float(value) < math.inf:
        raise OptionError(f"Expected {name} to be a number above 0, got {value!r}.")
    return float(value)


def check_classes(likelihood: Likelihood, train: Outputs) -> None:
    """Refuses data of a single class, which say nothing about what separates classes."""
    assert train.targets is not None
    if likelihood.task == "classification" and bool((train.targets == train.targets[0]).all()):
        raise DataError(f"Expected targets of at least two classes, got class {int(train.targets[0])} alone.")
