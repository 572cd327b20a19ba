"""`LaplaceTorch`: linearised Laplace approximations over other weights than the last layer's, by laplace-torch."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from posthoc.base import Job
from posthoc.collect.loaders import Batch
from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError, OptionError
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.methods.laplace.laplace import FEW_OUTPUTS, linearized
from posthoc.methods.laplace.marginal_likelihood import best_evidence
from posthoc.methods.laplace.posterior import settle_noise
from posthoc.methods.ntk.tangents import check_classes
from posthoc.methods.weights.network import NetworkMethod
from posthoc.optional import require
from posthoc.predictive.base import Predictive
from posthoc.predictive.latent import DenseLatent
from posthoc.saved import Saved
from posthoc.validation import choice, integer

__all__ = ["LaplaceTorch"]

HESSIANS = {"all": ("kron", "full", "diag"), "subnetwork": ("full", "diag")}
"""What laplace-torch has for a subset of the weights. Its low-rank form needs a library that is in no package index."""
AT_ONCE = 2**24
"""Numbers in the Jacobians of one prediction, rows x outputs x weights: 64 MB in float32."""
SCALARS = ("mean", "loss", "prior_precision", "sigma_noise")
COPIES = 4
"""Matrices over all weights that exist at once."""


class LaplaceTorch(NetworkMethod):
    """The linearised Laplace approximation over all weights that are not frozen, or some of them. For the last layer
    alone `Laplace` gives the same numbers in less time and memory, and without this library.

    Parameters
    ----------
    model: an `nn.Module` that takes one tensor.
    likelihood: as for `Laplace`; the noise is shared by all outputs, and the temperature is 1.
    subset: "all", or "subnetwork" with the weights that `subnetwork` names.
    hessian: the form of the curvature: "kron", "full" or "diag"; "full" or "diag" of a subnetwork.
    subnetwork: how many of the largest weights, or the names of modules or parameters.
    prior: "marglik" (precision and noise maximise the marginal likelihood), or the precision itself.
    max_gigabytes: the most that the matrices of a full curvature may take.
    """

    name = "laplace-torch"
    load_options = ("batch_size", "max_gigabytes")

    def __init__(
        self,
        model: nn.Module | Callable[..., Any] | None,
        likelihood: str | Likelihood,
        *,
        subset: Literal["all", "subnetwork"] = "all",
        hessian: Literal["kron", "full", "diag"] = "kron",
        subnetwork: int | Sequence[str] | None = None,
        prior: Literal["marglik"] | float = "marglik",
        batch_size: int = 256,
        max_gigabytes: float = 8.0,
        layer: str | None = None,
        outputs_are: str = "logits",
        device: str | torch.device | None = None,
        seed: int = 0,
        progress: bool | None = None,
    ) -> None:
        super().__init__(model, linearized(likelihood), layer=layer, outputs_are=outputs_are, device=device)
        choice("subset", subset, tuple(HESSIANS))
        choice("hessian", hessian, HESSIANS[subset])
        self.subset, self.hessian, self.subnetwork, self.prior = subset, hessian, subnetwork, checked_prior(prior)
        self.batch_size, self.max_gigabytes = integer("batch_size", batch_size, 1), float(max_gigabytes)
        if (subset == "subnetwork") != (subnetwork is not None):
            raise OptionError('subset="subnetwork" and subnetwork=... (which weights) go together.')
        if isinstance(self._likelihood, Categorical) and self._likelihood.fixed_temperature != 1.0:
            raise OptionError("laplace-torch knows no temperature of the likelihood but 1.")
        if isinstance(self._likelihood, Gaussian) and self._likelihood.noise_form != "shared":
            raise OptionError('laplace-torch knows one noise for all outputs: use Gaussian("shared").')
        if self.prior == "val":
            raise OptionError('prior="val" is for posthoc.methods.Laplace: use "marglik", or the precision itself.')
        self.chosen = self._chosen()
        self._require_room()
        self._approximation: Any = None
        self._fitted = None

    @property
    def likelihood(self) -> Likelihood:
        return self._fitted if self._fitted is not None else self._likelihood

    @property
    def prior_precision(self) -> float:
        """The precision of the weights' prior, once there is a fit."""
        self._require_fitted("prior_precision")
        return float(self._approximation.prior_precision)

    def _chosen(self) -> Tensor | None:
        """The numbers of a subnetwork's weights among all that are not frozen."""
        named = [(name, p.detach()) for name, p in self.module.named_parameters() if p.requires_grad]
        if not named:
            raise OptionError("laplace-torch needs weights that are not frozen: call requires_grad_() on some of them.")
        if self.subnetwork is None:
            return None
        if isinstance(self.subnetwork, int):
            size = torch.cat([p.reshape(-1).abs() for _, p in named])
            wanted = min(integer("subnetwork", self.subnetwork, 1), len(size))
            return size.argsort(descending=True, stable=True)[:wanted].sort().values.cpu()
        names = tuple(self.subnetwork)
        for name in names:
            if not any(belongs(parameter, name) for parameter, _ in named):
                raise OptionError(
                    f"Expected subnetwork to name modules or parameters that are not frozen, got {name!r}. The "
                    f"parameters are: {', '.join(parameter for parameter, _ in named)}."
                )
        mask = [torch.full((p.numel(),), any(belongs(parameter, n) for n in names)) for parameter, p in named]
        return torch.cat(mask).nonzero().squeeze(-1)

    def _require_room(self) -> None:
        weights = self._num_weights()
        needed = COPIES * 4 * weights**2 / 1e9
        if self.hessian == "full" and needed > self.max_gigabytes:
            raise OptionError(
                f'Expected hessian="full" to fit into {self.max_gigabytes:g} GB, found that {weights} weights need '
                f'{needed:.3g} GB. Use hessian="kron" or "diag", a smaller subnetwork, or posthoc.methods.Laplace for '
                "the last layer; or allow more with max_gigabytes=...."
            )

    def _num_weights(self) -> int:
        if self.chosen is not None:
            return len(self.chosen)
        return sum(p.numel() for p in self.module.parameters() if p.requires_grad)

    def _made(self) -> Any:
        """An approximation that knows no data yet, around a copy of the network."""
        laplace = require("laplace", "laplace", "A Laplace approximation over these weights")
        network = Answering(copy.deepcopy(self.module).eval(), self._answer)
        options = {} if self.chosen is None else {"subnetwork_indices": self.chosen}
        task = self._likelihood.task
        with quiet():
            return laplace.Laplace(
                network, task, subset_of_weights=self.subset, hessian_structure=self.hessian, **options
            )

    def _fit(self, job: Job) -> None:
        train, approximation = job.train, self._made()
        assert train.targets is not None
        check_classes(self._likelihood, train)
        likelihood = copy.deepcopy(self._likelihood).to(train.outputs.device)
        likelihood.initialize(train.outputs, train.targets)
        gaussian = isinstance(likelihood, Gaussian)
        with quiet():
            approximation.fit(Pass(self, job.data, train))
            maximise_evidence(
                approximation, noise=gaussian, precision=self.prior if isinstance(self.prior, float) else None
            )
        if isinstance(likelihood, Gaussian):
            likelihood.scale = likelihood.scale.square().mean().sqrt().expand(len(likelihood.scale)).clone()
            settle_noise(likelihood, approximation.sigma_noise.double().square().reshape(1))
        self._approximation, self._fitted = approximation, likelihood

    def _old_predictor(self, *, covariance: bool) -> Callable[[Batch], Predictive]:
        approximation, likelihood, weights = self._approximation, self.likelihood, self._num_weights()

        def predict(batch: Batch) -> Predictive:
            said, x = self._answer(self.module, batch), one_tensor(batch)
            likelihood.to(said.device)
            width = said.shape[1:].numel()
            rows = max(1, AT_ONCE // (width * weights))
            # laplace-torch's own way to the outputs' Gaussian: its public call gives probabilities of classes instead.
            parts = [approximation._glm_predictive_distribution(part)[1].double() for part in x.split(rows)]
            v = torch.cat(parts).reshape(-1, width, width) if parts else said.new_zeros(0, width, width).double()
            if isinstance(likelihood, Gaussian):
                v = v / torch.outer(likelihood.scale, likelihood.scale)
            few = isinstance(likelihood, Categorical) and width <= FEW_OUTPUTS
            return likelihood.predictive(said, DenseLatent(v), covariance=covariance or few)

        return predict

    def _recipe(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("subset", "hessian", "subnetwork", "prior")}

    def _options(self) -> dict[str, Any]:
        held = self._approximation.state_dict()
        factors = [len(group) for group in held["H"]] if self.hessian == "kron" else None
        counts = {name: int(held[name]) for name in ("n_data", "n_outputs")}
        return {**self._recipe(), **counts, "factors": factors}

    def _tensors(self) -> dict[str, Tensor]:
        held = self._approximation.state_dict()
        tensors = {name: torch.as_tensor(held[name]) for name in SCALARS}
        tensors |= {f"likelihood.{name}": tensor for name, tensor in self.likelihood.state_dict().items()}
        return {**tensors, **{f"H.{number}": part for number, part in enumerate(flat(held["H"]))}}

    @classmethod
    def _rebuild(cls, saved: Saved) -> Self:
        options, tensors, likelihood = saved.options, saved.tensors, saved.likelihood()
        recipe = {name: options[name] for name in ("subset", "hessian", "subnetwork", "prior")}
        method = saved.unfitted(cls, **recipe, **saved.extra)
        saved.check_some({f"likelihood.{name}": tensor for name, tensor in likelihood.state_dict().items()})
        likelihood.load_state_dict({name: tensors[f"likelihood.{name}"] for name in likelihood.state_dict()})
        approximation = method._made()
        home = method.module_device
        parts = [tensors[f"H.{number}"].to(home) for number in range(sum(name.startswith("H.") for name in tensors))]
        held = {
            **{name: tensors[name].to(home) for name in SCALARS},
            "H": shaped(parts, options["factors"]),
            **{name: options[name] for name in ("n_data", "n_outputs")},
            "prior_mean": approximation.prior_mean,
            "likelihood": approximation.likelihood,
            "temperature": approximation.temperature,
            "enable_backprop": approximation.enable_backprop,
            "cls_name": type(approximation).__name__,
        }
        with quiet():
            approximation.load_state_dict(held)
        method._approximation, method._fitted = approximation, likelihood
        return method


class Answering(nn.Module):
    """A network whose answer is one row of outputs a point, as laplace-torch expects."""

    def __init__(self, network: nn.Module, answer: Callable[[nn.Module, Batch], Tensor]) -> None:
        super().__init__()
        self.network, self.answer = network, answer

    def forward(self, x: Tensor) -> Tensor:  # (N, C)
        said = self.answer(self.network, Batch((x,), {}, None))
        return said.reshape(len(said), -1)


class Pass:
    """The data as laplace-torch reads them: batches of inputs and targets, and a `dataset` that has a length."""

    def __init__(self, method: LaplaceTorch, data: Any, outputs: Outputs) -> None:
        self.method, self.data, self.dataset, self.width = method, data, range(len(outputs)), outputs.outputs.shape[1:]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.method._batches(self.data, self.method.batch_size):
            x = one_tensor(batch)
            like = torch.zeros(len(x), *self.width, dtype=self._dtype(), device=x.device)
            y = self.method._likelihood.check_targets(batch.target, like)
            yield x, y if self.method._likelihood.task == "classification" else y.to(like).reshape(len(x), -1)

    def _dtype(self) -> torch.dtype:
        return next(self.method.module.parameters()).dtype


def maximise_evidence(approximation: Any, *, noise: bool, precision: float | None) -> None:
    """The prior precision, unless it is given, and the noise of greatest marginal likelihood. (laplace-torch climbs
    by gradients, which for the noise of a Kronecker product it does not have.)"""
    weights = approximation.mean_subnet if hasattr(approximation, "mean_subnet") else approximation.mean
    error = 2.0 * approximation.loss.double().reshape(1) if noise else None
    found, best = best_evidence(
        spectrum(approximation.H).double().reshape(1, -1),
        float(weights.double().square().sum()),
        count=approximation.n_data * approximation.n_outputs,
        square_error=error,
        precision=precision,
    )
    approximation.prior_precision = best
    if noise:
        approximation.sigma_noise = float(found.sqrt())


def spectrum(held: Any) -> Tensor:
    """The eigenvalues of a curvature in any of laplace-torch's forms: a matrix, its diagonal, Kronecker factors."""
    if isinstance(held, Tensor):
        values = torch.linalg.eigvalsh(held.double()) if held.ndim == 2 else held
    else:
        groups = ([*map(Tensor.double, group)] for group in held.eigenvalues)
        values = torch.cat([torch.outer(*group).reshape(-1) if len(group) == 2 else group[0] for group in groups])
    return values.clamp_min(0.0)


def one_tensor(batch: Batch) -> Tensor:
    given = [*batch.args, *batch.kwargs.values()]
    if len(given) != 1 or not isinstance(given[0], Tensor) or batch.kwargs:
        raise DataError(
            f"laplace-torch takes networks of one tensor, got {len(given)} inputs"
            f"{' by name' if batch.kwargs else ''}: wrap the network, or use a method that needs outputs alone."
        )
    return given[0]


def belongs(parameter: str, name: str) -> bool:
    return parameter == name or parameter.startswith(f"{name}.")


def flat(held: Any) -> list[Tensor]:
    """A tensor, or tensors in lists of lists, one after the other."""
    return [held] if isinstance(held, Tensor) else [part for group in held for part in flat(group)]


def shaped(parts: list[Tensor], factors: list[int] | None) -> Any:
    """What `flat` took apart."""
    if factors is None:
        return parts[0]
    taken = iter(parts)
    return [[next(taken) for _ in range(count)] for count in factors]


@contextmanager
def quiet() -> Iterator[None]:
    """Other people's deprecations and hints are not our user's concern."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def checked_prior(prior: Any) -> Literal["marglik", "val"] | float:
    """The option `prior`, or an error."""
    if isinstance(prior, str):
        choice("prior", prior, ("marglik", "val"))
        return "val" if prior == "val" else "marglik"
    if isinstance(prior, bool) or not isinstance(prior, int | float) or not 0.0 < prior < math.inf:
        raise OptionError(f'Expected prior to be "marglik", "val" or a positive precision, got {prior!r}.')
    return float(prior)
