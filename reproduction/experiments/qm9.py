"""The paper's molecules: a message-passing network for the dipole moments of QM9.

Graphs are no rows of numbers. As in the paper, the network up to its last two linear layers is an embedding, the data
are taken to live there, and what the methods see is the small network from the embedding to the moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from reproduction.data.molecules import Molecules, qm9
from reproduction.experiments.experiment import Experiment, Request
from reproduction.experiments.molecule_network import MoleculeNetwork, embed, head_of, train_network
from reproduction.experiments.regression import VARIANTS, given, run
from reproduction.experiments.tabular import Problem
from reproduction.plots import dot_figure

__all__ = ["QM9"]

STEPS, QUICK_STEPS, BATCH, WIDTH = 4000, 3, 1024, 128
QUICK = (20, 10, 40)
"""Molecules for testing, validation and training."""


class QM9(Experiment):
    """Dipole moments, in Debye."""

    name = "qm9"
    title = "QM9: dipole moments of molecules"
    task = "regression"
    methods = {name: VARIANTS[name] for name in ("map", "lla-kfac", "ella", "fmgp-paper", "fmgp")}  # noqa: RUF012

    def configuration(self, case: str, method: str, request: Request) -> dict[str, Any]:
        steps = QUICK_STEPS if request.quick else STEPS
        network = f"message passing, {WIDTH} wide, {steps:,} steps"
        return {**VARIANTS[method].describe(request.quick), "network": network}

    def prepare(self, case: str, seed: int, request: Request) -> Problem:
        molecules = qm9(request.data_dir)
        if request.quick:
            molecules = molecules[: sum(QUICK)]
        parts = molecules.split(*QUICK[:2]) if request.quick else molecules.split()
        steps = QUICK_STEPS if request.quick else STEPS
        network = train_network(parts.train, seed=seed, device=request.device, steps=steps, batch=BATCH, width=WIDTH)
        train, val, test = (embedded(network, part, request.device) for part in (parts.train, parts.val, parts.test))
        return Problem(head_of(network).to(request.device), train, val, test, molecules.source)

    def work(self, prepared: Problem, case: str, method: str, seed: int, request: Request) -> Mapping[str, Any]:
        variant = VARIANTS[method]
        return run(variant, given(variant, prepared), prepared, seed, request)

    def draw(self, documents: list[dict[str, Any]], folder: Path) -> list[Path]:
        return dot_figure(folder / "figure", documents, {"nll": "NLL", "crps": "CRPS", "cqm": "CQM"})


def embedded(network: MoleculeNetwork, molecules: Molecules, device: str) -> tuple[Tensor, Tensor]:
    """Molecules as the methods see them, and their moments."""
    outputs = embed(network, molecules, device)
    assert outputs.inputs is not None
    assert outputs.targets is not None
    return outputs.inputs.to(device), outputs.targets.to(device)
