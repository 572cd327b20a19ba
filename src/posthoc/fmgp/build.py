"""Building and training a process of a given form: its units, its inducing points, how outputs are coupled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import torch

from posthoc.base import TYPICAL_ROWS, Job
from posthoc.collect.outputs import Outputs
from posthoc.fmgp.coordinates import Coordinates
from posthoc.fmgp.fitted import FittedFMGP
from posthoc.fmgp.inducing_points import Inducing, initial_inducing
from posthoc.fmgp.minibatches import DrawnBatches, FreshBatches, PointView, TrainingBatch
from posthoc.fmgp.objective import Objective
from posthoc.fmgp.ood import OutOfDistribution
from posthoc.fmgp.output_covariance import OutputCovariance
from posthoc.fmgp.process import Process
from posthoc.fmgp.selection import TEMPERATURE_SCALING, VarianceForm
from posthoc.kernels import Constant
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.temperature import best_inverse
from posthoc.training import History, Ranks, Source, Training, single_thread, train

if TYPE_CHECKING:
    from posthoc.fmgp.estimator import FMGPConfig

__all__ = ["START", "train_fitted", "train_form", "trains_in_parallel"]

FULL_COUPLING = {"per_output": 32, "separable": 128}
"""Up to this number of outputs B is a full Cholesky factor, by default."""
RANK = 8
"""Default rank of B for more outputs."""
START = 1.0
"""L starts at this multiple of the identity, as in the paper; at zero its gradient would be zero."""
SMALL = 2e7
"""Multiplications in a step's largest product, below which more threads cost more than they save."""
WORK_PER_OUTPUT = 20
"""Work for each output of each point in a step, in multiplications."""
LARGE_OUTPUTS = 2**30
"""Outputs of more bytes stay in their file or in the host's memory where a fit reads only some of them."""
PARALLEL_BYTES = 2**28
"""Outputs of more bytes are fitted one candidate after the other, since each candidate copies most of them."""

NO_VARIANCE = 1e-12
"""Variance of the kernel that stands for the absent one of temperature scaling."""

FreshSource = Callable[[PointView, Likelihood], Generator[TrainingBatch]]
"""Gives batches from the network, which is run anew at every step."""


def train_form(
    job: Job,
    form: VarianceForm,
    config: FMGPConfig,
    likelihood: Likelihood,
    training: Training,
    device: torch.device,
    fresh: FreshSource | None = None,
) -> tuple[FittedFMGP, History]:
    """Builds a process of a form around the data of a job and trains it with its likelihood.

    Args:
        job: The data.
        form: The form of the variance.
        config: Options of the estimator.
        likelihood: The likelihood before training; it is copied.
        training: How to train.
        device: Where to train.
        fresh: Source of batches where the outputs of the network are not cached.
    """
    likelihood = copy.deepcopy(likelihood).to(device)
    if form.variance == TEMPERATURE_SCALING.variance:
        return temperature_scaling(job, config, likelihood, device), History()
    fitted, view = build(job, form, config, likelihood, training, device)
    return fitted, train_fitted(fitted, job, form, config.alpha, training, view, fresh)


def build(
    job: Job,
    form: VarianceForm,
    config: FMGPConfig,
    likelihood: Likelihood,
    training: Training,
    device: torch.device,
) -> tuple[FittedFMGP, PointView]:
    """An untrained process of a form in the units of the data, and the rows that it is trained on."""
    generator = torch.Generator().manual_seed(training.seed)
    typical = job.train.spread(TYPICAL_ROWS).to(device)
    assert typical.targets is not None
    likelihood.initialize(typical.outputs, typical.targets)
    likelihood.set_unit(typical.outputs, typical.targets)
    ood = None
    if form.ood_exponent and typical.features is not None:
        ood = OutOfDistribution.of(typical.features, form.ood_exponent)
    kernel = copy.deepcopy(config.kernel).to(device)
    coordinates = Coordinates.of(typical, kernel, standardize=config.standardize)
    reads = set(coordinates.spaces) - {"outputs"} | ({"features"} if ood is not None else set())
    rows = job.train.only(*reads)
    # Outputs stay where they are if they fill more than half of a GPU, or are large and mostly not read.
    if device.type == "cpu" or (
        rows.nbytes <= torch.cuda.mem_get_info(device)[0] // 2
        and (rows.nbytes <= LARGE_OUTPUTS or training.steps * training.batch_size >= len(rows))
    ):
        rows = rows.to(device)
    view = PointView(rows, coordinates, ood)
    kernel.initialize(view.sample(1000, generator), coordinates.default)
    num_outputs = rows.outputs[0].numel()
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
    ranks.share(list(fitted.buffers()))
    one_variance = process.coupling is None or process.separable
    kl_copies = process.num_outputs if one_variance and form.kl == "copies" else 1
    draws = torch.Generator(fitted.device).manual_seed(training.seed) if likelihood.draws else None
    with ExitStack() as stack:
        if fresh is None:
            source: Source = DrawnBatches(view, likelihood, training.batch_size, training.seed, ranks)
            small = is_small(len(process.l_raw), training.batch_size, process.num_outputs)
            stack.enter_context(single_thread(small))
        else:  # closed even after an error: a suspended generator would keep the network in eval mode
            source = FreshBatches(stack.enter_context(closing(fresh(view, likelihood))))
        return train(
            Objective(process, likelihood, alpha, job.num_data, kl_copies, form.prior, draws),
            [*process.parameters(), *likelihood.parameters()],
            source,
            training,
            score=fitted.validation_score(job.val) if job.val is not None else None,
            generator=draws,
            checkpoint=job.checkpoint,
        )


def temperature_scaling(job: Job, config: FMGPConfig, likelihood: Likelihood, device: torch.device) -> FittedFMGP:
    """Temperature scaling, as a process without variance."""
    typical = job.train.only().spread(TYPICAL_ROWS).to(device)
    assert isinstance(likelihood, Categorical)
    assert typical.targets is not None
    likelihood.unit = torch.full_like(likelihood.unit, 1.0 / best_inverse(typical.outputs, typical.targets))
    kernel = Constant(variance=NO_VARIANCE).to(device)
    coordinates = Coordinates.of(typical, kernel, standardize=config.standardize)
    inducing = Inducing(coordinates.points(typical[:1]), torch.zeros(1, dtype=torch.long))
    process = Process(kernel, inducing, typical.outputs.shape[1], None, start=0.0)
    return FittedFMGP(process, coordinates, likelihood, has_variance=False)


def trains_in_parallel(outputs: Outputs, config: FMGPConfig, device: torch.device) -> bool:
    """Whether several small processes are trained at the same time, by a thread each."""
    small = is_small(config.num_inducing, config.batch_size, outputs.outputs[0].numel())
    return small and device.type == "cpu" and Ranks().alone and outputs.nbytes < PARALLEL_BYTES


def is_small(m: int, batch: int, num_outputs: int) -> bool:
    """Whether one thread is enough for m inducing points."""
    return max(m * m * max(m, batch), WORK_PER_OUTPUT * batch * num_outputs) < SMALL
