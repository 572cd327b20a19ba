"""The `posthoc` command, its subcommands, and how errors are shown."""

from __future__ import annotations

import logging
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer

from posthoc.cli import collect, compare, demo, evaluate, fit, predict, report
from posthoc.cli.shared import log_to_stderr
from posthoc.errors import PosthocError, PosthocWarning

__all__ = ["app", "main", "run"]

LONGEST_MESSAGE = 1000
"""The most characters of an error message."""

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for command in (
    demo.demo,
    collect.collect,
    fit.fit,
    predict.predict,
    evaluate.evaluate,
    compare.compare,
    report.report,
):
    app.command()(command)


def print_version(wanted: bool) -> None:
    """Print the version and stop."""
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
    """Run a command line: known errors become one line and exit code 1, warnings become one line."""
    with messages_on_stderr():
        try:
            app()
        except PosthocError as error:
            fail("\n".join([str(error), *getattr(error, "__notes__", ())]))
        except OSError as error:
            fail(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "))


def fail(message: str) -> NoReturn:
    """Print an error and exit. Control characters, which names in files may contain, are escaped."""
    shown = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in message)
    if len(shown) > LONGEST_MESSAGE:
        shown = f"{shown[: LONGEST_MESSAGE - 300]} ... {shown[-290:]}"
    typer.echo(f"posthoc: {shown}", err=True)
    sys.exit(1)


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

    def terminate(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    handler = log_to_stderr()
    previous = signal.signal(signal.SIGTERM, terminate)
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = show_warning
        signal.signal(signal.SIGTERM, previous)
        logging.getLogger("posthoc").removeHandler(handler)
