"""Likelihoods by name: the built-in ones, those registered here and those of installed packages."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from posthoc.errors import OptionError
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.gaussian import Gaussian

__all__ = ["ENTRY_POINTS", "likelihood_named", "make_likelihood", "register"]

ENTRY_POINTS = "posthoc.likelihoods"
"""The group of entry points by which packages offer likelihoods: the name is the "type", the object the class."""
KINDS: dict[str, type[Likelihood]] = {
    "regression": Gaussian,
    "gaussian": Gaussian,
    "classification": Categorical,
    "categorical": Categorical,
}


def register(name: str) -> Callable[[type[Likelihood]], type[Likelihood]]:
    """Registers a likelihood class under the "type" of its `spec`, so that its saved heads load.

    Example:
        >>> from posthoc import Gaussian
        >>> @register("wide")
        ... class Wide(Gaussian):
        ...     def spec(self):
        ...         return {"type": "wide", "noise": self.noise_form}
        >>> make_likelihood("wide").task
        'regression'
    """

    def add(kind: type[Likelihood]) -> type[Likelihood]:
        KINDS[name] = kind
        return kind

    return add


def likelihood_named(name: Any) -> type[Likelihood]:
    """The class of a registered name; raises `OptionError` if there is none."""
    if isinstance(name, str):
        if name in KINDS:
            return KINDS[name]
        for entry in entry_points(group=ENTRY_POINTS, name=name):
            return register(name)(entry.load())
    raise OptionError(
        'Expected likelihood="regression" or "classification" (or an object, Gaussian() or Categorical()), got '
        f"{reprlib.repr(name)}. The registered names are {', '.join(sorted(KINDS))}."
    )


def make_likelihood(likelihood: str | Likelihood | Mapping[str, Any]) -> Likelihood:
    """A likelihood from the name of its task or type, from its `spec()`, or as it is.

    Raises:
        OptionError: The name or an option is unknown.
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    options = dict(likelihood) if isinstance(likelihood, Mapping) else {"type": likelihood}
    name = options.pop("type", None)
    kind = likelihood_named(name)
    try:
        return kind(**options)
    except TypeError as error:
        raise OptionError(f"Expected a likelihood that this version knows, got {name!r} with {options}.") from error
