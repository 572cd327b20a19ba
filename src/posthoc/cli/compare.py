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
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posthoc.cli import shared
from posthoc.errors import DataError, OptionError

if TYPE_CHECKING:
    from posthoc.collect.outputs import Outputs
    from posthoc.evaluate.compare import Row


def compare(
    train: Annotated[str, typer.Argument(help=shared.DATA)],
    test: Annotated[str, typer.Option(help="Outputs and targets that neither the network nor any method has seen.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for a file a method, table.md and table.csv.")],
    methods: Annotated[str, typer.Option(help="all, or names with commas between: fmgp,temperature.")] = "all",
    task: shared.TaskOption = None,
    ood: Annotated[str | None, typer.Option(help="Outputs on out-of-distribution data, to detect.")] = None,
    val: Annotated[str | None, typer.Option(help="More outputs, for early stopping or choices.")] = None,
    config: shared.Config = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="One option: --set fmgp.steps=2000.")] = None,
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

    Each method runs in a process of its own, which shows its memory and
    keeps a crash from the others. Methods that need the network itself are
    not for files: posthoc.compare(model, ...) in Python runs those too.

    \b
    posthoc compare 'test.npz[:5000]' --test 'test.npz[5000:]' -o results
    posthoc compare fit.npz --test test.npz --ood svhn.npz \\
        --methods map,fmgp --set fmgp.steps=2000 -o results
    """
    from posthoc.evaluate.compare import REFUSALS, Comparison, Row
    from posthoc.io import require_folder, require_outside_outputs
    from posthoc.methods import REGISTRY, method_named

    chosen = REGISTRY if methods == "all" else [method_named(name.strip()).name for name in methods.split(",")]
    tables = options_by_method(shared.read_config(config, set_), list(chosen))
    paths = {"train": train, "test": test} | {role: path for role, path in (("ood", ood), ("val", val)) if path}
    columns = shared.read_columns(outputs=outputs, targets=targets, features=features, inputs=inputs)
    data = shared.open_data(paths, columns)
    kind = check_data(data, task, outputs_are or "logits")
    refused: list[Row] = []
    fits: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(chosen):
        method = method_named(name)
        options = method.known_options({"seed": seed, "outputs_are": outputs_are or "logits"}) | tables.get(name, {})
        try:
            if not method.black_box:
                raise DataError("needs the network itself: use posthoc.compare(model, ...) in Python.")
            shared.build_method(name, kind, options, device)
            fits[name] = options
        except REFUSALS as error:
            if name in tables and method.black_box:
                raise
            refused.append(Row(name, error=str(error), applies=False))
    written = [*(f"{name}-{seed}.json" for name in fits), "table.md", "table.csv"]
    if fits:
        require_outside_outputs(out)
        require_folder(out)
        for file in written:
            shared.require_output(out / file, force=force, inputs=(*paths.values(), config))
    comparison = Comparison(kind, tuple(refused))
    try:
        with shared.interruptible(f"{out} has the methods that were done"):
            for name, options in fits.items():
                typer.echo(f"{name} ...", err=True)
                try:
                    row, configuration = in_fresh_process(fit_and_score, name, kind, options, device, paths, columns)
                except BrokenProcessPool:
                    row = Row(name, error="its process was killed; was there memory enough?")
                    configuration = {"options": options}
                comparison = Comparison(kind, (*comparison.rows, row))
                run = {"task": kind, "seed": options.get("seed", seed), "device": device or "cpu", "data": paths}
                record = record_of(row) | run | {"configuration": configuration}
                # After each method: a long comparison may be interrupted.
                shared.write_text(out / f"{name}-{seed}.json", json.dumps(record, indent=2, default=str) + "\n")
                shared.write_text(out / "table.md", comparison.markdown())
                shared.write_text(out / "table.csv", comparison.csv())
    finally:
        comparison.show(title=f"Fitted on {shared.describe(data['train'])}, scored on {shared.describe(data['test'])}")
    if not comparison.figures:
        typer.echo("posthoc: no method could be fitted to these data", err=True)
        raise typer.Exit(1)
    typer.echo(f"wrote {', '.join(written)} to {out}")


def options_by_method(options: dict[str, Any], names: list[str]) -> dict[str, dict[str, Any]]:
    """The options of each method, from tables and from dotted names."""
    tables: dict[str, dict[str, Any]] = {}
    for key, value in options.items():
        name, dot, option = key.partition(".")
        if name not in names or not (dot or isinstance(value, dict)):
            known = f"The methods are: {', '.join(names)}; write fmgp.steps, for example."
            raise OptionError(f"Expected options of a method that is compared, got {key!r}. {known}")
        tables.setdefault(name, {}).update({option: value} if dot else value)
    return tables


def check_data(data: dict[str, Outputs], task: str | None, outputs_are: str) -> str:
    """The task, if the data are complete and fit each other."""
    from posthoc.evaluate.compare import reread, task_of
    from posthoc.methods.map import MAP

    for role, rows in data.items():
        reread(role, rows)
    kind = task or task_of(None, data["train"])
    if "ood" in data and kind != "classification":
        raise OptionError("Out-of-distribution data are for classification: leave --ood out for regression.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # every method will give these warnings
        bare = MAP(None, kind, outputs_are=outputs_are)
        for role in {"test", "val"} & data.keys():
            bare.fit(data["train"], val=data[role])
        if "ood" in data:
            bare.predict(data["ood"][:1])
    return kind


def record_of(row: Row) -> dict[str, Any]:
    """A row as JSON has it, and what it was computed with."""
    from posthoc.evaluate.cost import machine, versions

    record = asdict(row)
    del record["fitted"]
    figures = {name: value if math.isfinite(value) else None for name, value in record.pop("figures").items()}
    return {**record, **figures, "versions": versions(), "machine": machine()}


# The fits


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function in a process of its own, which ends when this one does, however that ends."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent) as pool:
        try:
            return pool.submit(function, *args).result()
        except (KeyboardInterrupt, SystemExit):
            for child in multiprocessing.active_children():
                child.kill()
            raise


def end_with_parent() -> None:
    """End this process when its parent has ended."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def fit_and_score(
    name: str, task: str, options: dict[str, Any], device: str | None, paths: dict[str, str], columns: shared.Columns
) -> tuple[Row, dict[str, Any]]:
    """A method's row and its configuration."""
    from posthoc.evaluate import cost
    from posthoc.evaluate.compare import trial

    with shared.messages_on_stderr():
        data = shared.open_data(paths, columns)
        cost.warm_up(device)
        row = trial(name, lambda: shared.build_method(name, task, options, device), **data)
    header = row.fitted._header() if row.fitted is not None else {}
    return replace(row, fitted=None), {**header, "options": {**options, **header.get("config", {})}}
