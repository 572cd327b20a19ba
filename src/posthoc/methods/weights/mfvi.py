"""MFVI: mean-field variational inference around the trained weights, fine-tuned with flipout."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posthoc.base import Fitted, Job
from posthoc.collect.loaders import Batch
from posthoc.config import TrainingConfig, option
from posthoc.errors import OptionError
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.methods.weights.network import FinetunedMethod, normal

SCORE_SAMPLES = 8
"""Draws for a validation score; a prediction has more."""
NOISY_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""The layers that get noise, and subclasses of them that have the same forward."""


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

    def _check_parts(self) -> None:
        self._require_layers(noisy_layers(self.module), "Linear or convolution layers")

    @property
    def log_std(self) -> dict[str, Tensor]:
        """log σ of every weight with noise, by parameter name."""
        return self._named("log_std")

    @property
    def mean(self) -> dict[str, Tensor]:
        """μ of every weight with noise, by parameter name."""
        own = {name: p.detach() for name, p in self.module.named_parameters() if name in self.log_std}
        return own | self._named("moved")

    def _named(self, part: str) -> dict[str, Tensor]:
        """The buffers `part/NAME` of the fitted state; names of buffers have no dots in them."""
        fitted = self._require_fitted(part)
        return {name: fitted.get_buffer(f"{part}/{name}".replace(".", "/")) for name in fitted.metadata[part]}

    def _finetune(self, job: Job) -> Fitted:
        network = copy.deepcopy(self.module).eval()
        likelihood, generator = self._start(job), self._generator()
        weights = self._used_weights(network, next(self._batches(job.data)))
        q = MeanField(weights, self.config.initial_std, moves=self.config.means == "moved")
        network.requires_grad_(False)
        likelihood.requires_grad_(isinstance(likelihood, Gaussian))  # its noise is learned, a temperature is not

        def answer(batch: Batch) -> Tensor:
            with flipout(network, q.std(), generator):
                return self._answer(network, batch, q.mean() if q.moves else None)

        def penalty() -> Tensor:
            return self.config.kl_weight * q.kl(self.config.prior_precision)

        def draw(batch: Batch) -> Tensor:
            return self._outputs_of(network, batch, q.mean(), q.std(), min(SCORE_SAMPLES, self.config.samples))

        learned = [*q.log_std.values(), *q.shift.values(), *likelihood.parameters()]
        self.history = self._minimize(job, likelihood, learned, answer, penalty, draw, generator)
        return fitted_of(likelihood.requires_grad_(False), log_std=q.log_std, moved=q.mean() if q.moves else {})

    def _generator(self) -> torch.Generator:
        return torch.Generator(self.backbone.device or "cpu").manual_seed(self.config.seed)

    def _used_weights(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The weights that their layers' own forward uses on a batch. Others would never see the data, only the prior,
        though something else (such as attention) may read them."""
        weights = noisy_parameters(network)
        zeros = {name: torch.zeros_like(p) for name, p in weights.items()}
        with torch.no_grad(), flipout(network, zeros, self._generator()) as used:
            self._answer(network, batch)
        if not used:
            found = "all of them are frozen or not used: call requires_grad_(True) on some"
            raise OptionError(f"mfvi puts noise on the weights of Linear and convolution layers, but {found}.")
        return {name: p.detach() for name, p in weights.items() if name in used}

    def _draws(self, fitted: Any, batch: Batch) -> Tensor:  # (S, N, ...)
        fitted.to(self.backbone.device)
        std = {name: value.exp() for name, value in self.log_std.items()}
        return self._outputs_of(self.module, batch, self.mean, std, self.config.samples)

    def _outputs_of(
        self, network: nn.Module, batch: Batch, mean: dict[str, Tensor], std: dict[str, Tensor], samples: int
    ) -> Tensor:  # (S, N, ...)
        """The outputs with several draws of the weights."""
        generator = self._generator()
        weights = (draw_weights(mean, std, generator) for _ in range(samples))  # one at a time: each is a network
        return torch.stack([self._answer(network, batch, drawn) for drawn in weights])

    def _blank(self, shapes: Mapping[str, Any]) -> Fitted:
        parameters = dict(self.module.named_parameters())
        log_std = {name: full(parameters[name], 0.0) for name in shapes["log_std"]}
        moved = {name: parameters[name] for name in shapes["moved"]}
        return fitted_of(self._blank_likelihood(), log_std=log_std, moved=moved)


def fitted_of(likelihood: Likelihood, **parts: Mapping[str, Tensor]) -> Fitted:
    """A fitted state with copies of the tensors of each part as buffers `part/NAME`."""
    named = {f"{part}/{name}": value for part, tensors in parts.items() for name, value in tensors.items()}
    buffers = {name.replace(".", "/"): value.detach().clone() for name, value in named.items()}
    return Fitted(likelihood, {part: list(tensors) for part, tensors in parts.items()}, **buffers)


class MeanField:
    """q(w) = Π N(w | μ, σ²) over weights by name, with log σ to be learned, and μ too if it `moves`.

    A mean moves in units of its first σ, so that one learning rate suits both.
    """

    def __init__(self, weights: Mapping[str, Tensor], initial_std: float, *, moves: bool) -> None:
        self.weights, self.moves = weights, moves
        size = {name: float(w.double().square().mean().sqrt()) for name, w in weights.items()}
        typical = sum(size.values()) / len(size) or 1.0
        # Weights close to zero, such as new biases, do not show a scale of their own.
        self.unit = {name: initial_std * max(rms, 0.1 * typical) for name, rms in size.items()}
        self.log_std = {name: full(w, math.log(self.unit[name])) for name, w in weights.items()}
        self.shift = {name: full(w, 0.0) for name, w in weights.items()} if moves else {}

    def std(self) -> dict[str, Tensor]:
        """σ."""
        return {name: value.exp() for name, value in self.log_std.items()}

    def mean(self) -> dict[str, Tensor]:
        """μ."""
        shift = {name: (self.unit[name] * value).to(self.weights[name].dtype) for name, value in self.shift.items()}
        return {name: w + shift[name] if self.moves else w for name, w in self.weights.items()}

    def kl(self, precision: float) -> Tensor:  # (), float64
        """KL(q | N(0, 1/precision)) = ½ Σ (precision (σ² + μ²) - 1 - log(precision σ²))."""
        mean, parts = self.mean(), []
        for name, log_std in self.log_std.items():
            second_moment = (2.0 * log_std).exp() + mean[name].to(log_std.dtype).square()
            terms = precision * second_moment - 2.0 * log_std - math.log(precision) - 1.0
            parts.append(terms.sum(dtype=torch.float64))
        return 0.5 * torch.stack(parts).sum()


def full(like: Tensor, value: float) -> Tensor:
    """A parameter of that shape, never in half precision."""
    return torch.full_like(like, value, dtype=torch.promote_types(like.dtype, torch.float32)).requires_grad_()


def noisy_layers(network: nn.Module) -> list[nn.Module]:
    """The Linear and convolution layers. A subclass with a forward of its own may use its weights in any way."""
    forwards = {kind.forward for kind in NOISY_LAYERS}
    return [part for part in network.modules() if isinstance(part, NOISY_LAYERS) and type(part).forward in forwards]


def noisy_parameters(network: nn.Module) -> dict[str, Tensor]:
    """The weights and biases of Linear and convolution layers by name, except those that a layer of another kind
    shares, and frozen ones."""
    layers = set(noisy_layers(network))
    own = {id(layer._parameters.get(part)) for layer in layers for part in ("weight", "bias")}
    others = {id(p) for part in network.modules() if part not in layers for p in part._parameters.values()}
    return {name: p for name, p in network.named_parameters() if id(p) in own - others and p.requires_grad}


def draw_weights(mean: dict[str, Tensor], std: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """One draw of all weights, in the order of their names, which a file may have changed."""
    return {name: mean[name] + normal(std[name], generator).to(mean[name].dtype) for name in sorted(std)}


@contextmanager
def flipout(network: nn.Module, std: Mapping[str, Tensor], generator: torch.Generator) -> Iterator[set[str]]:
    """Lets a network run as if every example had weights of its own, w + σ∘ε, with σ given by parameter name (Wen et
    al. 2018): one ΔW = σ∘ε for the batch, and signs r, s for each example n,

        (W + ΔW∘r_n s_nᵀ) x_n = W x_n + r_n∘(ΔW (s_n∘x_n)).

    The first axis of a layer's input counts the examples. A layer that runs twice, or shares its weights with another,
    has the same noise each time. Yields the names of the parameters used so far.
    """
    names = {id(p): name for name, p in network.named_parameters() if name in std}
    used: set[str] = set()

    @functools.cache
    def delta(name: str) -> Tensor:
        """σ∘ε."""
        used.add(name)
        return normal(std[name], generator)

    @functools.cache
    def signs(name: str, side: str, shape: tuple[int, ...]) -> Tensor:
        """±1."""
        return 2 * torch.randint(2, shape, device=generator.device, generator=generator) - 1

    def add_noise(own: dict[str, str], layer: Any, args: tuple[Any, ...], kwargs: Any, output: Tensor) -> Tensor:
        key, x = own.get("weight") or own["bias"], args[0] if args else kwargs["input"]
        deltas = {part: delta(name).to(output.dtype) for part, name in own.items()}
        weight, bias = deltas.get("weight", torch.zeros_like(layer.weight)), deltas.get("bias")
        flipped = x * signs(key, "in", sign_shape(layer, x))
        # A convolution's own method knows its padding, stride and groups.
        noise = (F.linear if isinstance(layer, nn.Linear) else layer._conv_forward)(flipped, weight, bias)
        return output + noise * signs(key, "out", sign_shape(layer, output))

    with ExitStack() as stack:
        for layer in noisy_layers(network):
            parts = {part: names.get(id(layer._parameters.get(part))) for part in ("weight", "bias")}
            if own := {part: name for part, name in parts.items() if name is not None}:
                # Before the user's own hooks, which see what the next layers see.
                hook = functools.partial(add_noise, own)
                stack.enter_context(layer.register_forward_hook(hook, with_kwargs=True, prepend=True))
        yield used


def sign_shape(layer: nn.Module, values: Tensor) -> tuple[int, ...]:
    """One sign for each example and channel, shared by the places (or times) at which the same weights are used."""
    if isinstance(layer, nn.Linear):
        batch = values.shape[:1] if values.ndim > 1 else ()
        return (*batch, *[1] * (values.ndim - len(batch) - 1), values.shape[-1])
    places = len(layer.kernel_size)  # type: ignore[arg-type]
    return (*values.shape[: values.ndim - places], *[1] * places)
