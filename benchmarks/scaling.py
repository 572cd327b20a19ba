"""How much faster two processes fit than one, on CPUs: one thread each, gradients summed by gloo.

    python -m benchmarks.scaling [--quick] [--rounds 5] [--out results.json]

1,000 classes, 512 features, batches of 1,024 rows, all else by default. Every round starts one process, then two; each
times a long training less a short one, so that only steps count. Parameters must be equal between the two processes,
bit for bit, and those of one process up to rounding. A profile says what a step of each rank spends its time on.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from benchmarks.calls import Call, Steps, capture, same_steps
from benchmarks.harness import console, finish, options, timed, verdict
from benchmarks.simulated import Simulated
from posthoc import FMGP
from posthoc.fmgp.points import TrainingBatch
from posthoc.training.distributed import distributed

T = TypeVar("T")

CPU = torch.device("cpu")
LEAST = 1.5
REPEATS = 20


@dataclass(frozen=True)
class Size:
    """Of the problem, and of its two trainings."""

    classes: int = 1000
    features: int = 512
    batch: int = 1024
    inducing: int = 100
    rows: int = 10_000
    short: int = 20
    steps: int = 60

    def call(self) -> Call:
        data = Simulated(self.rows, self.classes, self.features).outputs()
        options: dict[str, Any] = {"num_inducing": self.inducing, "batch_size": self.batch, "progress": False}
        return capture(FMGP(None, "classification", variance="shared", **options), data)


QUICK = Size(classes=40, features=8, batch=64, inducing=10, rows=300, short=2, steps=4)


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    if torch.device(args.device).type != "cpu":
        parser.error("this one is about CPUs: leave --device out")
    size, rounds = (QUICK, 1) if args.quick else (Size(), args.rounds)

    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    runs = [{count: spawned(size, count) for count in (1, 2)} for _ in range(rounds)]
    agreed = [agreement(run) for run in runs]
    speed = {count: [rate(run[count], size) for run in runs] for count in (1, 2)}
    ratio = statistics.median(b / a for a, b in zip(speed[1], speed[2], strict=True))
    result = {
        "size": vars(size),
        "rounds": rounds,
        "threads_per_process": 1,
        "load_average_before": busy,
        "steps_per_second": {count: statistics.median(v) / size.batch for count, v in speed.items()},
        "rows_per_second": {count: statistics.median(v) for count, v in speed.items()},
        "all_rounds_rows_per_second": speed,
        "two_over_one": ratio,
        "target": f"at least {LEAST} times",
        "met": ratio >= LEAST,
        "equal_between_ranks": True,
        "greatest_difference_from_one_process": max(agreed),
        "profile_milliseconds": {count: profile([run[count] for run in runs]) for count in (1, 2)},
    }
    show(result)
    finish("scaling", args, result)


@dataclass
class Report:
    """What one process has to say."""

    seconds_per_step: float
    taken: Steps
    profile: dict[str, float]


class Seconds(NamedTuple):
    """By the clock on the wall, which others' work holds up too, and of this process."""

    wall: float
    cpu: float


def spawned(size: Size, count: int) -> list[Report]:
    """The reports of so many processes that train as one."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (count, free_port(), size, folder), nprocs=count)
        return [read(Path(folder), rank) for rank in range(count)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def work(rank: int, count: int, port: int, size: Size, folder: str) -> None:
    """One process, with the environment that `torchrun` gives."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    with distributed("cpu"):
        call = size.call()
        short, _ = together(lambda: call.run(size.short))
        long, taken = together(lambda: call.run(size.short + size.steps))
        seconds = (long.wall - short.wall) / size.steps
        parts = {
            "a step": 1e3 * seconds,
            "a step, CPU time": 1e3 * (long.cpu - short.cpu) / size.steps,
            **profiled(call, size),
        }
    torch.save([torch.tensor(taken.losses, dtype=torch.float64), *taken.parameters], Path(folder, f"{rank}.pt"))
    Path(folder, f"{rank}.json").write_text(json.dumps({"seconds_per_step": seconds, "profile": parts}))


def read(folder: Path, rank: int) -> Report:
    losses, *parameters = torch.load(folder / f"{rank}.pt", weights_only=True)
    return Report(**json.loads((folder / f"{rank}.json").read_text()), taken=Steps(losses.tolist(), parameters))


def together(run: Callable[[], T]) -> tuple[Seconds, T]:
    """The time of something that all processes begin at once, and what came of it."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    value = run()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu), value


def agreement(run: dict[int, list[Report]]) -> float:
    """The greatest difference between one process and two, which must be equal to each other in every bit."""
    one, (first, second) = run[1][0].taken, (report.taken for report in run[2])
    assert first.losses == second.losses, "the processes' losses differ"
    assert all(map(torch.equal, first.parameters, second.parameters)), "the processes' parameters differ"
    return same_steps(first, one)


def rate(reports: list[Report], size: Size) -> float:
    """Rows a second, of the process that took longest."""
    return size.batch / max(report.seconds_per_step for report in reports)


def profiled(call: Call, size: Size) -> dict[str, float]:
    """Milliseconds of the parts of one rank's step, all ranks at work."""
    batch = call.source.block(0, 1).map(lambda t: t[0])
    assert isinstance(batch, TrainingBatch)
    reading = median_time(lambda i: call.source.block(i, 1))
    whole = median_time(lambda _: gradient(call, batch))
    repeated = median_time(lambda _: gradient(call, batch.map(lambda t: t[:1])))
    grads = torch.zeros(sum(p.numel() for p in call.parameters if p.requires_grad), dtype=torch.float64)
    alone = dist.get_world_size() == 1
    summing = 0.0 if alone else median_time(lambda _: dist.all_reduce(grads))
    with counted_all_reduce() as waited:
        call.run(size.steps)
    parts = {
        "reading the batch": reading,
        "loss and gradient": whole,
        "of which with one row": repeated,  # all that is M x M: every rank repeats it
        "all-reduce with waiting": sum(waited) / size.steps,
        "of which all-reduce": summing,
    }
    return {name: 1e3 * seconds for name, seconds in parts.items()}


def gradient(call: Call, batch: TrainingBatch) -> None:
    call.objective(batch).backward()
    for p in call.parameters:
        p.grad = None


def median_time(run: Callable[[int], object]) -> float:
    """Seconds of one of several runs, begun by all processes at once."""
    run(0)
    dist.barrier()
    return statistics.median(timed(lambda i=i: run(i), CPU) for i in range(REPEATS))  # type: ignore[misc]


@contextmanager
def counted_all_reduce() -> Iterator[list[float]]:
    """The seconds of every sum over the ranks inside."""
    taken: list[float] = []

    def all_reduce(tensor: Tensor) -> None:
        taken.append(timed(lambda: real(tensor), CPU))

    real = dist.all_reduce
    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield taken


def profile(runs: list[list[Report]]) -> dict[str, float]:
    """The median of every part, over ranks and rounds."""
    reports = [report.profile for run in runs for report in run]
    return {name: statistics.median(report[name] for report in reports) for name in reports[0]}


def show(result: dict[str, Any]) -> None:
    screen = console()
    table = Table("processes", "steps/s", "rows/s", "", "target", title="Training in several processes")
    for count, speed in result["rows_per_second"].items():
        last = (f"{result['two_over_one']:.2f} ×", verdict(result["met"], result["target"])) if count > 1 else ("", "")
        table.add_row(str(count), f"{result['steps_per_second'][count]:.1f}", f"{speed:,.0f}", *last)
    screen.print(table)
    one, two = result["profile_milliseconds"].values()
    table = Table("part", "one process", "each of two", title="Milliseconds of a step")
    for name, value in one.items():
        table.add_row(name, f"{value:.2f}", f"{two[name]:.2f}")
    screen.print(table)


if __name__ == "__main__":
    main()
