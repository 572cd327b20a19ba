"""Noise: of the sensor, of few photons, of broken pixels."""

from __future__ import annotations

import torch
from torch import Tensor

from reproduction.data.corruptions.draws import Draws

__all__ = ["gaussian_noise", "impulse_noise", "shot_noise"]


def gaussian_noise(images: Tensor, draws: Draws, spread: float) -> Tensor:
    """Of this standard deviation, where white is 1."""
    return images + 255.0 * draws.normal(0.0, spread, *images.shape[1:])


def shot_noise(images: Tensor, draws: Draws, photons: float) -> Tensor:
    """So many photons, on average, where it is brightest."""
    return draws.poisson(images / 255.0 * photons) * (255.0 / photons)


def impulse_noise(images: Tensor, draws: Draws, share: float) -> Tensor:
    """This share of the values, one colour of a pixel each, becomes 255 or 0."""
    luck = draws.uniform(0.0, 1.0, *images.shape[1:])
    return torch.where(luck < share / 2, 255.0, torch.where(luck < share, 0.0, images))
