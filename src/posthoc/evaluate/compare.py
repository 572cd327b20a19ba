"""Many methods on one model and the same data: how good each is, and what it costs."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from posthoc.base import CHUNK, Method
from posthoc.collect import opened
from posthoc.collect.loaders import iterate
from posthoc.collect.network import Backbone
from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError, LayerError, MissingExtraError, OptionError
from posthoc.evaluate.cost import measured
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.registry import make_likelihood
from posthoc.methods import REGISTRY, method_named

__all__ = ["Comparison", "Row", "compare", "task_of", "trial"]

REFUSALS = (DataError, LayerError, MissingExtraError, OptionError)
"""Errors by which a method says that it is not for these data or this model."""

Entry = str | type[Method] | Method | tuple[str | type[Method], Mapping[str, Any]]


@dataclass(frozen=True)
class Row:
    """What there is to say of one method: its figures, or why there are none."""

    method: str
    figures: dict[str, float] = field(default_factory=dict)
    """Those of `posthoc.evaluate.scores.Scores`, then `fit_seconds`, `predict_seconds`, and, in bytes, `fit_memory`,
    `predict_memory` and the greater of the two, `peak_memory`."""
    curves: dict[str, Any] = field(default_factory=dict)
    """Those of `posthoc.evaluate.evaluate.Evaluation.curves`, for a report."""
    error: str | None = None
    applies: bool = True
    """False where the error says that the method is not for these data or this model."""
    traceback: str | None = None
    fitted: Method | None = None
    """The method itself, to predict with."""


@dataclass(frozen=True)
class Comparison:
    """The rows of several methods. `print(comparison)` shows them as a table."""

    task: str
    rows: tuple[Row, ...]

    def __getitem__(self, method: str) -> Row:
        found = [row for row in self.rows if row.method == method]
        if not found:
            raise OptionError(f"Expected one of {', '.join(row.method for row in self.rows)}, got {method!r}.")
        return found[0]

    @property
    def figures(self) -> dict[str, dict[str, float]]:
        """The figures of those that have any, by method."""
        return {row.method: row.figures for row in self.rows if row.figures}

    def __str__(self) -> str:
        import io

        from rich.console import Console

        text = io.StringIO()
        self.show(Console(file=text, width=200))
        return text.getvalue().rstrip()

    def show(self, console: Any = None, title: str = "") -> None:
        """Prints the table, and below it whom it is without and why. `console` is one of rich's."""
        from rich.console import Console
        from rich.markup import escape

        from posthoc.evaluate.report.tables import rich_table

        if console is None:
            console = Console()
            if not console.is_terminal:
                console = Console(width=200)  # a file has room for every column
        if self.figures:
            console.print(rich_table(self.task, self.figures, title))
        for note in self.notes():
            console.print(escape(note), highlight=False, soft_wrap=True)

    def notes(self) -> list[str]:
        """Whom the table is without, and why; those with the same reason together."""
        found: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            if row.error is not None:
                found.setdefault(("failed" if row.applies else "does not apply", row.error), []).append(row.method)
        return [f"{', '.join(methods)} ({verdict}): {error}" for (verdict, error), methods in found.items()]


def compare(
    model: nn.Module | Callable[..., Any] | None,
    train: Any,
    test: Any,
    methods: str | Iterable[Entry] | Mapping[str, Entry] = "all",
    *,
    task: str | Likelihood | None = None,
    val: Any = None,
    ood: Any = None,
    layer: str | None = None,
    outputs_are: str = "logits",
    device: str | torch.device | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Comparison:
    """Fits each method on `train`, scores it on `test`, and tells how long that took and how much memory it needed.

    Data are what `fit` takes: a DataLoader, a pair of arrays, `Outputs` (then `model` may be None), or a path. `val` is
    for methods that stop early or choose something by it; `ood` are data from elsewhere, for a classifier to be unsure
    of. The `task` is known from the data where it can be.

    `methods` is "all", or names; in their place classes, pairs of a name or a class and its options, and methods made
    already (which are fitted here). A mapping gives them names of your own. One that fails has its error in its row,
    and the others go on.

    Times are of a fit, and of the predictions for all of `test`; the network is run in both where the data are not
    `Outputs`. Memory is what was added at the peak, on the GPU if that is where the network or the `device` is.
    """
    train, test, val, ood = (reread(name, data) for name, data in
                             (("train", train), ("test", test), ("val", val), ("ood", ood)))  # fmt: skip
    entries = named(methods)
    made = [entry for entry in entries.values() if isinstance(entry, Method)]
    if task is None and made:
        task = made[0].likelihood.task
    likelihood = make_likelihood(task if task is not None else task_of(model, train))
    if ood is not None and likelihood.task != "classification":
        raise OptionError("Out-of-distribution data are for classification: leave them out for regression.")
    common = {"layer": layer, "outputs_are": outputs_are, "device": device, "seed": seed, "progress": progress}

    def make(entry: Entry) -> Method:
        if isinstance(entry, Method):
            if entry.likelihood.task != likelihood.task:
                raise OptionError(f"Expected a method for {likelihood.task}, got one for {entry.likelihood.task}.")
            return entry
        kind, options = entry if isinstance(entry, tuple) else (entry, {})
        kind = method_named(kind) if isinstance(kind, str) else kind
        return kind(model, copy.deepcopy(likelihood), **{**kind.known_options(common), **options})

    for entry in entries.values():
        if isinstance(entry, tuple):
            make(entry)  # options that were asked for are wrong now, not in an hour
    rows = [trial(name, partial(make, entry), train, test, val, ood) for name, entry in entries.items()]
    return Comparison(likelihood.task, tuple(rows))


def trial(name: str, make: Callable[[], Method], train: Any, test: Any, val: Any = None, ood: Any = None) -> Row:
    """One method made, fitted and scored, whatever becomes of it."""
    from posthoc.evaluate.evaluate import score

    try:
        method = make()
        device = place(method)
        with measured(device) as fit:
            method.fit(train, val=val)
        with measured(device) as predict:
            found = score(method, test, ood, device=device)
    except Exception as error:
        text = str(error) if isinstance(error, REFUSALS) else f"{type(error).__name__}: {error}".rstrip(": ")
        return Row(name, error=text, applies=not isinstance(error, REFUSALS), traceback=traceback.format_exc())
    figures = {**found.figures, "fit_seconds": fit.seconds, "predict_seconds": found.seconds}
    memory = {"fit_memory": fit.memory, "predict_memory": predict.memory}
    known = {name: float(size) for name, size in memory.items() if size is not None}
    if known:
        figures |= {**known, "peak_memory": max(known.values())}
    return Row(name, figures, found.curves(), fitted=method)


def place(method: Method) -> torch.device | None:
    """Where a method computes."""
    return method.device or (method.backbone.device if method.backbone is not None else None)


def named(methods: str | Iterable[Entry] | Mapping[str, Entry]) -> dict[str, Entry]:
    """Entries by the names they have in the table; the second of a name is its number 2."""
    if isinstance(methods, Mapping):
        return dict(methods)
    if isinstance(methods, str):
        methods = list(REGISTRY) if methods == "all" else [methods]
    entries: dict[str, Entry] = {}
    for entry in methods:
        kind = entry[0] if isinstance(entry, tuple) else entry
        if not isinstance(kind, str | Method) and not (isinstance(kind, type) and issubclass(kind, Method)):
            raise OptionError(f"Expected methods by name, by class or as objects, got a {type(kind).__name__}.")
        if isinstance(kind, str):
            method_named(kind)  # a name that nobody knows is a slip, not a method that does not apply
        name = kind if isinstance(kind, str) else kind.name
        count = 1 + sum(known.partition(" ")[0] == name for known in entries)
        entries[name if count == 1 else f"{name} {count}"] = entry
    if not entries:
        raise OptionError("Expected at least one method, got none.")
    return entries


def reread(name: str, data: Any) -> Any:
    """Data that every method can read anew."""
    data = opened(data)
    if isinstance(data, Iterator):
        raise DataError(f"Expected {name} data to be read by one method after the other, got an iterator: give a list.")
    if name in ("train", "test", "val") and isinstance(data, Outputs) and data.targets is None:
        raise DataError(f"Expected {name} data with targets, got outputs without them.")
    return data


def task_of(model: nn.Module | Callable[..., Any] | None, data: Any) -> str:
    """What is predicted, from outputs and targets: classes, if the targets are integers and the outputs several."""
    if isinstance(data, Outputs):
        outputs, targets = data.outputs, data.targets
    elif model is None:
        raise DataError(f"Expected posthoc.Outputs, since there is no model to run, got {type(data).__name__}.")
    else:
        with Backbone(model, None, None).reading(features=False, inputs=False) as read:
            first = read(next(iter(iterate(data, CHUNK))))
        outputs, targets = first.outputs, first.targets
    return guess(outputs, targets)


def guess(outputs: Tensor, targets: Tensor | None) -> str:
    if targets is None:
        raise DataError("Expected targets to fit on: batches (x, y), mappings with labels, Outputs with targets.")
    if targets.is_floating_point():
        return "regression"
    if outputs.shape[1:].numel() > 1 and targets.shape[1:].numel() == 1:
        return "classification"
    raise OptionError(
        "Expected real targets, or integers for a network with several outputs, to know the task by; got integers for "
        f'outputs of shape {tuple(outputs.shape)}: say task="regression" or "classification" (--task).'
    )
