"""How much code there is: lines of code and lines in all, by sub-package.

    python -m benchmarks.code_size [--json] [--root FOLDER]

A line of code is a line that holds a token other than a comment, a docstring or a line break; a statement over several
lines counts as each of them. A docstring is the string at the beginning of a module, class or function, or the one
right after an assignment that documents it: every expression statement that is a string alone.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
TREES = ("src/posthoc", "reproduction", "tests")
LONG = 400
"""Lines of code of a file that is too long."""
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class Size(NamedTuple):
    """Of a file, or of several."""

    files: int
    code: int
    lines: int

    def plus(self, other: Size) -> Size:
        return Size(*(a + b for a, b in zip(self, other, strict=True)))


def size_of(source: str) -> Size:
    """The size of one file's text."""
    coded: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            coded.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            coded.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return Size(1, len(coded), len(source.splitlines()))


def measure(root: Path) -> dict[str, Any]:
    """Sizes of the trees that are there, of the parts of each, and of files that are long."""
    result: dict[str, Any] = {"trees": {}, "parts": {}, "long": {}}
    for name in TREES:
        if not (root / name).is_dir():
            continue
        parts: dict[str, Size] = {}
        for path, size in sizes(root / name):
            inside = path.relative_to(root / name).parts
            part = inside[0] if len(inside) > 1 else "(top level)"
            parts[part] = parts.get(part, Size(0, 0, 0)).plus(size)
            if size.code > LONG:
                result["long"][str(path.relative_to(root))] = size.code
        whole = Size(0, 0, 0)
        for size in parts.values():
            whole = whole.plus(size)
        result["trees"][name] = whole._asdict()
        result["parts"][name] = {part: parts[part]._asdict() for part in sorted(parts)}
    package = root / TREES[0]
    files = [path for path in package.glob("*.py") if not path.stem.startswith("__")]
    folders = [path for path in package.iterdir() if path.is_dir() and any(path.glob("*.py"))]
    result["top_level"] = {"modules": len(files), "packages": len(folders)}
    return result


def sizes(folder: Path) -> Iterator[tuple[Path, Size]]:
    for path in sorted(folder.rglob("*.py")):
        yield path, size_of(path.read_text(encoding="utf-8"))


def show(result: dict[str, Any]) -> None:
    screen = Console()
    for name, whole in result["trees"].items():
        table = Table("part", title=name)
        for column in Size._fields:
            table.add_column(column, justify="right")
        for part, size in result["parts"][name].items():
            table.add_row(part, *(f"{size[column]:,}" for column in Size._fields))
        table.add_section()
        table.add_row("all", *(f"{whole[column]:,}" for column in Size._fields))
        screen.print(table)
    for path, code in result["long"].items():
        screen.print(f"over {LONG} lines of code: {path} ({code})")
    top = result["top_level"]
    screen.print(f"top level of {TREES[0]}: {top['modules']} modules (without __init__) and {top['packages']} packages")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the figures as JSON, in place of tables")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository to measure; default: this one")
    args = parser.parse_args(argv)
    result = measure(args.root)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)


if __name__ == "__main__":
    main()
