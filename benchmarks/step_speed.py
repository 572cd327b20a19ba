"""How fast a training step is: ours, against a plain dense implementation and against the least it could cost; a whole
default fit against 5,000 steps of the dense one; and the sizes of image classifiers, replayed and not.

    python -m benchmarks.step_speed [--quick] [--device cuda] [--only shapes] [--rounds 9] [--out results.json]

Steps are timed on synthetic data, a long run less a short one, the variants in turn in every round; the median round
counts. The whole fits use real data where the environment variable POSTHOC_DATA names their folder. Memory is the
growth of a fresh process's peak over what it held before the steps (on a GPU: of the memory allocated there).
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.calls import Call, capture
from benchmarks.floor import floor_step
from benchmarks.harness import (
    Run,
    awake,
    console,
    enough_steps,
    finish,
    high_water,
    in_fresh_process,
    mib,
    options,
    step_and_start,
    timed,
    yes,
)
from benchmarks.reference import DenseFMGP, endless, loader, train_reference
from benchmarks.shapes import SHAPES, compare_ways, show_shapes
from benchmarks.tasks import Task, cifar10, protein, synthetic_classification, synthetic_regression
from posthoc import FMGP
from posthoc.fmgp.points import PointView
from posthoc.fmgp.process import Objective
from posthoc.kernels import RBF
from posthoc.training import single_thread

TASKS: dict[str, Callable[..., Task]] = {
    "regression": synthetic_regression,
    "classification": synthetic_classification,
}
VARIANTS = ("ours", "reference", "floor")
PARTS = ("steps", "fits", "shapes")
BATCH, INDUCING, REFERENCE_STEPS, SEEDS = 100, 100, 5000, 3
FITS = "A default fit against the reference's steps"
SHORT = 10
"""Steps of the run whose time is taken off that of a long one."""


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=PARTS, action="append", help="a part to run; may be given more than once")
    args = parser.parse_args(argv)
    device, parts = torch.device(args.device), tuple(args.only or PARTS)
    rounds, seconds = (1, 0.01) if args.quick else (args.rounds, 1.0)
    shapes = list(SHAPES)[:1] if args.quick else list(SHAPES)

    result: dict[str, Any] = {
        "settings": {
            "batch": BATCH,
            "inducing": INDUCING,
            "rounds": rounds,
            "seconds_per_variant_and_round": seconds,
            "ours": "the call of posthoc.training.train that FMGP.fit makes, outputs cached",
            "reference": "float64 throughout, dense kernels, explicit inverses, network and DataLoader in every step",
            "floor": "kernels, products, one Cholesky and one triangular solve, forward and backward, float64",
        },
    }
    if "steps" in parts:
        result["steps"] = {n: step_speed(make().to(device), device, rounds, seconds) for n, make in TASKS.items()}
    if "fits" in parts:
        result["fits"] = {task.name: compare_fits(task.to(device), device, args.quick) for task in whole_tasks()}
    if "shapes" in parts:
        result["shapes"] = {name: compare_ways(name, device, rounds, seconds) for name in shapes}
    show(result)
    finish("-".join(["step_speed", *(args.only or [])]), args, result)


def step_speed(task: Task, device: torch.device, rounds: int, seconds: float) -> dict[str, Any]:
    """Steps a second and peak memory of each variant."""
    runs = variants(task, device, check=True)
    counts = {name: enough_steps(runs[name], seconds, device, SHORT) for name in VARIANTS}
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(rounds):
        for name in VARIANTS:
            times[name].append(step_and_start(runs[name], counts[name], device, SHORT)[0])
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
    call = captured(task, device, **options)
    method = call.method
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
        with single_thread(device.type == "cpu"):  # which it likes best, as ours does
            for _ in range(steps):
                step()

    return {
        "ours": call.run,
        "reference": lambda steps: train_reference(reference, wide.look, batches, steps),
        "floor": floor,
    }


def captured(task: Task, device: torch.device, **options: Any) -> Call:
    """Our method, fitted on the network's cached outputs but for its training."""
    return capture(task.method(batch_size=BATCH, num_inducing=INDUCING, device=device, **options), task.outputs())


def agree(task: Task, method: FMGP) -> None:
    """At the same parameters, away from the start, and on the same batch, the reference has our loss and covariance."""
    head, outputs = method.head, task.outputs()
    assert head is not None
    assert outputs.targets is not None
    learned = [p for p in head.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in learned]
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in learned:
            size = 0.005 if p is head.process.l_raw else 0.05  # far from the start, an explicit Ã⁻¹ has few digits
            p.add_(size * torch.randn(p.shape, generator=g, dtype=p.dtype).to(p.device))
        rows = torch.arange(BATCH, device=outputs.outputs.device)
        objective = Objective(head.process, head.likelihood, method.config.alpha, len(outputs))
        batch = PointView(outputs, head.coordinates).batch(head.likelihood, outputs[rows])
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
        for p, kept in zip(learned, before, strict=True):
            p.copy_(kept)


def peak_memory(name: str, variant: str, device_type: str) -> float:
    """MiB that some steps add at their worst, to be called in a fresh process. The network is not trained, inducing
    points and length-scales are given: whatever came before the steps must not have used more than they do."""
    device = torch.device(device_type)
    task = TASKS[name](epochs=0).to(device)
    start = getattr(task.outputs(), task.space)[:INDUCING]
    runs = variants(task, device, kernel=RBF(on=task.space, lengthscale=1.0), inducing=start)
    awake(device)
    before = high_water(device, reset=True)
    runs[variant](20)
    return mib(high_water(device) - before)


def whole_tasks() -> list[Task]:
    """Real data where there are any."""
    folder = os.environ.get("POSTHOC_DATA")
    if folder:
        return [protein(Path(folder)), *(cifar10(Path(folder), network) for network in ("resnet20", "resnet56"))]
    return [synthetic_regression(), synthetic_classification()]


def compare_fits(task: Task, device: torch.device, quick: bool) -> dict[str, Any]:
    """A default fit, with the network's run over the data and all else, against the reference's steps alone: means over
    seeds, since their losses differ by more than the methods' do."""
    steps, short, seeds = (5, {"steps": 20}, 1) if quick else (REFERENCE_STEPS, {}, SEEDS)
    runs: dict[str, list[Fit]] = {}
    for seed in range(seeds):
        given = {"device": device, "seed": seed, **short}
        runs.setdefault("reference", []).append(fit_reference(task, device, steps, seed))
        for name, method in {
            "ours": task.default(**given),
            "ours, the reference's kernel": task.method(**given),
        }.items():
            runs.setdefault(name, []).append(fit_ours(task, device, method))
    result: dict[str, Any] = {"data": task.note, "points": len(task.fit[0]), "seeds": seeds}
    losses = {name: torch.stack([fit.losses for fit in fits]).mean(0) for name, fits in runs.items()}
    for name, fits in runs.items():
        found = {field: statistics.mean(getattr(fit, field) for fit in fits) for field in ("nll", "seconds")}
        result[name] = {"steps": fits[0].steps, **found, "nll_by_seed": [fit.nll for fit in fits]}
        if name != "reference":
            ratio = found["seconds"] / result["reference"]["seconds"]
            more = losses[name] - losses["reference"]
            result[name] |= {
                "time_ratio": ratio,
                "nll_above_the_reference": float(more.mean()),
                "its_standard_error": float(more.std()) / len(more) ** 0.5,
                "as_good": round(found["nll"], 4) <= round(result["reference"]["nll"], 4),
                "tenth_of_the_time": ratio <= 0.1,
            }
    return result


class Fit(NamedTuple):
    steps: int
    losses: Tensor  # (N,), of new data
    seconds: float

    @property
    def nll(self) -> float:
        return float(self.losses.mean())


def fit_reference(task: Task, device: torch.device, steps: int, seed: int) -> Fit:
    start = captured(task, device, seed=seed).method
    assert start.head is not None
    torch.manual_seed(seed)  # the loader shuffles by it
    reference = DenseFMGP(start.head, len(task.fit[0]))
    with torch.no_grad():
        reference.l.copy_(torch.eye(len(reference.l)))  # where the paper starts; our own start would serve it worse
    reference.unit = torch.ones_like(reference.l[0, 0])  # and logits as they come
    wide = task.double()
    batches = endless(loader(wide.fit, BATCH))
    seconds = timed(lambda: train_reference(reference, wide.look, batches, steps), device)
    return Fit(steps, reference.losses(wide.look, wide.score), seconds)


def fit_ours(task: Task, device: torch.device, method: FMGP) -> Fit:
    seconds = timed(lambda: method.fit(task.data(task.fit)), device)
    losses = -method.predict(task.data(task.score)).log_prob(task.score[-1]).double().cpu()
    return Fit(len(method.history.losses), losses, seconds)


def show(result: dict[str, Any]) -> None:
    screen = console()
    if "steps" in result:
        show_steps(screen, result["steps"])
    if "fits" in result:
        show_fits(screen, result["fits"])
    if "shapes" in result:
        show_shapes(screen, result["shapes"])


def show_steps(screen: Console, steps: dict[str, Any]) -> None:
    table = Table("task", "variant", "steps/s", "ms/step", "peak MiB", title="One training step")
    for name, r in steps.items():
        for v in VARIANTS:
            speed, ms, memory = (r[k][v] for k in ("steps_per_second", "milliseconds_per_step", "peak_memory_mib"))
            table.add_row(name, v, f"{speed:.0f}", f"{ms:.2f}", f"{memory:.1f}")
        verdict = f"{r['ours_over_floor_time']:.2f} × the floor's time ({yes(r['within_twice_the_floor'])}: at most 2)"
        table.add_row("", verdict)
        verdict = (
            f"{r['ours_over_reference_speed']:.1f} × the reference ({yes(r['four_times_the_reference'])}: at least 4)"
        )
        table.add_row("", verdict, end_section=True)
    screen.print(table)


def show_fits(screen: Console, fits: dict[str, Any]) -> None:
    table = Table("task", "fit", "NLL", "above", "seconds", "time / reference's", "as good", title=FITS)
    for name, r in fits.items():
        for fit in ("ours", "ours, the reference's kernel", "reference"):
            f = r[fit]
            above, ratio, good = "", "", ""
            if "as_good" in f:
                above = f"{f['nll_above_the_reference']:+.4f} ± {f['its_standard_error']:.4f}"
                ratio, good = f"{f['time_ratio']:.3f}", yes(f["as_good"])
            table.add_row(
                name, f"{fit}, {f['steps']} steps", f"{f['nll']:.4f}", above, f"{f['seconds']:.2f}", ratio, good
            )
        table.add_row("", r["data"], end_section=True)
    screen.print(table)


if __name__ == "__main__":
    main()
