"""`Registry`: classes by name, the built-in ones and those that other packages register by an entry point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, TypeVar

from posthoc.errors import OptionError

Class = TypeVar("Class", bound=type)


class Registry(Mapping[str, Any]):
    """Classes by name. Built-in ones come first, in their order; another package adds its own by an entry point.

    Args:
        group: The entry-point group that other packages register in.
        builtin: Built-in classes by name, or import strings ("package.module:Class") that are resolved when first used.

    Example:
        A package adds a method by these lines of its `pyproject.toml`:

            [project.entry-points."posthoc.methods"]
            my_method = "my_package.my_module:MyMethod"

        >>> registry = Registry("my.group", {"fraction": "fractions:Fraction"})
        >>> list(registry), registry["fraction"](1, 2)
        (['fraction'], Fraction(1, 2))
    """

    def __init__(self, group: str, builtin: Mapping[str, Any]) -> None:
        self.group = group
        self._entries: dict[str, Any] = dict(builtin)
        self._complete = False

    def register(self, name: str) -> Callable[[Class], Class]:
        """A decorator that adds a class under a name."""

        def add(kind: Class) -> Class:
            self._entries[name] = kind
            return kind

        return add

    def __getitem__(self, name: str) -> Any:
        if name not in self._entries:
            self._add_entry_points()
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            try:
                entry = self._entries[name] = getattr(import_module(module), attribute)
            except (ImportError, AttributeError) as error:
                advice = "repair or uninstall the package that registers it"
                raise OptionError(
                    f"Expected {name!r} at {entry!r}, which cannot be imported ({error}): {advice}."
                ) from error
        return entry

    def __repr__(self) -> str:
        return f"Registry({self.group!r}: {', '.join(self)})"

    def __iter__(self) -> Iterator[str]:
        self._add_entry_points()
        return iter(self._entries)

    def __len__(self) -> int:
        self._add_entry_points()
        return len(self._entries)

    def _add_entry_points(self) -> None:
        if not self._complete:
            self._complete = True
            for point in entry_points(group=self.group):
                self._entries.setdefault(point.name, point.value)
