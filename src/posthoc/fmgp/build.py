"""Building and training a process of a given form: where its inducing points start, how outputs are coupled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posthoc.base import Job
from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError, OptionError
from posthoc.fmgp.coordinates import Coordinates
from posthoc.fmgp.fitted import FittedFMGP
from posthoc.fmgp.inducing_points import Inducing, NotKept, given, kmeans, per_class, random_classes, random_points
from posthoc.fmgp.minibatches import DrawnBatches, FreshBatches, PointView
from posthoc.fmgp.objective import Objective, TrainingBatch
from posthoc.fmgp.ood import OutOfDistribution
from posthoc.fmgp.output_covariance import OutputCovariance
from posthoc.fmgp.process import Process
from posthoc.fmgp.selection import TEMPERATURE_SCALING, VarianceForm
from posthoc.kernels import Constant, Kernel
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.temperature import best_inverse
from posthoc.training import History, Ranks, Source, Training, single_thread, train
from posthoc.validation import as_numbers

if TYPE_CHECKING:
    from posthoc.fmgp.estimator import FMGPConfig

__all__ = [
    "START",
    "TYPICAL_ROWS",
    "inducing_owners",
    "inducing_places",
    "train_fitted",
    "train_form",
    "trains_in_parallel",
]

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
TYPICAL_ROWS = 2**16
"""Rows from which units and starting values are computed, at most."""
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
    """Builds a process of a form around the data of a job and trains it.

    Args:
        job: The data.
        form: The form of the variance.
        config: Options of the estimator.
        likelihood: The likelihood before training; it is copied.
        training: How to train.
        device: Where to train.
        fresh: Source of batches where the outputs of the network are not cached.
    """
    if form.variance == TEMPERATURE_SCALING.variance:
        return temperature_scaling(job, config, likelihood, device), History()
    generator = torch.Generator().manual_seed(training.seed)
    likelihood = copy.deepcopy(likelihood).to(device)
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
    view = PointView(placed(job.train.only(*reads), device, training), coordinates, ood)
    kernel.initialize(view.sample(1000, generator), coordinates.default)
    process = build_process(config, form, kernel, view, generator)
    fitted = FittedFMGP(process, coordinates, likelihood, ood)
    history = train_fitted(fitted, job, form, config.alpha, training, view, fresh)
    return fitted, history


def build_process(
    config: FMGPConfig, form: VarianceForm, kernel: Kernel, view: PointView, generator: torch.Generator
) -> Process:
    """An untrained process of a form, with inducing points among the points of the fit."""
    outputs, device = view.outputs, view.coordinates.device
    num_outputs = outputs.outputs[0].numel()
    variance = "shared" if num_outputs == 1 else form.variance
    if isinstance(config.inducing, str) and config.inducing == "per_class":
        if outputs.targets is None:
            raise DataError('inducing="per_class" needs the targets of the points.')
        inducing = per_class(view, outputs.targets, config.num_inducing, generator)
    else:
        z = inducing_places(config.inducing, config.num_inducing, view, generator)
        num_points = len(next(iter(z.values())))
        inducing = Inducing(z, inducing_owners(config.inducing_classes, num_points, num_outputs, generator))
    if variance != "per_output":
        inducing = inducing._replace(z_class=torch.zeros_like(inducing.z_class))
    coupling = None
    if variance != "shared":
        rank = config.output_rank or (RANK if num_outputs > FULL_COUPLING[variance] else None)
        coupling = OutputCovariance(num_outputs, rank, generator).to(device)
    inducing = inducing._replace(z={space: block.to(device) for space, block in inducing.z.items()})
    return Process(kernel, inducing, num_outputs, coupling, start=START, separable=variance == "separable")


def inducing_places(inducing: Any, number: int, view: PointView, generator: torch.Generator) -> dict[str, Tensor]:
    """Where inducing points start: chosen among the points, or as given by the user."""
    if isinstance(inducing, NotKept):
        raise OptionError(
            "Expected the inducing points that were given to the first fit, which the head's file does not hold: "
            "to fit again, build FMGP(..., inducing=points)."
        )
    if isinstance(inducing, str):
        choose = {"kmeans": kmeans, "random": random_points}[inducing]
        return choose(view, number, generator)
    spaces = view.coordinates.spaces
    z = given(inducing, spaces, {space: view.coordinates.width(space) for space in spaces})
    return view.coordinates.standardize(z)


def inducing_owners(inducing_classes: Any, m: int, num_outputs: int, generator: torch.Generator) -> Tensor:  # (m,)
    """The output each inducing point belongs to: as given, or at random."""
    if inducing_classes is None:
        return random_classes(m, num_outputs, generator)
    owners = as_numbers(inducing_classes, torch.long)
    if owners is None:
        raise OptionError(f"Expected {m} inducing_classes, each a number, got {inducing_classes!r}.")
    if owners.shape != (m,) or int(owners.min()) < 0 or int(owners.max()) >= num_outputs:
        raise OptionError(
            f"Expected {m} inducing_classes from 0 to {num_outputs - 1}, got {owners.tolist()[:10]} "
            f"of shape {tuple(owners.shape)}."
        )
    return owners


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
    kl_copies = process.num_outputs if process.one_variance and form.kl == "copies" else 1
    draws = torch.Generator(fitted.device).manual_seed(training.seed) if likelihood.draws else None
    small = is_small(len(process.l_raw), training.batch_size, process.num_outputs)
    with ExitStack() as stack:
        if fresh is None:
            source: Source = DrawnBatches(view, likelihood, training.batch_size, training.seed, ranks)
        else:  # closed even after an error: a suspended generator would keep the network in eval mode
            source = FreshBatches(stack.enter_context(closing(fresh(view, likelihood))))
        stack.enter_context(single_thread(fresh is None and small))
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
    likelihood = copy.deepcopy(likelihood).to(device)
    assert isinstance(likelihood, Categorical)
    assert typical.targets is not None
    likelihood.unit = torch.full_like(likelihood.unit, 1.0 / best_inverse(typical.outputs, typical.targets))
    kernel = Constant(variance=NO_VARIANCE).to(device)
    coordinates = Coordinates.of(typical, kernel, standardize=config.standardize)
    inducing = Inducing(coordinates.points(typical[:1]), torch.zeros(1, dtype=torch.long))
    process = Process(kernel, inducing, typical.outputs.shape[1], None, start=0.0)
    return FittedFMGP(process, coordinates, likelihood, has_variance=False)


def trains_in_parallel(job: Job, config: FMGPConfig, device: torch.device) -> bool:
    """Whether several small processes are trained at the same time, by a thread each."""
    return (
        is_small(config.num_inducing, config.batch_size, job.train.outputs[0].numel())
        and device.type == "cpu"
        and Ranks().alone
        and job.train.nbytes < PARALLEL_BYTES
    )


def is_small(m: int, batch: int, num_outputs: int) -> bool:
    """Whether one thread is enough for m inducing points."""
    return max(m * m * max(m, batch), WORK_PER_OUTPUT * batch * num_outputs) < SMALL


def placed(outputs: Outputs, device: torch.device, training: Training) -> Outputs:
    """Outputs on the device, unless they fill more than half of a GPU or are far more than the fit reads."""
    if device.type == "cuda" and outputs.outputs.device.type == "cpu":
        read = training.steps * training.batch_size
        if outputs.nbytes > torch.cuda.mem_get_info(device)[0] // 2 or (
            outputs.nbytes > LARGE_OUTPUTS and read < len(outputs)
        ):
            return outputs
    return outputs.to(device)
