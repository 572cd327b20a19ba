"""The exceptions and the warning of this package. Messages say what was expected, what was found and what to do."""

from __future__ import annotations

import sys
import traceback
import warnings

LONGEST = 1000
"""Longer messages lose their middle."""


def shortened(message: str) -> str:
    """A message of at most `LONGEST` characters."""
    half = LONGEST // 2 - 3
    return message if len(message) <= LONGEST else f"{message[:half]} ... {message[-half:]}"


class PosthocError(Exception):
    """Base class of the errors that this package raises."""

    def __str__(self) -> str:
        return shortened(super().__str__())


class DataError(PosthocError, ValueError):
    """The data cannot be used: wrong shapes, types or ranges, values that are not finite, or no rows."""


class OptionError(PosthocError, ValueError):
    """An option has an invalid value, or two options exclude each other."""


class LayerError(PosthocError, LookupError):
    """The feature layer does not exist, or the network did not use it."""


class NotFittedError(PosthocError, RuntimeError):
    """`predict` or `save` was called before `fit`."""


class NotPSDError(PosthocError, ArithmeticError):
    """A matrix is not positive definite, even with jitter."""


class TrainingError(PosthocError, ArithmeticError):
    """The loss, or a parameter, became NaN or infinite in training."""


class FileError(PosthocError, OSError):
    """A file was not written by this package or this version of it, is damaged, or belongs to another network."""


class WrongTaskError(PosthocError, AttributeError):
    """The predictions of this task lack an attribute: probabilities of a regression, or intervals of classes."""


class MissingExtraError(PosthocError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs {package}, which is not installed. Install it with: pip install 'posthoc[{extra}]'"
        )


class PosthocWarning(UserWarning):
    """The result may be poor, or something was adjusted to compute it; the message says what."""


def warn(message: str) -> None:
    """Gives a `PosthocWarning` at the line that called this package."""
    names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(sys._getframe())]
    outermost = max(level for level, name in enumerate(names, 1) if name.partition(".")[0] == "posthoc")
    warnings.warn(shortened(message), PosthocWarning, stacklevel=outermost + 1)
