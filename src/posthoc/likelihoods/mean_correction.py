"""Corrections of a classifier's class probabilities that are fitted on held-out rows: `MeanCorrection`.

A variance can only make a classifier less certain. Where the network favors a class, or its scores are far from logits,
the probabilities have to be mapped. The map belongs to the likelihood: the latent mean stays the network's output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posthoc.likelihoods.temperature import FEW_ROWS, PRIOR, best_inverse
from posthoc.numerics import minimize
from posthoc.predictive.classification import ClassificationPredictive

SMALL_WEIGHT = 0.01
"""Weights of the raw and the uniform probabilities in the mixture, at the start."""
SCALE_RIDGE = 0.01
"""Weight of the penalty on the common scale of each term."""
NO_WEIGHT = -700.0
"""Logarithm of a weight of zero."""
MAX_STEPS, TOLERANCE = 60, 1e-3
"""Limits of the optimizer (L-BFGS), for a loss that is a sum over rows."""
MARGIN = 2e-4
"""By how much the probability of the network's class exceeds all others; less for more than 500 classes."""


class CorrectionForm(NamedTuple):
    """The form of a `MeanCorrection`.

    Attributes:
        class_ridge: Weight of the penalty on a scale and a bias for each class; None leaves these out.
        matrix_ridge: Weight of the penalty on a full matrix for each term; None leaves these out.
        terms: What it maps: the log-probabilities of the "process", the logits of the "network", or "both".
        mixture: Whether the raw and the uniform probabilities are mixed in.
    """

    class_ridge: float | None = None
    matrix_ridge: float | None = None
    terms: str = "network"
    mixture: bool = True

    def __str__(self) -> str:
        if not self.mixture:
            return "probabilities by temperature scaling"
        if self.class_ridge is None:
            name = "mixture with the raw and the uniform probabilities"
        elif self.matrix_ridge is None:
            name = f"scale and bias for each class (ridge {self.class_ridge:g})"
        else:
            name = f"matrix scaling (ridges {self.class_ridge:g} and {self.matrix_ridge:g})"
        return f"{name} of process and network" if self.terms == "both" else name

    def select(self, log_p: Tensor, logits: Tensor) -> list[Tensor]:
        """The terms, of the process's log-probabilities and the network's logits, (N, C) each."""
        return {"process": [log_p], "network": [logits], "both": [log_p, logits]}[self.terms]


class MeanCorrection(nn.Module):
    """Class probabilities from one or more terms z_k (N, C), logits or log-probabilities without their row mean:

        p = w₀ softmax(b + Σ_k (s_k ∘ z_k + M_k z_k)) + w₁ softmax(f) + w₂ / C

    where f are the network's logits.

    Args:
        form: Which terms there are, and whether there are matrices M_k.
        classes: The number of classes C.
    """

    scale: Tensor  # (K, C), s
    bias: Tensor  # (C,), b
    matrix: Tensor | None  # (K, C, C), M
    log_weights: Tensor  # (3,), log w
    parameters_of_fit: Sequence[Tensor] | None = None  # to start another fit from

    def __init__(self, form: CorrectionForm, classes: int) -> None:
        super().__init__()
        self.form, terms, matrix = form, 2 if form.terms == "both" else 1, form.matrix_ridge is not None
        shapes = {"scale": (terms, classes), "bias": (classes,), "log_weights": (3,)}
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("matrix", torch.zeros(terms, classes, classes, dtype=torch.float64) if matrix else None)

    @classmethod
    def temperature(cls, outputs: Tensor, y: Tensor) -> Self:
        """Temperature scaling of the network's logits, for few rows."""
        correction = cls(CorrectionForm(mixture=False), outputs.shape[1]).to(outputs.device)
        correction.scale.fill_(best_inverse(outputs, y, PRIOR))
        correction.log_weights[1:] = NO_WEIGHT
        return correction

    @classmethod
    def fit(
        cls,
        form: CorrectionForm,
        log_p: Tensor,
        outputs: Tensor,
        y: Tensor,
        start: Sequence[Tensor] | None = None,
    ) -> Self:
        """The correction of greatest penalized likelihood.

        Args:
            form: Its form and penalties, which hold it near a common scale of the first term.
            log_p: Log-probabilities (N, C) by a process that was fitted to other rows.
            outputs: The network's logits (N, C).
            y: Labels (N,).
            start: The parameters of a similar fit to start from.
        """
        terms, classes, device = form.select(log_p, outputs), outputs.shape[1], outputs.device
        # Units in which each term has its best temperature, and penalties act on logits of size 1.
        inverses = torch.tensor([best_inverse(term, y, PRIOR) for term in terms], dtype=torch.float64, device=device)
        z = [inverse * centered(term) for inverse, term in zip(inverses, terms, strict=True)]
        sizes = torch.stack([part.square().mean().sqrt().clamp_min(1e-6) for part in z])
        raw = outputs.double().log_softmax(-1).gather(-1, y[:, None]).squeeze(-1)
        first = torch.arange(len(terms), device=device)[:, None] == 0

        common = torch.zeros(len(terms), 1, dtype=torch.float64, device=device)
        weights = common.new_tensor([0.0, math.log(SMALL_WEIGHT), math.log(SMALL_WEIGHT)])
        scale, bias = common.new_zeros(len(terms), classes), common.new_zeros(classes)
        matrix = common.new_zeros(len(terms), classes, classes if form.matrix_ridge is not None else 0)
        everything = [common, weights, scale, bias, matrix]
        learned = [common, weights]
        learned += [scale, bias] if form.class_ridge is not None else []
        learned += [matrix] if form.matrix_ridge is not None else []
        for parameter, value in zip(everything, start or [], strict=False):
            if parameter.shape == value.shape:
                parameter.copy_(value)

        def loss() -> Tensor:
            logits, scales = bias.expand(len(y), -1), first + (common + scale) / sizes[:, None]
            for k, part in enumerate(z):
                logits = torch.addcmul(logits, part, scales[k])
                if form.matrix_ridge is not None:
                    logits = torch.addmm(logits, part, matrix[k].mT / sizes[k])
            log_p = -F.cross_entropy(logits, y, reduction="none")
            log_w = weights.log_softmax(0)
            parts = [log_p + log_w[0], raw + log_w[1], (log_w[2] - math.log(classes)).expand(len(y))]
            penalty = SCALE_RIDGE * common.square().sum()
            penalty = penalty + (form.class_ridge or 0.0) * (scale.square().sum() + bias.square().sum())
            penalty = penalty + (form.matrix_ridge or 0.0) * matrix.square().sum()
            if form.terms == "network" and len(y) < FEW_ROWS:
                penalty = penalty + PRIOR.penalty(inverses[0] * (1.0 + common[0, 0] / sizes[0]))
            return 0.5 * penalty - torch.stack(parts).logsumexp(0).sum()

        minimize(loss, learned, steps=MAX_STEPS, tolerance=TOLERANCE)
        correction = cls(form, classes).to(device)
        correction.parameters_of_fit = [parameter.detach() for parameter in everything]
        correction.scale = (inverses[:, None] * (first + (common + scale) / sizes[:, None])).detach()
        correction.bias, correction.log_weights = bias.detach(), weights.log_softmax(0).detach()
        if form.matrix_ridge is not None:
            correction.matrix = (inverses / sizes)[:, None, None] * matrix.detach()
        return correction

    def forward(self, log_p: Tensor, outputs: Tensor) -> Tensor:  # (N, C)
        """The corrected log-probabilities, in float64; the arguments are those of `fit`."""
        logits: Tensor = self.bias
        for k, term in enumerate(self.form.select(log_p, outputs)):
            z = centered(term)
            logits = logits + z * self.scale[k]
            if self.matrix is not None:
                logits = logits + z @ self.matrix[k].mT
        raw, uniform = outputs.double().log_softmax(-1), torch.full_like(logits, -math.log(logits.shape[-1]))
        parts = torch.stack([logits.log_softmax(-1), raw, uniform])
        return (parts + self.log_weights[:, None, None]).logsumexp(0)


def centered(term: Tensor) -> Tensor:
    """Logits without their mean over the classes, in float64."""
    term = term.double()
    return term - term.mean(-1, keepdim=True)


def keep_class(log_p: Tensor, top: Tensor) -> Tensor:
    """Log-probabilities in which a given class of each row is the most probable one.

    Its probability stays, though at least 1/C and a margin. Classes above it are lowered to it less the margin, and
    what this leaves goes to the classes below in proportion.

    Args:
        log_p: Log-probabilities (N, C).
        top: A class for each row, (N,).

    Example:
        >>> p = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]])
        >>> keep_class(p.log(), torch.tensor([2, 0])).exp()[1]
        tensor([0.6000, 0.3000, 0.1000])
    """
    classes, which = log_p.shape[-1], top[:, None]
    margin = min(MARGIN, 0.1 / classes)
    most = log_p.exp().scatter(-1, which, 0.0).amax(-1)
    moved = (most > log_p.gather(-1, which).squeeze(-1).exp() - margin).nonzero().squeeze(-1)
    if not len(moved):
        return log_p
    which, p = which[moved], log_p[moved].double().exp()
    kept = p.gather(-1, which).clamp_min(1.0 / classes + margin)
    limit, others = kept - margin, p.clamp_min(1e-30).scatter(-1, which, 0.0)
    lowered = torch.zeros_like(others, dtype=torch.bool)
    while True:
        free = 1.0 - kept - limit * lowered.sum(-1, keepdim=True)
        below = others.masked_fill(lowered, 0.0)
        scaled = below * (free / below.sum(-1, keepdim=True).clamp_min(1e-300)).clamp_min(0.0)
        above = (scaled > limit) & ~lowered
        if not bool(above.any()):
            break
        lowered |= above
    p = torch.where(lowered, limit, scaled).scatter(-1, which, kept)
    return log_p.index_copy(0, moved, p.clamp_min(1e-300).log().to(log_p.dtype))


def corrected(pred: ClassificationPredictive, correction: MeanCorrection, *, fixed: bool) -> ClassificationPredictive:
    """Predictions with corrected class probabilities; the Gaussian over the logits stays as it is.

    Args:
        pred: The predictions.
        correction: The correction.
        fixed: Whether the network's class stays the most probable one.
    """
    logits = pred.latent.mean
    log_p, top = correction(pred.log_probs, logits), logits.argmax(-1)
    own = log_p.gather(-1, top[:, None]).squeeze(-1)
    log_p = keep_class(log_p, top) if fixed else log_p
    dtype = pred.log_probs.dtype
    return replace(pred, log_probs=log_p.to(dtype), keeps_argmax=fixed, network_log_prob=own.to(dtype))
