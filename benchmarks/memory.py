"""How much memory a fit and a prediction take, against the number of classes, inducing points and data points.

    python -m benchmarks.memory [--quick] [--device cuda] [--out results.json]

Data are memory-mapped folders in float16, predictions are streamed. Every measurement has a fresh process: on a CPU it
is the process's peak (VmHWM), and that less what it held before the work; pages of the mapped file that were read count
in both, though the system may take them back at any time, so they are shown apart. On a GPU it is the memory allocated.

Beside it stands the formula of docs/scaling.md, B (C + M r) + M² + M D + C r² numbers of 8 bytes: what must be held,
but for a constant factor and for what does not grow. r is 1 where the variance is shared.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.harness import console, finish, high_water, in_fresh_process, mib, options, verdict
from benchmarks.simulated import Simulated
from posthoc import FMGP, Predictive
from posthoc.collect import open_outputs
from posthoc.errors import PosthocWarning

FEATURES, BATCH, STEPS, QUICK_STEPS = 64, 100, 100, 3
MANY_CLASSES, MANY_INDUCING, MOST_BYTES = 10_000, 100, 2e9
"""With so many classes and inducing points, at most so much."""


@dataclass(frozen=True)
class Case:
    """A size of problem."""

    classes: int
    inducing: int
    rows: int
    variance: str
    steps: int = STEPS

    @property
    def data(self) -> Simulated:
        return Simulated(self.rows, self.classes, FEATURES, "float16")

    @property
    def judged(self) -> bool:
        return (self.classes, self.inducing) == (MANY_CLASSES, MANY_INDUCING)

    def fit(self, data: Any, device: torch.device) -> FMGP:
        method = FMGP(
            None,
            "classification",
            variance=self.variance,
            num_inducing=self.inducing,
            batch_size=BATCH,
            steps=self.steps,
            device=device,
            progress=False,
        )
        with half_is_meant():
            return method.fit(data)


SWEEPS = {
    "classes": [
        Case(c, MANY_INDUCING, 2000, variance) for variance in ("per_output", "shared") for c in (10, 100, 1000, 10_000)
    ],
    "inducing points": [Case(1000, m, 2000, "per_output") for m in (10, 50, 100, 200, 400)],
    "data points": [Case(10, 100, n, "auto") for n in (1000, 10_000, 100_000, 1_000_000)],
}
QUICK = {"classes": [Case(50, 10, 200, "per_output", QUICK_STEPS)]}


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--folder", type=Path, help="where the data are made; default: a temporary folder")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        check(folder, device)
        sweeps = QUICK if args.quick else SWEEPS
        result: dict[str, Any] = {
            "features": FEATURES,
            "batch": BATCH,
            "target": f"under {MOST_BYTES / 1e9:g} GB",
            "formula": "8 bytes x (B (C + M r) + M² + M D + C r²); B is the batch, or the rows predicted at once",
            "sweeps": {name: [measure(case, folder, device) for case in cases] for name, cases in sweeps.items()},
        }
    show(result)
    finish("memory", args, result)


def check(folder: Path, device: torch.device) -> None:
    """What is read from a mapped folder gives the numbers of data in memory, and what low rank saves is not missed."""
    case = Case(40, 12, 300, "per_output", steps=5)
    path = case.data.folder(folder / "check")
    mapped, loaded = case.fit(path, device), case.fit(case.data.outputs(), device)
    assert mapped.head is not None
    assert loaded.head is not None
    for a, b in zip(mapped.head.parameters(), loaded.head.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    streamed = joined(mapped.stream(path))
    whole = mapped.predict(case.data.outputs(), covariance=True)
    torch.testing.assert_close(streamed.log_probs, whole.log_probs)
    torch.testing.assert_close(streamed.latent.variance, whole.latent.covariance.diagonal(dim1=-2, dim2=-1))


def joined(parts: Iterator[Predictive]) -> Predictive:
    several = list(parts)
    return type(several[0]).cat(several)


def measure(case: Case, folder: Path, device: torch.device) -> dict[str, Any]:
    """Bytes of a fit and of a prediction with it, and those that the formula names."""
    path = case.data.folder(folder / f"{case.classes}-{case.rows}")
    head = folder / "head.safetensors"
    fit = in_fresh_process(fit_memory, case, path, head, device.type)
    predict = in_fresh_process(predict_memory, path, head, device.type)
    under = max(fit["peak"], predict["peak"]) < MOST_BYTES
    return {**asdict(case), "fit": fit, "predict": predict, "under_target": under if case.judged else None}


def fit_memory(case: Case, path: str, head: Path, device_type: str) -> dict[str, float]:
    """Of a fit, whose head is left for a prediction."""
    device = torch.device(device_type)
    data = open_outputs(path)
    with measured(device) as figures:
        method = case.fit(data, device)
    method.save(head)
    return {**figures, "formula": formula(method, BATCH)}


def predict_memory(path: str, head: Path, device_type: str) -> dict[str, float]:
    """Of a prediction of all the data, streamed."""
    device = torch.device(device_type)
    data = open_outputs(path)
    with measured(device) as figures:
        method = FMGP.load(head, device=device)
        for part in method.stream(data):
            del part
    return {
        **figures,
        "formula": formula(method, min(len(data), method._predictor(method.head, covariance=False).rows)),
    }


@contextmanager
def measured(device: torch.device) -> Iterator[dict[str, float]]:
    """Notes the peak, what of it was added inside, and the pages of mapped data that are in it, in bytes."""
    figures: dict[str, float] = {}
    tiny = Simulated(50, 3, 4).outputs()  # wakes threads and libraries: what they hold is not the work's
    Case(3, 5, 50, "auto", steps=2).fit(tiny, device).predict(tiny)
    before = high_water(device, reset=True)
    yield figures
    figures["peak"] = high_water(device)
    figures["added"] = figures["peak"] - before
    figures["file_pages"] = mapped_pages()


def formula(method: FMGP, batch: int) -> int:
    """Bytes that docs/scaling.md names."""
    assert method.head is not None
    process = method.head.process
    c, (m, d) = process.num_outputs, next(iter(process.z.values())).shape
    r = 1 if process.coupling is None else process.coupling.rank or c
    return 8 * (batch * (c + m * r) + m * m + m * d + c * r * r)


def mapped_pages() -> int:
    """Bytes of mapped arrays that are in this process's memory, where the system says so."""
    maps = Path("/proc/self/smaps")
    text = maps.read_text() if maps.exists() else ""
    return sum(1024 * int(size) for size in re.findall(r"\.npy\n(?:.*\n)*?Rss: +(\d+) kB", text))


@contextmanager
def half_is_meant() -> Iterator[None]:
    """No word on outputs in half precision."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The outputs are torch.float16", PosthocWarning)
        yield


def show(result: dict[str, Any]) -> None:
    screen = console()
    for sweep, cases in result["sweeps"].items():
        table = Table("C", "M", "N", "variance", "", "peak", "added", "file", "formula", "target")
        table.title = f"Peak memory in MiB, against the number of {sweep}"
        for case in cases:
            size = [f"{case[name]:,}" for name in ("classes", "inducing", "rows")]
            for work in ("fit", "predict"):
                figures = [f"{mib(case[work][name]):,.1f}" for name in ("peak", "added", "file_pages", "formula")]
                last = verdict(case["under_target"], result["target"]) if work == "fit" else ""
                table.add_row(*size, case["variance"], work, *figures, last)
            table.add_section()
        screen.print(table)


if __name__ == "__main__":
    main()
