"""What all experiments share: cases, methods and seeds; one JSON document for each run; tables and figures."""

from __future__ import annotations

import json
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from posthoc.errors import FileError, OptionError, PosthocError, PosthocWarning
from posthoc.evaluate.cost import machine, versions
from posthoc.io import atomic_path, require_folder
from reproduction.data.files import UnavailableError
from reproduction.tables import write_tables

__all__ = ["Experiment", "Request", "Run", "load_or_run"]

FORMAT = 1
"""The version of a run's document."""
SHOWN = ("nll", "accuracy", "ece", "ood_auc", "rmse", "crps", "cqm")
"""Metrics printed for each run."""

Document = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """The options of the command line.

    Attributes:
        out: The folder of all results.
        seeds: Seeds to run.
        methods: Names of methods. None: all.
        cases: Names of cases. None: all.
        data_dir: The folder with data. None: the one that `POSTHOC_DATA` names.
        device: Where networks and methods run.
        quick: Few rows and steps, to check that the experiment works; its figures mean nothing.
        force: Repeat runs whose documents exist.
        log: Is called with lines about the progress.
    """

    out: Path = Path("results")
    seeds: tuple[int, ...] = (0,)
    methods: tuple[str, ...] | None = None
    cases: tuple[str, ...] | None = None
    data_dir: Path | None = None
    device: str = "cpu"
    quick: bool = False
    force: bool = False
    log: Callable[[str], None] = field(default=lambda line: None, compare=False)


@dataclass(frozen=True)
class Run:
    """One method on one case with one seed.

    Attributes:
        experiment: The name of the experiment.
        case: A network or a data set; empty where there is only one.
        method: The name of the method's variant.
        seed: The seed.
        task: "classification" or "regression".
        configuration: Everything else that determines the numbers, in JSON's types.
    """

    experiment: str
    case: str
    method: str
    seed: int
    task: str
    configuration: dict[str, Any]

    def path(self, out: str | os.PathLike[str]) -> Path:
        """The file of its document."""
        name = "-".join(part for part in (self.case, self.method, str(self.seed)) if part)
        return Path(out) / self.experiment / f"{name}.json"


class Experiment(ABC):
    """An experiment of the paper.

    Attributes:
        name: The name on the command line and of the folder of results.
        title: A title for people.
        task: "classification" or "regression".
        methods: Variants of methods by name, in the order of the table.
        cases: Networks or data sets.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    task: ClassVar[str]
    methods: ClassVar[Mapping[str, Any]]
    cases: ClassVar[tuple[str, ...]] = ("",)

    def methods_of(self, case: str) -> tuple[str, ...]:
        """The names of the methods that run on a case."""
        return tuple(self.methods)

    @abstractmethod
    def configuration(self, case: str, method: str, request: Request) -> dict[str, Any]:
        """Everything that determines the numbers of a run, except the seed and the data, in JSON's types."""

    @abstractmethod
    def prepare(self, case: str, seed: int, request: Request) -> Any:
        """The data and the network of a case, which its methods share. Called before the first run that needs them."""

    @abstractmethod
    def run(self, prepared: Any, case: str, method: str, seed: int, request: Request) -> Mapping[str, Any]:
        """Performs one run and returns `metrics`, `times`, `curves`, `data` and further entries of its document."""

    def draw(self, documents: list[Document], folder: Path) -> list[Path]:
        """Draws the figures from the documents of all runs and returns their paths."""
        return []

    def reproduce(self, request: Request) -> list[Document]:
        """Performs all runs that have no document yet, then writes the tables and the figures.

        A run that fails does not stop the others. A case whose data are unavailable is left out, unless it was named.

        Raises:
            PosthocError: Some runs failed.
            UnavailableError: No data were available.
        """
        cases = selected("cases", request.cases, self.cases)
        methods = selected("methods", request.methods, tuple(self.methods))
        documents: list[Document] = []
        failures: list[str] = []
        unavailable: dict[str, UnavailableError] = {}
        for case in cases:
            for seed in request.seeds:
                prepared = Prepared(self, case, seed, request, unavailable.get(case))
                for method in (name for name in self.methods_of(case) if name in methods):
                    label = ", ".join(part for part in (case, method, f"seed {seed}") if part)
                    try:
                        documents.append(self.document(case, method, seed, request, prepared))
                        request.log(f"{label}: {summary(documents[-1])}")
                    except UnavailableError as error:
                        unavailable[case] = error
                        if request.cases is not None:
                            failures.append(f"{label}: {full_message(error)}")
                    except (PosthocError, ArithmeticError, RuntimeError) as error:
                        failures.append(f"{label}: {type(error).__name__}: {full_message(error)}")
                        request.log(f"failed: {failures[-1]}")
        if documents:
            folder = request.out / self.name
            for path in (*write_tables(folder), *self.draw(self.read_documents(folder), folder)):
                request.log(f"wrote {path}")
        for case, reason in unavailable.items():
            request.log(f"left out: {case or self.name}, whose data are unavailable: {full_message(reason)}")
        if unavailable and not documents:
            raise next(iter(unavailable.values()))
        if failures:
            raise PosthocError(
                f"{len(failures)} of {len(failures) + len(documents)} runs failed. The first: {failures[0]}"
            )
        return documents

    def read_documents(self, folder: Path) -> list[Document]:
        """The documents of all valid runs in a folder, in the order of the table."""
        documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
        cases, methods = list(self.cases), list(self.methods)
        valid = [d for d in documents if d["case"] in cases and d["method"] in methods and not d["problem"]]
        return sorted(valid, key=lambda d: (cases.index(d["case"]), d["seed"], methods.index(d["method"])))

    def document(
        self, case: str, method: str, seed: int, request: Request, prepared: Prepared | None = None
    ) -> Document:
        """The document of one run, from its file or from performing the run."""
        shared = prepared or Prepared(self, case, seed, request)
        configuration = {**self.configuration(case, method, request), "quick": request.quick}

        def work() -> Document:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("ignore")
                warnings.simplefilter("always", PosthocWarning)
                result = dict(self.run(shared.value, case, method, seed, request))
            messages = list(dict.fromkeys(str(warning.message) for warning in caught))
            return {"title": self.methods[method].title, **result, "warnings": messages}

        run = Run(self.name, case, method, seed, self.task, configuration)
        return load_or_run(run, request.out, work, force=request.force)


class Prepared:
    """The result of `Experiment.prepare`, computed when it is first used; unavailable data are not tried again."""

    def __init__(
        self, experiment: Experiment, case: str, seed: int, request: Request, error: UnavailableError | None = None
    ) -> None:
        self._prepare = partial(experiment.prepare, case, seed, request)
        self._results: list[Any] = []
        self._error = error

    @property
    def value(self) -> Any:
        if self._error is not None:
            raise self._error
        if not self._results:
            try:
                self._results.append(self._prepare())
            except UnavailableError as error:
                self._error = error
                raise
        return self._results[0]


def load_or_run(
    run: Run, out: str | os.PathLike[str], work: Callable[[], Mapping[str, Any]], *, force: bool = False
) -> Document:
    """The document of a run, from its file or from performing the run.

    Args:
        run: The run.
        out: The folder of all results.
        work: Performs the run and returns its metrics, times and further entries, in JSON's types. The entry `data`,
            which describes the sources of the data, becomes a part of the configuration.
        force: Repeat the run even if its document exists.

    Raises:
        FileError: The file holds the document of another run, configuration or version.
    """
    path = run.path(out)
    if path.exists() and not force:
        return read_document(path, run)
    require_folder(path.parent)  # a folder that cannot be written is refused before the work
    result = dict(work())
    metrics = result.pop("metrics")
    configuration = run.configuration | ({"data": result.pop("data")} if "data" in result else {})
    invalid = [name for name, value in metrics.items() if not math.isfinite(value)]
    document = {
        "format": FORMAT,
        **asdict(run),
        "configuration": configuration,
        "problem": f"not a finite number: {', '.join(invalid)}" if invalid else None,
        "metrics": metrics,
        **result,
        "versions": versions(),
        "machine": machine(),
    }
    with atomic_path(path) as temporary:
        text = json.dumps(with_nulls(document), indent=1, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def with_nulls(value: Any) -> Any:
    """The same value with None for numbers that are not finite, which JSON does not know."""
    if isinstance(value, Mapping):
        return {key: with_nulls(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [with_nulls(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_document(path: Path, run: Run) -> Document:
    """Reads the document of a run and refuses those of other runs, configurations and versions."""
    expected = json.loads(json.dumps(asdict(run)))
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        found = {name: document[name] for name in expected}
        found["configuration"] = {name: value for name, value in found["configuration"].items() if name != "data"}
        version = document["versions"]["posthoc"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FileError(
            f"Expected the result of a run, found something else in {path}: delete it, or run again with --force."
        ) from error
    if found != expected:
        new, old = expected["configuration"], found["configuration"]
        differences = ", ".join(name for name in new if new[name] != old.get(name))
        raise FileError(
            f"Expected the result of this run, found one of another configuration in {path}"
            f"{f' ({differences})' if differences else ''}: write elsewhere, or replace it with --force."
        )
    if version != versions()["posthoc"]:
        raise FileError(
            f"Expected a result of posthoc {versions()['posthoc']}, found one of {version} in {path}: write elsewhere, "
            "or replace it with --force."
        )
    return document


def full_message(error: BaseException) -> str:
    """The message of an error with its notes."""
    return " ".join([str(error), *getattr(error, "__notes__", ())])


def selected(option: str, names: tuple[str, ...] | None, known: tuple[str, ...]) -> tuple[str, ...]:
    """The requested names in the order of the known ones; unknown names are refused."""
    if unknown := sorted(set(names or ()) - set(known)):
        raise OptionError(f"Expected {option} among {', '.join(known)}, got {', '.join(unknown)}.")
    return tuple(name for name in known if names is None or name in names)


def summary(document: Document) -> str:
    """A line about a run."""
    if document["problem"]:
        return str(document["problem"])
    return ", ".join(f"{name} {document['metrics'][name]:.4f}" for name in SHOWN if name in document["metrics"])
