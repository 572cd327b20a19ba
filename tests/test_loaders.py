"""Every usual way to hand over data gives the fit that a pair of arrays gives, or says what to do."""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from posthoc import FMGP, DataError
from posthoc.collect.loaders import iterate
from posthoc.methods import REGISTRY
from posthoc.methods.weights.network import NetworkBatches, NetworkMethod
from tests.cases import QUICK, WIDTH, N, answers, in_eval, inputs, labels, mlp, numbers, recorded, same, values
from tests.test_network import Encoder, tokens


def regression() -> FMGP:
    return FMGP(mlp(), "regression", **QUICK)


def classification() -> FMGP:
    return FMGP(mlp(3), "classification", **QUICK)


def frame() -> Any:
    return pytest.importorskip("pandas").DataFrame(inputs().numpy(), index=range(N, 0, -1), columns=["a", "b", "c"])


def series(y: Any, **options: Any) -> Any:
    return pytest.importorskip("pandas").Series(y, index=range(N, 0, -1), **options)


PAIRS: dict[str, Callable[[], Any]] = {
    "array and series": lambda: (inputs().numpy(), series(labels().numpy())),
    "tensor and series": lambda: (inputs(), series(labels().numpy())),
    "frame and series": lambda: (frame(), series(labels().numpy())),
    "frame and nullable series": lambda: (frame(), series(labels().numpy(), dtype="Int64")),
    "frame of several types": lambda: (frame().astype({"a": object}), labels()),
    "list": lambda: (inputs(), labels().tolist()),
    "tuple": lambda: (inputs(), tuple(labels().tolist())),
    "numbers of NumPy": lambda: (inputs(), list(labels().numpy())),
    "numbers of PyTorch": lambda: (inputs(), list(labels())),
    "column": lambda: (inputs(), labels()[:, None].tolist()),
    "rows": lambda: (inputs(), list(labels()[:, None])),
    "lists": lambda: (inputs().tolist(), labels().tolist()),
    "in a list": lambda: [inputs(), labels().tolist()],
    "frame in a list": lambda: [frame(), series(labels().numpy())],
    "mapping with lists": lambda: {"input": inputs().tolist(), "labels": labels().tolist()},
    "mapping with tables": lambda: {"input": frame(), "labels": series(labels().numpy())},
    "mapping and labels": lambda: ({"input": inputs()}, labels()),
    "mapping and a list": lambda: ({"input": inputs().numpy()}, labels().tolist()),
    "mapping and labels in a list": lambda: [{"input": inputs()}, labels()],
}


@pytest.mark.parametrize("form", PAIRS)
def test_every_form_of_a_pair_gives_the_same_fit(form: str) -> None:
    data, expected = PAIRS[form](), classification().fit((inputs(), labels()))
    assert same(numbers(classification().fit(data)), numbers(expected))
    if not isinstance(data, list):
        assert torch.equal(expected.predict(data).latent.mean, in_eval(mlp(3), inputs()))
    with_targets = list(expected.stream_with_targets(data))
    assert torch.equal(torch.cat([y for _, y in with_targets]), labels())


def test_rows_may_be_tensors_that_numpy_does_not_know_and_a_frame_alone_is_predicted() -> None:
    y = values().bfloat16()
    found = regression().fit((inputs(), list(y)))
    assert same(numbers(found), numbers(regression().fit((inputs(), y))))
    assert torch.equal(found.predict(frame()).mean, in_eval(mlp(), inputs()))


def test_pairs_are_cut_into_batches() -> None:
    x, y, pd = inputs(300), labels(300), pytest.importorskip("pandas")
    for data in (({"input": x}, y.tolist()), (pd.DataFrame(x.numpy()), pd.Series(y.numpy()))):
        assert [len(read) for _, read in iterate(data, 128)] == [128, 128, 44]


def test_tokens_and_labels_apart_are_understood_as_in_batches() -> None:
    batch = tokens()
    y = batch.pop("labels")
    expected = FMGP(Encoder(), "classification", **QUICK).fit([(batch, y)])
    assert same(numbers(FMGP(Encoder(), "classification", **QUICK).fit((batch, y))), numbers(expected))
    assert same(answers(expected.predict((batch, y))), answers(expected.predict(batch)))


def test_methods_that_run_the_network_take_the_same_pairs() -> None:
    x, y = inputs(), values()

    def fitted(data: Any) -> Any:
        return REGISTRY["mfvi"](mlp(), "regression", steps=3, samples=2).fit(data)  # type: ignore[call-arg]

    expected = fitted((x, y)).predict(x).mean
    for data in (({"input": x}, y), (frame(), y.tolist()), (x.double().numpy(), y.numpy())):
        assert torch.equal(fitted(data).predict(x).mean, expected)
    assert torch.equal(fitted((x, y)).predict(frame()).mean, expected)


def test_methods_that_train_see_pairs_in_a_new_order() -> None:
    method = REGISTRY["mfvi"](mlp(), "regression")
    assert isinstance(method, NetworkMethod)
    y = torch.arange(float(N))
    for data in (({"input": inputs()}, y), {"input": inputs().numpy(), "y": y.numpy()}):
        targets = torch.as_tensor(NetworkBatches(method, data, N, seed=0).block(0, 1).target)
        assert not torch.equal(targets, y)
        assert torch.equal(targets.sort().values, y)


def test_pair_with_something_else_or_rows_of_several_lengths_is_refused() -> None:
    for other in (None, ["cat", "dog"], object(), {"labels": [1]}):
        name = type(other).__name__
        with pytest.raises(DataError, match=rf"pair \(x, y\) of arrays, tables or lists.*got a {name} beside an array"):
            regression().fit((inputs(), other))
    with pytest.raises(DataError, match=r"rows of one length, got some of others.*pad them"):
        regression().fit((inputs(2), [[0.1], [0.2, 0.3]]))


def test_options_in_a_mapping_are_no_rows() -> None:
    class Scaled(nn.Sequential):
        def forward(self, x: Tensor, scale: tuple[float, float], names: list[str]) -> Tensor:  # type: ignore[override]
            return super().forward(x * scale[0] / scale[1])

    data = {"x": inputs(), "scale": (2.0, 1.0), "names": ["a", "b"], "y": values()}
    pred = FMGP(Scaled(*mlp()), "regression", **QUICK).fit(data).predict(data)
    assert torch.equal(pred.mean, in_eval(mlp(), 2.0 * inputs()))


def test_tuple_of_batches_is_no_pair() -> None:
    x, y = inputs(), values()
    halves = ((x[:15], y[:15]), (x[15:], y[15:]))
    for batches in (halves, tuple(map(list, halves)), tuple({"input": each[0], "y": each[1]} for each in halves)):
        assert len(list(iterate(batches, 256))) == 2
    found, expected = (numbers(regression().fit(batches)) for batches in (halves, [(x, y)]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class Rows(Dataset[Any]):
    """A dataset of PyTorch's that can be iterated too."""

    def __init__(self, *columns: Any) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, row: int) -> Any:
        found = tuple(column[row] for column in self.columns)
        return found if len(found) > 1 else found[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))


class Streamed(IterableDataset[Any]):
    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def hugging_face(**columns: Any) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict(columns)


def labelled() -> Any:
    return hugging_face(input=inputs().tolist(), label=labels().tolist())


DATASETS: dict[str, Callable[[], Any]] = {
    "rows": lambda: Rows(inputs(), labels()),
    "rows of NumPy, in float64": lambda: Rows(inputs().double().numpy(), labels().numpy()),
    "rows of lists": lambda: Rows(inputs().tolist(), labels().tolist()),
    "loader": lambda: DataLoader(TensorDataset(inputs(), labels()), batch_size=N),
    "dataset": lambda: TensorDataset(inputs(), labels()),
    "list of batches": lambda: [(inputs(), labels())],
    "iterator": lambda: iter([[inputs(), labels()]]),
    "float64 into a float32 network": lambda: (inputs().double().numpy(), labels().numpy()),
    "outputs": lambda: recorded(mlp(3), inputs(), labels()),
    "mappings": lambda: Rows([{"input": x.tolist(), "label": int(y)} for x, y in zip(inputs(), labels(), strict=True)]),
    "sequence": lambda: UserList(zip(inputs(), labels().tolist(), strict=True)),
    "stream of rows": lambda: DataLoader(Streamed(list(zip(inputs(), labels(), strict=True))), batch_size=N),
    "stream of batches": lambda: DataLoader(Streamed([(inputs(), labels())]), batch_size=None),
    "Hugging Face": lambda: labelled(),
    "Hugging Face, as tensors": lambda: labelled().with_format("torch"),
    "Hugging Face, streamed": lambda: labelled().to_iterable_dataset(),
    "a column of Hugging Face": lambda: (inputs(), hugging_face(label=labels().tolist())["label"]),
}


@pytest.mark.parametrize("form", DATASETS)
def test_every_dataset_is_read_in_batches(form: str) -> None:
    expected = classification().fit((inputs(), labels()))
    assert same(numbers(classification().fit(DATASETS[form]())), numbers(expected))
    assert torch.equal(expected.predict(DATASETS[form]()).latent.mean, in_eval(mlp(3), inputs()))


def test_datasets_without_targets_are_read_in_batches_too() -> None:
    method, rows = regression().fit((inputs(), values())), hugging_face(input=inputs().tolist())
    for data in (Rows(inputs()), rows, rows.to_iterable_dataset()):
        assert torch.equal(method.predict(data).mean, in_eval(mlp(), inputs()))
    assert len(method.predict([(inputs(1), 0.5)])) == 1  # a batch of one row, whose target is a single number


def test_stream_that_could_be_of_rows_or_batches_and_rows_that_cannot_be_stacked_are_refused() -> None:
    for items in (list(zip(inputs(), values(N, WIDTH), strict=True)), [(inputs(), labels())]):
        with pytest.raises(DataError, match=r"may hold either: put the data into a DataLoader.*batch_size=None"):
            list(iterate(Streamed(items), 8))
    for ragged in ([[1], [2, 3]], [torch.ones(1), torch.ones(2)], [None, None]):
        with pytest.raises(DataError, match=r"rows of numbers that can be stacked.*DataLoader with a collate_fn"):
            list(iterate(Rows(ragged, [0, 1]), 8))


@pytest.mark.parametrize(
    "rows",
    [
        list(zip(inputs(), labels(), strict=True)),
        list(zip(inputs(), values(), strict=True)),
        zip(inputs(), labels(), strict=True),
        [{"input": x, "labels": int(y)} for x, y in zip(inputs(), labels(), strict=True)],
        DataLoader(Rows(inputs(), labels()), batch_size=None),
    ],
)
def test_rows_that_nobody_batched_are_refused_before_the_network_sees_them(rows: Any) -> None:
    with pytest.raises(DataError, match=r"Expected batches, got single rows.*put the data into a DataLoader"):
        FMGP(lambda **_: pytest.fail("the network was run"), "classification", **QUICK).fit(rows)


def test_words_beside_the_numbers_reach_the_model_as_they_are() -> None:
    data = hugging_face(text=["a", "b"], input=[[0.1], [0.2]], label=[0, 1])
    (batch,) = iterate(data, 8)
    assert (batch["text"], batch["input"].shape, batch["label"].tolist()) == (["a", "b"], (2, 1), [0, 1])
