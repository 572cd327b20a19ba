"""Hamiltonian Monte Carlo over all the weights of a small network: the posterior itself, for those who can wait."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from posthoc.base import Job
from posthoc.collect.loaders import Batch
from posthoc.collect.network import evaluating
from posthoc.errors import DataError, FileError, OptionError, PosthocWarning
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.methods.weights.flipout import Reweighted
from posthoc.methods.weights.hmc_sampler import Chains, WeightPosterior, diagnose, noise_bound, sample
from posthoc.methods.weights.network import LabelledBatch, seeded
from posthoc.methods.weights.sampling import DrawingMethod, set_noise
from posthoc.optional import require
from posthoc.saved import Saved
from posthoc.training import single_thread
from posthoc.validation import integer

__all__ = ["HMC"]

MOST_WORK = 1e15
"""Multiplications of the longest run that is started,"""
A_SECOND = 1e10
"""at so many a second: more than a day."""
MOST_BYTES = 2**33
"""Memory for the draws, at most."""
SMALL = 2e7
"""Multiplications of a gradient, below which threads cost more than they save."""
ROWS = 2**14
"""Rows of arrays that the network is run on at a time."""


class HMC(DrawingMethod):
    """The no-U-turn sampler over the network's weights and the noise, on Pyro: pip install 'posthoc[hmc]'.

    Weights are Gaussian a priori and the variance of the noise is uniform. It samples the weights that require a
    gradient; the others stay. After `fit`, `diagnostics` says whether the chains agree (R-hat near 1) and what their
    draws are worth (ESS). The file holds all the draws.

    Parameters
    ----------
    model: an `nn.Module`, a small one.
    likelihood: "regression", "classification", or a `Gaussian` or `Categorical` (its temperature 1, or the fixed one).
    samples, warmup: draws kept of each chain, and draws before them that tune the sampler.
    chains: the first starts from the trained weights, the others from draws of the prior.
    prior_std: the standard deviation of every weight a priori.
    max_tree_depth: a draw takes up to 2 to this power gradients of all the data.
    max_r_hat: `fit` warns where R-hat is above it; None leaves the judgement to you.
    """

    name = "hmc"

    def __init__(
        self,
        model: nn.Module | Callable[..., Any] | None,
        likelihood: str | Likelihood,
        *,
        samples: int = 200,
        warmup: int = 200,
        chains: int = 2,
        prior_std: float = 1.0,
        max_tree_depth: int = 10,
        max_r_hat: float | None = 1.1,
        layer: str | None = None,
        outputs_are: str = "logits",
        device: str | torch.device | None = None,
        seed: int = 0,
        progress: bool | None = None,
    ) -> None:
        super().__init__(model, likelihood, layer=layer, outputs_are=outputs_are, device=device)
        self.samples, self.warmup = integer("samples", samples, 4), integer("warmup", warmup, 1)
        self.chains, self.seed = integer("chains", chains, 1), integer("seed", seed, 0)
        self.max_tree_depth, self.progress = integer("max_tree_depth", max_tree_depth, 1), progress
        if not prior_std > 0.0:
            raise OptionError(f"Expected a positive prior_std, got {prior_std!r}.")
        self.prior_std, self.max_r_hat = float(prior_std), max_r_hat
        self.diagnostics: dict[str, Any] = {}
        self.names: list[str] = []
        self.weights: Tensor | None = None  # (draws, P), in the order of `names`
        self.noise: Tensor | None = None  # (draws, C), in the user's units
        require("pyro", "hmc", "Hamiltonian Monte Carlo")

    def _fit(self, job: Job) -> None:
        if job.checkpoint is not None:
            raise OptionError("hmc keeps no checkpoints: leave checkpoint out, and save the fitted head.")
        assert job.train.targets is not None
        free = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if not free:
            raise OptionError(
                "hmc samples the weights that require a gradient, got a network whose weights are all frozen: call "
                "requires_grad_(True) on it, or on the layers to sample."
            )
        work = self._afford(sum(p.numel() for p in free.values()), len(job.train))
        likelihood = self._start(job.train.outputs, job.train.targets)
        with evaluating(self.module), seeded(self.seed, self.module_device):
            posterior, trained = self._posterior(job, likelihood, list(free))
        with seeded(self.seed, self.module_device), single_thread(work < SMALL):  # whatever a loader has drawn before
            prior_draws = [self.prior_std * torch.randn_like(trained) for _ in range(self.chains - 1)]
            chains = sample(
                posterior,
                [trained, *prior_draws],
                samples=self.samples,
                warmup=self.warmup,
                max_tree_depth=self.max_tree_depth,
                progress=self.progress,
            )
            diagnostics = diagnose(posterior, chains)
        self._keep(chains, likelihood, list(free), diagnostics)
        self._doubt_chains()

    def _afford(self, weights: int, points: int) -> float:
        """Refuses what would not end; returns the multiplications of one gradient, forwards and back."""
        everything = sum(p.numel() for p in self.module.parameters())
        gradient = 2.0 * points * (everything + 2 * weights)
        draws = self.chains * (self.warmup + self.samples)
        work, needed = gradient * draws * 2.0**self.max_tree_depth, 8 * weights * self.chains * self.samples
        if work > MOST_WORK or needed > MOST_BYTES:
            hours = work / A_SECOND / 3600
            raise OptionError(
                f"hmc would take up to {work:.0e} multiplications, about {hours:,.0f} hours of a processor, and "
                f"{needed / 2**30:.1f} GB for its draws ({weights:,} weights, {points:,} points, {draws:,} draws of "
                f"up to {2**self.max_tree_depth:,} gradients each); it starts on no more than {MOST_WORK:.0e} and "
                f"{MOST_BYTES / 2**30:.0f} GB. Give it fewer points, draws or max_tree_depth, freeze all but the last "
                "layers, or use a method that scales, such as fmgp, laplace or mfvi."
            )
        return gradient

    def _posterior(self, job: Job, likelihood: Likelihood, names: list[str]) -> tuple[WeightPosterior, Tensor]:
        """The posterior in float64 on a copy of the network, and where in it the trained network is."""
        device = self.module_device or torch.device("cpu")
        device = torch.device("cpu") if device.type == "mps" else device  # which has no float64
        network = copy.deepcopy(self.module).to(device, torch.float64).eval().requires_grad_(False)
        parameters = dict(network.named_parameters())
        shapes = {name: parameters[name].shape for name in names}

        def answer(weights: Tensor, labelled: LabelledBatch) -> Tensor:
            return self._answer(Reweighted(network, unpacked(weights, shapes)), labelled.batch)

        batches = joined([self._in_float64(batch, device) for batch in self._batches(job.data, ROWS)])
        trained = torch.cat([parameters[name].reshape(-1) for name in names])
        targets = torch.cat([b.target for b in batches])
        bound = noise_bound(likelihood.to(device), targets)
        weight = job.num_data / len(targets)
        return WeightPosterior(answer, batches, likelihood, self.prior_std, bound, weight), trained

    def _in_float64(self, batch: Batch, device: torch.device) -> LabelledBatch:
        def precise(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(device, torch.float64 if value.is_floating_point() else None)

        if batch.target is None:
            raise DataError("Expected targets to fit on: batches (x, y), or mappings with labels.")
        args, kwargs = tuple(map(precise, batch.args)), {name: precise(value) for name, value in batch.kwargs.items()}
        with torch.no_grad():
            said = self._answer(self.module, batch)
        target = self._likelihood.check_targets(batch.target, said)
        return LabelledBatch(Batch(args, kwargs, None), precise(target))

    def _keep(self, chains: Chains, likelihood: Likelihood, names: list[str], diagnostics: dict[str, Any]) -> None:
        assert self.backbone is not None
        self.names, self.diagnostics = names, diagnostics
        self.weights, self.noise = chains.weights.flatten(0, 1).to(self.backbone.dtype), None
        if chains.noise is not None:
            assert isinstance(likelihood, Gaussian)
            self.noise = chains.noise.flatten(0, 1) * likelihood.scale.square()
            # The variance of a mixture of Gaussians has the mean of their variances in it.
            set_noise(likelihood, self.noise.mean(0))
        self._fitted = likelihood

    def _doubt_chains(self) -> None:
        r_hat, ess = self.diagnostics["r_hat"], self.diagnostics["ess"]
        if self.max_r_hat is not None and r_hat > self.max_r_hat:
            diverged = sum(self.diagnostics["divergences"])
            warnings.warn(
                f"The chains do not agree: R-hat is {r_hat:.2f} (above {self.max_r_hat:g}), and the draws are worth "
                f"{ess:.0f} independent ones" + (f"; {diverged} of them diverged" if diverged else "") + ". Use more "
                "warmup and samples, or a greater max_tree_depth.",
                PosthocWarning,
                stacklevel=5,
            )

    def _draws(self, batch: Batch) -> Tensor:  # (S, N, ...)
        assert self.weights is not None
        parameters = dict(self.module.named_parameters())
        shapes = {name: parameters[name].shape for name in self.names}
        self.weights = self.weights.to(parameters[self.names[0]].device)
        said = []
        for weights in self.weights:
            # Copies, since where numbers lie in memory decides how they are rounded, and a file puts them elsewhere.
            values = {name: part.clone() for name, part in unpacked(weights, shapes).items()}
            said.append(self._answer(Reweighted(self.module, values), batch))
        return torch.stack(said)

    def _options(self) -> dict[str, Any]:
        return {**self._recipe(), "names": self.names, "diagnostics": self.diagnostics}

    def _recipe(self) -> dict[str, Any]:
        names = ("samples", "warmup", "chains", "prior_std", "max_tree_depth", "max_r_hat", "seed")
        return {name: getattr(self, name) for name in names}

    def _tensors(self) -> dict[str, Tensor]:
        assert self.weights is not None
        noise = {} if self.noise is None else {"noise": self.noise}
        return {**super()._tensors(), "weights": self.weights, **noise}

    @classmethod
    def _rebuild(cls, saved: Saved) -> Self:
        options, tensors = saved.options, saved.tensors
        names, diagnostics = options.pop("names"), options.pop("diagnostics")
        method = saved.unfitted(cls, **options)
        method._fitted = cls._likelihood_from(saved)
        parameters = dict(method.module.named_parameters())
        if missing := set(names) - parameters.keys():
            raise FileError(f"Expected a network with the weights {', '.join(sorted(missing))}, found none in it.")
        draws = method.chains * method.samples
        expected: dict[str, Any] = DrawingMethod._tensors(method)
        expected["weights"] = (draws, sum(parameters[name].numel() for name in names))
        if isinstance(method._fitted, Gaussian):
            expected["noise"] = (draws, math.prod(saved.width))
        saved.check(expected)
        method.names, method.diagnostics = names, diagnostics
        method.weights, method.noise = tensors["weights"], tensors.get("noise")
        return method


def joined(batches: list[LabelledBatch]) -> list[LabelledBatch]:
    """All batches as one, where they are nothing but tensors of one shape: every gradient runs over all of them."""
    widths = {tuple(x.shape[1:] if isinstance(x, Tensor) else None for x in b.batch.args) for b in batches}
    if len(widths) > 1 or None in next(iter(widths)) or any(b.batch.kwargs for b in batches):
        return batches
    args = tuple(torch.cat(parts) for parts in zip(*(b.batch.args for b in batches), strict=True))
    return [LabelledBatch(Batch(args, {}, None), torch.cat([b.target for b in batches]))]


def unpacked(weights: Tensor, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """A flat vector as the parameters it was made of."""
    parts = weights.split([shape.numel() for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
