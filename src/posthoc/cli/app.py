"""The `posthoc` command, its subcommands, and how errors are shown."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from posthoc.cli.collect import collect
from posthoc.cli.compare import compare
from posthoc.cli.demo import demo
from posthoc.cli.evaluate import evaluate
from posthoc.cli.fit import fit
from posthoc.cli.predict import predict
from posthoc.cli.report import report
from posthoc.cli.shared import messages_on_stderr
from posthoc.errors import PosthocError, shortened

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for command in (demo, collect, fit, predict, evaluate, compare, report):
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


def main(app: typer.Typer = app) -> None:
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
    typer.echo(shortened(f"posthoc: {shown}"), err=True)
    sys.exit(1)
