"""Hamiltonian Monte Carlo over all the weights of a small network: the posterior itself, for those who can wait."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posthoc.base import Fitted, Job, SeedConfig, option
from posthoc.collect.loaders import Batch
from posthoc.collect.network import evaluating
from posthoc.errors import DataError, FileError, OptionError, PosthocWarning
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.methods.weights.flipout import Reweighted
from posthoc.methods.weights.hmc_sampler import Chains, WeightPosterior, diagnose, noise_bound, sample
from posthoc.methods.weights.network import LabelledBatch, seeded
from posthoc.methods.weights.sampling import DrawingMethod
from posthoc.optional import require
from posthoc.training import single_thread

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


@dataclass(frozen=True, kw_only=True)
class HMCConfig(SeedConfig):
    """Options of `HMC`."""

    samples: int = option(200, least=4)
    warmup: int = option(200, least=1)
    chains: int = option(2, least=1)
    prior_precision: float = option(1.0, above=0.0)
    max_tree_depth: int = option(10, least=1)
    max_r_hat: float | None = option(1.1, above=0.0)
    progress: bool | None = option(None, saved=False)


class HMC(DrawingMethod):
    """The no-U-turn sampler over the network's weights and the noise, on Pyro: pip install 'posthoc[hmc]'.

    Weights are Gaussian a priori and the variance of the noise is uniform. It samples the weights that require a
    gradient; the others stay. After `fit`, `diagnostics` says whether the chains agree (R-hat near 1) and how many
    independent draws theirs are worth (ESS). The file holds all the draws.

    Args:
        model: A small `nn.Module`.
        likelihood: "regression", "classification", or a `Gaussian` or `Categorical` (its temperature 1, or the fixed
            one).
        samples: Draws kept of each chain.
        warmup: Draws before them that tune the sampler.
        chains: The number of chains. The first starts from the trained weights, the others from draws of the prior.
        prior_precision: The precision of the prior of every weight.
        max_tree_depth: A draw takes up to 2 to this power gradients of all the data.
        max_r_hat: `fit` warns where R-hat is above it; None never warns.
        seed: The seed of the chains.
        progress: Whether to show a progress bar. By default on a terminal.
        device: Where a network without weights computes.
    """

    name = "hmc"
    Config = HMCConfig
    config: HMCConfig

    def __init__(self, model: Any = None, likelihood: str | Likelihood | None = None, **options: Any) -> None:
        super().__init__(model, likelihood, **options)
        require("pyro", "hmc", "Hamiltonian Monte Carlo")

    @property
    def diagnostics(self) -> dict[str, Any]:
        """Whether the chains agree: `r_hat`, `ess`, the same of the weights, `divergences` and `step_sizes`."""
        self._require_fitted("diagnostics")
        assert isinstance(self._fitted, FittedHMC)
        return self._fitted.diagnostics

    def _fit(self, job: Job) -> FittedHMC:
        free = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if not free:
            raise OptionError(
                "hmc samples the weights that require a gradient, got a network whose weights are all frozen: call "
                "requires_grad_(True) on it, or on the layers to sample."
            )
        work = self._afford(sum(p.numel() for p in free.values()), len(job.train))
        likelihood = self._start(job)
        with evaluating(self.module), seeded(self.config.seed, self.module_device):
            posterior, trained = self._posterior(job, likelihood, list(free))
        with (
            seeded(self.config.seed, self.module_device),
            single_thread(work < SMALL),
        ):  # whatever a loader has drawn before
            prior_draws = [
                self.config.prior_precision**-0.5 * torch.randn_like(trained) for _ in range(self.config.chains - 1)
            ]
            chains = sample(
                posterior,
                [trained, *prior_draws],
                samples=self.config.samples,
                warmup=self.config.warmup,
                max_tree_depth=self.config.max_tree_depth,
                progress=self.config.progress,
            )
            diagnostics = diagnose(posterior, chains)
        self._warn_of_chains(diagnostics)
        return self._kept(chains, likelihood, list(free), diagnostics)

    def _afford(self, weights: int, points: int) -> float:
        """Refuses what would not end; returns the multiplications of one gradient, forwards and back."""
        everything = sum(p.numel() for p in self.module.parameters())
        gradient = 2.0 * points * (everything + 2 * weights)
        draws = self.config.chains * (self.config.warmup + self.config.samples)
        work, needed = (
            gradient * draws * 2.0**self.config.max_tree_depth,
            8 * weights * self.config.chains * self.config.samples,
        )
        if work > MOST_WORK or needed > MOST_BYTES:
            hours = work / A_SECOND / 3600
            raise OptionError(
                f"hmc would take up to {work:.0e} multiplications, about {hours:,.0f} hours of a processor, and "
                f"{needed / 2**30:.1f} GB for its draws ({weights:,} weights, {points:,} points, {draws:,} draws of "
                f"up to {2**self.config.max_tree_depth:,} gradients each); it starts on no more than {MOST_WORK:.0e} "
                f"and {MOST_BYTES / 2**30:.0f} GB. Give it fewer points, draws or max_tree_depth, freeze all but the "
                "last layers, or use a method that scales, such as fmgp, laplace or mfvi."
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
        return WeightPosterior(answer, batches, likelihood, self.config.prior_precision, bound, weight), trained

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

    def _kept(self, chains: Chains, likelihood: Likelihood, names: list[str], diagnostics: dict[str, Any]) -> FittedHMC:
        weights, noise = chains.weights.flatten(0, 1).to(self._known_backbone.dtype), None
        if chains.noise is not None:
            assert isinstance(likelihood, Gaussian)
            noise = chains.noise.flatten(0, 1) * likelihood.scale.square()
            # The variance of a mixture of Gaussians contains the mean of their variances.
            likelihood.set_noise(noise.mean(0))
        return FittedHMC(likelihood, weights, noise, names, diagnostics)

    def _warn_of_chains(self, diagnostics: dict[str, Any]) -> None:
        r_hat, limit = diagnostics["r_hat"], self.config.max_r_hat
        if limit is not None and r_hat > limit:
            diverged = sum(diagnostics["divergences"])
            warnings.warn(
                f"The chains do not agree: R-hat is {r_hat:.2f} (above {limit:g}), and the draws are worth "
                f"{diagnostics['ess']:.0f} independent ones"
                + (f"; {diverged} of them diverged" if diverged else "")
                + ". Use more warmup and samples, or a greater max_tree_depth.",
                PosthocWarning,
                stacklevel=5,
            )

    def _draws(self, fitted: FittedHMC, batch: Batch) -> Tensor:  # (S, N, ...)
        parameters = dict(self.module.named_parameters())
        shapes = {name: parameters[name].shape for name in fitted.names}
        outputs = []
        for weights in fitted.weights.to(parameters[fitted.names[0]].device):
            # Copies, since where numbers lie in memory decides how they are rounded, and a file puts them elsewhere.
            values = {name: part.clone() for name, part in unpacked(weights, shapes).items()}
            outputs.append(self._answer(Reweighted(self.module, values), batch))
        return torch.stack(outputs)

    def _blank(self, shapes: Mapping[str, Any]) -> FittedHMC:
        parameters, names = dict(self.module.named_parameters()), shapes["names"]
        if missing := set(names) - parameters.keys():
            raise FileError(f"Expected a network with the weights {', '.join(sorted(missing))}, found none in it.")
        draws, size = self.config.chains * self.config.samples, sum(parameters[name].numel() for name in names)
        likelihood, noise = self._blank_likelihood(), None
        if isinstance(likelihood, Gaussian):
            noise = torch.zeros(draws, math.prod(self._width or ()), dtype=torch.float64)
        weights = torch.zeros(draws, size, dtype=self._known_backbone.dtype)
        return FittedHMC(likelihood, weights, noise, names, shapes["diagnostics"])


class FittedHMC(Fitted):
    """All draws of the weights and of the noise, and what the chains' diagnostics are."""

    def __init__(
        self,
        likelihood: Likelihood,
        weights: Tensor,  # (draws, P), in the order of `names`
        noise: Tensor | None,  # (draws, C), in the user's units
        names: list[str],
        diagnostics: dict[str, Any],
    ) -> None:
        super().__init__(likelihood)
        self.register_buffer("weights", weights)
        self.register_buffer("noise", noise)
        self.weights: Tensor
        self.noise: Tensor | None
        self.names, self.diagnostics = names, diagnostics

    def shapes(self) -> dict[str, Any]:
        return {"names": self.names, "diagnostics": self.diagnostics}


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
