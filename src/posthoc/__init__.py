"""posthoc: honest error bars on any pre-trained neural network.

Names are imported when they are first used, so that `import posthoc` is fast. Which names there are, and where they
come from, is written once: in `__init__.pyi`, which type checkers and editors read too.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
ORIGIN = {
    alias.name: str(node.module) for node in STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names
}
"""The module that each name is imported from; the package itself for its sub-packages."""

__all__ = ["__version__", *(name for name, module in ORIGIN.items() if module != "posthoc")]


def __getattr__(name: str) -> Any:
    if name not in ORIGIN:
        raise AttributeError(f"module 'posthoc' has no attribute {name!r}")
    if ORIGIN[name] == "posthoc":
        return import_module(f"posthoc.{name}")
    value = getattr(import_module(ORIGIN[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *ORIGIN})
