"""How a head is made: built from the data of a job, and trained as a plan says."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass

import torch

from posthoc.base import Job
from posthoc.collect.outputs import Outputs
from posthoc.fmgp.build import Layout, build
from posthoc.fmgp.coordinates import Coordinates, DrawnBatches, FreshBatches, PointView
from posthoc.fmgp.fitted import Head
from posthoc.fmgp.inducing_points import Inducing
from posthoc.fmgp.objective import Objective, TrainingBatch
from posthoc.fmgp.ood import Novelty
from posthoc.fmgp.process import Process
from posthoc.fmgp.scoring import validation_score
from posthoc.fmgp.selection import SCALED, Plan
from posthoc.kernels.base import Constant, Kernel
from posthoc.likelihoods.base import Categorical, Likelihood
from posthoc.likelihoods.temperature import best_inverse
from posthoc.training import History, Ranks, Source, Training, single_thread, train

__all__ = ["SMALL", "TYPICAL", "Maker"]

SMALL = 2e7
"""Multiplications in a step's largest product, below which threads cost more than they save."""
TYPICAL = 2**16
"""Rows that units are taken from."""
PASSES = 20
"""Multiplications' worth of work for each output of each point."""
KEPT_AWAY = 2**30
"""Outputs of more bytes stay in their file or in the host's memory, if a fit reads only some of them."""
BESIDE_OTHERS = 2**28
"""Bytes of outputs, from which on heads are made one after the other: each has a copy of most of them."""
NOTHING = 1e-12
"""The variance where there is none: that of temperature scaling."""


@dataclass(frozen=True)
class Maker:
    """Makes heads: the options of `FMGP` that decide what one becomes, beside its plan and how it is trained."""

    kernel: Kernel
    likelihood: Likelihood
    layout: Layout
    alpha: float
    standardize: bool
    device: torch.device
    """Where the head will live."""
    fresh: Callable[[PointView, Likelihood], Generator[TrainingBatch]] | None = None
    """Gives batches from the network, run anew at every step; None where its outputs are known."""

    def train(
        self, job: Job, plan: Plan, training: Training, likelihood: Likelihood | None = None
    ) -> tuple[Head, History]:
        """A head for the data of a job. Everything is built beside what is there: a failed fit changes nothing."""
        if plan.variance == SCALED.variance:
            return self._scaled(job), History()
        ranks, seed, device = Ranks(), training.seed, self.device
        generator = torch.Generator().manual_seed(seed)
        likelihood = copy.deepcopy(likelihood or self.likelihood).to(device)
        typical = job.train.spread(TYPICAL).to(device)
        assert typical.targets is not None
        likelihood.start(typical.outputs, typical.targets)
        if isinstance(likelihood, Categorical):
            likelihood.take_unit(typical)
        novelty = Novelty.of(typical.features, plan.slope) if plan.slope and typical.features is not None else None
        kernel = copy.deepcopy(self.kernel).to(device)
        coordinates = Coordinates.of(typical, kernel, standardize=self.standardize)
        reads = set(coordinates.spaces) - {"outputs"} | ({"features"} if novelty is not None else set())
        outputs = placed(job.train.only(*reads), device, training)
        view = PointView(outputs, coordinates, novelty)
        kernel.start(view.sample(1000, generator), coordinates.default)
        process = build(self.layout, plan, kernel, view, outputs, generator)
        head = Head(process, coordinates, likelihood, novelty)
        ranks.share(list(head.buffers()))
        copies = process.num_outputs if process.one_variance and plan.kl == "copies" else 1
        draws = torch.Generator(device).manual_seed(seed) if likelihood.draws else None
        with ExitStack() as stack:
            if self.fresh is None:
                source: Source = DrawnBatches(view, likelihood, training.batch_size, seed, ranks)
            else:  # closed whatever happens: suspended batches would keep the network in eval mode
                source = FreshBatches(stack.enter_context(closing(self.fresh(view, likelihood))))
            small = is_small(len(process.l_raw), training.batch_size, process.num_outputs)
            stack.enter_context(single_thread(self.fresh is None and small))
            history = train(
                Objective(process, likelihood, self.alpha, job.num_data, copies, plan.prior, draws),
                head.parameters(),
                source,
                training,
                score=validation_score(head, job.val) if job.val is not None else None,
                generator=draws,
                checkpoint=job.checkpoint,
            )
        return head, history

    def beside_others(self, job: Job, training: Training) -> bool:
        """Whether several such heads should be made at once, by a thread each."""
        small = is_small(self.layout.num_inducing, training.batch_size, job.train.outputs[0].numel())
        return (
            small
            and self.fresh is None
            and self.device.type == "cpu"
            and Ranks().alone
            and job.train.nbytes < BESIDE_OTHERS
        )

    def _scaled(self, job: Job) -> Head:
        """Temperature scaling: no variance to speak of."""
        typical = job.train.only().spread(TYPICAL).to(self.device)  # it looks at outputs alone
        likelihood = copy.deepcopy(self.likelihood).to(self.device)
        assert isinstance(likelihood, Categorical)
        likelihood.unit = torch.full_like(likelihood.unit, 1.0 / best_inverse(typical))
        kernel = Constant(variance=NOTHING).to(self.device)
        coordinates = Coordinates.of(typical, kernel, standardize=self.standardize)
        inducing = Inducing(coordinates.points(typical[:1]), torch.zeros(1, dtype=torch.long))
        return Head(Process(kernel, inducing, typical.outputs.shape[1], None, start=0.0), coordinates, likelihood)


def is_small(m: int, batch: int, num_outputs: int) -> bool:
    """Whether one thread is enough for m inducing points."""
    return max(m * m * max(m, batch), PASSES * batch * num_outputs) < SMALL


def placed(outputs: Outputs, device: torch.device, training: Training) -> Outputs:
    """Outputs beside the head, unless they are too many for a GPU, or more than the fit will look at."""
    if device.type == "cuda" and outputs.outputs.device.type == "cpu":
        read = training.steps * training.batch_size
        if outputs.nbytes > torch.cuda.mem_get_info(device)[0] // 2 or (
            outputs.nbytes > KEPT_AWAY and read < len(outputs)
        ):
            return outputs
    return outputs.to(device)
