"""The paper's molecules: a message-passing network for the dipole moments of QM9.

A graph is not a row of numbers. As in the paper, the network up to its last two linear layers is an embedding, and the
methods see the small network from the embedding to the dipole moment.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from reproduction.data.molecules import Molecules, qm9
from reproduction.experiments.experiment import Request
from reproduction.experiments.molecule_network import MoleculeNetwork, embed, head_of, train_network
from reproduction.experiments.regression import VARIANTS, Problem, Regression

__all__ = ["QM9"]

STEPS, QUICK_STEPS, BATCH, WIDTH = 4000, 3, 1024, 128
QUICK_TEST, QUICK_VAL, QUICK_TRAIN = 20, 10, 40
"""Molecules of quick runs."""


class QM9(Regression):
    """Dipole moments, in Debye."""

    name = "qm9"
    title = "QM9: dipole moments of molecules"
    methods = {name: VARIANTS[name] for name in ("map", "lla-kfac", "ella", "fmgp-paper", "fmgp")}  # noqa: RUF012
    cases = ("",)

    def configuration(self, case: str, method: str, request: Request) -> dict[str, Any]:
        network = f"message passing, {WIDTH} wide, {steps_of(request):,} steps"
        return {**self.methods[method].describe(request.quick), "network": network}

    def prepare(self, case: str, seed: int, request: Request) -> Problem:
        molecules = qm9(request.data_dir)
        if request.quick:
            parts = molecules[: QUICK_TEST + QUICK_VAL + QUICK_TRAIN].split(QUICK_TEST, QUICK_VAL)
        else:
            parts = molecules.split()
        network = train_network(
            parts.train, seed=seed, device=request.device, steps=steps_of(request), batch=BATCH, width=WIDTH
        )
        train, val, test = (embedded(network, part, request.device) for part in (parts.train, parts.val, parts.test))
        return Problem(head_of(network).to(request.device), train, val, test, molecules.source)


def steps_of(request: Request) -> int:
    return QUICK_STEPS if request.quick else STEPS


def embedded(network: MoleculeNetwork, molecules: Molecules, device: str) -> tuple[Tensor, Tensor]:
    """Embeddings and dipole moments."""
    outputs = embed(network, molecules, device)
    assert outputs.inputs is not None
    assert outputs.targets is not None
    return outputs.inputs.to(device), outputs.targets.to(device)
