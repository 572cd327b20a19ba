"""The network for molecules: invariances and training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from posthoc import OptionError
from posthoc.errors import DataError, TrainingError
from reproduction.data.molecules import Molecules
from reproduction.experiments import molecule_network
from reproduction.experiments.molecule_network import (
    EMBEDDING,
    HIDDEN,
    MoleculeNetwork,
    complete_graphs,
    embed,
    head_of,
    train_network,
)


def some(count: int, seed: int = 0) -> Molecules:
    """Atoms in space, about as far apart as those of molecules; the target is |Σ Z r| about their center."""
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 7, (count,), generator=g)
    atoms = int(sizes.sum())
    kinds = torch.tensor([1, 6, 7, 8, 9], dtype=torch.uint8)[torch.randint(5, (atoms,), generator=g)]
    positions = 1.5 * torch.randn(atoms, 3, generator=g)
    parts = zip(kinds.float().split(sizes.tolist()), positions.split(sizes.tolist()), strict=True)
    targets = torch.stack([(z @ (r - r.mean(0))).norm() for z, r in parts])
    return Molecules("some", "made here", kinds, positions, sizes, targets)


@pytest.fixture
def network() -> MoleculeNetwork:
    pytest.importorskip("torch_geometric", reason="torch-geometric is not installed (extra reproduction)")
    torch.manual_seed(0)
    return MoleculeNetwork(width=8, layers=2).double().eval()


def precisely(molecules: Molecules, positions: torch.Tensor | None = None) -> Molecules:
    return replace(molecules, positions=(molecules.positions if positions is None else positions).double())


def test_complete_graphs():
    sizes = [3, 1, 2, 5, 1]
    expected, first = [], 0
    for size in sizes:
        atoms = range(first, first + size)
        expected += [(source, target) for target in atoms for source in atoms if source != target]
        first += size
    assert [tuple(edge) for edge in complete_graphs(torch.tensor(sizes)).T.tolist()] == expected
    assert complete_graphs(torch.tensor([1, 1])).shape == (2, 0)


def test_molecules_of_a_batch_are_independent(network):
    batch = precisely(some(12))
    together = network.features(batch)
    assert together.shape == (12, EMBEDDING)
    alone = torch.cat([network.features(batch[i]) for i in range(12)])
    torch.testing.assert_close(alone, together)
    backwards = network.features(batch[list(range(11, -1, -1))])
    torch.testing.assert_close(backwards.flip(0), together)
    assert float(together.detach().std(0).min()) > 0  # molecules differ in all of it


def test_the_order_of_atoms_does_not_matter(network):
    batch = some(9)
    one = precisely(batch[int(batch.sizes.argmax())])
    order = torch.randperm(len(one.kinds), generator=torch.Generator().manual_seed(1))
    other = Molecules("", "", one.kinds[order], one.positions[order], one.sizes, one.targets)
    torch.testing.assert_close(network(other), network(one))
    swapped = Molecules("", "", one.kinds.roll(1), one.positions, one.sizes, one.targets)
    assert not torch.allclose(network(swapped), network(one))  # which element is where does matter


def test_rotations_and_translations_do_not_matter(network):
    batch = precisely(some(10))
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))).Q
    moved = precisely(batch, batch.positions @ turn + torch.tensor([3.0, -20.0, 7.0]))
    torch.testing.assert_close(network.features(moved), network.features(batch))
    stretched = precisely(batch, 1.1 * batch.positions)
    assert not torch.allclose(network(stretched), network(batch))


def test_dipoles_are_norms_of_charges_times_positions(network):
    batch = precisely(some(6))
    charges = torch.randn(len(batch.kinds), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    owners = torch.arange(6).repeat_interleave(batch.sizes)
    parts = zip(*(part.split(batch.sizes.tolist()) for part in (charges, batch.positions)), strict=True)
    expected = torch.stack([((q - q.mean(0)).T @ r).norm(dim=1) for q, r in parts])
    torch.testing.assert_close(network.dipoles(charges, batch, owners), expected, atol=2e-3, rtol=1e-4)


def test_gradients_of_single_atoms_are_finite(network):
    batch = precisely(some(3)[[0, 0]])
    single = Molecules("", "", batch.kinds[:2], batch.positions[:2], torch.tensor([1, 1]), batch.targets)
    network(single).sum().backward()
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    assert len(gradients) > 10
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


def test_embeddings(network):
    network.float()
    batch = some(11)
    outputs = embed(network, batch, batch=4)
    assert outputs.inputs is not None
    assert outputs.features is not None
    assert outputs.targets is not None
    torch.testing.assert_close(outputs.inputs, network.features(batch))
    torch.testing.assert_close(outputs.outputs, network(batch))
    assert outputs.targets.tolist() == batch.targets[:, None].tolist()
    assert outputs.features.shape == (11, HIDDEN)
    assert float(outputs.features.min()) == 0  # after ReLU
    head = head_of(network)
    torch.testing.assert_close(head(outputs.inputs), outputs.outputs)
    torch.testing.assert_close(head[-1](outputs.features), outputs.outputs)
    with torch.no_grad():
        head[0].weight.zero_()
    assert not torch.equal(head(outputs.inputs), network(batch))  # a copy


def test_it_learns(network):
    lines = []
    data, new = some(400), some(200, seed=1)
    learned = train_network(data, seed=0, steps=80, batch=40, width=16, layers=1, learning_rate=5e-3, log=lines.append)
    assert not learned.training
    assert len(lines) == 10
    assert lines[-1].startswith("step 80:")
    outputs = embed(learned, new)
    error = (outputs.outputs - outputs.targets).abs().mean()
    assert error < 0.4 * (new.targets - data.targets.mean()).abs().mean()  # in the targets' own units
    assert float(lines[-1].split("error ")[1].split()[0]) == pytest.approx(float(error), rel=0.4)


def test_the_seed_determines_the_network(network):
    def trained(seed: int) -> MoleculeNetwork:
        torch.rand(seed + 1)  # what is drawn elsewhere does not matter
        return train_network(some(50), seed=seed, steps=4, batch=20, width=8, layers=1)

    before = torch.get_rng_state()
    once, again, other = (trained(seed) for seed in (0, 0, 1))
    torch.set_rng_state(before)
    assert all(torch.equal(a, b) for a, b in zip(once.parameters(), again.parameters(), strict=True))
    assert not torch.equal(once.charges.weight, other.charges.weight)
    train_network(some(50), seed=0, steps=1, batch=20, width=8, layers=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_last_layer_starts_in_the_units_of_the_targets(network):
    batch = precisely(some(8))
    targets = 500 + 10 * batch.targets
    before = network(batch) - network.head[-1].bias
    spread = molecule_network.scale_last_layer(network, targets)
    assert spread == pytest.approx(float((targets - targets.mean()).square().mean().sqrt()))
    torch.testing.assert_close(network(batch), spread * before + float(targets.mean()), rtol=1e-5, atol=1e-5)


def test_batches_are_epochs():
    rows = molecule_network.batches(10, 4, seed=0)
    epochs = [torch.cat([next(rows), next(rows)]).tolist() for _ in range(3)]
    assert all(len(set(epoch)) == 8 for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert sorted(next(molecule_network.batches(3, 4, seed=0)).tolist()) == [0, 1, 2]


def test_the_learning_rate_rises_and_falls():
    rates = [molecule_network.schedule(share / 100) for share in range(101)]
    assert rates.index(max(rates)) == 2
    assert 0 < rates[0] < rates[1]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[50] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"steps": 0}, "steps to be an integer of at least 1"),
        ({"steps": 3, "batch": 0}, "batch to be an integer"),
        ({"steps": 3, "layers": 0}, "layers to be an integer"),
        ({"steps": 3, "device": "abacus"}, "abacus"),
    ],
)
def test_invalid_options(network, wrong, words):
    with pytest.raises(OptionError, match=words):
        train_network(some(5), seed=0, **wrong)


def test_data_that_cannot_be_fitted(network):
    flat = some(6)[[1, 1, 1]]
    with pytest.raises(DataError, match="targets that differ"):
        train_network(flat, seed=0, steps=1, width=8)
    with pytest.raises(TrainingError, match="lower learning_rate"):
        train_network(some(50), seed=0, steps=40, batch=50, width=8, learning_rate=1e30)
