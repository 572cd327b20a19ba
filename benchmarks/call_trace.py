"""How far a reader has to walk: the files of the package that a default `fit` and `predict` pass through.

    python -m benchmarks.call_trace [--src FOLDER] [--json]

A small classifier with features is fitted with all options at their defaults, and predicts a batch, while
`sys.setprofile` notes every call of a function of the package, in all threads. Counted are

files: those of which a function was called;
functions: different ones that were called, without lambdas and comprehensions;
returns: with the functions put in the order of their first calls, how often the file changes to one that was left
    before. It is what somebody does who reads each function once, as the program comes to it: runs of functions of
    one file, less the number of files. Repetition in a loop does not count.

Code that runs because a module is imported is left out. The data are such that a form of variance is chosen, so that a
prediction goes all the way. `--src` names a folder that holds another version of the package.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

SRC = Path(__file__).parents[1] / "src"
ROWS, INPUTS, HIDDEN, CLASSES = 1500, 8, 16, 3
THREADS = 1
"""With more, candidates are worked on side by side, and first calls come in no fixed order."""


class Trace:
    """The functions of a package in the order in which they are first called."""

    def __init__(self, package: str) -> None:
        self.prefix = package.rstrip("/") + "/"
        self.functions: dict[tuple[str, str], None] = {}
        self.codes: set[CodeType] = set()
        self.importing = threading.local()

    def of(self, action: Callable[[], object]) -> dict[str, Any]:
        """What an action passes through."""
        before, before_threads = sys.getprofile(), threading.getprofile()
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            action()
        finally:
            sys.setprofile(before)
            threading.setprofile(before_threads)
        return figures([file for file, _ in self.functions]) | {
            "order": [f"{file}: {name}" for file, name in self.functions]
        }

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if code.co_name == "<module>":  # of any package: what it imports is no part of the action either
            step = {"call": 1, "return": -1}.get(event, 0)
            self.importing.depth = getattr(self.importing, "depth", 0) + step
        elif event == "call" and code not in self.codes and not getattr(self.importing, "depth", 0):
            self.codes.add(code)
            # The body of a class has no locals of its own, a lambda or a comprehension has no name.
            named = code.co_name[0] != "<" and code.co_flags & inspect.CO_NEWLOCALS
            if named and code.co_filename.startswith(self.prefix):
                self.functions[code.co_filename.removeprefix(self.prefix), code.co_qualname] = None


def figures(files: list[str]) -> dict[str, Any]:
    """The counts, from the files of functions in the order of first calls."""
    runs = [file for i, file in enumerate(files) if i == 0 or files[i - 1] != file]
    return {"files": len(set(files)), "functions": len(files), "returns": len(runs) - len(set(runs))}


def problem() -> tuple[nn.Module, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A network, inputs and labels: it is too sure of itself, more so far from zero along the first input."""
    rng = np.random.default_rng(0)
    network = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
    with torch.no_grad():
        for layer, size in ((network[0], 0.4), (network[2], 1.2)):
            for p in layer.parameters():
                p.copy_(torch.from_numpy(size * rng.normal(size=tuple(p.shape))))
        x = rng.normal(size=(ROWS, INPUTS)).astype(np.float32)
        logits = network(torch.from_numpy(x)).numpy()
    y = (logits / (0.3 + 3.0 * np.abs(x[:, :1])) + rng.gumbel(size=logits.shape)).argmax(-1)
    return network.eval(), x, y


def trace() -> dict[str, Any]:
    """Figures of `fit` and `predict`, for the package that is imported."""
    import posthoc

    package = str(Path(posthoc.__file__ or "").parent)
    torch.set_num_threads(THREADS)
    network, x, y = problem()
    method = posthoc.FMGP(network, "classification", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = Trace(package).of(lambda: method.fit((x, y)))
        predict = Trace(package).of(lambda: method.predict(x[:20]))
    return {"fit": fit, "predict": predict}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--src", type=Path, default=SRC, help="the folder with the package; default: this checkout's")
    parser.add_argument("--json", action="store_true", help="the figures as JSON, with the functions in their order")
    args = parser.parse_args(argv)
    sys.path.insert(0, str(args.src.resolve()))
    result = trace()
    if args.json:
        print(json.dumps(result, indent=2))
        return
    for name, found in result.items():
        counts = ", ".join(f"{found[key]} {key}" for key in ("files", "functions", "returns"))
        print(f"{name}: {counts}")


if __name__ == "__main__":
    main()
