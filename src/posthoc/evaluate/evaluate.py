"""How good a fitted method is on data that nobody has seen, and how much of that is its own."""

from __future__ import annotations

from posthoc.base import Method
from posthoc.collect import opened
from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError, OptionError
from posthoc.evaluate.metrics import Scores
from posthoc.methods.map import MAP

__all__ = ["evaluate", "scores"]


def evaluate(method: Method, test: Outputs, *, ood: Outputs | None = None) -> dict[str, float]:
    """The figures of a method by name, and those of its bare predictor under the same names with `base_` before them.
    Data are `Outputs`, or paths of files of them.
    `ood` are data from elsewhere, for a classifier to be unsure of."""
    test, ood = opened(test), opened(ood)
    if test.targets is None:
        raise DataError("Expected targets to score the predictions by, got outputs without them.")
    if ood is not None and method.likelihood.task != "classification":
        raise OptionError("Out-of-distribution data are for classification: leave them out for regression.")
    bare = scores(MAP.beside(method), test, ood)
    return {**scores(method, test, ood), **{f"base_{name}": value for name, value in bare.items()}}


def scores(method: Method, test: Outputs, ood: Outputs | None = None) -> dict[str, float]:
    """The figures of a method alone. Rows are read, predicted and forgotten a few at a time."""
    figures = Scores(method.likelihood.task)
    done = 0
    for part in method.stream(test):
        assert test.targets is not None
        figures.update(part, test.targets[done : done + len(part)])
        done += len(part)
    for part in method.stream(ood) if ood is not None else ():
        figures.update_ood(part)
    return figures.compute()
