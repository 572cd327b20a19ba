"""Options that several commands share, and what they mean."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posthoc.errors import FileError, OptionError

if TYPE_CHECKING:
    from posthoc.collect.outputs import Outputs

__all__ = [
    "Device",
    "Engine",
    "Features",
    "Force",
    "Inputs",
    "OutputColumns",
    "Targets",
    "open_data",
    "read_config",
    "refuse",
]


class Engine(StrEnum):
    """Who does the work."""

    local = "local"
    ray = "ray"


COLUMNS = "Columns of a table (Parquet or CSV)"

Force = Annotated[bool, typer.Option("--force", help="Overwrite what is there.")]
Device = Annotated[str | None, typer.Option(help="Where to compute: cpu, cuda, cuda:1. Default: the CPU.")]
OutputColumns = Annotated[
    str | None,
    typer.Option("--outputs", help="Columns with the outputs: names with commas between, or a pattern: 'logit_*'.",
                 rich_help_panel=COLUMNS),
]  # fmt: skip
Targets = Annotated[str | None, typer.Option("--targets", help="The column with the truth.", rich_help_panel=COLUMNS)]
Features = Annotated[str | None, typer.Option("--features", help="Columns with the features.", rich_help_panel=COLUMNS)]
Inputs = Annotated[str | None, typer.Option("--inputs", help="Columns with the inputs.", rich_help_panel=COLUMNS)]


def open_data(
    path: str,
    outputs: str | None,
    targets: str | None = None,
    features: str | None = None,
    inputs: str | None = None,
) -> Outputs:
    """The outputs at a path, from the columns named where it is a table."""
    from posthoc.collect import open_outputs

    return open_outputs(path, columns=columns_named(outputs, targets, features, inputs))


def columns_named(
    outputs: str | None, targets: str | None = None, features: str | None = None, inputs: str | None = None
) -> dict[str, str | list[str]] | None:
    """The columns of a table by what they hold, or None where none is named."""
    named = {"outputs": outputs, "targets": targets, "features": features, "inputs": inputs}
    return {role: listed(names) for role, names in named.items() if names is not None} or None


def listed(names: str) -> str | list[str]:
    """A single column by its name, or several."""
    parts = [name.strip() for name in names.split(",")]
    return parts if len(parts) > 1 or "*" in names else parts[0]


def read_config(path: Path | None, settings: list[str]) -> dict[str, Any]:
    """A method's options from a TOML file, and from `--set name=value`, which comes after it."""
    import tomllib

    options: dict[str, Any] = {}
    try:
        if path is not None:
            options = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FileError(f"Expected TOML in {path}, found something else ({error}).") from error
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise OptionError(f"Expected --set name=value, got {setting!r}.")
        try:
            options[name.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            options[name.strip()] = value.strip()  # a word without its quotes
    return options


def refuse(path: Path, force: bool) -> None:
    """Refuses, before the work and not after it, to overwrite a file or to write where one cannot."""
    from posthoc.io import require_writable

    require_writable(path)
    if path.exists() and not force:
        raise FileError(
            f"Expected a new file to write, found {os.fspath(path)} there already: use --force, or another."
        )
