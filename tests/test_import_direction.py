"""Packages of posthoc import only from packages above them in `LAYERS`.

Modules whose top-level name is not in the list are left alone. Imports under `if TYPE_CHECKING` may point anywhere,
those inside functions may point down only where `LOOKUPS` says so.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from pathlib import Path

ROOT = "posthoc"
PACKAGE = Path(__file__).parents[1] / "src" / ROOT

LAYERS = (
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
"""From the most basic. Names on one line may import from each other, though not both ways."""

RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names.split()}

LOOKUPS = {("base", "methods")}
"""What a function may import from below: the registry of methods, to load a head of any of them."""


def imports(package: Path) -> Iterator[tuple[str, str, str, str]]:
    """Every import that runs, from one top-level name to another: file and line, both names, and when it runs."""
    for path in sorted(package.rglob("*.py")):
        parts = (ROOT, *path.relative_to(package).with_suffix("").parts)
        user = parts[1].replace("__init__", ROOT)
        for node, kind in statements(ast.parse(path.read_text()), "module"):
            for used in targets(node, parts[:-1], package):
                if used != user:
                    yield f"{path.relative_to(package)}:{node.lineno}", user, used, kind


def statements(node: ast.AST, kind: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """Import statements that run, with when they do."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node, kind
    elif isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING":
        for other in node.orelse:
            yield from statements(other, kind)
    else:
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from statements(child, "function" if inside else kind)


def targets(node: ast.Import | ast.ImportFrom, here: tuple[str, ...], package: Path) -> Iterator[str]:
    """The top-level names that a statement imports from; `posthoc` for what `posthoc/__init__.py` defines."""
    source = ""
    if isinstance(node, ast.ImportFrom):
        start = here[: len(here) - node.level + 1] if node.level else ()
        source = ".".join([*start, node.module or ""]).strip(".") + "."
    for alias in node.names:
        top, *names = f"{source}{alias.name}".split(".")
        if top == ROOT:
            is_part = names and ((package / names[0]).is_dir() or (package / f"{names[0]}.py").exists())
            yield names[0] if is_part else ROOT


def violations(package: Path) -> list[str]:
    """Imports from below, and pairs of one layer that import each other."""
    found, pairs = [], set()
    for place, user, used, kind in imports(package):
        down = RANKS.get(used, math.nan) - RANKS.get(user, math.nan)
        if down > 0 and (kind == "module" or (user, used) not in LOOKUPS):
            found.append(f"{place}: {user} is above {used} and may not import from it")
        if down == 0 and kind == "module":
            pairs.add((user, used))
    return found + [f"{a} and {b} import each other" for a, b in sorted(pairs) if a < b and (b, a) in pairs]


def test_packages_import_only_from_above():
    assert violations(PACKAGE) == []


def test_imports_from_below_and_circles_are_found(tmp_path):
    lookup = "def load():\n    from posthoc.methods import REGISTRY\n"
    typing = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from posthoc.methods import REGISTRY\n"
    for name, source in {
        "__init__": "from posthoc.fmgp import FMGP\n",
        "errors": "from posthoc.somewhere import main",
        "io": "import posthoc.numerics",
        "numerics": "from posthoc import io",
        "progress": "from posthoc.io import x",
        "somewhere": "from posthoc.cli import main",
        "base": lookup,
        "training": lookup,
        "predictive": typing,
        "fmgp/build": "from posthoc.errors import Error\nfrom posthoc.methods.laplace import Laplace\n",
        "methods/laplace": "from ..fmgp.build import build\nimport posthoc.cli.fit\n",
        "collect/outputs": "from posthoc import FMGP, errors\n",
        "cli/fit": "from posthoc import FMGP\nimport torch\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(source)
    assert violations(tmp_path) == [
        "collect/outputs.py:1: collect is above posthoc and may not import from it",
        "fmgp/build.py:2: fmgp is above methods and may not import from it",
        "methods/laplace.py:2: methods is above cli and may not import from it",
        "training.py:2: training is above methods and may not import from it",
        "io and numerics import each other",
    ]
