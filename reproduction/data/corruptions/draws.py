"""Random numbers for images, one image at a time, so that it does not matter which images are corrupted together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Draws"]


class Draws:
    """The random numbers of some images. Those of one image follow from the seed and its number alone: in another batch
    they are the same, and at another severity too, so that severities differ in nothing else."""

    def __init__(self, seed: int, numbers: range) -> None:
        self.generators = [np.random.default_rng((seed, number)) for number in numbers]

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:  # (N, *shape)
        return stacked(generator.uniform(low, high, shape) for generator in self.generators)

    def normal(self, mean: float, spread: float, *shape: int) -> Tensor:  # (N, *shape)
        return stacked(generator.normal(mean, spread, shape) for generator in self.generators)

    def poisson(self, rates: Tensor) -> Tensor:  # (N, ...), as the rates
        pairs = zip(self.generators, rates.numpy(), strict=True)
        return stacked(generator.poisson(rate) for generator, rate in pairs)


def stacked(arrays: Iterable[Any]) -> Tensor:
    return torch.from_numpy(np.stack(list(arrays)).astype(np.float64))
