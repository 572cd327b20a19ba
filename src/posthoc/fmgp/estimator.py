"""`FMGP`, the estimator: the output of a trained network as the mean, a learned covariance around it."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import methodcaller
from typing import Any, Literal, Self

import torch

from posthoc.base import Job, Method
from posthoc.collect.augmentation import Augmented
from posthoc.collect.loaders import iterate
from posthoc.collect.outputs import Outputs, join
from posthoc.config import FeatureConfig, ScoreConfig, TrainingConfig, option
from posthoc.errors import DataError, LayerError, NotFittedError, OptionError, warn
from posthoc.fmgp.build import Trainer, shortened
from posthoc.fmgp.fitted import FittedFMGP
from posthoc.fmgp.inducing_points import NotKept, as_points
from posthoc.fmgp.ood_detector import OODDetector
from posthoc.fmgp.points import PointView, TrainingBatch
from posthoc.fmgp.regression import train_regression
from posthoc.fmgp.selection import SELECTION, Selection, content_order, select_form
from posthoc.io import reading
from posthoc.kernels import RBF, Kernel, as_kernel
from posthoc.kernels.registry import kernel_from_file, kernel_from_spec
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.likelihoods.learned_noise import MixtureNoise
from posthoc.training import History, Ranks, single_thread
from posthoc.validation import choice

STEPS_PER_ROOT, MIN_STEPS, MAX_STEPS = 7.0, 200, 2000
"""By default a regression is trained for 7 √N steps, within these limits (docs/ablation.md)."""
OF_ONE_TASK = {
    "residuals": ("regression", "learned"),
    "scale": ("regression", "auto"),
    "ood_strength": ("classification", None),
    "mean": ("classification", "fixed"),
}
"""Options that do nothing for other tasks, with the task and the default."""
DEFAULT_STEPS = 1000
"""Default number of steps of a classification."""
DEFAULT_LR = {"classification": 0.01, "regression": 0.02}
"""Default learning rates by task."""


def encode_points(inducing: Any) -> Any:
    """The option `inducing` as JSON: points of the user are private, so a hash stands for them."""
    if isinstance(inducing, str | NotKept):
        return inducing if isinstance(inducing, str) else {"given": inducing.digest}
    hashed = hashlib.sha256()
    for name, block in sorted(inducing.items()) if isinstance(inducing, Mapping) else [("", inducing)]:
        hashed.update(name.encode() + as_points(block).detach().cpu().contiguous().numpy().tobytes())
    return {"given": hashed.hexdigest()}


def decode_points(stored: Any, given: Any) -> Any:
    """The inverse of `encode_points`; your own points are not in the file."""
    return stored if isinstance(stored, str) else NotKept(stored["given"])


def encode_classes(classes: Any) -> list[int] | None:
    """The option `inducing_classes` as JSON."""
    return None if classes is None else torch.as_tensor(classes).tolist()


@dataclass(frozen=True, kw_only=True)
class FMGPConfig(ScoreConfig, FeatureConfig, TrainingConfig):
    """Options of `FMGP`, which describes them."""

    kernel: Any = option(None, encode=methodcaller("recipe"), decode=kernel_from_file, on_load=True)
    mean: Literal["fixed", "calibrated", "network"] = "fixed"
    variance: Literal["auto", "per_output", "shared", "separable"] = "auto"
    inducing: Any = option("kmeans", encode=encode_points, decode=decode_points)
    inducing_classes: Any = option(None, encode=encode_classes)
    num_inducing: int = option(100, least=1)
    alpha: float = option(1.0, least=0.0, most=1.0)
    standardize: bool = True
    output_rank: int | None = option(None, least=1)
    kl: Literal["copies", "once"] | None = None
    ood_strength: float | None = option(None, least=0.0)
    ood: Literal["knn", "mahalanobis", "none"] = "knn"
    residuals: Literal["learned", "gaussian"] = "learned"
    scale: Literal["auto", "none", "learned", "claimed"] = "auto"
    outputs_are: Literal["logits", "log-probs", "probs", "mean-and-variance"] = "logits"  # type: ignore[assignment]
    cache: bool = True
    steps: int | None = option(None, least=0)  # type: ignore[assignment]
    lr: float | None = option(None, above=0.0)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "kernel", as_kernel(self.kernel) if self.kernel is not None else RBF())
        if isinstance(self.inducing, str):
            choice("inducing", self.inducing, ("kmeans", "random", "per_class"))
            if self.inducing == "per_class" and self.inducing_classes is not None:
                raise OptionError('inducing="per_class" takes the classes from the data: leave inducing_classes out.')
        elif not isinstance(self.inducing, NotKept):
            for block in self.inducing.values() if isinstance(self.inducing, Mapping) else [self.inducing]:
                as_points(block)  # an error now, before the network is run

    def resolved(self, task: str) -> FMGPConfig:
        """The same options with the defaults of `steps` and `lr` for this task. The steps of a regression stay None
        until a fit, because their default depends on the number of rows."""
        for name, (only, default) in OF_ONE_TASK.items():
            if task != only and getattr(self, name) != default:
                raise OptionError(f"{name} is an option for {only} and does nothing for {task}: leave it out.")
        unused = {"shared": "output_rank", "per_output": "kl"}.get(self.variance)
        if unused is not None and getattr(self, unused) is not None:
            raise OptionError(f'{unused} does nothing for variance="{self.variance}": leave it out.')
        if task != "classification" and isinstance(self.inducing, str) and self.inducing == "per_class":
            raise OptionError('inducing="per_class" needs classes; use "kmeans" or "random" for regression.')
        steps = DEFAULT_STEPS if self.steps is None and task == "classification" else self.steps
        lr = DEFAULT_LR.get(task, DEFAULT_LR["regression"]) if self.lr is None else self.lr
        return replace(self, steps=steps, lr=lr)


class FMGP(Method):
    """A fixed-mean Gaussian process around a trained network.

    The network's output stays the mean of the prediction. A Gaussian process with M inducing points gives its
    variance, learned from data that the network was not trained on.

    A default fit of a classifier trains each of up to three candidates for a third of the steps on up to three folds,
    and then the selected form on all rows: up to four times the cost of one process. A default regression of fewer
    than 30,000 rows trains four processes, three of them for a third of the steps and from the kernel and inducing
    points of the first, for the distribution of its residuals.
    `variance="shared"` is the fast choice for classification: one process; `residuals="gaussian"` for regression.

    Args:
        model: An `nn.Module`, a callable that returns a tensor, or None to work from `Outputs` alone.
        likelihood: "regression", "classification", or a `Gaussian` or `Categorical` with options of its own.
        kernel: Kernel over the inputs, the features or both: one of `posthoc.kernels` or of GPyTorch. Default: `RBF()`.
        mean: What may become of a classifier's mean prediction where its probabilities are biased. "fixed": the
            predicted class stays the network's, the other probabilities may be corrected. "calibrated": the predicted
            class may change too. "network": nothing is corrected but the confidence. Corrections are learned on
            held-out rows, with `variance="auto"`; `pred.latent.mean` is the network's output in any case.
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
        ood: What `ood_score` and `ood_pvalue` of predictions are computed by, from features if there are any, else from
            inputs. "knn": the distance to the tenth nearest row of the fit in whitened coordinates. "mahalanobis": the
            distance to their mean. "none": these two are left out, and the head holds no rows for them.
        residuals: "learned": the distribution of a regression's standardized residuals is learned too, and intervals
            may be skewed (from 200 rows on). "gaussian": it is Gaussian.
        scale: The unit of a regression's residuals, whose variance the process then describes. "auto": a scale that
            boosted trees learn from the outputs and inputs (extra `scale`; needs "learned" residuals), one that the
            network claims, or none, whichever is best on held-out rows, with the kernel's block where no kernel was
            given. "learned": the same, with a warning where scikit-learn is missing. "claimed": the `claimed_std` of
            `Outputs`. "none": one unit.
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
            of two. For a regression "mean-and-variance": the second half of the columns are claimed variances.
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
    trains = True
    Config = FMGPConfig
    config: FMGPConfig
    _fitted: FittedFMGP | None

    def __init__(self, model: Any = None, likelihood: str | Likelihood | None = None, **options: Any) -> None:
        super().__init__(model, likelihood, **options)
        self.config = self.config.resolved(self._likelihood.task)
        self._steps_by_rows = self.config.steps is None
        self._likelihood.check_alpha(self.config.alpha)
        self.history, self._reads_again = History(), not self.config.cache

    def __repr__(self) -> str:
        described = f"FMGP({self._likelihood.task}, {type(self.config.kernel).__name__}"
        if self._fitted is None:
            return f"{described}, not fitted)"
        process = self._fitted.process
        points = f"{len(process.l_raw)} inducing points, " if process is not None else ""
        return f"{described}, {points}{self.selection_})"

    @property
    def head(self) -> FittedFMGP:
        """What the last fit left."""
        if self._fitted is None:
            raise NotFittedError("Expected a fitted FMGP: call fit(...), or load a saved head.")
        return self._fitted

    @property
    def selection_(self) -> Selection:
        """What the last fit chose, and why."""
        return self.head.selection

    @property
    def kernel(self) -> Kernel:
        """The kernel; after a fit, the fitted one."""
        process = self._fitted.process if self._fitted is not None else None
        kernel: Kernel = process.kernel if process is not None else self.config.kernel
        return kernel

    def _fit(self, job: Job) -> FittedFMGP:
        fitted = self._fit_process(job)
        if self.config.ood != "none":
            fitted.detector = OODDetector.of(job.train, self.config.ood, fitted.device)
            Ranks().share(list(fitted.detector.buffers()) if fitted.detector is not None else [])
        return fitted

    def _fit_process(self, job: Job) -> FittedFMGP:
        """Selects a form of the variance, trains it on all rows, and corrects its confidence."""
        few = len(job.train) <= SELECTION.max_rows
        if self.config.variance == "auto" and self._likelihood.chooses_form and few:
            job = replace(job, train=job.train[content_order(job.train)])  # so that the order of rows does not matter
        trainer = self._trainer(job)
        small, alone = trainer.is_small(job.train), Ranks().alone
        if trainer.fresh is not None and (job.checkpoint is not None or not alone):
            raise OptionError("Checkpoints and several processes need the outputs cached: leave cache=True.")
        if self._likelihood.draws and not alone:
            raise OptionError('Monte Carlo training draws in one process: use training="pairwise" with several.')
        rows, number = len(job.train), self.config.num_inducing
        if isinstance(self.config.inducing, str) and number > rows:
            warn(f"Asked for {number} inducing points but there are only {rows} data points: using {rows}.")
        with single_thread(small):
            selection = select_form(job, self.config, self._likelihood, trainer)
            if self._likelihood.task == "regression":
                fitted, self.history = train_regression(job, selection, trainer)
                return fitted
            fitted, self.history = trainer.fit(job, selection.form)
            strength = self.config.ood_strength if self.config.ood_strength is not None else selection.ood_strength
            if strength:
                fitted.add_ood_variance(job.train, strength, selection.form.ood_exponent)
            fitted.correction, fitted.fixed = selection.fitted_correction, self.config.mean != "calibrated"
            Ranks().share(list(fitted.buffers()))
            strength = strength if fitted.ood is not None else 0.0
            fitted.selection = replace(selection, ood_strength=strength, fitted_correction=None)
            return fitted

    def _trainer(self, job: Job) -> Trainer:
        """What trains processes on this job, with all options resolved."""
        if self._steps_by_rows:
            steps = min(max(STEPS_PER_ROOT * math.sqrt(len(job.train)), MIN_STEPS), MAX_STEPS)
            self.config = replace(self.config, steps=round(steps))
        full, short = self.config.training, shortened(self.config.training)
        training = short if isinstance(job.data, Augmented) else full  # augmented images have less to learn from
        fresh = None if self.config.cache or isinstance(job.data, Outputs) else partial(self._fresh_batches, job)
        return Trainer(self.config, self._likelihood, training, short, fresh)

    def _fresh_batches(self, job: Job, view: PointView, likelihood: Likelihood) -> Generator[TrainingBatch]:
        """Batches from the network, run anew over the data of a loader."""
        assert self.backbone is not None
        reads = self._reads()
        with self.backbone.reading(features="features" in reads, inputs="inputs" in reads) as read:
            while True:
                seen = 0
                for outputs in read(iterate(job.data, self.config.batch_size)):
                    seen += len(outputs)
                    if len(outputs):
                        yield view.batch(likelihood, self._checked(join([outputs]), job.rounding))
                if not seen:
                    raise DataError("Expected data in every pass of the loader, got none in the last one.")

    def _reads(self) -> set[str]:
        layered = self.backbone is not None and self.backbone.has_features
        reads = {space or ("features" if layered else "inputs") for space in self.config.kernel.spaces() or {None}}
        if self.config.ood_strength != 0.0 and layered and self._likelihood.task == "classification":
            reads.add("features")
        if self.config.ood != "none" and layered:
            reads.add("features")
        learns_scale = self.config.scale in ("auto", "learned") and self.config.residuals == "learned"
        if learns_scale and self._likelihood.task == "regression":
            reads.add("table")
        if "features" in reads and self.backbone is not None and not layered:
            message = "Expected a model with a layer to take features from, for this kernel; found none. "
            raise LayerError(message + 'Name one with layer=..., or use a kernel on="inputs".')
        return reads

    def _blank(self, shapes: Mapping[str, Any]) -> FittedFMGP:
        likelihood = self._likelihood
        if shapes["normals"] is not None and isinstance(likelihood, Gaussian):
            likelihood = MixtureNoise(likelihood, shapes["normals"])
        kernel, outputs = copy.deepcopy(self.config.kernel), math.prod(self._width or ())
        if shapes.get("chosen_kernel"):
            kernel = kernel_from_spec(shapes["kernel"])
        fitted = FittedFMGP.blank(shapes, kernel, self._blank_likelihood(likelihood), outputs)
        fitted.detector = OODDetector(**shapes["detector"]) if shapes["detector"] is not None else None
        return fitted

    def _identity(self) -> dict[str, Any]:
        found = super()._identity()
        return {**found, "config": {**found["config"], "steps": None}} if self._steps_by_rows else found

    def _header(self) -> dict[str, Any]:
        return {**super()._header(), "selection": asdict(self.selection_)}

    @classmethod
    def _restored(cls, path: Any, tensors: Any, header: dict[str, Any], model: Any, given: Mapping[str, Any]) -> Self:
        method = super()._restored(path, tensors, header, model, given)
        with reading(path):
            method.head.selection = Selection.from_dict(header["selection"])
        return method
