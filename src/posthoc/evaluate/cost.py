"""What work costs, in seconds and in memory, and on which machine."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["Cost", "awake", "machine", "measured", "synchronised", "versions"]

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass
class Cost:
    """Seconds, and the bytes that were held at the peak beyond those held before; None where nobody can tell."""

    seconds: float = 0.0
    memory: int | None = None


@contextmanager
def measured(device: torch.device | None) -> Iterator[Cost]:
    """The cost of what is done inside. Memory is the GPU's where the device is one, else this process's: what was freed
    before and not given back to the system is used again unseen, so that only a fresh process shows all of it."""
    cost = Cost()
    synchronised(device)
    before = held(device, from_now=True)
    begin = time.perf_counter()
    yield cost
    cost.seconds = synchronised(device) - begin
    peak = most_held(device)
    cost.memory = max(0, peak - before) if peak is not None and before is not None else None


def synchronised(device: torch.device | None) -> float:
    """The time, once a GPU has done what it was given."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def held(device: torch.device | None, *, from_now: bool) -> int | None:
    """The bytes that are held; from now on, `most_held` is of what comes where the system can forget its mark."""
    if device is not None and device.type == "cuda":
        if from_now:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    if not STATUS.exists():
        return most_held(device)
    if from_now:
        with suppress(OSError):  # some containers do not let it
            CLEAR.write_text("5", encoding="ascii")
    return in_status("VmRSS")


def most_held(device: torch.device | None) -> int | None:
    """The bytes that were held at the peak."""
    if device is not None and device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if STATUS.exists():
        return in_status("VmHWM")
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def in_status(name: str) -> int | None:
    """A figure of what Linux says of this process, in bytes."""
    found = [line.split()[1] for line in STATUS.read_text(encoding="utf-8").splitlines() if line.startswith(name)]
    return 1024 * int(found[0]) if found else None


def awake(device: str | torch.device | None) -> None:
    """Threads and libraries come to life, so that in a fresh process what they hold, and how long they take, is not put
    down to the first who works."""
    a = torch.eye(8, dtype=torch.float64, device=device, requires_grad=True)
    torch.linalg.solve_triangular(torch.linalg.cholesky(a @ a), a, upper=False).sum().backward()
    torch.optim.Adam([a]).step()


def machine() -> dict[str, Any]:
    """Enough to read figures by, and nothing that names the machine."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.system(),
    }


def versions() -> dict[str, str]:
    """Of what decides the numbers."""
    import numpy

    import posthoc

    return {
        "posthoc": posthoc.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }
