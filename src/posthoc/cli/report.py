"""`posthoc report`: a folder of results as one page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from posthoc.cli.options import Force, refuse

__all__ = ["report"]


def report(
    results: Annotated[Path, typer.Argument(help="A folder that reproduce or compare wrote, or one of such folders.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    force: Force = False,
) -> None:
    """Puts all that a folder of results has to show on one page: tables, charts, examples, and how it was run.

    The page is one HTML file that loads nothing: send it to anybody, open it in any browser.

    \b
    posthoc report results -o report.html
    """
    from posthoc.evaluate.report.page import write_report

    refuse(out, force)
    found = write_report(results, out)
    for warning in found.warnings:
        typer.echo(f"posthoc: {warning}", err=True)
    typer.echo(f"wrote {out}: {len(found.records)} runs")
