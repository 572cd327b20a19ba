"""`MethodConfig`: the options of a method, declared once, checked by their types, written as JSON."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import reprlib
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from operator import index
from typing import Any, Literal, Self

import torch

from posthoc.errors import OptionError
from posthoc.training import Training
from posthoc.validation import known_device, number

LARGEST_SEED = 2**63 - 1
UNFIT = object()
"""Stands for a value that is not of the type."""
type_hints = functools.cache(typing.get_type_hints)


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
            kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
            fitting = next((v for each in kinds if (v := converted(each, value, limits)) is not UNFIT), UNFIT)
            if fitting is UNFIT:
                wanted = " or ".join(described(each, limits) for each in kinds)
                quoted = " (without quotes)" if isinstance(value, str) and bool in kinds else ""
                raise OptionError(f"Expected {name} to be {wanted}{quoted}, got {reprlib.repr(value)}.")
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
                hint = "".join(f"Did you mean {close}? " for close in difflib.get_close_matches(name, known, 1))
                raise OptionError(f"Unknown option {name!r} of {method}. {hint}Its options are: {', '.join(known)}.")
        return cls(**options)

    @classmethod
    def signature(cls) -> inspect.Signature:
        """The signature of the constructor of a method with this config."""
        free, named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        first = [inspect.Parameter(name, free, default=None, annotation=Any) for name in ("model", "likelihood")]
        options = [
            inspect.Parameter(name, named, default=getattr(cls, name), annotation=kind)
            for name, kind, _ in cls.declared()
        ]
        return inspect.Signature(first + options)

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


def converted(kind: Any, value: Any, limits: Mapping[str, Any]) -> Any:
    """The value as one type, or UNFIT."""
    if kind is Any:
        return value
    if typing.get_origin(kind) is Literal:
        return value if isinstance(value, str) and value in typing.get_args(kind) else UNFIT
    if kind is bool and type(value) is int and value in (0, 1):
        return bool(value)
    if kind not in (int, float):
        return value if isinstance(value, typing.get_origin(kind) or kind) else UNFIT
    try:
        found = index(value) if kind is int else number(value)
    except TypeError:
        return UNFIT
    most = math.inf if limits.get("infinite") else sys.float_info.max
    inside = limits.get("least", -most) <= found <= limits.get("most", most)
    return found if inside and found > limits.get("above", -math.inf) and not isinstance(value, bool) else UNFIT


def described(kind: Any, limits: Mapping[str, Any]) -> str:
    """A type in words."""
    if kind is types.NoneType:
        return "None"
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, typing.get_args(kind)))}"
    if kind is bool:
        return "True or False"
    if kind not in (int, float):
        return f"a {getattr(kind, '__name__', kind)}"
    words = {"above": "above", "least": "of at least", "most": "of at most"}
    ends = " and ".join(f"{words[name]} {limits[name]:g}" for name in words if name in limits)
    return f"{'an integer' if kind is int else 'a number'} {ends}".strip()
