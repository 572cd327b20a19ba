"""`posthoc report`: a folder of results as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from posthoc.cli.shared import Force, require_output


def report(
    results: Annotated[Path, typer.Argument(help="A folder that compare wrote, or a folder of such folders.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    force: Force = False,
) -> None:
    """Writes the results of a folder as one page: tables, charts, examples, and how it was run.

    The page is one HTML file that loads nothing: it opens in any browser.

    \b
    posthoc report results -o report.html
    """
    from posthoc.evaluate.report.page import write_report

    require_output(out, force=force, inputs=results.rglob("*.json"))
    written = write_report(results, out)
    for warning in written.warnings:
        typer.echo(f"posthoc: {warning}", err=True)
    typer.echo(f"wrote {out}: {len(written.records)} runs")
