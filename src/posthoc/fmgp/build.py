"""Building and training a process of a given form: its units, its inducing points, how outputs are coupled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from posthoc.base import TYPICAL_ROWS, Job
from posthoc.collect.outputs import Outputs
from posthoc.fmgp.fitted import FittedFMGP
from posthoc.fmgp.inducing_points import Inducing, initial_inducing
from posthoc.fmgp.ood import OutOfDistribution
from posthoc.fmgp.output_covariance import OutputCovariance
from posthoc.fmgp.points import Coordinates, DrawnBatches, FreshBatches, PointView, TrainingBatch
from posthoc.fmgp.process import Objective, Process
from posthoc.fmgp.selection import SELECTION, TEMPERATURE_SCALING, HeldOut, VarianceForm
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.temperature import PRIOR, best_inverse
from posthoc.training import History, Ranks, Source, Training, train

if TYPE_CHECKING:
    from posthoc.fmgp.estimator import FMGPConfig

FULL_COUPLING = {"per_output": 32, "separable": 128}
"""Up to this number of outputs B is a full Cholesky factor, by default."""
RANK = 8
"""Default rank of B for more outputs."""
START = 1.0
"""L starts at this multiple of the identity, as in the paper; at zero its gradient would be zero."""
SMALL, SMALL_OUTPUTS = 2e7, 2**23
"""Multiplications in a step's largest product, and outputs of the network, below which one thread is enough."""
WORK_PER_OUTPUT = 20
"""Work for each output of each point in a step, in multiplications."""
LARGE_OUTPUTS = 2**30
"""Outputs of more bytes stay in their file or in the host's memory where a fit reads only some of them."""

FreshSource = Callable[[PointView, Likelihood], Generator[TrainingBatch]]
"""Gives batches from the network, which is run anew at every step."""


@dataclass(frozen=True)
class Trainer:
    """Fits processes of any form, with the options of one fit of `FMGP`.

    Args:
        config: Options of the estimator.
        likelihood: The likelihood before training; each process trains a copy.
        training: How to train.
        candidate_training: How to train a candidate.
        fresh: Source of batches where the outputs of the network are not cached.
    """

    config: FMGPConfig
    likelihood: Likelihood
    training: Training
    candidate_training: Training
    fresh: FreshSource | None = None

    def is_small(self, rows: Outputs) -> bool:
        """Whether one thread fits to these rows as fast as several, which wait for each other on a busy machine."""
        m, batch = self.config.num_inducing, self.training.batch_size
        work = max(m * m * max(m, batch), WORK_PER_OUTPUT * batch * rows.outputs[0].numel())
        return self.fresh is None and work < SMALL and rows.outputs.numel() < SMALL_OUTPUTS

    def fit(self, job: Job, form: VarianceForm, start: FittedFMGP | None = None) -> tuple[FittedFMGP, History]:
        """Builds a process of a form in the units of the data, and trains it with its likelihood. For temperature
        scaling it computes the best temperature. `start` is a fit to other rows, whose kernel, inducing points and B
        training goes on from."""
        likelihood = copy.deepcopy(self.likelihood).to(job.device)
        if form.variance == TEMPERATURE_SCALING.variance:
            typical = job.train.only().spread(TYPICAL_ROWS).to(job.device)
            assert isinstance(likelihood, Categorical)
            assert typical.targets is not None
            likelihood.unit = torch.full_like(
                likelihood.unit, 1.0 / best_inverse(typical.outputs, typical.targets, PRIOR)
            )
            return FittedFMGP(None, None, likelihood), History()
        fitted, view = self.build(job, form, likelihood, start)
        fresh = None if isinstance(job.data, Outputs) else self.fresh
        return fitted, train_fitted(fitted, job, form, self.config.alpha, self.training, view, fresh)

    def fit_and_score(self, part: Job, form: VarianceForm, unseen: Outputs) -> HeldOut:
        """Log-probabilities of held-out rows by a candidate that is trained on others."""
        fitted, _ = replace(self, training=self.candidate_training).fit(part, form)
        log_probs: HeldOut = {0.0: fitted.log_probs(unseen)}
        if self.config.ood_strength is None and part.train.features is not None:
            fitted.add_ood_variance(part.train, SELECTION.ood_strength, form.ood_exponent)
            if fitted.ood is not None:
                log_probs[SELECTION.ood_strength] = fitted.log_probs(unseen)
        return log_probs

    def build(
        self, job: Job, form: VarianceForm, likelihood: Likelihood, start: FittedFMGP | None = None
    ) -> tuple[FittedFMGP, PointView]:
        """A process that is not fitted to these rows, and the rows that it is trained on."""
        config, train, device = self.config, job.train, job.device
        generator = torch.Generator().manual_seed(self.training.seed)
        typical = train.spread(TYPICAL_ROWS).to(device)
        assert typical.targets is not None
        likelihood.initialize(typical.outputs, typical.targets)
        likelihood.set_unit(typical.outputs, typical.targets)
        ood = None
        if form.ood_exponent and typical.features is not None:
            ood = OutOfDistribution.of(typical.features, form.ood_exponent)
        kernel = copy.deepcopy(config.kernel).to(device)
        coordinates = start.coordinates if start is not None else None
        coordinates = coordinates or Coordinates.of(typical, kernel, standardize=config.standardize)
        rows = train.only(*set(coordinates.spaces) - {"outputs"}, *(["features"] if ood is not None else []))
        # Outputs stay where they are if they fill more than half of a GPU, or are large and mostly not read.
        if device.type == "cpu" or (
            rows.nbytes <= torch.cuda.mem_get_info(device)[0] // 2
            and (rows.nbytes <= LARGE_OUTPUTS or self.training.steps * self.training.batch_size >= len(rows))
        ):
            rows = rows.to(device)
        view = PointView(rows, coordinates, ood)
        if start is not None:
            process = copy.deepcopy(start.process)
            process.l_raw.data.copy_(START * torch.eye(len(process.l_raw)))
            return FittedFMGP(process, coordinates, likelihood, ood), view
        kernel.initialize(view.sample(1000, generator), coordinates.default)
        num_outputs = train.outputs[0].numel()
        inducing = initial_inducing(
            config.inducing, config.inducing_classes, config.num_inducing, view, num_outputs, generator
        )
        variance, coupling = "shared" if num_outputs == 1 else form.variance, None
        if variance != "per_output":
            inducing = Inducing(inducing.z, torch.zeros_like(inducing.z_class))
        if variance != "shared":
            rank = config.output_rank or (RANK if num_outputs > FULL_COUPLING[variance] else None)
            coupling = OutputCovariance(num_outputs, rank, generator).to(device)
        process = Process(kernel, inducing, num_outputs, coupling, start=START, separable=variance == "separable")
        return FittedFMGP(process, coordinates, likelihood, ood), view


def train_fitted(
    fitted: FittedFMGP,
    job: Job,
    form: VarianceForm,
    alpha: float,
    training: Training,
    view: PointView,
    fresh: FreshSource | None = None,
) -> History:
    """Trains the parameters of a process and of its likelihood together."""
    process, likelihood, ranks = fitted.process, fitted.likelihood, Ranks()
    one_variance = process.coupling is None or process.separable
    kl_copies = process.num_outputs if one_variance and form.kl == "copies" else 1
    draws = torch.Generator(fitted.device).manual_seed(training.seed) if likelihood.draws else None
    with ExitStack() as stack:
        if fresh is None:
            source: Source = DrawnBatches(view, likelihood, training.batch_size, training.seed, ranks)
        else:  # closed even after an error: a suspended generator would keep the network in eval mode
            source = FreshBatches(stack.enter_context(closing(fresh(view, likelihood))))
        ranks.share(list(fitted.buffers()))
        return train(
            Objective(process, likelihood, alpha, job.num_data, kl_copies, form.prior, draws),
            [*process.parameters(), *likelihood.parameters()],
            source,
            training,
            score=fitted.validation_score(job.val) if job.val is not None else None,
            generator=draws,
            checkpoint=job.checkpoint,
        )


def shortened(training: Training) -> Training:
    """Training in a third of the steps, with up to three times the learning rate."""
    return replace(training, steps=-(-training.steps // 3), lr=min(3 * training.lr, max(training.lr, 0.05)))
