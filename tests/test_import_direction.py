"""Packages of posthoc import only from packages above them in `LAYERS`.

Modules whose top-level name is not in the list are left alone. Imports that do not run with the module are judged
apart: those under `if TYPE_CHECKING` may point anywhere, those inside functions may point down only where `LOOKUPS`
says so.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "src" / "posthoc"
ROOT = "posthoc"

LAYERS: tuple[frozenset[str], ...] = tuple(
    frozenset(names.split())
    for names in (
        "errors",
        "optional",
        "validation io numerics progress display",
        "collect",
        "kernels",
        "predictive",
        "likelihoods",
        "training",
        "base",
        "fmgp",
        "methods",
        "evaluate",
        "integrations",
        "plots sklearn hf llm",  # re-exports
        ROOT,  # posthoc/__init__.py: no part of the package imports from it, but for the command line
        "cli __main__",
    )
)
"""From the most basic. Names on one line may import from each other, though not both ways."""

RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}

LOOKUPS = {("base", "methods")}
"""What a function may import from below: the registry of methods, to load a head of any of them."""

TO_MEND: set[str] = set()
"""Violations of today; none may be added."""


class Import(NamedTuple):
    """One import of a part of the package."""

    place: str  # file:line
    user: str  # top-level name of the importing module
    used: str
    kind: str  # "module", "function" or "typing"


def imports(package: Path) -> Iterator[Import]:
    """Every import within the package, from one top-level name to another."""
    for path in sorted(package.rglob("*.py")):
        parts = (ROOT, *path.relative_to(package).with_suffix("").parts)
        module = parts[:-1] if parts[-1] == "__init__" else parts
        user = module[1] if len(module) > 1 else ROOT
        here = parts[:-1]  # what a relative import starts from
        for node, kind in statements(ast.parse(path.read_text()), "module"):
            for used in targets(node, here, package):
                if used != user:
                    yield Import(f"{path.relative_to(package)}:{node.lineno}", user, used, kind)


def statements(node: ast.AST, kind: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """Import statements, with when they run."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node, kind
    elif isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING":
        for guarded in node.body:
            yield from statements(guarded, "typing")
        for other in node.orelse:
            yield from statements(other, kind)
    else:
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and kind == "module"
        for child in ast.iter_child_nodes(node):
            yield from statements(child, "function" if inside else kind)


def targets(node: ast.Import | ast.ImportFrom, here: tuple[str, ...], package: Path) -> Iterator[str]:
    """The top-level names that a statement imports from; `posthoc` for what `posthoc/__init__.py` defines."""
    if isinstance(node, ast.Import):
        modules = [alias.name.split(".") for alias in node.names]
    else:
        start = list(here[: len(here) - node.level + 1]) if node.level else []
        source = start + (node.module.split(".") if node.module else [])
        modules = [[*source, alias.name] for alias in node.names]
    for module in modules:
        if module[0] == ROOT:
            name = module[1] if len(module) > 1 else ROOT
            is_part = (package / name).is_dir() or (package / f"{name}.py").exists()
            yield name if is_part else ROOT


def violations(package: Path) -> list[str]:
    """Imports from below, and pairs of one layer that import each other."""
    known = [i for i in imports(package) if i.user in RANKS and i.used in RANKS]
    found = []
    for i in known:
        if RANKS[i.used] > RANKS[i.user] and i.kind != "typing" and not (i.kind == "function" and is_lookup(i)):
            found.append(f"{i.place}: {i.user} is above {i.used} and may not import from it")
    pairs = {(i.user, i.used) for i in known if i.kind == "module" and RANKS[i.used] == RANKS[i.user]}
    found += [f"{a} and {b} import each other" for a, b in sorted(pairs) if a < b and (b, a) in pairs]
    return found


def is_lookup(i: Import) -> bool:
    return (i.user, i.used) in LOOKUPS


def test_packages_import_only_from_above():
    found = {re.sub(r":\d+:", ":", violation) for violation in violations(PACKAGE)}
    assert found - TO_MEND == set()
    assert TO_MEND - found == set(), "mended: take it out of TO_MEND"


def tree(folder: Path, **modules: str) -> Path:
    """A made-up package; "a__b" is the file a/b.py."""
    for name, source in modules.items():
        path = folder / (name.replace("__", "/", 1) + ".py") if name != "__init__" else folder / "__init__.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return folder


def test_an_import_from_below_is_found(tmp_path):
    package = tree(
        tmp_path,
        __init__="from posthoc.fmgp import FMGP\n",
        errors="",
        fmgp__build="from posthoc.errors import Error\nfrom posthoc.methods.laplace import Laplace\n",
        methods__laplace="from ..fmgp.build import build\nimport posthoc.cli.fit\n",
        collect__outputs="from posthoc import FMGP, errors\n",
        cli__fit="from posthoc import FMGP\nimport torch\n",
    )
    assert violations(package) == [
        "collect/outputs.py:1: collect is above posthoc and may not import from it",
        "fmgp/build.py:2: fmgp is above methods and may not import from it",
        "methods/laplace.py:2: methods is above cli and may not import from it",
    ]


def test_when_an_import_runs_counts(tmp_path):
    inside = "def load():\n    from posthoc.methods import REGISTRY\n"
    typing = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from posthoc.methods import REGISTRY\n"
    package = tree(tmp_path, methods="", base=inside, training=inside, predictive=typing)
    assert violations(package) == ["training.py:2: training is above methods and may not import from it"]


def test_one_layer_has_no_circle_and_unknown_names_are_left_alone(tmp_path):
    package = tree(
        tmp_path,
        io="import posthoc.numerics",
        numerics="from posthoc import io",
        progress="from posthoc.io import x",
        somewhere="from posthoc.cli import main",
        errors="from posthoc.somewhere import main",
    )
    assert violations(package) == ["io and numerics import each other"]
