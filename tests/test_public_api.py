"""The public names and their signatures, as recorded in `tests/golden/api.txt`.

A change that is meant is recorded anew, so that the diff of that file shows it to the reviewer:

    python -m tests.test_public_api --record
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import posthoc
from posthoc.methods import REGISTRY

SNAPSHOT = Path(__file__).parent / "golden" / "api.txt"


def snapshot() -> str:
    """All public names in order, with what can be called and how."""
    lines = [line for name in sorted(posthoc.__all__) for line in described(name, getattr(posthoc, name))]
    lines += ["", "methods in the registry"]
    lines += [f"    {name}: {kind.__name__}" for name, kind in sorted(REGISTRY.items())]
    return "\n".join(lines).lstrip("\n") + "\n"


def described(name: str, value: Any) -> Iterator[str]:
    """A public object and, of a class, its public members, with one parameter a line."""
    yield ""
    if inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object and base.__name__[0] != "_")
        yield f"class {name}({bases})" if bases else f"class {name}"
        for member, what in sorted(members(value).items()):
            yield from ("    " + line for line in of_member(member, what))
    elif callable(value):
        yield from of_function(f"def {name}", value)
    else:
        yield f"{name}: {type(value).__name__}"


def members(kind: type) -> dict[str, Any]:
    """The constructor and the public attributes of a class that are this package's own."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.split(".")[0] == "posthoc":
            found |= {name: what for name, what in vars(base).items() if name == "__init__" or name[0] != "_"}
    return found


def of_member(name: str, what: Any) -> Iterator[str]:
    if isinstance(what, property):
        yield f"{name}: property"
    elif isinstance(what, classmethod | staticmethod):
        yield from of_function(f"{type(what).__name__} {name}", what.__func__)
    elif inspect.isfunction(what):
        yield from of_function(f"def {name}", what)
    else:
        yield f"{name}: {type(what).__name__}"


def of_function(head: str, function: Any) -> Iterator[str]:
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    keyword_only = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    returns = "" if signature.return_annotation is signature.empty else f" -> {text(signature.return_annotation)}"
    if not parameters:
        yield f"{head}(){returns}"
        return
    yield f"{head}("  # a line for each parameter: in one long line a diff is hard to see
    for p in parameters:
        if keyword_only and p is keyword_only[0] and not any(q.kind is q.VAR_POSITIONAL for q in parameters):
            yield "    *,"
        yield f"    {parameter(p)},"
    yield f"){returns}"


def parameter(p: inspect.Parameter) -> str:
    star = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
    annotation = "" if p.annotation is p.empty else f": {text(p.annotation)}"
    default = "" if p.default is p.empty else f" = {text(repr(p.default))}"
    return f"{star}{p.name}{annotation}{default}"


def text(value: Any) -> str:
    """An annotation, or the repr of a default, without addresses, which differ from one process to the next."""
    return re.sub(r" at 0x[0-9a-f]+", "", value if isinstance(value, str) else inspect.formatannotation(value))


def test_the_public_api_is_as_recorded():
    recorded, found = SNAPSHOT.read_text().splitlines(), snapshot().splitlines()
    shown = "\n".join(difflib.unified_diff(recorded, found, lineterm="", n=2))
    assert not shown, f"the public API differs; if it should: python -m tests.test_public_api --record\n{shown}"


def test_public_names_have_docstrings():
    public = {name: getattr(posthoc, name) for name in posthoc.__all__ if name != "__version__"}
    public |= {f"plots.{name}": getattr(posthoc.plots, name) for name in posthoc.plots.__all__}
    for name, kind in [(name, what) for name, what in public.items() if inspect.isclass(what)]:
        attributes = {member: getattr(kind, member) for member in members(kind) if member != "__init__"}
        is_code = {member: isinstance(what, property) or inspect.isroutine(what) for member, what in attributes.items()}
        public |= {f"{name}.{member}": what for member, what in attributes.items() if is_code[member]}
    assert not [name for name, what in public.items() if not inspect.getdoc(what)]


if __name__ == "__main__" and sys.argv[1:] == ["--record"]:
    SNAPSHOT.write_text(snapshot())
    print(f"recorded {SNAPSHOT}")
