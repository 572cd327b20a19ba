"""Kernels by name and options, as head files and the command line have them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from posthoc.errors import OptionError
from posthoc.kernels import RBF, Constant, Kernel, Linear, Matern, Product, Sum, White

__all__ = ["kernel_from_spec", "same_form"]

PAIRS: dict[str, type[Kernel]] = {"sum": Sum, "product": Product}
KINDS: dict[str, type[Kernel]] = {
    "rbf": RBF,
    "matern": Matern,
    "linear": Linear,
    "constant": Constant,
    "white": White,
    **PAIRS,
}


def kernel_from_spec(spec: Any) -> Kernel:
    """A kernel from `Kernel.spec()`, its parameters to be loaded afterwards, or from `Kernel.recipe()`."""
    if not isinstance(spec, Mapping):
        raise OptionError(f"Expected a kernel as a table of its type and options, got {spec!r}.")
    options = dict(spec)
    kind, start = options.pop("type", None), options.pop("start", {})
    if not isinstance(kind, str) or kind not in KINDS:
        raise OptionError(f"Expected a kernel of {', '.join(KINDS)}, got {kind!r}.")
    signature = inspect.signature(KINDS[kind])
    try:
        signature.bind(**options)
    except TypeError as error:
        which, found = "both of" if kind in PAIRS else "some of", ", ".join(map(str, options)) or "none"
        known = ", ".join(signature.parameters)
        raise OptionError(f"Expected the kernel {kind!r} with {which} its options, {known}; got {found}.") from error
    if kind in PAIRS:
        options = {side: kernel_from_spec(part) for side, part in options.items()}
    kernel = KINDS[kind](**options)
    try:
        kernel.begin(start)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise OptionError(
            f"Expected first values of the kernel {kind!r}, as its recipe has them, got {start}."
        ) from error
    return kernel


def same_form(a: Any, b: Any) -> bool:
    """Whether two specs or recipes are of kernels of one form. A block that was not named may become any."""
    if not isinstance(a, Mapping) or not isinstance(b, Mapping):
        return bool(a == b)
    names = (a.keys() | b.keys()) - {"start"}
    free = {"on"} if a.get("on") is None or b.get("on") is None else set()
    return all(same_form(a.get(name), b.get(name)) for name in names - free)
