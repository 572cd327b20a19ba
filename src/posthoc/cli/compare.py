"""`posthoc compare`: every method that files of outputs are enough for, in one table."""

from __future__ import annotations

import json
import math
import multiprocessing
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from posthoc.cli.fit import DATA, Kind, Task, build, describe
from posthoc.cli.options import (
    Device,
    Features,
    Force,
    Inputs,
    OutputColumns,
    Targets,
    open_data,
    read_config,
)
from posthoc.errors import FileError, OptionError

if TYPE_CHECKING:
    from posthoc.base import Method
    from posthoc.collect.outputs import Outputs
    from posthoc.evaluate.compare import Comparison, Row

__all__ = ["compare"]

T = TypeVar("T")


def compare(
    train: Annotated[str, typer.Argument(help=DATA)],
    test: Annotated[str, typer.Option(help="Outputs and targets that neither the network nor any method has seen.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for a file a method, table.md and table.csv.")],
    methods: Annotated[str, typer.Option(help="all, or names with commas between: fmgp,temperature.")] = "all",
    task: Annotated[Task | None, typer.Option(help="What is predicted.", show_default="known from the targets")] = None,
    ood: Annotated[str | None, typer.Option(help="Outputs on data from elsewhere, to tell from the test data.")] = None,
    val: Annotated[str | None, typer.Option(help="More outputs, to stop early or to choose by.")] = None,
    config: Annotated[Path | None, typer.Option(help="Options as TOML, a table for each method.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="One of them: --set fmgp.steps=2000.")] = None,
    outputs_are: Annotated[
        Kind | None, typer.Option(help="What a classifier's outputs are.", show_default="logits")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.", min=0)] = 0,
    device: Device = None,
    outputs: OutputColumns = None,
    targets: Targets = None,
    features: Features = None,
    inputs: Inputs = None,
    force: Force = False,
) -> None:
    """Fits every method on the same outputs, scores it on others, and prints one table: how good each is, and its cost.

    Each runs in a process of its own, which shows its memory and keeps a crash from the others. Methods that need the
    network itself are not for files: posthoc.compare(model, ...) in Python runs those too.

    \b
    posthoc compare 'test.npz[:5000]' --test 'test.npz[5000:]' --ood svhn.npz -o results
    posthoc compare fit.npz --test test.npz --methods map,fmgp --set fmgp.steps=2000 -o results
    """
    from posthoc.evaluate.compare import Comparison, Row
    from posthoc.methods import REGISTRY

    names = list(REGISTRY) if methods == "all" else asked(methods)
    options = by_method(read_config(config, set_ or []), names)
    from posthoc.methods import method_named

    places = {"train": train, "test": test, "ood": ood, "val": val}
    files = Files({role: path for role, path in places.items() if path is not None}, outputs, targets, features, inputs)
    kind, sizes = check(files, task, outputs_are)
    common: dict[str, Any] = {"seed": seed} | ({"outputs_are": outputs_are.value} if outputs_are is not None else {})
    trials = [
        Trial(name, kind, {**method_named(name).known_options(common), **options.get(name, {})}, device, files, seed)
        for name in names
    ]
    refused = {trial.name: reason for trial in trials if (reason := trial.refused(asked=trial.name in options))}
    tried = [name for name in names if name not in refused]
    folder = claimed(out, [f"{name}-{seed}.json" for name in tried], force) if tried else out
    comparison = Comparison(kind, tuple(Row(name, error=why, applies=False) for name, why in refused.items()))
    interrupted = False
    try:
        for trial in (trial for trial in trials if trial.name not in refused):
            typer.echo(f"{trial.name} ...", err=True)
            row, record = trial.run()
            write(folder / f"{trial.name}-{seed}.json", json.dumps(record, indent=2) + "\n")
            comparison = replace(comparison, rows=(*comparison.rows, row))
            write_tables(comparison, folder)
    except KeyboardInterrupt:
        interrupted = True
    comparison.show(title=f"Fitted on {sizes['train']}, scored on {sizes['test']}")
    if interrupted or not comparison.figures:
        reason = "interrupted" if interrupted else "no method could be fitted to these data"
        typer.echo(f"posthoc: {reason}", err=True)
        raise typer.Exit(130 if interrupted else 1)
    typer.echo(f"wrote {', '.join(f'{name}-{seed}.json' for name in tried)}, table.md and table.csv to {folder}")


def write_tables(comparison: Comparison, folder: Path) -> None:
    """What there is so far: a long comparison may be interrupted."""
    from posthoc.evaluate.report.tables import csv_table, markdown_table

    notes = "".join(f"\n- {note}" for note in comparison.notes())
    write(folder / "table.md", markdown_table(comparison.task, comparison.figures) + (f"{notes}\n" if notes else ""))
    write(folder / "table.csv", csv_table(comparison.figures))


@dataclass(frozen=True)
class Files:
    """Paths of outputs by what they are for, and the columns of tables."""

    paths: dict[str, str]
    outputs: str | None
    targets: str | None
    features: str | None
    inputs: str | None

    def open(self, role: str) -> Outputs | None:
        if role not in self.paths:
            return None
        targets = self.targets if role != "ood" else None
        return open_data(self.paths[role], self.outputs, targets, self.features, self.inputs)


@dataclass(frozen=True)
class Trial:
    """One method on files, as a process of its own is told of it."""

    name: str
    task: str
    options: dict[str, Any]
    device: str | None
    files: Files
    seed: int

    def make(self) -> Method:
        return build(self.name, self.task, self.options, self.device)

    def refused(self, *, asked: bool) -> str | None:
        """Why this method is not for such files, if that is known without them. Options that were asked for are wrong
        at once."""
        from posthoc.evaluate.compare import REFUSALS
        from posthoc.methods import method_named

        if not method_named(self.name).black_box:
            return "needs the network itself: use posthoc.compare(model, ...) in Python."
        try:
            self.make()
        except REFUSALS as error:
            if asked:
                raise
            return str(error)
        return None

    def run(self) -> tuple[Row, dict[str, Any]]:
        """The row of this method, and all that is to be known of it."""
        from posthoc.evaluate.compare import Row
        from posthoc.evaluate.cost import machine, versions

        told: list[str] = []
        try:
            row, configuration, told = in_fresh_process(in_this_process, self)
        except BrokenProcessPool:
            row = Row(self.name, error="its process was killed; was there memory enough?")
            configuration = {"options": self.options}
        for text in told:
            typer.echo(f"posthoc: {self.name}: {text}", err=True)
        record = {
            **{
                key: value
                for key, value in asdict(replace(row, fitted=None)).items()
                if key not in ("figures", "fitted")
            },
            **{figure: value if math.isfinite(value) else None for figure, value in row.figures.items()},
            "task": self.task,
            "seed": self.options.get("seed", self.seed),
            "device": self.device or "cpu",
            "data": self.files.paths,
            "configuration": configuration,
            "versions": versions(),
            "machine": machine(),
        }
        return row, record


def in_fresh_process(function: Callable[..., T], *args: Any) -> T:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def in_this_process(trial: Trial) -> tuple[Row, dict[str, Any], list[str]]:
    """A trial's row, its method's configuration, and what it warned of."""
    from posthoc.errors import PosthocWarning
    from posthoc.evaluate.compare import trial as tried
    from posthoc.evaluate.cost import warm_up

    data = {role: trial.files.open(role) for role in ("train", "test", "val", "ood")}
    warm_up(trial.device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", PosthocWarning)
        row = tried(trial.name, trial.make, **data)
    configuration: dict[str, Any] = {"options": trial.options}
    if (method := row.fitted) is not None:
        header = method._header()
        configuration = {**header, "options": {**trial.options, **header["config"]}}
    told = dict.fromkeys(str(warning.message) for warning in caught)
    return replace(row, fitted=None), json.loads(json.dumps(configuration, default=str)), list(told)


def asked(methods: str) -> list[str]:
    """Names of methods, each known and each once."""
    from posthoc.methods import method_named

    names = [name.strip() for name in methods.split(",")]
    for name in names:
        method_named(name)
    return list(dict.fromkeys(names))


def by_method(options: dict[str, Any], names: list[str]) -> dict[str, dict[str, Any]]:
    """Options of each method, from tables and from dotted names."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in options.items():
        name, dot, option = key.partition(".")
        if name not in names or not (dot or isinstance(value, dict)):
            raise OptionError(
                f"Expected options of a method that is compared, fmgp.steps or a table [fmgp], got {key!r}. "
                f"The methods are: {', '.join(names)}."
            )
        found.setdefault(name, {}).update({option: value} if dot else value)
    return found


def check(files: Files, task: Task | None, outputs_are: Kind | None) -> tuple[str, dict[str, str]]:
    """The task, and the sizes of the files in words, if they are all there and fit each other."""
    from posthoc.evaluate.compare import reread, task_of
    from posthoc.methods import MAP

    data = {role: reread(role, files.open(role)) for role in files.paths}
    kind = task.value if task is not None else task_of(None, data["train"])
    if "ood" in data and kind != Task.classification:
        raise OptionError("Out-of-distribution data are for classification: leave --ood out for regression.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # every method will say it
        bare = MAP(None, kind, outputs_are=outputs_are.value if outputs_are is not None else "logits")
        for held_out in (role for role in ("test", "val") if role in data):
            bare.fit(data["train"], val=data[held_out])
        if "ood" in data:
            bare.predict(data["ood"][:1])
    return kind, {role: describe(rows) for role, rows in data.items()}


def claimed(folder: Path, names: list[str], force: bool) -> Path:
    """A folder where none of these files, nor a table, is there yet (or may be replaced)."""
    from posthoc.io import require_folder

    there = [name for name in (*names, "table.md", "table.csv") if (folder / name).exists()]
    if there and not force:
        raise FileError(
            f"Expected a folder for new results, found {folder / there[0]} there already: use --force, or another."
        )
    return require_folder(folder)


def write(path: Path, text: str) -> None:
    from posthoc.io import atomic_path

    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
