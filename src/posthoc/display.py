"""HTML tables for notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree


def html_table(caption: str, columns: Mapping[str, Sequence[Any]], rows: int = 5) -> str:
    """A table as HTML, for `_repr_html_`.

    Args:
        caption: The text above the table.
        columns: The values of each column by its name; all columns have the same length.
        rows: How many rows are shown; a last row "…" stands for those left out.

    Returns:
        The HTML, with all text escaped.

    Example:
        >>> html_table("points", {"mean": [0.5]})
        '<table><caption>points</caption><tr><th>mean</th></tr><tr><td>0.5</td></tr></table>'
    """
    table = ElementTree.Element("table")
    ElementTree.SubElement(table, "caption").text = caption
    lines: list[tuple[Any, ...]] = list(zip(*(values[:rows] for values in columns.values()), strict=True))
    if any(len(values) > rows for values in columns.values()):
        lines.append(("…",) * len(columns))
    for tag, line in [("th", tuple(columns)), *(("td", line) for line in lines)]:
        row = ElementTree.SubElement(table, "tr")
        for value in line:
            ElementTree.SubElement(row, tag).text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return ElementTree.tostring(table, encoding="unicode", method="html")
