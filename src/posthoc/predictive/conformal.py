"""Conformal prediction: intervals and sets of classes that hold what they promise, around any fitted method.

A score says how badly a value fits a prediction. Among n + 1 exchangeable points the last one's score is as likely to
have any rank as any other, so it is at most the ⌈(n + 1) level⌉-th smallest of the first n with probability `level` or
more, however wrong the method is. All values whose score is at most that are the interval, or the set.
"""

from __future__ import annotations

import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, ClassVar, Protocol, Self, cast

import torch
from torch import Tensor

from posthoc.errors import DataError, FileError, OptionError, PosthocWarning, WrongTaskError
from posthoc.io import changed, check_tensors, read_tensors, write_tensors
from posthoc.predictive.base import LatentGaussian, Predictive, apply_by_rows, working_dtype
from posthoc.predictive.classification import ClassificationPredictive
from posthoc.predictive.regression import RegressionPredictive
from posthoc.validation import choice, class_labels, integer, regression_targets

__all__ = [
    "APS",
    "LAC",
    "Calibration",
    "Conformal",
    "ConformalIntervals",
    "ConformalPredictive",
    "ConformalSets",
    "Residual",
    "Score",
]

FORMAT = "posthoc-conformal"


class Score(ABC):
    """How badly a value fits a prediction: any function serves the guarantee, a good one makes small answers."""

    name: ClassVar[str]
    task: ClassVar[str]

    @abstractmethod
    def of(self, pred: Predictive, y: Any) -> Tensor:  # (N,), or (N, outputs) where each output has a score of its own
        """The scores of what was true, in float64."""


@dataclass(frozen=True)
class Residual(Score):
    """|y - mean| / std: intervals are as much wider as the method is less sure. Each output has a guarantee of its own,
    or, if `joint`, the box of all of them has one."""

    name: ClassVar[str] = "residual"
    task: ClassVar[str] = "regression"
    joint: bool = False

    def of(self, pred: Predictive, y: Any) -> Tensor:
        score = (regression_targets(y, pred.latent.mean).double() - pred.latent.mean.double()).abs() / spread(
            cast(RegressionPredictive, pred)
        )
        return score.flatten(1).amax(1) if self.joint and score.ndim > 1 else score


class ClassScore(Score):
    """A score that every class has. Unless `allow_empty`, the predicted class has the least of all, when calibrating
    as well as when predicting: so it is in every set, and no coverage is given away for that."""

    task: ClassVar[str] = "classification"
    allow_empty: bool

    @abstractmethod
    def _of_classes(self, pred: ClassificationPredictive) -> Tensor: ...

    def of_classes(self, pred: ClassificationPredictive) -> Tensor:  # (N, C)
        """The scores of all classes, in float64."""
        scores = self._of_classes(pred)
        return scores if self.allow_empty else scores.scatter(-1, predicted(pred), -math.inf)

    def of(self, pred: Predictive, y: Any) -> Tensor:
        labels = class_labels(y, pred.latent.mean)
        return self.of_classes(cast(ClassificationPredictive, pred)).gather(-1, labels[:, None]).squeeze(-1)


@dataclass(frozen=True)
class LAC(ClassScore):
    """1 - p: the classes that are probable enough, the same for all points. Of all sets with this coverage the smallest
    on average, if the probabilities are right (Sadinle et al., 2019)."""

    name: ClassVar[str] = "lac"
    allow_empty: bool = False

    def _of_classes(self, pred: ClassificationPredictive) -> Tensor:
        return -pred.log_probs.double()  # its order is that of 1 - p, which would round to 1 or to 0


@dataclass(frozen=True)
class APS(ClassScore):
    """The probability of all classes that come before this one (Romano et al., 2020): larger sets than LAC's, and a
    coverage that differs less between easy points and hard ones.

    With a `seed`, a random share of the class's own probability is added; with `allow_empty` this is the textbook's
    form. `penalty` is added for every class after the first `free` (RAPS, Angelopoulos et al., 2021): many classes of
    hardly any probability make large sets.
    """

    name: ClassVar[str] = "aps"
    seed: int | None = None
    penalty: float = 0.0
    free: int = 5
    allow_empty: bool = False

    def __post_init__(self) -> None:
        if self.seed is not None:
            integer("seed", self.seed, 0)
        integer("free", self.free, 0)
        if not 0.0 <= self.penalty < math.inf:
            raise OptionError(f"Expected a penalty of at least 0, got {self.penalty}.")

    def _of_classes(self, pred: ClassificationPredictive) -> Tensor:
        log_probs = pred.log_probs.double()
        # Two classes may have one probability: the predicted class comes first all the same.
        order = log_probs.scatter(-1, predicted(pred), math.inf).argsort(stable=True, dim=-1, descending=True)
        probs = log_probs.gather(-1, order).exp()
        scores = torch.nn.functional.pad(probs.cumsum(-1)[:, :-1], (1, 0))
        if self.seed is not None:
            scores += uniform(pred.latent.mean, self.seed)[:, None] * probs
        if self.penalty:
            rank = torch.arange(1, scores.shape[1] + 1, device=scores.device)
            scores += self.penalty * (rank - self.free).clamp_min(0)
        return torch.empty_like(scores).scatter(-1, order, scores)


SCORES: dict[str, dict[str, Score]] = {
    "regression": {"per_output": Residual(), "joint": Residual(joint=True)},
    "classification": {"lac": LAC(), "aps": APS(), "raps": APS(penalty=0.01)},
}
"""The scores of a task by name, the default first."""
TYPES: dict[str, type[Score]] = {kind.name: kind for kind in (Residual, LAC, APS)}


@dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """A score, and those of n points that nobody was fitted on."""

    score: Score
    scores: Tensor  # (n,) or (n, outputs), ascending, float64

    def __repr__(self) -> str:
        return f"Calibration({self.score!r}, points={len(self.scores)})"

    def threshold(self, level: float) -> Tensor:  # () or (outputs,)
        """The score up to which values belong; infinite if there are too few points to promise so much."""
        if not 0.0 < level < 1.0:
            raise OptionError(f"Expected a level strictly between 0 and 1, got {level} (0.95 means 95 %).")
        n, exact = len(self.scores), Fraction(repr(float(level)))  # as it was written: 0.07 × 100 is more than 7
        rank = math.ceil((n + 1) * exact)
        if rank <= n:
            return self.scores[rank - 1]
        warnings.warn(
            f"{n} calibration points cannot promise a coverage of {level}: the answer holds everything. It takes at "
            f"least {math.ceil(exact / (1 - exact))} points.",
            PosthocWarning,
            stacklevel=3,
        )
        return torch.full_like(self.scores[0], math.inf)


class Predicts(Protocol):
    """What this room needs of a method."""

    def predict(self, data: Any) -> Predictive:
        """The predictions of all data."""

    def stream(self, data: Any) -> Generator[Predictive]:
        """The same, some rows at a time."""

    def digest(self) -> str:
        """What tells it from any other."""


class Conformal:
    """A fitted method with guaranteed coverage: of all points exchangeable with the calibration data, at least a share
    `level` lies in the answers of that level, on average over points and calibration sets. The level is chosen when
    asking. Whoever fits the method again has to calibrate again."""

    def __init__(self, method: Predicts, calibration: Calibration) -> None:
        self.method, self.calibration = method, calibration

    @classmethod
    def calibrate(
        cls, method: Predicts, parts: Iterable[tuple[Predictive, Tensor]], score: str | Score | None, task: str
    ) -> Self:
        """From predictions with what was true, some rows at a time. One number a point is kept (or one an output)."""
        rule = score_named(score, task)
        found = [rule.of(pred, y) for pred, y in parts]
        if not found:
            raise DataError("Expected at least one calibration point, got none.")
        return cls(method, Calibration(rule, torch.cat(found).cpu().sort(0).values))

    def predict(self, data: Any) -> ConformalPredictive:
        """As the method's `predict`."""
        return self._around(self.method.predict(data))

    def stream(self, data: Any) -> Generator[ConformalPredictive]:
        """As the method's `stream`."""
        with closing(self.method.stream(data)) as parts:
            for pred in parts:
                yield self._around(pred)

    def __repr__(self) -> str:
        return f"Conformal({self.method!r}, {self.calibration!r})"

    def _around(self, pred: Predictive) -> ConformalPredictive:
        kind = ConformalIntervals if self.calibration.score.task == "regression" else ConformalSets
        return kind(pred, self.calibration)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the calibration as safetensors; the head is saved apart."""
        score, scores = self.calibration.score, self.calibration.scores
        spec = {"type": score.name, **asdict(cast(Any, score))}
        config = {"score": spec, "shape": list(scores.shape), "head": self.method.digest()}
        write_tensors(path, {"scores": scores}, FORMAT, config)

    @classmethod
    def load(cls, path: str | os.PathLike[str], method: Predicts) -> Self:
        """A saved calibration of this method; that of another head is refused."""
        tensors, config = read_tensors(path, FORMAT)
        try:
            spec = dict(config["score"])
            score = TYPES[spec.pop("type")](**spec)
            shape, head = tuple(config["shape"]), config["head"]
        except (KeyError, TypeError, ValueError) as error:
            raise changed(path, repr(error)) from error
        check_tensors(path, tensors, {"scores": shape})
        if head != method.digest():
            raise FileError(
                f"Expected the calibration of this head, found that of another in {path}: its guarantee would be "
                "void. Load the head it was calibrated with, or calibrate again."
            )
        return cls(method, Calibration(score, tensors["scores"]))


ONLY_FOR = {"regression": ("interval", "width"), "classification": ("sets", "size")}


@dataclass(frozen=True, eq=False, repr=False)
class ConformalPredictive(ABC):
    """Predictions for N points, with guaranteed coverage; a row is a point, and `pred[rows]` selects some of them."""

    base: Predictive
    """What the method itself says."""
    calibration: Calibration

    @property
    def latent(self) -> LatentGaussian:
        """The Gaussian over the network's outputs."""
        return self.base.latent

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base!r}, {self.calibration!r})"

    @abstractmethod
    def covers(self, y: Any, level: float = 0.95) -> Tensor:
        """Whether what was observed lies in the answer of this level."""

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, rows: Any) -> Self:
        return type(self)(self.base[rows], self.calibration)

    def __iter__(self) -> Iterator[Self]:
        return (self[row] for row in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        for task, names in ONLY_FOR.items():
            if name in names:
                raise WrongTaskError(f"{name} is for {task}; this is a {type(self).__name__}.")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; the method's own answers are in base.")


class ConformalIntervals(ConformalPredictive):
    """Intervals for a new observation, of shape `mean`."""

    base: RegressionPredictive

    @property
    def mean(self) -> Tensor:
        """The network's output."""
        return self.base.mean

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The interval that holds a new observation with probability `level` or more: (lower, upper). If scores are
        joint, all outputs of a point lie within theirs at once with that probability."""
        mean, dtype = self.base.mean.double(), working_dtype(self.base.mean)
        half = self.calibration.threshold(level).to(mean.device) * spread(self.base)
        half = half * (1.0 + 8.0 * torch.finfo(torch.float64).eps)  # an observation on the edge stays inside
        return rounded(mean - half, dtype, -math.inf), rounded(mean + half, dtype, math.inf)

    def width(self, level: float = 0.95) -> Tensor:
        """Upper minus lower."""
        lower, upper = self.interval(level)
        return upper - lower

    def covers(self, y: Any, level: float = 0.95) -> Tensor:  # as mean, or (N,) if scores are joint
        y = regression_targets(y, self.base.mean).double()
        lower, upper = self.interval(level)
        inside = (lower <= y) & (y <= upper)
        joint = cast(Residual, self.calibration.score).joint and inside.ndim > 1
        return inside.flatten(1).all(1) if joint else inside


class ConformalSets(ConformalPredictive):
    """Sets of classes."""

    base: ClassificationPredictive

    def sets(self, level: float = 0.95) -> Tensor:  # (N, C), bool
        """The classes among which the true one is with probability `level` or more. The predicted class is always
        there, unless the score was told to allow empty sets."""
        threshold = self.calibration.threshold(level).to(self.base.latent.mean.device)
        score = cast(ClassScore, self.calibration.score)
        return apply_by_rows(lambda part: score.of_classes(part) <= threshold, self.base)

    def size(self, level: float = 0.95) -> Tensor:  # (N,)
        """How many classes are in each set."""
        return self.sets(level).sum(-1)

    def covers(self, y: Any, level: float = 0.95) -> Tensor:  # (N,)
        labels = class_labels(y, self.base.latent.mean)
        return self.sets(level).gather(-1, labels[:, None]).squeeze(-1)


def score_named(score: str | Score | None, task: str) -> Score:
    """A score of this task by its name, the default, or as it is."""
    if isinstance(score, Score):
        if score.task != task:
            raise WrongTaskError(f"{type(score).__name__} is for {score.task}; this is a {task}.")
        return score
    named = SCORES[task]
    if score is None:
        return next(iter(named.values()))
    choice("score", score, tuple(named))
    return named[score]


def spread(pred: RegressionPredictive) -> Tensor:
    """std, but not zero: without any doubt the score of an error is beyond all others, and no error has none."""
    return pred.std.double().clamp_min(torch.finfo(torch.float64).tiny)


def predicted(pred: ClassificationPredictive) -> Tensor:  # (N, 1)
    return pred.labels[:, None]


def rounded(bound: Tensor, dtype: torch.dtype, toward: float) -> Tensor:
    """A bound in another dtype, never rounded to the inside of its interval."""
    near = bound.to(dtype)
    inside = near > bound if toward < 0 else near < bound
    return torch.where(inside, torch.nextafter(near, torch.full_like(near, toward)), near)


def uniform(rows: Tensor, seed: int) -> Tensor:  # (N,) in [0, 1)
    """A number for each row that follows from its bits and the seed alone: one point has one answer, in any batch and
    in any call. (A generator would give the first row of every call the same number, and so all rows of a service.)"""
    bits = rows.double().contiguous().view(torch.int64)
    generator = torch.Generator().manual_seed(seed)
    odd = torch.randint(-(2**62), 2**62, (rows.shape[1] + 1,), generator=generator).to(rows.device) * 2 + 1
    mixed = (bits * odd[:-1]).sum(-1)  # modulo 2⁶⁴; the upper bits are the good ones
    for _ in range(2):
        mixed = (mixed ^ (mixed >> 32)) * odd[-1]
    return ((mixed >> 11) & (2**53 - 1)).double() / 2**53
