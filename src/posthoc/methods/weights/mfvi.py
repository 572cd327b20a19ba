"""MFVI: a Gaussian around every weight of the trained network, its width learnt (mean-field variational inference)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from posthoc.base import Fitted, Job, TrainingConfig, option
from posthoc.collect.loaders import Batch
from posthoc.errors import OptionError
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.methods.weights.finetuning import FinetunedMethod
from posthoc.methods.weights.flipout import Reweighted, flipout, layers, noisy_parameters, sampled
from posthoc.methods.weights.sampling import NamedTensors
from posthoc.predictive.base import Predictive

__all__ = ["MFVI", "MeanField"]

SCORED = 8
"""Draws by which training is stopped early; a prediction has more."""


@dataclass(frozen=True, kw_only=True)
class MFVIConfig(TrainingConfig):
    """Options of `MFVI`."""

    means: Literal["fixed", "moved"] = "fixed"
    prior_precision: float = option(1.0, above=0.0)
    kl_weight: float = option(0.1, above=0.0)
    initial_std: float = option(0.02, above=0.0)
    samples: int = option(64, least=2)


class MFVI(FinetunedMethod):
    """Mean-field variational fine-tuning: q(w) = Π N(w | μ, σ²) around the trained weights, by the ELBO with flipout.

    Predictions are averages over draws of the weights, the mean too, so it is near the network's own output and not
    equal to it. The draws are the same for every batch. Noise is on the weights and biases of Linear, Conv1d, Conv2d
    and Conv3d layers; everything else (BatchNorm, attention's own projections, embeddings, frozen weights) stays.

    Args:
        model: An `nn.Module`.
        likelihood: "regression", "classification", or a `Gaussian` or `Categorical`.
        means: "fixed" at the trained weights, or "moved" with σ by the ELBO.
        prior_precision: Of the prior N(0, 1/precision) of every weight.
        kl_weight: The weight of the KL divergence. 1 is the ELBO, with which a network of more weights than data
            loses its fit; less is a colder posterior.
        initial_std: The first σ, in units of the root mean square of a layer's weights.
        samples: Draws of the weights for a prediction.
        steps, batch_size, lr, seed, eval_every, patience, progress: See `TrainingConfig`.
        device: Where a network without weights computes.

    Example:
        >>> import torch
        >>> from posthoc import MFVI
        >>> x, y = torch.randn(20, 2), torch.randn(20, 1)
        >>> MFVI(torch.nn.Linear(2, 1), "regression", steps=2, samples=4).fit(x, y).predict(x).std.shape
        torch.Size([20, 1])
    """

    name = "mfvi"
    Config = MFVIConfig
    config: MFVIConfig
    trains = True

    def __init__(self, model: Any = None, likelihood: str | Likelihood | None = None, **options: Any) -> None:
        super().__init__(model, likelihood, **options)
        if not layers(self.module):
            raise OptionError(
                f"mfvi puts noise on Linear and convolution layers, got a {type(self.module).__name__} without any. "
                "Use another method, such as fmgp."
            )

    @property
    def log_std(self) -> dict[str, Tensor]:
        """log σ of every weight with noise, by parameter name."""
        self._require_fitted("log_std")
        assert isinstance(self._fitted, FittedMFVI)
        return self._fitted.log_std.as_dict()

    @property
    def mean(self) -> dict[str, Tensor]:
        """μ of every weight with noise, by parameter name."""
        own = {name: p.detach() for name, p in self.module.named_parameters() if name in self.log_std}
        assert isinstance(self._fitted, FittedMFVI)
        return self._fitted.moved.as_dict() or own

    def _finetune(self, job: Job) -> FittedMFVI:
        if not noisy_parameters(self.module):
            raise OptionError(
                "mfvi puts noise on the weights of Linear and convolution layers, and all of them are frozen: set "
                "requires_grad to True for those that may have it."
            )
        network = copy.deepcopy(self.module).eval()
        likelihood = self._start(job).to(self.module_device)
        q = MeanField(
            self._weights_that_run(network, job.data), self.config.initial_std, moves=self.config.means == "moved"
        )
        network.requires_grad_(False)
        generator = torch.Generator(self.module_device or "cpu").manual_seed(self.config.seed)
        moving = Reweighted(network, {})

        def answer(batch: Batch) -> Tensor:
            if q.moves:
                moving.call = network, q.mean()
            with flipout(network, q.std(), generator):
                return self._answer(moving if q.moves else network, batch)

        def predict(batch: Batch) -> Predictive:
            draws = self._drawn(network, batch, q.mean(), q.std(), min(SCORED, self.config.samples))
            return likelihood.predictive_from_draws(draws)

        likelihood.requires_grad_(isinstance(likelihood, Gaussian))  # its noise is learnt, a temperature is not
        history = self._minimize(
            job,
            likelihood,
            [*q.parameters(), *likelihood.parameters()],
            answer,
            penalty=lambda: self.config.kl_weight * q.kl(self.config.prior_precision),
            predict=predict,
            generator=generator,
        )
        log_std = {name: value.detach() for name, value in q.log_std.items()}
        moved = {name: value.detach() for name, value in q.mean().items()} if q.moves else {}
        self.history = history
        return FittedMFVI(likelihood.requires_grad_(False), log_std, moved)

    def _weights_that_run(self, network: nn.Module, data: Any) -> dict[str, Tensor]:
        """The weights that one batch shows to be used by their layers' own forward. Others would never see the data,
        only the prior, though something else (such as attention) may read them."""
        weights = noisy_parameters(network)
        none = {name: torch.zeros_like(p) for name, p in weights.items()}
        generator = torch.Generator(self.module_device or "cpu")
        with torch.no_grad(), flipout(network, none, generator) as draw:
            self._answer(network, self._first_batch(data))
        if not draw.deltas:
            raise OptionError("mfvi found no Linear or convolution layer at work when the network ran.")
        return {name: p.detach() for name, p in weights.items() if name in draw.deltas}

    def _draws(self, fitted: FittedMFVI, batch: Batch) -> Tensor:  # (S, N, ...)
        fitted.to(self.module_device)
        std = {name: value.exp() for name, value in self.log_std.items()}
        return self._drawn(self.module, batch, self.mean, std, self.config.samples)

    def _drawn(
        self, network: nn.Module, batch: Batch, mean: Mapping[str, Tensor], std: Mapping[str, Tensor], samples: int
    ) -> Tensor:  # (S, N, ...)
        generator = torch.Generator(self.module_device or "cpu").manual_seed(self.config.seed)
        weights = (sampled(mean, std, generator) for _ in range(samples))  # one at a time: each is a whole network
        return torch.stack([self._answer(Reweighted(network, drawn), batch) for drawn in weights])

    def _blank(self, shapes: Mapping[str, Any]) -> FittedMFVI:
        parameters = dict(self.module.named_parameters())
        log_std = {name: full(parameters[name].detach(), 0.0).detach() for name in shapes["weights"]}
        moved = {name: parameters[name].detach().clone() for name in shapes["moved"]}
        return FittedMFVI(self._blank_likelihood(), log_std, moved)


class FittedMFVI(Fitted):
    """log σ of the weights by parameter name, and their means where those moved."""

    def __init__(self, likelihood: Likelihood, log_std: Mapping[str, Tensor], moved: Mapping[str, Tensor]) -> None:
        super().__init__(likelihood)
        self.log_std, self.moved = NamedTensors(log_std), NamedTensors(moved)

    def shapes(self) -> dict[str, Any]:
        return {"weights": list(self.log_std.as_dict()), "moved": list(self.moved.as_dict())}


class MeanField:
    """q(w) = Π N(w | μ, σ²) over weights by name, with log σ to be learnt, and μ too if it `moves`.

    A mean moves in units of its first σ: one learning rate then suits both, and takes small steps from what was
    trained."""

    def __init__(self, weights: Mapping[str, Tensor], initial_std: float, *, moves: bool) -> None:
        self.weights, self.moves = weights, moves
        size = {name: float(w.double().square().mean().sqrt()) for name, w in weights.items()}
        typical = sum(size.values()) / len(size) or 1.0
        # Weights that are all but zero (new biases) say nothing about how far they may be off.
        self.unit = {name: initial_std * max(rms, 0.1 * typical) for name, rms in size.items()}
        self.log_std = {name: full(w, math.log(self.unit[name])) for name, w in weights.items()}
        self.shift = {name: full(w, 0.0) for name, w in weights.items()} if moves else {}

    def parameters(self) -> Iterator[Tensor]:
        """All that is learnt."""
        yield from self.log_std.values()
        yield from self.shift.values()

    def std(self) -> dict[str, Tensor]:
        """σ."""
        return {name: value.exp() for name, value in self.log_std.items()}

    def mean(self) -> dict[str, Tensor]:
        """μ."""
        moved = {name: (self.unit[name] * by).to(self.weights[name].dtype) for name, by in self.shift.items()}
        return {name: w + moved[name] if moved else w for name, w in self.weights.items()}

    def kl(self, precision: float) -> Tensor:  # (), float64
        """KL(q | N(0, 1/precision)) = ½ Σ (precision (σ² + μ²) - 1 - log(precision σ²))."""
        mean = self.mean()
        parts = []
        for name, log_std in self.log_std.items():
            second_moment = (2.0 * log_std).exp() + mean[name].to(log_std.dtype).square()
            excess = precision * second_moment - 2.0 * log_std
            parts.append(0.5 * excess.sum(dtype=torch.float64) - 0.5 * log_std.numel() * (1.0 + math.log(precision)))
        return torch.stack(parts).sum()


def full(like: Tensor, value: float) -> Tensor:
    """A parameter of that shape, never in half precision."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.full_like(like, value, dtype=dtype).requires_grad_()
