"""The posterior of a network's weights, chains of the no-U-turn sampler through it, and whether they agree.

Sampling is on Pyro (extra `hmc`), in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from posthoc.errors import TrainingError
from posthoc.likelihoods.base import Likelihood, columns
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.methods.weights.network import LabelledBatch
from posthoc.optional import require
from posthoc.progress import progress_bar

__all__ = ["Chains", "WeightPosterior", "diagnose", "noise_bound", "sample"]

UNIFORM_UP_TO = 10.0
"""The uniform prior of the noise variance ends at so many times the variance of the targets, or the network's mean
squared error if that is more."""


@dataclass(frozen=True)
class WeightPosterior:
    """-log p(weights, noise | data), up to a constant, of the flat vector of weights and of the noise's own coordinate.

    Weights are Gaussian a priori. So that the sampler may roam freely, σ² = bound · sigmoid(u) with u on the whole
    line; the density of u has the derivative of that in it, which makes the prior of σ² uniform on (0, bound).
    """

    answer: Callable[[Tensor, LabelledBatch], Tensor]  # the outputs of a network with these weights
    batches: list[LabelledBatch]
    likelihood: Likelihood
    prior_precision: float
    bound: Tensor  # () or (C,), in the likelihood's units
    weight: float  # how many points each of the data stands for

    @property
    def noisy(self) -> bool:
        """Whether there is a noise to sample."""
        return isinstance(self.likelihood, Gaussian)

    def __call__(self, at: dict[str, Tensor]) -> Tensor:  # ()
        weights = at["weights"]
        log_prior = -0.5 * self.prior_precision * weights.square().sum()
        noise = self.bound
        if self.noisy:
            raw = at["noise"]
            noise = self.noise(raw)
            log_prior = log_prior + (F.logsigmoid(raw) + F.logsigmoid(-raw)).sum()
        log_likelihood = sum(self.log_likelihood(self.answer(weights, b), b.target, noise) for b in self.batches)
        return -(log_prior + self.weight * log_likelihood)

    def log_likelihood(self, outputs: Tensor, target: Tensor, noise: Tensor) -> Tensor:  # ()
        """log p(target | outputs), up to a constant."""
        if isinstance(self.likelihood, Categorical):
            return -F.cross_entropy(outputs / self.likelihood.temperature.detach(), target, reduction="sum")
        _, residual = self.likelihood.standardize(outputs, target)
        return -0.5 * (residual.square() / noise + noise.log()).sum()

    def noise(self, raw: Tensor) -> Tensor:
        """σ² at some coordinates, in the likelihood's units."""
        return self.bound * raw.sigmoid()

    def start(self, weights: Tensor) -> dict[str, Tensor]:
        """The place with these weights, and the noise that the trained network's residuals have."""
        if not self.noisy:
            return {"weights": weights}
        return {"weights": weights, "noise": torch.logit(1.0 / self.bound).reshape(-1)}


def noise_bound(likelihood: Likelihood, targets: Tensor) -> Tensor:  # () or (C,)
    """Where the uniform prior of σ² ends, in the likelihood's units: those of the network's mean squared error."""
    if not isinstance(likelihood, Gaussian):
        return torch.ones((), dtype=torch.float64, device=targets.device)
    spread = columns(targets).var(0, unbiased=False) / likelihood.scale.square()
    bound = UNIFORM_UP_TO * spread.clamp_min(1.0)
    return bound if likelihood.noise_form == "per_output" else bound.amax()


@dataclass
class Chains:
    """Draws, chain by chain, and what became of each chain."""

    weights: Tensor  # (chains, draws, P)
    noise: Tensor | None  # (chains, draws, 1 or C), in the likelihood's units
    divergences: list[int] = field(default_factory=list)
    step_sizes: list[float] = field(default_factory=list)


def sample(
    posterior: WeightPosterior,
    starts: list[Tensor],  # one a chain, (P,)
    *,
    samples: int,
    warmup: int,
    max_tree_depth: int,
    progress: bool | None,
) -> Chains:
    """Chains one after another, from the global generator of random numbers."""
    mcmc = require("pyro.infer.mcmc", "hmc", "Hamiltonian Monte Carlo")
    weights, noises, divergences, step_sizes, done = [], [], [], [], 0
    with progress_bar("sampling", len(starts) * (warmup + samples), enabled=progress) as report:

        def hook(kernel: Any, at: dict[str, Tensor], stage: str, i: int) -> None:
            nonlocal done
            done += 1
            with torch.no_grad():
                report(done, f"loss {float(posterior(at)):.4f}")

        for place in starts:
            start = posterior.start(place)
            if not math.isfinite(float(posterior(start).detach())):
                raise TrainingError(
                    "The posterior is not finite at the start of a chain: the data, or the network's outputs, overflow."
                )
            kernel = mcmc.NUTS(potential_fn=posterior, max_tree_depth=max_tree_depth)
            chain = mcmc.MCMC(
                kernel, samples, warmup, initial_params=start, hook_fn=hook, disable_progbar=True, transforms={}
            )
            chain.run()
            drawn = chain.get_samples()
            weights.append(drawn["weights"])
            noises.append(posterior.noise(drawn["noise"]) if posterior.noisy else None)
            divergences.append(sum(map(len, chain.diagnostics()["divergences"].values())))
            step_sizes.append(float(kernel.step_size))
    noise = torch.stack([n for n in noises if n is not None]) if posterior.noisy else None
    return Chains(torch.stack(weights), noise, divergences, step_sizes)


def diagnose(posterior: WeightPosterior, chains: Chains) -> dict[str, Any]:
    """Whether the chains have found the same posterior: R-hat (1 where they agree) and the number of independent draws
    that theirs are worth (ESS).

    The worst of the outputs at data points and the noise decides. Weights are shown beside them: hidden units can
    change places without changing the function, so chains that say the same may well have other weights.
    """
    said = torch.stack([torch.stack([outputs(posterior, w) for w in chain]) for chain in chains.weights])
    seen = said if chains.noise is None else torch.cat([said, chains.noise], -1)
    (r_hat, ess), (weights_r_hat, weights_ess) = agreement(seen), agreement(chains.weights)
    return {
        "r_hat": r_hat,
        "ess": ess,
        "weights_r_hat": weights_r_hat,
        "weights_ess": weights_ess,
        "divergences": chains.divergences,
        "step_sizes": chains.step_sizes,
    }


@torch.no_grad()
def outputs(posterior: WeightPosterior, weights: Tensor, most: int = 256) -> Tensor:  # (K,)
    """What a network says of the first batch's first rows: numbers to compare chains by."""
    batch = posterior.batches[0]
    said = posterior.answer(weights, batch)
    if isinstance(posterior.likelihood, Categorical):  # a constant added to all logits says nothing
        said = said.log_softmax(-1)
    return said.reshape(-1)[:most]


def agreement(draws: Tensor) -> tuple[float, float]:  # of (chains, draws, K)
    """The largest R-hat and the least ESS of K numbers."""
    stats = require("pyro.ops.stats", "hmc", "Hamiltonian Monte Carlo")
    # Chains that never moved have no spread to compare by: they agree on nothing.
    r_hat = stats.split_gelman_rubin(draws).nan_to_num(math.inf, math.inf)
    return float(r_hat.max()), float(stats.effective_sample_size(draws).nan_to_num(0.0).min())
