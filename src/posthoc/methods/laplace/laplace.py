"""`Laplace`: the linearised Laplace approximation of a network's last layer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from posthoc.base import Job, Method
from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError, LayerError, OptionError
from posthoc.likelihoods.base import Categorical, Likelihood, make_likelihood
from posthoc.methods.laplace.curvature import FORMS, Curvature, Dense, Diagonal, Form, Kronecker, require_room
from posthoc.methods.laplace.last_layer import find_last_layer
from posthoc.methods.laplace.posterior import Posterior, fit_posterior, refine
from posthoc.predictive.base import Predictive
from posthoc.saved import Saved
from posthoc.validation import choice

__all__ = ["FEW_OUTPUTS", "Laplace", "check_classes", "checked_prior", "linearised"]

FEW_OUTPUTS = 32
"""Up to so many classes their covariance comes unasked: draws of the logits need it."""
KINDS: dict[str, type[Curvature]] = {"kronecker": Kronecker, "diagonal": Diagonal, "dense": Dense}


class Laplace(Method):
    """The weights of the last layer as Gaussian, with the loss's curvature at the trained ones as its precision.

    Works from `Outputs` with features alone: the last layer is then found by least squares. Other subsets of the
    weights are for `posthoc.methods.LaplaceTorch`. Nothing in it is random: `seed` changes nothing.

    Parameters
    ----------
    model: an `nn.Module` whose last layer is an `nn.Linear`, or None to work from `Outputs` with features.
    likelihood: "regression", "classification", or a `Gaussian` or `Categorical` with options of its own. Classes are
        predicted by logit scaling (the "probit" approximation) at temperature 1, unless a `Categorical` says otherwise.
        "shared" noise is one σ² for all outputs.
    curvature: "kron" (KFAC), "full" or "diag".
    prior: how the precision of the weights' prior, and the noise of a regression, are found: "marglik" (they maximise
        the marginal likelihood of the data), "val" (they are best on the `val` of `fit`); or that precision itself.
    max_gigabytes: the most that the matrices of the curvature may take; a form that needs more is refused.
    layer: a module whose output is taken as features; by default the input of the last `nn.Linear` is.
    """

    name = "laplace"

    def __init__(
        self,
        model: nn.Module | Callable[..., Any] | None,
        likelihood: str | Likelihood,
        *,
        curvature: Form = "kron",
        prior: Literal["marglik", "val"] | float = "marglik",
        max_gigabytes: float = 8.0,
        layer: str | None = None,
        outputs_are: str = "logits",
        device: str | torch.device | None = None,
        seed: int = 0,
        progress: bool | None = None,
    ) -> None:
        super().__init__(model, linearised(likelihood), layer=layer, outputs_are=outputs_are, device=device)
        choice("curvature", curvature, FORMS)
        if outputs_are != "logits":
            raise OptionError(f"laplace needs the logits that the last layer gives, got outputs_are={outputs_are!r}.")
        self.curvature, self.prior, self.max_gigabytes = curvature, checked_prior(prior), float(max_gigabytes)
        self.posterior: Posterior | None = None

    @property
    def likelihood(self) -> Likelihood:
        return self.posterior.likelihood if self.posterior is not None else self._likelihood

    @property
    def prior_precision(self) -> float:
        """The precision of the weights' prior, once there is a fit."""
        self._require_fitted("prior_precision")
        assert self.posterior is not None
        return float(self.posterior.log_precision.detach().exp())

    def _fit(self, job: Job) -> None:
        if self.prior == "val" and job.val is None:
            raise OptionError('prior="val" is chosen on validation data: give fit(..., val=...), or use "marglik".')
        train, home = job.train, self._home(job.train.outputs.device)
        check_classes(self._likelihood, train)
        if train.features is not None:
            outputs, features = train.outputs.shape[1:].numel(), train.features.shape[1] + 1
            classes = isinstance(self._likelihood, Categorical)
            require_room(self.curvature, outputs, features, classes=classes, gigabytes=self.max_gigabytes)
        layer = find_last_layer(self.backbone, train, home)
        posterior = fit_posterior(
            train.only("features"),
            layer,
            copy.deepcopy(self._likelihood).to(home),
            self.curvature,
            precision=self.prior if isinstance(self.prior, float) else None,
            num_data=job.num_data,
        )
        if self.prior == "val":
            assert job.val is not None
            refine(posterior, job.val.only("features"))
        self.posterior = posterior

    def _predictor(self, *, covariance: bool) -> Callable[[Outputs], Predictive]:
        posterior = self.posterior
        assert posterior is not None
        few = isinstance(posterior.likelihood, Categorical) and math.prod(self._width or ()) <= FEW_OUTPUTS

        def predict(outputs: Outputs) -> Predictive:
            home = outputs.outputs.device
            read = outputs.only("features").to(posterior.device)
            predictive = posterior.predictive(read, covariance=covariance or few)
            return predictive if posterior.device == home else predictive.to(home)

        return predict

    def _rows_at_once(self) -> int:
        assert self.posterior is not None
        return min(super()._rows_at_once(), self.posterior.rows_at_once)

    def _needs(self, *, fitted: bool) -> tuple[bool, bool]:
        if self.backbone is not None and not self.backbone.has_features:
            raise LayerError(
                "Expected a network whose last layer is an nn.Linear, found none to take features from. Name the layer "
                "before the last with layer=..., or give posthoc.Outputs with features."
            )
        return True, False

    def _recipe(self) -> dict[str, Any]:
        return {"curvature": self.curvature, "prior": self.prior}

    def _options(self) -> dict[str, Any]:
        assert self.posterior is not None
        held = self.posterior.curvature
        return {
            **self._recipe(),
            "kind": next(name for name, kind in KINDS.items() if type(held) is kind),
            "shapes": {name: list(tensor.shape) for name, tensor in held.state_dict().items()},
            "num_features": self.posterior.num_features,
            "bias": self.posterior.bias,
        }

    def _tensors(self) -> dict[str, Tensor]:
        assert self.posterior is not None
        return self.posterior.state_dict()

    @classmethod
    def _rebuild(cls, saved: Saved) -> Self:
        options = saved.options
        method = saved.unfitted(cls, curvature=options["curvature"], prior=options["prior"])
        saved.check_some({f"curvature.{name}": tuple(shape) for name, shape in options["shapes"].items()})
        blank = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in options["shapes"].items()}
        held = KINDS[options["kind"]](**blank)
        posterior = Posterior(held, saved.likelihood(), num_features=options["num_features"], bias=options["bias"])
        saved.check(posterior.state_dict())
        posterior.load_state_dict(saved.tensors)
        method.posterior = posterior.to(method._home())
        return method


def linearised(likelihood: str | Likelihood) -> Likelihood:
    """The likelihood as a Laplace approximation takes it: a temperature is not learnt, it is 1 unless it was fixed; and
    by name alone classes are predicted by logit scaling."""
    made = make_likelihood(likelihood)
    if not isinstance(made, Categorical):
        return made
    if not isinstance(likelihood, Likelihood):
        return Categorical(temperature=1.0, prediction="logit_scaling")
    return make_likelihood({**made.spec(), "temperature": made.fixed_temperature or 1.0})


def checked_prior(prior: Any) -> Literal["marglik", "val"] | float:
    """The option `prior`, or an error."""
    if isinstance(prior, str):
        choice("prior", prior, ("marglik", "val"))
        return "val" if prior == "val" else "marglik"
    if isinstance(prior, bool) or not isinstance(prior, int | float) or not 0.0 < prior < math.inf:
        raise OptionError(f'Expected prior to be "marglik", "val" or a positive precision, got {prior!r}.')
    return float(prior)


def check_classes(likelihood: Likelihood, train: Outputs) -> None:
    """Refuses a classifier's data of one class."""
    assert train.targets is not None
    if isinstance(likelihood, Categorical) and bool((train.targets == train.targets[0]).all()):
        raise DataError(
            f"Expected targets of at least two classes, got class {int(train.targets[0])} alone in all {len(train)} "
            "rows: such data say nothing about what separates classes."
        )
