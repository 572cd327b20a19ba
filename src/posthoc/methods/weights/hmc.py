"""Hamiltonian Monte Carlo over all the weights of a small network: the reference, where time does not matter."""

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
from posthoc.collect.loaders import Batch, change_tensors
from posthoc.errors import OptionError, PosthocWarning
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.methods.weights.hmc_sampler import WeightPosterior, sample
from posthoc.methods.weights.network import DrawingMethod, LabelledBatch, seeded
from posthoc.optional import require
from posthoc.training import single_thread

__all__ = ["HMC"]

MAX_WORK = 1e15
"""The largest number of multiplications of a run that is started."""
WORK_PER_SECOND = 1e10
"""Multiplications in a second, for the message about runs that are not."""
MAX_BYTES = 2**33
"""The largest memory for the draws."""
SINGLE_THREAD_WORK = 2e7
"""Multiplications of a gradient below which one thread is faster than several."""
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
        assert self._fitted is not None
        diagnostics: dict[str, Any] = self._fitted.metadata["diagnostics"]
        return diagnostics

    def _fit(self, job: Job) -> Fitted:
        options, device = self.config, self.module_device
        free = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if not free:
            raise OptionError(
                "hmc samples the weights that require a gradient, got a network whose weights are all frozen: call "
                "requires_grad_(True) on it, or on the layers to sample."
            )
        work = self._gradient_work(sum(p.numel() for p in free.values()), len(job.train))
        likelihood = self._start(job)
        with seeded(options.seed, device):  # for a loader that shuffles
            posterior, trained = self._posterior(job, likelihood, list(free))
        with seeded(options.seed, device), single_thread(work < SINGLE_THREAD_WORK):
            others = [options.prior_precision**-0.5 * torch.randn_like(trained) for _ in range(options.chains - 1)]
            weights, noise, diagnostics = sample(
                posterior,
                [trained, *others],
                samples=options.samples,
                warmup=options.warmup,
                max_tree_depth=options.max_tree_depth,
                progress=options.progress,
            )
        if options.max_r_hat is not None and diagnostics["r_hat"] > options.max_r_hat:
            diverged = sum(diagnostics["divergences"])
            warnings.warn(
                f"The chains do not agree: R-hat is {diagnostics['r_hat']:.2f} (above {options.max_r_hat:g}), and the "
                f"draws are worth {diagnostics['ess']:.0f} independent ones"
                + (f"; {diverged} of them diverged" if diverged else "")
                + ". Use more warmup and samples, or a greater max_tree_depth.",
                PosthocWarning,
                stacklevel=4,
            )
        if noise is not None:
            assert isinstance(likelihood, Gaussian)
            noise = noise.flatten(0, 1) * likelihood.scale.square()
            # The variance of a mixture of Gaussians contains the mean of their variances.
            likelihood.set_noise(noise.mean(0))
        metadata = {"names": list(free), "diagnostics": diagnostics}
        return Fitted(likelihood, metadata, weights=weights.flatten(0, 1).to(self.backbone.dtype), noise=noise)

    def _gradient_work(self, weights: int, points: int) -> float:
        """The multiplications of one gradient, forward and back. Refuses runs that would take days."""
        options = self.config
        gradient = 2.0 * points * (sum(p.numel() for p in self.module.parameters()) + 2 * weights)
        draws, steps = options.chains * (options.warmup + options.samples), 2**options.max_tree_depth
        work, memory = gradient * draws * float(steps), 8 * weights * options.chains * options.samples
        if work > MAX_WORK or memory > MAX_BYTES:
            raise OptionError(
                f"hmc would take up to {work:.0e} multiplications, about {work / WORK_PER_SECOND / 3600:,.0f} hours of "
                f"a processor, and {memory / 2**30:.1f} GB for its draws ({weights:,} weights, {points:,} points, "
                f"{draws:,} draws of up to {steps:,} gradients each); the limits are {MAX_WORK:.0e} and "
                f"{MAX_BYTES / 2**30:.0f} GB. Give it fewer points, draws or max_tree_depth, freeze all but the last "
                "layers, or use a method that scales, such as fmgp, laplace or mfvi."
            )
        return gradient

    def _posterior(self, job: Job, likelihood: Likelihood, names: list[str]) -> tuple[WeightPosterior, Tensor]:
        """The posterior on a copy of the network in float64, and the trained weights in it."""
        device = self.module_device or torch.device("cpu")
        device = torch.device("cpu") if device.type == "mps" else device  # which has no float64
        network = copy.deepcopy(self.module).to(device, torch.float64).eval().requires_grad_(False)
        parameters = {name: p for name, p in network.named_parameters() if name in names}

        def to_float64(value: Any) -> Any:
            is_real = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(device, torch.float64) if is_real else value.to(device)

        def answer(weights: Tensor, labelled: LabelledBatch) -> Tensor:
            return self._answer(network, labelled.batch, split(weights, parameters))

        batches = []
        for raw in self._batches(job.data, ROWS):
            args, kwargs, target = change_tensors(tuple(raw), to_float64)
            batch = Batch(tuple(args), kwargs, None)
            batches.append(LabelledBatch(batch, likelihood.check_targets(target, self._answer(network, batch))))
        trained = torch.cat([p.reshape(-1) for p in parameters.values()])
        multiplicity = job.num_data / sum(len(batch.target) for batch in batches)
        precision = self.config.prior_precision
        return WeightPosterior(answer, batches, likelihood.to(device), precision, multiplicity), trained

    def _draws(self, fitted: Any, batch: Batch) -> Tensor:  # (S, N, ...)
        parameters = {name: p for name, p in self.module.named_parameters() if name in fitted.metadata["names"]}
        weights = fitted.weights.to(self.module_device)
        return torch.stack([self._answer(self.module, batch, split(draw, parameters)) for draw in weights])

    def _blank(self, shapes: Mapping[str, Any]) -> Fitted:
        draws = self.config.chains * self.config.samples
        size = sum(self.module.get_parameter(name).numel() for name in shapes["names"])
        likelihood, noise = self._blank_likelihood(), None
        if isinstance(likelihood, Gaussian):
            noise = torch.zeros(draws, math.prod(self._width or ()), dtype=torch.float64)
        weights = torch.zeros(draws, size, dtype=self.backbone.dtype)
        return Fitted(likelihood, shapes, weights=weights, noise=noise)


def split(weights: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A flat vector as values of the parameters, in their order.

    The values are copies, since the place of numbers in memory decides how they are rounded, and a file changes it.
    """
    parts = weights.split([p.numel() for p in parameters.values()])
    return {name: part.view(p.shape).clone() for (name, p), part in zip(parameters.items(), parts, strict=True)}
