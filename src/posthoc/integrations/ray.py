"""Ray Data: collect and predict on every machine of a cluster, or on all cores of this one.

Actors hold the predictor or the head; their results come back in order, and one process writes them.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from posthoc import methods
from posthoc.collect import open_outputs
from posthoc.collect.outputs import Outputs, join
from posthoc.collect.to_folder import Span, SpanReader, spans, until_end, write_to_folder
from posthoc.errors import OptionError, PosthocError
from posthoc.integrations.models import Plan
from posthoc.io import StrPath
from posthoc.optional import require
from posthoc.predictive.base import Predictive

Work = Callable[[Span], Any]

MAX_TASKS = 1000
"""Batches are handed out in at most this many tasks."""


def collect_with_ray(
    plan: Plan, folder: StrPath, *, batch_size: int = 64, actors: int | None = None, force: bool = False
) -> Outputs:
    """Do what `collect_to_folder` does with actors: by default one a GPU, or one a processor without GPUs.

    Every machine must see the data under the same path.
    """
    if plan.device not in (None, "cpu", "cuda"):
        raise OptionError(f"Expected device cpu or cuda, since Ray hands out the GPUs, got {plan.device!r}.")
    predictor, data = replace(plan, device="cpu").open()  # only the identity is needed here
    if not hasattr(data, "__len__"):
        raise OptionError("--engine ray needs rows that can be read by number, got a stream: use --engine local.")
    total = len(data)

    def parts(start: int) -> Generator[Outputs]:
        wanted = list(spans(start, total, batch_size))
        return in_order(partial(collecting, plan), wanted, actors, use_gpus=plan.device != "cpu")

    return write_to_folder(parts, folder, identity=predictor.identity, total=total, force=force)


def predict_with_ray(
    head: StrPath, outputs: StrPath, *, columns: Mapping[str, str | list[str]] | None = None, rows: int = 4096
) -> Iterator[Predictive]:
    """The predictions of a saved head for a file or folder of outputs, some `rows` at a time, on the CPU.

    Every machine must see both paths; `columns` are those of a table.
    """
    wanted = list(spans(0, len(open_outputs(outputs, columns=columns)), rows))
    yield from in_order(partial(predicting, head, outputs, columns), wanted)


def collecting(plan: Plan) -> Work:
    """A function that runs the predictor over a batch of the data."""
    predictor, data = plan.open()
    batches = SpanReader(data, predictor.collate)

    def work(span: Span) -> Outputs:
        with predictor.backbone.reading(features=True, inputs=plan.inputs) as read:
            return join(list(read(until_end([batches[span]])))).to(torch.device("cpu"))

    return work


def predicting(head: StrPath, outputs: StrPath, columns: Mapping[str, str | list[str]] | None) -> Work:
    """A function that predicts for some rows of the outputs."""
    method = methods.load(head, device="cuda" if torch.cuda.is_available() else None)
    data = open_outputs(outputs, columns=columns)
    # Without the rows of the OOD score, which would travel with the detector.
    return lambda span: replace(method.predict(data[slice(*span)]).cpu(), ood=None)


@dataclass
class Result:
    """What an actor returns for a span; Ray would turn it into an array if it were not wrapped."""

    value: Any


class Actor:
    """The class that Ray Data calls with each span; it works in the driver's folder, with the driver's import path.

    Errors of this package are returned, since Ray changes those that are raised.
    """

    def __init__(self, make: Callable[[], Work], folder: str, path: list[str]) -> None:
        os.chdir(folder)
        sys.path += [entry for entry in (folder, *path) if entry not in sys.path]
        self.make = make
        self.work: Work | None = None

    def __call__(self, span: Mapping[str, int]) -> dict[str, Any]:
        try:
            self.work = self.work or self.make()
            result = self.work((span["start"], span["stop"]))
        except PosthocError as error:
            result = error
        return {"result": Result(result)}


def in_order(
    make: Callable[[], Work], wanted: Sequence[Span], actors: int | None = None, *, use_gpus: bool = True
) -> Generator[Any]:
    """The actors' results for some spans, in the order of the spans."""
    ray = require("ray", "ray", "--engine ray")
    data = require("ray.data", "ray", "--engine ray")
    if not wanted:
        return
    if not ray.is_initialized():  # connect to the cluster there is, or to a local one that ends with this process
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        ray.init(logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0)) if use_gpus else 0
    rows = [{"start": start, "stop": stop} for start, stop in wanted]
    work = data.from_items(rows, override_num_blocks=min(len(rows), MAX_TASKS)).map(
        Actor,
        fn_constructor_args=(make, os.getcwd(), sys.path),
        compute=data.ActorPoolStrategy(size=min(actors or gpus or int(resources["CPU"]), len(rows))),
        num_gpus=1 if gpus else 0,
    )
    work.context.execution_options.preserve_order = True
    work.context.enable_progress_bars = False
    for row in work.iter_rows():
        value = row["result"].value
        if isinstance(value, PosthocError):
            raise value
        yield value
