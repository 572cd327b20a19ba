"""Conformal prediction: intervals and sets of classes with guaranteed coverage, around any fitted method.

A score measures how badly a value fits a prediction. Among n + 1 exchangeable points the score of the last one is
equally likely to have any rank, so it is at most the ⌈(n + 1) level⌉-th smallest of the first n with probability
`level` or more, however wrong the method is. The interval, or the set, contains all values with a score up to that.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from posthoc.errors import DataError, FileError, OptionError, WrongTaskError, warn
from posthoc.io import read_tensors, write_tensors
from posthoc.predictive.base import LatentGaussian, Predictive, Rows, apply_by_rows, working_dtype
from posthoc.predictive.classification import ClassificationPredictive
from posthoc.predictive.regression import RegressionPredictive
from posthoc.validation import choice, class_labels, integer, number, regression_targets

FORMAT = "posthoc-conformal"


@dataclass(frozen=True)
class Residual:
    """|y - mean| / std: the intervals are proportional to the standard deviation.

    Args:
        joint: Whether all outputs of a point share one guarantee; otherwise each output has its own.
    """

    task = "regression"
    joint: bool = False

    def of(self, pred: RegressionPredictive, y: Any) -> Tensor:
        """The scores of the true values in float64, (N,), or (N, outputs) if each output has its own."""
        score = (regression_targets(y, pred.mean).double() - pred.mean.double()).abs() / positive_std(pred)
        return score.flatten(1).amax(1) if self.joint and score.ndim > 1 else score


class ClassScore(ABC):
    """A score of every class. Unless `allow_empty`, the predicted class has the lowest one, in calibration too: then
    it is in every set, at no cost in coverage."""

    task = "classification"
    allow_empty: bool

    @abstractmethod
    def _of_classes(self, pred: ClassificationPredictive) -> Tensor: ...

    def of(self, pred: ClassificationPredictive, y: Any) -> Tensor:
        """The scores of the true classes in float64, (N,)."""
        return self.of_classes(pred).gather(-1, class_labels(y, pred.latent.mean)[:, None]).squeeze(-1)

    def of_classes(self, pred: ClassificationPredictive) -> Tensor:
        """The scores of all classes in float64, (N, C)."""
        scores = self._of_classes(pred)
        return scores if self.allow_empty else scores.scatter(-1, pred.labels[:, None], -math.inf)


@dataclass(frozen=True)
class LAC(ClassScore):
    """1 - p: one threshold of the probability for all points (Sadinle et al., 2019). If the probabilities are right,
    its sets are the smallest on average.

    Args:
        allow_empty: Whether a set may be empty.
    """

    allow_empty: bool = False

    def _of_classes(self, pred: ClassificationPredictive) -> Tensor:
        return -pred.log_probs.double()  # the order of 1 - p, which would round to 1 or to 0


@dataclass(frozen=True)
class APS(ClassScore):
    """The total probability of all more probable classes (Romano et al., 2020). Sets are larger than those of LAC, and
    coverage differs less between easy and hard points.

    Args:
        seed: Adds a random share of the class's own probability; with `allow_empty` this is the textbook's form.
        penalty: Is added for every class after the first `free` (RAPS, Angelopoulos et al., 2021), against large sets
            of improbable classes.
        free: The number of classes without a penalty.
        allow_empty: Whether a set may be empty.
    """

    seed: int | None = None
    penalty: float = 0.0
    free: int = 5
    allow_empty: bool = False

    def __post_init__(self) -> None:
        integer("seed", 0 if self.seed is None else self.seed, 0)
        integer("free", self.free, 0)
        if not 0.0 <= self.penalty < math.inf:
            raise OptionError(f"Expected a penalty of at least 0, got {self.penalty}.")

    def _of_classes(self, pred: ClassificationPredictive) -> Tensor:
        log_probs = pred.log_probs.double()
        # The predicted class comes first, even if another has the same probability.
        order = log_probs.scatter(-1, pred.labels[:, None], math.inf).argsort(stable=True, dim=-1, descending=True)
        probs = log_probs.gather(-1, order).exp()
        scores = torch.nn.functional.pad(probs.cumsum(-1)[:, :-1], (1, 0))
        if self.seed is not None:
            scores += uniform(pred.latent.mean, self.seed)[:, None] * probs
        rank = torch.arange(1, scores.shape[1] + 1, device=scores.device)
        scores += self.penalty * (rank - self.free).clamp_min(0)
        return torch.empty_like(scores).scatter(-1, order, scores)


Score = Residual | ClassScore
"""How badly a value fits a prediction. Every function has the guarantee; a good one gives small answers."""
SCORES: dict[str, dict[str, Score]] = {
    "regression": {"per_output": Residual(), "joint": Residual(joint=True)},
    "classification": {"lac": LAC(), "aps": APS(), "raps": APS(penalty=0.01)},
}
"""The scores of each task by name, the default first."""
TYPES = {kind.__name__: kind for kind in (Residual, LAC, APS)}


@dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """A score, and its values for n points that neither the network nor the method was fitted on.

    Args:
        score: The score.
        scores: Its values in ascending order, (n,) or (n, outputs) in float64.
    """

    score: Any
    scores: Tensor

    def threshold(self, level: float) -> Tensor:
        """The largest score of an answer with this level, () or (outputs,); infinite if n is too small for it."""
        if not 0.0 < number(level) < 1.0:
            raise OptionError(f"Expected a level strictly between 0 and 1, got {level!r} (0.95 means 95 %).")
        n = len(self.scores)
        rank = math.ceil((n + 1) * level - 1e-9)  # 0.07 * 100 is a little more than 7 in floating point
        if rank <= n:
            return self.scores[rank - 1]
        needed = math.ceil(level / (1.0 - level) - 1e-9)
        reason = f"{n} calibration points cannot promise a coverage of {level}, which takes at least {needed} points"
        warn(f"{reason}: the answer holds everything.")
        return torch.full_like(self.scores[0], math.inf)


class Conformal:
    """A fitted method with guaranteed coverage, made by `method.conformal(calibration)`.

    Of all points exchangeable with the calibration data, a share of at least `level` lies in the answers of that level,
    on average over points and calibration sets. After another fit of the method, calibrate again.

    Args:
        method: The fitted method.
        calibration: The scores of the calibration data.

    Example:
        >>> from posthoc import MAP, Outputs
        >>> data = Outputs(4.0 * torch.eye(3).repeat(10, 1), torch.arange(3).repeat(10))
        >>> conformal = MAP(None, "classification").fit(data).conformal(data)
        >>> conformal.predict(data[:2]).sets(0.9)
        tensor([[ True, False, False],
                [False,  True, False]])
    """

    def __init__(self, method: Any, calibration: Calibration) -> None:
        self.method, self.calibration = method, calibration

    @classmethod
    def calibrate(cls, method: Any, parts: Iterable[tuple[Any, Tensor]], score: str | Score | None, task: str) -> Self:
        """Calibrates on batches of predictions and targets; only the scores are kept.

        Args:
            method: The fitted method.
            parts: The batches.
            score: The name of a score, a score, or None for the default of the task.
            task: The task of the method.
        """
        if task not in SCORES:
            raise WrongTaskError(f"Conformal prediction is for {' and '.join(SCORES)}, not for {task}.")
        if not isinstance(score, Score):
            score = next(iter(SCORES[task])) if score is None else score
            choice("score", score, tuple(SCORES[task]))
            score = SCORES[task][score]
        elif score.task != task:
            raise WrongTaskError(f"{type(score).__name__} is for {score.task}; this is a {task}.")
        scores = [score.of(pred, y) for pred, y in parts]
        if not scores:
            raise DataError("Expected at least one calibration point, got none.")
        return cls(method, Calibration(score, torch.cat(scores).cpu().sort(0).values))

    def predict(self, data: Any) -> ConformalPredictive:
        """The predictions for data, as the method's `predict` takes them."""
        return self._around(self.method.predict(data))

    def stream(self, data: Any) -> Generator[ConformalPredictive]:
        """The predictions batch by batch, as the method's `stream`."""
        with closing(self.method.stream(data)) as parts:
            yield from map(self._around, parts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the calibration as safetensors, without the head."""
        score = self.calibration.score
        config = {"score": {"type": type(score).__name__, **asdict(score)}, "head": self.method.digest()}
        write_tensors(path, {"scores": self.calibration.scores}, FORMAT, config)

    @classmethod
    def load(cls, path: str | os.PathLike[str], method: Any) -> Self:
        """A saved calibration of this method; raises `FileError` for that of another head."""
        tensors, config = read_tensors(path, FORMAT)
        if config["head"] != method.digest():
            raise FileError(f"Expected the calibration of this head, found that of another in {path}: calibrate again.")
        spec = config["score"]
        return cls(method, Calibration(TYPES[spec.pop("type")](**spec), tensors["scores"]))

    def _around(self, pred: Predictive) -> ConformalPredictive:
        kind = ConformalIntervals if isinstance(pred, RegressionPredictive) else ConformalSets
        return kind(pred, self.calibration)

    def __repr__(self) -> str:
        return f"Conformal({self.method!r}, {self.calibration.score!r}, points={len(self.calibration.scores)})"


@dataclass(frozen=True, eq=False, repr=False)
class ConformalPredictive(Rows):
    """Predictions for N points with guaranteed coverage; `pred[rows]` selects some of them.

    Args:
        base: The predictions of the method itself.
        calibration: The scores of the calibration data.
    """

    base: Any
    calibration: Calibration

    elsewhere: ClassVar[str] = "; the method's own answers are in base"

    @property
    def latent(self) -> LatentGaussian:
        """The Gaussian over the network's outputs."""
        return self.base.latent


class ConformalIntervals(ConformalPredictive):
    """Intervals for new observations."""

    hints: ClassVar[Mapping[str, str]] = dict.fromkeys(("sets", "size"), "that is for classification")

    @property
    def mean(self) -> Tensor:
        """The network's output, (N,) or (N, C)."""
        return self.base.mean

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The interval that contains a new observation with probability `level` or more.

        Returns:
            The lower and upper ends, of the shape of the mean. With a joint score all outputs of a point lie within
            their intervals at once with that probability.
        """
        mean, dtype = self.mean.double(), working_dtype(self.mean)
        half = self.calibration.threshold(level).to(mean.device) * positive_std(self.base)
        half = half * (1.0 + 8.0 * torch.finfo(torch.float64).eps)  # an observation on the edge stays inside
        return rounded_outward(mean - half, dtype, -math.inf), rounded_outward(mean + half, dtype, math.inf)

    def columns(self) -> dict[str, Tensor]:
        """Mean, and the ends of the 95 % intervals."""
        lower, upper = self.interval()
        return {"mean": self.mean, "lower": lower, "upper": upper}

    def width(self, level: float = 0.95) -> Tensor:
        """The widths of the intervals, of the shape of the mean."""
        lower, upper = self.interval(level)
        return upper - lower

    def covers(self, y: Any, level: float = 0.95) -> Tensor:
        """Whether observations lie in their intervals, of the shape of the mean; (N,) with a joint score."""
        y = regression_targets(y, self.mean).double()
        lower, upper = self.interval(level)
        inside = (lower <= y) & (y <= upper)
        return inside.flatten(1).all(1) if self.calibration.score.joint and inside.ndim > 1 else inside


class ConformalSets(ConformalPredictive):
    """Sets of classes."""

    hints: ClassVar[Mapping[str, str]] = dict.fromkeys(("interval", "width"), "that is for regression")

    def sets(self, level: float = 0.95) -> Tensor:
        """The classes that contain the true one with probability `level` or more, (N, C) of bool. The predicted class
        is always one of them, unless the score allows empty sets."""
        threshold = self.calibration.threshold(level).to(self.latent.mean.device)
        return apply_by_rows(lambda part: self.calibration.score.of_classes(part) <= threshold, self.base)

    def columns(self) -> dict[str, Tensor]:
        """The 95 % sets and their sizes."""
        sets = self.sets()
        return {"sets": sets, "size": sets.sum(-1)}

    def size(self, level: float = 0.95) -> Tensor:
        """The number of classes in each set, (N,)."""
        return self.sets(level).sum(-1)

    def covers(self, y: Any, level: float = 0.95) -> Tensor:
        """Whether the sets contain the true classes, (N,)."""
        labels = class_labels(y, self.latent.mean)
        return self.sets(level).gather(-1, labels[:, None]).squeeze(-1)


def positive_std(pred: RegressionPredictive) -> Tensor:
    """The standard deviation in float64, above zero, so that the score of a residual of zero is finite."""
    return pred.std.double().clamp_min(torch.finfo(torch.float64).tiny)


def rounded_outward(bound: Tensor, dtype: torch.dtype, outward: float) -> Tensor:
    """A bound in another dtype, never rounded to the inside of its interval."""
    near = bound.to(dtype)
    inside = near > bound if outward < 0 else near < bound
    return torch.where(inside, torch.nextafter(near, torch.full_like(near, outward)), near)


def uniform(rows: Tensor, seed: int) -> Tensor:
    """A number in [0, 1) for each row, (N,), which follows from its bits and the seed: a point has the same one in any
    batch. A generator would give the first row of every call the same number."""
    bits = rows.double().contiguous().view(torch.int64)
    generator = torch.Generator().manual_seed(seed)
    odd = torch.randint(-(2**62), 2**62, (rows.shape[1] + 1,), generator=generator).to(rows.device) * 2 + 1
    mixed = (bits * odd[:-1]).sum(-1)  # modulo 2⁶⁴; the upper bits are the good ones
    for _ in range(2):
        mixed = (mixed ^ (mixed >> 32)) * odd[-1]
    return ((mixed >> 11) & (2**53 - 1)).double() / 2**53
