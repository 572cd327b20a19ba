"""`FittedFMGP`: what a fit of `FMGP` leaves, which turns outputs of the network into predictive distributions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from posthoc.base import CHUNK, TYPICAL_ROWS, Fitted
from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError
from posthoc.fmgp.inducing_points import Inducing
from posthoc.fmgp.ood import OutOfDistribution, top_margin
from posthoc.fmgp.ood_detector import OODDetector
from posthoc.fmgp.output_covariance import OutputCovariance, Widened
from posthoc.fmgp.points import Coordinates
from posthoc.fmgp.process import Process
from posthoc.fmgp.residual_scale import ResidualScale
from posthoc.fmgp.selection import Selection, VarianceForm
from posthoc.kernels import Kernel
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.mean_correction import CorrectionForm, MeanCorrection, corrected
from posthoc.numerics import rows_that_fit
from posthoc.predictive.base import OODRows, Predictive
from posthoc.predictive.classification import ClassificationPredictive
from posthoc.predictive.latent import Latent, ZeroLatent
from posthoc.training import Ranks

MIN_MARGIN = 1e-30
"""Lower limit of the mean squared margin that the strength is divided by; it is zero where all outputs are equal."""


class FittedFMGP(Fitted):
    """A fitted process with the coordinates it reads, its likelihood and the corrections of its confidence.

    Args:
        process: The fixed-mean process; None for temperature scaling.
        coordinates: Blocks and units that its kernel reads; None without a process.
        likelihood: The fitted likelihood.
        ood: The out-of-distribution variance, if any.
    """

    process: Any  # Process | None: callers know which form they fitted
    coordinates: Any  # Coordinates | None

    def __init__(
        self,
        process: Process | None,
        coordinates: Coordinates | None,
        likelihood: Likelihood,
        ood: OutOfDistribution | None = None,
    ) -> None:
        super().__init__(likelihood)
        self.process, self.coordinates, self.ood = process, coordinates, ood
        self.correction: MeanCorrection | None = None
        self.fixed = True
        self.detector: OODDetector | None = None
        self.residual_scale: ResidualScale | None = None
        self.chosen_kernel = False
        self.selection = Selection(VarianceForm("per_output"), "the only form")

    @property
    def device(self) -> torch.device:
        return self.process.l_raw.device if self.process is not None else next(self.parameters()).device

    @property
    def coupled(self) -> bool:  # type: ignore[override]
        return self.process is not None and self.process.coupling is not None

    @property
    def reads(self) -> set[str]:  # type: ignore[override]
        spaces = set(self.coordinates.spaces) if self.coordinates is not None else set()
        spaces |= {self.detector.space} if self.detector is not None else set()
        spaces |= self.residual_scale.reads if self.residual_scale is not None else set()
        return spaces - {"outputs"} | ({"features"} if self.ood is not None else set())

    def rows_at_once(self, outputs: int, *, dense: bool) -> int:
        process = self.process
        if not self.coupled or process.separable:
            return CHUNK
        return rows_that_fit((process.coupling.rank or outputs) * len(process.l_raw))

    def predictive(self, outputs: Outputs, *, covariance: bool = False) -> Predictive:
        """The predictive distribution of some rows on this device, with what their `ood_score` follows from."""
        pred, detector = self._predictive(outputs, covariance=covariance), self.detector
        rows = outputs.space(detector.space) if detector is not None else None
        if detector is None or rows is None:
            return pred
        return replace(pred, ood=OODRows(rows, detector.score, detector.pvalue))

    def _predictive(self, outputs: Outputs, *, covariance: bool) -> Predictive:
        latent, scale = self.latent(outputs), None
        if not isinstance(self.likelihood, Categorical):
            pred = self.likelihood.predictive(outputs.outputs, latent, covariance=covariance)
            return pred.scaled(self.residual_scale(outputs)) if self.residual_scale is not None else pred
        if self.ood is not None:
            distance = self.ood.distance(outputs.features)
            extra = self.ood.extra_variance(distance, outputs.outputs)
            scale = self.ood.logit_scale(distance) if self.ood.exponent else None
            latent = Widened(latent, extra)
        pred = self.likelihood.predictive(outputs.outputs, latent, covariance=covariance, logit_scale=scale)
        pred = self.selection.recalibration(pred)
        return pred if self.correction is None else corrected(pred, self.correction, fixed=self.fixed)

    def latent(self, outputs: Outputs) -> Latent:
        """The latent Gaussian at some rows, without out-of-distribution variance."""
        if self.process is None:
            return ZeroLatent(outputs.outputs)
        latent: Latent = self.process.latent(self.coordinates.points(outputs))
        return latent

    def predictives(self, rows: Outputs) -> Iterator[tuple[Predictive, Outputs]]:
        """Predictive distributions of consecutive parts of some rows, with these parts on the head's device."""
        for start in range(0, len(rows), CHUNK):
            part = rows[start : start + CHUNK].to(self.device)
            yield self.predictive(part), part

    def validation_score(self, val: Outputs) -> Callable[[], float]:
        """A function that gives minus the mean log-probability of the validation targets."""

        def score() -> float:
            self.process.forget()
            return -sum(float(pred.log_prob(part.targets).sum()) for pred, part in self.predictives(val)) / len(val)

        return score

    @torch.no_grad()
    def log_probs(self, rows: Outputs) -> Tensor:  # (N, C)
        """A classifier's log-probabilities of some rows, the same bits in every process."""
        preds = (pred for pred, _ in self.predictives(rows))
        log_p = torch.cat([pred.log_probs for pred in preds if isinstance(pred, ClassificationPredictive)])
        Ranks().share([log_p])
        return log_p

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
        difference = self.latent(rows).difference(rows.outputs.argmax(-1))
        mean = difference.sum() / (len(rows) * (rows.outputs.shape[1] - 1))  # over all outputs but the top one
        # π/16 Var(f_c - f_t) is compared with τ²; a variance g more for each output adds 2 g to that Var.
        unit = (8.0 / math.pi) * (self.likelihood.relative_temperature.square() + math.pi / 16.0 * mean)
        unit = unit / top_margin(rows.outputs).square().mean().clamp_min(MIN_MARGIN)
        self.ood.strength = unit * strength

    def shapes(self) -> dict[str, Any]:
        shapes = {
            "ood": [*self.ood.basis.shape, self.ood.exponent] if self.ood is not None else None,
            "detector": self.detector.shapes() if self.detector is not None else None,
            "normals": getattr(self.likelihood, "normals", None),
            "has_variance": self.process is not None,
            "correction": list(self.correction.form) if self.correction is not None else None,
            "fixed": self.fixed,
            "residual_scale": self.residual_scale.shapes() if self.residual_scale is not None else None,
            "chosen_kernel": self.chosen_kernel,
        }
        if self.process is None:
            return shapes
        coupling = self.process.coupling
        return shapes | {
            "kernel": self.process.kernel.spec(),
            "spaces": {space: self.coordinates.width(space) for space in self.coordinates.spaces},
            "default_space": self.coordinates.default,
            "owners": self.process.z_class.tolist(),
            "shared": coupling is None,
            "separable": self.process.separable,
            "rank": coupling.rank if coupling is not None else None,
        }

    @classmethod
    def blank(cls, shapes: Mapping[str, Any], kernel: Kernel, likelihood: Likelihood, num_outputs: int) -> Self:
        """An object with tensors of these shapes, to load values into."""
        fitted = cls._blank_process(shapes, kernel, likelihood, num_outputs)
        fitted.fixed = bool(shapes["fixed"])
        if shapes["correction"] is not None:
            fitted.correction = MeanCorrection(CorrectionForm(*shapes["correction"]), num_outputs)
        return fitted

    @classmethod
    def _blank_process(
        cls, shapes: Mapping[str, Any], kernel: Kernel, likelihood: Likelihood, num_outputs: int
    ) -> Self:
        ood = None
        if shapes["ood"] is not None:
            width, directions, exponent = shapes["ood"]
            ood = OutOfDistribution(width, directions, float(exponent))
        scale = ResidualScale(**shapes["residual_scale"]) if shapes.get("residual_scale") else None
        if not shapes["has_variance"]:
            fitted = cls(None, None, likelihood, ood)
            fitted.residual_scale = scale
            return fitted
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
        fitted = cls(process, Coordinates(spaces, space), likelihood, ood)
        fitted.residual_scale, fitted.chosen_kernel = scale, shapes.get("chosen_kernel", False)
        return fitted

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        if self.process is not None and not torch.equal(state_dict["process.z_class"], self.process.z_class):
            raise ValueError("inducing points that belong to other outputs than the shapes say")
        return super().load_state_dict(state_dict, strict, assign)
