"""`MethodConfig`: the options of a method, declared once, checked by their types, written as JSON."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import reprlib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from operator import index
from typing import Any, Literal, Self

import torch

from posthoc.errors import OptionError
from posthoc.training import Training
from posthoc.validation import known_device

LARGEST_SEED = 2**63 - 1
UNFIT = object()
"""Stands for a value that is not of the type."""


def option(default: Any, **properties: Any) -> Any:
    """A field of a `MethodConfig` with properties beside its type and its default.

    Args:
        default: The default value.
        **properties: `least`, `above` and `most` limit a number; `infinite=True` allows infinity. `saved=False` keeps
            the field out of files. `on_load=True` lets `load` take it.
            `encode(value)` turns a value into JSON and `decode(stored, given)` back, where `given` is the value
            that was given to `load` under the name of the field, or None.
    """
    return field(default=default, metadata=properties)


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """Options of every method. A subclass adds the options of one method, each with its type and default.

    The fields are the arguments of the method's constructor, what its head files store, what a checkpoint
    compares, and what `--set` accepts.

    Args:
        device: Where the fitted method computes. By default where the data are.

    Example:
        >>> @dataclass(frozen=True, kw_only=True)
        ... class SmootherConfig(MethodConfig):
        ...     width: float = option(1.0, above=0.0)
        >>> SmootherConfig(width=2).to_dict()
        {'width': 2.0}
    """

    device: str | torch.device | None = option(None, saved=False)

    def __post_init__(self) -> None:
        known_device(self.device)
        for name, kind, limits in type(self).declared():
            value = getattr(self, name)
            fitting = converted(kind, value, limits)
            if fitting is UNFIT:
                quoted = " (without quotes)" if isinstance(value, str) and bool in choices_of(kind) else ""
                raise OptionError(
                    f"Expected {name} to be {described(kind, limits)}{quoted}, got {reprlib.repr(value)}."
                )
            object.__setattr__(self, name, fitting)

    @classmethod
    def declared(cls) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
        """The name, the type and the properties of each option."""
        hints = type_hints(cls)  # type: ignore[arg-type]
        for each in fields(cls):
            yield each.name, hints[each.name], each.metadata

    @classmethod
    def names(cls) -> list[str]:
        """The names of all options."""
        return [each.name for each in fields(cls)]

    @classmethod
    def build(cls, method: str, options: Mapping[str, Any]) -> Self:
        """A config of these options; an error that helps where one is unknown.

        Args:
            method: The name of the method, for the error.
            options: Options by name.
        """
        known = cls.names()
        for name in options:
            if name == "outputs_are" and name not in known:
                raise OptionError(f"{method} needs real outputs or logits, got {name}={options[name]!r}.")
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f" Did you mean {close[0]}?" if close else ""
                raise OptionError(
                    f"Unknown option {reprlib.repr(name)} of {method}.{hint} Its options are: {', '.join(known)}."
                )
        return cls(**options)

    @classmethod
    def signature(cls) -> inspect.Signature:
        """The signature of the constructor of a method with this config."""
        either = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [
            inspect.Parameter("model", either, default=None, annotation=Any),
            inspect.Parameter("likelihood", either, default=None, annotation=Any),
        ]
        defaults = {each.name: each.default for each in fields(cls)}
        for name, kind, _ in cls.declared():
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kind)
            )
        return inspect.Signature(parameters)

    def to_dict(self) -> dict[str, Any]:
        """The options that decide the numbers of a fit, as JSON."""
        found = {}
        for name, _, properties in self.declared():
            if properties.get("saved", True):
                value = getattr(self, name)
                found[name] = properties["encode"](value) if "encode" in properties else value
        return found

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """The options that `to_dict` wrote, with those that are given to `load` in place of the stored ones."""
        options = dict(stored)
        for name, _, properties in cls.declared():
            if "decode" in properties and name in options:
                options[name] = properties["decode"](options[name], given.get(name))
        return {**options, **{name: value for name, value in given.items() if name not in options}}

    @classmethod
    def given_on_load(cls) -> list[str]:
        """The options that `load` takes: those that files cannot hold whole."""
        return [name for name, _, properties in cls.declared() if properties.get("on_load")]


@dataclass(frozen=True, kw_only=True)
class ScoreConfig(MethodConfig):
    """Options of methods that accept a classifier's probabilities in place of logits.

    Args:
        outputs_are: What the outputs of a classifier are.
    """

    outputs_are: Literal["logits", "log-probs", "probs"] = "logits"


@dataclass(frozen=True, kw_only=True)
class FeatureConfig(MethodConfig):
    """Options of methods that use the network's features.

    Args:
        layer: The module whose output is taken as features. By default the input of the last `nn.Linear` is.
    """

    layer: str | None = None


@dataclass(frozen=True, kw_only=True)
class SeedConfig(MethodConfig):
    """Options of methods that draw random numbers.

    Args:
        seed: The seed of all of them.
    """

    seed: int = option(0, least=0, most=LARGEST_SEED)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(SeedConfig):
    """Options of methods that are trained by gradient steps.

    Args:
        steps: The number of steps.
        batch_size: Points in a step.
        lr: The learning rate of Adam at the first step; it decreases to 0 by a cosine.
        eval_every: Steps between two looks at the validation data.
        patience: Looks without improvement after which training stops, or None.
        progress: Whether to show a progress bar. By default on a terminal.
    """

    steps: int = option(500, least=0)
    batch_size: int = option(100, least=1)
    lr: float = option(0.02, above=0.0)
    eval_every: int = option(20, least=1)
    patience: int | None = option(5, least=1)
    progress: bool | None = option(None, saved=False)

    @property
    def training(self) -> Training:
        """The options of the training loop."""
        return Training(**{each.name: getattr(self, each.name) for each in fields(Training)})


@functools.cache
def type_hints(config: Any) -> dict[str, Any]:
    return typing.get_type_hints(config)


def choices_of(kind: Any) -> tuple[Any, ...]:
    """The types that a union joins."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def converted(kind: Any, value: Any, limits: Mapping[str, Any]) -> Any:
    """The value as this type, or UNFIT."""
    for each in choices_of(kind):
        fitting = converted_to_one(each, value, limits)
        if fitting is not UNFIT:
            return fitting
    return UNFIT


def converted_to_one(kind: Any, value: Any, limits: Mapping[str, Any]) -> Any:
    if kind is Any:
        return value
    if typing.get_origin(kind) is Literal:
        return value if isinstance(value, str) and value in typing.get_args(kind) else UNFIT
    if kind is bool:
        return value if isinstance(value, bool) else UNFIT
    if kind in (int, float):
        number = whole(value) if kind is int else real(value)
        finite = number is not None and (math.isfinite(number) or limits.get("infinite", False))
        return number if number is not None and finite and within(number, limits) else UNFIT
    return value if isinstance(value, typing.get_origin(kind) or kind) else UNFIT


def whole(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else index(value)
    except TypeError:
        return None


def real(value: Any) -> float | None:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else None


def within(number: float, limits: Mapping[str, Any]) -> bool:
    above, least, most = limits.get("above", -math.inf), limits.get("least", -math.inf), limits.get("most", math.inf)
    return above < number and least <= number <= most


def described(kind: Any, limits: Mapping[str, Any]) -> str:
    """A type in words."""
    return " or ".join(described_one(each, limits) for each in choices_of(kind))


def described_one(kind: Any, limits: Mapping[str, Any]) -> str:
    if kind is types.NoneType:
        return "None"
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, typing.get_args(kind)))}"
    if kind is bool:
        return "True or False"
    if kind not in (int, float):
        return f"a {getattr(kind, '__name__', kind)}"
    words = {"above": "above", "least": "of at least", "most": "of at most"}
    ends = [f"{words[name]} {limits[name]:g}" for name in words if name in limits]
    return " ".join(["an integer" if kind is int else "a number", " and ".join(ends)]).strip()
