"""`FMGP`, the estimator: the output of a trained network as the mean, a learned covariance around it."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from posthoc.base import Job, OldMethod, first_values
from posthoc.collect.augmentation import Augmented
from posthoc.collect.loaders import iterate
from posthoc.collect.outputs import Outputs, join
from posthoc.errors import DataError, FileError, LayerError, NotFittedError, OptionError
from posthoc.fmgp.build import TYPICAL_ROWS, FreshSource, train_form, trains_in_parallel
from posthoc.fmgp.config import NOT_KEPT, FMGPConfig, shortened
from posthoc.fmgp.fitted import FittedFMGP
from posthoc.fmgp.minibatches import PointView
from posthoc.fmgp.noise_fit import fit_residuals
from posthoc.fmgp.objective import TrainingBatch
from posthoc.fmgp.selection import SELECTION, HeldOut, Selection, VarianceForm, select_form
from posthoc.io import check_config
from posthoc.kernels import Kernel, describe
from posthoc.kernels.registry import kernel_from_file, kernel_of_head
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.likelihoods.learned_noise import MixtureNoise
from posthoc.predictive.base import Predictive
from posthoc.saved import Saved
from posthoc.training import History, Ranks, Training

__all__ = ["FMGP"]

MAX_DENSE_OUTPUTS = 32
"""Up to this number of classes, every prediction has the covariance of the logits."""
MAX_VALUES = 2**24
"""Numbers in the largest tensor of a prediction, rows x outputs x inducing points: 128 MB."""
PARTS = {"kernel": dict, "inducing": str, "inducing_classes": list | None, "head": dict, "selection": dict}
"""Types of the options in a file."""


class FMGP(OldMethod):
    """A fixed-mean Gaussian process around a trained network.

    The network's output stays the mean of the prediction. A Gaussian process with M inducing points gives its
    variance, learned from data that the network was not trained on.

    A default fit of a classifier trains each of up to three candidates for a third of the steps on up to three folds,
    and then the selected form on all rows: up to four times the cost of one process. A default regression of fewer
    than 30,000 rows trains four processes, three of them for the distribution of its residuals.
    `variance="shared"` is the fast choice for classification: one process; `residuals="gaussian"` for regression.

    Args:
        model: An `nn.Module`, a callable that returns a tensor, or None to work from `Outputs` alone.
        likelihood: "regression", "classification", or a `Gaussian` or `Categorical` with options of its own.
        kernel: Kernel over the inputs, the features or both: one of `posthoc.kernels` or of GPyTorch. Default: `RBF()`.
        variance: The covariance among the outputs at a point. "shared": v(x) I. "separable": v(x) B, with B learned.
            "per_output": B, and inducing points that belong to outputs (the paper's). "auto": "per_output" for
            regression; for classification the form with the best log-probability on held-out rows, or temperature
            scaling where none is clearly better ("shared" below 200 rows).
        inducing: Where inducing points start: "kmeans", "random", "per_class", or a tensor (M, D) of your own points,
            or a mapping with one for each block that the kernel reads.
        inducing_classes: The output of each inducing point, for your own points and `variance="per_output"`.
        num_inducing: The number M of inducing points.
        alpha: The divergence, from 0 (the ELBO) to 1.
        standardize: Whether kernels see coordinates with zero mean and unit variance.
        output_rank: The rank of B. By default full for few outputs and 8 for many.
        kl: How the KL divergence counts where all outputs have one v(x). "copies": once for each output, as for
            independent processes. "once": a single time, which tempers the posterior. Default: "once", unless
            `variance="shared"` was requested.
        ood_strength: How steeply a classifier's variance grows away from the features of the fit, in units of its
            typical size; 0 adds none. By default 1 if it does held-out rows no harm, else 0; and the scale of all
            logits then follows the distance of the features from the data as far as the network's errors do.
        residuals: "learned": the distribution of a regression's standardized residuals is learned too, and intervals
            may be skewed (from 200 rows on). "gaussian": it is Gaussian.
        cache: Whether the network is run once over the data. With False it is run at every step, for random
            augmentation.
        steps: Training steps. Default: 1,000 for classification; 7 √N, from 200 to 2,000, for regression.
        batch_size: Points of a mini-batch.
        lr: Initial learning rate. Default: 0.01 for classification, 0.02 for regression.
        seed: Seed of all random choices.
        eval_every: Steps between evaluations on validation data.
        patience: Evaluations without improvement before training stops; None: it never does.
        progress: Whether to show a progress bar. Default: on a terminal.
        layer: The module whose output is taken as features. Default: the input of the last `nn.Linear`.
        outputs_are: What a classifier's outputs are: "logits", "log-probs" or "probs". A single output is of class 1
            of two.
        device: Where to fit and to predict. Default: where the data or the network are.

    Example:
        >>> import torch
        >>> from posthoc import FMGP, Outputs
        >>> x = torch.linspace(0.0, 1.0, 100)[:, None]
        >>> data = Outputs(torch.zeros(100, 1), torch.sin(40.0 * x) * x, features=x)
        >>> bayes = FMGP(None, "regression", num_inducing=10, steps=20, progress=False).fit(data)
        >>> bayes.predict(data).std.shape
        torch.Size([100, 1])
        >>> print(bayes.selection_)
        per_output variance: the default for this likelihood; Gaussian residuals, as 100 rows are too few to learn them
    """

    name = "fmgp"
    any_task = True
    wants_unseen = True
    load_options = ("kernel",)

    def __init__(
        self,
        model: nn.Module | Callable[..., Any] | None,
        likelihood: str | Likelihood,
        *,
        layer: str | None = None,
        outputs_are: str = "logits",
        device: str | torch.device | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, likelihood, layer=layer, outputs_are=outputs_are, device=device)
        names = [field.name for field in fields(FMGPConfig)]
        if unknown := sorted(options.keys() - set(names)):
            raise OptionError(f"Unknown option {', '.join(unknown)}. The options are: {', '.join(names)}.")
        self.config: Any = FMGPConfig(**options).resolved(self._likelihood.task)
        per_class = isinstance(self.config.inducing, str) and self.config.inducing == "per_class"
        if per_class and self._likelihood.task != "classification":
            raise OptionError('inducing="per_class" needs classes; use "kmeans" or "random" for regression.')
        self._likelihood.check_alpha(self.config.alpha)
        self.history = History()
        self.head: FittedFMGP | None = None
        self._selection: Selection | None = None

    def __repr__(self) -> str:
        described = f"FMGP({self._likelihood.task}, {type(self._kernel).__name__}"
        if self.head is None or self._selection is None:
            return f"{described}, not fitted)"
        return f"{described}, {len(self.head.process.l_raw)} inducing points, {self._selection})"

    @property
    def _kernel(self) -> Kernel:
        kernel: Kernel = self.config.kernel
        return kernel

    @property
    def _head(self) -> FittedFMGP:
        if self.head is None:
            raise NotFittedError("Call fit(...) first, or load a saved head.")
        return self.head

    @property
    def selection_(self) -> Selection:
        """What the last fit chose, and why."""
        if self._selection is None:
            raise NotFittedError("Call fit(...) before selection_, or load a saved head.")
        return self._selection

    @property
    def likelihood(self) -> Likelihood:
        return self.head.likelihood if self.head is not None else self._likelihood

    @property
    def kernel(self) -> Kernel:
        """The fitted kernel; before a fit, the given one."""
        return self.head.process.kernel if self.head is not None else self._kernel

    def _check_data(self, data: Any) -> None:
        if not self.config.cache and isinstance(data, Iterator):
            raise DataError("cache=False reads the data again and again: give a DataLoader or arrays, not an iterator.")

    def _fit(self, job: Job) -> None:
        """Selects a form of the variance, trains it on all rows, and corrects its confidence."""
        cached = self._cached(job)
        if not cached and (job.checkpoint is not None or not Ranks().alone):
            raise OptionError("Checkpoints and several processes need the outputs cached: leave cache=True.")
        if self._likelihood.draws and not Ranks().alone:
            raise OptionError('Monte Carlo training draws in one process: use training="pairwise" with several.')
        parallel = cached and trains_in_parallel(job, self.config, self._device(job))
        selection = select_form(job, self.config, self._likelihood, self._fit_and_score, parallel)
        if self._likelihood.task == "regression":
            fitted, history, selection = self._train_regression(job, selection, parallel)
        else:
            fitted, history = self._train(job, selection.form, self._training(job))
            selection = self._correct_confidence(fitted, job, selection)
        self.head, self.history, self._selection = fitted, history, selection

    def _fit_and_score(self, part: Job, form: VarianceForm, unseen: Outputs) -> HeldOut:
        """Log-probabilities of held-out rows by a candidate that is trained on others."""
        fitted, _ = self._train(part, form, shortened(self._training(part)), part_of_rows=True)
        log_probs: HeldOut = {0.0: fitted.log_probs(unseen)}
        if self.config.ood_strength is None and part.train.features is not None:
            typical = part.train.spread(TYPICAL_ROWS).to(fitted.device)
            fitted.add_ood_variance(typical, SELECTION.ood_strength, form.ood_exponent)
            if fitted.ood is not None:
                log_probs[SELECTION.ood_strength] = fitted.log_probs(unseen)
        return log_probs

    def _train_regression(
        self, job: Job, selection: Selection, parallel: bool
    ) -> tuple[FittedFMGP, History, Selection]:
        """Trains on all rows, with the distribution of the residuals if it is to be learned."""
        training, rows = self._training(job), len(job.train)
        requested = self.config.residuals == "gaussian"
        likelihood = None if requested else self._likelihood.with_learned_noise(rows, self.config.alpha)
        if likelihood is None:
            why = "as requested" if requested else f"as {rows:,} rows are too few to learn them"
            fitted, history = self._train(job, selection.form, training)
            return fitted, history, replace(selection, residuals=f"Gaussian residuals, {why}")

        def train(part: Job) -> tuple[FittedFMGP, History]:
            return self._train(part, selection.form, training, likelihood, part_of_rows=part is not job)

        fitted, history = fit_residuals(job, train, parallel)
        return (
            fitted,
            history,
            replace(selection, residuals=f"residuals with a learned distribution, from {rows:,} rows"),
        )

    def _train(
        self,
        job: Job,
        form: VarianceForm,
        training: Training,
        likelihood: Likelihood | None = None,
        *,
        part_of_rows: bool = False,
    ) -> tuple[FittedFMGP, History]:
        """Trains a form of the variance on a job. Only a fit to all rows warns of too many inducing points."""
        number = min(self.config.num_inducing, len(job.train)) if part_of_rows else self.config.num_inducing
        config = replace(self.config, num_inducing=number)
        fresh: FreshSource | None = None if self._cached(job) else partial(self._fresh_batches, job.data)
        return train_form(job, form, config, likelihood or self._likelihood, training, self._device(job), fresh)

    def _correct_confidence(self, fitted: FittedFMGP, job: Job, selection: Selection) -> Selection:
        """Applies the corrections of a selection, with the strength that the user asked for, if any."""
        fitted.recalibration = selection.recalibration
        strength = self.config.ood_strength if self.config.ood_strength is not None else selection.ood_strength
        if strength:
            typical = job.train.spread(TYPICAL_ROWS).to(fitted.device)
            fitted.add_ood_variance(typical, strength, selection.form.ood_exponent)
            Ranks().share(list(fitted.buffers()))
        return replace(selection, ood_strength=strength if fitted.ood is not None else 0.0)

    def _training(self, job: Job) -> Training:
        """How to train. Augmented images have less to learn from: they are trained as candidates are."""
        training = self.config.training(len(job.train))
        return shortened(training) if isinstance(job.data, Augmented) else training

    def _cached(self, job: Job) -> bool:
        return self.config.cache or isinstance(job.data, Outputs)

    def _device(self, job: Job) -> torch.device:
        return self._home(job.train.outputs.device)

    def _fresh_batches(self, data: Any, view: PointView, likelihood: Likelihood) -> Generator[TrainingBatch]:
        """Batches from the network, run anew over the data of a loader."""
        features, inputs = self._needs(fitted=False)
        with self._require_backbone(data).reading(features=features, inputs=inputs) as read:
            while True:
                seen = 0
                for batch in iterate(data, self.config.batch_size):
                    outputs = read(batch)
                    seen += len(outputs)
                    if len(outputs):
                        fresh = self._checked(self._as_logits(join([outputs])), targets=True)
                        yield view.of(fresh).batch(likelihood, slice(None))
                if not seen:
                    raise DataError("Expected data in every pass of the loader, got none in the last one.")

    def _old_predictor(self, *, covariance: bool) -> Callable[[Outputs], Predictive]:
        fitted = self._head
        w = fitted.prepared()
        # Samples of the logits need their covariance, which is cheap for few classes.
        few = fitted.process.coupling is not None and fitted.process.num_outputs <= MAX_DENSE_OUTPUTS
        dense = covariance or (few and self.likelihood.samples_latent)

        def predict(outputs: Outputs) -> Predictive:
            device = outputs.outputs.device
            pred = fitted.predictive(outputs.only(*fitted.reads()).to(fitted.device), w, covariance=dense)
            return pred if fitted.device == device else pred.to(device)

        return predict

    def _rows_at_once(self) -> int:
        process = self._head.process
        rows, coupling = super()._rows_at_once(), process.coupling
        if coupling is None or process.separable:
            return rows
        width = (coupling.rank or process.num_outputs) * len(process.l_raw)
        return max(1, min(rows, MAX_VALUES // width))

    def _needs(self, *, fitted: bool) -> tuple[bool, bool]:
        if fitted:
            spaces: set[str | None] = set(self._head.reads())
        else:
            layered = self.backbone is not None and self.backbone.has_features
            spaces = {space or ("features" if layered else "inputs") for space in self._kernel.spaces() or {None}}
            if self.config.ood_strength != 0.0 and layered and self._likelihood.task == "classification":
                spaces.add("features")
            if "features" in spaces and self.backbone is not None and not layered:
                raise LayerError(
                    "Expected a model with a layer to take features from, for this kernel; found none. Name one with "
                    'layer=..., or use a kernel on="inputs".'
                )
        return "features" in spaces, "inputs" in spaces

    def _recipe(self) -> dict[str, Any]:
        own = {} if isinstance(self.config.inducing, str) else {"inducing": digest_of(self.config.inducing)}
        classes = self.config.inducing_classes
        return {
            **self._plain_options(),
            "kernel": self._kernel.spec(),
            "kernel_parts": [describe(part) for part in self._kernel.modules()],
            "kernel_start": first_values(self._kernel),
            "inducing": own or self.config.inducing,
            "inducing_classes": None if classes is None else digest_of(classes),
            "layer": self.layer,
            "outputs_are": self.outputs_are,
        }

    def _plain_options(self) -> dict[str, Any]:
        """The options that are plain values, but for those that decide no number."""
        others = ("kernel", "inducing", "inducing_classes", "progress")
        return {f.name: getattr(self.config, f.name) for f in fields(self.config) if f.name not in others}

    def _tensors(self) -> dict[str, Tensor]:
        return self._head.state_dict()

    def _options(self) -> dict[str, Any]:
        classes, inducing = self.config.inducing_classes, self.config.inducing
        return {
            **self._plain_options(),
            "kernel": self._kernel.recipe(),
            "inducing": inducing if isinstance(inducing, str) else NOT_KEPT,
            "inducing_classes": None if classes is None else torch.as_tensor(classes).tolist(),
            "head": self._head.options(),
            "selection": self.selection_.to_dict(),
        }

    @classmethod
    def _rebuild(cls, saved: Saved) -> Self:
        check_config(saved.path, options := saved.options, PARTS)
        shape, selection = options.pop("head"), Selection.from_dict(options.pop("selection"))
        options["kernel"] = kernel_from_file(options["kernel"], saved.extra.get("kernel"))
        method = saved.unfitted(cls, **options)
        likelihood = copy.deepcopy(method._likelihood)
        if shape["normals"] is not None and isinstance(likelihood, Gaussian):
            laws = saved.tensors["likelihood.weights"].shape[:-1]
            saved.check_some({"likelihood.weights": (*laws, shape["normals"])})
            likelihood = MixtureNoise(likelihood, shape["normals"])
        kernel = kernel_of_head(saved.path, method._kernel, shape["kernel"])
        fitted = FittedFMGP.rebuild(saved, shape, kernel, likelihood)
        if fitted.process.kernel.spec() != shape["kernel"]:
            raise FileError(
                f"Expected the kernel this head was fitted with, {shape['kernel']}, "
                f"found {fitted.process.kernel.spec()}: give one of the same form."
            )
        fitted.recalibration = selection.recalibration
        method.head, method._selection = fitted.to(method._home()), selection
        return method


def digest_of(values: Any) -> dict[str, Any] | str:
    """A hash of arrays that a user gave."""
    if isinstance(values, Mapping):
        return {name: digest_of(block) for name, block in sorted(values.items())}
    tensor = torch.as_tensor(values).detach().cpu().double().contiguous()
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
