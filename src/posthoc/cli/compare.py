"""`posthoc compare`: every method that files of outputs suffice for, in one table."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from posthoc.cli import shared
from posthoc.errors import OptionError

if TYPE_CHECKING:
    from posthoc.collect.outputs import Outputs
    from posthoc.evaluate.compare import Comparison, Row

__all__ = ["compare"]

T = TypeVar("T")

ROLES = ("train", "test", "ood", "val")
"""What the files of outputs are for."""


def compare(
    train: Annotated[str, typer.Argument(help=shared.DATA)],
    test: Annotated[str, typer.Option(help="Outputs and targets that neither the network nor any method has seen.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for a file a method, table.md and table.csv.")],
    methods: Annotated[str, typer.Option(help="all, or names with commas between: fmgp,temperature.")] = "all",
    task: shared.TaskOption = None,
    ood: Annotated[str | None, typer.Option(help="Outputs on data from elsewhere, to tell from the test data.")] = None,
    val: Annotated[str | None, typer.Option(help="More outputs, for early stopping or choices.")] = None,
    config: shared.Config = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="One of them: --set fmgp.steps=2000.")] = None,
    outputs_are: shared.OutputsAre = None,
    seed: shared.Seed = 0,
    device: shared.Device = None,
    outputs: shared.OutputColumns = None,
    targets: shared.Targets = None,
    features: shared.Features = None,
    inputs: shared.Inputs = None,
    force: shared.Force = False,
) -> None:
    """Fits every method on the same outputs, scores it on others, and prints one table: how good each is, and its cost.

    Each runs in a process of its own, which shows its memory and keeps a crash from the others. Methods that need the
    network itself are not for files: posthoc.compare(model, ...) in Python runs those too.

    \b
    posthoc compare 'test.npz[:5000]' --test 'test.npz[5000:]' --ood svhn.npz -o results
    posthoc compare fit.npz --test test.npz --methods map,fmgp --set fmgp.steps=2000 -o results
    """
    from posthoc.evaluate.compare import Comparison, Row
    from posthoc.methods import REGISTRY, method_named

    names = list(REGISTRY) if methods == "all" else known_methods(methods)
    options = options_by_method(shared.read_config(config, set_ or []), names)
    columns = shared.Columns(outputs, targets, features, inputs)
    paths = {role: path for role, path in zip(ROLES, (train, test, ood, val), strict=True) if path is not None}
    kind, sizes = check_data(paths, columns, task, outputs_are)
    common: dict[str, Any] = {"seed": seed} | ({"outputs_are": outputs_are.value} if outputs_are is not None else {})
    trials = []
    for name in names:
        given = {**method_named(name).known_options(common), **options.get(name, {})}
        trials.append(Trial(name, kind, given, device, seed, paths, columns))
    reasons = {trial.name: trial.reason_against(strict=trial.name in options) for trial in trials}
    rows = [Row(name, error=reason, applies=False) for name, reason in reasons.items() if reason is not None]
    trials = [trial for trial in trials if reasons[trial.name] is None]
    written = [*(f"{trial.name}-{seed}.json" for trial in trials), "table.md", "table.csv"]
    if trials:
        claim_folder(out, written, force, inputs=(*paths.values(), config))
    comparison = Comparison(kind, tuple(rows))
    interrupted = False
    try:
        for trial in trials:
            typer.echo(f"{trial.name} ...", err=True)
            row, record = trial.run()
            shared.write_text(out / f"{trial.name}-{seed}.json", json.dumps(record, indent=2) + "\n")
            comparison = replace(comparison, rows=(*comparison.rows, row))
            write_tables(comparison, out)
    except KeyboardInterrupt:
        interrupted = True
    comparison.show(title=f"Fitted on {sizes['train']}, scored on {sizes['test']}")
    if interrupted or not comparison.figures:
        reason = "interrupted" if interrupted else "no method could be fitted to these data"
        typer.echo(f"posthoc: {reason}", err=True)
        raise typer.Exit(shared.INTERRUPTED if interrupted else 1)
    typer.echo(f"wrote {', '.join(written)} to {out}")


# Before the fits


def known_methods(text: str) -> list[str]:
    """The methods of --methods, each once."""
    from posthoc.methods import method_named

    return list(dict.fromkeys(method_named(name.strip()).name for name in text.split(",")))


def options_by_method(options: dict[str, Any], names: list[str]) -> dict[str, dict[str, Any]]:
    """The options of each method, from tables and from dotted names."""
    tables: dict[str, dict[str, Any]] = {}
    for key, value in options.items():
        name, dot, option = key.partition(".")
        if name not in names or not (dot or isinstance(value, dict)):
            raise OptionError(
                f"Expected options of a method that is compared, fmgp.steps or a table [fmgp], got {key!r}. "
                f"The methods are: {', '.join(names)}."
            )
        tables.setdefault(name, {}).update({option: value} if dot else value)
    return tables


def check_data(
    paths: dict[str, str], columns: shared.Columns, task: shared.Task | None, outputs_are: shared.Kind | None
) -> tuple[str, dict[str, str]]:
    """The task, and the sizes of the files in words, if they are all there and fit each other."""
    from posthoc.evaluate.compare import reread, task_of
    from posthoc.methods import MAP

    data = {role: reread(role, rows) for role, rows in open_data(paths, columns).items()}
    kind = task.value if task is not None else task_of(None, data["train"])
    if "ood" in data and kind != shared.Task.classification:
        raise OptionError("Out-of-distribution data are for classification: leave --ood out for regression.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # every method will give these warnings
        bare = MAP(None, kind, outputs_are=(outputs_are or shared.Kind.logits).value)
        for role in {"test", "val"} & data.keys():
            bare.fit(data["train"], val=data[role])
        if "ood" in data:
            bare.predict(data["ood"][:1])
    return kind, {role: shared.describe(rows) for role, rows in data.items()}


def claim_folder(folder: Path, names: list[str], force: bool, inputs: tuple[str | Path | None, ...]) -> None:
    """Make the folder, and refuse it where a file to write must not be written."""
    from posthoc.io import require_folder

    if folder.is_dir():
        for name in names:
            shared.require_output(folder / name, force=force, inputs=inputs)
    require_folder(folder)


def write_tables(comparison: Comparison, folder: Path) -> None:
    """Write the rows so far: a long comparison may be interrupted."""
    shared.write_text(folder / "table.md", comparison.markdown())
    shared.write_text(folder / "table.csv", comparison.csv())


# The fits


def open_data(paths: dict[str, str], columns: shared.Columns) -> dict[str, Outputs]:
    """The outputs by their role; those out of distribution without targets."""
    without_targets = replace(columns, targets=None)
    return {role: (without_targets if role == "ood" else columns).open(path) for role, path in paths.items()}


@dataclass(frozen=True)
class Trial:
    """One method on files, in words that can be sent to another process."""

    name: str
    task: str
    options: dict[str, Any]
    device: str | None
    seed: int | None
    paths: dict[str, str]
    columns: shared.Columns

    def reason_against(self, *, strict: bool) -> str | None:
        """Why the method is not for such files, if that is known without them; raises it if `strict`."""
        from posthoc.evaluate.compare import REFUSALS
        from posthoc.methods import method_named

        if not method_named(self.name).black_box:
            return "needs the network itself: use posthoc.compare(model, ...) in Python."
        try:
            shared.build_method(self.name, self.task, self.options, self.device)
        except REFUSALS as error:
            if strict:
                raise
            return str(error)
        return None

    def run(self) -> tuple[Row, dict[str, Any]]:
        """The row of this method, and the record for its file."""
        from posthoc.evaluate.compare import Row
        from posthoc.evaluate.cost import machine, versions

        messages: list[str] = []
        try:
            row, configuration, messages = in_fresh_process(fit_and_score, self)
        except BrokenProcessPool:
            row = Row(self.name, error="its process was killed; was there memory enough?")
            configuration = {"options": self.options}
        for message in messages:
            typer.echo(f"posthoc: {self.name}: {message}", err=True)
        record = asdict(row)
        figures = record.pop("figures")
        del record["fitted"]
        return row, {
            **record,
            **{name: value if math.isfinite(value) else None for name, value in figures.items()},
            "task": self.task,
            "seed": self.options.get("seed", self.seed),
            "device": self.device or "cpu",
            "data": self.paths,
            "configuration": configuration,
            "versions": versions(),
            "machine": machine(),
        }


def in_fresh_process(function: Callable[..., T], *args: Any) -> T:
    """The result of a function in a process of its own, which ends when this one does, however that ends."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=start_worker) as pool:
        try:
            return pool.submit(function, *args).result()
        except (KeyboardInterrupt, SystemExit):
            for child in multiprocessing.active_children():
                child.kill()
            raise


def start_worker() -> None:
    """Show log messages, and end this process when its parent has ended."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
        os._exit(1)

    shared.log_to_stderr()
    threading.Thread(target=wait, daemon=True).start()


def fit_and_score(trial: Trial) -> tuple[Row, dict[str, Any], list[str]]:
    """A trial's row, its method's configuration, and its warnings."""
    from posthoc.errors import PosthocWarning
    from posthoc.evaluate import cost
    from posthoc.evaluate.compare import trial as run_trial

    data = open_data(trial.paths, trial.columns)
    cost.warm_up(trial.device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", PosthocWarning)
        row = run_trial(
            trial.name, lambda: shared.build_method(trial.name, trial.task, trial.options, trial.device), **data
        )
    configuration: dict[str, Any] = {"options": trial.options}
    if (method := row.fitted) is not None:
        header = method._header()
        configuration = {**header, "options": {**trial.options, **header["config"]}}
    messages = dict.fromkeys(str(warning.message) for warning in caught)
    return replace(row, fitted=None), json.loads(json.dumps(configuration, default=str)), list(messages)
