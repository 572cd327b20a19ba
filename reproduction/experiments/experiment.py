"""What every experiment is: cases, methods and seeds, a run for each, then tables and figures."""

from __future__ import annotations

import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from posthoc.errors import OptionError, PosthocError, PosthocWarning, UnavailableError
from reproduction.experiments.runner import Run, run_once

__all__ = ["Experiment", "Request"]


@dataclass(frozen=True)
class Request:
    """What was asked for."""

    out: Path = Path("results")
    seeds: tuple[int, ...] = (0,)
    methods: tuple[str, ...] | None = None  # None: all
    cases: tuple[str, ...] | None = None
    data_dir: Path | None = None
    device: str = "cpu"
    quick: bool = False
    """A few rows and steps, to see that it works: no figure of such a run means anything."""
    force: bool = False
    say: Callable[[str], None] = field(default=lambda line: None, compare=False)


class Experiment(ABC):
    """An experiment of the paper. A subclass says what its cases (networks, data sets) and its methods are, how a case
    is made ready, and what one run of one method is."""

    name: ClassVar[str]
    title: ClassVar[str]
    task: ClassVar[str]
    methods: ClassVar[Mapping[str, Any]]
    """By name, in the order of the table; every value has a `title`."""
    cases: ClassVar[tuple[str, ...]] = ("",)

    def methods_of(self, case: str) -> tuple[str, ...]:
        """Those that are run on a case."""
        return tuple(self.methods)

    @abstractmethod
    def configuration(self, case: str, method: str, request: Request) -> dict[str, Any]:
        """All that decides a run's numbers, beside the seed and the data, in what JSON knows."""

    @abstractmethod
    def prepare(self, case: str, seed: int, request: Request) -> Any:
        """What the methods of a case share: its data, its network. It is asked for when the first run needs it."""

    @abstractmethod
    def work(self, prepared: Any, case: str, method: str, seed: int, request: Request) -> Mapping[str, Any]:
        """One run: `metrics`, `times`, `curves`, `data` and what else belongs to its document."""

    def draw(self, documents: list[dict[str, Any]], folder: Path) -> list[Path]:
        """The figures, from the documents of all runs that there are."""
        return []

    def reproduce(self, request: Request) -> list[dict[str, Any]]:
        """Makes every run that is not there yet, and writes the tables and the figures. A run that fails does not keep
        the others from being made; the error comes at the end. A case whose data cannot be had is left out, unless it
        was asked for by name, and said so."""
        cases = chosen("cases", request.cases, self.cases)
        methods = chosen("methods", request.methods, tuple(self.methods))
        documents: list[dict[str, Any]] = []
        failed: list[str] = []
        unavailable: dict[str, UnavailableError] = {}
        for case in cases:
            for seed in request.seeds:
                prepared = Once(self, case, seed, request, refused=unavailable.get(case))
                for method in (m for m in self.methods_of(case) if m in methods):
                    words = ", ".join(part for part in (case, method, f"seed {seed}") if part)
                    try:
                        document = self.document(case, method, seed, request, prepared)
                    except UnavailableError as error:
                        if request.cases is not None:  # it was asked for by name
                            failed.append(f"{words}: {in_full(error)}")
                        unavailable[case] = error
                        continue
                    except (PosthocError, ArithmeticError, RuntimeError) as error:
                        failed.append(f"{words}: {type(error).__name__}: {in_full(error)}")
                        request.say(f"failed: {failed[-1]}")
                        continue
                    documents.append(document)
                    request.say(f"{words}: {summary(document)}")
        if documents:
            folder = request.out / self.name
            for path in (*write_tables(folder), *self.draw(self.made(folder), folder)):
                request.say(f"wrote {path}")
        for case, why in unavailable.items():
            request.say(f"left out: {case or self.name}, which cannot be had here: {in_full(why)}")
        if unavailable and not documents:
            raise next(iter(unavailable.values()))
        if failed:
            raise PosthocError(f"{len(failed)} of {len(failed) + len(documents)} runs failed. The first: {failed[0]}")
        return documents

    def made(self, folder: Path) -> list[dict[str, Any]]:
        """The documents of all runs that are in a folder, whenever they were made, in the order of the table; without
        those that count in no mean."""
        found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
        cases, methods = list(self.cases), list(self.methods)
        known = [run for run in found if run["case"] in cases and run["method"] in methods and not run["problem"]]
        return sorted(known, key=lambda run: (cases.index(run["case"]), run["seed"], methods.index(run["method"])))

    def document(
        self, case: str, method: str, seed: int, request: Request, prepared: Once | None = None
    ) -> dict[str, Any]:
        """That of one run: read if it is there, else made."""
        ready = prepared or Once(self, case, seed, request)
        configuration = {**self.configuration(case, method, request), "quick": request.quick}
        run = Run(self.name, case, method, seed, self.task, configuration)

        def work() -> dict[str, Any]:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("ignore")
                warnings.simplefilter("always", PosthocWarning)
                found = dict(self.work(ready.value, case, method, seed, request))
            told = list(dict.fromkeys(str(warning.message) for warning in caught))
            return {"title": self.methods[method].title, **found, "warnings": told}

        return run_once(run, request.out, work, force=request.force)


class Once:
    """What is made ready when it is first asked for: not at all where every run is there already."""

    def __init__(
        self, experiment: Experiment, case: str, seed: int, request: Request, refused: UnavailableError | None = None
    ) -> None:
        self._make: Callable[[], Any] = partial(experiment.prepare, case, seed, request)
        self._made: list[Any] = []
        self._refused = refused  # what cannot be had is not asked for again

    @property
    def value(self) -> Any:
        if self._refused is not None:
            raise self._refused
        if not self._made:
            try:
                self._made.append(self._make())
            except UnavailableError as error:
                self._refused = error
                raise
        return self._made[0]


def in_full(error: BaseException) -> str:
    """What an error says, with its notes."""
    return " ".join([str(error), *getattr(error, "__notes__", ())])


def chosen(what: str, asked: tuple[str, ...] | None, known: tuple[str, ...]) -> tuple[str, ...]:
    """Those asked for, in the order in which they are known."""
    if unknown := sorted(set(asked or ()) - set(known)):
        raise OptionError(f"Expected {what} among {', '.join(known)}, got {', '.join(unknown)}.")
    return tuple(name for name in known if asked is None or name in asked)


def summary(document: Mapping[str, Any]) -> str:
    """A line for the screen."""
    if document["problem"]:
        return str(document["problem"])
    shown = ("nll", "accuracy", "ece", "ood_auc", "rmse", "crps", "cqm")
    return ", ".join(f"{name} {document['metrics'][name]:.4f}" for name in shown if name in document["metrics"])


def write_tables(folder: Path) -> list[Path]:
    """Of all runs that are in the folder, whenever they were made."""
    from posthoc.evaluate.report.aggregates import write_tables as write

    return write(folder)
