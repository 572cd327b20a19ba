"""Which form of variance a classifier gets where none was asked for, decided on rows that the candidates have not seen.

Temperature scaling, the case of a variance that is the same everywhere, is always among them: nothing is chosen that is
worse than it. The same rows say by how much the winner's confidence is to be corrected, since a variance that was
fitted to some rows is a little too sure of others, and whether being wary of new kinds of points harms known ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from posthoc.base import Job
from posthoc.collect.outputs import Outputs
from posthoc.likelihoods.recalibration import NONE, Recalibration
from posthoc.predictive.calibration_error import expected_calibration_error
from posthoc.training import Training, run_parallel

__all__ = [
    "CALM",
    "CAUTIOUS",
    "FEWEST",
    "PRIORS",
    "SCALED",
    "WARY",
    "Decision",
    "Plan",
    "Trial",
    "candidates",
    "choose",
    "shortened",
]

T = TypeVar("T")

FEWEST = 200
"""Rows below which a choice would be noise."""
FOLDS = 3
"""So many parts of the data are held out in turn,"""
ENOUGH = 10_000
"""until so many rows, or all, were held out."""
MOST = 60_000
"""Rows that are looked at for it."""
VALUES = 2**22
"""Log-probabilities that are kept for it."""
ROWS_AN_OUTPUT = 10
"""With fewer rows for each output, B is not learnt."""
ROWS_OF_ITS_OWN, FEW_OUTPUTS = 100, 32
"""With so many, and few outputs, each may have a variance of its own."""
PRIORS = (3.0, 10.0, 100.0)
"""How strongly B is held near the identity: little is right for many rows a class, more for few."""
CLEAR = 2.0
"""So many standard errors make a difference: who is that much better than temperature scaling may take its place, who
is that much worse is not tried again."""
CALIBRATION_SLACK, CALIBRATION_PRICE = 0.005, 20.0
"""A calibration error so much above temperature scaling's is free; beyond, 0.005 more must earn a tenth of the loss."""
WARY_PRICE = 0.003
"""The share of the loss that being wary of new kinds of points may add."""
CALM, WARY = 0.0, 1.0
"""What is tried: how steeply the variance grows beyond the known points cannot be learnt from them."""


class Plan(NamedTuple):
    """A form of the variance, how its KL is counted, how strongly B is held near the identity, and the power of the
    features' distance that the scale of logits follows."""

    variance: str
    kl: str = "once"
    prior: float = 0.0
    slope: float = 0.0


SCALED = Plan("none")
"""Temperature scaling. It has a slope only where it is wary."""
CAUTIOUS = Plan("shared", "copies")
"""For few rows, from which no more can be learnt; and for changed views of known images, which are not quite what is to
come: the more freely a variance can vary, the more it learns of what tells them from plain ones."""


class Decision(NamedTuple):
    """The plan, how its confidence is corrected, and how wary it is of new kinds of points."""

    plan: Plan
    recalibration: Recalibration = NONE
    wariness: float = CALM


Trial = dict[float, Tensor]
"""Log-probabilities (N, C) of rows that a candidate has not seen, by how wary it is of new kinds of points."""


class Record:
    """What is known of a candidate so far."""

    def __init__(self) -> None:
        self.parts: dict[float, list[Tensor]] = {}

    def add(self, trial: Trial) -> None:
        for wariness, log_p in trial.items():
            self.parts.setdefault(wariness, []).append(log_p.float())

    def __getitem__(self, wariness: float) -> Tensor:  # (N, C)
        return torch.cat(self.parts[wariness])

    @property
    def plain(self) -> Tensor:  # (N, C)
        """Without any wariness."""
        return self[CALM]


def shortened(training: Training) -> Training:
    """How to train a candidate: a third of the steps, three times as long if that is not too long."""
    return replace(training, steps=-(-training.steps // 3), lr=min(3.0 * training.lr, max(training.lr, 0.05)))


def candidates(rows: int, num_outputs: int) -> list[Plan]:
    """The forms worth trying, beside temperature scaling."""
    if rows < ROWS_AN_OUTPUT * num_outputs:
        return [Plan("shared")]
    little, more, _ = PRIORS
    if rows < ROWS_OF_ITS_OWN * num_outputs or num_outputs > FEW_OUTPUTS:
        return [Plan("separable", prior=prior) for prior in PRIORS]
    return [Plan("separable", prior=little), Plan("separable", prior=more), Plan("per_output", prior=little)]


def choose(
    job: Job, plans: list[Plan], attempt: Callable[[Job, Plan, Outputs], Trial], beside: bool = False
) -> Decision:
    """The best of the plans and temperature scaling, by what `attempt` predicts for rows it was not given. `beside`
    says whether attempts are made side by side."""
    scaled = SCALED._replace(slope=plans[0].slope if plans else 0.0)
    records = {plan: Record() for plan in (scaled, *plans)}
    targets: list[Tensor] = []
    for group in grouped(trials(job), beside):
        plans = list(records)
        tasks = [partial(attempt, trial, plan, unseen) for trial, unseen in group for plan in plans]
        found = iter(run_parallel(tasks, beside))
        for _, unseen in group:
            for plan, said in zip(plans, found, strict=False):
                if plan in records:
                    records[plan].add(said)
            assert unseen.targets is not None
            home = records[scaled].plain.device  # rows may be kept on the host, away from the head
            targets.append(unseen.targets.long().to(home))
            records = hopeful(records, torch.cat(targets))
            if len(records) == 1:
                return verdict(records, torch.cat(targets))
    return verdict(records, torch.cat(targets))


def grouped(parts: Iterable[T], beside: bool) -> Iterator[list[T]]:
    """One by one; or, side by side, the first, after which some candidates may be given up, and all others."""
    rest = iter(parts)
    for first in rest:
        yield [first]
        if beside and (others := list(rest)):
            yield others


def trials(job: Job) -> Iterator[tuple[Job, Outputs]]:
    """Jobs on some rows, and rows that each has not seen: the validation data, or each part of the data in turn."""
    if job.val is not None:
        yield replace(job, data=job.train, checkpoint=None), job.val.spread(kept(job.val))
        return
    rows = job.train.spread(MOST)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).to(rows.outputs.device)
    most, seen = kept(rows), 0
    for part in order.tensor_split(FOLDS):
        held_out = part[:most]
        others = torch.ones(len(rows), dtype=torch.bool, device=order.device).index_fill(0, held_out, False)
        train = rows[others.nonzero().squeeze(-1)]
        yield job.part(train), rows[held_out]
        seen += len(held_out)
        if seen >= most:
            return


def kept(rows: Outputs) -> int:
    """How many rows to hold out in all."""
    return max(1, min(ENOUGH, VALUES // rows.outputs[0].numel()))


def hopeful(records: dict[Plan, Record], y: Tensor) -> dict[Plan, Record]:
    """Those that are not clearly worse than temperature scaling, which comes first. Who is worse than another candidate
    stays: it may be the better calibrated one, which few rows do not show."""
    scaled = next(iter(records))
    base = losses(records[scaled].plain, y)

    def loss_of(record: Record) -> Tensor:
        return losses(NONE.again(record.plain, y).log_probs(record.plain), y)

    return {p: record for p, record in records.items() if p == scaled or gain(loss_of(record), base) > -CLEAR}


def verdict(records: dict[Plan, Record], y: Tensor) -> Decision:
    first, *others = records
    scaled = records[first].plain
    base = losses(scaled, y)
    best, best_score, recalibration = first, 1.0, NONE
    for plan, record in ((plan, records[plan]) for plan in others):
        correction = Recalibration.of(record.plain, y)
        log_p = correction.log_probs(record.plain)
        score = float(losses(log_p, y).mean() / base.mean()) + price(log_p, scaled, y)
        if gain(losses(log_p, y), base) > CLEAR and score < best_score:
            best, best_score, recalibration = plan, score, correction
    return with_wariness(Decision(best, recalibration), records[best], y, most=float(base.mean()))


def price(log_p: Tensor, scaled: Tensor, y: Tensor) -> float:
    """What is asked, as a share of temperature scaling's loss, of those that are less well calibrated than it."""
    excess = calibration_error(log_p, y) - calibration_error(scaled, y)
    return CALIBRATION_PRICE * max(0.0, excess - CALIBRATION_SLACK)


def gain(found: Tensor, base: Tensor) -> float:
    """By how many standard errors losses are lower than others on the same rows."""
    less = base - found
    return float(less.mean() / (less.std() / len(less) ** 0.5).clamp_min(1e-300))


def with_wariness(plain: Decision, record: Record, y: Tensor, most: float) -> Decision:
    """Wary, with the confidence corrected for it, if that costs known points next to nothing and leaves no greater loss
    than `most`."""
    if WARY not in record.parts:
        return plain
    log_p = record[WARY]
    corrections = Recalibration.of(log_p, y), plain.recalibration.again(log_p, y)  # anew, or with the same bend
    decisions = [Decision(plain.plan, correction, WARY) for correction in corrections]
    wary = min(decisions, key=lambda decision: expected_loss(decision, record, y))
    allowed = min((1.0 + WARY_PRICE) * expected_loss(plain, record, y), most)
    return wary if expected_loss(wary, record, y) <= allowed else plain


def expected_loss(decision: Decision, record: Record, y: Tensor) -> float:
    """The loss on other rows: each number that was fitted to these makes them look better by 1/N (Akaike, 1974)."""
    correction = decision.recalibration
    numbers = (correction != NONE) + (correction.bend != 0.0)
    return float(losses(correction.log_probs(record[decision.wariness]), y).mean()) + numbers / len(y)


def losses(log_p: Tensor, y: Tensor) -> Tensor:  # (N,)
    return -log_p.double().gather(-1, y[:, None]).squeeze(-1)


def calibration_error(log_p: Tensor, y: Tensor, bins: int = 15) -> float:
    """The expected calibration error, in bins of equal width."""
    confidence, label = log_p.double().exp().max(-1)
    return float(expected_calibration_error(confidence, label == y, bins))
