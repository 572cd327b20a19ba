"""HTML as text: the one place where strings of data become markup."""

from __future__ import annotations

from html import escape
from typing import Any

__all__ = ["attributes", "element", "text"]


def text(value: Any) -> str:
    """A string of data, for an element's content or an attribute in double quotes."""
    plain = str(value).encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair cannot be written
    return escape("".join(sign for sign in plain if sign >= " " or sign in "\n\t"), quote=True)


def attributes(values: dict[str, Any]) -> str:
    """Attributes, each with a space before it: `class_` is class, `aria_label` is aria-label; None is left out."""
    given = ((name.rstrip("_").replace("_", "-"), value) for name, value in values.items() if value is not None)
    return "".join(f' {name}="{text(value)}"' for name, value in given)


def element(name: str, content: str = "", /, **values: Any) -> str:
    """An element around markup: what is not markup yet goes through `text` first."""
    return f"<{name}{attributes(values)}>{content}</{name}>"
