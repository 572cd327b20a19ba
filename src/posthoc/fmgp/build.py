"""A process before it is trained: where its inducing points stand, whose they are, and how outputs are coupled."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError, OptionError
from posthoc.fmgp.coordinates import PointView
from posthoc.fmgp.inducing_points import Inducing, given, kmeans, per_class, random_classes, random_points
from posthoc.fmgp.output_covariance import OutputCovariance
from posthoc.fmgp.process import Process
from posthoc.fmgp.selection import Plan
from posthoc.kernels.base import Kernel
from posthoc.validation import as_numbers

__all__ = ["NOT_KEPT", "Layout", "build"]

FULL_COUPLING = {"per_output": 32, "separable": 128}
"""Up to so many outputs B is a full Cholesky factor, by default."""
RANK = 8
"""The rank of B, by default, for more."""
START = 1.0
"""L starts at so many times the identity, as in the paper; at zero it would stay."""
NOT_KEPT = "given"
"""What a head's file has in the place of inducing points that were the user's own."""


class Layout(NamedTuple):
    """The options of `FMGP` that decide it."""

    inducing: Any
    inducing_classes: Any | None
    num_inducing: int
    output_rank: int | None


def build(
    layout: Layout, plan: Plan, kernel: Kernel, view: PointView, outputs: Outputs, generator: torch.Generator
) -> Process:
    """A process of the form that a plan names, its inducing points among the points of the fit."""
    num_outputs = outputs.outputs[0].numel()
    variance = "shared" if num_outputs == 1 else plan.variance
    if isinstance(layout.inducing, str) and layout.inducing == "per_class":
        if outputs.targets is None:
            raise DataError('inducing="per_class" needs the targets of the points.')
        inducing = per_class(view, outputs.targets, layout.num_inducing, generator)
    else:
        z = places(layout, view, generator)
        inducing = Inducing(z, classes(layout, len(next(iter(z.values()))), num_outputs, generator))
    if variance != "per_output":
        inducing = inducing._replace(z_class=torch.zeros_like(inducing.z_class))
    device = view.coordinates.device
    coupling = None
    if variance != "shared":
        rank = layout.output_rank or (RANK if num_outputs > FULL_COUPLING[variance] else None)
        coupling = OutputCovariance(num_outputs, rank, generator).to(device)
    inducing = inducing._replace(z={space: block.to(device) for space, block in inducing.z.items()})
    return Process(kernel, inducing, num_outputs, coupling, start=START, separable=variance == "separable")


def places(layout: Layout, view: PointView, generator: torch.Generator) -> dict[str, Tensor]:
    if isinstance(layout.inducing, str):
        if layout.inducing == NOT_KEPT:
            raise OptionError(
                "Expected the inducing points that were given to the first fit, which the head's file does not hold: "
                "to fit again, build FMGP(..., inducing=points)."
            )
        choose = {"kmeans": kmeans, "random": random_points}[layout.inducing]
        return choose(view, layout.num_inducing, generator)
    spaces = view.coordinates.spaces
    z = given(layout.inducing, spaces, {space: view.coordinates.width(space) for space in spaces})
    return view.coordinates.standardise(z)


def classes(layout: Layout, m: int, num_outputs: int, generator: torch.Generator) -> Tensor:
    if layout.inducing_classes is None:
        return random_classes(m, num_outputs, generator)
    found = as_numbers(layout.inducing_classes, torch.long)
    if found is None:
        raise OptionError(f"Expected {m} inducing_classes, each a number, got {layout.inducing_classes!r}.")
    if found.shape != (m,) or int(found.min()) < 0 or int(found.max()) >= num_outputs:
        raise OptionError(
            f"Expected {m} inducing_classes from 0 to {num_outputs - 1}, got {found.tolist()[:10]} "
            f"of shape {tuple(found.shape)}."
        )
    return found
