"""Options that several commands share, and how commands read their inputs, check their outputs and show messages."""

from __future__ import annotations

import logging
import signal
import sys
import tomllib
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from posthoc.errors import FileError, OptionError, PosthocWarning

if TYPE_CHECKING:
    from posthoc.base import Method
    from posthoc.collect.outputs import Outputs

DATA = "Outputs on data that the network has not memorized, as a file or folder; 'file.npz[:5000]' for some rows."

YES, NO = ("true", "yes", "y", "on"), ("false", "no", "n", "off")

Engine = Literal["local", "ray"]
Kind = Literal["logits", "log-probs", "probs"]

Force = Annotated[bool, typer.Option("--force", help="Overwrite existing results.")]
EngineOption = Annotated[Engine, typer.Option("--engine", help="This process, or a Ray cluster (extra: ray).")]
TASKS = "regression, classification, or a likelihood that is registered. Default: known from the targets."
TaskOption = Annotated[str | None, typer.Option("--task", help=TASKS)]
OutputsAre = Annotated[Kind | None, typer.Option(help="What a classifier's outputs are. Default: logits.")]
Config = Annotated[Path | None, typer.Option(help="The options of methods, as TOML.")]
Seed = Annotated[int | None, typer.Option(min=0, max=2**32 - 1, help="Seed of everything random.")]
Device = Annotated[str | None, typer.Option(help="Where to compute: cpu, cuda, cuda:1. Default: the CPU.")]
column_option = partial(typer.Option, rich_help_panel="Columns of a table (Parquet or CSV)")
OutputColumns = Annotated[str | None, column_option("--outputs", help="Names (p_cat,p_dog), or a pattern: 'p_*'.")]
Targets = Annotated[str | None, column_option("--targets", help="The column with the targets.")]
Features = Annotated[str | None, column_option("--features", help="Columns with the features.")]
Inputs = Annotated[str | None, column_option("--inputs", help="Columns with the inputs.")]

Columns = dict[str, str | list[str]] | None
"""The columns of tables by what they hold, as `open_outputs` takes them."""


# Inputs


def read_columns(**options: str | None) -> Columns:
    """The columns that the options name, or None where none is named."""
    named = {role: [name.strip() for name in text.split(",")] for role, text in options.items() if text is not None}
    return {role: names if len(names) > 1 or "*" in names[0] else names[0] for role, names in named.items()} or None


def read_config(path: Path | None, settings: list[str] | None) -> dict[str, Any]:
    """A method's options from a TOML file, and from `--set name=value`, which comes after it."""
    from posthoc.io import parsing, require_regular

    options: dict[str, Any] = {}
    if path is not None:
        require_regular(path)
        with parsing(path, f"TOML in {path}"):
            options = tomllib.loads(path.read_text(encoding="utf-8"))
    for setting in settings or ():
        name, equals, value = setting.partition("=")
        if not equals:
            raise OptionError(f"Expected --set name=value, got {setting!r}.")
        options[name.strip()] = read_value(value.strip())
    return options


def read_value(text: str) -> Any:
    """A value of `--set`: TOML, a boolean as people write it, or a word without quotes."""
    if text.lower() in (*YES, *NO):
        return text.lower() in YES
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def build_method(name: str, task: str, options: dict[str, Any], device: str | None) -> Method:
    """A method by name, with its options."""
    from posthoc.kernels.registry import kernel_from_spec
    from posthoc.likelihoods.registry import make_likelihood
    from posthoc.methods import method_named

    options = dict(options)
    table = options.pop("likelihood", {})
    if not isinstance(table, dict) or "type" in table:
        raise OptionError("Expected [likelihood] to be a table of options, and the task to come from --task.")
    if isinstance(spec := options.get("kernel"), dict | str):
        options["kernel"] = kernel_from_spec({"type": spec} if isinstance(spec, str) else spec)
    if device is not None:
        options["device"] = device
    return method_named(name)(None, make_likelihood({"type": task, **table}), **options)


def open_data(paths: dict[str, str], columns: Columns) -> dict[str, Outputs]:
    """The outputs by their role; those out of distribution without targets."""
    from posthoc.collect import open_outputs

    bare = {part: names for part, names in (columns or {}).items() if part != "targets"} or None
    return {role: open_outputs(path, columns=bare if role == "ood" else columns) for role, path in paths.items()}


def describe(rows: Outputs) -> str:
    """The size of some outputs, in words."""
    blocks = {name: block for name in ("outputs", "features", "inputs") if (block := rows.space(name)) is not None}
    sizes = [f"{block.shape[1]:,} {name if block.shape[1] != 1 else name[:-1]}" for name, block in blocks.items()]
    return f"{len(rows):,} rows ({', '.join(sizes)})"


# Outputs


def require_output(path: Path, *, force: bool, inputs: Iterable[str | Path | None] = ()) -> None:
    """Refuse, before the work, a file that cannot be written, or that exists, if not `force`.

    The inputs of the same command are never replaced.
    """
    from posthoc.collect.files import split_range
    from posthoc.io import require_outside_outputs, require_writable

    require_writable(path)
    require_outside_outputs(path)
    if not path.exists():
        return
    for name in inputs:
        if name is not None and (given := split_range(name)[0]).exists() and path.samefile(given):
            raise FileError(f"Expected another file to write than the input {name}.")
    if not force:
        raise FileError(f"Expected a new file to write, found {path} there already: use --force, or another.")


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    from posthoc.io import atomic_path

    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


# Messages


@contextmanager
def interruptible(advice: str) -> Iterator[None]:
    """Say what to do after an interruption from the keyboard."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"posthoc: interrupted; {advice}", err=True)
        raise typer.Exit(130) from None  # as shells do


@contextmanager
def messages_on_stderr() -> Iterator[None]:
    """Inside, warnings and log messages are lines on stderr, and SIGTERM raises SystemExit, so that temporary files
    are removed."""
    show_warning = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, PosthocWarning):
            typer.echo(f"posthoc: {message}", err=True)
        else:
            show_warning(message, category, *where, **more)

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("posthoc: %(message)s"))
    logger = logging.getLogger("posthoc")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = show_warning
        signal.signal(signal.SIGTERM, previous)
        logger.removeHandler(handler)
