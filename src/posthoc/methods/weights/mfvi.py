"""MFVI: a Gaussian around every weight of the trained network, its width learnt (mean-field variational inference)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from posthoc.base import Job
from posthoc.collect.loaders import Batch
from posthoc.errors import FileError, OptionError
from posthoc.io import check_tensors
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.methods.weights.finetuning import FinetunedMethod, positive
from posthoc.methods.weights.flipout import Reweighted, flipout, layers, noisy_parameters, sampled
from posthoc.predictive.base import Predictive
from posthoc.saved import Saved
from posthoc.validation import choice, integer

__all__ = ["MFVI", "MeanField"]

SCORED = 8
"""Draws by which training is stopped early; a prediction has more."""


class MFVI(FinetunedMethod):
    """Mean-field variational fine-tuning: q(w) = Π N(w | μ, σ²) with the trained weights as μ, and σ learnt by the
    ELBO with flipout. Predictions are averages over `samples` draws of the weights, `mean` too, so it is near the
    network's own output and not equal to it. The draws are the same for every batch.

    Noise is on the weights and biases of Linear, Conv1d, Conv2d and Conv3d layers; everything else (BatchNorm,
    attention's own projections, embeddings, and what is frozen) stays as it was trained.

    Parameters
    ----------
    means: "fixed" at the trained weights, or "moved" with σ by the ELBO.
    prior_precision: of the prior N(0, 1/precision) of every weight.
    kl_weight: 1 is the ELBO itself, by which a network with more weights than there are data gives up its fit for the
        KL's sake; less is a colder posterior.
    initial_std: where σ starts, in units of the root mean square of a layer's weights.
    samples: draws of the weights in a prediction.
    steps, batch_size, lr, seed, eval_every, patience, progress: see `posthoc.training.Training`.
    """

    name = "mfvi"

    def __init__(
        self,
        model: nn.Module | Callable[..., Any] | None,
        likelihood: str | Likelihood,
        *,
        means: Literal["fixed", "moved"] = "fixed",
        prior_precision: float = 1.0,
        kl_weight: float = 0.1,
        initial_std: float = 0.02,
        samples: int = 64,
        layer: str | None = None,
        outputs_are: str = "logits",
        device: str | torch.device | None = None,
        **training: Any,
    ) -> None:
        super().__init__(model, likelihood, layer=layer, outputs_are=outputs_are, device=device, training=training)
        choice("means", means, ("fixed", "moved"))
        self.means, self.samples = means, integer("samples", samples, 2)
        self.prior_precision = positive("prior_precision", prior_precision)
        self.kl_weight = positive("kl_weight", kl_weight)
        self.initial_std = positive("initial_std", initial_std)
        if not layers(self.module):
            raise OptionError(
                f"mfvi puts noise on Linear and convolution layers, got a {type(self.module).__name__} without any. "
                "Use another method, such as fmgp."
            )
        self.log_std: dict[str, Tensor] = {}
        """log σ of every weight, by parameter name, once there is a fit."""
        self._moved: dict[str, Tensor] = {}

    @property
    def mean(self) -> dict[str, Tensor]:
        """μ of every weight, by parameter name."""
        return self._moved or {name: p for name, p in self.module.named_parameters() if name in self.log_std}

    def _finetune(self, job: Job) -> None:
        assert job.train.targets is not None
        if not noisy_parameters(self.module):
            raise OptionError(
                "mfvi puts noise on the weights of Linear and convolution layers, and all of them are frozen: set "
                "requires_grad to True for those that may have it."
            )
        network = copy.deepcopy(self.module).eval()
        likelihood = self._start(job.train.outputs, job.train.targets).to(self.module_device)
        q = MeanField(self._weights_that_run(network, job.data), self.initial_std, moves=self.means == "moved")
        network.requires_grad_(False)
        generator = torch.Generator(self.module_device or "cpu").manual_seed(self.training.seed)
        moving = Reweighted(network, {})

        def answer(batch: Batch) -> Tensor:
            if q.moves:
                moving.call = network, q.mean()
            with flipout(network, q.std(), generator):
                return self._answer(moving if q.moves else network, batch)

        def predict(batch: Batch) -> Predictive:
            draws = self._drawn(network, batch, q.mean(), q.std(), min(SCORED, self.samples))
            return likelihood.predictive_from_draws(draws)

        likelihood.requires_grad_(isinstance(likelihood, Gaussian))  # its noise is learnt, a temperature is not
        history = self._minimise(
            job,
            likelihood,
            [*q.parameters(), *likelihood.parameters()],
            answer,
            penalty=lambda: self.kl_weight * q.kl(self.prior_precision),
            predict=predict,
            generator=generator,
        )
        self.log_std = {name: value.detach() for name, value in q.log_std.items()}
        self._moved = {name: value.detach() for name, value in q.mean().items()} if q.moves else {}
        self._fitted, self.history = likelihood, history

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

    def _draws(self, batch: Batch) -> Tensor:  # (S, N, ...)
        mean = {name: value.detach().to(self.module_device) for name, value in self.mean.items()}
        std = {name: value.to(self.module_device).exp() for name, value in self.log_std.items()}
        return self._drawn(self.module, batch, mean, std, self.samples)

    def _drawn(
        self, network: nn.Module, batch: Batch, mean: Mapping[str, Tensor], std: Mapping[str, Tensor], samples: int
    ) -> Tensor:  # (S, N, ...)
        generator = torch.Generator(self.module_device or "cpu").manual_seed(self.training.seed)
        weights = (sampled(mean, std, generator) for _ in range(samples))  # one at a time: each is a whole network
        return torch.stack([self._answer(Reweighted(network, drawn), batch) for drawn in weights])

    def _tensors(self) -> dict[str, Tensor]:
        stds = {f"log_std.{name}": value for name, value in self.log_std.items()}
        means = {f"mean.{name}": value for name, value in self._moved.items()}
        return {**super()._tensors(), **stds, **means}

    def _options(self) -> dict[str, Any]:
        names = ("means", "prior_precision", "kl_weight", "initial_std", "samples")
        return {**{name: getattr(self, name) for name in names}, **self._training()}

    def _recipe(self) -> dict[str, Any]:
        return self._options()

    @classmethod
    def _rebuild(cls, saved: Saved) -> Self:
        method, tensors, path = saved.unfitted(cls, **saved.options), saved.tensors, saved.path
        shapes = {name: tuple(p.shape) for name, p in method.module.named_parameters()}
        found = {
            kind: {name.removeprefix(f"{kind}."): t for name, t in tensors.items() if name.startswith(f"{kind}.")}
            for kind in ("log_std", "mean")
        }
        if not found["log_std"]:
            raise FileError(f"Expected the widths of some weights, found none in {path}: the file was changed.")
        moved = found["mean"] if method.means == "moved" else {}
        for values in (found["log_std"], moved):
            check_tensors(path, values, {name: shapes.get(name, ()) for name in (found["log_std"] if values else ())})
        home = method.module_device
        method.log_std = {name: value.to(home) for name, value in found["log_std"].items()}
        method._moved = {name: value.to(home) for name, value in moved.items()}
        method._fitted = cls._likelihood_from(saved)
        return method


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
