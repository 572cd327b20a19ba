"""How many threads a small problem deserves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["few_threads"]


@contextmanager
def few_threads(wanted: bool) -> Iterator[None]:
    """One thread inside, where the work is too small to share: handing out products of 100 x 100 saves little on an
    idle machine and costs much on a busy one."""
    if not wanted:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
