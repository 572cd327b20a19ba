"""What can go wrong, each with what was expected, what was found and what to do."""

from __future__ import annotations

__all__ = [
    "DataError",
    "FileError",
    "LayerError",
    "MissingExtraError",
    "NotFittedError",
    "NotPSDError",
    "OptionError",
    "PosthocError",
    "PosthocWarning",
    "TrainingError",
    "UnavailableError",
    "WrongTaskError",
]


class PosthocError(Exception):
    """The base of every error this package raises on purpose."""


class DataError(PosthocError, ValueError):
    """The data cannot be used: shapes, types, ranges, non-finite values, nothing at all."""


class OptionError(PosthocError, ValueError):
    """An option has a value it cannot take, or two options exclude each other."""


class LayerError(PosthocError, LookupError):
    """The feature layer does not exist, or the network never used it."""


class NotFittedError(PosthocError, RuntimeError):
    """Asked for a prediction, or to save, before `fit`."""


class NotPSDError(PosthocError, ArithmeticError):
    """A matrix that must be positive definite is not, even with jitter."""


class TrainingError(PosthocError, ArithmeticError):
    """The loss stopped being a number."""


class FileError(PosthocError, OSError):
    """A file is not ours, is of another version, or belongs to another network."""


class UnavailableError(FileError):
    """Data, or a network's weights, are not here and cannot be downloaded."""


class WrongTaskError(PosthocError, AttributeError):
    """A question for the other task's predictions: probabilities of a regression, intervals of classes."""


class MissingExtraError(PosthocError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs {package}, which is not installed. Install it with: pip install 'posthoc[{extra}]'"
        )


class PosthocWarning(UserWarning):
    """Something was adjusted so that the call could be served; the text says what."""
