"""Many classes, many rows: no tensor grows with classes x inducing points, and no step with the number of rows."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from posthoc import FMGP, Outputs
from posthoc.base import MOST_OUTPUTS, TYPICAL_ROWS
from posthoc.collect import open_outputs
from posthoc.collect.data_warnings import ROWS
from posthoc.collect.folder import Manifest
from posthoc.fmgp import selection
from posthoc.fmgp.build import RANK
from posthoc.fmgp.output_covariance import CoupledLatent, LowRankLatent, OutputCovariance
from posthoc.fmgp.points import MAX_BATCHES, MAX_VALUES, DrawnBatches
from posthoc.likelihoods.temperature import TYPICAL as SUITABLE
from posthoc.predictive.latent import Latent
from posthoc.training.loop import PlainSteps
from tests.test_checkpoint import end_of, start

CLASSES, BATCH, M, WIDTH = 2000, 50, 30, 5
FORMS: dict[str, dict[str, Any]] = {
    "shared": {"variance": "shared"},
    "separable": {"variance": "separable"},
    "low rank": {"variance": "per_output"},
}


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes, forwards or backwards; views of another make nothing."""

    numbers = 0
    shape: tuple[int, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {memory(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and memory(tensor) not in given and tensor.numel() > self.numbers:
                self.numbers, self.shape = tensor.numel(), tuple(tensor.shape)
        return made


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def many(n: int, classes: int = CLASSES, seed: int = 0) -> Outputs:
    g = torch.Generator().manual_seed(seed)
    target = torch.randint(classes, (n,), generator=g)
    return Outputs(torch.randn(n, classes, generator=g), target, torch.randn(n, WIDTH, generator=g))


def bound(rows: int) -> int:
    """The largest tensor that a step, or a prediction, of so many rows may make. `rows x C` are the logits; the rest
    is `LowRankLatent`'s: Q and Qᵀs, QᵀQ and F's outer products (C x r², once, whatever the rows)."""
    together = rows + M  # rows and inducing points, whose kernel is evaluated at once
    allowed = max(rows * CLASSES, rows * RANK * M, CLASSES * RANK**2, together * M, together * WIDTH)
    assert rows * M * CLASSES > 10 * allowed  # what the dense form would make is far above
    return allowed


@pytest.mark.parametrize("form", FORMS)
def test_no_step_fit_or_prediction_makes_a_tensor_of_rows_x_inducing_points_x_classes(form, monkeypatch):
    """Nor do they read or make more than a few batches at once."""
    outputs, steps, step, in_steps = many(100), 25, PlainSteps.step, Largest()

    def watched(*args):
        with in_steps:
            return step(*args)

    monkeypatch.setattr(PlainSteps, "step", watched)
    options = {"num_inducing": M, "batch_size": BATCH, "steps": steps, "eval_every": steps, **FORMS[form]}
    with Largest() as seen:
        method = FMGP(None, "classification", **options).fit(outputs, val=outputs[:60])
    assert BATCH * CLASSES <= in_steps.numbers <= bound(BATCH), in_steps.shape
    assert steps * BATCH * CLASSES > 2 * MAX_VALUES
    assert seen.numbers <= max(bound(60), MAX_VALUES), seen.shape
    assert BATCH * M * CLASSES > MAX_VALUES
    with Largest() as seen:
        method.predict(many(60))
    assert 60 * CLASSES <= seen.numbers <= bound(60), seen.shape
    outputs = many(2500)
    with Largest() as seen:
        assert sum(map(len, method.stream(outputs))) == 2500
    assert seen.numbers <= MOST_OUTPUTS, seen.shape  # a part at a time, however many rows there are


OWNERS: dict[str, tuple[int, list[int]]] = {
    # the number of classes, and the class that owns each inducing point
    "one each": (4, [0, 1, 2, 3]),
    "several each": (3, [0, 0, 1, 1, 2, 2]),
    "more for some": (3, [0, 0, 0, 1, 2, 2]),
    "most have none": (9, [2, 2, 5]),
    "one has all": (5, [4, 4, 4]),
    "a single point": (6, [0]),
}


def both_forms(seed: int, owners: str) -> tuple[Latent, Latent, Tensor, list[Tensor]]:
    """The low-rank latent and the dense one, a top class for each row, and the tensors that both are made of: B,
    k(x, x), k(x, Z) and W with a covariance that stays positive, as a process would give them."""
    g, (c, classes) = torch.Generator().manual_seed(seed), OWNERS[owners]
    n, m, z_class = 2 * c, len(classes), torch.tensor(classes)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g)

    coupling = OutputCovariance(c, 2, g)
    with torch.no_grad():
        for parameter in coupling.parameters():
            parameter.add_(normal(*parameter.shape), alpha=0.5)
    k_xz, w = normal(n, m).requires_grad_(), (0.3 * normal(m, m).tril() / m).requires_grad_()
    k_diag = (10.0 + normal(n).square()).requires_grad_()
    present, sizes = z_class.unique(return_counts=True)
    dense = CoupledLatent(coupling, k_diag, k_xz, w, present, sizes.tolist())
    low = LowRankLatent(coupling, k_diag, k_xz, w, z_class, present)
    top = torch.arange(n) % c  # every class is at the top of some row, those without inducing points too
    return low, dense, top, [k_diag, k_xz, w, *coupling.parameters()]


ANSWERS: dict[str, Callable[[Latent, Tensor], Tensor]] = {
    "variance": lambda latent, top: latent.variance,
    "covariance": lambda latent, top: latent.covariance(),
    "difference": lambda latent, top: latent.difference(top),
}


@pytest.mark.parametrize("owners", OWNERS)
@pytest.mark.parametrize("answer", ANSWERS)
def test_low_rank_form_gives_the_numbers_and_gradients_of_the_dense_one(answer, owners):
    for seed in range(3):
        low, dense, top, inputs = both_forms(seed, owners)
        found, expected = (ANSWERS[answer](latent, top) for latent in (low, dense))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert float(expected.detach().diff(dim=0).abs().max()) > 0.01  # the points differ: there is something to get
        if answer == "difference":  # the top class itself: zero, not a rounding of it
            assert not found.gather(-1, top[:, None]).any()
            expected = expected.scatter(-1, top[:, None], 0.0)
        weight = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        grads, same = (torch.autograd.grad((weight * v).sum(), inputs, retain_graph=True) for v in (found, expected))
        for grad, other in zip(grads, same, strict=True):
            torch.testing.assert_close(grad, other, rtol=1e-10, atol=1e-10)


def sparse_folder(folder: Path, rows: int, classes: int = 3) -> Outputs:
    """A mapped folder of so many rows, zeros but for some targets, which takes no room on the disk."""
    widths = {"outputs": ("float32", (classes,)), "targets": ("int64", ()), "features": ("float32", (WIDTH,))}
    folder.mkdir()
    for name, (dtype, width) in widths.items():
        array = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", dtype, (rows, *width))
        if name == "targets":
            array[:5000] = 1  # a second class
        del array
    Manifest(rows, True, {}, {name: np.dtype(row) for name, row in widths.items()}).write(folder)
    return open_outputs(folder)


@pytest.fixture
def rows_read(monkeypatch):
    """Counts the rows taken out of `Outputs`, all in all and for steps."""
    counts, take, read = {"all": 0, "steps": 0}, Outputs.__getitem__, DrawnBatches._read

    def counted(self, rows):
        part = take(self, rows)
        counts["all"] += len(part)
        return part

    def counted_for_steps(self, step, count):
        before = counts["all"]
        part = read(self, step, count)
        counts["steps"] += counts["all"] - before
        return part

    monkeypatch.setattr(Outputs, "__getitem__", counted)
    monkeypatch.setattr(DrawnBatches, "_read", counted_for_steps)
    return counts


@pytest.mark.filterwarnings("ignore:Expected labels of at least two classes", "ignore:Of 3 classes")
@pytest.mark.parametrize("rows", [10_000, 10_000_000])
def test_a_fit_reads_as_many_rows_for_its_steps_however_many_there_are(rows, tmp_path, rows_read):
    steps, batch, m = 2 * MAX_BATCHES + 7, 20, 10
    outputs = sparse_folder(tmp_path / "outputs", rows)
    with Largest() as seen:
        method = FMGP(None, "classification", variance="separable", steps=steps, batch_size=batch, num_inducing=m)
        method.fit(outputs)
    assert rows_read["steps"] == steps * batch
    kernel, sample, passes = 1000, 2000, 100 * 1000  # its length-scale, where k-means starts, and k-means
    again = steps * batch  # the batches, once more, as points
    doubts = 2 * min(rows, ROWS)  # those that tell whether the network has memorised the data, and unused classes
    unit = 6 * (SUITABLE + 1)  # those that logits are measured by, looked at again and again
    most = min(rows, TYPICAL_ROWS) + kernel + sample + passes + rows_read["steps"] + again + doubts + unit
    assert rows_read["all"] <= most
    assert seen.numbers <= max(TYPICAL_ROWS * WIDTH, 1000 * 1000), seen.shape  # or the pairs of the kernel's sample


@pytest.mark.filterwarnings("ignore:Expected labels of at least two classes", "ignore:Of 3 classes")
def test_the_form_of_the_variance_is_chosen_from_some_of_very_many_rows(tmp_path, rows_read, monkeypatch):
    monkeypatch.setattr(selection, "SELECTION", replace(selection.SELECTION, max_rows=3000, enough_rows=500))
    compare, looked_at = selection.compare, []

    def counting(*args):
        before = rows_read["all"]
        found = compare(*args)
        looked_at.append(rows_read["all"] - before)
        return found

    monkeypatch.setattr(selection, "compare", counting)
    outputs = sparse_folder(tmp_path / "outputs", 10_000_000)
    FMGP(None, "classification", steps=3, batch_size=20, num_inducing=5).fit(outputs)
    assert 3000 < looked_at[0] < 1_000_000


STATUS = Path("/proc/self/status")
ROOM = 75 * 10**6
"""Bytes, in which not even one column of ten million numbers in float64 fits."""


def fit_ten_million_rows_in_little_memory(folder: Path) -> None:
    import resource

    torch.set_num_threads(1)
    outputs = sparse_folder(folder, 10_000_000)
    assert outputs.nbytes > 4 * ROOM
    fit = FMGP(None, "classification", steps=20, num_inducing=20).fit
    fit(many(20_000, 3))  # so that libraries, and what does not grow with the rows, have the memory they need
    limit = 1024 * int(STATUS.read_text().split("VmData:")[1].split()[0]) + ROOM
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    fit(outputs)


@pytest.mark.skipif(not STATUS.exists(), reason="/proc tells how much memory is used, and is not here")
def test_ten_million_rows_stay_in_their_file(tmp_path):
    assert end_of(start(fit_ten_million_rows_in_little_memory, tmp_path / "outputs")) == 0
