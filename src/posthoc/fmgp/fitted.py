"""`FittedFMGP`: what a fit of `FMGP` leaves, which turns outputs of the network into predictive distributions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from posthoc.base import TYPICAL_ROWS, Fitted
from posthoc.collect.network import version
from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError
from posthoc.fmgp.coordinates import Coordinates
from posthoc.fmgp.inducing_points import Inducing
from posthoc.fmgp.ood import OutOfDistribution, top_margin
from posthoc.fmgp.output_covariance import OutputCovariance
from posthoc.fmgp.process import Process
from posthoc.fmgp.selection import Selection, VarianceForm
from posthoc.kernels import Kernel
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.categorical import Categorical
from posthoc.numerics import rows_that_fit
from posthoc.predictive.base import Predictive
from posthoc.predictive.classification import ClassificationPredictive
from posthoc.predictive.latent import Latent, Widened, ZeroLatent
from posthoc.training import Ranks

__all__ = ["FittedFMGP"]

CHUNK = 1024
"""Rows predicted at a time while the fit goes on."""
MIN_MARGIN = 1e-30
"""Lower limit of the mean squared margin that the strength is divided by; it is zero where all outputs are equal."""


class FittedFMGP(Fitted):
    """A fitted process with the coordinates it sees, its likelihood and the corrections of its confidence.

    Args:
        process: The fixed-mean process.
        coordinates: Blocks and units that its kernel reads.
        likelihood: The fitted likelihood.
        ood: The out-of-distribution variance, if any.
        has_variance: False for temperature scaling, whose logits have no variance.
    """

    def __init__(
        self,
        process: Process,
        coordinates: Coordinates,
        likelihood: Likelihood,
        ood: OutOfDistribution | None = None,
        *,
        has_variance: bool = True,
    ) -> None:
        super().__init__(likelihood)
        self.process, self.coordinates, self.ood, self.has_variance = process, coordinates, ood, has_variance
        self.selection = Selection(VarianceForm("per_output"), "the only form")
        self._prepared: tuple[list[tuple[int, int]], Tensor] | None = None

    @property
    def device(self) -> torch.device:
        return self.process.l_raw.device

    @property
    def coupled(self) -> bool:  # type: ignore[override]
        return self.process.coupling is not None

    @property
    def reads(self) -> set[str]:  # type: ignore[override]
        """The blocks it reads besides the outputs."""
        return set(self.coordinates.spaces) - {"outputs"} | ({"features"} if self.ood is not None else set())

    def rows_at_once(self, outputs: int, *, dense: bool) -> int:
        process = self.process
        if process.coupling is None or process.separable:
            return CHUNK
        return rows_that_fit((process.coupling.rank or outputs) * len(process.l_raw))

    def prepared(self) -> Tensor:  # (M, M)
        """W, computed anew when the parameters have changed."""
        versions = [(p.data_ptr(), version(p)) for p in self.process.parameters()]
        if self._prepared is None or self._prepared[0] != versions:
            self._prepared = versions, self.process.prepare().detach()
        return self._prepared[1]

    def predictive(self, outputs: Outputs, w: Tensor | None = None, *, covariance: bool = False) -> Predictive:
        """The predictive distribution of some rows on this device, with W, by default that of `prepared`."""
        latent, scale = self.latent(outputs, self.prepared() if w is None else w), None
        if not isinstance(self.likelihood, Categorical):
            return self.likelihood.predictive(outputs.outputs, latent, covariance=covariance)
        if self.ood is not None:
            width, features = len(self.ood.location), outputs.features
            if features is None or features.shape[1] != width:
                got = "none" if features is None else features.shape[1]
                raise DataError(f"Expected features of width {width} as in fit, to compare with those, got {got}.")
            distance = self.ood.distance(features)
            latent = Widened(latent, self.ood.extra_variance(distance, outputs.outputs))
            scale = self.ood.logit_scale(distance) if self.ood.exponent else None
        pred = self.likelihood.predictive(outputs.outputs, latent, covariance=covariance, logit_scale=scale)
        return self.selection.recalibration(pred)

    def latent(self, outputs: Outputs, w: Tensor) -> Latent:
        """The latent Gaussian at some rows, without out-of-distribution variance."""
        if not self.has_variance:
            return ZeroLatent(outputs.outputs)
        return self.process.latent(self.coordinates.points(outputs), w)

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
    def residuals(self, rows: Outputs) -> Tensor:  # (N, C), float64
        """A regression's residuals of some rows in units of their predicted standard deviation."""
        parts = []
        for pred, part in self.predictives(rows, self.prepared()):
            assert part.targets is not None
            z = (part.targets.double() - pred.mean.double()) / pred.std.double()
            parts.append(z.reshape(len(part), -1))
        return torch.cat(parts)

    @torch.no_grad()
    def add_ood_variance(self, train: Outputs, strength: float, exponent: float = 0.0) -> None:
        """Adds variance far from the features of the fit. Does nothing without features or with too few rows.

        Args:
            train: The rows of the fit.
            strength: In units of the squared scale of the logits over their mean squared margin.
            exponent: Power of the distance that the scale of the logits follows, if it does not follow one yet.
        """
        typical = train.spread(TYPICAL_ROWS).to(self.device)
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

    def shapes(self) -> dict[str, Any]:
        coupling = self.process.coupling
        return {
            "kernel": self.process.kernel.spec(),
            "spaces": {space: self.coordinates.width(space) for space in self.coordinates.spaces},
            "default_space": self.coordinates.default,
            "owners": self.process.z_class.tolist(),
            "shared": coupling is None,
            "separable": self.process.separable,
            "rank": coupling.rank if coupling is not None else None,
            "ood": [*self.ood.basis.shape, self.ood.exponent] if self.ood is not None else None,
            "normals": getattr(self.likelihood, "normals", None),
            "has_variance": self.has_variance,
        }

    @classmethod
    def blank(cls, shapes: Mapping[str, Any], kernel: Kernel, likelihood: Likelihood, num_outputs: int) -> Self:
        """An object with tensors of these shapes, to load values into."""
        owners, spaces, space = torch.tensor(shapes["owners"]), shapes["spaces"], shapes["default_space"]
        if owners.min() < 0 or owners.max() >= num_outputs or not torch.equal(owners, owners.sort().values):
            raise ValueError(f"inducing points that belong to other outputs than the {num_outputs} there are")
        z = {name: torch.zeros(len(owners), width, dtype=torch.float64) for name, width in spaces.items()}
        kernel.initialize(z, space)
        if kernel.spec() != shapes["kernel"]:
            message = f"Expected the kernel this head was fitted with, {shapes['kernel']}, got {kernel.spec()}"
            raise DataError(f"{message}: give one of the same form.")
        coupling = None if shapes["shared"] else OutputCovariance(num_outputs, shapes["rank"])
        process = Process(kernel, Inducing(z, owners), num_outputs, coupling, start=0.0, separable=shapes["separable"])
        ood = None
        if shapes["ood"] is not None:
            width, directions, exponent = shapes["ood"]
            ood = OutOfDistribution(width, directions, float(exponent))
        return cls(process, Coordinates(spaces, space), likelihood, ood, has_variance=bool(shapes["has_variance"]))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        if not torch.equal(state_dict["process.z_class"], self.process.z_class):
            raise ValueError("inducing points that belong to other outputs than the shapes say")
        return super().load_state_dict(state_dict, strict, assign)
