"""How fast a training step is: ours, against a plain dense implementation and against the least it could cost; and a
whole default fit against 5,000 steps of the dense one.

    python -m benchmarks.step_speed [--quick] [--device cuda] [--rounds 7] [--out results.json]

Steps are timed on synthetic data, the three variants in turn in every round; the median round counts. The whole fits
use real data where the environment variable POSTHOC_DATA names their folder. Memory is the growth of a fresh process's
peak over what it held before the steps (on a GPU: of the memory allocated there).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.floor import floor_step
from benchmarks.machine import describe
from benchmarks.reference import DenseFMGP, endless, loader, train_reference
from benchmarks.tasks import Task, cifar10, protein, synthetic_classification, synthetic_regression
from posthoc import FMGP, Outputs
from posthoc.fmgp.objective import Objective
from posthoc.fmgp.points import PointView
from posthoc.kernels import RBF
from posthoc.training import History, few_threads, train

TASKS: dict[str, Callable[..., Task]] = {
    "regression": synthetic_regression,
    "classification": synthetic_classification,
}
VARIANTS = ("ours", "reference", "floor")
BATCH, INDUCING, REFERENCE_STEPS = 100, 100, 5000

Run = Callable[[int], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run, to see that it works; writes only to --out")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/step_speed-DEVICE.json")
    args = parser.parse_args()
    device = torch.device(args.device)
    rounds, seconds = (2, 0.2) if args.quick else (args.rounds, 1.0)

    steps = {name: step_speed(make().to(device), device, rounds, seconds) for name, make in TASKS.items()}
    fits = {task.name: compare_fits(task.to(device), device, args.quick) for task in whole_tasks()}
    result = {
        "machine": describe(),
        "settings": {
            "device": device.type,
            "batch": BATCH,
            "inducing": INDUCING,
            "rounds": rounds,
            "seconds_per_variant_and_round": seconds,
            "quick": args.quick,
            "ours": "the call of posthoc.training.train that FMGP.fit makes, outputs cached",
            "reference": "float64 throughout, dense kernels, explicit inverses, network and DataLoader in every step",
            "floor": "kernels, products, one Cholesky and one triangular solve, forward and backward, float64",
        },
        "steps": steps,
        "fits": fits,
    }
    show(result)
    if args.quick:
        print("A quick run: too short to be a result, and the reference's fit has stopped far from its end.")
    out = args.out or (None if args.quick else Path(__file__).parent / "results" / f"step_speed-{device.type}.json")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n")


def step_speed(task: Task, device: torch.device, rounds: int, seconds: float) -> dict[str, Any]:
    """Steps a second and peak memory of each variant."""
    runs = variants(task, device, check=True)
    counts = {name: max(2, int(seconds / timed(runs[name], 10, device))) for name in VARIANTS}
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(rounds):
        for name in VARIANTS:
            times[name].append(timed(runs[name], counts[name], device))
    middle = {name: statistics.median(values) for name, values in times.items()}
    over_floor = statistics.median(o / f for o, f in zip(times["ours"], times["floor"], strict=True))
    speed_up = statistics.median(r / o for o, r in zip(times["ours"], times["reference"], strict=True))
    return {
        "data": task.note,
        "points": len(task.fit[0]),
        "steps_per_second": {name: 1.0 / t for name, t in middle.items()},
        "milliseconds_per_step": {name: 1e3 * t for name, t in middle.items()},
        "steps_per_round": counts,
        "peak_memory_mib": {name: in_fresh_process(peak_memory, task.name, name, device.type) for name in VARIANTS},
        "ours_over_floor_time": over_floor,
        "ours_over_reference_speed": speed_up,
        "within_twice_the_floor": over_floor <= 2.0,
        "four_times_the_reference": speed_up >= 4.0,
    }


def variants(task: Task, device: torch.device, check: bool = False, **options: Any) -> dict[str, Run]:
    """Each variant as a function that runs so many steps."""
    method, ours = captured(task, task.outputs(), device, **options)
    assert method.head is not None
    if check:
        agree(task, method)
    reference = DenseFMGP(method.head, len(task.fit[0]))
    wide = task.double()
    batches = endless(loader(wide.fit, BATCH))
    process = method.head.process
    width = sum(block.shape[1] for block in process.z.values())
    step = floor_step(BATCH, len(process.l_raw), width, process.num_outputs, device)

    def floor(steps: int) -> None:
        with few_threads(device.type == "cpu"):  # which it likes best, as ours does
            for _ in range(steps):
                step()

    return {
        "ours": ours,
        "reference": lambda steps: train_reference(reference, wide.look, batches, steps),
        "floor": floor,
    }


def captured(task: Task, outputs: Outputs, device: torch.device, **options: Any) -> tuple[FMGP, Run]:
    """Our method, fitted but for its training, and the call of `train` that `FMGP.fit` makes, to repeat."""
    calls: list[Any] = []

    def keep(objective: Any, parameters: Any, batches: Any, training: Any, **others: Any) -> History:
        calls.append((objective, list(parameters), training, others))
        return History()

    method = task.method(batch_size=BATCH, num_inducing=INDUCING, device=device, **options)
    with mock.patch("posthoc.fmgp.model.train", keep):
        method.fit(outputs)
    assert method.head is not None
    objective, parameters, training, others = calls[0]
    # `fit` closes its batches at its end, so these are the same made again.
    view, generator = PointView(outputs, method.head.coordinates), torch.Generator().manual_seed(training.seed)
    batches = view.batches(method.head.likelihood, BATCH, generator)

    def run(steps: int) -> None:
        with few_threads(device.type == "cpu"):  # as `fit` does at this size
            train(objective, parameters, batches, replace(training, steps=steps), **others)

    return method, run


def agree(task: Task, method: FMGP) -> None:
    """At the same parameters, away from the start, and on the same batch, the reference has our loss and covariance."""
    head, outputs = method.head, task.outputs()
    assert head is not None
    assert outputs.targets is not None
    learnt = [p for p in head.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in learnt]
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in learnt:
            size = 0.005 if p is head.process.l_raw else 0.05  # far from the start, an explicit Ã⁻¹ has few digits
            p.add_(size * torch.randn(p.shape, generator=g, dtype=p.dtype).to(p.device))
        rows = torch.arange(BATCH, device=outputs.outputs.device)
        objective = Objective(head.process, head.likelihood, method.alpha, len(outputs))
        batch = PointView(outputs, head.coordinates).batch(head.likelihood, rows)
        reference = DenseFMGP(head, len(outputs))
        coordinates = getattr(outputs, task.space)[rows]
        torch.testing.assert_close(
            reference.loss(outputs.outputs[rows], coordinates, outputs.targets[rows]),
            objective(batch),
            rtol=1e-8,
            atol=0,
        )
        ours = head.process(batch.points)[0].covariance()
        torch.testing.assert_close(reference(coordinates)[0], ours, rtol=1e-8, atol=1e-10)
        for p, kept in zip(learnt, before, strict=True):
            p.copy_(kept)


def peak_memory(name: str, variant: str, device_type: str) -> float:
    """MiB that some steps add at their worst, to be called in a fresh process. The network is not trained, inducing
    points and length-scales are given: whatever came before the steps must not have used more than they do."""
    device = torch.device(device_type)
    task = TASKS[name](epochs=0).to(device)
    start = getattr(task.outputs(), task.space)[:INDUCING]
    runs = variants(task, device, kernel=RBF(on=task.space, lengthscale=1.0), inducing=start)
    a = torch.eye(8, dtype=torch.float64, device=device, requires_grad=True)  # threads and libraries come to life
    torch.linalg.solve_triangular(torch.linalg.cholesky(a @ a), a, upper=False).sum().backward()
    torch.optim.Adam([a]).step()
    before = high_water(device, reset=True)
    runs[variant](20)
    return (high_water(device) - before) / 2**20


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


def in_fresh_process(function: Callable[..., float], *args: Any) -> float:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def whole_tasks() -> list[Task]:
    """Real data where there are any."""
    folder = os.environ.get("POSTHOC_DATA")
    if folder:
        return [protein(Path(folder)), cifar10(Path(folder))]
    return [synthetic_regression(), synthetic_classification()]


def compare_fits(task: Task, device: torch.device, quick: bool) -> dict[str, Any]:
    """A default fit, with the network's run over the data and all else, against the reference's steps alone."""
    steps = 100 if quick else REFERENCE_STEPS
    start, _ = captured(task, task.outputs(), device)
    assert start.head is not None
    torch.manual_seed(0)  # the loader shuffles by it
    reference = DenseFMGP(start.head, len(task.fit[0]))
    with torch.no_grad():
        reference.l.copy_(torch.eye(len(reference.l)))  # where the paper starts; our own start would serve it worse
    wide = task.double()
    batches = endless(loader(wide.fit, BATCH))
    reference_time = steps * timed(lambda n: train_reference(reference, wide.look, batches, n), steps, device)
    result: dict[str, Any] = {
        "data": task.note,
        "points": len(task.fit[0]),
        "reference": {"steps": steps, "nll": reference.nll(wide.look, wide.score), "seconds": reference_time},
    }
    for name, method in {
        "ours": task.default(device),
        "ours, the reference's kernel": task.method(device=device),
    }.items():
        seconds = timed(lambda _, method=method: method.fit(task.data(task.fit)), 1, device)  # type: ignore[misc]
        nll = float(-method.predict(task.data(task.score)).log_prob(task.score[-1]).double().mean())
        result[name] = {
            "steps": method.training.steps,
            "nll": nll,
            "seconds": seconds,
            "time_ratio": seconds / reference_time,
            "as_good": nll <= result["reference"]["nll"],
            "tenth_of_the_time": seconds <= 0.1 * reference_time,
        }
    return result


def timed(run: Run, steps: int, device: torch.device) -> float:
    """Seconds a step."""
    synchronise(device)
    begin = time.perf_counter()
    run(steps)
    synchronise(device)
    return (time.perf_counter() - begin) / steps


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def show(result: dict[str, Any]) -> None:
    console = Console()
    console.print(result["machine"])
    table = Table("task", "variant", "steps/s", "ms/step", "peak MiB", title="One training step")
    for name, r in result["steps"].items():
        for v in VARIANTS:
            speed, ms, memory = (r[k][v] for k in ("steps_per_second", "milliseconds_per_step", "peak_memory_mib"))
            table.add_row(name, v, f"{speed:.0f}", f"{ms:.2f}", f"{memory:.1f}")
        verdict = f"{r['ours_over_floor_time']:.2f} × the floor's time ({yes(r['within_twice_the_floor'])}: at most 2)"
        table.add_row("", verdict)
        verdict = (
            f"{r['ours_over_reference_speed']:.1f} × the reference ({yes(r['four_times_the_reference'])}: at least 4)"
        )
        table.add_row("", verdict, end_section=True)
    console.print(table)
    table = Table(
        "task", "fit", "NLL", "seconds", "", "time / reference's", title="A default fit against the reference's steps"
    )
    for name, r in result["fits"].items():
        for fit in ("ours", "ours, the reference's kernel", "reference"):
            f = r[fit]
            verdicts = (f"as good: {yes(f['as_good'])}", f"{f['time_ratio']:.3f}") if "as_good" in f else ("", "")
            table.add_row(name, f"{fit}, {f['steps']} steps", f"{f['nll']:.4f}", f"{f['seconds']:.2f}", *verdicts)
        table.add_row("", r["data"], end_section=True)
    console.print(table)


def yes(value: bool) -> str:
    return "yes" if value else "NO"


if __name__ == "__main__":
    main()
