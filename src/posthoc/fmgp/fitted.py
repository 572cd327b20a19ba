"""`FittedFMGP`: what a fit of `FMGP` leaves, which turns outputs of the network into predictive distributions."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from posthoc.collect.network import version
from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError
from posthoc.fmgp.coordinates import Coordinates
from posthoc.fmgp.inducing_points import Inducing
from posthoc.fmgp.ood import OutOfDistribution, top_margin
from posthoc.fmgp.output_covariance import OutputCovariance
from posthoc.fmgp.process import Process
from posthoc.io import changed, check_config
from posthoc.kernels import Constant, Kernel
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.recalibration import NONE, Recalibration
from posthoc.predictive.base import Predictive
from posthoc.predictive.classification import ClassificationPredictive
from posthoc.predictive.latent import Latent, Widened, ZeroLatent
from posthoc.saved import Saved
from posthoc.training import Ranks

__all__ = ["FittedFMGP", "check_options"]

CHUNK = 1024
"""Rows predicted at a time while the fit goes on."""
MIN_MARGIN = 1e-30
"""Lower limit of the mean squared margin that the strength is divided by; it is zero where all outputs are equal."""
NO_VARIANCE = 1e-12
"""The variance of the constant kernel that stands for temperature scaling; predictions take it for zero."""

PARTS = {
    "kernel": dict,
    "spaces": dict,
    "default_space": str,
    "num_inducing": int,
    "num_outputs": int,
    "shared": bool,
    "separable": bool,
    "rank": int | None,
    "ood": list | None,
    "normals": int | None,
}
"""Types of the options in a file."""


class FittedFMGP(nn.Module):
    """A fitted process with the coordinates it sees, its likelihood and the corrections of its confidence.

    Args:
        process: The fixed-mean process.
        coordinates: Blocks and units that its kernel reads.
        likelihood: The fitted likelihood.
        ood: The out-of-distribution variance, if any.
        recalibration: Correction of a classifier's confidence.
    """

    def __init__(
        self,
        process: Process,
        coordinates: Coordinates,
        likelihood: Likelihood,
        ood: OutOfDistribution | None = None,
        recalibration: Recalibration = NONE,
    ) -> None:
        super().__init__()
        self.process, self.coordinates, self.likelihood, self.ood = process, coordinates, likelihood, ood
        self.recalibration = recalibration
        self._prepared: tuple[list[tuple[int, int]], Tensor] | None = None

    @property
    def device(self) -> torch.device:
        return self.process.l_raw.device

    @property
    def has_variance(self) -> bool:
        """False if this is temperature scaling, whose logits have no variance."""
        kernel = self.process.kernel
        return not (isinstance(kernel, Constant) and float(kernel.log_variance.exp()) <= 2.0 * NO_VARIANCE)

    def reads(self) -> set[str]:
        """The blocks it reads besides the outputs."""
        return set(self.coordinates.spaces) - {"outputs"} | ({"features"} if self.ood is not None else set())

    def prepared(self) -> Tensor:  # (M, M)
        """W, computed anew when the parameters have changed."""
        versions = [(p.data_ptr(), version(p)) for p in self.process.parameters()]
        if self._prepared is None or self._prepared[0] != versions:
            self._prepared = versions, self.process.prepare().detach()
        return self._prepared[1]

    def predictive(self, outputs: Outputs, w: Tensor, *, covariance: bool = False) -> Predictive:
        """The predictive distribution of some rows, with W from `process.prepare()`."""
        latent, scale = self.latent(outputs, w), None
        if not isinstance(self.likelihood, Categorical):
            return self.likelihood.predictive(outputs.outputs, latent, covariance=covariance)
        if self.ood is not None:
            distance = self.distance(outputs, self.ood)
            latent = Widened(latent, self.ood.extra_variance(distance, outputs.outputs.to(self.device)))
            scale = self.ood.logit_scale(distance) if self.ood.exponent else None
        pred = self.likelihood.predictive(outputs.outputs, latent, covariance=covariance, logit_scale=scale)
        return self.recalibration(pred)

    def latent(self, outputs: Outputs, w: Tensor) -> Latent:
        """The latent Gaussian at some rows, without out-of-distribution variance."""
        if not self.has_variance:
            return ZeroLatent(outputs.outputs.to(self.device))
        return self.process.latent(self.coordinates.points(outputs), w)

    def distance(self, outputs: Outputs, ood: OutOfDistribution) -> Tensor:  # (N,)
        """How far the features of some rows are from the fitted ones."""
        width = len(ood.location)
        if outputs.features is None or outputs.features.shape[1] != width:
            found = "none" if outputs.features is None else str(outputs.features.shape[1])
            raise DataError(
                f"Expected features of width {width} as in fit, for the out-of-distribution variance, got {found}."
            )
        return ood.distance(outputs.features.to(self.device))

    def predictives(self, rows: Outputs, w: Tensor) -> Iterator[tuple[Predictive, Outputs]]:
        """Predictive distributions of consecutive parts of some rows, with these parts on the head's device."""
        for start in range(0, len(rows), CHUNK):
            part = rows[start : start + CHUNK].to(self.device)
            yield self.predictive(part, w), part

    def validation_score(self, val: Outputs) -> Callable[[], float]:
        """A function that gives minus the mean log-probability of the validation targets."""

        def score() -> float:
            w, total = self.process.prepare(), 0.0
            for pred, part in self.predictives(val, w):
                total -= float(pred.log_prob(part.targets).sum())
            return total / len(val)

        return score

    @torch.no_grad()
    def log_probs(self, rows: Outputs) -> Tensor:  # (N, C)
        """A classifier's log-probabilities of some rows, the same bits in every process."""
        preds = (pred for pred, _ in self.predictives(rows, self.prepared()))
        log_p = torch.cat([pred.log_probs for pred in preds if isinstance(pred, ClassificationPredictive)])
        Ranks().share([log_p])
        return log_p

    @torch.no_grad()
    def add_ood_variance(self, typical: Outputs, strength: float, exponent: float = 0.0) -> None:
        """Adds variance far from the features of typical rows. Does nothing without features or with too few rows.

        Args:
            typical: Rows of the fit.
            strength: In units of the squared scale of the logits over their mean squared margin.
            exponent: Power of the distance that the scale of the logits follows, if it does not follow one yet.
        """
        if self.ood is None and typical.features is not None:
            self.ood = OutOfDistribution.of(typical.features, exponent)
        if self.ood is None or not isinstance(self.likelihood, Categorical):
            return
        rows = typical.spread(CHUNK)
        difference = self.latent(rows, self.prepared()).difference(rows.outputs.argmax(-1))
        mean = difference.sum() / (len(rows) * (rows.outputs.shape[1] - 1))  # over all outputs but the top one
        # π/16 Var(f_c - f_t) is compared with τ²; a variance g more for each output adds 2 g to that Var.
        unit = (8.0 / math.pi) * (self.likelihood.relative_temperature.square() + math.pi / 16.0 * mean)
        unit = unit / top_margin(rows.outputs).square().mean().clamp_min(MIN_MARGIN)
        self.ood.strength = unit * strength

    def options(self) -> dict[str, Any]:
        """What `rebuild` needs besides the tensors."""
        coupling = self.process.coupling
        return {
            "kernel": self.process.kernel.spec(),
            "spaces": {space: self.coordinates.width(space) for space in self.coordinates.spaces},
            "default_space": self.coordinates.default,
            "num_inducing": len(self.process.l_raw),
            "num_outputs": self.process.num_outputs,
            "shared": coupling is None,
            "separable": self.process.separable,
            "rank": coupling.rank if coupling is not None else None,
            "ood": [*self.ood.basis.shape, self.ood.exponent] if self.ood is not None else None,
            "normals": getattr(self.likelihood, "normals", None),
        }

    @classmethod
    def rebuild(cls, saved: Saved, options: dict[str, Any], kernel: Kernel, likelihood: Likelihood) -> FittedFMGP:
        """Builds modules of the shapes in the options, and fills them from a file's tensors."""
        check_options(saved, options)
        m, num_outputs, spaces = options["num_inducing"], options["num_outputs"], options["spaces"]
        blank = {space: torch.zeros(m, d, dtype=torch.float64) for space, d in spaces.items()}
        kernel.initialize(blank, options["default_space"])
        # The order of the inducing points depends on their classes, so these are read before the rest.
        inducing = Inducing(blank, saved.tensors["process.z_class"].long())
        coupling = None if options["shared"] else OutputCovariance(num_outputs, options["rank"])
        process = Process(kernel, inducing, num_outputs, coupling, start=0.0, separable=options["separable"])
        saved.shape(likelihood)
        ood = None
        if options["ood"] is not None:
            width, directions, exponent = options["ood"]
            ood = OutOfDistribution(width, directions, float(exponent))
        fitted = cls(process, Coordinates(spaces, options["default_space"]), likelihood, ood)
        saved.check(fitted.state_dict())
        fitted.load_state_dict(saved.tensors)
        return fitted


def check_options(saved: Saved, options: dict[str, Any]) -> None:
    """Refuses options that the file's tensors contradict, before memory is allocated for them."""
    check_config(saved.path, options, PARTS)
    m, num_outputs, rank = options["num_inducing"], options["num_outputs"], options["rank"]
    shapes: dict[str, Any] = {f"process.z.{space}": (m, width) for space, width in options["spaces"].items()}
    shapes |= {"process.l_raw": (m, m), "process.z_class": (m,)}
    if not options["shared"]:
        shapes["process.coupling.factor"] = num_outputs, num_outputs if rank is None else rank
    if options["ood"] is not None:
        shapes["ood.basis"] = tuple(options["ood"][:2])
    saved.check_some(shapes)
    if num_outputs != math.prod(saved.width):
        raise changed(saved.path, f"{num_outputs} outputs, in rows of shape {saved.width}")
    owners = saved.tensors["process.z_class"]
    if bool(((owners < 0) | (owners >= num_outputs)).any()) or bool((owners.diff() < 0).any()):
        raise changed(saved.path, f"inducing points that belong to {reprlib.repr(owners.tolist())} of {num_outputs}")
