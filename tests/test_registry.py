"""Classes by name, and methods of other packages, which register by an entry point."""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from posthoc.errors import OptionError
from posthoc.registry import Registry

METHOD = """
from posthoc.methods.map import MAP

class Plain(MAP):
    name = "plain"
"""

PROGRAM = """
import sys
import torch
from posthoc import Outputs, compare, load
from posthoc.methods import REGISTRY, method_named

logits = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
data = Outputs(logits, torch.arange(60) % 3)
assert list(REGISTRY)[-1] == "plain", list(REGISTRY)
found = compare(None, data, data, ["map", "plain"])
assert found["plain"].error is None, found["plain"].error
assert found["plain"].figures["nll"] == found["map"].figures["nll"]
method_named("plain")(None, "classification").fit(data).save(sys.argv[1])
assert type(load(sys.argv[1])).__module__ == "another_package.method"
"""


def test_a_method_of_another_package_is_compared_saved_and_loaded(tmp_path: Path) -> None:
    for path, text in {  # as an installer leaves them
        "another_package/__init__.py": "",
        "another_package/method.py": METHOD,
        "another_package-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: another-package\nVersion: 1.0\n",
        "another_package-1.0.dist-info/entry_points.txt": "[posthoc.methods]\nplain = another_package.method:Plain\n",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "head")], check=True, env=environment)


def test_a_class_is_imported_when_it_is_used() -> None:
    registry = Registry("no.such.group", {"fraction": "fractions:Fraction", "missing": "no_such_module:Thing"})
    assert list(registry) == ["fraction", "missing"]
    assert registry["fraction"] is Fraction
    with pytest.raises(OptionError, match=r"'missing' at 'no_such_module:Thing'.*No module named"):
        registry["missing"]
    with pytest.raises(KeyError):
        registry["unknown"]
