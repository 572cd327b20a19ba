"""The posterior of a network's weights, and chains of the no-U-turn sampler through it, by Pyro, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
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

__all__ = ["WeightPosterior", "sample"]

MAX_NOISE = 10.0
"""The upper limit of the uniform prior of the noise variance, in units of the variance of the targets, or of the
network's mean squared error if that is larger."""
COMPARED = 256
"""The number of outputs by which chains are compared."""


class WeightPosterior:
    """-log p(weights, noise | data), up to a constant, of a flat vector of weights and an unbounded noise coordinate.

    Weights are Gaussian a priori. The noise variance is σ² = limit · sigmoid(u). The density of u contains the
    derivative of that, so that the prior of σ² is uniform on (0, limit).

    Args:
        answer: The outputs of the network with these weights on a batch.
        batches: The data.
        likelihood: Defines the units of the noise, and the temperature.
        prior_precision: Of the prior of every weight.
        multiplicity: The number of points that each point of the data stands for.
    """

    def __init__(
        self,
        answer: Callable[[Tensor, LabelledBatch], Tensor],
        batches: list[LabelledBatch],
        likelihood: Likelihood,
        prior_precision: float,
        multiplicity: float = 1.0,
    ) -> None:
        self.answer, self.batches, self.likelihood = answer, batches, likelihood
        self.prior_precision, self.multiplicity = prior_precision, multiplicity
        self.max_noise: Tensor | None = None  # () or (C,), in the likelihood's units, those of the mean squared error
        if isinstance(likelihood, Gaussian):
            targets = columns(torch.cat([batch.target for batch in batches]))
            limit = MAX_NOISE * (targets.var(0, unbiased=False) / likelihood.scale.square()).clamp_min(1.0)
            self.max_noise = limit if likelihood.noise_form == "per_output" else limit.amax()

    def __call__(self, at: dict[str, Tensor]) -> Tensor:  # ()
        log_p = -0.5 * self.prior_precision * at["weights"].square().sum()
        if self.max_noise is not None:
            log_p = log_p + (F.logsigmoid(at["noise"]) + F.logsigmoid(-at["noise"])).sum()
        for batch in self.batches:
            log_p = log_p + self.multiplicity * self.log_likelihood(at, batch)
        return -log_p

    def log_likelihood(self, at: dict[str, Tensor], batch: LabelledBatch) -> Tensor:  # ()
        """log p(targets | weights, noise), up to a constant."""
        outputs = self.answer(at["weights"], batch)
        if isinstance(self.likelihood, Categorical):
            return -F.cross_entropy(outputs / self.likelihood.temperature.detach(), batch.target, reduction="sum")
        _, residual = self.likelihood.standardize(outputs, batch.target)
        noise = self.noise(at["noise"])
        return -0.5 * (residual.square() / noise + noise.log()).sum()

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
        outputs = self.answer(weights, self.batches[0])
        if isinstance(self.likelihood, Categorical):  # a constant added to all logits has no meaning
            outputs = outputs.log_softmax(-1)
        return outputs.reshape(-1)[:COMPARED]


def sample(
    posterior: WeightPosterior,
    starts: list[Tensor],  # one a chain, (P,)
    *,
    samples: int,
    warmup: int,
    max_tree_depth: int,
    progress: bool | None,
) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """Runs chains one after another, from the global generator of random numbers.

    Returns:
        The weights (chains, samples, P), the noise (chains, samples, 1 or C) in the likelihood's units, or None, and
        diagnostics. R-hat (1 where chains agree) and the effective sample size are the worst of the outputs at data
        points and the noise. Those of the weights are reported too, but hidden units can change places without
        changing the function, so chains that agree may well have other weights.
    """
    mcmc = require("pyro.infer.mcmc", "hmc", "Hamiltonian Monte Carlo")
    draws: list[dict[str, Tensor]] = []
    diagnostics: dict[str, Any] = {"divergences": [], "step_sizes": []}
    with progress_bar("sampling", len(starts) * (warmup + samples), enabled=progress) as report:

        def hook(kernel: Any, at: dict[str, Tensor], stage: str, i: int) -> None:
            done = i + 1 if stage.startswith("Warmup") else warmup + i + 1
            report(len(draws) * (warmup + samples) + done, stage)

        for start in map(posterior.start, starts):
            if not math.isfinite(float(posterior(start).detach())):
                raise TrainingError(
                    "The posterior is not finite at the start of a chain: the data, or the network's outputs, overflow."
                )
            kernel = mcmc.NUTS(potential_fn=posterior, max_tree_depth=max_tree_depth)
            chain = mcmc.MCMC(
                kernel, samples, warmup, initial_params=start, hook_fn=hook, disable_progbar=True, transforms={}
            )
            chain.run()
            draws.append(chain.get_samples())
            diagnostics["divergences"].append(sum(map(len, chain.diagnostics()["divergences"].values())))
            diagnostics["step_sizes"].append(float(kernel.step_size))
    weights, noise = torch.stack([each["weights"] for each in draws]), None
    compared = torch.stack([torch.stack([posterior.compared(w) for w in chain]) for chain in weights])
    if posterior.max_noise is not None:
        noise = posterior.noise(torch.stack([each["noise"] for each in draws]))
        compared = torch.cat([compared, noise], -1)
    diagnostics["r_hat"], diagnostics["ess"] = agreement(compared)
    diagnostics["weights_r_hat"], diagnostics["weights_ess"] = agreement(weights)
    return weights, noise, diagnostics


def agreement(draws: Tensor) -> tuple[float, float]:  # of (chains, draws, K)
    """The largest R-hat and the smallest effective sample size of K numbers."""
    stats = require("pyro.ops.stats", "hmc", "Hamiltonian Monte Carlo")
    # Chains that never moved have no spread to compare by: they do not agree on anything.
    r_hat = stats.split_gelman_rubin(draws).nan_to_num(math.inf, math.inf)
    return float(r_hat.max()), float(stats.effective_sample_size(draws).nan_to_num(0.0).min())
