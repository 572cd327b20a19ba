"""`FMGP`, the estimator: a trained network's output as the mean, a learnt covariance around it."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from operator import itemgetter
from typing import Any, Literal, Self, SupportsFloat, TypeVar

import torch
from torch import Tensor, nn

from posthoc.base import Job, Method, first_values
from posthoc.collect.augmentation import Augmented
from posthoc.collect.loaders import iterate
from posthoc.collect.outputs import Outputs, join
from posthoc.errors import DataError, FileError, LayerError, OptionError
from posthoc.fmgp.build import NOT_KEPT, Layout
from posthoc.fmgp.coordinates import PointView
from posthoc.fmgp.fitted import Head
from posthoc.fmgp.inducing_points import as_points
from posthoc.fmgp.making import TYPICAL, Maker
from posthoc.fmgp.objective import TrainingBatch
from posthoc.fmgp.ood import best_slope
from posthoc.fmgp.residuals import LearntResiduals, with_law
from posthoc.fmgp.scoring import log_probs
from posthoc.fmgp.selection import (
    CALM,
    CAUTIOUS,
    FEWEST,
    PRIORS,
    WARY,
    Decision,
    Plan,
    Trial,
    candidates,
    choose,
    shortened,
)
from posthoc.io import check_config
from posthoc.kernels.base import RBF, Kernel, as_kernel, describe
from posthoc.kernels.registry import kernel_from_file, kernel_of_head
from posthoc.likelihoods.base import Categorical, Gaussian, Likelihood
from posthoc.predictive.base import Predictive
from posthoc.saved import Saved
from posthoc.training import History, Ranks, Training
from posthoc.validation import choice, integer

__all__ = ["FMGP"]

T = TypeVar("T")

FEW_OUTPUTS = 32
"""Up to so many outputs the covariance among them comes with every prediction."""
AT_ONCE = 2**24
"""Numbers in the largest tensor of a prediction, rows x outputs x inducing points: 128 MB."""
OPTIONS = ("variance", "num_inducing", "alpha", "standardize", "output_rank", "kl", "novelty", "residuals")
"""Options that decide the numbers of a fit, beside those of training,"""
RECIPE = (*OPTIONS, "layer", "outputs_are")
"""and with those that all methods have."""
PARTS = {
    **dict.fromkeys((*OPTIONS, "cache"), object),
    "kernel": dict,
    "inducing": str,
    "inducing_classes": list | None,
    "training": dict,
    "head": dict,
}
"""What the options in a file are."""
CLASSIFIERS = {"steps": 1000, "lr": 0.01}
"""How classifiers are trained by default: smaller steps suit them."""
STEPS_A_ROOT, FEWEST_STEPS, MOST_STEPS = 7.0, 200, 2000
"""A regression is trained for so many steps times √N by default: few rows are soon learnt by heart."""
VARIANCES = ("auto", "per_output", "shared", "separable")


class FMGP(Method):
    """A fixed-mean Gaussian process around a trained predictor.

    Parameters
    ----------
    model: an `nn.Module`, a callable that returns a tensor, or None to work from `Outputs` alone.
    likelihood: "regression", "classification", or a `Gaussian` or `Categorical` with options of its own.
    kernel: over the inputs, the features or both (default: `RBF()`); one of `posthoc.kernels.base` or of GPyTorch.
    variance: the covariance among outputs at a point. "shared": v(x) I; "separable": v(x) B, with B learnt;
        "per_output": B too, and inducing points that belong to outputs (the paper's). "auto": for classes, the form
        that does best on rows held out, or temperature scaling where none is better ("shared" below 200 rows);
        "per_output" for regression.
    inducing: "kmeans", "random", "per_class", or your own points: (M, D), or one such array a block.
    inducing_classes: the output of each inducing point, where the points are your own and `variance="per_output"`.
    num_inducing: M.
    alpha: the divergence, from 0 (the ELBO) to 1.
    layer: the module whose output is taken as features; by default the input of the last `nn.Linear` is.
    standardize: whether kernels see coordinates with zero mean and unit spread.
    output_rank: the rank of B; by default full for few outputs and 8 for many.
    kl: with one v(x), "copies" counts the KL of every output's copy, "once" of one (a tempered posterior, the default
        unless variance="shared" was asked for).
    novelty: how steeply a classifier's variance grows beyond the features of the fit, in units of its typical size. By
        default 1 where rows held out show that it does them no harm, and else 0; and the scale of all logits follows
        the features' distance from the data, as steeply as the network's errors do.
    residuals: "learnt": how a regression's residuals are spread is learnt too, and intervals may be skewed (with 200
        rows or more; below, and with "gaussian", residuals are Gaussian).
    cache: whether the network is run once over the data; False runs it at every step (for random augmentation).
    outputs_are: what the classifier's outputs are: "logits", "log-probs" or "probs". A single one is of class 1 of two;
        the `mean` of a prediction then has two columns, [0, z] for a logit z.
    steps, batch_size, lr, seed, eval_every, patience, progress: see `posthoc.training.Training`; by default classifiers
        take 1,000 steps at a learning rate of 0.01, and regressions 7 √N steps, from 200 to 2,000.
    """

    name = "fmgp"
    wants_unseen = True
    load_options = ("kernel",)

    def __init__(
        self,
        model: nn.Module | Callable[..., Any] | None,
        likelihood: str | Likelihood,
        *,
        kernel: Kernel | Any | None = None,
        variance: Literal["auto", "per_output", "shared", "separable"] = "auto",
        inducing: str | Tensor | Mapping[str, Any] | Any = "kmeans",
        inducing_classes: Any | None = None,
        num_inducing: int = 100,
        alpha: float = 1.0,
        layer: str | None = None,
        standardize: bool = True,
        output_rank: int | None = None,
        kl: Literal["copies", "once"] | None = None,
        novelty: float | None = None,
        residuals: Literal["learnt", "gaussian"] = "learnt",
        cache: bool = True,
        outputs_are: str = "logits",
        device: str | torch.device | None = None,
        **training: Any,
    ) -> None:
        super().__init__(model, likelihood, layer=layer, outputs_are=outputs_are, device=device)
        if not isinstance(alpha, SupportsFloat) or not 0.0 <= float(alpha) <= 1.0:
            raise OptionError(f"Expected alpha from 0 (the ELBO) to 1, got {alpha!r}.")
        choice("variance", variance, VARIANCES)
        choice("residuals", residuals, ("learnt", "gaussian"))
        choice("kl", kl or "once", ("copies", "once"))
        if isinstance(inducing, str):
            choice("inducing", inducing, ("kmeans", "random", "per_class"))
            if inducing == "per_class" and self._likelihood.task != "classification":
                raise OptionError('inducing="per_class" needs classes; use "kmeans" or "random" for regression.')
            if inducing == "per_class" and inducing_classes is not None:
                raise OptionError('inducing="per_class" takes the classes from the data: leave inducing_classes out.')
        else:
            for block in inducing.values() if isinstance(inducing, Mapping) else [inducing]:
                as_points(block)  # refuses what can be none, before the network is run
        if unknown := training.keys() - Training.__dataclass_fields__.keys():
            known_options = ", ".join(Training.__dataclass_fields__)
            raise OptionError(
                f"Unknown option {', '.join(sorted(unknown))}. The training options are: {known_options}."
            )
        if training.get("steps", 0) is None:
            del training["steps"]
        self._steps_by_rows = self._likelihood.task == "regression" and "steps" not in training
        if self._likelihood.task == "classification" and not training.keys() & {"steps", "lr"}:
            training |= CLASSIFIERS
        self.training = Training(**training)
        self._kernel = as_kernel(kernel) if kernel is not None else RBF()
        self.variance, self.inducing, self.inducing_classes = variance, inducing, inducing_classes
        self.num_inducing = integer("num_inducing", num_inducing, 1)
        self.output_rank = integer("output_rank", output_rank, 1) if output_rank is not None else None
        self.alpha, self.standardize, self.kl, self.cache = float(alpha), standardize, kl, cache
        if novelty is not None and not (isinstance(novelty, SupportsFloat) and 0.0 <= float(novelty) < math.inf):
            raise OptionError(f"Expected novelty to be a number of at least 0, or None to choose it, got {novelty!r}.")
        self.novelty = float(novelty) if novelty is not None else None
        self.residuals = residuals
        self._likelihood.check_alpha(self.alpha)
        self.history = History()
        self.head: Head | None = None

    def __repr__(self) -> str:
        state = f"{len(self.head.process.l_raw)} inducing points" if self.head is not None else "not fitted"
        return f"FMGP({self._likelihood.task}, {type(self._kernel).__name__}, {state})"

    @property
    def likelihood(self) -> Likelihood:
        return self.head.likelihood if self.head is not None else self._likelihood

    @property
    def kernel(self) -> Kernel:
        """The kernel: fitted, once there is a fit."""
        return self.head.process.kernel if self.head is not None else self._kernel

    def _check_data(self, data: Any) -> None:
        if not self.cache and isinstance(data, Iterator):
            raise DataError("cache=False reads the data again and again: give a DataLoader or arrays, not an iterator.")

    def _fit(self, job: Job) -> None:
        if not self._cached(job) and (job.checkpoint is not None or not Ranks().alone):
            raise OptionError("Checkpoints and several processes need the outputs cached: leave cache=True.")
        if self._likelihood.draws and not Ranks().alone:
            raise OptionError('Monte Carlo training draws in one process: use training="pairwise" with several.')
        decision = self._decide(job)
        training, likelihood = self._schedule(job), self._likelihood
        if self.residuals == "learnt" and LearntResiduals.suit(likelihood, len(job.train)):
            likelihood = LearntResiduals.before(likelihood, self.alpha)

        def train(part: Job) -> tuple[Head, History]:
            return self._maker(part, some_rows=part is not job).train(part, decision.plan, training, likelihood)

        if isinstance(likelihood, LearntResiduals):
            beside = self._maker(job).beside_others(job, training)
            head, history = with_law(job, train, itemgetter(0), beside)
        else:
            head, history = train(job)
        head.recalibration = decision.recalibration
        wariness = self.novelty if self.novelty is not None else decision.wariness
        if wariness and self._likelihood.task == "classification":
            head.grow_wary(job.train.spread(TYPICAL).to(head.device), wariness, decision.plan.slope)
            Ranks().share(list(head.buffers()))
        self.head, self.history = head, history

    def _schedule(self, job: Job) -> Training:
        """How to train: for more steps on more rows, and for fewer on changed views, of which less is to be learnt."""
        if isinstance(job.data, Augmented):
            return shortened(self.training)
        if not self._steps_by_rows:
            return self.training
        steps = round(min(max(STEPS_A_ROOT * math.sqrt(len(job.train)), FEWEST_STEPS), MOST_STEPS))
        return replace(self.training, steps=steps)

    def _cached(self, job: Job) -> bool:
        return self.cache or isinstance(job.data, Outputs)

    def _decide(self, job: Job) -> Decision:
        """The form of the variance: as asked for, or as is best on rows held out, where there are enough."""
        rows, num_outputs = len(job.train), job.train.outputs[0].numel()
        likelihood = self._likelihood
        if self.variance != "auto":
            kl = self.kl or ("copies" if self.variance == "shared" else "once")
            prior = PRIORS[0] if self.variance == "separable" else 0.0
            return Decision(Plan(self.variance, kl, prior))
        if not isinstance(likelihood, Categorical) or likelihood.fixed_temperature is not None or likelihood.draws:
            few = num_outputs <= FEW_OUTPUTS
            return Decision(Plan("per_output") if few else Plan("shared", self.kl or "copies"))
        if rows < FEWEST:
            return Decision(CAUTIOUS._replace(kl=self.kl or CAUTIOUS.kl))
        augmented = isinstance(job.data, Augmented)
        found = [CAUTIOUS] if augmented else candidates(rows, num_outputs)
        slope = Ranks().agree(best_slope(job.train)) if self.novelty is None and not augmented else 0.0
        plans = [plan._replace(kl=self.kl or plan.kl, slope=slope) for plan in found]
        decision = choose(job, plans, self._attempt, self._maker(job).beside_others(job, self.training))
        # What changed views say of confidence and of new kinds of points holds for them, not for plain images.
        return Decision(decision.plan) if augmented else decision

    def _attempt(self, trial: Job, plan: Plan, unseen: Outputs) -> Trial:
        """What a plan, fitted on some rows, says of others."""
        head, _ = self._maker(trial, some_rows=True).train(trial, plan, shortened(self.training))
        found: Trial = {CALM: log_probs(head, unseen)}
        if self.novelty is None and trial.train.features is not None:
            head.grow_wary(trial.train.spread(TYPICAL).to(head.device), WARY, plan.slope)
            if head.novelty is not None:
                found[WARY] = log_probs(head, unseen)
        return found

    def _maker(self, job: Job, *, some_rows: bool = False) -> Maker:
        """How a head of these options is made of a job's data, which may be some rows of the fit's."""
        # Fewer inducing points are worth a warning only where the head that is kept has them.
        points = min(self.num_inducing, len(job.train)) if some_rows else self.num_inducing
        layout = Layout(self.inducing, self.inducing_classes, points, self.output_rank)
        home = self._home(job.train.outputs.device)
        fresh = None if self._cached(job) else partial(self._fresh, job.data)
        return Maker(self._kernel, self._likelihood, layout, self.alpha, self.standardize, home, fresh)

    def _fresh(self, data: Any, view: PointView, likelihood: Likelihood) -> Generator[TrainingBatch]:
        """Batches from the network, run anew on what the loader gives."""
        features, inputs = self._needs(fitted=False)
        with self._require_backbone(data).running(features=features, inputs=inputs) as run:
            while True:
                seen = 0
                for batch in iterate(data, self.training.batch_size):
                    reading = run(batch)
                    seen += len(reading.outputs)
                    if len(reading.outputs):
                        fresh = self._checked(self._as_logits(join([reading])), targets=True)
                        yield view.of(fresh).batch(likelihood, slice(None))
                if not seen:
                    raise DataError("Expected data in every pass of the loader, got none in the last one.")

    def _predictor(self, *, covariance: bool) -> Callable[[Outputs], Predictive]:
        head = known(self.head)
        w = head.prepared()
        # Where few classes are coupled, their covariance comes unasked: draws of the logits need it.
        few = head.process.coupling is not None and head.process.num_outputs <= FEW_OUTPUTS
        dense = covariance or (few and self.likelihood.task == "classification")

        def predict(outputs: Outputs) -> Predictive:
            home = outputs.outputs.device
            read = outputs.only(*head.reads())
            predictive = head.predictive(read.to(head.device), w, covariance=dense)
            return predictive if head.device == home else predictive.to(home)

        return predict

    def _rows_at_once(self) -> int:
        process = known(self.head).process
        rows, coupling = super()._rows_at_once(), process.coupling
        if coupling is None or process.separable:
            return rows
        width = (coupling.rank or process.num_outputs) * len(process.l_raw)
        return max(1, min(rows, AT_ONCE // width))

    def _needs(self, *, fitted: bool) -> tuple[bool, bool]:
        if fitted:
            spaces: set[str | None] = set(known(self.head).reads())
        else:
            layered = self.backbone is not None and self.backbone.has_features
            spaces = {space or ("features" if layered else "inputs") for space in self._kernel.spaces() or {None}}
            if self.novelty != 0.0 and layered and self._likelihood.task == "classification":
                spaces.add("features")
            if "features" in spaces and self.backbone is not None and not layered:
                raise LayerError(
                    "Expected a model with a layer to take features from, for this kernel; found none. Name one with "
                    'layer=..., or use a kernel on="inputs".'
                )
        return "features" in spaces, "inputs" in spaces

    def _recipe(self) -> dict[str, Any]:
        given = None if isinstance(self.inducing, str) else {"inducing": digest_of(self.inducing)}
        return {
            "kernel": self._kernel.spec(),
            "kernel_parts": [describe(part) for part in self._kernel.modules()],
            "kernel_start": first_values(self._kernel),
            "inducing": given or self.inducing,
            "inducing_classes": None if self.inducing_classes is None else digest_of(self.inducing_classes),
            **{name: getattr(self, name) for name in RECIPE},
            **self._training(),
        }

    def _training(self) -> dict[str, Any]:
        training = {k: v for k, v in asdict(self.training).items() if k != "progress"}
        return training | ({"steps": None} if self._steps_by_rows else {})

    def _tensors(self) -> dict[str, Tensor]:
        return known(self.head).state_dict()

    def _options(self) -> dict[str, Any]:
        owners = self.inducing_classes
        return {
            **{name: getattr(self, name) for name in (*OPTIONS, "cache")},
            "kernel": self._kernel.recipe(),
            "inducing": self.inducing if isinstance(self.inducing, str) else NOT_KEPT,
            "inducing_classes": None if owners is None else torch.as_tensor(owners).tolist(),
            "training": self._training(),
            "head": known(self.head).options(),
        }

    @classmethod
    def _rebuild(cls, saved: Saved) -> Self:
        check_config(saved.path, options := saved.options, PARTS)
        shape, training = options.pop("head"), options.pop("training")
        options["kernel"] = kernel_from_file(options["kernel"], saved.extra.get("kernel"))
        own_points = options["inducing"] == NOT_KEPT
        if own_points:
            del options["inducing"]
        method = saved.unfitted(cls, **options, **training)
        if own_points:
            method.inducing = NOT_KEPT
        likelihood = copy.deepcopy(method._likelihood)
        if shape["normals"] is not None and isinstance(likelihood, Gaussian):
            laws = saved.tensors["likelihood.weights"].shape[:-1]
            saved.check_some({"likelihood.weights": (*laws, shape["normals"])})
            likelihood = LearntResiduals(likelihood, shape["normals"])
        kernel = kernel_of_head(saved.path, method._kernel, shape["kernel"])
        head = Head.rebuild(saved, shape, kernel, likelihood)
        if head.process.kernel.spec() != shape["kernel"]:
            raise FileError(
                f"Expected the kernel this head was fitted with, {shape['kernel']}, "
                f"found {head.process.kernel.spec()}: give one of the same form."
            )
        method.head = head.to(method._home())
        return method


def digest_of(values: Any) -> dict[str, Any] | str:
    """A short name for arrays that a user gave."""
    if isinstance(values, Mapping):
        return {name: digest_of(block) for name, block in sorted(values.items())}
    tensor = torch.as_tensor(values).detach().cpu().double().contiguous()
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def known(value: T | None) -> T:
    """A value that is there by now: after `fit`, or after the checks before it."""
    assert value is not None
    return value
