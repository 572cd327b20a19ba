"""ELLA: the linearised Laplace approximation in the few directions of weight space that matter (Deng et al., 2022)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from posthoc.base import Job
from posthoc.collect.loaders import Batch
from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError
from posthoc.fmgp.inducing_points import distinct
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.methods.laplace.laplace import linearized
from posthoc.methods.laplace.last_layer import find_last_layer, with_one
from posthoc.methods.ntk.ntk import Jacobian, Pair, gradients
from posthoc.methods.ntk.subspace import Candidate, curvature, grid, leading, likeliest, scores, set_relative_noise
from posthoc.methods.ntk.tangents import NTKMethod, TangentBackbone, Weights, check_classes, positive
from posthoc.predictive.base import Predictive
from posthoc.predictive.latent import FactorLatent
from posthoc.saved import Saved
from posthoc.validation import integer

__all__ = ["ELLA"]

PRIORS = tuple(10.0 ** (step / 2) for step in range(-6, 9))
"""Prior variances that are tried, in units that give the outputs a mean prior variance of one."""
STOPS = tuple(0.5**halvings for halvings in range(13))
"""Shares of the data after which G may stop early."""
AT_ONCE = 2**22
"""Numbers in the largest tensor, rows x outputs x features: 32 MB."""
WORK = 2**33
"""Numbers looked at in a search: for more, some rows of the validation data must do."""
TYPICAL = 2**16
"""Rows that units are taken from."""
FEW_OUTPUTS = 32
"""Up to so many classes their covariance is written out."""
OPTIONS = ("weights", "num_points", "num_features", "prior_variance", "early_stop", "seed")


class Choice(NamedTuple):
    """What was found best."""

    prior_variance: float  # σ₀²
    rows: int  # that G was summed over


class ELLA(NTKMethod):
    """The posterior of a linearised network, N(θ, (G + I/σ₀²)⁻¹) with G the Gauss-Newton matrix, in K directions: the
    leading eigenvectors of the tangent kernel among M random pairs of a training point and an output. The mean stays
    the network's. G takes one pass over the data.

    σ₀² (and in regression the noise) is chosen from a grid by the likelihood of `val`, or without it by the Laplace
    evidence of the data.

    Parameters
    ----------
    model: an `nn.Module`, or with `weights="last"` any callable, or None to work from `Outputs` with features.
    likelihood: "regression", "classification", or a `Gaussian` or `Categorical` with options of its own. Classes are
        predicted by logit scaling at temperature 1, as `laplace` does, unless a `Categorical` says otherwise.
    weights: "last" for those of the last linear layer, in closed form, or "all" that are not frozen, by `torch.func`.
    num_points: M, at most.
    num_features: K, at most. With `weights="last"` a direction is of one output, and outputs without one have no
        variance: let it be well above the number of classes.
    prior_variance: σ₀², if it is not to be searched for.
    early_stop: whether `val` may also say after how many rows to stop adding to G.
    max_gigabytes: the most that gradients may take with `weights="all"`.
    layer: the module whose output the last layer reads, where it is not the last `nn.Linear` that does.
    """

    name = "ella"

    def __init__(
        self,
        model: nn.Module | Callable[..., Any] | None,
        likelihood: str | Likelihood,
        *,
        weights: Weights = "last",
        num_points: int = 2000,
        num_features: int = 20,
        prior_variance: float | None = None,
        early_stop: bool = True,
        max_gigabytes: float = 8.0,
        layer: str | None = None,
        outputs_are: str = "logits",
        device: str | torch.device | None = None,
        seed: int = 0,
        progress: bool | None = None,
    ) -> None:
        super().__init__(model, linearized(likelihood), layer=layer, outputs_are=outputs_are, device=device)
        self.num_points = integer("num_points", num_points, 1)
        self.num_features = integer("num_features", num_features, 1)
        self.prior_variance = positive("prior_variance", prior_variance) if prior_variance is not None else None
        self.early_stop = bool(early_stop)
        self.seed = integer("seed", seed, 0)
        self._take_weights(weights, max_gigabytes)
        self.choice: Choice | None = None
        self._fitted = None
        self._state: dict[str, Tensor] = {}  # factor (K, K) and, for the last layer, directions and classes

    @property
    def likelihood(self) -> Likelihood:
        return self._fitted if self._fitted is not None else self._likelihood

    def _check_data(self, data: Any) -> None:
        super()._check_data(data)
        if self.weights == "all":
            jacobian = self._jacobian()
            what = f"The gradients at {self.num_points:,} points in {jacobian.size:,} weights"
            size = (self.num_points + self.num_features) * jacobian.row_bytes
            self._afford(size, what, "Ask for fewer points (num_points)")

    def _draws(self) -> tuple[int, int]:
        return self.num_points, self.seed

    def _describer(self, pairs: list[Pair], points: int, outputs: int) -> Projection:
        jacobian, k = self._jacobian(), min(self.num_features, len(pairs))
        what = f"{k} features for each of {outputs} outputs at {points:,} points"
        size = points * outputs * k * jacobian.row_bytes / jacobian.size
        self._afford(size, what, "Ask for fewer (num_features)")
        return Projection(jacobian, leading(gradients(jacobian, pairs, outputs), k)[0])

    @property
    def _projection(self) -> Projection:
        assert isinstance(self.backbone, TangentBackbone)
        assert isinstance(self.backbone.describe, Projection)
        return self.backbone.describe

    @torch.no_grad()
    def _fit(self, job: Job) -> None:
        device = self._home(job.train.outputs.device)
        check_classes(self._likelihood, job.train)
        likelihood = self._start(job.val if job.val is not None else job.train, device)
        state, mean = self._last(job.train, device) if self.weights == "last" else ({}, self._projection.mean())
        subspace = Subspace(state, likelihood)
        sums = self._sums(job, subspace, stops=job.val is not None and self.early_stop)
        if job.val is not None:
            best = self._best(job.val, subspace, sums, self._priors(job.train, subspace))
        else:
            ((rows, g),) = sums.items()
            best = likeliest(rows, g, likelihood, mean, job.num_data, self.prior_variance)
        set_relative_noise(likelihood, best.noise)
        self._state, self._fitted = {**state, "factor": best.factor()}, likelihood
        self.choice = Choice(best.prior, best.rows)

    def _best(self, val: Outputs, subspace: Subspace, sums: dict[int, Tensor], priors: list[float]) -> Candidate:
        """The candidate under which the validation data are likeliest."""
        candidates = grid(sums, priors, subspace.likelihood)
        width = val.outputs[0].numel() * len(candidates[0].values)
        some = val.spread(max(1000, WORK // (len(candidates) * width)))
        parts = ((part, subspace(part)) for part in self._parts(some, subspace))
        return candidates[int(scores(parts, subspace.likelihood, candidates).argmin())]

    def _start(self, outputs: Outputs, device: torch.device) -> Likelihood:
        """A likelihood in the units of the data."""
        likelihood = copy.deepcopy(self._likelihood).to(device)
        some = outputs.spread(TYPICAL).to(device)
        assert some.targets is not None
        likelihood.initialize(some.outputs, some.targets)
        return likelihood

    def _last(self, train: Outputs, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
        """K directions in the weights of the last layer, and how far the weights lie along each. The gradients of two
        outputs are orthogonal, so every eigenvector belongs to one output."""
        layer = find_last_layer(self.backbone, train, device)
        outputs, generator = len(layer.weight), torch.Generator().manual_seed(self.seed)
        bias = layer.bias if layer.bias is not None else torch.zeros(outputs, dtype=torch.float64, device=device)
        theta = torch.cat([layer.weight, bias[:, None]], 1)
        pairs = distinct(len(train) * outputs, min(self.num_points, len(train) * outputs), generator)
        rows, owners = pairs // outputs, (pairs % outputs).to(device)
        features = train[rows.to(train.outputs.device)].features
        assert features is not None
        j = with_one(features.to(device).double())
        j[:, -1] *= layer.bias is not None  # directions that leave alone a bias that is not there
        found = []
        for output in owners.unique().tolist():
            directions, values = leading(j[owners == output], self.num_features)
            found += [(float(v), output, d) for v, d in zip(values, directions, strict=True)]
        found = sorted(found, key=lambda entry: -entry[0])[: self.num_features]
        directions = torch.stack([direction for *_, direction in found])
        classes = torch.tensor([output for _, output, _ in found], device=device)
        return {"directions": directions, "classes": classes}, (theta[classes] * directions).sum(-1)

    def _parts(self, outputs: Outputs, subspace: Subspace, order: Tensor | None = None) -> Iterator[Outputs]:
        rows = torch.arange(len(outputs)) if order is None else order
        for some in rows.to(outputs.outputs.device).split(self._rows(outputs.outputs[0].numel())):
            yield outputs[some].to(subspace.device)

    def _sums(self, job: Job, subspace: Subspace, *, stops: bool) -> dict[int, Tensor]:  # of (K, K)
        """G over the first so many rows of the data, in random order, for each place where it may stop."""
        n = len(job.train)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed))
        ends = sorted({max(1, round(share * n)) for share in (STOPS if stops else STOPS[:1])})
        sums, total = {}, torch.zeros((), dtype=torch.float64)
        for start, end in zip([0, *ends], ends, strict=False):
            for part in self._parts(job.train, subspace, order[start:end]):
                total = total + curvature(subspace(part), part.outputs, subspace.likelihood)
            sums[end] = total * (job.num_data / n)
        return sums

    def _priors(self, train: Outputs, subspace: Subspace) -> list[float]:
        if self.prior_variance is not None:
            return [self.prior_variance]
        some = train.spread(self._rows(train.outputs[0].numel())).to(subspace.device)
        size = float(subspace(some).square().sum(-1).mean())
        return [prior / size if size > 0.0 else prior for prior in PRIORS]

    def _old_predictor(self, *, covariance: bool) -> Callable[[Outputs], Predictive]:
        subspace, factor = Subspace(self._state, self.likelihood), self._state["factor"]
        # Where there are few classes their covariance comes unasked: draws of the logits need it.
        few = self._likelihood.task == "classification" and math.prod(self._width or ()) <= FEW_OUTPUTS

        def predict(outputs: Outputs) -> Predictive:
            home = outputs.outputs.device
            part = outputs.only("features").to(subspace.device)
            latent = FactorLatent(subspace(part) @ factor)
            predictive = subspace.likelihood.predictive(part.outputs, latent, covariance=covariance or few)
            return predictive if subspace.device == home else predictive.to(home)

        return predict

    def _rows(self, outputs: int) -> int:
        return max(1, AT_ONCE // (outputs * self.num_features))

    def _rows_at_once(self) -> int:
        assert self._width is not None
        return min(super()._rows_at_once(), self._rows(math.prod(self._width)))

    def _needs(self, *, fitted: bool) -> tuple[bool, bool]:
        self._require_features()
        return True, False

    def _options(self) -> dict[str, Any]:
        return {**self._recipe(), "max_gigabytes": self.max_gigabytes, "choice": self.choice}

    def _recipe(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in OPTIONS}

    def _tensors(self) -> dict[str, Tensor]:
        fitted = {f"likelihood.{name}": tensor for name, tensor in self.likelihood.state_dict().items()}
        along = {"directions": self._projection.directions} if self.weights == "all" else {}
        return {**fitted, **self._state, **along}

    @classmethod
    def _rebuild(cls, saved: Saved) -> Self:
        options, tensors, likelihood = saved.options, saved.tensors, saved.likelihood()
        choice = Choice(*options.pop("choice"))
        method = saved.unfitted(cls, **options)
        expected: dict[str, Any] = {f"likelihood.{name}": tensor for name, tensor in likelihood.state_dict().items()}
        k, size = tensors["directions"].shape
        if method.weights == "all":
            size = method._jacobian().size
        else:
            expected["classes"] = torch.zeros(k, dtype=torch.long)
        saved.check({**expected, "directions": (k, size), "factor": (k, k)})
        place = method._home()
        state = {name: t.to(place) for name, t in tensors.items() if not name.startswith("likelihood.")}
        likelihood.load_state_dict({name: tensors[f"likelihood.{name}"] for name in likelihood.state_dict()})
        if method.weights == "all":
            assert method.backbone is not None
            projection = Projection(method._jacobian(), state.pop("directions"))
            method.backbone = TangentBackbone(method.backbone, projection)
        method._state, method._fitted, method.choice = state, likelihood.to(place), choice
        return method


class Projection:
    """J(x) along some directions of all weights, as features: one row of numbers for each point."""

    def __init__(self, jacobian: Jacobian, directions: Tensor) -> None:
        self.jacobian, self.directions = jacobian, directions  # (K, P)

    def __call__(self, batch: Batch) -> Tensor:  # (N, C K)
        return self.jacobian.push(batch, self.directions).flatten(1)

    def mean(self) -> Tensor:  # (K,)
        """How far the weights lie along each."""
        theta = torch.cat([weight.reshape(-1) for weight in self.jacobian.weights.values()])
        return (self.directions.to(theta) @ theta).double()


class Subspace:
    """φ: J(x) along the directions, in the units of training, from the features of some rows."""

    def __init__(self, state: dict[str, Tensor], likelihood: Likelihood) -> None:
        self.state, self.likelihood = state, likelihood
        self.device = next(likelihood.parameters()).device

    def __call__(self, part: Outputs) -> Tensor:  # (N, C, K)
        if part.features is None:
            raise DataError('Expected features, which weights="last" looks at, got outputs without them.')
        outputs = part.outputs[0].numel()
        if "directions" in self.state:
            directions, classes = self.state["directions"], self.state["classes"]
            width = directions.shape[1] - 1
            if part.features.shape[1] != width:
                raise DataError(f"Expected features of width {width} as in fit, got {part.features.shape[1]}.")
            along = with_one(part.features.double()) @ directions.mT  # (N, K)
            phi = along[:, None] * (torch.arange(outputs, device=self.device)[:, None] == classes)
        else:
            phi = part.features.double().unflatten(1, (outputs, -1))
        return phi / self.likelihood.scale[:, None] if isinstance(self.likelihood, Gaussian) else phi
