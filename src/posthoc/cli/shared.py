"""Options that several commands share, and how commands read their inputs and check their outputs."""

from __future__ import annotations

import logging
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posthoc.errors import FileError, OptionError

if TYPE_CHECKING:
    from posthoc.base import Method
    from posthoc.collect.outputs import Outputs

LARGEST_SEED = 2**63 - 1
MAX_CONFIG = 2**20
"""The largest TOML file that is read, in bytes."""

INTERRUPTED = 130
"""The exit code of a command that was interrupted from the keyboard."""


class Engine(StrEnum):
    """What runs the work."""

    local = "local"
    ray = "ray"


class Task(StrEnum):
    """What is predicted."""

    regression = "regression"
    classification = "classification"


class Kind(StrEnum):
    """What a classifier's outputs are."""

    logits = "logits"
    log_probs = "log-probs"
    probs = "probs"


DATA = (
    "Outputs on data that the network has not memorized: a .npz, .safetensors, Parquet or CSV file, or a folder; "
    "'file.npz[:5000]' for some rows."
)

Force = Annotated[bool, typer.Option("--force", help="Overwrite existing results.")]
EngineOption = Annotated[Engine, typer.Option("--engine", help="This process, or a Ray cluster (extra: ray).")]
TaskOption = Annotated[Task | None, typer.Option("--task", help="What is predicted. Default: known from the targets.")]
OutputsAre = Annotated[Kind | None, typer.Option(help="What a classifier's outputs are. Default: logits.")]
Config = Annotated[Path | None, typer.Option(help="The options of methods, as TOML.")]
Seed = Annotated[int | None, typer.Option(min=0, max=LARGEST_SEED, help="Seed of everything random.")]
Device = Annotated[str | None, typer.Option(help="Where to compute: cpu, cuda, cuda:1. Default: the CPU.")]
column_option = partial(typer.Option, rich_help_panel="Columns of a table (Parquet or CSV)")
OutputColumns = Annotated[
    str | None, column_option("--outputs", help="Names with commas between, or a pattern: 'p_*'.")
]
Targets = Annotated[str | None, column_option("--targets", help="The column with the targets.")]
Features = Annotated[str | None, column_option("--features", help="Columns with the features.")]
Inputs = Annotated[str | None, column_option("--inputs", help="Columns with the inputs.")]


# Inputs


@dataclass(frozen=True)
class Columns:
    """The columns of tables, as the options name them."""

    outputs: str | None = None
    targets: str | None = None
    features: str | None = None
    inputs: str | None = None

    def named(self) -> dict[str, str | list[str]] | None:
        """The columns by what they hold, or None where none is named."""
        lists = {}
        for role, text in vars(self).items():
            if text is not None:
                names = [name.strip() for name in text.split(",")]
                lists[role] = names if len(names) > 1 or "*" in text else names[0]
        return lists or None

    def open(self, path: str) -> Outputs:
        """The outputs at a path."""
        from posthoc.collect import open_outputs

        return open_outputs(path, columns=self.named())


def read_config(path: Path | None, settings: list[str]) -> dict[str, Any]:
    """A method's options from a TOML file, and from `--set name=value`, which comes after it."""
    import tomllib

    options: dict[str, Any] = {}
    if path is not None:
        try:
            if not stat.S_ISREG(path.stat().st_mode) or path.stat().st_size > MAX_CONFIG:
                raise FileError(f"Expected a TOML file of at most {MAX_CONFIG:,} bytes as --config, got {path}.")
            options = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FileError(f"Expected TOML in {path}, found something else ({error}).") from error
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise OptionError(f"Expected --set name=value, got {setting!r}.")
        options[name.strip()] = read_value(value.strip())
    return options


def read_value(text: str) -> Any:
    """A value of `--set`: TOML, a boolean as people write it, or a word without quotes."""
    import tomllib

    booleans = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if text.lower() in booleans:
        return booleans[text.lower()]
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
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
    likelihood = make_likelihood({"type": task, **table})
    if isinstance(options.get("kernel"), dict | str):
        spec = options["kernel"]
        options["kernel"] = kernel_from_spec({"type": spec} if isinstance(spec, str) else spec)
    return method_named(name)(None, likelihood, device=device, **options)


def describe(rows: Outputs) -> str:
    """The size of some outputs, in words."""
    widths = {name: rows.space(name) for name in ("outputs", "features", "inputs")}
    sizes = [
        f"{block.shape[1]:,} {name if block.shape[1] != 1 else name[:-1]}"
        for name, block in widths.items()
        if block is not None
    ]
    return f"{len(rows):,} rows ({', '.join(sizes)})"


# Outputs


def require_output(path: Path, *, force: bool, inputs: Iterable[str | Path | None] = ()) -> None:
    """Refuse, before the work, an output that cannot or must not be written.

    Args:
        path: The file to write.
        force: Whether an existing file may be replaced.
        inputs: The inputs of the same command, which are never replaced.
    """
    from posthoc.collect.files import split_range
    from posthoc.io import require_writable

    require_writable(path)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise FileError(f"Expected the path of a regular file to write, found a link or a device: {path}.")
    if (path.parent / "outputs.json").exists():
        raise FileError(f"Expected a place outside folders of outputs, got {path}: write elsewhere.")
    for name in inputs:
        given = split_range(name)[0] if name is not None else None
        if given is not None and given.exists() and path.exists() and path.samefile(given):
            raise FileError(f"Expected another file to write than the input {name}.")
    if path.exists() and not force:
        raise FileError(f"Expected a new file to write, found {path} there already: use --force, or another.")


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    from posthoc.io import atomic_path, writing

    with writing(path, "Make room, or write elsewhere."), atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


# Messages


@contextmanager
def interruptible(advice: str) -> Iterator[None]:
    """Say what to do after an interruption from the keyboard."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"posthoc: interrupted; {advice}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def log_to_stderr() -> logging.Handler:
    """Show the messages of the package on stderr; returns the handler."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("posthoc: %(message)s"))
    logger = logging.getLogger("posthoc")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return handler
