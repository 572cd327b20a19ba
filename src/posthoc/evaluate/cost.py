"""The cost of work in seconds and in memory, and the machine and versions it was measured with."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass
class Cost:
    """Seconds, and the bytes held at the peak beyond those held before (None where the system does not tell)."""

    seconds: float = 0.0
    memory: int | None = None


@contextmanager
def measured(device: torch.device | None) -> Iterator[Cost]:
    """The cost of the block.

    Memory is the GPU's if the device is one, else this process's; outside Linux the process's peak is that since its
    beginning. Memory that it freed before and kept is not counted again: only a fresh process shows all of it.

    Example:
        >>> with measured(None) as cost:
        ...     x = torch.ones(1000)
        >>> cost.seconds > 0
        True
    """
    cost, on_gpu = Cost(), device is not None and device.type == "cuda"
    synchronize(device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):  # resets the process's peak; some containers do not allow it, other systems do not have it
        CLEAR.write_text("5", encoding="ascii")
    before = torch.cuda.memory_allocated(device) if on_gpu else process_memory("VmRSS")
    begin = time.perf_counter()
    yield cost
    synchronize(device)
    cost.seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else process_memory("VmHWM")
    cost.memory = max(0, peak - before) if peak is not None and before is not None else None


def synchronize(device: torch.device | None) -> None:
    """Waits until a GPU has finished its work."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def process_memory(name: str) -> int | None:
    """The bytes this process holds (VmRSS), or the most it has held (VmHWM, the only value known outside Linux)."""
    if STATUS.exists():
        lines = STATUS.read_text(encoding="utf-8").splitlines()
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name)), None)
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def warm_up(device: str | torch.device | None) -> None:
    """Starts threads and libraries, so that their time and memory are not charged to the first measurement."""
    a = torch.eye(8, dtype=torch.float64, device=device, requires_grad=True)
    torch.linalg.solve_triangular(torch.linalg.cholesky(a @ a), a, upper=False).sum().backward()
    torch.optim.Adam([a]).step()


def machine() -> dict[str, Any]:
    """Processor, cores, threads, GPU and operating system; nothing that identifies the machine."""
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
    """Versions of what decides the numbers."""
    posthoc, torch, numpy = map(version, ("posthoc", "torch", "numpy"))
    return {"posthoc": posthoc, "python": platform.python_version(), "torch": torch, "numpy": numpy}
