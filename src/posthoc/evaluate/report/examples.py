"""The inputs a method is most and least sure of, as pictures or as text."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any

from posthoc.evaluate.report.markup import element, text
from posthoc.evaluate.report.summary import CaseSummary, MethodSummary

__all__ = ["Gallery"]

SIGNATURE = b"\x89PNG\r\n\x1a\n"
LARGEST_PICTURE = 60_000
LONGEST_TEXT = 400
SHOWN = 8
"""Of each kind."""
Examples = dict[str, list[dict[str, Any]]]
KINDS = {"most_certain": "Most certain", "least_certain": "Least certain"}


class Gallery:
    """The examples of a page. A picture that several methods show is in the page once; each case has a share of what
    all pictures may weigh, and the best methods come first."""

    def __init__(self, cases: int, bytes_of_pictures: int = 800_000) -> None:
        self._share = bytes_of_pictures // max(cases, 1)
        self._numbers: dict[str, int] = {}

    def definitions(self) -> str:
        """The pictures, for the page to hold once."""
        symbols = (
            f'<symbol id="picture-{number}" viewBox="0 0 32 32"><image width="32" height="32" '
            f'href="data:image/png;base64,{picture}"/></symbol>'
            for picture, number in self._numbers.items()
        )
        found = "".join(symbols)
        return f'<svg class="defs" aria-hidden="true"><defs>{found}</defs></svg>' if found else ""

    def of(self, case: CaseSummary) -> str:
        """The block of a case: the first seed of each method, as far as there is room."""
        having = [method for method in case.methods if first_examples(method)]
        having.sort(key=lambda method: method.estimates["nll"].mean if "nll" in method.estimates else math.inf)
        parts: list[str] = []
        omitted: list[str] = []
        left = self._share
        for method in having:
            examples = first_examples(method)
            new = {
                picture for group in examples.values() for e in group if (picture := png_of(e))
            } - self._numbers.keys()
            if parts and sum(map(len, new)) > left:
                omitted.append(method.title)
                continue
            left -= sum(map(len, new))
            parts.append(self._method(method, examples, is_first=not parts))
        if not parts:
            return ""
        hint = element("p", "The first seed of each method, the one with the lowest NLL open.", class_="hint")
        note = f"Not shown, to keep this page small: {', '.join(omitted)}." if omitted else ""
        note = element("p", text(note), class_="hint") if note else ""
        return element("section", element("h4", "Examples") + hint + "".join(parts) + note, class_="block")

    def _method(self, method: MethodSummary, examples: Examples, *, is_first: bool) -> str:
        groups = "".join(
            element("h5", KINDS[kind]) + element("ul", "".join(map(self._example, group)), class_="examples")
            for kind, group in examples.items()
        )
        opened = " open" if is_first else ""
        return f"<details{opened}>{element('summary', text(method.title))}{groups}</details>"

    def _example(self, example: Mapping[str, Any]) -> str:
        said, target = (words(example.get(key)) for key in ("said", "target"))
        parts = []
        if picture := png_of(example):
            number = self._numbers.setdefault(picture, len(self._numbers))
            label = text(f"A picture of {target}" if target else "A picture")
            parts.append(f'<svg class="picture" role="img" aria-label="{label}"><use href="#picture-{number}"/></svg>')
        if example.get("text") is not None:
            parts.append(element("blockquote", text(words(example["text"], LONGEST_TEXT))))
        if not parts and example.get("row") is not None:
            parts.append(element("span", text(f"row {words(example['row'])}"), class_="row"))
        if said and target:
            right = said == target
            verdict = element("b", f"{'✓' if right else '✗'} {text(said)}", class_="right" if right else "wrong")
            parts.append(verdict + ("" if right else element("span", text(f"is {target}"))))
        numbers = [
            f"{value:.3f} {unit}".strip()
            for key, unit in (("probability", "sure"), ("entropy", "nats"))
            if isinstance(value := example.get(key), int | float)
        ]
        parts += [element("small", text(number)) for number in numbers]
        return element("li", "".join(parts))


def first_examples(method: MethodSummary) -> Examples:
    """Those of the first run that has any."""
    for run in method.counted:
        found: Examples = {}
        for kind in KINDS:
            if group := [example for example in run.examples.get(kind, []) if isinstance(example, dict)]:
                found[kind] = group[:SHOWN]
        if found:
            return found
    return {}


def png_of(example: Mapping[str, Any]) -> str | None:
    """A picture that is one and is small, as base64 without anything else."""
    given = example.get("png")
    if not isinstance(given, str) or len(given) > LARGEST_PICTURE:
        return None
    try:
        decoded = base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError):
        return None
    return base64.b64encode(decoded).decode("ascii") if decoded.startswith(SIGNATURE) else None


def words(value: Any, longest: int = 80) -> str:
    """A value as a short text; nothing of None."""
    found = "" if value is None else str(value)
    return found if len(found) <= longest else found[: longest - 1] + "…"
