"""Optional libraries, imported when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from posthoc.errors import MissingExtraError


def require(module: str, extra: str, purpose: str) -> Any:
    """Import a module of an optional library.

    Args:
        module: Name of the module, such as `"pyarrow.parquet"`.
        extra: The extra of posthoc that installs the library.
        purpose: What needs it, as the subject of the error message.

    Raises:
        MissingExtraError: The library is not installed.

    Example:
        >>> require("json", "none", "Reading JSON").loads("[1]")
        [1]
    """
    library = module.partition(".")[0]
    try:
        import_module(library)
    except ModuleNotFoundError as error:
        if error.name != library:  # the library is installed, one of its own dependencies is not
            raise
        raise MissingExtraError(library, extra, purpose) from error
    return import_module(module)
