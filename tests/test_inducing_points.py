"""Starting places of inducing points."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from posthoc import FMGP, Outputs, PosthocWarning
from posthoc.fmgp import selection
from posthoc.fmgp.inducing_points import distinct, initial_inducing, kmeans, per_class, random_points


class Rows:
    """A source over given blocks."""

    def __init__(self, targets=None, **blocks):
        self.blocks = blocks
        self.outputs = SimpleNamespace(targets=targets)
        self.coordinates = SimpleNamespace(device=torch.device("cpu"))

    def __len__(self):
        return len(next(iter(self.blocks.values())))

    def points(self, rows):
        return {k: v[rows] for k, v in self.blocks.items()}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_kmeans_finds_separate_clusters():
    centers = torch.cartesian_prod(*torch.tensor([[0.0, 10.0]] * 2, dtype=torch.float64))
    noise = torch.randn(800, 2, dtype=torch.float64, generator=seeded())
    x = (centers.repeat_interleave(200, 0) + 0.5 * noise)[torch.randperm(800, generator=seeded(1))]
    found = kmeans(Rows(features=x), 4, seeded())["features"]
    assert torch.cdist(centers, found).amin(1).max() < 0.2


def test_kmeans_spreads_less_than_random_rows():
    x = torch.randn(3000, 2, dtype=torch.float64, generator=seeded())
    inertia = [
        float(torch.cdist(x, choose(Rows(features=x), 30, seeded())["features"]).amin(1).square().sum())
        for choose in (kmeans, random_points)
    ]
    assert inertia[0] < 0.8 * inertia[1]


def test_same_seed_same_points_and_duplicates_do_no_harm():
    x = torch.ones(50, 3, dtype=torch.float64)
    x[0] = 2.0
    a, b = (kmeans(Rows(features=x), 5, seeded())["features"] for _ in range(2))
    assert torch.equal(a, b)
    assert a.isfinite().all()
    for choose in (kmeans, random_points):  # more points than rows are the rows
        assert sorted(choose(Rows(features=x), 60, seeded())["features"].tolist()) == sorted(x.tolist())


@pytest.mark.parametrize("task", ["regression", "classification"])
@pytest.mark.parametrize("inducing", ["kmeans", "random"])
@pytest.mark.parametrize(("m", "warns"), [(200, 0), (300, 1)])
def test_only_the_fit_that_is_kept_warns_of_fewer_points(task, inducing, m, warns, monkeypatch):
    """Fits on parts of the rows, which there are in both tasks, have fewer rows than were asked for."""
    g, compare = seeded(), selection.compare
    outputs, features = torch.randn(250, 2, generator=g), torch.randn(250, 3, generator=g)
    y = features[:, :2] * torch.randn(250, 2, generator=g) if task == "regression" else torch.arange(250) % 2

    def compared(job, forms, *more):
        found = compare(job, forms, *more)  # of classes, temperature scaling, which has a single inducing point
        return selection.Selection(forms[0], "") if task == "classification" else found

    monkeypatch.setattr(selection, "compare", compared)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PosthocWarning)
        bayes = FMGP(None, task, inducing=inducing, num_inducing=m, steps=60, lr=0.05)
        bayes.fit(Outputs(outputs, y, features))
    assert len(bayes.head.process.l_raw) == min(m, 250)
    told = [str(w.message) for w in caught if "inducing points" in str(w.message)]
    assert told == [f"Asked for {m} inducing points but there are only 250 data points: using 250."] * warns


def test_per_class_points_belong_to_the_class_of_their_row():
    x = torch.arange(60, dtype=torch.float64)[:, None]
    y = torch.tensor([0] * 50 + [1] * 8 + [3] * 2)  # uneven, and class 2 is missing
    found = per_class(Rows(y, features=x), 20, seeded())
    assert torch.equal(y[found.z["features"].squeeze(1).long()], found.z_class)
    assert found.z_class.bincount(minlength=4).tolist() == [10, 8, 0, 2]
    assert len(per_class(Rows(y, features=x), 2, seeded()).z_class.unique()) == 2


def test_random_classes_are_even_and_cover_what_they_can():
    def owners(m, num_outputs):
        x = torch.randn(50, 2, dtype=torch.float64, generator=seeded())
        return initial_inducing("random", None, m, Rows(features=x), num_outputs, seeded()).z_class

    assert owners(10, 4).bincount(minlength=4).max() == 3
    assert len(owners(3, 10).unique()) == 3


@pytest.mark.parametrize(("n", "m"), [(10, 10), (100, 7), (10**7, 50)])
def test_distinct_rows_are_distinct(n, m):
    rows = distinct(n, m, seeded())
    assert len(rows.unique()) == m
    assert int(rows.max()) < n


def test_given_points_are_used_in_the_users_units():
    features = 100.0 + 7.0 * torch.randn(40, 3)
    outputs = Outputs(torch.randn(40, 2), torch.randn(40, 2), features)
    bayes = FMGP(None, "regression", inducing=features[:5], inducing_classes=[0, 1, 0, 1, 1], steps=0).fit(outputs)
    process, coordinates = bayes.head.process, bayes.head.coordinates
    expected = coordinates.standardize({"features": features[:5]})["features"]
    torch.testing.assert_close(process.z["features"].detach(), expected[[0, 2, 1, 3, 4]])
    assert process.z_class.tolist() == [0, 0, 1, 1, 1]
