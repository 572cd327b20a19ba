"""The user's network is only read: it comes back as it was, and its own answers are the means."""

import itertools
import random
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from posthoc import FMGP, MAP, RBF, DataError, Dropout, LayerError, Linear, Outputs, White
from posthoc.collect.network import Backbone, collect
from tests.cases import QUICK, WIDTH, N, Noisy, answers, in_eval, inputs, labels, mlp, numbers, recorded, same, values


def portrait(model: nn.Module) -> dict[str, Any]:
    """All that must not change, by value."""
    parameters, parts = dict(model.named_parameters()), dict(model.named_modules())
    grads = {f"gradient of {name}": p.grad for name, p in parameters.items() if p.grad is not None}
    tensors = {**parameters, **dict(model.named_buffers()), **grads}
    return {
        "values": {name: tensor.detach().clone() for name, tensor in tensors.items()},
        "parameters": {name: (id(p), p.requires_grad) for name, p in parameters.items()},
        "training": {name: part.training for name, part in parts.items()},
        "hooks": {
            name: [*part._forward_hooks.values(), *part._forward_pre_hooks.values()] for name, part in parts.items()
        },
    }


def assert_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    after = portrait(model)
    assert same(after["values"], before["values"])
    for key in ("parameters", "training", "hooks"):
        assert after[key] == before[key], key


def lived_in() -> Any:
    """A network in use: mixed training flags, a frozen layer, a gradient, hooks of the user's own."""
    model: Any = Noisy().train()
    model.body[0].requires_grad_(False)
    model.body[1].eval()
    model.last.weight.grad = torch.full_like(model.last.weight, 0.25)
    model.last.register_forward_pre_hook(lambda part, args: None)
    for part in (model, model.last):
        part.register_forward_hook(lambda part, args, out: None)
    return model


def fail_at(model: nn.Module, batch: int, error: type[BaseException] = RuntimeError) -> None:
    """Lets a network raise on a batch after so many others."""
    model.register_forward_pre_hook(Mock(side_effect=[None] * batch + [error("the network fell over")]))


def loader(x: Tensor, y: Tensor, size: int = 10) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


@pytest.mark.parametrize("layer", [None, "body.0"])
@pytest.mark.parametrize("cache", [True, False])
def test_network_is_as_it_was_after_fit_and_predict(cache, layer):
    model = lived_in()
    before = portrait(model)
    method = FMGP(model, "regression", cache=cache, layer=layer, **QUICK).fit(loader(inputs(), values()))
    assert_unchanged(model, before)
    method.predict(inputs(7))
    assert_unchanged(model, before)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(("cache", "fails_at"), [(True, 2), (False, 2), (False, 4)])  # 3 batches a pass
def test_network_is_as_it_was_after_an_exception_in_fit(cache, fails_at, error):
    model = lived_in()
    fail_at(model, fails_at, error)
    before, method = portrait(model), FMGP(model, "regression", cache=cache, **QUICK)
    with pytest.raises(error, match="fell over") as kept:  # alive with its traceback, as in a notebook or a logger
        method.fit(loader(inputs(), values()))
    assert_unchanged(model, before)
    assert torch.is_grad_enabled()
    assert type(kept.value) is error
    assert not method.fitted


def test_network_is_as_it_was_after_an_exception_in_predict():
    model = lived_in()
    method = FMGP(model, "regression", **QUICK).fit((inputs(), values()))
    fail_at(model, 1)
    before = portrait(model)
    with pytest.raises(RuntimeError) as kept:
        method.predict(iter(inputs().split(10)))
    assert_unchanged(model, before)
    assert "your model" in kept.value.__notes__[0]
    # The next model runs on its batch; it is the head that refuses the width.
    model = nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Linear(1, 1)).train()
    method = FMGP(model, "regression", kernel=RBF(on="inputs"), **QUICK).fit((inputs(), values()))
    before = portrait(model)
    with pytest.raises(DataError) as kept:
        method.predict(torch.ones(4, WIDTH + 1))
    assert_unchanged(model, before)


def test_buffers_that_the_network_changes_in_eval_mode_are_put_back():
    def count(part, args):
        part.in_place += 1.0
        part.replaced = part.replaced + 1.0

    model = mlp()
    for name in ("in_place", "replaced"):
        model.register_buffer(name, torch.zeros(()))
    model.register_forward_pre_hook(count)
    FMGP(model, "regression", **QUICK).fit((inputs(), values())).predict(inputs(2))
    assert float(model.in_place) == float(model.replaced) == 0.0


@pytest.mark.parametrize("form", ["arrays", "dataset", "outputs", "without a cache"])
def test_global_random_state_is_untouched(form):
    model, x, y = mlp(3), inputs(), labels()
    data = {"dataset": TensorDataset(x, y), "outputs": recorded(model, x, y)}.get(form, (x, y))
    python, state, before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    method = FMGP(model, "classification", cache=form != "without a cache", **QUICK).fit(data)
    method.predict(data).latent.variance  # noqa: B018
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python
    assert np.array_equal(np.random.get_state()[1], state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("task", "outputs", "flat"),
    [("regression", 1, True), ("regression", 1, False), ("regression", 3, False), ("classification", 3, False)],
)
@pytest.mark.filterwarnings("ignore::posthoc.PosthocWarning")  # of half precision; test_bad_input.py has it
def test_mean_is_the_networks_eval_output_to_the_bit(task, outputs, flat, dtype):
    model = Noisy(outputs, flat=flat).to(dtype).train()
    x, y = inputs(dtype=dtype), values(N, outputs) if task == "regression" else labels()
    pred = FMGP(model, task, **QUICK).fit((x, y)).predict(x)
    expected = in_eval(model, x)
    assert expected.shape == ((N,) if flat else (N, outputs))
    assert pred.latent.mean.dtype == dtype
    assert torch.equal(pred.latent.mean, expected)
    assert pred.latent.variance.shape == expected.shape
    assert pred.latent.variance.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not pred.latent.mean.requires_grad


def test_network_runs_once_a_row_with_a_cache_and_at_every_step_without():
    model, rows = mlp(), []
    model.register_forward_hook(lambda part, args, out: rows.append(len(out)))
    options = {"steps": 20, "num_inducing": 4, "batch_size": 5, "eval_every": 1}
    method = FMGP(model, "regression", **options).fit((inputs(), values()), val=(inputs(8), values(8)))
    assert sum(rows) == N + 8
    rows.clear()
    method.predict(inputs(11))
    method.predict(iter(inputs(12).split(5)))
    assert rows == [11, 5, 5, 2]
    rows.clear()
    FMGP(model, "regression", cache=False, steps=7, num_inducing=4).fit(loader(inputs(), values(), 10))
    assert sum(rows) == N + 7 * 10


def test_without_a_cache_fresh_draws_of_the_data_are_seen():
    class Augmented:
        passes = 0

        def __iter__(self):
            self.passes += 1
            yield inputs(seed=self.passes), values()

    data = Augmented()
    once = FMGP(mlp(), "regression", **QUICK).fit(Augmented())
    often = FMGP(mlp(), "regression", cache=False, **QUICK).fit(data)
    assert data.passes >= 1 + QUICK["steps"]
    assert not same(numbers(once), numbers(often))
    with pytest.raises(DataError, match=r"DataLoader.*got an iterator"):
        FMGP(mlp(), "regression", cache=False, **QUICK).fit(iter(loader(inputs(), values())))


def features_of(model: nn.Module, x: Tensor, layer: str | None = None) -> Any:
    return collect(Backbone(model, layer, None), [x], features=True, inputs=False).features


class Recurrent(nn.Module):
    """Has a layer that returns a tuple, and one that is called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.last = nn.GRU(WIDTH, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(x[:, None])
        return self.last(input=2.0 * states[:, -1])


def test_features_are_the_input_of_the_last_linear_or_the_output_of_the_named_layer():
    model, recurrent, x = Noisy(), Recurrent(), inputs()
    parts = {None: model.body, "body.0": model.body[0], "body.2": model.body[:3], "last": model}
    for layer, part in parts.items():
        assert torch.equal(features_of(model, x, layer), in_eval(part, x)), layer
    in_place = nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(inplace=True), nn.Linear(6, 1))
    assert torch.equal(features_of(in_place, x, "0"), in_eval(in_place[0], x))
    states = in_eval(recurrent.gru, x[:, None])[0]
    assert torch.equal(features_of(recurrent, x, "gru"), states.flatten(1))
    assert torch.equal(features_of(recurrent, x), 2.0 * states[:, -1])
    without_linear = nn.Sequential(nn.Conv1d(1, 1, WIDTH), nn.Flatten())
    method = FMGP(without_linear, "regression", **QUICK).fit((x[:, None], values()))
    assert method.head.coordinates.spaces == ["inputs"]


def test_callable_may_return_numpy_and_the_same_buffer_every_time():
    weight, buffer = values(WIDTH, 1).numpy(), torch.zeros(10, 1)
    x, y = inputs().numpy(), values().numpy()
    pred = FMGP(lambda x: np.asarray(x) @ weight, "regression", **QUICK).fit((x, y)).predict(x)
    assert np.array_equal(pred.latent.mean.numpy(), x @ weight)

    reusing = Backbone(lambda batch: buffer.copy_(batch.sum(1, keepdim=True)), None, None)
    fitted_on = collect(reusing, iter(inputs().split(10)), features=False, inputs=False)
    assert torch.equal(fitted_on.outputs, inputs().sum(1, keepdim=True))


class Encoder(nn.Module):
    """In the manner of Hugging Face's sequence classifiers."""

    def __init__(self, answer: Any = SimpleNamespace) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.embedding, self.classifier = nn.Embedding(10, 6), nn.Linear(6, 3)
        self.answer = answer

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        mask = attention_mask[..., None].float()
        pooled = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)
        return self.answer(logits=self.classifier(pooled))


def tokens(n: int = N) -> dict[str, Tensor]:
    mask = torch.ones(n, 5, dtype=torch.long)
    mask[::2, 3:] = 0
    ids = torch.randint(10, (n, 5), generator=torch.Generator().manual_seed(6))
    return {"input_ids": ids, "attention_mask": mask, "labels": labels(n)}


@pytest.mark.parametrize("answer", [SimpleNamespace, dict, namedtuple("Output", ["logits"])])
@pytest.mark.parametrize("form", ["mapping", "loader of mappings", "(mapping, y)", "numpy"])
def test_mappings_in_the_manner_of_hugging_face(form, answer):
    model, batch = Encoder(answer), tokens()
    rows = [{k: v[i] for k, v in batch.items()} for i in range(N)]
    unlabelled = {k: v for k, v in batch.items() if k != "labels"}
    data = {
        "mapping": batch,
        "loader of mappings": DataLoader(rows, batch_size=8),
        "(mapping, y)": [(unlabelled, batch["labels"])],
        "numpy": {k: v.numpy() for k, v in batch.items()},
    }[form]
    method = FMGP(model, "classification", **QUICK).fit(data)
    expected = answer(logits=in_eval(Encoder(lambda logits: logits), **unlabelled))
    logits = expected["logits"] if answer is dict else expected.logits
    torch.testing.assert_close(method.predict(data).latent.mean, logits)
    assert torch.equal(method.predict(unlabelled).latent.mean, logits)
    assert method.head.coordinates.width("features") == 6


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH + 2, 1)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        return self.last(torch.cat([x1, x2], 1))


def test_batches_of_two_inputs_and_a_target():
    model = TwoInputs()
    arrays = (inputs(), values(N, 2), values())
    for data in (arrays, DataLoader(TensorDataset(*arrays), batch_size=7)):
        method = FMGP(model, "regression", **QUICK).fit(data)
        torch.testing.assert_close(method.predict(data).latent.mean, in_eval(model, *arrays[:2]))
    with pytest.raises(DataError, match=r'got tensors of shapes .*on="features"'):
        FMGP(model, "regression", kernel=RBF(on="inputs"), **QUICK).fit(arrays)


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_predictions_of_batch_loader_dataset_and_outputs_agree(task):
    model, x, y = mlp(3), inputs(), values(N, 3) if task == "regression" else labels()
    method = FMGP(model, task, **QUICK).fit((x, y))
    expected = answers(method.predict(x))
    forms = {
        "pair": (x, y),
        "numpy": x.double().numpy(),
        "loader": DataLoader(TensorDataset(x, y), batch_size=7),
        "loader of inputs alone": DataLoader(TensorDataset(x), batch_size=7),
        "dataset": TensorDataset(x, y),
        "generator": (part for part in x.split(4)),
        "outputs": recorded(model, x),
    }
    for name, data in forms.items():
        found = answers(method.predict(data))
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.allclose(found[key], tensor, rtol=1e-5, atol=1e-6), (name, key)


def test_outputs_may_be_of_many_rows_and_arrays_or_lists():
    model, many, x, y = mlp(), inputs(2500), inputs(), values()
    as_tensors = recorded(model, x, y)
    method = FMGP(model, "regression", **QUICK).fit(as_tensors)
    whole, few = method.predict(recorded(model, many)), method.predict(recorded(model, many[2000:2010]))
    assert torch.equal(whole.latent.mean, recorded(model, many).outputs)
    torch.testing.assert_close(whole[2000:2010].latent.variance, few.latent.variance)
    as_arrays = Outputs(as_tensors.outputs.numpy(), y.numpy(), as_tensors.features.numpy())
    assert same(numbers(method), numbers(FMGP(None, "regression", **QUICK).fit(as_arrays)))
    assert Outputs([[0.5], [1.5]], [1, 2]).outputs.shape == (2, 1)


TWO_SPACES = RBF(on="inputs") * (Linear(on="features") + White())


def test_kernel_reads_the_spaces_that_it_is_on():
    model, x = mlp(3), inputs()
    method = FMGP(model, "classification", kernel=TWO_SPACES, **QUICK).fit((x, labels()))
    at = recorded(model, x)
    torch.testing.assert_close(method.predict(at).latent.variance, method.predict(x).latent.variance)
    for features, inputs_ in ((2.0 * at.features, x), (at.features, x + 0.5)):
        moved = method.predict(Outputs(at.outputs, None, features, inputs_)).latent.variance
        assert not torch.allclose(moved, method.predict(at).latent.variance)
    method = FMGP(model, "classification", kernel=RBF(on="outputs"), **QUICK).fit((x, labels()))  # needs neither
    torch.testing.assert_close(method.predict(Outputs(at.outputs)).latent.variance, method.predict(x).latent.variance)


@pytest.mark.parametrize("inducing", ["kmeans", "random", "per_class"])
def test_blocks_of_an_inducing_point_start_from_one_data_point(inducing):
    """Trap 12; the network never sees them, and training moves both blocks."""
    model, x, rows = mlp(3), inputs(), []
    model.register_forward_hook(lambda part, args, out: rows.append(len(out)))
    options = {"kernel": TWO_SPACES, "inducing": inducing, "num_inducing": 5}
    head, trained = (FMGP(model, "classification", **options, steps=n).fit((x, labels())).head for n in (0, 20))
    assert rows == [N, N]
    points, z = head.coordinates.points(recorded(model, x)), dict(head.process.z)
    assert sorted(z) == ["features", "inputs"]
    for at_inputs, at_features in zip(z["inputs"], z["features"], strict=True):
        row = int((points["inputs"] - at_inputs).square().sum(-1).argmin())
        torch.testing.assert_close(points["inputs"][row], at_inputs.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(points["features"][row], at_features.detach(), rtol=1e-5, atol=1e-6)
    assert all((trained.process.z[space] != z[space]).any() for space in z)


def test_threads_do_not_take_each_others_features():
    model, x = mlp().eval(), inputs(400)
    method = FMGP(model, "regression", **QUICK).fit((inputs(), values()))
    parts = [x[start : start + 10] for start in range(0, 400, 10)]
    expected = [method.predict(part) for part in parts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for found, right in zip(pool.map(method.predict, parts), expected, strict=True):
                assert torch.equal(found.latent.variance, right.latent.variance)


def test_streams_in_turns_leave_the_network_as_it_was():
    model = Noisy(2).train()
    method = FMGP(model, "regression", **QUICK).fit((inputs(), values(outputs=2)))
    batches = [inputs(5, seed=seed) for seed in range(3)]
    first, second = (method.stream(iter(batches)) for _ in range(2))
    next(first)
    found = [next(second)]
    first.close()
    found += list(second)
    assert model.training
    for pred, x in zip(found, batches, strict=True):
        assert torch.equal(pred.latent.mean, in_eval(model, x))


def test_heads_and_networks_of_inference_mode_serve_outside_it(tmp_path):
    method = FMGP(mlp(), "regression", **QUICK).fit((inputs(), values()))
    method.save(tmp_path / "head")
    with torch.inference_mode():
        loaded, model, x = FMGP.load(tmp_path / "head", model=mlp()), Noisy(), inputs()
    assert torch.equal(loaded.predict(inputs()).latent.variance, method.predict(inputs()).latent.variance)
    assert FMGP(model, "regression", **QUICK).fit((x, values())).fitted
    assert torch.equal(loaded.predict(x).latent.mean, in_eval(mlp(), inputs()))


def test_single_points_and_lists_of_numbers_are_met_with_advice():
    model = nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    method = FMGP(model, "regression", **QUICK).fit((inputs(), values()))
    with pytest.raises(ValueError, match="expected 2D or 3D input") as caught:
        method.predict(inputs()[0])
    assert f"of shape ({WIDTH},) (torch.float32); a single point must be a batch of one" in caught.value.__notes__[0]
    with pytest.raises(LayerError, match=r"a single point must be a batch of one, x\[None\]"):
        FMGP(mlp(3), "classification", **QUICK).fit((inputs(), labels())).predict(inputs()[0])
    for kind, name in itertools.product((MAP, Dropout), (2, 3)):  # two outputs are not two rows of one score
        network = nn.Sequential(nn.Dropout(0.1), mlp(name))
        with pytest.raises(
            DataError, match=r"\('N', .\) as in fit, got \('N',\); a single point must be a batch of one"
        ):
            kind(network, "classification").fit(inputs(), labels(classes=2)).predict(inputs()[0])
    with pytest.raises(DataError, match=r"got a list of numbers.*np\.asarray\(data, dtype=np\.float32\)"):
        method.predict(inputs().tolist())
