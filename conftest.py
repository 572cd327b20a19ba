"""Shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# Two test processes on two cores: threads of one would only wait for the other's.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with real data, or a skip that says how to have it."""
    folder = os.environ.get("POSTHOC_DATA")
    if not folder:
        pytest.skip("POSTHOC_DATA does not name a folder with real data")
    return Path(folder)
