"""Temperature scaling: one number that calibrates a classifier's confidence."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from posthoc.base import Fitted, Job
from posthoc.config import ScoreConfig, option
from posthoc.errors import OptionError, warn
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.temperature import PRIOR, TemperaturePrior, best_inverse, limit_reached
from posthoc.methods.map import LikelihoodOnly
from posthoc.predictive.base import Predictive
from posthoc.predictive.classification import ClassificationPredictive


@dataclass(frozen=True, kw_only=True)
class TemperatureConfig(ScoreConfig):
    """Options of `Temperature`."""

    prior: Any = option(PRIOR)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prior is not None:
            try:
                prior = TemperaturePrior(*map(float, self.prior))
            except (TypeError, ValueError):
                prior = TemperaturePrior(scale=math.nan)
            if not (math.isfinite(prior.mean) and 0.0 < prior.scale < math.inf):
                raise OptionError(
                    f"Expected prior to be the mean and the scale of log(1/temperature), such as "
                    f"({PRIOR.mean}, {PRIOR.scale}), or None, got {self.prior!r}."
                )
            object.__setattr__(self, "prior", prior)


class Temperature(LikelihoodOnly):
    """softmax(f/τ), with the τ of greatest posterior density.

    Where there are fewer than 200 rows, log(1/τ) has a prior, Student's t with four degrees of freedom.

    Args:
        model: A network, a callable, or None to work from `Outputs`.
        likelihood: "classification" (the default), or a `Categorical`.
        prior: The mean and the scale of the prior of log(1/τ); None maximizes the likelihood.
        outputs_are: What the outputs are: "logits", "log-probs" or "probs".
        device: Where the fitted method computes.

    Example:
        >>> import torch
        >>> from posthoc import Outputs, Temperature
        >>> data = Outputs(torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1, 1]))
        >>> round(Temperature(prior=None).fit(data).likelihood.temperature.item(), 3)
        2.885
    """

    name = "temperature"
    Config: ClassVar[type[ScoreConfig]] = TemperatureConfig
    wants_unseen = True
    tasks = ("classification",)

    def _fit(self, job: Job) -> Fitted:
        likelihood = copy.deepcopy(self._likelihood)
        assert isinstance(likelihood, Categorical)
        if likelihood.fixed_temperature is not None:
            raise OptionError("Temperature scaling learns the temperature: use Categorical() without one.")
        assert job.train.targets is not None
        prior = getattr(self.config, "prior", None)  # which methods built on this one may leave out
        inverse = best_inverse(job.train.outputs, job.train.targets, prior)
        if (limit := limit_reached(job.train.outputs, inverse)) is not None:
            quality = "all right" if limit == "high" else "no better than chance"
            found = f"The predictions are {quality} on these data, so the temperature was limited to {1.0 / inverse:g}."
            warn(f"{found} Fit on data that the network has not memorized, with labels in the order of its outputs.")
        nn.init.constant_(likelihood.log_temperature, -math.log(inverse))
        return Fitted(likelihood)


def remapped(pred: Predictive, logits: Tensor, *, keeps_argmax: bool) -> Predictive:
    """Predictions with these logits' probabilities; the latent Gaussian stays."""
    assert isinstance(pred, ClassificationPredictive)
    log_probs = logits.log_softmax(-1).to(pred.log_probs.dtype)
    return replace(pred, log_probs=log_probs, keeps_argmax=keeps_argmax)
