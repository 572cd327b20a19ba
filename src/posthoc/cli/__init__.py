"""The command line: one file a command."""

from posthoc.cli.app import app, main

__all__ = ["app", "main"]
