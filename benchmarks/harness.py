"""What every benchmark needs: its options, clocks, marks of memory, verdicts, and the file of its results."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from benchmarks.machine import describe

__all__ = [
    "Run",
    "awake",
    "console",
    "enough_steps",
    "finish",
    "high_water",
    "in_fresh_process",
    "mib",
    "options",
    "step_and_start",
    "synchronise",
    "timed",
    "verdict",
    "with_data",
    "yes",
]

T = TypeVar("T")

WIDTH = 120

Run = Callable[[int], object]
"""Runs so many steps."""


def options(doc: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run, to see that it works; writes only to --out")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/NAME-DEVICE.json")
    return parser


def with_data(parser: argparse.ArgumentParser) -> None:
    """Adds the option that names the folder with real data."""
    folder = os.environ.get("POSTHOC_DATA")
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=folder,
        required=folder is None,
        help="the folder with the data; default: what POSTHOC_DATA names",
    )


def finish(name: str, args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Writes the results with the machine they are of. A quick run is no result: it writes only where told to."""
    device = torch.device(args.device).type
    if args.quick:
        print("A quick run: too short to be a result.")
    out = args.out or (None if args.quick else Path(__file__).parent / "results" / f"{name}-{device}.json")
    if out is not None:
        document = {"machine": describe(), "device": device, "quick": args.quick, **result}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=2) + "\n")
        print(f"wrote {out}")


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds."""
    synchronise(device)
    begin = time.perf_counter()
    run()
    synchronise(device)
    return time.perf_counter() - begin


def enough_steps(run: Run, seconds: float, device: torch.device, short: int) -> int:
    """So many steps that they take so long, after `short` others."""
    base, steps = timed(partial(run, short), device), short
    while timed(partial(run, short + steps), device) - base < seconds:
        steps *= 2
    return steps


def step_and_start(run: Run, steps: int, device: torch.device, short: int) -> tuple[float, float]:
    """Seconds a step, from a long run less a short one, and seconds before the first step."""
    base, whole = timed(partial(run, short), device), timed(partial(run, short + steps), device)
    step = max(whole - base, 1e-9) / steps  # on a busy machine, the short run may take as long
    return step, max(0.0, base - short * step)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def in_fresh_process(function: Callable[..., T], *args: Any) -> T:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def awake(device: torch.device) -> None:
    """Threads and libraries come to life, so that what they hold is not taken for the work's."""
    a = torch.eye(8, dtype=torch.float64, device=device, requires_grad=True)
    torch.linalg.solve_triangular(torch.linalg.cholesky(a @ a), a, upper=False).sum().backward()
    torch.optim.Adam([a]).step()


def high_water(device: torch.device, reset: bool = False) -> int:
    """The most bytes held so far; `reset` counts from now, where that can be done."""
    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    # On Linux a process starts with its parent's ru_maxrss; the kernel's own mark for its memory does not.
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def console() -> Console:
    """Wide enough for the tables, also where the output is a file; begins with the machine."""
    wide = Console()
    wide.width = max(wide.width, WIDTH)
    wide.print(describe())
    return wide


def mib(size: float) -> float:
    return size / 2**20


def yes(value: bool) -> str:
    return "yes" if value else "NO"


def verdict(met: bool | None, target: str) -> str:
    """A target and whether it was met; None where it is not meant for this device."""
    return f"{target}: {yes(met)}" if met is not None else "–"
