"""`Predictive`: the distribution of the observations at N points, which every method's `predict` returns."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, reduce
from importlib import import_module
from operator import attrgetter, index
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from posthoc.collect.outputs import Outputs, as_rows
from posthoc.display import html_table
from posthoc.errors import DataError, OptionError, WrongTaskError
from posthoc.numerics import rows_that_fit
from posthoc.predictive.latent import Latent, correlate
from posthoc.validation import choice, integer, number

SHOWN_COLUMNS = 6
"""The most columns that the HTML table of a notebook has for one quantity."""


def working_dtype(mean: Tensor) -> torch.dtype:
    """The dtype of all but the mean: that of the network's output, at least float32."""
    return torch.promote_types(mean.dtype, torch.float32)


@dataclass(frozen=True, eq=False, repr=False)
class Rows(ABC):
    """A frozen dataclass of tensors with one row for each point; indexing, moving and joining act on all of them.

    Tensors without dimensions, and fields of other types, belong to all points. The length is that of the first field.
    """

    hints: ClassVar[Mapping[str, str]] = {}
    """Where to find what other tasks have, by the name of the attribute."""
    elsewhere: ClassVar[str] = ""
    """Where to find attributes that this class does not have."""

    def __getitem__(self, rows: Any) -> Self:
        rows = as_rows(rows, len(self))
        return self._map(lambda part: part[rows] if has_rows(part) else part)

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def __iter__(self) -> Iterator[Self]:
        return (self[row] for row in range(len(self)))

    def to(self, device: str | torch.device) -> Self:
        """A copy on another device."""
        return self._map(lambda part: part.to(device) if hasattr(part, "to") else part)

    def cpu(self) -> Self:
        """A copy on the CPU."""
        return self.to("cpu")

    @abstractmethod
    def columns(self) -> dict[str, Tensor]:
        """The main quantities by name, with one row for each point; the first is the prediction itself."""

    def numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """The main quantities as NumPy arrays by name."""
        return {name: as_array(values) for name, values in self.columns().items()}

    def to_dict(self) -> dict[str, list[Any]]:
        """The main quantities as lists of plain numbers by name, ready for JSON."""
        return {name: values.tolist() for name, values in self.numpy().items()}

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Several batches, one after the other."""
        joined: dict[str, Any] = {}
        for name in (each.name for each in fields(parts[0])):
            values = [getattr(part, name) for part in parts]
            if has_rows(values[0]):
                joined[name] = torch.cat(values) if isinstance(values[0], Tensor) else values[0].cat(values)
        return replace(parts[0], **joined)

    def _map(self, change: Callable[[Any], Any]) -> Self:
        return replace(self, **{f.name: change(getattr(self, f.name)) for f in fields(self)})

    def __getattr__(self, name: str) -> Any:
        if name in self.hints:
            raise WrongTaskError(f"A {type(self).__name__} has no {name}: {self.hints[name]}.")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{self.elsewhere}.")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = as_array(next(iter(self.columns().values())))
        return array.astype(dtype, copy=bool(copy)) if dtype is not None or copy else array

    def __repr__(self) -> str:
        mean = getattr(self, "latent", self).mean
        dtype, outputs = str(mean.dtype).removeprefix("torch."), mean.shape[1:].numel()
        return f"{type(self).__name__}(points={len(self)}, {outputs=}, {dtype=!s}, device='{mean.device}')"

    def _repr_html_(self) -> str:
        shown: dict[str, list[Any]] = {}
        for name, values in self[:6].numpy().items():
            columns = values.reshape(len(values), -1).T[:SHOWN_COLUMNS].tolist()
            shown |= {name if len(columns) == 1 else f"{name}[{i}]": column for i, column in enumerate(columns)}
        return html_table(repr(self), shown)


def has_rows(part: Any) -> bool:
    """Whether a field has one row for each point."""
    return isinstance(part, Rows) or (isinstance(part, Tensor) and part.ndim > 0)


@dataclass(frozen=True, eq=False, repr=False)
class LatentGaussian(Rows):
    """The Gaussian over a network's outputs f at each of N points.

    Args:
        mean: The network's output, bit for bit, of shape (N,) or (N, C).
        variance: The variance of each output, of the shape of `mean`.
        full_covariance: The covariance across the outputs of each point, (N, C, C), if it was computed.
        independent: Whether the outputs are independent given the point, so that `variance` is all of the covariance.
        has_variance: False if the method gives the outputs no variance; `variance` is zero then.
        draws: Draws of the outputs, (N, S, ...), if the method has draws instead of a Gaussian.

    Example:
        >>> latent = LatentGaussian(torch.zeros(2, 3), torch.ones(2, 3))
        >>> latent.covariance.shape, latent.sample(5).shape
        (torch.Size([2, 3, 3]), torch.Size([5, 2, 3]))
    """

    mean: Tensor
    variance: Tensor
    full_covariance: Tensor | None = None
    independent: bool = True
    has_variance: bool = True
    draws: Tensor | None = None

    @classmethod
    def around(cls, outputs: Tensor, latent: Latent, scale: Tensor | None = None, *, covariance: bool = False) -> Self:
        """A latent Gaussian around network outputs, in the user's units.

        Args:
            outputs: The network's outputs, (N,) or (N, C).
            latent: The covariance around them, in units of `scale`.
            scale: The unit, which broadcasts against (N, C); default: 1.
            covariance: Whether to compute the covariance across outputs.
        """
        dtype, variance = working_dtype(outputs), latent.variance
        scale = torch.ones_like(variance) if scale is None else scale.expand(variance.shape)
        variance = (variance * scale.square()).to(dtype).reshape(outputs.shape)
        full = (latent.covariance() * scale[:, :, None] * scale[:, None, :]).to(dtype) if covariance else None
        return cls(outputs, variance, full, independent=latent.independent, has_variance=latent.has_variance)

    @classmethod
    def of_draws(cls, draws: Tensor, *, covariance: bool = False) -> Self:
        """The Gaussian with the mean and variance of draws; the draws are kept for `sample` and `mutual_information`.

        Args:
            draws: The outputs of S functions, (S, N, ...).
            covariance: Whether to compute the covariance across outputs.

        Example:
            >>> latent = LatentGaussian.of_draws(torch.tensor([[[1.0, 0.0]], [[3.0, 0.0]]]))
            >>> latent.mean, latent.variance
            (tensor([[2., 0.]]), tensor([[1., 0.]]))
        """
        dtype = working_dtype(draws)
        # One draw at a time: all of them in float64 would be many times their size.
        mean = reduce(torch.add, (f.double() for f in draws)) / len(draws)
        variance = reduce(torch.add, ((f.double() - mean).square() for f in draws)) / len(draws)
        deviations = ((f.double() - mean).reshape(len(mean), -1) for f in draws)
        products = (d[:, :, None] * d[:, None, :] for d in deviations)
        full = (reduce(torch.add, products) / len(draws)).to(dtype) if covariance else None
        by_row = draws.transpose(0, 1).to(dtype)
        return cls(mean.to(dtype), variance.to(dtype), full, independent=False, draws=by_row)

    @property
    def std(self) -> Tensor:
        """The standard deviation of each output, of the shape of `mean`."""
        return self.variance.sqrt()

    @property
    def covariance(self) -> Tensor:
        """The covariance across the outputs of each point, (N, C, C).

        Raises:
            OptionError: It was not computed; `predict(..., covariance=True)` computes it.
        """
        if self.full_covariance is not None:
            return self.full_covariance
        if self.independent or self.mean.shape[1:].numel() == 1:
            return torch.diag_embed(self.variance.reshape(len(self), -1))
        raise OptionError("The covariance across outputs was not computed: call predict(..., covariance=True).")

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Draws of the outputs, (n, N, ...). Draws of a method that has some are taken at random from those."""
        n = integer("n, the number of draws,", n, 1)
        if self.draws is not None:
            chosen = torch.randint(self.draws.shape[1], (n,), device=self.draws.device, generator=generator)
            return self.draws[:, chosen].transpose(0, 1)
        noise = standard_normal((n, *self.mean.shape), self.mean, generator)
        if self.independent:
            return self.mean + self.std * noise
        return self.mean + correlate(self.covariance, noise.reshape(n, len(self), -1)).reshape(noise.shape)

    def columns(self) -> dict[str, Tensor]:
        """Mean and standard deviation."""
        return {"mean": self.mean, "std": self.std}


@dataclass(frozen=True, eq=False)
class OODRows(Rows):
    """Rows of features or inputs, whose out-of-distribution scores are computed when they are first asked for.

    Args:
        values: The rows, (N, D).
        score_of: The scores (N,) of rows.
        pvalue_of: The p-values (N,) of scores.
    """

    values: Tensor
    score_of: Callable[[Tensor], Tensor]
    pvalue_of: Callable[[Tensor], Tensor]

    @cached_property
    def score(self) -> Tensor:
        """The scores, (N,)."""
        return self.score_of(self.values)

    def columns(self) -> dict[str, Tensor]:
        """Scores and p-values."""
        return {"ood_score": self.score, "ood_pvalue": self.pvalue_of(self.score)}


def require_finite_prediction(predictive: Predictive, rows: Outputs | None = None, first_row: int = 0) -> None:
    """Raises `DataError` for a prediction with NaN or infinity; if the rows it is for have such values, of those, with
    the number of the row counted from `first_row`."""
    fields = [*vars(predictive).values(), *vars(predictive.latent).values()]
    tensors = [part for part in fields if isinstance(part, Tensor)]
    if math.isfinite(reduce(torch.add, map(torch.sum, tensors))):  # a sum that overflows is looked at again
        return
    if not torch.stack([part.isfinite().all() for part in tensors]).all():
        if rows is not None:
            rows.require_finite(first_row)
        raise DataError("Expected finite predictions, got NaN or infinity: the inputs are too large. Scale them.")


@dataclass(frozen=True, eq=False, repr=False)
class Predictive(Rows):
    """The distribution of a new observation at each of N points. A row is a point; `pred[rows]` selects some of them.

    Args:
        latent: The Gaussian over the network's outputs behind it.
        ood: What the out-of-distribution scores follow from, if the method has any.
    """

    latent: LatentGaussian
    ood: OODRows | None = field(default=None, kw_only=True)

    task: ClassVar[str]
    """The task of the likelihood that makes such predictions."""
    uncertainty_scores: ClassVar[Mapping[str, UncertaintyScore]]
    """The uncertainty scores by name, the default first."""

    @abstractmethod
    def log_prob(self, y: Any) -> Tensor:
        """The log-probability (or density, in the user's units) of observations, (N,)."""

    @abstractmethod
    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Draws of new observations, (n, N, ...)."""

    @property
    def ood_score(self) -> Tensor:
        """How unlike the rows of the fit each point is, (N,); larger is stranger. Computed when first asked for.

        Raises:
            DataError: The fit or these points had neither features nor inputs, or the method has no such score.
        """
        return self._ood_rows().score

    @property
    def ood_pvalue(self) -> Tensor:
        """The probability that a point like those of the fit has an `ood_score` at least this large, (N,) in float64.

        It comes from m rows of the fit, a fifth of them, that are held out for this purpose, and is at least
        1 / (m + 1). No p-value is below 0.01 with fewer than 99 of them.
        """
        return self._ood_rows().columns()["ood_pvalue"]

    def _ood_rows(self) -> OODRows:
        if self.ood is None:
            advice = 'give them to fit and to predict, for example Outputs(outputs, targets, features), and ood="knn"'
            raise DataError(f"Expected features or inputs for the OOD score of an FMGP, got none: {advice} to FMGP.")
        return self.ood

    def uncertainty(self, by: By = None) -> Tensor:
        """How uncertain each prediction is, (N,) in float64; larger is more uncertain.

        Args:
            by: The score. Classification: "entropy" (the default), "least_confidence" (one minus the largest
                probability), "mutual_information", or "variance" (of the logits, averaged over classes). Regression:
                "std" (the default) or "variance", averaged over outputs. Both: "ood" (`ood_score`). Or a function of
                the predictions.

        Raises:
            OptionError: The score is unknown, or the method gives the logits no variance.
            WrongTaskError: The score is for another task.
        """
        if callable(by):
            return by(self).double()
        scores: dict[str, UncertaintyScore] = {**self.uncertainty_scores, "ood": attrgetter("ood_score")}
        name = next(iter(scores)) if by is None else by
        if name in self.hints and name not in scores:
            raise WrongTaskError(f"A {type(self).__name__} has no {name}: {self.hints[name]}.")
        choice("the uncertainty", name, tuple(scores))
        return scores[name](self).double()

    def defer(self, budget: float | None = None, *, threshold: float | None = None, by: By = None) -> Tensor:
        """The rows to hand to an expert, (N,) of bool: the most uncertain ones.

        Args:
            budget: A share of the rows, such as 0.1 (rounded down), or, as an integer, a number of rows. Of equally
                uncertain rows the first are taken.
            threshold: Instead of a budget: take the rows that are more uncertain than this.
            by: The uncertainty score, see `uncertainty`.
        """
        if budget is not None and threshold is None:
            rows, score = rows_in_budget(budget, len(self)), self.uncertainty(by)
            chosen = score.argsort(stable=True, descending=True)[:rows]
            return torch.zeros_like(score, dtype=torch.bool).index_fill(0, chosen, True)
        if threshold is None or budget is not None or math.isnan(number(threshold)):
            raise OptionError(f"Expected either a budget or a threshold, got {budget!r} and {threshold!r}.")
        return ~(self.uncertainty(by) <= threshold)  # NaN is deferred

    def plot(self, targets: Any = None, ax: Any = None) -> Any:
        """The standard figure of the task, on matplotlib (extra `plots`).

        Args:
            targets: The observations; without them the figure shows the predictions alone.
            ax: The matplotlib `Axes` to draw on; default: new ones.

        Returns:
            The `Axes`.
        """
        return import_module("posthoc.evaluate.plots").plot(self, targets, ax)


UncertaintyScore = Callable[[Any], Tensor]
By = str | UncertaintyScore | None
"""An uncertainty score by its name, a function of the predictions, or None for the default."""


def apply_by_rows(function: Callable[[Any], Tensor], pred: Predictive, copies: int = 1) -> Tensor:
    """function(pred), some rows at a time: float64 temporaries, `copies` for each output, stay small."""
    size = rows_that_fit(copies * pred.latent.mean.shape[1:].numel())
    if len(pred) <= size:
        return function(pred)
    return torch.cat([function(pred[start : start + size]) for start in range(0, len(pred), size)])


def row_means(values: Tensor) -> Tensor:
    """The average over each point's outputs, (N,) in float64."""
    return values.double() if values.ndim == 1 else values.double().flatten(1).mean(-1)


def rows_in_budget(budget: Any, rows: int) -> int:
    """The number of rows that a share of them, or a number of them, is."""
    try:
        allowed = index(budget)
    except TypeError:
        # 0.29 * 100 is a little less than 29 in floating point.
        allowed = math.floor(number(budget) * rows + 1e-9) if 0.0 <= number(budget) <= 1.0 else -1
    if allowed < 0:
        raise OptionError(f"Expected a share of the rows from 0.0 to 1.0, or a number of rows, got {budget!r}.")
    return allowed


def standard_normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal draws in the working dtype of a tensor and on its device."""
    return torch.randn(shape, dtype=working_dtype(like), device=like.device, generator=generator)


def as_array(values: Tensor) -> np.ndarray[Any, Any]:
    """A tensor as a NumPy array; half precision becomes float32."""
    values = values.detach().cpu()
    return (values.to(working_dtype(values)) if values.is_floating_point() else values).numpy()
