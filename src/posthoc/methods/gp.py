"""Gaussian process regression: what one would use without a network, or on what a network leaves unexplained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, nn

from posthoc.base import Job, OldMethod
from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError, LayerError, OptionError
from posthoc.fmgp.coordinates import Coordinates, location_and_scale
from posthoc.fmgp.inducing_points import kmeans
from posthoc.fmgp.minibatches import DrawnBatches, PointView
from posthoc.fmgp.objective import TrainingBatch
from posthoc.likelihoods.base import Likelihood, columns
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.optional import require
from posthoc.predictive.base import Predictive, working_dtype
from posthoc.predictive.latent import IndependentLatent
from posthoc.saved import Saved
from posthoc.training import History, Ranks, Training, train
from posthoc.validation import choice, integer

if TYPE_CHECKING:
    from posthoc.methods.gp_processes import Posterior, Process

__all__ = ["GP"]

DEFAULTS: dict[str, dict[str, Any]] = {
    "exact": {"steps": 100, "lr": 0.1},
    "sparse": {"steps": 2000, "lr": 0.02, "batch_size": 256},
}
"""Training options: few steps on all the data, or many on some of them."""
TYPICAL = 2**16
"""Rows that units are taken from."""
AT_ONCE = 2**24
"""Numbers in the largest tensor of a prediction, rows x outputs x points: 128 MB."""


class GP(OldMethod):
    """A Gaussian process with a squared exponential kernel, its hyper-parameters by marginal likelihood: exact, or
    with inducing points where there are more data than it can hold. Its mean is not the network's. (`num_data` of `fit`
    is for inducing points: an exact one counts every point once.)

    The file of an exact one holds all the data of the fit, inputs and residuals; of a sparse one, inducing points,
    which are close to them. Needs GPyTorch: pip install 'posthoc[gp]'.

    Parameters
    ----------
    model: an `nn.Module`, a callable that returns a tensor, or None to work from `Outputs` with inputs.
    likelihood: "regression", or a `Gaussian`.
    mean: what the prior expects: what the "network" says (the process is then of its residuals), or "zero" (the mean of
        the targets, to be independent of where they have their zero).
    on: what the kernel looks at, standardised: "inputs" or "features".
    exact_up_to: points up to which it is exact: their covariance is a matrix of so many rows and columns. With C
        outputs there are C of these, so the limit is √C times lower.
    num_inducing: inducing points beyond that.
    layer: the module whose output is taken as features; by default the input of the last `nn.Linear` is.
    steps, batch_size, lr, seed, eval_every, patience, progress: see `posthoc.training.Training`. An exact process sees
        all points at every step, whatever `batch_size`; by default it takes 100 of them, and a sparse one 2,000.
    """

    name = "gp"
    tasks = ("regression",)
    fixed_mean = False

    def __init__(
        self,
        model: nn.Module | Callable[..., Any] | None,
        likelihood: str | Likelihood,
        *,
        mean: Literal["network", "zero"] = "network",
        on: Literal["inputs", "features"] = "inputs",
        exact_up_to: int = 5000,
        num_inducing: int = 500,
        layer: str | None = None,
        outputs_are: str = "logits",
        device: str | torch.device | None = None,
        **training: Any,
    ) -> None:
        super().__init__(model, likelihood, layer=layer, outputs_are=outputs_are, device=device)
        choice("mean", mean, ("network", "zero"))
        choice("on", on, ("inputs", "features"))
        if unknown := training.keys() - Training.__dataclass_fields__.keys():
            known = ", ".join(Training.__dataclass_fields__)
            raise OptionError(f"Unknown option {', '.join(sorted(unknown))}. The training options are: {known}.")
        self.mean, self.on = mean, on
        self.exact_up_to = integer("exact_up_to", exact_up_to, 0)
        self.num_inducing = integer("num_inducing", num_inducing, 1)
        self._given = training
        self.training = Training(**{**DEFAULTS["exact"], **training})
        self.history = History()
        self.head: Head | None = None
        self._posterior: Posterior | None = None
        require("gpytorch", "gp", "A Gaussian process")

    @property
    def likelihood(self) -> Likelihood:
        return self.head.likelihood if self.head is not None else self._likelihood

    def _fit(self, job: Job) -> None:
        if job.train.space(self.on) is None:
            other = "features" if self.on == "inputs" else "inputs"
            raise DataError(f'Expected {self.on} for the kernel to look at, got none. Give them, or use on="{other}".')
        device = self._home(job.train.outputs.device)
        outputs = job.train.only(self.on)
        head = self._started(outputs, device)
        kind = head.process.shape()["kind"]
        training = Training(**{**DEFAULTS[kind], **self._given})
        view = PointView(with_prior(outputs, head.centre), head.coordinates)
        size = len(outputs) if kind == "exact" else training.batch_size
        source = DrawnBatches(view, head.likelihood, size, training.seed, Ranks())

        def objective(batch: TrainingBatch) -> Tensor:
            return head.process.loss(batch.points[self.on], batch.target, head.likelihood, job.num_data)

        history = train(
            objective,
            head.parameters(),
            source,
            training,
            score=validation_score(head, job.val) if job.val is not None else None,
            checkpoint=job.checkpoint,
            cuda_graph=False,  # a Cholesky factor that fails has to warn or raise
        )
        self.head, self.training, self.history, self._posterior = head, training, history, None

    def _started(self, outputs: Outputs, device: torch.device) -> Head:
        """A head in the units of the data, with a process that has learnt nothing yet."""
        from posthoc.methods.gp_processes import Exact, Sparse

        typical = outputs.spread(TYPICAL).to(device)
        points = typical.space(self.on)
        assert points is not None
        assert typical.targets is not None
        coordinates = Coordinates({self.on: points.shape[1]}, self.on).to(device)
        location, scale = location_and_scale(points)
        coordinates.get_buffer(f"{self.on}_location").copy_(location)
        coordinates.get_buffer(f"{self.on}_scale").copy_(scale)
        centre = columns(typical.targets).mean(0) if self.mean == "zero" else None
        likelihood = copy.deepcopy(self._likelihood).to(device)
        assert isinstance(likelihood, Gaussian)
        likelihood.initialize(with_prior(typical, centre).outputs, typical.targets)
        num_outputs = outputs.outputs[0].numel()
        view = PointView(with_prior(outputs, centre), coordinates)
        process: Process
        if len(outputs) ** 2 * num_outputs <= self.exact_up_to**2:
            everything = view.batch(likelihood, slice(None))
            process = Exact(everything.points[self.on], everything.target)
        else:
            generator = torch.Generator().manual_seed(self.training.seed)
            process = Sparse(kmeans(view, self.num_inducing, generator)[self.on].to(device), num_outputs)
        return Head(process, coordinates, likelihood, centre)

    def _old_predictor(self, *, covariance: bool) -> Callable[[Outputs], Predictive]:
        head = self._fitted_head()
        if self._posterior is None:  # made once: an exact one takes as long as a step of the fit
            self._posterior = head.posterior()
        posterior = self._posterior

        def predict(outputs: Outputs) -> Predictive:
            home = outputs.outputs.device
            predictive = head.predictive(outputs.to(head.device), posterior, covariance=covariance)
            return predictive if head.device == home else predictive.to(home)

        return predict

    def _rows_at_once(self) -> int:
        shape = self._fitted_head().process.shape()
        return max(1, min(super()._rows_at_once(), AT_ONCE // (shape["points"] * shape["outputs"])))

    def _fitted_head(self) -> Head:
        assert self.head is not None
        return self.head

    def _needs(self, *, fitted: bool) -> tuple[bool, bool]:
        features = self.on == "features"
        if features and self.backbone is not None and not self.backbone.has_features:
            raise LayerError(
                "Expected a model with a layer to take features from; found none. Name one with layer=..., or use "
                'on="inputs".'
            )
        return features, not features

    def _recipe(self) -> dict[str, Any]:
        names = ("mean", "on", "exact_up_to", "num_inducing")
        given = {name: getattr(self.training, name) for name in self._given if name != "progress"}
        return {**{name: getattr(self, name) for name in names}, **given}

    def _options(self) -> dict[str, Any]:
        return {"given": self._recipe(), "process": self._fitted_head().process.shape()}

    def _tensors(self) -> dict[str, Tensor]:
        return self._fitted_head().state_dict()

    @classmethod
    def _rebuild(cls, saved: Saved) -> Self:
        method = saved.unfitted(cls, **saved.options["given"])
        head = Head.blank(method, saved.options["process"])
        saved.check(head.state_dict())
        head.load_state_dict(saved.tensors)
        method.head = head.to(method._home())
        return method


class Head(nn.Module):
    """What a fit learns: a process, the units it works in, and where its prior is."""

    def __init__(self, process: Process, coordinates: Coordinates, likelihood: Gaussian, centre: Tensor | None) -> None:
        super().__init__()
        self.process, self.coordinates, self.likelihood = process, coordinates, likelihood
        self.register_buffer("centre", centre)  # (C,), or None where the network is the prior
        self.centre: Tensor | None

    @classmethod
    def blank(cls, method: GP, shape: dict[str, Any]) -> Head:
        """A head of this shape, to load a state into."""
        from posthoc.methods.gp_processes import rebuilt

        likelihood = copy.deepcopy(method._likelihood)
        assert isinstance(likelihood, Gaussian)
        blank = torch.zeros(1, shape["outputs"], dtype=torch.float64)
        likelihood.initialize(blank, blank + 1.0)
        centre = blank[0] if method.mean == "zero" else None
        return cls(rebuilt(**shape), Coordinates({method.on: shape["width"]}, method.on), likelihood, centre)

    @property
    def device(self) -> torch.device:
        return self.coordinates.device

    def posterior(self) -> Posterior:
        return self.process.posterior(self.likelihood)

    def predictive(self, outputs: Outputs, posterior: Posterior, *, covariance: bool = False) -> Predictive:
        """What the posterior says of some rows, in the user's units."""
        mean, variance = posterior(self.coordinates.points(outputs)[self.coordinates.default])
        prior, dtype = with_prior(outputs, self.centre).outputs, working_dtype(outputs.outputs)
        moved = (columns(prior) + self.likelihood.scale * mean).to(dtype).reshape(outputs.outputs.shape)
        return self.likelihood.predictive(moved, IndependentLatent(variance), covariance=covariance)


def with_prior(outputs: Outputs, centre: Tensor | None) -> Outputs:
    """The outputs with the prior's mean in the place of the network's word, where it is another."""
    if centre is None:
        return outputs
    said = outputs.outputs
    return outputs.with_outputs(centre.to(said.device).expand(len(said), -1).reshape(said.shape))


def validation_score(head: Head, val: Outputs) -> Callable[[], float]:
    """Minus the mean log-probability of the validation data, as `predict` would give it."""

    @torch.no_grad()
    def score() -> float:
        posterior, total = head.posterior(), 0.0
        for rows in torch.arange(len(val)).split(1024):
            part = val[rows].to(head.device)
            total -= float(head.predictive(part, posterior).log_prob(part.targets).sum())
        return total / len(val)

    return score
