"""Kernels by name and options, as head files and the command line have them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from posthoc.errors import FileError, OptionError
from posthoc.kernels import RBF, Constant, Kernel, Linear, Matern, Product, Sum, White, as_kernel
from posthoc.registry import Registry

KERNELS = Registry("posthoc.kernels", {k.name: k for k in (RBF, Matern, Linear, Constant, White, Sum, Product)})
"""Every kernel by name. Another package adds its own by an entry point of the group "posthoc.kernels"."""


def kernel_from_spec(spec: Any) -> Kernel:
    """A kernel from `Kernel.spec()`, its parameters to be loaded afterwards, or from `Kernel.recipe()`."""
    if not isinstance(spec, Mapping):
        raise OptionError(f"Expected a kernel as a table of its type and options, got {spec!r}.")
    options = dict(spec)
    kind, start = options.pop("type", None), options.pop("start", {})
    if not isinstance(kind, str) or kind not in KERNELS:
        why = ": a GPyTorch kernel is not built by name, since that would run code" if kind == "gpytorch" else ""
        raise OptionError(f"Expected a kernel of {', '.join(KERNELS)}, got {kind!r}{why}.")
    options |= {side: kernel_from_spec(options[side]) for side in ("left", "right") if side in options}
    try:
        kernel: Kernel = KERNELS[kind](**options)
        if start:
            kernel.set_start(start)
    except OptionError:
        raise
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        known = ", ".join(inspect.signature(KERNELS[kind]).parameters)
        found = f"a start as its recipe has it; got {dict(spec)}"
        raise OptionError(f"Expected the kernel {kind!r} with options of {known}, and {found}.") from error
    return kernel


def same_form(a: Any, b: Any) -> bool:
    """Whether two specs or recipes are of kernels of one form. A block that was not named may become any."""
    if not isinstance(a, Mapping) or not isinstance(b, Mapping):
        return bool(a == b)
    names = (a.keys() | b.keys()) - {"start"}
    free = {"on"} if a.get("on") is None or b.get("on") is None else set()
    return all(same_form(a.get(name), b.get(name)) for name in names - free)


def kernel_from_file(recipe: Mapping[str, Any], given: Any | None) -> Kernel:
    """The kernel of a file, unfitted: built by name or, where that cannot be, the one given to `load`. Raises
    `FileError` if it was not given, or is of another form."""
    kernel = as_kernel(given) if given is not None else None
    if kernel is not None and not same_form(kernel.spec(), recipe):
        found = f"found {kernel.spec()}: give one of the same form"
        raise FileError(f"Expected the kernel this head was fitted with, {recipe}, {found}.")
    try:
        return kernel_from_spec(recipe)
    except OptionError as error:
        if kernel is not None:
            return kernel
        advice = "load(path, kernel=...) with one of the same form"
        raise FileError(f"{error} The kernel of this head is {dict(recipe)}: {advice}.") from error
