"""A default fit of the size of ImageNet, from a mapped folder of outputs that are made up: time and memory.

    python -m benchmarks.big_fit [--folder FOLDER] [--rows 1281167] [--features 2048] [--classes 1000] [--device cuda]

The folder (7.8 GB in float16) is made unless it is there. The fit runs in a fresh process, the folder's pages out of
the system's cache as far as it lets go of them. It starts from outputs: the network's own run over the images is not in
it. With fewer rows than ImageNet has, the time is extrapolated: the steps are as many and as large whatever the rows,
and all else is taken to grow with them (most of it does not).
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.table import Table

from benchmarks.calls import capture, same_steps
from benchmarks.harness import awake, console, finish, high_water, in_fresh_process, mib, options, synchronise
from benchmarks.memory import half_is_meant
from benchmarks.simulated import Simulated
from posthoc import FMGP
from posthoc.collect import open_outputs
from posthoc.training import History, train

IMAGENET = 1_281_167
PAPER_SECONDS, PAPER_GPU = 18_350, "A100"
CHECKED = 20
"""Steps that are also taken by hand."""


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--folder", type=Path, help="where the outputs are or go; default: a temporary folder")
    parser.add_argument("--rows", type=int, default=IMAGENET)
    parser.add_argument("--features", type=int, default=2048)
    parser.add_argument("--classes", type=int, default=1000)
    args = parser.parse_args(argv)
    data = Simulated(args.rows, args.classes, args.features, "float16")
    if args.quick:
        data = Simulated(400, 40, 8, "float16")
    with ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()), "outputs")
        begin = time.perf_counter()
        path = data.folder(folder)
        made = time.perf_counter() - begin
        fit = in_fresh_process(default_fit, path, args.device, {"steps": CHECKED} if args.quick else {})
    result = {
        **vars(data),
        "bytes_of_data": fit.pop("bytes_of_data"),
        "seconds_to_make_or_find_the_folder": made,
        "without": "the network's run over the images",
        "fit": fit,
        "full_size": at_full_size(fit, data.rows),
        "paper": {"seconds": PAPER_SECONDS, "gpu": PAPER_GPU},
    }
    result["paper_over_ours"] = PAPER_SECONDS / result["full_size"]["seconds"]
    show(result)
    finish("big_fit", args, result)


def at_full_size(fit: dict[str, Any], rows: int) -> dict[str, Any]:
    """The seconds for as many rows as ImageNet has, and where they come from."""
    if rows == IMAGENET:
        return {"rows": rows, "seconds": fit["seconds"], "extrapolated": False, "how": "measured"}
    rest = fit["seconds"] - fit["seconds_of_training"]
    return {
        "rows": IMAGENET,
        "seconds": fit["seconds_of_training"] + rest * IMAGENET / rows,
        "extrapolated": True,
        "how": f"training as measured with {rows} rows, all else times {IMAGENET / rows:.3g}",
    }


def default_fit(path: str, device_name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds and bytes of a fit, to be called in a fresh process."""
    device, spent = torch.device(device_name), 0.0

    def timed_train(*args: Any, **others: Any) -> History:
        nonlocal spent
        begin = time.perf_counter()
        history = train(*args, **others)
        synchronise(device)
        spent = time.perf_counter() - begin
        return history

    awake(device)
    forget(Path(path))
    before = high_water(device, reset=True)
    with half_is_meant():
        begin = time.perf_counter()
        with mock.patch("posthoc.fmgp.build.train", timed_train):
            method = FMGP(None, "classification", device=device, progress=False, **options).fit(path)
        seconds, peak = time.perf_counter() - begin, high_water(device)
        again = capture(FMGP(None, "classification", device=device, progress=False, **options), path)
    return {
        "steps": len(method.history.losses),
        "seconds": seconds,
        "seconds_of_training": spent,
        "steps_per_second": len(method.history.losses) / spent,
        "peak_memory_mib": mib(peak),
        "added_memory_mib": mib(peak - before),
        "greatest_difference_from_steps_by_hand": same_steps(again.run(CHECKED), again.by_hand(CHECKED)),
        "bytes_of_data": open_outputs(path).nbytes,
    }


def forget(folder: Path) -> None:
    """Asks the system to drop the folder's pages from its cache, so that they are read as they first would be."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.glob("*.npy"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def show(result: dict[str, Any]) -> None:
    screen = console()
    title = f"A default fit: {result['classes']:,} classes, {result['features']:,} features, from a mapped folder"
    table = Table("rows", "seconds", "of which training", "steps/s", "peak MiB", title=title)
    fit, full = result["fit"], result["full_size"]
    figures = (fit["seconds"], fit["seconds_of_training"], fit["steps_per_second"], fit["peak_memory_mib"])
    table.add_row(f"{result['rows']:,}", *(f"{figure:,.1f}" for figure in figures))
    if full["extrapolated"]:
        table.add_row(f"{full['rows']:,}", f"{full['seconds']:,.1f}", full["how"], "", "")
    screen.print(table)
    screen.print(f"The paper's {PAPER_SECONDS:,} s ({PAPER_GPU}) are {result['paper_over_ours']:,.0f} times that.")


if __name__ == "__main__":
    main()
