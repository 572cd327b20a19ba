"""Hamiltonian Monte Carlo over all the weights of a small network: the reference, where time does not matter."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from posthoc.base import Fitted, Job
from posthoc.collect.loaders import Batch, change_tensors
from posthoc.config import SeedConfig, option
from posthoc.errors import OptionError, TrainingError, warn
from posthoc.likelihoods.base import Likelihood, columns
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.methods.weights.network import DrawingMethod, seeded
from posthoc.optional import require
from posthoc.progress import progress_bar
from posthoc.training import single_thread

MAX_WORK, WORK_PER_HOUR = 1e15, 3.6e13
"""The largest number of multiplications of a run, and about how many of them a processor computes in an hour."""
MAX_BYTES = 2**33
"""The largest memory for the draws."""
SINGLE_THREAD_WORK = 2e7
"""Multiplications of a gradient below which one thread is faster than several."""
ROWS = 2**14
"""Rows of arrays that the network is run on at a time."""
MAX_NOISE = 10.0
"""The upper limit of the uniform prior of the noise variance, in units of the variance of the targets, or of the
network's mean squared error if that is larger."""
COMPARED = 256
"""The number of outputs by which chains are compared."""


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

    def _check_parts(self) -> None:
        require("pyro", "hmc", "Hamiltonian Monte Carlo")

    @property
    def diagnostics(self) -> dict[str, Any]:
        """Whether the chains agree: `r_hat`, `ess`, the same of the weights, `divergences` and `step_sizes`."""
        return dict(self._require_fitted("diagnostics").metadata["diagnostics"])

    def _fit(self, job: Job) -> Fitted:
        options, device = self.config, self.backbone.device
        free = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if not free:
            raise OptionError("Expected weights that require a gradient, got none: call requires_grad_(True) on some.")
        work = self._gradient_work(sum(p.numel() for p in free.values()), len(job.train))
        likelihood = self._start(job)
        with seeded(options.seed, device):  # for a loader that shuffles
            posterior, trained = self._posterior(job, likelihood, list(free))
        with seeded(options.seed, device), single_thread(work < SINGLE_THREAD_WORK):
            others = [options.prior_precision**-0.5 * torch.randn_like(trained) for _ in range(options.chains - 1)]
            weights, noise, diagnostics = self._sample(posterior, [trained, *others])
        if options.max_r_hat is not None and diagnostics["r_hat"] > options.max_r_hat:
            found = f"R-hat is {diagnostics['r_hat']:.2f}, draws are worth {diagnostics['ess']:.0f} independent ones"
            warn(f"The chains do not agree: {found}. Use more warmup and samples, or a greater max_tree_depth.")
        if noise is not None and isinstance(likelihood, Gaussian):
            noise = noise.flatten(0, 1) * likelihood.scale.square()
            # The variance of a mixture of Gaussians contains the mean of their variances.
            likelihood.set_noise(noise.mean(0))
        metadata = {"names": list(free), "diagnostics": diagnostics}
        return Fitted(likelihood, metadata, weights=weights.flatten(0, 1).to(self.backbone.dtype), noise=noise)

    def _sample(self, posterior: WeightPosterior, starts: list[Tensor]) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
        """Runs a chain from each start (P,), one after another, with the global random numbers.

        Returns:
            The weights (chains, samples, P), the noise (chains, samples, 1 or C) in the likelihood's units, or None,
            and diagnostics. R-hat and the effective sample size are the worst of the outputs at data points and the
            noise. Chains that agree may have different weights, since hidden units can change places.
        """
        mcmc = require("pyro.infer.mcmc", "hmc", "Hamiltonian Monte Carlo")
        options, draws, divergences, step_sizes = self.config, [], [], []
        length, done = options.warmup + options.samples, itertools.count(1)
        with progress_bar("sampling", len(starts) * length, enabled=options.progress) as report:
            hook = {"hook_fn": lambda kernel, at, stage, i: report(next(done), stage), "disable_progbar": True}
            for start in map(posterior.start, starts):
                if not math.isfinite(float(posterior(start).detach())):
                    raise TrainingError("The posterior is not finite where a chain starts: data or outputs overflow.")
                kernel = mcmc.NUTS(potential_fn=posterior, max_tree_depth=options.max_tree_depth)
                chain = mcmc.MCMC(kernel, options.samples, options.warmup, start, transforms={}, **hook)
                chain.run()
                draws.append(chain.get_samples())
                divergences.append(sum(map(len, chain.diagnostics()["divergences"].values())))
                step_sizes.append(float(kernel.step_size))
        weights, noise = torch.stack([each["weights"] for each in draws]), None
        compared = torch.stack([torch.stack([posterior.compared(w) for w in chain]) for chain in weights])
        if posterior.max_noise is not None:
            noise = posterior.noise(torch.stack([each["noise"] for each in draws]))
            compared = torch.cat([compared, noise], -1)
        (r_hat, ess), (weights_r_hat, weights_ess) = agreement(compared), agreement(weights)
        worst = {"r_hat": r_hat, "ess": ess, "weights_r_hat": weights_r_hat, "weights_ess": weights_ess}
        return weights, noise, {**worst, "divergences": divergences, "step_sizes": step_sizes}

    def _gradient_work(self, weights: int, points: int) -> float:
        """The multiplications of one gradient, forward and back. Refuses runs that would take days."""
        options = self.config
        gradient = 2.0 * points * (sum(p.numel() for p in self.module.parameters()) + 2 * weights)
        draws, steps = options.chains * (options.warmup + options.samples), 2**options.max_tree_depth
        work, memory = gradient * draws * float(steps), 8 * weights * draws
        if work > MAX_WORK or memory > MAX_BYTES:
            costs = f"up to {work / WORK_PER_HOUR:,.0f} hours and {memory / 2**30:.1f} GB"
            task = f"{weights:,} weights, {points:,} points and {draws:,} draws of up to {steps:,} gradients"
            raise OptionError(f"hmc takes {costs} for {task}. Give it less, or use fmgp, laplace or mfvi.")
        return gradient

    def _posterior(self, job: Job, likelihood: Likelihood, names: list[str]) -> tuple[WeightPosterior, Tensor]:
        """The posterior on a copy of the network in float64, and the trained weights in it."""
        device = self._home()
        network = copy.deepcopy(self.module).to(device, torch.float64).eval().requires_grad_(False)
        parameters = {name: p for name, p in network.named_parameters() if name in names}

        def to_float64(value: Tensor) -> Tensor:
            return value.to(device, torch.float64 if value.is_floating_point() else None)

        def answer(weights: Tensor, batch: Batch) -> Tensor:
            return self._answer(network, batch, split(weights, parameters))

        data = []
        for raw in self._batches(job.data, ROWS):
            args, kwargs = change_tensors((raw.args, raw.kwargs), to_float64)
            batch = Batch(args, kwargs, raw.target)
            data.append((batch, likelihood.check_targets(batch.target, self._answer(network, batch))))
        trained = torch.cat([p.reshape(-1) for p in parameters.values()])
        precision, multiplicity = self.config.prior_precision, job.num_data / len(job.train)
        return WeightPosterior(answer, data, likelihood.to(device), precision, multiplicity), trained

    def _draws(self, fitted: Any, batch: Batch) -> Tensor:  # (S, N, ...)
        parameters = {name: p for name, p in self.module.named_parameters() if name in fitted.metadata["names"]}
        weights = fitted.weights.to(self.backbone.device)
        return torch.stack([self._answer(self.module, batch, split(draw, parameters)) for draw in weights])

    def _blank(self, shapes: Mapping[str, Any]) -> Fitted:
        likelihood, draws = self._blank_likelihood(), self.config.chains * self.config.samples
        size, width = sum(self.module.get_parameter(n).numel() for n in shapes["names"]), math.prod(self._width or ())
        noise = torch.zeros(draws, width, dtype=torch.float64) if isinstance(likelihood, Gaussian) else None
        weights = torch.zeros(draws, size, dtype=self.backbone.dtype)
        return Fitted(likelihood, shapes, weights=weights, noise=noise)


@dataclass(eq=False)
class WeightPosterior:
    """-log p(weights, noise | data), up to a constant, of a flat vector of weights and an unbounded noise coordinate.

    Weights are Gaussian a priori. The noise variance is σ² = limit · sigmoid(u). The density of u contains the
    derivative of that, so that the prior of σ² is uniform on (0, limit).
    """

    answer: Callable[[Tensor, Batch], Tensor]  # the outputs of the network with these weights on a batch
    data: list[tuple[Batch, Tensor]]  # batches and their targets
    likelihood: Likelihood  # defines the units of the noise, and the temperature
    prior_precision: float  # of every weight
    multiplicity: float = 1.0  # the number of points that each point of the data stands for

    def __post_init__(self) -> None:
        self.max_noise: Tensor | None = None  # () or (C,), in the likelihood's units
        if isinstance(self.likelihood, Gaussian):
            targets = columns(torch.cat([target for _, target in self.data]))
            limit = MAX_NOISE * (targets.var(0, unbiased=False) / self.likelihood.scale.square()).clamp_min(1.0)
            self.max_noise = limit if self.likelihood.noise_form == "per_output" else limit.amax()

    def __call__(self, at: dict[str, Tensor]) -> Tensor:  # ()
        log_p = -0.5 * self.prior_precision * at["weights"].square().sum()
        if self.max_noise is not None:
            log_p = log_p + (F.logsigmoid(at["noise"]) + F.logsigmoid(-at["noise"])).sum()
        for batch, target in self.data:
            outputs = self.answer(at["weights"], batch)
            if isinstance(self.likelihood, Categorical):
                temperature = self.likelihood.temperature.detach()
                log_density = -F.cross_entropy(outputs / temperature, target, reduction="sum")
            else:
                _, residual = self.likelihood.standardize(outputs, target)
                noise = self.noise(at["noise"])
                log_density = -0.5 * (residual.square() / noise + noise.log()).sum()
            log_p = log_p + self.multiplicity * log_density
        return -log_p

    def noise(self, u: Tensor) -> Tensor:
        """σ² at some coordinates, in the likelihood's units."""
        assert self.max_noise is not None
        return self.max_noise * u.sigmoid()

    def start(self, weights: Tensor) -> dict[str, Tensor]:
        """The point with these weights, and the noise of the trained network's residuals."""
        noise = {} if self.max_noise is None else {"noise": torch.logit(1.0 / self.max_noise).reshape(-1)}
        return {"weights": weights, **noise}

    @torch.no_grad()
    def compared(self, weights: Tensor) -> Tensor:  # (K,)
        """The outputs at the first rows of the data, to compare chains by."""
        outputs = self.answer(weights, self.data[0][0])
        if isinstance(self.likelihood, Categorical):  # a constant added to all logits has no meaning
            outputs = outputs.log_softmax(-1)
        return outputs.reshape(-1)[:COMPARED]


def agreement(draws: Tensor) -> tuple[float, float]:  # of (chains, draws, K)
    """The largest R-hat and the smallest effective sample size of K numbers."""
    stats = require("pyro.ops.stats", "hmc", "Hamiltonian Monte Carlo")
    # Chains that never moved have no spread to compare by: they do not agree on anything.
    r_hat = stats.split_gelman_rubin(draws).nan_to_num(math.inf, math.inf)
    return float(r_hat.max()), float(stats.effective_sample_size(draws).nan_to_num(0.0).min())


def split(weights: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A flat vector as values of the parameters, in their order.

    The values are copies, since the place of numbers in memory decides how they are rounded, and a file changes it.
    """
    parts = weights.split([p.numel() for p in parameters.values()])
    return {name: part.view(p.shape).clone() for (name, p), part in zip(parameters.items(), parts, strict=True)}
