"""`FMGPConfig`: the options of `FMGP`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, SupportsFloat

from posthoc.errors import OptionError
from posthoc.fmgp.inducing_points import as_points
from posthoc.kernels import RBF, as_kernel
from posthoc.training import Training
from posthoc.validation import choice, integer

__all__ = ["NOT_KEPT", "FMGPConfig", "shortened"]

NOT_KEPT = "given"
"""Value of `inducing` in a saved head whose inducing points were given by the user: the file does not hold them."""
STEPS_PER_ROOT, MIN_STEPS, MAX_STEPS = 7.0, 200, 2000
"""By default a regression is trained for 7 √N steps, within these limits (docs/ablation.md)."""
DEFAULT_STEPS = 1000
"""Default number of steps of a classification."""
DEFAULT_LR = {"classification": 0.01, "regression": 0.02}
"""Default learning rates by task."""


@dataclass(frozen=True)
class FMGPConfig:
    """Options of `FMGP`; its docstring describes them."""

    kernel: Any = None
    variance: Literal["auto", "per_output", "shared", "separable"] = "auto"
    inducing: Any = "kmeans"
    inducing_classes: Any = None
    num_inducing: int = 100
    alpha: float = 1.0
    standardize: bool = True
    output_rank: int | None = None
    kl: Literal["copies", "once"] | None = None
    ood_strength: float | None = None
    residuals: Literal["learned", "gaussian"] = "learned"
    cache: bool = True
    steps: int | None = None
    batch_size: int = 100
    lr: float | None = None
    seed: int = 0
    eval_every: int = 20
    patience: int | None = 5
    progress: bool | None = None

    def __post_init__(self) -> None:
        kernel = as_kernel(self.kernel) if self.kernel is not None else RBF()
        if not isinstance(self.alpha, SupportsFloat) or not 0.0 <= float(self.alpha) <= 1.0:
            raise OptionError(f"Expected alpha from 0 (the ELBO) to 1, got {self.alpha!r}.")
        choice("variance", self.variance, ("auto", "per_output", "shared", "separable"))
        choice("residuals", self.residuals, ("learned", "gaussian"))
        choice("kl", self.kl or "once", ("copies", "once"))
        strength = self.ood_strength
        if strength is not None and not (isinstance(strength, SupportsFloat) and 0.0 <= float(strength) < math.inf):
            raise OptionError(
                f"Expected ood_strength to be a number of at least 0, or None to choose it, got {strength!r}."
            )
        if isinstance(self.inducing, str):
            if self.inducing != NOT_KEPT:
                choice("inducing", self.inducing, ("kmeans", "random", "per_class"))
            if self.inducing == "per_class" and self.inducing_classes is not None:
                raise OptionError('inducing="per_class" takes the classes from the data: leave inducing_classes out.')
        else:
            for block in self.inducing.values() if isinstance(self.inducing, Mapping) else [self.inducing]:
                as_points(block)  # an error now, before the network is run
        checked = {
            "kernel": kernel,
            "alpha": float(self.alpha),
            "num_inducing": integer("num_inducing", self.num_inducing, 1),
            "output_rank": integer("output_rank", self.output_rank, 1) if self.output_rank is not None else None,
            "ood_strength": float(strength) if strength is not None else None,
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        self.training(rows=1)  # checks the options of training

    def resolved(self, task: str) -> FMGPConfig:
        """The same options, with the defaults of `steps` and `lr` for this task. Each is filled in on its own.

        The steps of a regression stay None, because their default depends on the number of rows.
        """
        steps = DEFAULT_STEPS if self.steps is None and task == "classification" else self.steps
        return replace(
            self, steps=steps, lr=DEFAULT_LR.get(task, DEFAULT_LR["regression"]) if self.lr is None else self.lr
        )

    def training(self, rows: int) -> Training:
        """How to train on this number of rows."""
        by_rows = round(min(max(STEPS_PER_ROOT * math.sqrt(rows), MIN_STEPS), MAX_STEPS))
        return Training(
            steps=by_rows if self.steps is None else self.steps,
            batch_size=self.batch_size,
            lr=DEFAULT_LR["regression"] if self.lr is None else self.lr,
            seed=self.seed,
            eval_every=self.eval_every,
            patience=self.patience,
            progress=self.progress,
        )


def shortened(training: Training) -> Training:
    """How to train a candidate: a third of the steps, with up to three times the learning rate."""
    return replace(training, steps=-(-training.steps // 3), lr=min(3.0 * training.lr, max(training.lr, 0.05)))
