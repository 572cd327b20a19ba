"""VaLLA: the linearised Laplace approximation as a sparse variational Gaussian process (Ortega et al., 2024): FMGP
with the neural tangent kernel."""

from __future__ import annotations

import copy
import math
import reprlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Self, SupportsFloat

import torch
from torch import Tensor, nn

from posthoc.base import Job
from posthoc.collect.outputs import Outputs
from posthoc.errors import OptionError
from posthoc.fmgp.build import SMALL, START, inducing_owners, inducing_places
from posthoc.fmgp.coordinates import Coordinates
from posthoc.fmgp.estimator import digest_of
from posthoc.fmgp.fitted import FittedFMGP
from posthoc.fmgp.inducing_points import Inducing
from posthoc.fmgp.minibatches import DrawnBatches, PointView
from posthoc.fmgp.objective import Objective
from posthoc.fmgp.ood import OutOfDistribution
from posthoc.fmgp.output_covariance import OutputCovariance
from posthoc.fmgp.process import Process
from posthoc.io import changed, check_config
from posthoc.kernels import Kernel
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.likelihoods.registry import make_likelihood
from posthoc.methods.laplace.last_layer import find_last_layer
from posthoc.methods.ntk.ntk import LastLayerNTK, Pair, gradients
from posthoc.methods.ntk.tangent_process import Covariances, TangentProcess, fixed_coupling
from posthoc.methods.ntk.tangents import NTKMethod, TangentBackbone, Weights, check_classes, positive
from posthoc.predictive.base import Predictive
from posthoc.saved import Saved
from posthoc.training import History, Ranks, Training, single_thread, train
from posthoc.validation import choice, integer

__all__ = ["VaLLA"]


TYPICAL = 2**16
"""Rows that units are taken from."""
FEW_OUTPUTS = 32
"""Up to so many outputs their covariance is written out."""
AT_ONCE = 2**24
"""Numbers in the largest tensor of a prediction, rows x outputs x inducing points: 128 MB."""
POWERS = range(-3, 6)
"""Powers of ten that σ₀² may start at, on validation data."""
OPTIONS = ("weights", "num_inducing", "prior_variance", "alpha")


HEAD_PARTS = {
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


class VaLLA(NTKMethod):
    """A Gaussian process around the network with its tangent kernel, σ₀² J(x) J(x')ᵀ, as covariance: the posterior of
    the linearised network, by M inducing points and M x M numbers that are learnt as FMGP learns its own. It overfits:
    give `val`, and it starts with the σ₀² and stops at the step where that is likeliest.

    Each inducing point belongs to one output. For the last layer they are learnt, in the space of features. With
    `weights="all"` they stay random points of the data, and the kernel is evaluated once for each point.

    Parameters
    ----------
    model: an `nn.Module`, or with `weights="last"` any callable, or None to work from `Outputs` with features.
    likelihood: "regression", "classification", or a `Gaussian` or `Categorical` with options of its own. By name alone,
        a classifier's temperature is 1 and not learnt.
    weights: "last" for those of the last linear layer, in closed form, or "all" that are not frozen, by `torch.func`.
    inducing: with `weights="last"`: "kmeans", "random", or your own points, (M, D).
    inducing_classes: the output of each inducing point, where the points are your own.
    num_inducing: M, at most.
    prior_variance: σ₀², if it is not to be learnt.
    alpha: the divergence, from 0 (the ELBO) to 1.
    max_gigabytes: the most that gradients and kernels may take with `weights="all"`.
    layer: the module whose output the last layer reads, where it is not the last `nn.Linear` that does.
    steps, batch_size, lr, seed, eval_every, patience, progress: see `posthoc.training.Training`.
    """

    name = "valla"

    def __init__(
        self,
        model: nn.Module | Callable[..., Any] | None,
        likelihood: str | Likelihood,
        *,
        weights: Weights = "last",
        inducing: Any = "kmeans",
        inducing_classes: Any | None = None,
        num_inducing: int = 100,
        prior_variance: float | None = None,
        alpha: float = 1.0,
        max_gigabytes: float = 8.0,
        layer: str | None = None,
        outputs_are: str = "logits",
        device: str | torch.device | None = None,
        **training: Any,
    ) -> None:
        super().__init__(model, untempered(likelihood), layer=layer, outputs_are=outputs_are, device=device)
        if isinstance(inducing, str):
            choice("inducing", inducing, ("kmeans", "random"))
        if unknown := training.keys() - Training.__dataclass_fields__.keys():
            known_options = ", ".join(Training.__dataclass_fields__)
            raise OptionError(
                f"Unknown option {', '.join(sorted(unknown))}. The training options are: {known_options}."
            )
        if not isinstance(alpha, SupportsFloat) or not 0.0 <= float(alpha) <= 1.0:
            raise OptionError(f"Expected alpha from 0 (the ELBO) to 1, got {alpha!r}.")
        self.training, self.alpha = Training(**training), float(alpha)
        self._likelihood.check_alpha(self.alpha)
        self.inducing, self.inducing_classes = inducing, inducing_classes
        self.num_inducing = integer("num_inducing", num_inducing, 1)
        self.prior_variance = positive("prior_variance", prior_variance) if prior_variance is not None else None
        self._take_weights(weights, max_gigabytes)
        if weights == "all" and not (inducing_classes is None and isinstance(inducing, str)):
            raise OptionError('With weights="all" inducing points are drawn from the data: leave them out.')
        self.history = History()
        self.head: FittedFMGP | None = None

    @property
    def likelihood(self) -> Likelihood:
        return self.head.likelihood if self.head is not None else self._likelihood

    @property
    def fitted_prior_variance(self) -> float:
        """σ₀² as it was learnt or given, in the units of the weights."""
        self._require_fitted("fitted_prior_variance")
        assert self.head is not None
        kernel = self.head.process.kernel
        assert isinstance(kernel, LastLayerNTK)
        return float(kernel.log_variance.detach().exp())

    def _check_data(self, data: Any) -> None:
        super()._check_data(data)
        if self.weights == "all":
            jacobian = self._jacobian()
            what = f"The gradients at {self.num_inducing:,} inducing points in {jacobian.size:,} weights"
            self._afford(self.num_inducing * jacobian.row_bytes, what, "Ask for fewer of them (num_inducing)")

    def _draws(self) -> tuple[int, int]:
        return self.num_inducing, self.training.seed

    def _describer(self, pairs: list[Pair], points: int, outputs: int) -> Covariances:
        jacobian = self._jacobian()
        one = f"The gradients of {outputs:,} outputs at one point in {jacobian.size:,} weights"
        self._afford(outputs * jacobian.row_bytes, one, "Use a method that needs none, such as fmgp")
        size = points * outputs * (len(pairs) + outputs) * 8
        self._afford(size, f"The kernels of {points:,} points", "Ask for fewer inducing points, fit on less data")
        pairs = sorted(pairs, key=lambda pair: pair.output)  # as a process has them
        found = torch.tensor([pair.output for pair in pairs])
        return Covariances(jacobian, gradients(jacobian, pairs, outputs), found)

    @property
    def _covariances(self) -> Covariances:
        assert isinstance(self.backbone, TangentBackbone)
        assert isinstance(self.backbone.describe, Covariances)
        return self.backbone.describe

    def _fit(self, job: Job) -> None:
        check_classes(self._likelihood, job.train)
        ranks, seed, device = Ranks(), self.training.seed, self._home(job.train.outputs.device)
        if self._likelihood.draws and not ranks.alone:
            raise OptionError('Monte Carlo training draws in one process: use training="pairwise" with several.')
        likelihood = copy.deepcopy(self._likelihood).to(device)
        typical = job.train.spread(TYPICAL).to(device)
        assert typical.targets is not None
        likelihood.initialize(typical.outputs, typical.targets)
        head = self._untrained(job.train.only("features"), likelihood)
        ranks.share(list(head.buffers()))
        view = PointView(job.train.only("features"), head.coordinates)
        score = head.validation_score(job.val) if job.val is not None else None
        if score is not None and self.prior_variance is None and self.training.steps:
            start_where_best(head, score)
        draws = torch.Generator(device).manual_seed(seed) if likelihood.draws else None
        m, batch = len(head.process.l_raw), self.training.batch_size
        with single_thread(m * m * max(m, batch) < SMALL):
            history = train(
                Objective(head.process, likelihood, self.alpha, job.num_data, generator=draws),
                [*head.process.parameters(), *likelihood.parameters()],
                DrawnBatches(view, likelihood, batch, seed, ranks),
                self.training,
                score=score,
                generator=draws,
                checkpoint=job.checkpoint,
            )
        self.head, self.history = head, history

    def _untrained(self, outputs: Outputs, likelihood: Likelihood) -> FittedFMGP:
        """The process as it starts: outputs have a mean prior variance of one, unless σ₀² is given."""
        device, generator = next(likelihood.parameters()).device, torch.Generator().manual_seed(self.training.seed)
        units = torch.ones(outputs.outputs[0].numel(), dtype=torch.float64, device=device)
        if isinstance(likelihood, Gaussian):
            units = units / likelihood.scale
        # Also refuses features that are not the last layer's.
        bias = self.weights == "all" or find_last_layer(self.backbone, outputs, device).bias is not None
        kernel = LastLayerNTK(bias=bias).to(device)
        assert outputs.features is not None
        coordinates = Coordinates({"features": outputs.features.shape[1]}, "features").to(device)
        view = PointView(outputs, coordinates)
        sample = view.sample(1000, generator)
        process: Process
        if self.weights == "all":
            found = self._covariances
            process = TangentProcess(kernel, found.among().to(device), found.classes.to(device), fixed_coupling(units))
            size = process.split(sample["features"])[1].diagonal(dim1=1, dim2=2).mean(0)
        else:
            places = inducing_places(self.inducing, self.num_inducing, view, generator)
            z = {space: block.to(device) for space, block in places.items()}
            owners = inducing_owners(self.inducing_classes, len(z["features"]), len(units), generator)
            inducing = Inducing(z, owners)
            process = Process(kernel, inducing, len(units), fixed_coupling(units), start=START)
            size = kernel.diag(sample).mean().detach()
        prior = self.prior_variance or 1.0 / float((size * units.square()).mean().clamp_min(1e-300))
        nn.init.constant_(kernel.log_variance, math.log(prior))
        kernel.requires_grad_(self.prior_variance is None)
        return FittedFMGP(process, coordinates, likelihood)

    def _old_predictor(self, *, covariance: bool) -> Callable[[Outputs], Predictive]:
        head = self.head
        assert head is not None
        w = head.prepared()
        # Where there are few classes their covariance comes unasked: draws of the logits need it.
        dense = covariance or (self._likelihood.task == "classification" and head.process.num_outputs <= FEW_OUTPUTS)

        def predict(outputs: Outputs) -> Predictive:
            home = outputs.outputs.device
            predictive = head.predictive(outputs.only("features").to(head.device), w, covariance=dense)
            return predictive if head.device == home else predictive.to(home)

        return predict

    def _rows_at_once(self) -> int:
        assert self.head is not None
        process = self.head.process
        outputs = process.num_outputs if process.num_outputs <= FEW_OUTPUTS or self.weights == "all" else 1
        return max(1, min(super()._rows_at_once(), AT_ONCE // (outputs * len(process.l_raw))))

    def _needs(self, *, fitted: bool) -> tuple[bool, bool]:
        self._require_features()
        return True, False

    def _recipe(self) -> dict[str, Any]:
        inducing = self.inducing if isinstance(self.inducing, str) else digest_of(self.inducing)
        owners = None if self.inducing_classes is None else digest_of(self.inducing_classes)
        given = {"inducing": inducing, "inducing_classes": owners, "layer": self.layer}
        return {**given, **{name: getattr(self, name) for name in OPTIONS}, **self._training()}

    def _training(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self.training).items() if name != "progress"}

    def _tensors(self) -> dict[str, Tensor]:
        assert self.head is not None
        own = {"gradients": self._covariances.gradients} if self.weights == "all" else {}
        return {**self.head.state_dict(), **own}

    def _options(self) -> dict[str, Any]:
        assert self.head is not None
        own = {name: getattr(self, name) for name in (*OPTIONS, "max_gigabytes")}
        return {**own, "training": self._training(), "head": options_of(self.head)}

    @classmethod
    def _rebuild(cls, saved: Saved) -> Self:
        options = saved.options
        shape, training = options.pop("head"), options.pop("training")
        method = saved.unfitted(cls, **options, **training)
        kernel = LastLayerNTK(bias=shape["kernel"]["bias"])
        place = method._home()
        if method.weights == "last":
            head = rebuild(saved, shape, kernel, copy.deepcopy(method._likelihood))
        else:
            head = method._rebuild_all(saved, shape, kernel, place)
        method.head = head.to(place)
        return method

    def _rebuild_all(
        self, saved: Saved, shape: dict[str, Any], kernel: LastLayerNTK, place: torch.device
    ) -> FittedFMGP:
        m, outputs, jacobian = shape["num_inducing"], shape["num_outputs"], self._jacobian()
        check_options(saved, {**shape, "spaces": {"features": m}})  # z is their covariance
        blank = torch.zeros(m, m, dtype=torch.float64)
        coupling = fixed_coupling(torch.ones(outputs, dtype=torch.float64))
        process = TangentProcess(kernel, blank, saved.tensors["process.z_class"].long(), coupling)
        likelihood = copy.deepcopy(self._likelihood)
        saved.shape(likelihood)
        head = FittedFMGP(process, Coordinates(shape["spaces"], shape["default_space"]), likelihood)
        state: dict[str, Tensor] = head.state_dict()
        saved.check({**state, "gradients": (m, jacobian.size)})
        head.load_state_dict({name: saved.tensors[name] for name in state})
        assert self.backbone is not None
        found = Covariances(jacobian, saved.tensors["gradients"].to(place), process.z_class)
        self.backbone = TangentBackbone(self.backbone, found)
        return head


@torch.no_grad()
def start_where_best(head: FittedFMGP, score: Callable[[], float]) -> None:
    """Sets σ₀² to the best power of ten, relative to what it is. Data that the network has memorised only ever ask for
    less variance: where training starts is then as important as where it stops."""
    kernel = head.process.kernel
    assert isinstance(kernel, LastLayerNTK)
    middle = float(kernel.log_variance)

    def at(power: int) -> float:
        kernel.log_variance.fill_(middle + power * math.log(10.0))
        return score()

    at(min(POWERS, key=at))


def untempered(likelihood: str | Likelihood) -> Likelihood:
    """By name alone, classes have no temperature to learn: the method has none."""
    made = make_likelihood(likelihood)
    if isinstance(likelihood, Likelihood) or not isinstance(made, Categorical):
        return made
    return Categorical(temperature=1.0)


def options_of(head: FittedFMGP) -> dict[str, Any]:
    """What `rebuild` needs besides the tensors."""
    coupling = head.process.coupling
    return {
        "kernel": head.process.kernel.spec(),
        "spaces": {space: head.coordinates.width(space) for space in head.coordinates.spaces},
        "default_space": head.coordinates.default,
        "num_inducing": len(head.process.l_raw),
        "num_outputs": head.process.num_outputs,
        "shared": coupling is None,
        "separable": head.process.separable,
        "rank": coupling.rank if coupling is not None else None,
        "ood": [*head.ood.basis.shape, head.ood.exponent] if head.ood is not None else None,
        "normals": getattr(head.likelihood, "normals", None),
    }


def rebuild(saved: Saved, options: dict[str, Any], kernel: Kernel, likelihood: Likelihood) -> FittedFMGP:
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
    fitted = FittedFMGP(process, Coordinates(spaces, options["default_space"]), likelihood, ood)
    saved.check(fitted.state_dict())
    fitted.load_state_dict(saved.tensors)
    return fitted


def check_options(saved: Saved, options: dict[str, Any]) -> None:
    """Refuses options that the file's tensors contradict, before memory is allocated for them."""
    check_config(saved.path, options, HEAD_PARTS)
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
