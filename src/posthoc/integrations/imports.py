"""Objects named by import strings such as `package.module:name`. To import is to run code: only where it is trusted."""

from __future__ import annotations

import os
import sys
from functools import reduce
from importlib import import_module
from typing import Any

from posthoc.errors import OptionError

__all__ = ["import_object", "require_trust"]


def require_trust(what: str, trusted: bool) -> None:
    """Refuses to run code that nobody has vouched for."""
    if not trusted:
        raise OptionError(
            f"{what} runs code of its own, which could do anything. If you trust where it comes from, add --trust-code "
            "(trust_code=True in Python)."
        )


def import_object(string: str, *, trust_code: bool) -> Any:
    """What an import string names; the current folder is searched first, as by `python -m`."""
    require_trust(f"Importing {string!r}", trust_code)
    module, _, name = string.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = import_module(module)
    except ImportError as error:
        raise OptionError(
            f"Expected an import string such as package.module:name, got {string!r}, which cannot be imported "
            f"({error}). The current folder and the installed packages were searched."
        ) from error
    try:
        return reduce(getattr, name.split("."), found)
    except AttributeError as error:
        public = [key for key in vars(found) if not key.startswith("_")]
        raise OptionError(
            f"Expected a name in module {module!r}, got {name!r}. It has: {', '.join(public[:20]) or 'none'}."
        ) from error
