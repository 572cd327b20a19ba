"""Optional libraries, imported when they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from posthoc.errors import MissingExtraError

__all__ = ["require"]


def require(module: str, extra: str, purpose: str) -> Any:
    """A module of an optional library, or an error that says how to install it."""
    library = module.partition(".")[0]
    try:
        import_module(library)
    except ModuleNotFoundError as error:
        if error.name != library:  # the library is there; something it needs is not
            raise
        raise MissingExtraError(library, extra, purpose) from error
    return import_module(module)
