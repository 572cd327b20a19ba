"""A fitted method on data that nobody has seen: its figures, its curves, and how long it took."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from posthoc.base import CHUNK, Method
from posthoc.collect.loaders import iterate
from posthoc.collect.outputs import Outputs
from posthoc.evaluate.cost import synchronised
from posthoc.evaluate.curves import Curves
from posthoc.evaluate.metrics import Scores

__all__ = ["Judgement", "judge"]


@dataclass(frozen=True)
class Judgement:
    """What there is to say of predictions."""

    figures: dict[str, float]
    """Those of `posthoc.evaluate.metrics.Scores`."""
    curves: Curves
    seconds: float
    """That the predictions for the test data took, without the scoring."""


def judge(method: Method, test: Any, ood: Any = None, *, device: torch.device | None = None) -> Judgement:
    """Scores a method on test data (as `fit` takes them), and its doubts of data from elsewhere."""
    figures, curves, seconds = Scores(method.likelihood.task), Curves(method.likelihood.task), 0.0
    with closing(method.stream_with_targets(test)) as parts:
        while True:
            begin = synchronised(device)
            part = next(parts, None)
            seconds += synchronised(device) - begin
            if part is None:
                break
            figures.update(*part)
            curves.update(*part)
    for pred in streamed(method, ood) if ood is not None else ():
        figures.update_ood(pred)
        curves.update_ood(pred)
    return Judgement(figures.compute(), curves, seconds)


def streamed(method: Method, data: Any) -> Generator[Any]:
    """Predictions for data that may have targets or not."""
    yield from method.stream(data if isinstance(data, Outputs) else iterate(data, CHUNK))
