"""The scale of residuals: boosted trees as tensors, its choice on held-out rows, files, and claims of the network."""

import builtins
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from torch import nn

from posthoc import FMGP, Outputs
from posthoc.errors import DataError, OptionError, PosthocError, PosthocWarning
from posthoc.evaluate.metrics import coverage, crps, nll
from posthoc.fmgp.residual_scale import best_scale, cross_fitted
from posthoc.fmgp.trees import Trees
from posthoc.kernels import Matern


def rows(n: int, seed: int, *, sharp: bool = True, unit: float = 1.0, outputs: int = 1) -> Outputs:
    """Residuals whose scale has an edge, or none at all."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 3, generator=draw)
    scale = torch.where((x[:, :1] > 0.6) ^ (x[:, 1:2] > 0.3), 5.0, 0.2) if sharp else torch.ones(n, 1)
    noise = scale * torch.randn(n, outputs, generator=draw)
    mean = x.sum(1, keepdim=True).expand(n, outputs)
    return Outputs(unit * mean, unit * (mean + noise), inputs=x)


def fitted(data: Outputs, **options) -> FMGP:
    return FMGP(None, "regression", **{"progress": False, "num_inducing": 10, "steps": 80, **options}).fit(data)


@pytest.fixture(scope="module")
def sharp() -> FMGP:
    return fitted(rows(900, 0))


# Trees.


@pytest.mark.parametrize("loss", [{}, {"loss": "quantile", "quantile": 0.9}, {"max_leaf_nodes": 2}, {"max_depth": 1}])
@pytest.mark.parametrize("missing", [False, True])
def test_trees_predict_what_scikit_learn_does(loss, missing):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(700, 5))
    x[:, 1] = np.round(x[:, 1])  # ties with thresholds
    x[::7, 2] = np.nan if missing else 0.0
    y = np.sin(3.0 * x[:, 0]) + np.nan_to_num(x[:, 2], nan=2.0) + 0.1 * draw.normal(size=700)
    model = HistGradientBoostingRegressor(max_iter=30, **loss).fit(x[:500], y[:500])
    trees = Trees.from_sklearn(model, torch.from_numpy(x[:500]))
    np.testing.assert_allclose(trees(torch.from_numpy(x)).numpy(), model.predict(x), rtol=0, atol=1e-12)
    loaded = Trees(*trees.shape())
    loaded.load_state_dict(trees.state_dict())
    assert torch.equal(loaded(torch.from_numpy(x)), trees(torch.from_numpy(x)))


def test_trees_of_one_leaf_predict_the_mean():
    x, y = torch.zeros(50, 1), torch.arange(50.0)
    assert Trees.fit(x, y)(x[:2]).tolist() == pytest.approx([24.5, 24.5])


def test_trees_that_predict_something_else_are_refused():
    x = torch.rand(200, 2, dtype=torch.float64)
    model = HistGradientBoostingRegressor(loss="poisson").fit(x.numpy(), x.sum(1).numpy() + 1.0)  # predicts exp(trees)
    with pytest.raises(PosthocError, match=r"predictions differ by .* scale=\"none\""):
        Trees.from_sklearn(model, x)
    del model._predictors
    with pytest.raises(PosthocError, match=r"that posthoc can evaluate, found others .*_predictors"):
        Trees.from_sklearn(model, x)


# The choice.


def test_a_scale_with_edges_is_learned(sharp):
    test = rows(4000, 1)
    plain = fitted(rows(900, 0), scale="none")
    pred, before = sharp.predict(test), plain.predict(test)
    assert "scale of" in str(sharp.selection_)
    assert nll(pred, test.targets) < nll(before, test.targets) - 0.2
    assert crps(pred, test.targets) < 0.97 * crps(before, test.targets)
    for level in (0.5, 0.9):
        band = 2.0 * (level * (1.0 - level) * (1.0 / 900 + 1.0 / 4000)) ** 0.5
        assert float(coverage(pred, test.targets, level)) == pytest.approx(level, abs=1.5 * band)
    assert torch.equal(pred.mean, test.outputs)


def test_where_there_is_nothing_to_learn_nothing_is_lost():
    data, test = rows(900, 0, sharp=False), rows(4000, 1, sharp=False)
    losses = [float(nll(fitted(data, scale=scale).predict(test), test.targets)) for scale in ("auto", "none")]
    assert losses[0] < losses[1] + 0.01


def test_units_of_the_targets_do_not_matter(sharp):
    test = rows(50, 1)
    other, large = fitted(rows(900, 0, unit=1024.0)), rows(50, 1, unit=1024.0)
    assert other.selection_.scale == sharp.selection_.scale
    torch.testing.assert_close(other.predict(large).std, 1024.0 * sharp.predict(test).std, rtol=1e-3, atol=0.0)


def test_the_distance_from_the_data_widens_intervals(sharp):
    near, far = rows(1, 1), rows(1, 1)
    far = Outputs(far.outputs, far.targets, inputs=far.inputs + torch.tensor([0.0, 0.0, 50.0]))
    assert float(sharp.predict(far).std) > 1.2 * float(sharp.predict(near).std)


def test_a_scale_is_predicted_without_the_residual_of_its_row():
    draw = torch.Generator().manual_seed(0)
    x, y = torch.rand(300, 2, generator=draw).double(), 0.1 + torch.rand(300, generator=draw).double()
    folds = list(torch.randperm(300, generator=torch.Generator().manual_seed(0)).tensor_split(3))
    before = cross_fitted(x, y, folds)
    for fold in folds:
        after = cross_fitted(x, y.index_fill(0, fold, 100.0), folds)
        for model, predicted in before.items():
            assert torch.equal(predicted[fold], after[model][fold])
            assert not torch.equal(predicted, after[model])


def test_rows_are_judged_by_a_scale_that_has_not_seen_their_fold():
    data = rows(600, 0)
    residuals = data.targets.double() - data.outputs.double()
    folds = list(torch.randperm(600, generator=torch.Generator().manual_seed(0)).tensor_split(3))
    found = best_scale(data, residuals, folds, boosted=True)
    assert found is not None
    for fold, unseen in zip(folds, found.unseen, strict=True):
        assert torch.equal(unseen[fold], found.log_scale[fold])
        others = torch.ones(600, dtype=torch.bool).index_fill(0, fold, False)
        assert not torch.equal(unseen[others], found.log_scale[others])
        torch.testing.assert_close(unseen[others].mean(), found.log_scale[others].mean())


def test_several_outputs_share_one_scale():
    data = rows(900, 0, outputs=2)
    pred = fitted(data).predict(rows(200, 1, outputs=2), covariance=True)
    assert pred.std.shape == (200, 2)
    torch.testing.assert_close(pred.covariance.diagonal(dim1=1, dim2=2), pred.variance)
    assert float(pred.std.amax() / pred.std.amin()) > 5.0


def test_the_network_is_run_for_inputs_of_few_columns_and_other_kernels_are_kept():
    data = rows(400, 0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    assert network(data.inputs).shape == (400, 1)
    bayes = FMGP(network, "regression", kernel=Matern(), steps=30, num_inducing=5, progress=False)
    with pytest.warns(PosthocWarning, match="squared error can be predicted"):
        bayes.fit(data.inputs, network(data.inputs).detach() + 30.0 * data.inputs[:, :1].square() + data.targets)
    assert type(bayes.kernel) is Matern
    assert bayes.predict(data.inputs).std.shape == (400, 1)
    wide = nn.Sequential(nn.Flatten(), nn.Linear(300, 1))
    x = torch.randn(250, 3, 100)
    FMGP(wide, "regression", steps=5, num_inducing=5, progress=False).fit(x, torch.randn(250, 1))


def test_a_mean_that_can_be_predicted_gives_a_warning():
    data = rows(600, 0, sharp=False)
    off = Outputs(data.outputs, data.targets + 2.0 * (data.inputs[:, :1] > 0.5), inputs=data.inputs)
    with pytest.warns(PosthocWarning, match=r"\d+% of the squared error can be predicted from the inputs"):
        fitted(off, steps=5)


# Without scikit-learn.


@pytest.fixture
def without_sklearn(monkeypatch):
    importing = builtins.__import__
    blocked = lambda name: name.partition(".")[0] == "sklearn"  # noqa: E731

    def refuse(name, *more, **others):
        if blocked(name):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return importing(name, *more, **others)

    monkeypatch.setattr(builtins, "__import__", refuse)
    import importlib

    loading = importlib.import_module
    monkeypatch.setattr("posthoc.optional.import_module", lambda name: refuse(name) if blocked(name) else loading(name))


def test_without_scikit_learn_a_fit_is_as_before_and_says_so(without_sklearn):
    data = rows(300, 0)
    bayes, plain = fitted(data, steps=5), fitted(data, steps=5, scale="none")
    assert torch.equal(bayes.predict(data).std, plain.predict(data).std)
    assert "pip install 'posthoc[scale]'" in str(bayes.selection_)
    with pytest.warns(PosthocWarning, match=r"needs sklearn, which is not installed.*posthoc\[scale\]"):
        fitted(data, steps=5, scale="learned")


def test_a_saved_head_is_loaded_without_scikit_learn(sharp, tmp_path: Path, request):
    test = rows(200, 1)
    expected = sharp.predict(test)
    sharp.save(tmp_path / "head.safetensors")
    request.getfixturevalue("without_sklearn")
    loaded = FMGP.load(tmp_path / "head.safetensors")
    assert torch.equal(loaded.predict(test).std, expected.std)
    assert torch.equal(loaded.predict(test).interval(0.9)[0], expected.interval(0.9)[0])
    assert str(loaded.selection_) == str(sharp.selection_)
    assert loaded.digest() == sharp.digest()


def test_blocks_that_the_scale_read_are_needed(sharp):
    with pytest.raises(DataError, match="inputs"):
        sharp.predict(Outputs(torch.zeros(2, 1)))


# Claims.


def claimed(n, seed):
    data = rows(n, seed)
    size = torch.where((data.inputs[:, :1] > 0.6) ^ (data.inputs[:, 1:2] > 0.3), 5.0, 0.2)
    return Outputs(data.outputs, data.targets, claimed_std=0.5 * size)  # half of what it should be


@pytest.mark.parametrize("scale", ["auto", "claimed"])
@pytest.mark.parametrize("options", [{}, {"n": 150}, {"residuals": "gaussian"}])
def test_a_claimed_deviation_is_a_scale(scale, options, tmp_path):
    options = dict(options)
    n = options.pop("n", 700)
    if scale == "auto" and (options or n < 200):
        pytest.skip("few rows and Gaussian residuals use a claim on request only")
    test = claimed(2000, 1)
    bayes = fitted(claimed(n, 0), scale=scale, **options)
    pred, fit = bayes.predict(test), claimed(n, 0)
    assert "claimed" in str(bayes.selection_)
    assert float(coverage(pred, test.targets, 0.9)) == pytest.approx(0.9, abs=0.05)
    width = (pred.interval(0.9)[1] - pred.interval(0.9)[0]) / (2.0 * 1.645 * test.claimed_std)
    error = ((fit.targets - fit.outputs) / fit.claimed_std).square().mean().sqrt()
    assert float(width.mean()) == pytest.approx(float(error), rel=0.1)
    bayes.save(tmp_path / "head.safetensors")
    assert torch.equal(FMGP.load(tmp_path / "head.safetensors").predict(test).std, pred.std)


def test_means_and_variances_are_taken_apart():
    data = claimed(400, 0)
    both = torch.cat([data.outputs, data.claimed_std.square()], 1)
    bayes = fitted(Outputs(both, data.targets), outputs_are="mean-and-variance", scale="claimed")
    pred = bayes.predict(Outputs(both))
    assert torch.equal(pred.mean, data.outputs)
    torch.testing.assert_close(pred.std, fitted(data, scale="claimed").predict(data).std)
    network = nn.Identity()
    again = FMGP(network, "regression", outputs_are="mean-and-variance", scale="claimed", steps=5, num_inducing=5)
    assert again.fit(both, data.targets).predict(both).mean.shape == (400, 1)


def test_claims_that_cannot_be_are_refused():
    data = rows(300, 0)
    with pytest.raises(DataError, match=r'claimed_std for scale="claimed"'):
        fitted(data, scale="claimed")
    with pytest.raises(DataError, match="claimed_std above zero for every output"):
        Outputs(data.outputs, claimed_std=torch.zeros(300, 1))
    with pytest.raises(DataError, match="claimed_std above zero for every output"):
        Outputs(data.outputs, claimed_std=torch.ones(300, 2))
    with pytest.raises(DataError, match=r"C means, then C variances above zero; got shape \(300, 1\)"):
        fitted(data, outputs_are="mean-and-variance")
    with pytest.raises(OptionError, match="option for regression, got 'mean-and-variance'"):
        FMGP(None, "classification", outputs_are="mean-and-variance")
    with pytest.raises(OptionError, match="scale is an option for regression"):
        FMGP(None, "classification", scale="none")


def test_the_claims_of_solvation_cover_what_they_say_after_a_fit():
    folder = os.environ.get("POSTHOC_DATA")
    if not folder or not (path := Path(folder) / "solvation" / "all.npz").exists():
        pytest.skip("POSTHOC_DATA does not name a folder with solvation/all.npz")
    with np.load(path) as file:
        data = Outputs(file["outputs"], file["targets"], claimed_std=file["claimed_std"])
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    fit, test = data[order[:321]], data[order[321:]]
    pred = fitted(fit, steps=None).predict(test)
    assert float(coverage(pred, test.targets, 0.95)) == pytest.approx(0.95, abs=2.0 * (0.95 * 0.05 * 2 / 321) ** 0.5)
