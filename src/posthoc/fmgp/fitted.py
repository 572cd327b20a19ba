"""`Head`: all that a fitted FMGP holds. It turns a predictor's outputs into predictive distributions."""

from __future__ import annotations

import math
import reprlib
from typing import Any

import torch
from torch import Tensor, nn

from posthoc.collect.outputs import Outputs
from posthoc.collect.snapshots import version
from posthoc.errors import DataError
from posthoc.fmgp.coordinates import Coordinates
from posthoc.fmgp.inducing_points import Inducing
from posthoc.fmgp.ood import Novelty, lead
from posthoc.fmgp.output_covariance import OutputCovariance
from posthoc.fmgp.process import Process
from posthoc.io import changed, check_config
from posthoc.kernels.base import Kernel
from posthoc.likelihoods.base import Categorical, Likelihood
from posthoc.likelihoods.recalibration import NONE, Recalibration
from posthoc.predictive.base import Predictive
from posthoc.predictive.latent import Latent, Widened
from posthoc.saved import Saved

__all__ = ["Head", "check_options"]

NO_LEAD = 1e-30
"""The mean squared lead of outputs that are all alike: any will do, since what it divides is zero."""

PARTS = {
    "kernel": dict,
    "spaces": dict,
    "default_space": str,
    "num_inducing": int,
    "num_outputs": int,
    "shared": bool,
    "separable": bool,
    "recalibration": list,
    "rank": int | None,
    "novelty": list | None,
    "normals": int | None,
}
"""What the options of a head are."""


class Head(nn.Module):
    """The process, the coordinates it sees and the likelihood around it, all fitted."""

    def __init__(
        self,
        process: Process,
        coordinates: Coordinates,
        likelihood: Likelihood,
        novelty: Novelty | None = None,
        recalibration: Recalibration = NONE,
    ) -> None:
        super().__init__()
        self.process, self.coordinates, self.likelihood, self.novelty = process, coordinates, likelihood, novelty
        self.recalibration = recalibration
        self._prepared: tuple[list[tuple[int, int]], Tensor] | None = None

    @property
    def device(self) -> torch.device:
        """Where it lives."""
        return self.process.l_raw.device

    def reads(self) -> set[str]:
        """The blocks it looks at, beside the outputs."""
        return set(self.coordinates.spaces) - {"outputs"} | ({"features"} if self.novelty is not None else set())

    def prepared(self) -> Tensor:  # (M, M)
        """W, worked out again only when the parameters have changed."""
        versions = [(p.data_ptr(), version(p)) for p in self.process.parameters()]
        if self._prepared is None or self._prepared[0] != versions:
            self._prepared = versions, self.process.prepare().detach()
        return self._prepared[1]

    def predictive(self, outputs: Outputs, w: Tensor, *, covariance: bool = False) -> Predictive:
        """The predictive distribution of some rows, with W from `process.prepare()`."""
        latent, novelty, stretch = self.latent(outputs, w), self.novelty, None
        if not isinstance(self.likelihood, Categorical):
            return self.likelihood.predictive(outputs.outputs, latent, covariance=covariance)
        if novelty is not None:
            distance = self.distance(outputs, novelty)
            latent = Widened(latent, novelty.more_variance(distance, outputs.outputs.to(self.device)))
            stretch = novelty.stretch(distance) if novelty.slope else None
        return self.recalibration(
            self.likelihood.predictive(outputs.outputs, latent, covariance=covariance, stretch=stretch)
        )

    def latent(self, outputs: Outputs, w: Tensor) -> Latent:
        """The latent Gaussian at some rows, as if none was of a new kind."""
        return self.process.latent(self.coordinates.points(outputs), w)

    def distance(self, outputs: Outputs, novelty: Novelty) -> Tensor:  # (N,)
        """How unlike the rows of the fit some rows are."""
        width = len(novelty.location)
        if outputs.features is None or outputs.features.shape[1] != width:
            found = "none" if outputs.features is None else str(outputs.features.shape[1])
            raise DataError(f"Expected features of width {width} as in fit, which novelty looks at, got {found}.")
        return novelty.distance(outputs.features.to(self.device))

    @torch.no_grad()
    def grow_wary(self, typical: Outputs, far: float, slope: float = 0.0) -> None:
        """Adds variance away from the features of typical rows, so many times the squared scale that logits are divided
        by there, in units of their squared lead; and lets that scale follow the distance, if it does not yet. Where
        there are no features, or too few rows, all stays as it is."""
        if self.novelty is None and typical.features is not None:
            self.novelty = Novelty.of(typical.features, slope)
        if self.novelty is None:
            return
        assert isinstance(self.likelihood, Categorical)
        rows = typical.spread(1024)
        apart = self.latent(rows, self.prepared()).difference(rows.outputs.argmax(-1))
        mean = apart.sum() / (len(rows) * (rows.outputs.shape[1] - 1))  # over all but the top output
        # π/16 Var(f_c - f_t) is what is compared with τ²; a variance g more for each output adds 2 g to that Var.
        unit = (8.0 / math.pi) * (self.likelihood.relative_temperature.square() + math.pi / 16.0 * mean)
        unit = unit / lead(rows.outputs).square().mean().clamp_min(NO_LEAD)
        self.novelty.strength = unit * far

    def options(self) -> dict[str, Any]:
        """What `rebuild` needs beside the tensors."""
        coupling = self.process.coupling
        return {
            "kernel": self.process.kernel.spec(),
            "spaces": {space: self.coordinates.width(space) for space in self.coordinates.spaces},
            "default_space": self.coordinates.default,
            "num_inducing": len(self.process.l_raw),
            "num_outputs": self.process.num_outputs,
            "shared": coupling is None,
            "separable": self.process.separable,
            "recalibration": list(self.recalibration),
            "rank": coupling.rank if coupling is not None else None,
            "novelty": [*self.novelty.basis.shape, self.novelty.slope] if self.novelty is not None else None,
            "normals": getattr(self.likelihood, "normals", None),
        }

    @classmethod
    def rebuild(cls, saved: Saved, options: dict[str, Any], kernel: Kernel, likelihood: Likelihood) -> Head:
        """A head of the shapes that the options describe, filled from a file's tensors."""
        check_options(saved, options)
        m, num_outputs, spaces = options["num_inducing"], options["num_outputs"], options["spaces"]
        blank = {space: torch.zeros(m, d, dtype=torch.float64) for space, d in spaces.items()}
        kernel.start(blank, options["default_space"])
        # The classes decide the order in which inducing points stand, so they are needed before the rest is loaded.
        inducing = Inducing(blank, saved.tensors["process.z_class"].long())
        coupling = None if options["shared"] else OutputCovariance(num_outputs, options["rank"])
        process = Process(kernel, inducing, num_outputs, coupling, start=0.0, separable=options["separable"])
        saved.shape(likelihood)
        novelty = None
        if options["novelty"] is not None:
            width, directions, slope = options["novelty"]
            novelty = Novelty(width, directions, float(slope))
        coordinates = Coordinates(spaces, options["default_space"])
        head = cls(process, coordinates, likelihood, novelty, Recalibration(*map(float, options["recalibration"])))
        saved.check(head.state_dict())
        head.load_state_dict(saved.tensors)
        return head


def check_options(saved: Saved, options: dict[str, Any]) -> None:
    """Refuses options of a head that its tensors do not bear out, before anything of their sizes is made."""
    check_config(saved.path, options, PARTS)
    m, num_outputs, rank = options["num_inducing"], options["num_outputs"], options["rank"]
    shapes: dict[str, Any] = {f"process.z.{space}": (m, width) for space, width in options["spaces"].items()}
    shapes |= {"process.l_raw": (m, m), "process.z_class": (m,)}
    if not options["shared"]:
        shapes["process.coupling.factor"] = num_outputs, num_outputs if rank is None else rank
    if options["novelty"] is not None:
        shapes["novelty.basis"] = tuple(options["novelty"][:2])
    saved.check_some(shapes)
    if num_outputs != math.prod(saved.width):
        raise changed(saved.path, f"{num_outputs} outputs, in rows of shape {saved.width}")
    owners = saved.tensors["process.z_class"]
    if bool(((owners < 0) | (owners >= num_outputs)).any()) or bool((owners.diff() < 0).any()):
        raise changed(saved.path, f"inducing points that belong to {reprlib.repr(owners.tolist())} of {num_outputs}")
