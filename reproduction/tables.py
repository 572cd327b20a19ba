"""Tables of an experiment as Markdown, CSV and LaTeX: means and standard errors over seeds."""

from __future__ import annotations

from posthoc.evaluate.report.aggregates import csv_means, latex_means, markdown_means, write_tables

__all__ = ["csv_means", "latex_means", "markdown_means", "write_tables"]
