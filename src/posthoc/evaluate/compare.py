"""Several methods on one model and the same data: how good each is, and what it costs."""

from __future__ import annotations

import copy
import io
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from posthoc.base import CHUNK, Method
from posthoc.collect import opened
from posthoc.collect.loaders import iterate
from posthoc.collect.network import Backbone
from posthoc.collect.outputs import Outputs
from posthoc.display import html_table
from posthoc.errors import DataError, LayerError, MissingExtraError, OptionError
from posthoc.evaluate.cost import measured
from posthoc.evaluate.evaluate import require_ood_task, score
from posthoc.evaluate.report import tables
from posthoc.evaluate.report.summary import Estimate, group_by
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.registry import make_likelihood
from posthoc.methods import REGISTRY, method_named

REFUSALS = (DataError, LayerError, MissingExtraError, OptionError)
"""Errors by which a method says that it is not for these data or this model."""

Entry = str | type[Method] | Method | tuple[str | type[Method], Mapping[str, Any]]
Candidate = tuple[type[Method] | Method, Mapping[str, Any]]


@dataclass(frozen=True, repr=False)
class Row:
    """One method: its figures, or why there are none."""

    method: str
    figures: dict[str, float] = field(default_factory=dict)
    """Those of `posthoc.evaluate.scores.Scores`, then `fit_seconds`, `predict_seconds`, and, in bytes, `fit_memory`,
    `predict_memory` and the greater of the two, `peak_memory`."""
    errors: dict[str, float] = field(default_factory=dict)
    """The standard errors of metrics over test sets of this size."""
    curves: dict[str, Any] = field(default_factory=dict)
    """Those of `posthoc.evaluate.evaluate.Evaluation.curves`, for a report."""
    selection: str = ""
    """What the method chose by itself, in words."""
    error: str | None = None
    applies: bool = True
    """False where the error says that the method is not for these data or this model."""
    traceback: str | None = None
    fitted: Method | None = None
    """The method itself, to predict with."""

    def __repr__(self) -> str:
        figures = ", ".join(f"{name}={value:.4g}" for name, value in list(self.figures.items())[:4])
        return f"Row({self.method}: {self.error or figures})"


@dataclass(frozen=True, repr=False)
class Comparison:
    """The rows of several methods. `print(comparison)` shows them as a table.

    Args:
        task: The likelihood's task.
        rows: One a method.
    """

    task: str
    rows: tuple[Row, ...]

    def __getitem__(self, method: str) -> Row:
        rows = {row.method: row for row in self.rows}
        if method not in rows:
            raise OptionError(f"Expected one of {', '.join(rows)}, got {method!r}.")
        return rows[method]

    @property
    def figures(self) -> dict[str, dict[str, float]]:
        """The figures of the methods that have any."""
        return {row.method: row.figures for row in self.rows if row.figures}

    @property
    def columns(self) -> list[tables.Column]:
        """The columns of the table."""
        return tables.columns_of(figure for figures in self.figures.values() for figure in figures)[0]

    @property
    def estimates(self) -> dict[str, dict[str, Estimate]]:
        """The figures with their standard errors."""
        return {
            row.method: {name: Estimate(value, row.errors.get(name)) for name, value in row.figures.items()}
            for row in self.rows
            if row.figures
        }

    def markdown(self) -> str:
        """The table as Markdown, the methods without figures below it."""
        notes = "".join(f"\n- {note}" for note in self.notes())
        return tables.markdown_table(self.columns, self.estimates) + (f"{notes}\n" if notes else "")

    def csv(self) -> str:
        """Every figure with all its digits as CSV."""
        rows = self.estimates.items()
        return tables.csv_table({"method": name} | tables.figures_and_errors(row) for name, row in rows)

    def notes(self) -> list[str]:
        """The methods without figures and why, those with the same reason together."""
        failed = [row for row in self.rows if row.error is not None]
        reasons = group_by(failed, lambda row: f"({'failed' if row.applies else 'does not apply'}): {row.error}")
        return [f"{', '.join(row.method for row in rows)} {reason}" for reason, rows in reasons.items()]

    def show(self, console: Any = None, title: str = "") -> None:
        """Prints the table, then the methods without figures and why.

        Args:
            console: A `rich.console.Console`.
            title: The table's title.
        """
        from rich.console import Console

        if console is None:
            console = Console(width=None if Console().is_terminal else 200)  # a file has room for every column
        if self.figures:
            console.print(tables.rich_table(self.columns, self.estimates, title))
        for note in self.notes():
            console.print(note, markup=False, highlight=False, soft_wrap=True)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        self.show(Console(file=text, width=200))
        return text.getvalue().rstrip()

    def __repr__(self) -> str:
        methods = ", ".join(self.figures) or "no figures"
        return f"Comparison({self.task}; {methods}; {len(self.rows) - len(self.figures)} without figures)"

    def _repr_html_(self) -> str:
        columns, rows = {"method": list(self.figures)}, self.estimates.values()
        for column in self.columns:
            columns[column.heading] = [tables.written(column, row.get(column.figure)) for row in rows]
        return html_table(repr(self), columns, rows=len(self.rows))


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
    """Fits each method on `train`, scores it on `test`, and measures its time and memory.

    Times are of a fit, and of the predictions for all of `test`; the network is run in both where the data are not
    `Outputs`. Memory is what was added at the peak, on the GPU if that is where the network or the `device` is.

    Args:
        model: The network, or None if the data are `Outputs`.
        train: Data as `fit` takes them: a DataLoader, a pair of arrays, `Outputs`, or a path.
        test: Data to score on.
        methods: "all", or names, classes, pairs of a name or a class and its options, and methods made already (which
            are fitted here). A mapping gives them names of your own.
        task: A likelihood or its name; by default known from the data where it can be.
        val: Data for methods that stop early or choose something by them.
        ood: Out-of-distribution data, for a classifier to detect.
        layer: The layer whose inputs are the features, as for a method.
        outputs_are: What a classifier's outputs are, as for a method.
        device: Where to compute.
        seed: Of everything random.
        progress: Whether to show progress.

    Returns:
        A row a method; one that fails has its error in its row, and the others go on.

    Raises:
        DataError: If data cannot be read by one method after the other, or targets are missing.
        OptionError: If a method or its options are unknown.

    Example:
        >>> data = Outputs(4 * torch.eye(3).repeat(2, 1), torch.tensor([0, 1, 2, 0, 1, 0]))
        >>> compare(None, data, data, ["map", "temperature"])
        Comparison(classification; map, temperature; 0 without figures)
    """
    train, test, val, ood = reread("train", train), reread("test", test), reread("val", val), reread("ood", ood)
    entries = named(methods)
    if task is None:
        tasks = [method.likelihood.task for method, _ in entries.values() if isinstance(method, Method)]
        task = tasks[0] if tasks else task_of(model, train)
    likelihood = make_likelihood(task)
    require_ood_task(likelihood.task, ood)
    common = {"layer": layer, "outputs_are": outputs_are, "device": device, "seed": seed, "progress": progress}

    def make(method: type[Method] | Method, options: Mapping[str, Any]) -> Method:
        if not isinstance(method, Method):
            return method(model, copy.deepcopy(likelihood), **{**method.known_options(common), **options})
        if method.likelihood.task != likelihood.task:
            raise OptionError(f"Expected a method for {likelihood.task}, got one for {method.likelihood.task}.")
        return method

    for method, options in entries.values():
        if options:
            make(method, options)  # wrong options are reported before the work
    rows = [trial(name, partial(make, *entry), train, test, val, ood) for name, entry in entries.items()]
    return Comparison(likelihood.task, tuple(rows))


def trial(name: str, make: Callable[[], Method], train: Any, test: Any, val: Any = None, ood: Any = None) -> Row:
    """One method made, fitted and scored; an error becomes part of its row."""
    try:
        method = make()
        device = method.device or (method.backbone.device if method.backbone is not None else None)
        with measured(device) as fit:
            method.fit(train, val=val)
        with measured(device) as predict:
            evaluation = score(method, test, ood, device=device)
        figures = evaluation.figures
    except Exception as error:
        refused = isinstance(error, REFUSALS)
        text = str(error) if refused else f"{type(error).__name__}: {error}".rstrip(": ")
        return Row(name, error=text, applies=not refused, traceback=traceback.format_exc())
    figures |= {"fit_seconds": fit.seconds, "predict_seconds": evaluation.seconds}
    if fit.memory is not None and predict.memory is not None:
        figures |= {"fit_memory": float(fit.memory), "predict_memory": float(predict.memory)}
        figures["peak_memory"] = max(figures["fit_memory"], figures["predict_memory"])
    errors, selection = evaluation.scores.standard_errors(), str(getattr(method, "selection_", None) or "")
    return Row(name, figures, errors, evaluation.curves(), selection, fitted=method)


def named(methods: str | Iterable[Entry] | Mapping[str, Entry]) -> dict[str, Candidate]:
    """Methods and their options by the names they have in the table; the second of a name is its number 2."""
    if isinstance(methods, Mapping):
        return {name: method_and_options(entry) for name, entry in methods.items()}
    if isinstance(methods, str):
        methods = REGISTRY if methods == "all" else [methods]
    entries: dict[str, Candidate] = {}
    for method, options in map(method_and_options, methods):
        count = sum(other.name == method.name for other, _ in entries.values())
        entries[f"{method.name} {count + 1}" if count else method.name] = method, options
    if not entries:
        raise OptionError("Expected at least one method, got none.")
    return entries


def method_and_options(entry: Entry) -> Candidate:
    """The method of an entry, resolved if it is a name, and its options."""
    method, options = entry if isinstance(entry, tuple) else (entry, {})
    method = method_named(method) if isinstance(method, str) else method
    if isinstance(method, Method) or (isinstance(method, type) and issubclass(method, Method)):
        return method, options
    raise OptionError(f"Expected methods by name, by class or as objects, got a {type(method).__name__}.")


def reread(name: str, data: Any) -> Any:
    """Data that every method can read anew."""
    data = opened(data)
    if isinstance(data, Iterator):
        raise DataError(f"Expected {name} data to be read by one method after the other, got an iterator: give a list.")
    if name in ("train", "test", "val") and isinstance(data, Outputs) and data.targets is None:
        raise DataError(f"Expected {name} data with targets, got outputs without them.")
    return data


def task_of(model: nn.Module | Callable[..., Any] | None, data: Any) -> str:
    """The task that outputs and targets show: classification, if targets are integers and the outputs several."""
    if not isinstance(data, Outputs):
        if model is None:
            raise DataError(f"Expected posthoc.Outputs, since there is no model to run, got {type(data).__name__}.")
        with Backbone(model, None, None).reading(features=False, inputs=False) as read:
            data = next(read(iterate(data, CHUNK)))
    outputs, targets = data.outputs, data.targets
    if targets is None:
        raise DataError("Expected targets: batches (x, y), mappings with labels, Outputs with targets.")
    if targets.is_floating_point():
        return "regression"
    if outputs.shape[1:].numel() > 1 and targets.shape[1:].numel() == 1:
        return "classification"
    shape = tuple(outputs.shape)
    raise OptionError(f'Give task="regression" or "classification": integer targets for outputs {shape} may be either.')
