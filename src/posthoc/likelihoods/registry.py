"""Likelihoods by name: the built-in ones, those registered here and those of installed packages."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from posthoc.errors import OptionError
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.registry import Registry

LIKELIHOODS = Registry(
    "posthoc.likelihoods",
    {"regression": Gaussian, "gaussian": Gaussian, "classification": Categorical, "categorical": Categorical},
)
"""Every likelihood by its task or the "type" of its `spec`. Another package adds its own by `register`, or by an entry
point of the group "posthoc.likelihoods"; its saved heads load then."""
register = LIKELIHOODS.register


def make_likelihood(likelihood: str | Likelihood | Mapping[str, Any]) -> Likelihood:
    """A likelihood from the name of its task or type, from its `spec()`, or as it is.

    Raises:
        OptionError: The name or an option is unknown.

    Example:
        >>> make_likelihood({"type": "gaussian", "noise": "per_output"}).task
        'regression'
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    options = dict(likelihood) if isinstance(likelihood, Mapping) else {"type": likelihood}
    name = options.pop("type", None)
    if not isinstance(name, str) or name not in LIKELIHOODS:
        raise OptionError(
            'Expected the likelihood "regression" or "classification" (or an object, Gaussian() or Categorical()), got '
            f"{reprlib.repr(name)}. The registered names are {', '.join(sorted(LIKELIHOODS))}."
        )
    try:
        made: Likelihood = LIKELIHOODS[name](**options)
    except TypeError as error:
        raise OptionError(f"Expected a likelihood that this version knows, got {name!r} with {options}.") from error
    return made
