"""Kernels by name and options, as head files and the command line have them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor

from posthoc.errors import DataError, FileError, OptionError
from posthoc.kernels import RBF, Constant, Kernel, Linear, Matern, Points, Product, Sum, White, as_kernel

__all__ = ["kernel_from_file", "kernel_from_spec", "kernel_of_head", "same_form"]

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
        why = ": a GPyTorch kernel is not built by name, since that would run code" if kind == "gpytorch" else ""
        raise OptionError(f"Expected a kernel of {', '.join(KINDS)}, got {kind!r}{why}.")
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


def kernel_from_file(recipe: Mapping[str, Any], given: Any | None) -> Kernel:
    """The kernel of a file, unfitted: built by name or, where that cannot be, the one given to `load`."""
    kernel = as_kernel(given) if given is not None else None
    if kernel is not None and not same_form(kernel.spec(), recipe):
        raise FileError(
            f"Expected the kernel this head was fitted with, {recipe}, found {kernel.spec()}: "
            "give one of the same form."
        )
    try:
        return kernel_from_spec(recipe)
    except OptionError as error:
        return kernel if kernel is not None else NotGiven(recipe, str(error))


def kernel_of_head(asked: Kernel, spec: Any) -> Kernel:
    """The kernel of a fitted head, its parameters to be loaded afterwards: that which was asked for or, since
    temperature scaling has no use for it, a constant one."""
    if same_form(asked.spec(), spec):
        return copy.deepcopy(asked)
    if spec == Constant().spec():
        return Constant()
    raise DataError(f"a head with the kernel {spec}, fitted for {asked.spec()}")


class NotGiven(Kernel):
    """Stands for a kernel that a file names but that was not given to `load`: only its form is known. A head that has
    no use for it predicts all the same."""

    def __init__(self, recipe: Mapping[str, Any], why: str) -> None:
        super().__init__()
        self.named, self.why = dict(recipe), why

    def spec(self) -> dict[str, Any]:
        return self.named

    def recipe(self) -> dict[str, Any]:
        return self.named

    def forward(self, a: Points, b: Points) -> Tensor:
        self._ask()

    def diag(self, a: Points) -> Tensor:
        self._ask()

    def spaces(self) -> set[str | None]:
        self._ask()

    def initialize(self, sample: Points, default: str) -> None:
        self._ask()

    def _ask(self) -> NoReturn:
        raise FileError(f"{self.why} This head's is {self.named}: load(path, kernel=...) with one of the same form.")
