"""The `posthoc` command, its subcommands, and how errors are shown."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import typer

from posthoc.cli import collect, compare, demo, evaluate, fit, predict, report
from posthoc.errors import PosthocError, PosthocWarning

__all__ = ["app", "main", "run"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
COMMANDS = (
    demo.demo,
    collect.collect,
    fit.fit,
    predict.predict,
    evaluate.evaluate,
    compare.compare,
    report.report,
)
for command in COMMANDS:
    app.command()(command)


def print_version(wanted: bool) -> None:
    """Prints the version and stops."""
    if wanted:
        from posthoc import __version__

        typer.echo(f"posthoc {__version__}")
        raise typer.Exit


@app.callback()
def posthoc(
    version: bool = typer.Option(False, "--version", callback=print_version, is_eager=True, help="Print the version."),
) -> None:
    """Honest error bars on any pre-trained neural network."""


def main() -> None:
    """Run the `posthoc` command."""
    run(app)


def run(app: typer.Typer) -> None:
    """Run a command line: errors we know become one line and exit code 1, warnings become one line."""
    plain = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, PosthocWarning):
            typer.echo(f"posthoc: {message}", err=True)
        else:
            plain(message, category, *where, **more)

    warnings.showwarning = show
    try:
        app()
    except PosthocError as error:
        typer.echo("\n".join([f"posthoc: {error}", *getattr(error, "__notes__", ())]), err=True)
        sys.exit(1)
    except OSError as error:
        typer.echo(f"posthoc: {error.strerror or error}: {error.filename or ''}".rstrip(": "), err=True)
        sys.exit(1)
