"""`Head`: all that a fitted FMGP holds. It turns a predictor's outputs into predictive distributions."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor, nn

from posthoc.errors import DataError
from posthoc.files import check_shapes
from posthoc.fmgp.coupling import OutputCovariance
from posthoc.fmgp.novelty import Novelty, Wariness, lead
from posthoc.fmgp.points import Coordinates
from posthoc.fmgp.process import Process
from posthoc.inducing import Inducing
from posthoc.kernels import Kernel
from posthoc.latent import Latent, Widened
from posthoc.likelihoods import Categorical, Likelihood
from posthoc.outputs import Outputs
from posthoc.predictive import ClassificationPredictive, Predictive
from posthoc.recalibration import NONE, Recalibration
from posthoc.snapshots import version

__all__ = ["Head"]

NO_LEAD = 1e-30
"""The mean squared lead of outputs that are all alike: any will do, since what it divides is zero."""


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
        if novelty is not None:
            distance = self.distance(outputs, novelty)
            latent = Widened(latent, novelty.more_variance(distance, outputs.outputs.to(self.device)))
            stretch = novelty.stretch(distance) if novelty.slope else None
        predictive = self.likelihood.predictive(outputs.outputs, latent, covariance=covariance)
        if not isinstance(predictive, ClassificationPredictive):
            return predictive
        return self.recalibration(predictive if stretch is None else predictive.tempered(stretch))

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
    def grow_wary(self, typical: Outputs, wariness: Wariness) -> None:
        """Adds variance away from the features of typical rows, in units of the squared scale that logits are divided
        by there and of their squared lead, and lets that scale follow the distance; where there are no features, or too
        few rows, it stays as it is. Once wary, only how much changes."""
        if self.novelty is None and typical.features is not None:
            self.novelty = Novelty.of(typical.features)
        if self.novelty is None:
            return
        assert isinstance(self.likelihood, Categorical)
        rows = typical.spread(1024)
        apart = self.latent(rows, self.prepared()).difference(rows.outputs.argmax(-1))
        mean = apart.sum() / (len(rows) * (rows.outputs.shape[1] - 1))  # over all but the top output
        # π/16 Var(f_c - f_t) is what is compared with τ²; a variance g more for each output adds 2 g to that Var.
        unit = (8.0 / math.pi) * (self.likelihood.temperature.square() + math.pi / 16.0 * mean)
        unit = unit / lead(rows.outputs).square().mean().clamp_min(NO_LEAD)
        self.novelty.slope, self.novelty.strength = wariness.slope, unit * wariness.far

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
    def rebuild(
        cls,
        path: str | os.PathLike[str],
        tensors: dict[str, Tensor],
        options: dict[str, Any],
        kernel: Kernel,
        likelihood: Likelihood,
    ) -> Head:
        """A head of the shapes that the options describe, filled from a file's tensors."""
        m, num_outputs, spaces = options["num_inducing"], options["num_outputs"], options["spaces"]
        blank = {space: torch.zeros(m, d, dtype=torch.float64) for space, d in spaces.items()}
        kernel.start(blank, options["default_space"])
        # The classes decide the order in which inducing points stand, so they are needed before the rest is loaded.
        classes = tensors.get("process.z_class", torch.zeros(m)).long()
        if classes.shape != (m,):  # refused below; until then, any classes of the right number will do
            classes = torch.zeros(m, dtype=torch.long)
        coupling = None if options["shared"] else OutputCovariance(num_outputs, options["rank"])
        process = Process(
            kernel, Inducing(blank, classes), num_outputs, coupling, start=0.0, separable=options["separable"]
        )
        likelihood.start(torch.zeros(1, num_outputs), torch.ones(1, num_outputs))
        novelty = Novelty(*options["novelty"]) if options["novelty"] is not None else None
        coordinates = Coordinates(spaces, options["default_space"])
        head = cls(process, coordinates, likelihood, novelty, Recalibration(*options["recalibration"]))
        check_shapes(path, tensors, {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()})
        head.load_state_dict(tensors)
        return head
